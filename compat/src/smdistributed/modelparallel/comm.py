"""Objects from rank to rank: ``smp.send``, ``recv_from``, ``broadcast``, ``allgather`` and barriers.

They go over a gloo group of their own, so that they meet no message of a step, and CUDA has no part in it. A
message is sent when its receiver takes it: both wait for each other. Objects go as pickles under the code of
the run's secret; where ranks have none, as data, which only plain values and tensors are::

    smp.send(table, 3, smp.RankType.WORLD_RANK)            on rank 0
    table = smp.recv_from(0, smp.RankType.WORLD_RANK)      on rank 3
"""

import io
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardwright.comm.joining.process_group import seal_of_session
from shardwright.comm.joining.run_secret import packed, unpacked
from shardwright.comm.missing_ranks import Terms
from shardwright.comm.roll_call import Call
from shardwright.comm.tensor_codec import DecodeError, decode, encode
from shardwright.errors import LaunchError, UsageError
from shardwright.run.joint_calls import first_cause_named, meet, meet_each
from smdistributed.modelparallel.groups import CommGroup, RankType, kind_of, members
from smdistributed.modelparallel.ranks_of_run import present_run, ranks_of_run

__all__ = ["allgather", "barrier", "broadcast", "dp_barrier", "mp_barrier", "recv_from", "send"]

_PLACE = "an object of smp"
_REMEDY = (
    "Each object that one rank sends, or broadcasts, is taken by one smp.recv_from() on the other, in the "
    "same order on both."
)


def send(obj: Any, dest_rank: int, rank_type: RankType) -> None:
    """Sends an object to one rank, which calls `recv_from`; returns when it takes it."""
    _give("smp.send()", obj, [_other(dest_rank, rank_type, "send")])


def recv_from(src_rank: int, rank_type: RankType) -> Any:
    """Takes an object that another rank sends, or broadcasts."""
    source = _other(src_rank, rank_type, "recv_from")
    rank = present_run().rank
    needs = f"smp.recv_from() on rank {rank} needs smp.send() or smp.broadcast() on rank {source}"
    meet_each([_passing("smp.recv_from()", source, rank, needs)])
    return _receive(source)


def broadcast(obj: Any, group: CommGroup) -> None:
    """Sends an object to all others of a group, who call `recv_from`; returns when all have taken it."""
    _give("smp.broadcast()", obj, [other for other in members(group) if other != present_run().rank])


def allgather(obj: Any, group: CommGroup) -> list[Any]:
    """The objects of all ranks of a group, by their ranks in it; all of them call it."""
    current = present_run()
    ranks = members(group)
    meet("smp.allgather()", ranks)
    under_way = _start(obj, [other for other in ranks if other != current.rank])
    found = [obj if other == current.rank else _receive(other) for other in ranks]
    _wait(under_way)
    return found


def barrier(group: CommGroup = CommGroup.WORLD) -> None:
    """Waits for all ranks of a group, which call it too."""
    meet("smp.barrier()", members(group))


def dp_barrier() -> None:
    """Waits for all ranks of this stage."""
    meet("smp.dp_barrier()", members(CommGroup.DP_GROUP))


def mp_barrier() -> None:
    """Waits for all ranks of this replica."""
    meet("smp.mp_barrier()", members(CommGroup.MP_GROUP))


def _other(rank: int, rank_type: RankType, call: str) -> int:
    """The world rank that is meant."""
    kind = kind_of(rank_type)
    ranks = members(rank_type)
    if isinstance(rank, bool) or not isinstance(rank, int) or not 0 <= rank < len(ranks):
        raise UsageError(
            f"smp.{call} names {kind} rank {rank!r}, but they run from 0 to {len(ranks) - 1} here."
        )
    if ranks[rank] == present_run().rank:
        raise UsageError(
            f"smp.{call} names {kind} rank {rank}, which is this rank itself. Leave the call out on it, for "
            f"example by if smp.{'' if kind == 'world' else f'{kind}_'}rank() != {rank}."
        )
    return ranks[rank]


def _give(where: str, obj: Any, others: Sequence[int]) -> None:
    """Sends an object to ranks that take it, each when it comes to that."""
    current = present_run()
    rank = current.rank
    if others and current.watch.roll_call is not None:
        current.watch.roll_call.refuse_in_a_child(where)  # before anything is sent
    under_way = _start(obj, others)  # before: whoever has met this rank waits for nobody else
    needs = f"{where} on rank {rank} needs smp.recv_from() on rank"
    try:
        meet_each([_passing(where, rank, other, f"{needs} {other}") for other in others])
    except BaseException:
        if under_way:
            ranks_of_run.lose_objects(f"{where} on rank {rank}, which nobody took")
        raise
    _wait(under_way)


def _passing(where: str, source: int, target: int, needs: str) -> Call:
    """The call by which an object goes from rank to rank, which is another one at each end."""
    return Call(
        where,
        tuple(sorted((source, target))),
        name=f"an object from rank {source} to rank {target}",
        terms=Terms(needs, _REMEDY),
    )


def _packed(obj: Any) -> Tensor:
    """An object as bytes: as `torch.save` has it, under the run's secret; without one, as data alone."""
    seal = seal_of_session()
    if seal is None:
        data = encode(obj, other=lambda thing: packed(thing, seal, _PLACE))
    else:
        data = packed(obj, seal, _PLACE, dumps=_saved)
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _saved(obj: Any) -> bytes:
    """An object as `torch.save` has it: tensors that share memory do so afterwards."""
    buffer = io.BytesIO()
    torch.save(obj, buffer)
    return buffer.getvalue()


def _start(obj: Any, ranks: Sequence[int]) -> list[tuple[dist.Work, Tensor]]:
    """Begins to send to these ranks: first how much comes, then that."""
    if not ranks:
        return []
    group = ranks_of_run.objects_group
    payload = _packed(obj)
    size = torch.tensor([payload.numel()])
    with first_cause_named(present_run()):
        return [
            (work, part)
            for other in ranks
            for part in (size, payload)
            if (work := dist.isend(part, other, group=group)) is not None
        ]


def _wait(under_way: Sequence[tuple[dist.Work, Tensor]]) -> None:
    with first_cause_named(present_run()):
        for work, _ in under_way:
            work.wait()


def _receive(source: int) -> Any:
    group, device = ranks_of_run.objects_group, present_run().device
    with first_cause_named(present_run()):
        size = torch.zeros(1, dtype=torch.int64)
        dist.recv(size, source, group=group)
        payload = torch.empty(int(size.item()), dtype=torch.uint8)
        dist.recv(payload, source, group=group)

    data, seal = payload.numpy().tobytes(), seal_of_session()

    def here(storage: Any, location: str) -> Any:
        # What was on the sender's GPU comes to this rank's.
        return storage if location == "cpu" else storage.to(device)

    def loaded(saved: bytes) -> Any:
        return torch.load(io.BytesIO(saved), map_location=here, weights_only=False)

    if seal is not None:
        return unpacked(data, seal, _PLACE, loads=loaded)
    try:
        return decode(data)
    except DecodeError as error:
        raise LaunchError(
            f"what rank {source} sends is no object: {error}. A stranger writes in its place."
        ) from error
