"""The record of a run, ``run.json``, and the choice of its folder: a new one, or that of a run it continues.

::

    same script, arguments and settings,
    not finished, with a checkpoint        ──► goes on in that folder
    finished, or nothing saved             ──► a folder of its own: train, train-2, train-3, ...

So the same command twice continues a run that was stopped, and never touches one that came to its end.
"""

import os
import shlex
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from shardwright.errors import CheckpointError, UsageError
from shardwright.exit_codes import OK, SAVED
from shardwright.files import Record, UserFile
from shardwright.observe.metrics import read_last
from shardwright.observe.run_folder import RunFolder, held, is_name, show_path

RunState = Literal["running", "finished", "saved", "stopped", "failed"]
"""``running`` stays where a run was killed; ``saved``: a signal came, and the run saved and ended."""

_NAME = "run.json"
_LATEST_S = 253_402_300_799  # the end of the year 9999
_FIRST_SIGNAL = 128
_MOST_EVENTS = 2**26


class RunRecord(Record):
    """What is known of a run before and after it.

    Attributes:
        script: its absolute path, or the name of a module.
        beside: the path as seen from the run folder: both may be moved together, or mounted elsewhere.
        command: to be typed again, from the same folder.
        named: whether somebody chose the name of the run folder.
        exit_code: of the launcher; None where there was none, or it goes on.
        begun_s: when it began or went on last, seconds since 1970.
    """

    version: Literal[1] = 1
    script: str
    beside: str = ""
    arguments: tuple[str, ...] = ()
    settings: dict[str, Any] = Field(default_factory=dict)
    command: str = ""
    named: bool = False
    state: RunState = "running"
    exit_code: int | None = None
    begun_s: Annotated[float, Field(ge=0, le=_LATEST_S)] = 0.0

    def is_repeated_by(self, other: "RunRecord") -> bool:
        """Whether the other, of the same script, has the same arguments and settings, on any ranks."""
        return (self.arguments, self.settings) == (other.arguments, other.settings)

    def is_of(self, script: str, folder: RunFolder) -> bool:
        """Whether the run in a folder is one of this script, also where both have moved."""
        moved = self.beside and os.path.normpath(folder.path.absolute() / self.beside)
        return script in (self.script, moved)

    @property
    def did_finish(self) -> bool:
        return self.state == "finished"

    def begun(self, folder: RunFolder) -> "RunRecord":
        """Writes that the run begins, or goes on, now."""
        is_path = os.path.isabs(self.script)
        beside = os.path.relpath(self.script, folder.path.absolute()) if is_path else ""
        begun_s = round(time.time(), 3)
        return self._changed(folder, beside=beside, state="running", exit_code=None, begun_s=begun_s)

    def ended(self, folder: RunFolder, exit_code: int) -> "RunRecord":
        """Writes how the run ended, by the exit code of its launcher."""
        states: dict[int, RunState] = {OK: "finished", SAVED: "saved"}
        otherwise: RunState = "stopped" if exit_code > _FIRST_SIGNAL else "failed"
        return self._changed(folder, state=states.get(exit_code, otherwise), exit_code=exit_code)

    def ended_as(self, folder: RunFolder, state: RunState) -> "RunRecord":
        """Writes how the run ended, where no launcher knows an exit code."""
        return self._changed(folder, state=state)

    def _changed(self, folder: RunFolder, **fields: Any) -> "RunRecord":
        changed = self.model_copy(update=fields)
        if changed.state != "running" and not folder.path.is_dir():
            return changed  # it was deleted, of which the run has told
        folder.write(_NAME, changed.model_dump_json(indent=1) + "\n")
        return changed


@dataclass(frozen=True, slots=True)
class _SavedStep:
    """The newest checkpoint of a run.

    Attributes:
        step: how many steps were done; None where its folder cannot be read.
    """

    step: int | None
    folder: Path

    def __str__(self) -> str:
        return "its last checkpoint" if self.step is None else f"step {self.step}"


def read_record(folder: RunFolder) -> RunRecord | None:
    path = folder.path / _NAME
    if not path.is_file():
        return None
    file = UserFile(path, what="", error=UsageError)
    try:
        return file.model(RunRecord, file.read_json())
    except UsageError:  # of a later version, or edited: another run's for all that we know
        return None


def saved_step(folder: RunFolder) -> _SavedStep | None:
    """The newest checkpoint of a run, in its folder or where the script keeps them; None without one."""
    # Here, because a run that begins has none.
    from shardwright.checkpoint.folder import CheckpointFolder

    def newest_in(root: Path) -> _SavedStep | None:
        try:
            commits = CheckpointFolder(root).commits()
        except CheckpointError:
            return _SavedStep(None, root)
        return _SavedStep(commits[-1].step, root) if commits else None

    found = newest_in(folder.path / "checkpoints")
    if found is not None or (named := _named_by_events(folder)) is None:
        return found
    return newest_in(named)


