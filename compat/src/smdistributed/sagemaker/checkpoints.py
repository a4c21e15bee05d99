"""Checkpoints of SMP v2 by `torch.distributed.checkpoint`, written while the training goes on.

::

    process_group=None           one folder for all ranks; parameters are sharded tensors of the whole model
    the ranks of one shard       a folder for each shard: what a rank holds, as plain tensors
    (tsm.state.ranker)

`optimizer.state_dict()` numbers what this rank holds, so in one folder for all it stands under the number of
the shard; `FSDP.optim_state_dict` has sharded tensors, for any number of ranks.
"""

import enum
import warnings
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader as DistributedFileSystemReader
from torch.distributed.checkpoint.filesystem import FileSystemWriter as DistributedFileSystemWriter
from torch.distributed.checkpoint.staging import BlockingAsyncStager
from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType
from torch.distributed.tensor import DTensor

from shardwright.errors import CheckpointError
from smdistributed.sagemaker.names import not_here
from smdistributed.sagemaker.settings import state

__all__ = [
    "AsyncCallsQueue",
    "DistributedFileSystemReader",
    "DistributedFileSystemWriter",
    "SMStateDictType",
    "async_save",
    "init_optim_state",
    "is_s3_uri",
    "load",
    "maybe_finalize_async_calls",
    "save",
    "sm_state_dict_type",
]


class SMStateDictType(enum.Enum):
    """The kind of state beside those of FSDP."""

    SM_LOCAL_STATE_DICT = enum.auto()


