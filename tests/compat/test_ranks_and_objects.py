"""The grid of ranks, its groups, and objects from rank to rank."""

import pytest
import torch
import torch.distributed as dist

import smdistributed.modelparallel.torch as smp
from compat.small_models import QUIET
from shardwright.errors import UsageError
from shardwright.testing import run_ranks, run_ranks_outcomes

ALL = ("rank", "mp_rank", "dp_rank", "pp_rank", "tp_rank", "rdp_rank")


def grid(settings):
    """What each rank says of itself."""
    smp.init({**QUIET, **settings})
    sizes = [getattr(smp, f"{kind}size")() for kind in ("", "mp_", "dp_", "pp_", "tp_", "rdp_")]
    ranks = [getattr(smp, name)() for name in ALL]
    groups = [smp.get_mp_group(), smp.get_dp_group(), smp.get_tp_group()]
    return sizes, ranks, groups, (smp.local_rank(), smp.local_size())


# As the page of the library has it: eight ranks, two partitions.
@pytest.mark.parametrize(
    ("placement", "of_replica", "of_stage"),
    [
        ("spread", [[0, 4], [1, 5], [2, 6], [3, 7]], [[0, 1, 2, 3], [4, 5, 6, 7]]),
        ("PTD", [[0, 4], [1, 5], [2, 6], [3, 7]], [[0, 1, 2, 3], [4, 5, 6, 7]]),
    ],
)
def test_placements_are_those_of_the_library(placement, of_replica, of_stage):
    found = run_ranks(grid, 8, {"partitions": 2, "ddp": True, "placement_strategy": placement})
    for rank, (sizes, ranks, (mp_group, dp_group, tp_group), local) in enumerate(found):
        assert sizes == [8, 2, 4, 2, 1, 4]
        assert mp_group == next(group for group in of_replica if rank in group)
        assert dp_group == next(group for group in of_stage if rank in group)
        assert tp_group == [rank]
        assert local == (rank, 8)
        world, mp_rank, dp_rank, pp_rank, tp_rank, rdp_rank = ranks
        assert (world, tp_rank) == (rank, 0)
        assert mp_group[mp_rank] == rank
        assert mp_rank == pp_rank
        assert dp_group[dp_rank] == rank
        assert dp_rank == rdp_rank


def objects_on_four_ranks():
    smp.init({**QUIET, "partitions": 2, "ddp": True})
    rank, found = smp.rank(), {}
    if rank == 0:
        smp.send({"weights": torch.ones(3), "name": "first"}, 3, smp.RankType.WORLD_RANK)
    if rank == 3:
        received = smp.recv_from(0, smp.RankType.WORLD_RANK)
        found["sent"] = received["name"], received["weights"].tolist()
    if smp.pp_rank() == 0:
        smp.send(rank, 1, smp.RankType.PP_RANK)
    else:
        found["from the stage before"] = smp.recv_from(0, smp.RankType.PP_RANK)
    if smp.rdp_rank() == 1:
        smp.send(rank, 0, smp.RankType.RDP_RANK)
    else:
        found["from the other replica"] = smp.recv_from(1, smp.RankType.RDP_RANK)
    if rank == 1:
        smp.broadcast(["to", "all"], smp.WORLD)
    else:
        found["broadcast"] = smp.recv_from(1, smp.RankType.WORLD_RANK)
    if smp.mp_rank() == 0:
        smp.broadcast(f"replica {smp.rdp_rank()}", smp.CommGroup.MP_GROUP)
    else:
        found["in the replica"] = smp.recv_from(0, smp.RankType.MP_RANK)
    found["all"] = smp.allgather(rank * 10, smp.WORLD)
    found["stage"] = smp.allgather(rank, smp.DP_GROUP)
    found["replica"] = smp.allgather(rank, smp.MP_GROUP)
    found["alone"] = smp.allgather(rank, smp.TP_GROUP)
    for wait in (smp.barrier, smp.dp_barrier, smp.mp_barrier, smp.core.barrier):
        wait()
    smp.barrier(smp.PP_GROUP)
    return found


def test_objects_go_from_rank_to_rank_and_over_groups():
    first, second, third, last = run_ranks(objects_on_four_ranks, 4)
    assert last["sent"] == ("first", [1.0, 1.0, 1.0])
    assert (second["from the stage before"], last["from the stage before"]) == (0, 2)
    assert (first["from the other replica"], second["from the other replica"]) == (2, 3)
    assert [found["broadcast"] for found in (first, third, last)] == [["to", "all"]] * 3
    assert (second["in the replica"], last["in the replica"]) == ("replica 0", "replica 1")
    for rank, found in enumerate((first, second, third, last)):
        assert found["all"] == [0, 10, 20, 30]
        assert found["stage"] == ([0, 2] if rank in (0, 2) else [1, 3])
        assert found["replica"] == ([0, 1] if rank < 2 else [2, 3])
        assert found["alone"] == [rank]


