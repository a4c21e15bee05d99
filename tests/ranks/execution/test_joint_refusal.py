"""Errors that all ranks have may be gone past; one that a rank has alone may not."""

import datetime

import torch.distributed as dist

from shardwright.testing import run_ranks


def refuse(refusing):
    """What comes of it when some ranks refuse: on each rank, the error that it may not go past."""
    from shardwright.errors import PlanError
    from shardwright.run.joint_calls import require_all_refuse

    found = None
    if dist.get_rank() in refusing:
        try:
            require_all_refuse(PlanError("no"), attempt="one", patience=datetime.timedelta(seconds=1))
        except PlanError as error:
            found = [str(error), *error.__notes__]
    dist.barrier()
    return found


def test_what_all_ranks_refuse_may_be_gone_past():
    assert run_ranks(refuse, 2, (0, 1)) == [None, None]


def test_what_one_rank_refuses_is_an_error_of_it():
    other, alone = run_ranks(refuse, 2, (1,))
    assert other is None
    assert alone == ["no", "This rank alone refuses: others did not within 1 s."]


def lose():
    from shardwright.errors import PeerLostError
    from shardwright.run.joint_calls import require_all_refuse

    try:
        require_all_refuse(PeerLostError("rank 1 left"), attempt="one")
    except PeerLostError:
        return "told at once"


def test_a_lost_rank_ends_all_trials():
    assert run_ranks(lose, 2) == ["told at once"] * 2