@contextmanager
def sm_state_dict_type(model: nn.Module, state_dict_type: SMStateDictType) -> Iterator[None]:
    """Inside, ``model.state_dict()`` gives what `save` and `load` take: FSDP's sharded one."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*state_dict_type.*", category=FutureWarning)
        with FullyShardedDataParallel.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
            yield


class AsyncCallsQueue:
    """Saves that are being written."""

    def __init__(self) -> None:
        self.writing: list[Future[Any]] = []

    def finalize(self, *, blocking: bool) -> None:
        """Takes out what is written, with its errors; `blocking` waits for all."""
        while self.writing and (blocking or self.writing[0].done()):
            self.writing.pop(0).result()


_QUEUE = AsyncCallsQueue()


def save(
    state_dict: dict[str, Any], *, checkpoint_id: Any = None, process_group: Any = None, **kwargs: Any
) -> None:
    """Saves, and returns when it is written; collective over the group. Arguments as of `async_save`."""
    async_save(state_dict, checkpoint_id=checkpoint_id, process_group=process_group, **kwargs)
    maybe_finalize_async_calls(blocking=True, queue=kwargs.get("queue"))


def async_save(
    state_dict: dict[str, Any],
    *,
    checkpoint_id: Any = None,
    storage_writer: Any = None,
    planner: Any = None,
    process_group: dist.ProcessGroup | None = None,
    coordinator_rank: int = 0,
    queue: AsyncCallsQueue | None = None,
    sharded_strategy: Any = None,
    wait_error_handling: bool = True,
    force_check_all_plans: bool = True,
    s3_region: str | None = None,
    s3client_config: Any = None,
) -> None:
    """Copies the state, and returns while a thread writes it; collective over the group.

    Args:
        coordinator_rank: changes nothing, as the next four: the first rank of the group writes the metadata.
    """
    if s3_region is not None or s3client_config is not None or is_s3_uri(checkpoint_id):
        raise not_here("torch.sagemaker: a checkpoint in S3", "distributed.checkpoint.s3_filesystem")
    queue = queue or _QUEUE
    queue.finalize(blocking=True)
    found = state_dict_saver.async_save(
        _stored(state_dict, process_group),
        checkpoint_id=checkpoint_id,
        storage_writer=storage_writer,
        planner=planner,
        process_group=_own_group(process_group),
        # The usual one cannot copy what FSDP gives without a mesh. A writer may copy by itself.
        async_stager=None if storage_writer is not None else BlockingAsyncStager(),
    )
    queue.writing.append(found)  # type: ignore[arg-type]


def maybe_finalize_async_calls(
    blocking: bool = True, process_group: Any = None, queue: AsyncCallsQueue | None = None
) -> None:
    """Raises what went wrong in saves that have ended; with `blocking` it waits for those under way."""
    (queue or _QUEUE).finalize(blocking=blocking)


def load(
    state_dict: dict[str, Any],
    *,
    checkpoint_id: Any = None,
    storage_reader: Any = None,
    planner: Any = None,
    process_group: dist.ProcessGroup | None = None,
    check_keys_matched: bool = True,
    coordinator_rank: int = 0,
    **kwargs: Any,
) -> None:
    """Fills a state like the saved one; collective over the group. For arguments see `async_save`.

    Args:
        state_dict: of the model and others, as they are now; an optimizer's after `init_optim_state`.
        check_keys_matched: False leaves what the folder lacks as it is.
        coordinator_rank: changes nothing, as `kwargs`.
    """
    if planner is None and not check_keys_matched:
        planner = DefaultLoadPlanner(allow_partial_load=True)
    stored = _stored(state_dict, process_group)
    try:
        state_dict_loader.load(
            stored,
            checkpoint_id=checkpoint_id,
            storage_reader=storage_reader,
            planner=planner,
            process_group=_own_group(process_group),
        )
    except CheckpointException as error:
        reason = next(iter(error.failures.values()))[0]
        raise CheckpointError(
            f"{checkpoint_id} does not have the state of these ranks: {reason} What "
            f"optimizer.state_dict() gives belongs to one number of shards (now {state.mesh.size(1)}), "
            "and is loaded after init_optim_state(optimizer)."
        ) from error
    for key, value in state_dict.items():
        if _is_of_optimizer(value):
            read = stored[_key(key, process_group)]
            value["param_groups"] = read["param_groups"]
            value["state"] = {int(number): entry for number, entry in read["state"].items()}
    _take(state_dict, stored)


def _take(mine: dict[Any, Any], read: dict[Any, Any]) -> None:
    """Takes what was read and is no tensor: those are read into their own memory."""
    for key in mine.keys() & read.keys():
        if isinstance(mine[key], dict):
            _take(mine[key], read[key])
        elif not isinstance(mine[key], torch.Tensor) and not hasattr(mine[key], "local_shards"):
            mine[key] = read[key]


def init_optim_state(optimizer: torch.optim.Optimizer, skip_empty_param: bool = True) -> None:
    """Gives a new optimizer the state that `load` fills, by a step that changes no parameter."""
    rates = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = 0.0
        for parameter in group["params"]:
            if parameter.requires_grad and parameter.numel():
                parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate


def is_s3_uri(uri: Any) -> bool:
    """Whether a path is one in S3, where nothing is saved."""
    return str(uri).startswith("s3://")


def _stored(state_dict: dict[str, Any], group: dist.ProcessGroup | None) -> dict[str, Any]:
    """The state as the folder has it; its tensors are those of the state."""
    found = {}
    for key, value in state_dict.items():
        if _is_of_optimizer(value):  # the loader of torch.distributed.checkpoint finds texts alone
            value = {**value, "state": {str(number): entry for number, entry in value["state"].items()}}
        found[_key(key, group) if _is_of_optimizer(state_dict[key]) else key] = value
    return _local(found) if _is_of_one_shard(group) else found


def _key(key: str, group: dist.ProcessGroup | None) -> str:
    if _is_of_one_shard(group):
        return key
    degree = state.mesh.size(1)
    return f"{key}.shard_{state.rank % degree}_of_{degree}"


def _is_of_one_shard(group: dist.ProcessGroup | None) -> bool:
    return group is not None and dist.get_world_size(group) < dist.get_world_size()


def _is_of_optimizer(value: Any) -> bool:
    """Whether a state is that of a plain ``optimizer.state_dict()``, with parameters by number."""
    return (
        isinstance(value, dict)
        and value.keys() == {"state", "param_groups"}
        and not any(isinstance(key, str) for key in value["state"])
    )


def _local(value: Any) -> Any:
    """A state with this rank's part of each sharded tensor in its place, in the same memory."""
    if isinstance(value, dict):
        parts = {key: _local(item) for key, item in value.items()}
        return {key: part for key, part in parts.items() if part is not None or value[key] is None}
    if isinstance(value, DTensor):
        return value.to_local()
    if hasattr(value, "local_shards"):
        shards = value.local_shards()
        return shards[0].tensor if shards else None
    return value


def _own_group(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """A group of the same ranks for the writing thread alone, beside the collectives of the training."""
    ranks = tuple(dist.get_process_group_ranks(group))
    groups: dict[tuple[int, ...], dist.ProcessGroup] = state.groups_for_writing
    if ranks not in groups:
        groups[ranks] = dist.new_group(list(ranks), backend="gloo", use_local_synchronization=True)
    return groups[ranks]
