"""``smp.save`` and ``smp.load``: one file a rank, or one for all.

::

    smp.save(model.local_state_dict(), "model.pt", partial=True)     on all ranks of a replica
        model.pt_0_0    pipeline rank 0, tensor parallel rank 0
        model.pt_1_0
    v3=True             model.pt_0_0_0, model.pt_0_0_1, ...           the last number is the replica

Files with the suffix of early releases, ``_{mp_rank}``, are found as well.
"""

import os
import pickle
import re
import secrets
from pathlib import Path
from typing import Any

from shardwright.checkpoint.disk import Disk
from shardwright.errors import CheckpointError, UsageError
from shardwright.run.joint_calls import meet
from shardwright.torch.startup import ScriptRun
from smdistributed.modelparallel.torch.pickles.files import load_file, saves
from smdistributed.modelparallel.torch.state_mod import current_run

_PROTOCOL = 2


def save(
    obj: Any,
    f: str,
    partial: bool = True,
    pickle_module: Any = pickle,
    pickle_protocol: int = _PROTOCOL,
    v3: bool = False,
) -> None:
    """Saves an object as `torch.save` does; the file is there whole, or not at all.

    Args:
        partial: each rank of a replica saves its own, into a file with its ranks at the end of the name. All
            ranks of the replica call it.
        pickle_protocol: as for `torch.save`. Files of other protocols than 2 may load only when trusted.
        v3: the name has the number of the replica, too: replicas have different parts.

    Raises:
        UsageError: `f` is no name of a file, or ranks of the replica are missing.
    """
    run = current_run()
    path = _path(f, "smp.save")
    target = path.with_name(path.name + _suffix(run, v3=v3)) if partial else path
    disk = Disk()
    if not target.parent.is_dir():
        target.parent.mkdir(parents=True, exist_ok=True)  # another rank may make it just now
    fresh = target.with_name(f"{target.name}.tmp-{secrets.token_hex(4)}")
    try:
        content = saves(obj, pickle_module=pickle_module, pickle_protocol=pickle_protocol)
        disk.write_with(fresh, content)
        disk.rename(fresh, target)
    finally:
        fresh.unlink(missing_ok=True)
    if partial:
        meet(f"smp.save({path.name!r}, partial=True)", run.replica_ranks)


def load(
    f: str,
    map_location: Any = None,
    pickle_module: Any = pickle,
    partial: bool = True,
    **kwargs: Any,
) -> Any:
    """Loads what `save` or `torch.save` has saved.

    Args:
        pickle_module: what a trusted file is loaded with: see ``SHARDWRIGHT_TRUST_PICKLE``.
        partial: the file of this rank; else the one for all.
        kwargs: ``mmap`` as for `torch.load`; others (``back_compat``) change nothing.

    Raises:
        CheckpointError: there is no such file, other ranks have saved it, or what it has may do harm.
    """
    run = current_run()
    path = _path(f, "smp.load")
    found = _own_file(run, path) if partial else path
    if not partial and not path.exists() and _parts_of(path):
        raise CheckpointError(
            f"{path} is not there, but {_parts_of(path)[0].name} is: it was saved with partial=True. Load it "
            "with partial=True."
        )
    module = None if pickle_module is pickle else pickle_module
    return load_file(found, map_location, mmap=bool(kwargs.get("mmap")), pickle_module=module)


def _own_file(run: ScriptRun, path: Path) -> Path:
    """The file that a rank in the place of this one has saved."""
    shards = run.config.shard_optimizer_state or run.mesh.shard > 1
    names = [path.name + _suffix(run, v3=v3) for v3 in ((True, False) if shards else (False, True))]
    names.append(f"{path.name}_{run.pipeline_rank}")
    _refuse_other_ranks(run, path)
    for name in names:
        if (path.parent / name).is_file():
            return path.parent / name
    full = " The file without ranks in its name is there: partial=False loads it." if path.is_file() else ""
    raise CheckpointError(
        f"there is no file for rank {run.rank} (pipeline rank {run.pipeline_rank}): {' or '.join(names)} "
        f"in {path.parent}.{full}"
    )


def _refuse_other_ranks(run: ScriptRun, path: Path) -> None:
    """Refuses parts of another number of partitions, of which some would be left out."""
    saved = [part.name[len(path.name) + 1 :].split("_") for part in _parts_of(path)]
    pipeline = max((int(numbers[0]) for numbers in saved), default=run.mesh.pipeline - 1) + 1
    tensor = max((int(n[1]) for n in saved if len(n) > 1), default=run.mesh.tensor - 1) + 1
    if pipeline != run.mesh.pipeline:
        raise CheckpointError(
            f"{path} was saved by {pipeline} partitions, and there are {run.mesh.pipeline} now. Start "
            "as many, or save a full one: state_dict() and partial=False."
        )
    if tensor != run.mesh.tensor:
        raise CheckpointError(
            f"{path} was saved with tensor_parallel_degree {tensor}, and it is {run.mesh.tensor} now. Set it "
            "so, or save a full one: state_dict() and partial=False."
        )


def _parts_of(path: Path) -> list[Path]:
    pattern = re.compile(re.escape(path.name) + r"_\d+(_\d+(_\d+)?)?")
    there = path.parent.glob("*") if path.parent.is_dir() else ()
    return sorted(part for part in there if pattern.fullmatch(part.name))


def _suffix(run: ScriptRun, *, v3: bool) -> str:
    return f"_{run.pipeline_rank}_{run.tensor_rank}" + (f"_{run.data_rank}" if v3 else "")


def _path(f: Any, call: str) -> Path:
    if not isinstance(f, str | os.PathLike) or not os.fspath(f):
        raise UsageError(f"{call} takes the name of a file, not {f!r:.80}: each rank has a file of its own.")
    return Path(f)
