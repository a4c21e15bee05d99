"""Ranks that wait for others in vain say which ones, and where these are."""

import gc
import queue
import threading
import time
import weakref
from dataclasses import replace
from types import SimpleNamespace

import pytest
from torch.distributed import HashStore

from shardwright.comm import missing_ranks, whereabouts
from shardwright.comm.meeting_place import JointCall, MeetingPlace, Note
from shardwright.comm.missing_ranks import MissingRanks, Terms
from shardwright.comm.roll_call import Call, RollCall
from shardwright.comm.whereabouts import Whereabouts
from shardwright.errors import PeerLostError, PeerTimeoutError, UsageError


class Ranks:
    """Some ranks, all of them in this process."""

    def __init__(self, count, *, patience_s=10.0, timeout_s=20.0):
        store = HashStore()
        self.told = []
        self.at = [Whereabouts(store, rank=rank) for rank in range(count)]
        self.calls = [
            RollCall(
                store,
                at,
                rank=rank,
                patience_s=patience_s,
                timeout_s=timeout_s,
                local=None,
                tell=self.told.append,
            )
            for rank, at in enumerate(self.at)
        ]

    def meet(self, rank, where="model.state_dict()", ranks=None):
        self.calls[rank].meet(where, range(len(self.calls)) if ranks is None else ranks)