def go_on(folder: RunFolder, record: RunRecord) -> str:
    """One line for a run that ended early: what was saved, and the command that goes on; may be empty."""
    saved = saved_step(folder)
    if saved is None:
        return ""
    return f"saved {saved} in {show_path(saved.folder)}; go on: {record.command}"


def going_further(record: RunRecord) -> str:
    """The command that continues a run which has finished: its name asks for that, or else ``--resume``.

    Options behind the script are its own.

    >>> def continued(command: str, *arguments: str) -> str:
    ...     return going_further(RunRecord(script="train.py", arguments=arguments, command=command))
    >>> continued("shardwright run -n 2 train.py"), continued("shardwright run --name a train.py")
    ('shardwright run --resume -n 2 train.py', 'shardwright run --name a train.py')
    >>> continued("shardwright run train.py --name big --fresh", "--name", "big", "--fresh")
    'shardwright run --resume train.py --name big --fresh'
    """
    words = shlex.split(record.command)
    own, arguments = words[: len(words) - len(record.arguments)], list(record.arguments)
    if any(word.partition("=")[0] == "--name" for word in own):
        return record.command
    options = [word for word in own[2:] if word not in ("--fresh", "--resume")]
    return shlex.join([*own[:2], "--resume", *options, *arguments])


def command_of_script(words: Sequence[str], *, settings: Mapping[str, Any], world_size: int) -> RunRecord:
    """A record of the script that this process runs, where no launcher of ours has begun it."""
    main = sys.modules["__main__"]
    spec = getattr(main, "__spec__", None)
    script = str(Path(words[0]).absolute()) if spec is None else spec.name.removesuffix(".__main__")
    starter = ["python", *(["-m", script] if spec is not None else [words[0]])]
    alone = shlex.join([*starter, *words[1:]])
    return RunRecord(
        script=script,
        arguments=tuple(words[1:]),
        settings=dict(settings),
        command=alone if world_size == 1 else "the same command",
    )


def _named_by_events(folder: RunFolder) -> Path | None:
    """The folder of checkpoints that a script chose itself, as it told last."""
    # Many events tell of something else.
    events = read_last(folder.events_file, most_bytes=_MOST_EVENTS, having=b"checkpoint_saved")
    named = [event.get("folder") for event in events if event.get("kind") == "checkpoint_saved"]
    return Path(named[-1]) if named and isinstance(named[-1], str) else None


_NOTEBOOKS = frozenset({"ipykernel_launcher", "colab_kernel_launcher"})
"""Programs that run the cells of any notebook."""

Again = Literal["auto", "resume", "fresh"]
"""What a command does that was given before: see the module; continue in any case; begin anew."""


@dataclass(frozen=True, slots=True)
class _RunChoice:
    """The folder for a run.

    Attributes:
        continued: the run folder that goes on; None for a new one.
        stem: what a new folder is called, with a number where that is taken.
        saved: the checkpoint that the run goes on from.
        remark: a line about another run that somebody may have meant; may be empty.
    """

    continued: RunFolder | None
    stem: str | None
    saved: _SavedStep | None = None
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
    saved: _SavedStep | None
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
    saved: _SavedStep | None

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


def choose_run(base: Path, command: RunRecord, *, again: Again = "auto", resume_by: str = "") -> _RunChoice:
    stem = _stem(command.script)
    earlier = sorted(_runs_of(base.absolute(), command.script), key=lambda run: run.record.begun_s)
    with_checkpoint = [run for run in earlier if run.saved is not None]
    if again == "resume":
        return _resumed(with_checkpoint, base, command)
    mine = [run for run in earlier if not run.record.named and run.record.is_repeated_by(command)]
    newest = mine[-1] if mine and again == "auto" else None
    if newest is not None and newest.saved and not newest.record.did_finish and not _is_held(newest.folder):
        return _RunChoice(newest.folder, None, newest.saved)
    return _RunChoice(None, stem, remark=_remark(with_checkpoint, command, resume_by))


def _was_named(folder: RunFolder, name: str | None) -> bool:
    """Whether somebody chose the name, now or when the run began."""
    before = read_record(folder)
    return name is not None if before is None else before.named


def _resumed(with_checkpoint: list[_Earlier], base: Path, command: RunRecord) -> _RunChoice:
    if not with_checkpoint:
        raise UsageError(
            f"no run of {_short(command.script)} in {show_path(base.absolute())} has a checkpoint to resume "
            "from. Leave --resume out to begin one; the script saves with sw.Checkpoints."
        )
    newest = with_checkpoint[-1]
    if _is_held(newest.folder):
        raise UsageError(f"{newest.name} goes on in another process. Wait until that has ended.")
    return _RunChoice(newest.folder, None, newest.saved)


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
        if record is not None and record.is_of(script, folder):
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
