"""Chooses the folder of a run: of an earlier one that it continues, or a new one.

::

    same script, arguments and settings,
    not finished, with a checkpoint        ──► goes on in that folder
    finished, or nothing saved             ──► a folder of its own: train, train-2, train-3, ...

So the same command twice continues a run that was stopped, and never touches one that came to its end.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from shardwright.errors import UsageError
from shardwright.observe.folder_lock import held
from shardwright.observe.run_folder import RunFolder, is_name, show_path
from shardwright.observe.run_record import RunRecord, SavedStep, read_record, saved_step

__all__ = ["Again", "BegunRun", "RunChoice", "begin_run", "choose_run"]

_NOTEBOOKS = frozenset({"ipykernel_launcher", "colab_kernel_launcher"})
"""Programs that run the cells of any notebook."""

Again = Literal["auto", "resume", "fresh"]
"""What a command does that was given before: see the module; continue in any case; begin anew."""


@dataclass(frozen=True, slots=True)
class RunChoice:
    """The folder for a run.

    Attributes:
        continued: the run folder that goes on; None for a new one.
        stem: what a new folder is called, with a number where that is taken.
        saved: the checkpoint that the run goes on from.
        remark: a line about another run that somebody may have meant; may be empty.
    """

    continued: RunFolder | None
    stem: str | None
    saved: SavedStep | None = None
    remark: str = ""


@dataclass(frozen=True, slots=True)
class BegunRun:
    """A run whose folder is there, held by this process, with its record in it.

    Attributes:
        saved: the checkpoint that it goes on from; None for a new one.
        remark: a line about another run that somebody may have meant; may be empty.
    """

    folder: RunFolder
    record: RunRecord
    saved: SavedStep | None
    remark: str

    @property
    def told(self) -> tuple[str, ...]:
        """Lines for the console where another run has to do with this one."""
        goes_on = "" if self.saved is None else f"{self.folder} goes on from {self.saved}"
        return tuple(filter(None, (goes_on, self.remark)))


@dataclass(frozen=True, slots=True)
class _Earlier:
    folder: RunFolder
    record: RunRecord
    saved: SavedStep | None

    @property
    def name(self) -> str:
        return show_path(self.folder.path)


def begin_run(
    base: Path,
    command: RunRecord,
    *,
    name: str | None,
    part: Literal["logs", "metrics"] | None,
    again: Again = "auto",
    resume_by: str = "",
) -> BegunRun:
    """Makes the folder of a run or takes that of one that goes on, and writes the record."""
    choice = None if name is not None else choose_run(base, command, again=again, resume_by=resume_by)
    if choice is not None and choice.continued is not None:
        folder = choice.continued
    else:
        stem = None if choice is None else choice.stem
        folder = RunFolder.create(base, name=name, stem=stem, environ={})
    if part is not None:
        folder.hold(part)
    saved = saved_step(folder)
    record = command.model_copy(update={"named": _was_named(folder, name)}).begun(folder)
    return BegunRun(folder, record, saved, "" if choice is None else choice.remark)


def choose_run(base: Path, command: RunRecord, *, again: Again = "auto", resume_by: str = "") -> RunChoice:
    """Chooses the folder of a run."""
    stem = _stem(command.script)
    earlier = sorted(_runs_of(base.absolute(), command.script), key=lambda run: run.record.begun_s)
    with_checkpoint = [run for run in earlier if run.saved is not None]
    if again == "resume":
        return _resumed(with_checkpoint, base, command)
    mine = [run for run in earlier if not run.record.named and run.record.is_repeated_by(command)]
    newest = mine[-1] if mine and again == "auto" else None
    if newest is not None and newest.saved and not newest.record.did_finish and not _is_held(newest.folder):
        return RunChoice(newest.folder, None, newest.saved)
    return RunChoice(None, stem, remark=_remark(with_checkpoint, command, resume_by))


def _was_named(folder: RunFolder, name: str | None) -> bool:
    """Whether somebody chose the name, now or when the run began."""
    before = read_record(folder)
    return name is not None if before is None else before.named


def _resumed(with_checkpoint: list[_Earlier], base: Path, command: RunRecord) -> RunChoice:
    if not with_checkpoint:
        raise UsageError(
            f"no run of {_short(command.script)} in {show_path(base.absolute())} has a checkpoint to resume "
            "from. Leave --resume out to begin one; the script saves with sw.Checkpoints."
        )
    newest = with_checkpoint[-1]
    if _is_held(newest.folder):
        raise UsageError(f"{newest.name} goes on in another process. Wait until that has ended.")
    return RunChoice(newest.folder, None, newest.saved)


def _remark(with_checkpoint: list[_Earlier], command: RunRecord, resume_by: str) -> str:
    """About the newest run of the script that could go on, which somebody may have meant."""
    if not with_checkpoint:
        return ""
    newest = with_checkpoint[-1]
    if _is_held(newest.folder):
        return ""
    differs = "" if newest.record.is_repeated_by(command) else ", with other arguments or settings"
    told = "finished" if newest.record.did_finish else "did not finish"
    continues = f" To continue it: {resume_by}" if resume_by else ""
    return f"note: {newest.name} has saved {newest.saved} and {told}{differs}.{continues}"


def _runs_of(base: Path, script: str) -> Iterator[_Earlier]:
    if not base.is_dir():
        return
    for path in base.iterdir():
        folder = RunFolder(path)
        record = read_record(folder)
        if record is not None and record.script == script:
            yield _Earlier(folder, record, saved_step(folder))


def _is_held(folder: RunFolder) -> bool:
    """Whether a process goes on writing there."""
    locks = [folder.path / f".{part}.lock" for part in ("logs", "metrics")]
    for lock in locks:
        if lock.is_file():
            with held(lock) as holder:
                if holder is not None:
                    return True
    return False


def _stem(script: str) -> str | None:
    """The name for runs of a script; None where it makes none: a prompt, a notebook."""
    path = Path(script)
    if path.stem in _NOTEBOOKS or path.is_dir():
        return None
    stem = path.stem if script.endswith(".py") else _short(script)
    return stem if is_name(stem) else None


def _short(script: str) -> str:
    return Path(script).name if script.startswith("/") else script.rpartition(".")[2]
