"""Writes a checkpoint as a folder of `torch.distributed.checkpoint` (DCP), one tensor in memory at a time.

DCP's writer asks its planner for the data of each tensor when it writes it: until then, tensors here are on
the meta device. FSDP2 loads what `get_state_dict` would have saved; torchtitan has the model's tensors beside
``optimizer``, whose keys are flat.
"""

import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save

from shardwright.checkpoint.disk import Disk, fresh_folder
from shardwright.checkpoint.hugging_face import Exported, ModelTensors
from shardwright.checkpoint.importing import STATE
from shardwright.checkpoint.saved import SavedCheckpoint
from shardwright.errors import CheckpointError
from shardwright.torch.checkpoints.encoded import decode
from shardwright.torch.checkpoints.own_parts import MASTER, parameter_and_key
from shardwright.torch.checkpoints.snapshot import StateDocument, optimizer_prefix
from shardwright.torch.checkpoints.state_dict_files import dtype_of, read_part, whole_tensor


def export_dcp(
    saved: SavedCheckpoint,
    folder: Path,
    *,
    prefix: str = "",
    flat: bool = False,
    tell: Callable[[str], None] = lambda text: None,
) -> Exported:
    """Writes model, optimizers and states.

    Args:
        prefix: taken from the names of parameters.
        flat: as torchtitan has it.
    """
    planner = _Planner()
    state = _state(saved, planner, prefix=prefix, flat=flat)
    with fresh_folder(folder, disk=Disk()) as draft, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is no process group, which nothing here needs
        tell("__0_0.distcp")
        try:
            save(state, storage_writer=FileSystemWriter(draft), planner=planner, no_dist=True)
        except CheckpointException as error:  # not an Exception
            cause = next(iter(error.failures.values()))[0]
            if isinstance(cause, OSError):
                raise cause from error
            raise CheckpointError(f"{folder} cannot be written: {cause}. Nothing was left there.") from error
        files = tuple(sorted(path.name for path in draft.iterdir()))
    return Exported(files=files, num_tensors=len(planner.reads), num_bytes=planner.num_bytes)


class _Planner(DefaultSavePlanner):
    """DCP's planner, for tensors that are read when they are written.

    Attributes:
        reads: gives the data of a tensor of the state, by its id.
    """

    def __init__(self) -> None:
        super().__init__()
        self.reads: dict[int, Callable[[], Tensor]] = {}
        self.num_bytes = 0

    def later(self, shape: tuple[int, ...], dtype: str, read: Callable[[], Tensor]) -> Tensor:
        tensor = torch.empty(shape, dtype=dtype_of(dtype), device="meta")
        self.reads[id(tensor)] = read
        self.num_bytes += tensor.nbytes
        return tensor

    def lookup_object(self, index: Any) -> Any:
        found = super().lookup_object(index)
        read = self.reads.get(id(found))
        return found if read is None else read()


def _state(saved: SavedCheckpoint, planner: _Planner, *, prefix: str, flat: bool) -> dict[str, Any]:
    """What `dcp.save` is given."""
    document = StateDocument.from_content(saved.document(STATE), name=str(saved.path / STATE))

    def plain(content: Any) -> Any:
        return decode(content, name=STATE, tensor=partial(read_part, saved))

    def part(full: str) -> Tensor:
        entry = saved.entry(full)
        return planner.later(entry.shape, entry.dtype, partial(read_part, saved, full))

    sources = ModelTensors(saved, prefix=prefix, ties=True).sources
    masters = {  # what the optimizer updates, under each name of a tied weight; the model has it rounded
        id(sources[name.removeprefix(prefix)]): full
        for full, name in _masters(saved, len(document.optimizers))
    }
    model: dict[str, Any] = {
        name: part(masters[id(source)])
        if id(source) in masters
        else planner.later(source.shape, source.dtype, partial(whole_tensor, source))
        for name, source in sources.items()
    }
    for name, content in document.extra_states.items():
        model[f"{name}._extra_state".removeprefix(".").removeprefix(prefix)] = plain(content)
    state: dict[str, dict[str, Any]] = {}
    groups: list[dict[str, Any]] = []
    for number, optimizer in enumerate(document.optimizers):
        begin, names = optimizer_prefix(number), {name for each in optimizer.members for name in each}
        for options, members in zip(plain(optimizer.groups), optimizer.members, strict=True):
            groups.append({**options, "params": [name.removeprefix(prefix) for name in members]})
        for full in saved.index.tensors:
            name, key = parameter_and_key(full.removeprefix(begin), names)
            if full.startswith(begin) and name and key != MASTER and not key.startswith("other."):
                state.setdefault(name.removeprefix(prefix), {})[key] = part(full)
        for name, content in optimizer.others.items():
            state.setdefault(name.removeprefix(prefix), {}).update(plain(content))
    others = {name: plain(content) for name, content in document.states.items()}
    optimizers = {"optimizer": {"state": state, "param_groups": groups}} if groups else {}
    if not flat:
        return {**others, "model": model, **optimizers}
    others["train_state"] = {"ntokens_seen": 0, **others.get("train_state", {}), "step": saved.step}
    return {**others, **model, **({"optimizer": _flat(state, groups)} if groups else {})}


def _masters(saved: SavedCheckpoint, num_optimizers: int) -> Iterator[tuple[str, str]]:
    """The master copies: their full names, and those of their parameters."""
    for begin in map(optimizer_prefix, range(num_optimizers)):
        for full in saved.index.tensors:
            name, _, key = full.removeprefix(begin).rpartition("/")
            if full.startswith(begin) and key == MASTER:
                yield full, name


def _flat(state: dict[str, dict[str, Any]], groups: list[dict[str, Any]]) -> dict[str, Any]:
    """An optimizer as `get_state_dict` gives it with ``flatten_optimizer_state_dict``."""
    found = {f"state.{name}.{key}": value for name, keys in state.items() for key, value in keys.items()}
    for group in groups:
        options = {key: value for key, value in group.items() if key != "params"}
        found |= {f"param_groups.{n}.{key}": value for n in group["params"] for key, value in options.items()}
    return found
