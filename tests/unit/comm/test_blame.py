"""Who failed first, by the notes of failing ranks."""

import threading

from torch.distributed import HashStore

from shardwright.comm.blame import Blame


def blames(count):
    store = HashStore()
    return [Blame(store, rank=rank) for rank in range(count)]


def test_the_first_cause_is_found_along_the_notes():
    ranks = blames(4)
    ranks[1].confess(ValueError("boom"))
    ranks[2].confess(RuntimeError("gone"), lost_peer=1)
    found = ranks[3].first_cause(2)
    assert (found.rank, found.text) == (1, "ValueError: boom")


def test_a_rank_without_a_note_died_without_a_word():
    ranks = blames(3)
    ranks[1].confess(RuntimeError("gone"), lost_peer=2)
    found = ranks[0].first_cause(1, patience_s=0.0)
    said = "it left without a word: killed, out of memory, hanging, out of reach, or at the end of its script"
    assert (found.rank, found.text) == (2, said)


def test_where_no_rank_is_named_those_are_that_say_nothing():
    ranks = blames(4)
    ranks[0].confess(RuntimeError("connection closed"), is_loss=True)
    ranks[1].confess(RuntimeError("gone"), lost_peer=2)
    assert [note.rank for note in ranks[0].suspects(4, patience_s=0.0)] == [2, 3]
    ranks[3].confess(ValueError("boom"))
    assert [note.text for note in ranks[0].suspects(4, patience_s=0.0)] == ["ValueError: boom"]


def test_a_store_that_is_gone_does_no_harm():
    class Gone:
        def delete_key(self, *_):
            raise RuntimeError("Connection reset by peer")

        set = get = check = delete_key

    blame = Blame(Gone(), rank=0)
    blame.begin()
    blame.confess(ValueError("boom"))


def test_a_store_that_cannot_be_reached_is_not_waited_for(monkeypatch):
    """Ranks whose host had lost its link to the store's host waited for the store for ever."""
    monkeypatch.setattr("shardwright.comm.blame._LONGEST_ANSWER_S", 0.05)
    end = threading.Event()

    class Unreachable:
        num_asked = 0

        def check(self, *_):
            Unreachable.num_asked += 1
            end.wait()

        set = get = delete_key = check

    blame = Blame(Unreachable(), rank=0)
    blame.confess(ValueError("boom"))
    assert "without a word" in blame.first_cause(1).text
    assert Unreachable.num_asked == 1
    end.set()


def test_a_rank_that_takes_no_further_step_keeps_its_first_note():
    ranks = blames(2)
    ranks[1].confess(ValueError("a batch that is too small"))
    assert not ranks[0].has_stopped(1)
    ranks[1].stop()
    ranks[1].confess(ValueError("boom"))
    ranks[1].begin()
    ranks[1].confess(RuntimeError("an earlier step failed"))
    assert ranks[0].has_stopped(1)
    assert ranks[0].first_cause(1).text == "ValueError: boom"


def test_a_process_that_has_ended_is_not_waited_for():
    """Each death cost its survivors a second, in which it might have said something."""
    ranks = blames(4)
    ranks[0].has_ended = {2, 3}.__contains__
    ranks[3].confess(ValueError("boom"))
    assert ranks[0].first_cause(2, patience_s=1e9).is_silent
    assert ranks[0].first_cause(3, patience_s=1e9).text == "ValueError: boom"
    ranks[3].begin()
    assert [note.rank for note in ranks[0].suspects(4, patience_s=1e9)] == [2, 3]
