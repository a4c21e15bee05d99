"""Writes a checkpoint in the background: each rank writes its file, then the first rank commits.

::

    rank 0   thread: writes rank-00000.safetensors ── waits for all ── index, state, manifest ── commit
    rank 1   thread: writes rank-00001.safetensors ──┐ "done", by the job's store
    rank 2   thread: writes rank-00002.safetensors ──┘

Ranks communicate through the job's store, which a thread can use while steps continue; the writer makes no
collective call. A writing rank reports every second, so that the others notice when it has died.
"""

import contextlib
import errno
import json
import secrets
import shutil
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from shardwright.checkpoint.disk import Disk, FileEntry, Record
from shardwright.checkpoint.float_types import not_finite
from shardwright.checkpoint.folder import CheckpointFolder
from shardwright.checkpoint.saved import LARGEST_TEXT, TensorPart, add_tensors
from shardwright.checkpoint.tensor_index import INDEX, MODEL, TensorEntry, TensorIndex
from shardwright.comm.codec import declare
from shardwright.comm.joining.process_group import default_store
from shardwright.comm.joining.run_secret import not_from_a_stranger
from shardwright.errors import CheckpointError, ShardwrightError
from shardwright.quantities import format_bytes
from shardwright.run.context import Context

Document = Mapping[str, Any]
"""What a rank saves beside its parts of tensors, as JSON."""

_BEAT_S = 1.0
_LOOK_S = 0.002
_LATEST_PAUSE_S = 0.25
_PAUSE_FOR_A_RANK_S = 0.02  # the more ranks are asked for, the longer
_AT_EXIT_S = 10.0  # when the script has ended


