"""The saves of a run: begun on all ranks, written in the background, asked for by signals."""

import json
import os
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn

from shardwright.checkpoint.disk import Disk
from shardwright.checkpoint.folder import CheckpointFolder, refuse_one_checkpoint
from shardwright.checkpoint.hugging_face import CONFIG, TIES
from shardwright.checkpoint.importing import STATE
from shardwright.comm.message_names import Purpose
from shardwright.errors import CheckpointError, UsageError
from shardwright.observe.run_folder import hold, release, show_path
from shardwright.plan import Plan
from shardwright.run.joint_calls import call_together, first_cause_named, meet, on_every_rank_told
from shardwright.run.saving import CheckpointDraft, RankSnapshot, SaveUnderWay, new_draft
from shardwright.torch._private.modules import non_persistent_buffers
from shardwright.torch.checkpoints.encoded import StateObjects
from shardwright.torch.checkpoints.snapshot import PLAN, RankDocument, StateDocument, take_snapshot
from shardwright.torch.model.distributed_model import DistributedModel
from shardwright.torch.startup import ScriptRun

_LOCK = ".lock"


def hold_folder(path: Path) -> Path:
    """Keeps other runs from saving in a folder, and makes it; on the first rank."""
    refuse_one_checkpoint(path)
    if CheckpointFolder(path / "checkpoints").commits() and not CheckpointFolder(path).commits():
        raise UsageError(
            f"{path} is the folder of a run, whose checkpoints are in a folder in it: "
            f'sw.Checkpoints("{path / "checkpoints"}").'
        )
    try:
        path.mkdir(parents=True, exist_ok=True)
        holder = hold(path / _LOCK)
    except OSError as error:
        raise UsageError(
            f"{path} cannot be a folder of checkpoints: {error.strerror}. Give one that can be written."
        ) from error
    if holder is not None:
        raise UsageError(
            f"another run saves its checkpoints in {path} ({holder}). Wait until it has ended, or give this "
            "one a folder of its own."
        )
    return path


def release_folder(path: Path) -> None:
    release(path / _LOCK)


_ALLOWED = ("SIGTERM", "SIGUSR1", "SIGUSR2", "SIGINT", "SIGHUP")


