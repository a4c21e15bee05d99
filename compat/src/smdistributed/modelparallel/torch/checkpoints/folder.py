"""A folder of checkpoints: how they are laid out, committed, found and removed.

::

    path/
      newest                          the tag of the checkpoint that was saved last
      {tag}_partial/                  a partial checkpoint
        model_0_0.pt, optimizer_0_0.pt, fp16_states_0_0.pt, ... user_content.pt
        partition.json                the partition decision: a plan file
        manifest.json                 sizes and checksums
      {tag}, user_content_{tag}, manifest_{tag}.json
                                      a full checkpoint: see `full`

A partial checkpoint is written into ``{tag}_partial.tmp-1f3a2b4c``, and renamed when all of it is on the
disk. One of the same tag makes room as ``{tag}_partial.old-1f3a2b4c`` just before, and is found there if the
run ends in between.
"""

import os
import re
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Any

from shardwright.checkpoint.disk import Disk, FileEntry, NewFile
from shardwright.checkpoint.safe_files import read_regular
from shardwright.errors import CheckpointError, CorruptCheckpointError, UsageError
from smdistributed.modelparallel.torch.checkpoints.records import PartialRecord, verify

MANIFEST = "manifest.json"
PARTITION = "partition.json"
USER_CONTENT = "user_content.pt"
_NEWEST = "newest"
_PARTIAL = "_partial"
_LEFT_OVER = re.compile(r".+_partial\.(tmp|old)-[0-9a-f]{8}")


class PartialCheckpoint:
    """A partial checkpoint on the disk."""

    def __init__(self, path: Path, record: PartialRecord):
        self.path = path
        self.record = record

    def verified(self, *, share: tuple[int, int] = (0, 1)) -> Path:
        """The folder, whose files were compared with their checksums.

        Args:
            share: which part of the files, and of how many: ranks share the work.
        """
        number, count = share
        for name in sorted(self.record.files)[number::count]:
            verify(self.path / name, self.record.files[name])
        return self.path


class CheckpointFolder:
    """Checkpoints in a folder. One run at a time writes to it."""

    def __init__(self, root: str | os.PathLike[str], *, disk: Disk | None = None):
        self.root = Path(root)
        self._disk = disk or Disk()

    # ---- finding ----

    def newest(self) -> str:
        """The tag of the checkpoint that was saved last."""
        path = self.root / _NEWEST
        if not path.exists():
            raise CheckpointError(
                f"{self.root} has no checkpoint: there is no file {_NEWEST}. Give the folder that "
                "smp.save_checkpoint was given, or a tag."
            )
        return tag_of(read_regular(path, most_bytes=4096).decode(errors="replace").strip())

    def tags(self) -> list[str]:
        """Tags of the partial checkpoints, oldest first."""
        return [record.tag for record, _ in self._partial_ones()]

    def partial(self, tag: str) -> PartialCheckpoint:
        """Opens a partial checkpoint."""
        final = self.root / f"{tag}{_PARTIAL}"
        # Where a save of the same tag ended between two renames, the one before it is still there.
        earlier = sorted(self.root.glob(f"{_literally(tag)}{_PARTIAL}.old-*")) if self.root.is_dir() else []
        for path in (final, *earlier):
            if path.is_dir() and not path.is_symlink():
                return self.partial_at(path)
        there = ", ".join(self.tags()) or "none"
        is_full = (self.root / tag).is_file()
        full = " A full one of that tag is there: partial=False loads it." if is_full else ""
        raise CheckpointError(
            f"{self.root} has no partial checkpoint {tag!r}. Tags of those that it has: {there}.{full}"
        )

    def partial_at(self, path: Path) -> PartialCheckpoint:
        """Opens a partial checkpoint by its folder; raises as `partial` does."""
        return PartialCheckpoint(path, self._record(path))

    def _record(self, path: Path) -> PartialRecord:
        manifest = path / MANIFEST
        if not manifest.exists():
            raise CorruptCheckpointError(
                f"{path} has no {MANIFEST}: it is incomplete, or was not saved by this library."
            )
        return PartialRecord.from_bytes(read_regular(manifest), name=str(manifest))

    def _partial_ones(self) -> list[tuple[PartialRecord, Path]]:
        """The complete ones, oldest first; what other libraries have saved is not among them."""
        found = []
        for path in self.root.glob(f"*{_PARTIAL}") if self.root.is_dir() else ():
            if (path / MANIFEST).is_file() and not path.is_symlink():
                try:
                    found.append((self._record(path), path))
                except CorruptCheckpointError:  # whoever asks for it is told so
                    continue
        return sorted(found, key=lambda item: item[0].number)

    # ---- writing ----

    def begin(self, tag: str) -> Path:
        """Makes the folder of a new partial checkpoint, in which files can be put."""
        if not self.root.is_dir():
            self._disk.make_folder(self.root)
        draft = self.root / f"{tag}{_PARTIAL}.tmp-{secrets.token_hex(4)}"
        self._disk.make_folder(draft)
        return draft

    def next_number(self) -> int:
        """The number of the next partial checkpoint."""
        return 1 + max((record.number for record, _ in self._partial_ones()), default=-1)

    def commit(self, draft: Path, record: PartialRecord) -> None:
        """Makes a draft a checkpoint, and the newest one."""
        disk = self._disk
        disk.write(draft / MANIFEST, [record.to_bytes()])
        disk.sync_folder(draft)
        final = self.root / f"{record.tag}{_PARTIAL}"
        if final.exists():
            disk.rename(final, self.root / f"{final.name}.old-{secrets.token_hex(4)}")
        disk.rename(draft, final)
        self.point_to(record.tag)

    def point_to(self, tag: str) -> None:
        """Makes a checkpoint the newest one."""
        self._disk.replace(self.root / _NEWEST, f"{tag}\n".encode())
        for left_over in self.root.glob(f"{_NEWEST}.tmp-*"):
            left_over.unlink()

    def collect(self, *, keep: int | None) -> None:
        """Removes old partial checkpoints, and what interrupted saves have left."""
        for path in [path for path in self.root.iterdir() if _LEFT_OVER.fullmatch(path.name)]:
            final = self.root / path.name.rpartition(".")[0]
            if path.is_dir() and (".tmp-" in path.name or final.exists()):
                self._disk.remove_folder(path)
        if keep is None:
            return
        for _, path in self._partial_ones()[:-keep]:
            # Under another name first: a half removed one would be taken for a damaged one.
            doomed = self.root / f"{path.name}.tmp-{secrets.token_hex(4)}"
            self._disk.rename(path, doomed)
            self._disk.remove_folder(doomed)

    def discard(self, draft: Path) -> None:
        """Removes a draft."""
        if draft.is_dir():
            self._disk.remove_folder(draft)

    def add(self, draft: Path, name: str, save: Callable[[NewFile], object]) -> FileEntry:
        """Writes a file of a draft."""
        written = self._disk.write_with(draft / name, save)
        return FileEntry(size=written.size, sha256=written.sha256)


def tag_of(tag: Any) -> str:
    """A tag as the part of a file's name."""
    text = str(tag) if isinstance(tag, int | str) and not isinstance(tag, bool) else ""
    if not text or text.startswith(".") or any(c in text for c in "/\0\\") or len(text) > 200:
        raise UsageError(
            f"the tag of a checkpoint is {tag!r}, but it becomes a part of a file's name. Give a text such "
            "as 'total_steps100'."
        )
    return text


def _literally(text: str) -> str:
    """For a pattern of file names."""
    return re.sub(r"([*?\[])", r"[\1]", text)
