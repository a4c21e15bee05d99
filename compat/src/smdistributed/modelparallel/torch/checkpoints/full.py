"""Full checkpoints in a folder: a file with the model's state, and one with what the script keeps beside it.

::

    {tag}                    the state of the whole model, as `torch.save` writes it
    user_content_{tag}
    manifest_{tag}.json      which content of these files belongs together; replaced last

New files of the same tag take the place of the old ones before the manifest is replaced. So the old ones stay
under ``{tag}.old`` meanwhile: what the manifest says decides which of them count.
"""

import contextlib
import glob
import os
from collections.abc import Callable, Mapping
from pathlib import Path

from shardwright.checkpoint.disk import Disk, FileEntry, NewFile
from shardwright.checkpoint.safe_files import read_regular
from shardwright.errors import CheckpointError, CorruptCheckpointError
from smdistributed.modelparallel.torch.checkpoints.records import FullRecord, fits, verify


def content_name(tag: str) -> str:
    """The name of the file with what the script keeps beside the model."""
    return f"user_content_{tag}"


class FullCheckpoints:
    """Full checkpoints in a folder. One run at a time writes to it."""

    def __init__(self, root: str | os.PathLike[str], *, disk: Disk | None = None):
        self.root = Path(root)
        self._disk = disk or Disk()

    def find(self, tag: str) -> tuple[Path, Path | None]:
        """The files of a checkpoint: of the model, and of what the script has kept beside it, if it has.

        A model that was saved by `torch.save` alone has no checksum, and is not compared with any.
        """
        record = self._record(tag)
        if record is not None:
            found = {name: self._either(name, entry) for name, entry in record.files.items()}
            return found[tag], found.get(content_name(tag))
        model, content = self.root / tag, self.root / content_name(tag)
        if not model.is_file():
            is_partial = (self.root / f"{tag}_partial").is_dir()
            raise CheckpointError(
                f"{model} is not there, so there is no full checkpoint {tag!r}."
                + (" A partial one of that tag is there: partial=True loads it." if is_partial else "")
            )
        return model, content if content.is_file() else None

    def commit(self, tag: str, saves: Mapping[str, Callable[[NewFile], object]]) -> None:
        """Writes a checkpoint."""
        if not self.root.is_dir():
            self._disk.make_folder(self.root)
        written = {name: self._write(name, save) for name, save in saves.items()}
        before = None
        with contextlib.suppress(CorruptCheckpointError):  # then there is nothing to keep
            before = self._record(tag)
        for name, entry in before.files.items() if before is not None else ():
            self._keep(name, entry)
        for name in written:
            self._disk.rename(self._fresh(name), self.root / name)
        self._disk.replace(self._manifest(tag), FullRecord(tag=tag, files=written).to_bytes())
        for name in written:
            self._kept(name).unlink(missing_ok=True)
        for left_over in self.root.glob(f"{glob.escape(self._manifest(tag).name)}.tmp-*"):
            left_over.unlink()

    def _write(self, name: str, save: Callable[[NewFile], object]) -> FileEntry:
        self._fresh(name).unlink(missing_ok=True)
        written = self._disk.write_with(self._fresh(name), save)
        return FileEntry(size=written.size, sha256=written.sha256)

    def _keep(self, name: str, entry: FileEntry) -> None:
        """Has the file that counts keep another name."""
        if fits(self.root / name, entry):  # else an earlier save ended in between, and it has that name
            self._kept(name).unlink(missing_ok=True)
            self._disk.link(self.root / name, self._kept(name))

    def _either(self, name: str, entry: FileEntry) -> Path:
        path, kept = self.root / name, self._kept(name)
        if kept.exists() and not fits(path, entry) and fits(kept, entry):
            return kept
        verify(path, entry)
        return path

    def _record(self, tag: str) -> FullRecord | None:
        path = self._manifest(tag)
        if not path.exists():
            return None
        record = FullRecord.from_bytes(read_regular(path), name=str(path))
        if tag not in record.files:
            raise CorruptCheckpointError(f"{path} does not list {tag}.")
        return record

    def _manifest(self, tag: str) -> Path:
        return self.root / f"manifest_{tag}.json"

    def _fresh(self, name: str) -> Path:
        return self.root / f"{name}.tmp"

    def _kept(self, name: str) -> Path:
        return self.root / f"{name}.old"
