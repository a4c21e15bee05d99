"""Who failed first, by the notes of failing ranks.

Which rank the others wait for, and when a wait can never end.

Values that a rank puts up, and others take.
"""

import threading
from dataclasses import replace
from typing import Any

import pytest
from torch.distributed import HashStore

from shardwright.comm.blame import Blame
from shardwright.comm.joining.run_secret import ForgedError
from shardwright.comm.joining.store import ValueBoard
from shardwright.comm.meeting_place import JointCall, MeetingPlace, Note
from shardwright.comm.whereabouts import Stalls, pause_s
from shardwright.errors import UsageError


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


STEP = MeetingPlace("the step function train", (0, 1, 2), 3)
REDUCE = JointCall("all_reduce", (0, 1, 2), "world", 4)


def waiting(still_s=10.0, *, place=STEP, joint=None):
    return Note(place=place, joint=joint, line="train.py:20", waits=True, seconds=still_s, still_s=still_s)


def sleeping(still_s=10.0, *, place=None):
    stack = '  File "data.py", line 31, in load\n    time.sleep(60)'
    return Note(place=place, line="data.py:31", seconds=still_s, still_s=still_s, stack=stack)


class Ranks:
    """The notes of three ranks, which grow older together."""

    def __init__(self, *notes):
        self.notes = list(notes)
        self.told = []
        self.stalls = [Stalls(rank, 10.0, self.said, self.told.append) for rank in range(len(notes))]

    def said(self, rank):
        return self.notes[rank]

    def look(self, times=3):
        """Why each rank is to end, after so many looks."""
        ends = ["" for _ in self.notes]
        for _ in range(times):
            for rank, stalls in enumerate(self.stalls):
                if self.notes[rank] is None:
                    continue
                ends[rank] = ends[rank] or stalls.look(self.notes[rank])
            self.notes = [
                note and replace(note, seconds=note.seconds + 2, still_s=note.still_s + 2)
                for note in self.notes
            ]
        return ends


def test_a_rank_that_sleeps_is_named_once_with_its_stack():
    ranks = Ranks(waiting(), sleeping(), waiting())
    assert ranks.look() == ["", "", ""]
    assert ranks.told == [
        "rank 1 has been at data.py:31 for 12 s; ranks 0, 2 wait for it in the step function train. "
        "Its stack:\n"
        '  File "data.py", line 31, in load\n    time.sleep(60)'
    ]


def test_it_is_named_before_the_patience_is_over():
    ranks = Ranks(waiting(4.0), sleeping(4.0), waiting(4.0))
    ranks.look(times=2)
    assert ranks.told == []
    ranks.look(times=1)
    assert "rank 1 has been at data.py:31 for 8 s" in ranks.told[0]


@pytest.mark.parametrize(
    "note", [None, replace(sleeping(), still_s=1.0), waiting(), replace(sleeping(), ended="ended")]
)
def test_a_rank_that_works_or_waits_is_not_named(note):
    """One that computes is never long at the same lines."""
    ranks = Ranks(waiting(), sleeping(), waiting())
    for _ in range(4):
        ranks.notes = [waiting(20.0), note, waiting(20.0)]
        ranks.stalls[0].look(ranks.notes[0])
    assert ranks.told == []


@pytest.mark.parametrize(("usual_s", "named_at_s"), [(0.2, 3), (1.5, 4), (9.0, 8)])
def test_where_steps_are_short_it_is_named_soon(usual_s, named_at_s):
    """Three times the usual, three seconds at least; ten at most, less a fifth, as a look comes each two."""
    ranks, second = Ranks(waiting(1.0), sleeping(1.0), waiting(1.0)), 0
    while not ranks.told:
        second += 1
        ranks.stalls[0].look(ranks.notes[0], usual_s)
        ranks.notes = [replace(n, seconds=n.seconds + 1, still_s=n.still_s + 1) for n in ranks.notes]
    assert second == named_at_s


def test_a_collective_that_others_wait_for_elsewhere_ends():
    alone = waiting(place=None, joint=REDUCE)
    ends = Ranks(alone, waiting(), waiting()).look()
    assert ends[1:] == ["", ""]
    assert ends[0].startswith(
        "rank 0 waits in torch.distributed.all_reduce (train.py:20) for rank 1, 2, which waits for rank 0: "
        "rank 1 is in the step function train (train.py:20)"
    )