class _Said(Record):
    """The report of a rank on the files that it has written.

    Attributes:
        not_finite: weights in them that have infinities or NaN.
    """

    files: dict[str, FileEntry]
    tensors: dict[str, TensorEntry]
    document: dict[str, Any]
    not_finite: list[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointDraft:
    """A checkpoint that is going to be written, the same on every rank.

    Attributes:
        key: under which ranks speak of it in the store; new for each.
        keep: how many checkpoints stay; None for all.
    """

    path: Path
    step: int
    key: str
    keep: int | None

    @property
    def name(self) -> str:
        """Of the folder, when it is committed."""
        return self.path.name.partition(".tmp-")[0]


declare(CheckpointDraft)


def new_draft(
    folder: CheckpointFolder, step: int, *, keep: int | None, collects: bool = False
) -> CheckpointDraft:
    """Makes the folder of a new checkpoint, and removes what crashes have left; on the first rank."""
    try:
        if collects and folder.root.is_dir():
            folder.collect(keep=None)
        path = folder.begin(step)
    except OSError as error:
        raise CheckpointError(
            f"the checkpoint of step {step} cannot be saved in {folder.root}: {error.strerror}. Those from "
            "before stay. Give a folder that can be written, on a disk that has room."
        ) from error
    key = f"shardwright/checkpoint/{secrets.token_hex(8)}"
    return CheckpointDraft(path=path, step=step, key=key, keep=keep)


@dataclass(frozen=True, slots=True)
class RankSnapshot:
    """A rank's part of a checkpoint.

    Attributes:
        parameters: full names of the tensors that are parameters of the model.
        frozen: those of them that are not trained: they are mostly as they were when saved last.
    """

    parts: Sequence[TensorPart]
    parameters: Collection[str]
    document: dict[str, Any]
    frozen: Collection[str] = ()


class SaveUnderWay:
    """A rank's part in writing a checkpoint. Starts at once.

    Attributes:
        seconds: how long it took, when it is done.
        remark: what else went wrong, once the checkpoint was there.
    """

    def __init__(
        self,
        run: Context,
        draft: CheckpointDraft,
        snapshot: RankSnapshot,
        *,
        folder: CheckpointFolder,
        disk: Disk,
        others: Callable[[Sequence[Document]], Mapping[str, bytes]] = lambda _: {},
    ):
        self.step = draft.step
        self._draft = draft
        self._snapshot: RankSnapshot | None = snapshot
        self._others_of = others
        self._world_size = run.mesh.world_size
        self._rank = run.rank
        self._store = default_store() if run.mesh.world_size > 1 else None
        self._folder = folder
        self._disk = disk
        self._timeout_s = run.config.timeout_s
        self._blame = run.watch.blame
        self._problem: str | None = None
        self.remark = ""
        self._ended = threading.Event()
        self._beats = 0
        self.seconds = 0.0
        # No daemon: a script that ends waits for it.
        self._thread = threading.Thread(target=self._run, name="shardwright-checkpoint")
        self._thread.start()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Waits for this rank's part; on the first rank, for all. Returns whether that has ended."""
        return self._ended.wait(timeout_s)

    @property
    def has_ended(self) -> bool:
        """Whether this rank's part has been done, or has failed."""
        return self._ended.is_set()

    @property
    def problem(self) -> str | None:
        """Why it has failed; None where it has not."""
        return self._problem

    def _run(self) -> None:
        begin_s = time.monotonic()
        try:
            self._write()
        except Exception as error:
            self._problem = _told(error)
            if self._rank == 0:
                with contextlib.suppress(OSError):  # another rank may still write: then it is collected later
                    self._folder.discard(self._draft.path)
        finally:
            self._snapshot = None
            self.seconds = time.monotonic() - begin_s
            self._ended.set()

    def _write(self) -> None:
        snapshot = self._snapshot
        assert snapshot is not None
        if self._store is None:
            self._commit({0: self._written(snapshot)})
            return
        try:
            with _Beating(self._beat):
                own = self._written(snapshot)
                if self._rank:
                    self._report(own)
        except Exception as error:
            self._tell({"problem": f"rank {self._rank}: {_told(error)}"})
            raise
        if self._rank == 0:
            self._snapshot = None  # frees the copies
            del snapshot
            self._commit({0: own, **self._others()})

    def _written(self, snapshot: RankSnapshot) -> _Said:
        """Writes the files of this rank, and looks whether its weights are finite."""
        folder, name = self._draft.path, f"rank-{self._rank:05}"
        free_bytes = shutil.disk_usage(folder).free
        frozen = [part for part in snapshot.parts if part.name in snapshot.frozen]
        rest = [part for part in snapshot.parts if part.name not in snapshot.frozen]
        try:
            own = f"{name}.safetensors"
            file, tensors = add_tensors(folder, own, rest, disk=self._disk)
            files = {own: file}
            if frozen:
                own, earlier = f"{name}.frozen.safetensors", self._folder.newest()
                files[own], more = add_tensors(folder, own, frozen, disk=self._disk, earlier=earlier)
                tensors |= more
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            needed = format_bytes(sum(part.stored.data.nbytes for part in snapshot.parts))
            raise CheckpointError(
                f"{_told(error)}: this rank has {needed} to write, and {format_bytes(free_bytes)} were free"
            ) from error
        bad = not_finite_in(snapshot.parts, parameters=snapshot.parameters)
        return _Said(files=files, tensors=tensors, document=snapshot.document, not_finite=bad)

    # ---- between ranks ----

    def _report(self, own: _Said) -> None:
        """Says what this rank has written: in a file, as a store takes no large values."""
        content = own.model_dump_json().encode()
        written = self._disk.write(self._draft.path / _report_of(self._rank), [content], lasts=False)
        self._tell({"sha256": written.sha256})

    def _beat(self) -> None:
        assert self._store is not None
        self._beats += 1
        self._store.set(self._key(self._rank, "beat"), str(self._beats))

    def _tell(self, said: Mapping[str, Any]) -> None:
        assert self._store is not None
        self._store.set(self._key(self._rank, "said"), json.dumps(said))

    def _key(self, rank: int, what: str) -> str:
        return f"{self._draft.key}/{rank}/{what}"

    def _others(self) -> dict[int, _Said]:
        """The reports of the other ranks, once all have written."""
        assert self._store is not None
        found = {}
        pulses = {rank: ("", time.monotonic()) for rank in range(1, self._world_size)}
        pause_s = _LOOK_S
        while pulses:
            for rank in list(pulses):
                has_gone = self._blame is not None and self._blame.has_ended(rank)  # what it said is there
                if self._store.check([self._key(rank, "said")]):
                    with not_from_a_stranger(f"what rank {rank} has written"):
                        said = json.loads(self._take(self._key(rank, "said")))
                        found[rank] = self._heard(rank, said)
                    self._store.delete_key(self._key(rank, "beat"))
                    del pulses[rank]
                    continue
                if has_gone:
                    raise CheckpointError(
                        f"rank {rank} has ended while the checkpoint of step {self.step} was written. "
                        "Nothing was committed"
                    )
                pulses[rank] = self._pulse(rank, *pulses[rank])
            time.sleep(pause_s)
            pause_s = min(1.5 * pause_s, _PAUSE_FOR_A_RANK_S * max(1, len(pulses)), _LATEST_PAUSE_S)
        return found

    def _pulse(self, rank: int, beat: str, since_s: float) -> tuple[str, float]:
        assert self._store is not None
        key = self._key(rank, "beat")
        now = self._store.get(key).decode(errors="replace") if self._store.check([key]) else ""
        if now != beat:
            return now, time.monotonic()
        limit_s = self._timeout_s if threading.main_thread().is_alive() else min(self._timeout_s, _AT_EXIT_S)
        if time.monotonic() - since_s > limit_s:
            raise CheckpointError(
                f"rank {rank} has given no sign for {limit_s:g} s while the checkpoint of step "
                f"{self.step} was written: it has ended, or its disk hangs. Nothing was committed"
            )
        return beat, since_s

    def _heard(self, rank: int, said: Mapping[str, Any]) -> _Said:
        if "problem" in said:
            raise CheckpointError(said["problem"])
        path = self._draft.path / _report_of(rank)
        content = path.read_bytes() if path.is_file() else b""
        if sha256(content).hexdigest() != said["sha256"]:
            raise CheckpointError(
                f"rank {rank} has written {path.name}, and rank 0 does not find it at {path}. Give a folder "
                "that all hosts share."
            )
        self._disk.remove_file(path)
        return _Said.model_validate_json(content)

    def _take(self, key: str) -> str:
        assert self._store is not None
        value: str = self._store.get(key).decode()
        self._store.delete_key(key)
        return value

    # ---- on the first rank ----

    def _commit(self, ranks: Mapping[int, _Said]) -> None:
        draft = self._draft
        files = {name: entry for said in ranks.values() for name, entry in said.files.items()}
        self._refuse_folders_apart(files)
        index = TensorIndex.joined(said.tensors for said in ranks.values())
        others = self._others_of([ranks[rank].document for rank in sorted(ranks)])
        texts = {INDEX: index.to_bytes(), **others}
        for name, text in texts.items():
            if len(text) > LARGEST_TEXT:
                raise CheckpointError(
                    f"{name} has {len(text)} bytes, and at most {LARGEST_TEXT} could be read again. Keep "
                    "large states in tensors."
                )
        bad = dict.fromkeys(name for rank in sorted(ranks) for name in ranks[rank].not_finite)
        self._folder.commit(draft.path, step=draft.step, files=files, texts=texts, not_finite=tuple(bad))
        if draft.keep is not None:
            try:
                self._folder.collect(keep=draft.keep)
            except (CheckpointError, OSError) as error:
                self.remark = f"old checkpoints were not removed: {_told(error)}"

    def _refuse_folders_apart(self, files: Mapping[str, FileEntry]) -> None:
        for name, entry in files.items():
            path = self._draft.path / name
            size = path.stat().st_size if path.is_file() else None
            if size != entry.size:
                rank = int(name.removeprefix("rank-").partition(".")[0])
                raise CheckpointError(
                    f"rank {rank} has written {name} with {entry.size} bytes, and rank 0 finds "
                    f"{'nothing' if size is None else f'{size} bytes'} at {path}. Give a folder that all "
                    "hosts share."
                )


class _Beating:
    """Says every second that this rank still writes."""

    def __init__(self, beat: Callable[[], None]):
        self._beat = beat
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="shardwright-checkpoint-beat", daemon=True)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.wait(_BEAT_S):
            self._beat()


def _report_of(rank: int) -> str:
    return f"rank-{rank:05}.json"


def _told(error: Exception) -> str:
    if isinstance(error, ShardwrightError):
        return str(error)
    if isinstance(error, OSError) and error.strerror:
        where = f" ({error.filename})" if error.filename else ""
        if error.errno == errno.ENOENT:
            where += ": give a folder that all hosts share"
        return f"{error.strerror}{where}"
    return f"{type(error).__name__}: {error}"


def not_finite_in(parts: Iterable[TensorPart], *, parameters: Collection[str]) -> list[str]:
    """Weights that have infinities or NaN, by their names in the model.

    Buffers may be infinite, as masks for attention are, but no buffer is NaN on purpose.
    """
    found: dict[str, None] = {}
    for part in parts:
        if part.name.startswith(MODEL) and part.name not in found:
            problem = not_finite(part.stored.data, part.stored.dtype)
            if problem.nan or (problem.infinite and part.name in parameters):
                found[part.name] = None
    return [name.removeprefix(MODEL) for name in found]
