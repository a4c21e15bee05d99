"""The record of a run, ``run.json``: the command that began it, how it ended, and what it has saved."""

import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from shardwright.errors import CheckpointError, UsageError
from shardwright.exit_codes import OK, SAVED
from shardwright.files import Record, UserFile
from shardwright.observe.jsonl import read_json_lines
from shardwright.observe.run_folder import RunFolder, show_path

__all__ = [
    "RunRecord",
    "RunState",
    "SavedStep",
    "command_of_script",
    "go_on",
    "going_further",
    "read_record",
    "saved_step",
]

RunState = Literal["running", "finished", "saved", "stopped", "failed"]
"""``running`` stays where a run was killed; ``saved``: a signal came, and the run saved and ended."""

_NAME = "run.json"
_LATEST_S = 253_402_300_799  # the end of the year 9999
_FIRST_SIGNAL = 128


class RunRecord(Record):
    """What is known of a run before and after it.

    Attributes:
        script: its absolute path, or the name of a module.
        settings: those that the launcher was given.
        command: to be typed again, from the same folder.
        named: whether somebody chose the name of the run folder.
        state: how far it has come.
        exit_code: of the launcher; None where there was none, or it goes on.
        begun_s: when it began or went on last, seconds since 1970.
    """

    version: Literal[1] = 1
    script: str
    arguments: tuple[str, ...] = ()
    settings: dict[str, Any] = Field(default_factory=dict)
    command: str = ""
    named: bool = False
    state: RunState = "running"
    exit_code: int | None = None
    begun_s: Annotated[float, Field(ge=0, le=_LATEST_S)] = 0.0

    def is_repeated_by(self, other: "RunRecord") -> bool:
        """Whether the other is the same script with the same arguments and settings, on any ranks."""
        return (self.script, self.arguments, self.settings) == (other.script, other.arguments, other.settings)

    @property
    def did_finish(self) -> bool:
        """Whether the script came to its end."""
        return self.state == "finished"

    def begun(self, folder: RunFolder) -> "RunRecord":
        """Writes that the run begins, or goes on, now."""
        return self._changed(folder, state="running", exit_code=None, begun_s=round(time.time(), 3))

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
        folder.write(_NAME, changed.model_dump_json(indent=1) + "\n")
        return changed


@dataclass(frozen=True, slots=True)
class SavedStep:
    """The newest checkpoint of a run.

    Attributes:
        step: how many steps were done; None where the list of checkpoints is damaged.
    """

    step: int | None
    folder: Path

    def __str__(self) -> str:
        """Names the step."""
        return "its last checkpoint" if self.step is None else f"step {self.step}"


def read_record(folder: RunFolder) -> RunRecord | None:
    """The record of a run; None where there is none, or one that cannot be read."""
    path = folder.path / _NAME
    if not path.is_file():
        return None
    file = UserFile(path, what="", error=UsageError)
    try:
        return file.model(RunRecord, file.read_json())
    except UsageError:  # of a later version, or edited: another run's for all that we know
        return None


def saved_step(folder: RunFolder) -> SavedStep | None:
    """The newest checkpoint of a run, in its folder or where the script keeps them; None without one."""
    # Here, because a run that begins has none.
    from shardwright.checkpoint.commits import COMMITTED, read_commits

    for root in (folder.path / "checkpoints", _named_by_events(folder)):
        if root is None or not (root / COMMITTED).is_file():
            continue
        try:
            commits = read_commits(root)
        except CheckpointError:
            return SavedStep(None, root)
        if commits:
            return SavedStep(commits[-1].step, root)
    return None


def go_on(folder: RunFolder, record: RunRecord) -> str:
    """One line for a run that ended early: what was saved, and the command that goes on; may be empty.

    Nothing is said where nothing was saved: the same command then begins a new run.
    """
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
    if not folder.events_file.is_file():
        return None
    try:
        events = read_json_lines(folder.events_file)
    except UsageError:
        return None
    named = [event.get("folder") for event in events if event.get("kind") == "checkpoint_saved"]
    return Path(named[-1]) if named and isinstance(named[-1], str) else None