def test_a_collective_waits_for_a_rank_that_sleeps_or_says_nothing():
    alone = waiting(place=None, joint=REDUCE)
    for other in (sleeping(), None):
        assert Ranks(alone, waiting(), other).look(times=9) == ["", "", ""]


def test_a_rank_that_has_left_the_call_of_the_others_does_not_end():
    """Bug: out of model.state_dict() first, it ended in its barrier: others had large messages under way."""
    alone = replace(waiting(place=None, joint=REDUCE), counts=((STEP.ranks, STEP.number),))
    assert Ranks(alone, waiting(), waiting()).look(times=9) == ["", "", ""]
    failed_there = replace(alone, counts_hold=False)
    before = replace(alone, counts=((STEP.ranks, STEP.number - 1),))
    for other in (failed_there, before):
        assert Ranks(other, waiting(), waiting()).look()[0].startswith("rank 0 waits in torch.distributed")


def test_who_names_a_late_rank_looks_as_often_however_many_wait():
    """Bug: of 1024 ranks each looked every 32 s, twice before it told; and so did the late one's own note."""

    def pauses(number, note=waiting):
        place = replace(STEP, ranks=tuple(range(number)))
        return [pause_s(rank, note(place=place)) for rank in (0, min(63, number - 1), number - 1)]

    assert [pauses(number) for number in (2, 32, 64)] == [[0.5, 0.5, 0.5], [1, 1, 1], [2, 2, 2]]
    assert [pauses(number) for number in (256, 1024)] == [[2, 2, 8], [2, 2, 32]]
    assert pauses(1024, sleeping) == [1, 1, 1]


def test_ranks_that_wait_for_a_message_of_the_step_do_not_end():
    """A large message on a slow network takes long, and both ends wait."""
    assert Ranks(waiting(), waiting(), waiting()).look(times=9) == ["", "", ""]


ABSENT = UsageError("not put up")


def boards(
    *, has_ended: Any = lambda rank: False, timeout_s: float = 10.0
) -> tuple[Any, ValueBoard, ValueBoard]:
    """The store, and the boards of two ranks in their first batch."""
    store = HashStore()
    made = [ValueBoard(store, (4, 7), rank=r, has_ended=has_ended, timeout_s=timeout_s) for r in (0, 1)]
    for board in made:
        board.begin()
    return store, made[0], made[1]


@pytest.mark.parametrize("size", [0, 1, 5, 4 * 2**20, 4 * 2**20 + 1, 9 * 2**20])
def test_a_value_is_taken_as_it_was_put_up(size: int) -> None:
    _, one, other = boards()
    value = bytes(range(256)) * (size // 256) + b"\n" * (size % 256)
    one.put("a", value)
    assert other.get(["b", "a"], 0, ABSENT) == ("a", value)


def test_what_will_not_come_is_not_waited_for() -> None:
    _, one, other = boards()
    with pytest.raises(UsageError, match="not put up"):
        other.get(["a"], 0, ABSENT, is_late=True)
    one.done()
    one.tell()
    with pytest.raises(UsageError, match="not put up"):
        other.get(["a"], 0, ABSENT)


def test_a_mark_that_no_rank_has_made() -> None:
    """It ended in "invalid literal for int()", out of a step."""
    store, _, other = boards()
    store.set("done/0", b"garbage")
    with pytest.raises(ForgedError, match="how far rank 4 is stands in the run's store in a form"):
        other.get(["a"], 0, ABSENT)


def test_a_batch_leaves_nothing() -> None:
    """But for marks, which the next batch overwrites."""
    store, one, other = boards()
    sizes = []
    for _ in range(2):
        one.put("a", b"x" * (9 * 2**20))
        for board in (one, other):
            board.mark("passed 0")
            board.done()
            board.tell()
            board.clear()
            board.begin()
        sizes.append(store.num_keys())
    assert sizes == [4, 4]
    with pytest.raises(UsageError):
        other.get(["a"], 0, ABSENT, is_late=True)
