"""Which rank the others wait for, and when a wait can never end."""

from dataclasses import replace

import pytest

from shardwright.comm.meeting_place import JointCall, MeetingPlace, Note
from shardwright.comm.whereabouts import Stalls

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


def test_ranks_that_wait_for_a_message_of_the_step_do_not_end():
    """A large message on a slow network takes long, and both ends wait."""
    assert Ranks(waiting(), waiting(), waiting()).look(times=9) == ["", "", ""]