def process_groups_on_four_ranks():
    smp.init({**QUIET, "partitions": 2, "ddp": True})
    sums = {}
    for name in ("world", "mp", "dp", "pp", "tp", "rdp"):
        group = getattr(smp, f"get_{name}_process_group")()
        number = torch.tensor([float(smp.rank())])
        dist.all_reduce(number, group=group)
        sums[name] = dist.get_world_size(group), number.item()
    return sums


def test_process_groups_are_those_of_torch():
    found = run_ranks(process_groups_on_four_ranks, 4)
    for rank, sums in enumerate(found):
        replica, stage = (1.0 if rank < 2 else 5.0), (2.0 if rank % 2 == 0 else 4.0)
        assert sums == {
            "world": (4, 6.0),
            "mp": (2, replica),
            "pp": (2, replica),
            "dp": (2, stage),
            "rdp": (2, stage),
            "tp": (1, float(rank)),
        }


def test_a_single_rank_has_all_of_it():
    def alone():
        assert not smp.is_initialized()
        smp.init({**QUIET, "ddp": True, "microbatches": 3})
        smp.init()
        assert smp.is_initialized()
        assert not smp.is_tracing()
        assert smp.num_microbatches() == 3
        dist.barrier()
        groups = [getattr(smp, f"get_{name}_process_group")() for name in ("world", "mp", "dp", "tp")]
        assert [dist.get_world_size(group) for group in groups] == [1] * 4
        smp.broadcast(1, smp.WORLD)
        smp.barrier()
        smp.dp_barrier()
        assert smp.utils.rmsg("hi") == "[rank 0, pp_rank 0, tp_rank 0, rdp_rank 0] hi"
        return smp.allgather("x", smp.WORLD), smp.rank(), smp.size(), smp.mp_size(), smp.dp_size()

    assert run_ranks(alone, 1, init_process_group=False) == [(["x"], 0, 1, 1, 1)]


def test_wrong_ranks_and_groups_are_refused():
    def wrong():
        smp.init({**QUIET, "partitions": 2})
        texts = []
        for call in (
            lambda: smp.send(1, 2, smp.RankType.PP_RANK),
            lambda: smp.recv_from(smp.rank(), smp.RankType.WORLD_RANK),
            lambda: smp.allgather(1, "DP_GROUP"),
        ):
            with pytest.raises(UsageError) as caught:
                call()
            texts.append(str(caught.value))
        return texts

    for beyond, itself, no_group in run_ranks(wrong, 2):
        assert "names pp rank 2, but they run from 0 to 1" in beyond
        assert "is this rank itself" in itself
        assert "'DP_GROUP' is not a group. Use one of smp.WORLD" in no_group


def passing_each_other(call):
    """Rank 0 makes a call; rank 1 comes to the end of its script."""
    smp.init({**QUIET, "partitions": 2, "shared_memory": False, "timeout_s": 60})
    calls = {
        "smp.recv_from()": lambda: smp.recv_from(1, smp.RankType.WORLD_RANK),
        "smp.send()": lambda: smp.send([1], 1, smp.RankType.PP_RANK),
        "smp.broadcast()": lambda: smp.broadcast([1], smp.MP_GROUP),
        "smp.allgather()": lambda: smp.allgather(1, smp.PP_GROUP),
        "smp.mp_barrier()": smp.mp_barrier,
        "smp.barrier()": smp.barrier,
    }
    if smp.rank() == 0:
        calls[call]()


@pytest.mark.parametrize(
    ("call", "said"),
    [
        ("smp.recv_from()", "smp.recv_from() on rank 0 needs smp.send() or smp.broadcast() on rank 1"),
        ("smp.allgather()", "smp.allgather() is to be called by all of ranks 0, 1"),
        ("smp.barrier()", "not under `if smp.rank() == 0:`"),
    ],
)
def test_a_call_that_the_other_rank_never_makes_says_so_within_seconds(call, said):
    """These waited for the timeout of minutes, and named no call."""
    first, _ = run_ranks_outcomes(passing_each_other, 2, call, timeout_s=50)
    assert said in first.cause
    assert "rank 1 has come to the end of its script" in first.cause
    assert first.seconds < 15


def test_init_is_once():
    def twice():
        smp.init({**QUIET, "microbatches": 2})
        smp.init()
        smp.init({**QUIET, "microbatches": 2})
        with pytest.raises(UsageError, match="called before, with other settings"):
            smp.init({**QUIET, "microbatches": 4})
        smp.shutdown()
        smp.init({**QUIET, "microbatches": 4})
        return smp.num_microbatches()

    assert run_ranks(twice, 1) == [4]