def all_at_once(*jobs):
    """Runs them in threads; returns what each raised."""
    errors = [None] * len(jobs)

    def run(number, job):
        try:
            job()
        except Exception as error:
            errors[number] = error

    threads = [threading.Thread(target=run, args=each) for each in enumerate(jobs)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return errors


def test_keys_at_the_store_do_not_pile_up():
    ranks = Ranks(2)
    store = ranks.at[0]._store
    before = store.num_keys()
    for _ in range(20):
        all_at_once(lambda: ranks.meet(0), lambda: ranks.meet(1))
    assert store.num_keys() - before <= 4


def test_a_rank_in_another_common_call_will_not_come():
    ranks = Ranks(3)
    with ranks.at[2].inside("the step function train", range(3)):
        ranks.at[2].publish()
        started = time.monotonic()
        for error in all_at_once(lambda: ranks.meet(0), lambda: ranks.meet(1)):
            assert isinstance(error, UsageError)
            assert "model.state_dict() is to be called by all of ranks 0 to 2" in str(error)
            assert "Rank 2 has not come" in str(error)
            assert "rank 2 is in the step function train" in str(error)
        assert time.monotonic() - started < 10  # the patience of those who wait for one that may come


def test_two_calls_that_cross_are_both_named():
    ranks = Ranks(2)
    first, second = all_at_once(lambda: ranks.meet(0), lambda: ranks.meet(1, "smp.save()"))
    assert "rank 1 is in smp.save()" in str(first)
    assert "rank 0 is in model.state_dict()" in str(second)


def test_a_rank_that_is_behind_is_waited_for():
    """One that is still in the call before is slow, and nothing else."""
    ranks = Ranks(2, patience_s=0.6)
    with ranks.at[0].inside("the step function train", range(2)):
        pass

    def slow():
        with ranks.at[1].inside("the step function train", range(2)):
            ranks.at[1].publish()
            time.sleep(1.5)
        ranks.meet(1)

    assert all_at_once(lambda: ranks.meet(0), slow) == [None, None]
    (text,) = ranks.told
    assert "Rank 1 has not come" in text
    assert "is in the step function train" in text


def test_a_rank_in_a_call_of_other_ranks_is_waited_for():
    ranks = Ranks(3, patience_s=0.6)

    def detour():
        with ranks.at[2].inside("model.state_dict()", (2, 7)):
            ranks.at[2].publish()
            time.sleep(1.5)
        ranks.meet(2, "sw.barrier()")

    meet = [lambda rank=rank: ranks.meet(rank, "sw.barrier()") for rank in range(2)]
    assert all_at_once(*meet, detour) == [None] * 3
    assert len(ranks.told) == 1  # by the first of those that wait


@pytest.mark.parametrize("why", ["has come to the end of its script", "has called sw.shutdown()"])
def test_a_rank_that_has_ended_will_not_come(why):
    ranks = Ranks(2)
    ranks.at[1].watch()
    ranks.at[1].close(why)
    with pytest.raises(UsageError, match=r"Rank 1 has not come") as caught:
        ranks.meet(0)
    assert f"rank 1 {why}" in str(caught.value)


def test_after_the_timeout_the_missing_are_named():
    ranks = Ranks(3, patience_s=0.3, timeout_s=1.0)
    errors = all_at_once(lambda: ranks.meet(0), lambda: ranks.meet(2))
    assert all(isinstance(error, PeerTimeoutError) and error.rank == 1 for error in errors)
    assert all("Rank 1 has not come within 1 s: rank 1 has said nothing" in str(e) for e in errors)


def test_a_store_that_is_gone_is_the_loss_of_a_peer():
    ranks = Ranks(2)

    class Gone:
        def add(self, *_):
            raise RuntimeError("Connection reset by peer")

    ranks.calls[0]._store = Gone()
    with pytest.raises(PeerLostError, match="the job's store does not answer"):
        ranks.meet(0)


def test_a_rank_that_does_not_get_on_leaves_notes_by_itself(monkeypatch):
    monkeypatch.setattr(whereabouts, "_STUCK_S", 0.2)
    monkeypatch.setattr(whereabouts, "_TICK_S", 0.1)
    store = HashStore()
    here, there = (Whereabouts(store, rank=rank) for rank in range(2))
    there.watch()
    with there.inside("the step function train", (0, 1)):
        deadline_s = time.monotonic() + 10
        while here.of(1) is None and time.monotonic() < deadline_s:
            time.sleep(0.05)
    there.close("has come to the end of its script")
    assert here.of(1).ended == "has come to the end of its script"


def test_the_first_step_says_nothing_of_how_long_steps_take(monkeypatch):
    """Where ranks made few calls together, it kept a lone collective from being named for a second more."""
    now_s, usual_s = [0.0], queue.SimpleQueue()

    def monotonic():
        now_s[0] += 0.001
        return now_s[0]

    class Looks:
        def look(self, mine, usual):
            usual_s.put(usual)
            return ""

    monkeypatch.setattr(whereabouts, "_STUCK_S", 0.0)
    monkeypatch.setattr(whereabouts, "_TICK_S", 0.1)
    monkeypatch.setattr(whereabouts, "time", SimpleNamespace(monotonic=monotonic))
    rank = Whereabouts(HashStore(), rank=0, stalls=lambda said: Looks())
    for step in range(1, 5):
        with rank.inside("the step function train", (0, 1)):
            now_s[0] += 100 if step == 1 else 0.5
            rank.steps = step
    rank.watch()
    with rank.inside("the step function train", (0, 1)):
        assert 0 < usual_s.get(timeout=30) < 1
    rank.close("has come to the end of its script")


WAITING = JointCall("all_reduce", (0, 1), group="0", number=4)


def looking(ranks):
    """Of rank 0, for rank 1."""
    return MissingRanks(
        MeetingPlace("save", (0, 1), 1),
        Terms("save is needed", "Save."),
        ranks.at[0],
        rank=0,
        patience_s=10.0,
        tell=ranks.told.append,
        absent=lambda: [1],
    )


def test_a_collective_of_torch_must_be_there_for_long(monkeypatch):
    monkeypatch.setattr(missing_ranks, "collectives_made", lambda name, ranks: 3)
    look = looking(Ranks(2))._will_not_come
    at = {"place": None, "line": "train.py:7", "joint": WAITING}
    seen = [look(1, Note(seconds=seconds, **at)) for seconds in (50.0, 50.0, 51.0, 52.0)]
    assert seen == [False, False, False, True]
    elsewhere = {**at, "line": "train.py:9"}
    assert not look(1, Note(seconds=54.0, **elsewhere))
    assert not look(1, Note(seconds=1.0, **elsewhere))  # it has got on since
    of_others = {**at, "joint": replace(WAITING, ranks=(1, 2))}
    assert not any(look(1, Note(seconds=s, **of_others)) for s in (60.0, 70.0))


@pytest.mark.parametrize("own", [4, 5, None])
def test_a_collective_that_this_rank_has_begun_proves_nothing(own, monkeypatch):
    """It may wait for it later: others are late for it, or nobody counts."""
    monkeypatch.setattr(missing_ranks, "collectives_made", lambda name, ranks: own)
    look = looking(Ranks(2))._will_not_come
    at = {"place": None, "line": "train.py:7", "joint": WAITING}
    assert not any(look(1, Note(seconds=seconds, **at)) for seconds in (50.0, 60.0, 70.0))


def test_the_rank_that_looks_finds_what_only_another_one_is_missed_by(monkeypatch):
    """It looked for itself alone: the others waited for their timeout."""
    monkeypatch.setattr(missing_ranks, "_TAKE_OVER_S", 1.0)
    ranks = Ranks(4)
    with ranks.at[3].inside("model.state_dict()", (2, 3)):
        ranks.at[3].publish()
        errors = all_at_once(*(lambda r=r: ranks.meet(r, "sw.barrier()") for r in range(3)))
    assert all("rank 3 is in model.state_dict()" in str(error) for error in errors)


def test_a_call_that_failed_on_one_rank_alone_makes_no_false_proof():
    """It was counted there, and not on the others: from then on their counts differ."""
    ranks = Ranks(2, patience_s=0.6)
    with pytest.raises(KeyError), ranks.at[1].inside("the step function train", range(2)):
        raise KeyError
    with ranks.at[0].inside("the step function train", range(2)):
        pass

    def slow():
        with ranks.at[1].inside("the step function train", range(2)):
            ranks.at[1].publish()
            time.sleep(1.5)
        ranks.meet(1)

    assert all_at_once(lambda: ranks.meet(0), slow) == [None, None]
    assert len(ranks.told) == 1


def test_a_process_that_a_rank_has_started_does_not_come_for_it(monkeypatch):
    ranks = Ranks(2)
    monkeypatch.setattr(ranks.calls[0], "_process_id", 1)
    with pytest.raises(UsageError, match=r"which rank 0 has started .*Call it in the script's own process"):
        ranks.meet(0)
    assert ranks.at[0]._counts == {}
    ranks.calls[0].meet("save", (0,))  # with nobody else


def test_more_ranks_than_bits_of_a_number_meet():
    count = 130
    ranks = Ranks(count)
    ranks.calls[125]._whereabouts.publish()
    for _ in range(2):
        assert all_at_once(*(lambda r=r: ranks.meet(r) for r in range(count))) == [None] * count


def test_many_ranks_have_one_look_and_fail_with_one_decision():
    """Each looked for itself, so that the store was asked for the square of their number."""
    count = 70
    ranks = Ranks(count)
    with ranks.at[69].inside("the step function train", range(count)):
        ranks.at[69].publish()
        looks = []
        for at in ranks.at:
            of = at.of
            at.of = lambda rank, of=of: (looks.append(rank), of(rank))[1]
        errors = all_at_once(*(lambda r=r: ranks.meet(r) for r in range(count - 1)))
    assert {str(error) for error in errors} == {str(errors[0])}
    assert "rank 69 is in the step function train" in str(errors[0])
    assert len(looks) < count


def test_a_sender_and_a_receiver_meet_by_one_name():
    ranks = Ranks(2)
    terms = Terms("smp.send() on rank 0 needs smp.recv_from() on rank 1", "Take it.")

    def call(rank, where):
        ranks.calls[rank].meet_each([Call(where, (0, 1), name="an object", terms=terms)])

    assert all_at_once(lambda: call(0, "smp.send()"), lambda: call(1, "smp.recv_from()")) == [None] * 2
    first, _ = all_at_once(lambda: call(0, "smp.send()"), lambda: ranks.meet(1))
    assert "smp.send() on rank 0 needs smp.recv_from() on rank 1" in str(first)
    assert "rank 1 is in model.state_dict()" in str(first)


class LostPeers:
    """Ways to the ranks of a host, of which one ends while it is told that this rank has come, or later."""

    def __init__(self, *, ends_at_once):
        self._ends_at_once = ends_at_once

    def __contains__(self, rank):
        return True

    def send(self, tensor, target, purpose):
        if self._ends_at_once:
            raise PeerLostError(f"rank {target} has ended", rank=target)

    def post(self, tensor, source, purpose):
        return None

    def wait(self, receipt, source, look):
        raise PeerLostError(f"rank {source} has ended", rank=source)


class Data:
    """Something large in a variable of the script."""


@pytest.mark.parametrize("ends_at_once", [True, False])
def test_a_call_that_failed_is_remembered_without_what_the_script_had(ends_at_once):
    """Its error kept the script's frames, with all tensors; and none was kept where it failed at once."""
    calls = Ranks(3).calls[0]
    calls._local = LostPeers(ends_at_once=ends_at_once)

    def script():
        data = Data()
        with pytest.raises(PeerLostError, match="rank 1"):
            calls.meet_each([Call("sw.barrier()", (0, 1)), Call("sw.barrier()", (0, 2))])
        return weakref.ref(data)

    data = script()
    gc.collect()
    assert data() is None
    for ranks in [(0, 1), (0, 2)]:  # rank 2, too, may have heard that this one has come
        with pytest.raises(UsageError, match=r"The failure was PeerLostError: .*rank 1"):
            calls.meet("sw.barrier()", ranks)