class SaveSignals:
    """Notes that a signal came; somebody looks between two steps.

    A second Ctrl-C ends the process as ever. Children that the process forks (workers of a data loader) pass
    over SIGINT and SIGUSR1, which a terminal or a launcher sends to all: the process still needs them.

    Attributes:
        came: number of the first that came; 0 as long as none has.
    """

    def __init__(self, names: Iterable[str], *, says: bool = True):
        self.came = 0
        self._says = says
        self._owner = os.getpid()
        self._before: dict[int, Any] = {}
        if threading.current_thread() is not threading.main_thread():
            return  # Python allows handlers in the main thread alone
        for name in [names] if isinstance(names, str) else names:
            if name not in _ALLOWED:
                raise UsageError(
                    f"signals has {name!r}, and may have {', '.join(_ALLOWED)}, as in "
                    "signals=('SIGTERM', 'SIGUSR1')."
                )
            number = getattr(signal, name)
            if number == signal.SIGHUP and signal.getsignal(number) is signal.SIG_IGN:
                continue  # nohup: the run outlives its terminal
            self._before[number] = signal.signal(number, self._note)

    def close(self) -> None:
        """Puts the handlers back that there were before."""
        for number, handler in self._before.items():
            if signal.getsignal(number) == self._note:
                signal.signal(number, handler)
        self._before.clear()

    def _note(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._owner:
            if number == signal.SIGTERM:  # somebody ends this child
                signal.signal(number, signal.SIG_DFL)
                os.kill(os.getpid(), number)
            return
        if number == signal.SIGINT and self.came:
            raise KeyboardInterrupt
        if number == signal.SIGINT and self._says:
            os.write(2, b"saving at the end of this step; Ctrl-C again ends at once\n")
        self.came = self.came or number


def documents_of_run(plan: Plan | None, module: nn.Module) -> dict[str, bytes]:
    """Texts of JSON by the names of their files: the plan, other names, settings of a Hugging Face model."""
    documents = {}
    if plan is not None:
        documents[PLAN] = plan.to_json().encode()
    if ties := _ties(module):
        documents[TIES] = json.dumps(ties).encode()
    to_json = getattr(getattr(module, "config", None), "to_json_string", None)
    is_adapted = hasattr(module, "peft_config")  # it shows the settings of its base model, under other names
    if callable(to_json) and not is_adapted:  # of a Hugging Face model
        try:
            text = to_json(use_diff=False)
        except TypeError:  # not that of transformers
            return documents
        settings = json.loads(text)
        if not settings.get("architectures"):  # save_pretrained adds it, and pipelines look for it
            settings["architectures"] = [type(module).__name__]
        documents[CONFIG] = json.dumps(settings, indent=1).encode()
    return documents


def _ties(module: nn.Module) -> dict[str, str]:
    """The further names of tied parameters and persistent buffers, each with the first."""
    kept = [
        *module.named_parameters(remove_duplicate=False),
        *module.named_buffers(remove_duplicate=False),
    ]
    transient, first = non_persistent_buffers(module), dict[int, str]()
    ties = {}
    for name, tensor in kept:
        if name not in transient and first.setdefault(id(tensor), name) != name:
            ties[name] = first[id(tensor)]
    return ties


_DONE, _FAILED = 1, 2
_TICK_S = 0.5


class Saves:
    """The saves of a run, one after the other, each written in the background.

    Attributes:
        last_step: of what was saved last, or resumed from; None as long as there is nothing.
    """

    def __init__(
        self,
        run: ScriptRun,
        states: StateObjects,
        folder: Path,
        *,
        keep: int | None,
        warns: bool,
        signals: SaveSignals,
    ):
        assert run.model is not None
        self.folder = folder
        self.last_step: int | None = None
        self._context = run
        self._model: DistributedModel = run.model
        self._states = states
        self._keep = keep
        self._warns = warns
        self._signals = signals
        self._disk = Disk()
        self._folder = CheckpointFolder(folder, disk=self._disk)
        self._under_way: SaveUnderWay | None = None
        self._collected = False
        self._failure = ""

    def begin(self, step: int, *, copies: bool) -> None:
        """Takes the snapshot and starts to write it; collective."""
        current = self._context
        meet("checkpoints.save()")
        self._model.step_end.numbers.compare(step=step)
        if self._model.replicas.buffers is not None:
            with torch.no_grad():
                self._model.replicas.buffers.agree()  # each replica writes a part of them
        states, told = on_every_rank_told(current, self._states_of_now)
        alike = {name: all(each[name] == told[0][name] for each in told) for name in states}
        mine = states if current.rank == 0 else {n: value for n, value in states.items() if not alike[n]}

        def begun() -> tuple[tuple[RankSnapshot, dict[str, bytes]], CheckpointDraft | None]:
            snapshot = take_snapshot(current, self._model, mine, alike=alike, copies=copies)
            if current.rank:
                return (snapshot, {}), None
            of_run = documents_of_run(current.plan, self._model.module)
            return (snapshot, of_run), self._new_draft(step)

        (snapshot, of_run), (draft, *_) = on_every_rank_told(current, begun)
        assert draft is not None
        self._collected = True
        others = self._others(step, alike, of_run) if current.rank == 0 else lambda _: {}
        self._under_way = SaveUnderWay(
            current, draft, snapshot, folder=self._folder, disk=self._disk, others=others
        )
        self.last_step = step

    def _others(
        self, step: int, alike: Mapping[str, bool], of_run: Mapping[str, bytes]
    ) -> Callable[[Any], Mapping[str, bytes]]:
        """Gives the files beside tensors, as the run is now; on the first rank."""
        current = self._context
        assert current.reporter is not None
        mesh, calls = current.mesh, current.reporter.num_steps

        def files(documents: Sequence[Mapping[str, Any]]) -> Mapping[str, bytes]:
            ranks = [RankDocument(**each) for each in documents]
            state = StateDocument.joined(step, mesh, ranks, alike=alike, calls=calls)
            return {STATE: state.to_bytes(), **of_run}

        return files

    def wait(self) -> None:
        """Waits until what was saved is committed, or has failed; collective."""
        while self._under_way is not None:
            self.look(wait=True)

    def look(self, *, wait: bool) -> int:
        """Agrees with all ranks on signals, and on whether a save has ended."""
        under_way, current = self._under_way, self._context
        if under_way is not None and wait:
            under_way.wait(_TICK_S)
        state = 0
        if under_way is not None and current.rank == 0 and under_way.has_ended:
            state = _DONE if under_way.problem is None else _FAILED
        signals, states = [self._signals.came], [state]
        if current.links.world is not None:
            row = torch.tensor([self._signals.came, state], dtype=torch.int64, device=current.device)
            ranks = range(current.mesh.world_size)
            with first_cause_named(current), call_together("a call of sw.Checkpoints", ranks):
                rows = current.links.world.gather(row, Purpose.CHECKPOINT)
            signals, states = rows[:, 0].tolist(), rows[:, 1].tolist()
        if under_way is not None and states[0] in (_DONE, _FAILED):
            self._finish(under_way)
        return next((int(number) for number in signals if number), 0)

    def raise_failure(self) -> None:
        """Raises that a save has failed, once."""
        failure = self.take_failure()
        if failure:
            raise CheckpointError(failure)

    def take_failure(self) -> str:
        """Why a save has failed, once; empty where none has."""
        failure, self._failure = self._failure, ""
        return failure

    def tell_at_exit(self) -> None:
        """Tells of a save that has failed after the last step, where nobody waited for it."""
        under_way = self._under_way
        if under_way is not None and under_way.problem is not None and self._context.rank == 0:
            sys.stderr.write(f"shardwright: {self._told(under_way, under_way.problem)}\n")

    def note(self, kind: str, **fields: Any) -> None:
        assert self._context.reporter is not None
        self._context.reporter.observer.event(f"checkpoint_{kind}", **fields)

    def forget(self) -> None:
        """Lets go of a save that nobody waits for any more."""
        self._under_way = None

    def _states_of_now(self) -> tuple[dict[str, Any], dict[str, str]]:
        """States of what the script has named, and digests of them."""
        states = self._states.taken()
        return states, {name: self._states.digest(name, value) for name, value in states.items()}

    def _new_draft(self, step: int) -> CheckpointDraft:
        """On the first rank."""
        hold_folder(self.folder)
        # If another rank fails, the next save collects.
        collects, self._collected = not self._collected, False
        return new_draft(self._folder, step, keep=self._keep, collects=collects)

    def _finish(self, under_way: SaveUnderWay) -> None:
        """Tells how a save has ended; collective."""
        self._under_way = None
        problem, remark = self._context.from_all_ranks((under_way.problem, under_way.remark))[0]
        if problem is None:
            self.note("saved", step=under_way.step, seconds=under_way.seconds, folder=str(self.folder))
            if remark and self._context.rank == 0:
                warnings.warn(f"{show_path(self.folder)}: {remark}", stacklevel=4)
            return
        self.last_step = None
        text = self._told(under_way, problem)
        self.note("save_failed", step=under_way.step, problem=problem)
        if not self._warns:
            self._failure = text
        elif self._context.rank == 0:
            warnings.warn(text, stacklevel=4)

    def _told(self, under_way: SaveUnderWay, problem: str) -> str:
        where = show_path(self.folder)
        goes_on = ", and training goes on." if self._warns else '. on_failed_save="warn" trains on.'
        return (
            f"the checkpoint of step {under_way.step} was not saved in {where}: {problem.rstrip('.')}. "
            f"Those from before stay{goes_on}"
        )
