"""Checkpoints of a rank on another host: ``smp.utils``.

::

    smp.utils.send_checkpoint_files(root, 0)                 on rank 3
    smp.utils.receive_checkpoint_files(root, 3)              on rank 0: root/mp_rank_3/ is there as well
"""

import os
from pathlib import Path

from shardwright.checkpoint.disk import Disk
from shardwright.errors import CheckpointError
from smdistributed.modelparallel.comm import recv_from, send
from smdistributed.modelparallel.groups import RankType
from smdistributed.modelparallel.ranks_of_run import present_run


def folder_of(root: "str | os.PathLike[str]", rank: int) -> Path:
    """The folder of the checkpoints of a world rank: ``root/mp_rank_<its rank in its replica>``."""
    return Path(root) / f"mp_rank_{present_run().mesh.group_rank('mp', rank)}"


def send_checkpoint_files(root: "str | os.PathLike[str]", dst_rank: int) -> None:
    """Sends the files of this rank's checkpoints to another rank, which calls `receive_checkpoint_files`."""
    folder = folder_of(root, present_run().rank)
    if not folder.is_dir():
        send(None, dst_rank, RankType.WORLD_RANK)
        raise _absent(folder, present_run().rank)
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    # What names the newest checkpoint comes last, when that is there.
    paths.sort(key=lambda path: path.name == "checkpoint")
    send([path.relative_to(folder).parts for path in paths], dst_rank, RankType.WORLD_RANK)
    for path in paths:
        send(path.read_bytes(), dst_rank, RankType.WORLD_RANK)


def receive_checkpoint_files(root: "str | os.PathLike[str]", src_rank: int) -> None:
    """Takes the files that another rank sends with `send_checkpoint_files`."""
    names = recv_from(src_rank, RankType.WORLD_RANK)
    folder = folder_of(root, src_rank)
    if names is None:
        raise _absent(folder, src_rank)
    disk = Disk()
    for parts in names:
        content = recv_from(src_rank, RankType.WORLD_RANK)
        path = folder.joinpath(*parts)
        if ".." in parts or not path.is_relative_to(folder):
            raise CheckpointError(f"rank {src_rank} sends a file that lies outside of its folder: {path}.")
        path.parent.mkdir(parents=True, exist_ok=True)
        disk.replace(path, content)


def _absent(folder: Path, rank: int) -> CheckpointError:
    return CheckpointError(
        f"rank {rank} has no checkpoint to send: there is no {folder}. Call save() of its CheckpointManager "
        "first, with the same directory."
    )
