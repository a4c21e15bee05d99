"""The public calls that save a run and resume it."""

import atexit
import dataclasses
import json
import os
import secrets
import signal
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Mapping
from numbers import Integral
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch

from shardwright.checkpoint.commits import COMMITTED
from shardwright.checkpoint.disk import Disk
from shardwright.checkpoint.folder import CheckpointFolder, refuse_one_checkpoint
from shardwright.checkpoint.saved import SavedCheckpoint, shortened
from shardwright.comm.identity.purpose import Purpose
from shardwright.comm.joining.process_group import default_store, tell_all
from shardwright.errors import CheckpointError, UsageError
from shardwright.exit_codes import SAVED
from shardwright.observe.folder_lock import hold, release
from shardwright.observe.run_folder import show_path
from shardwright.torch.checkpoints.resuming import Resumed, open_verified
from shardwright.torch.checkpoints.save_signals import SaveSignals
from shardwright.torch.checkpoints.snapshot import take_snapshot
from shardwright.torch.checkpoints.state_objects import StateObjects
from shardwright.torch.checkpoints.writer import CONFIG, PLAN, CheckpointDraft, SaveUnderWay
from shardwright.torch.interception.glue import refuse_inside_step
from shardwright.torch.model.distributed_model import DistributedModel
from shardwright.torch.run.failure import first_cause_named
from shardwright.torch.run.joint_calls import meet
from shardwright.torch.script_run import script_run

__all__ = ["Checkpoints"]

_LOCK = ".lock"
_UNDER_WAY, _DONE, _FAILED = 1, 2, 3
_TICK_S = 0.5
_T = TypeVar("_T")


class Checkpoints:
    """Saves a run and resumes it; every rank makes one, after wrapping.

    What is saved: the model, the wrapped optimizers with learning rates and loss scale, the random generators
    of every rank, and what `state` has. Any layout resumes from what any other has saved.

    On SIGTERM, SIGUSR1 or Ctrl-C, `step_done` saves and ends the process with code 75.

    Args:
        folder: where; by default ``checkpoints`` in the run folder, which a run of the same name continues.
        state: what else belongs to the run, by name: anything with ``state_dict()`` and
            ``load_state_dict()``, such as a scheduler, a `GradScaler` of PyTorch or `data_loader`.
        every: `step_done` saves after each multiple of so many steps; None: only when asked.
        keep: how many checkpoints stay; None for all. Old ones go when the newest is verified; the
            newest with finite weights stays in any case.
        asynchronous: a save takes copies in memory, and writes them while training goes on.
        signals: those that save and end the run; none with ``()``.
        on_failed_save: what happens where one fails in the background: raise an error at the next step, or
            only warn. The checkpoints from before stay in both cases.

    Raises:
        UsageError: no model is wrapped yet, there is no folder, or another run saves there.

    Example:
        >>> import tempfile, torch, shardwright.torch as sw
        >>> sw.init({"run_dir": "off"})
        >>> model = sw.DistributedModel(torch.nn.Linear(2, 1))
        >>> optimizer = sw.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        >>> checkpoints = sw.Checkpoints(tempfile.mkdtemp(), every=100)
        >>> checkpoints.resume()
        0
        >>> checkpoints.save(1)
        >>> checkpoints.close()
        >>> sw.shutdown()
    """

    def __init__(
        self,
        folder: str | os.PathLike[str] | None = None,
        *,
        state: Mapping[str, Any] | None = None,
        every: int | None = None,
        keep: int | None = 3,
        asynchronous: bool = True,
        signals: Iterable[str] = ("SIGTERM", "SIGUSR1", "SIGINT"),
        on_failed_save: Literal["raise", "warn"] = "raise",
    ):
        current = script_run()
        if current.model is None:
            raise UsageError("no model is wrapped. Call sw.DistributedModel(model) before sw.Checkpoints.")
        for name, value in (("every", every), ("keep", keep)):
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise UsageError(f"{name} is {value!r}, and must be a whole number from 1, or None.")
        if on_failed_save not in ("raise", "warn"):
            raise UsageError(f"on_failed_save is {on_failed_save!r}, and must be 'raise' or 'warn'.")
        self._context = current
        self._model: DistributedModel = current.model
        self._states = StateObjects(state or {})
        self._every = every
        self._keep = keep
        self._asynchronous = asynchronous
        self._warns = on_failed_save == "warn"
        self._disk = Disk()
        self.folder = self._folder(folder)
        self._store = CheckpointFolder(self.folder, disk=self._disk)
        self._under_way: SaveUnderWay | None = None
        self._resumed: Resumed | None = None
        self._last_step: int | None = None
        self._collected = False
        self._failed = ""
        self._signals = SaveSignals(signals)
        current.cleanup.callback(self.close)
        atexit.register(self._tell_at_exit)

    # ---- resuming ----

    def resume(self, name: str | None = None, *, allow_older: bool | None = None, strict: bool = True) -> int:
        """Goes on from the newest checkpoint, if there is one; call it on all ranks, before the first step.

        Args:
            name: of a checkpoint, such as ``"step-00000120"``; None for the newest.
            allow_older: where it is damaged, take the newest one before that is not, and warn; None for
                what the setting ``allow_older`` says, as ``shardwright run --allow-older`` sets it.
            strict: its tensors must be those of the model; else those of other names are left out.

        Returns:
            How many steps were done: 0 where there is no checkpoint yet.

        Raises:
            CorruptCheckpointError: it is damaged.
            CheckpointError: it is of another model, or has other optimizers or states than this run.
        """
        refuse_inside_step("checkpoints.resume() is called", "Call it before the training loop.")
        self.wait()
        current = self._context
        with first_cause_named(current):
            meet("checkpoints.resume()")
            older = current.config.allow_older if allow_older is None else allow_older
            saved = open_verified(current, self._store, name, allow_older=older)
            if saved is None:
                return 0
            resumed = Resumed(current, self._model, saved, strict=strict)
            self._together(lambda: resumed.check(self._states.objects))
            resumed.load(self._states.objects)
        self._resumed = resumed
        self._last_step = resumed.step
        assert current.reporter is not None
        current.reporter.num_steps = resumed.calls
        self._say("resumed", f"resumed from {show_path(saved.path)}", step=resumed.step, name=saved.path.name)
        if not saved.has_finite_weights and current.rank == 0:
            self._point_out_weights(saved)
        return resumed.step

    # ---- saving ----

    def step_done(self, step: int) -> None:
        """Tells that a step ended, with the optimizer's update; call it on all ranks.

        Saves where one is due, or where a signal came on any rank: then the process ends with code 75.

        Args:
            step: how many steps were done.

        Raises:
            CheckpointError: a save in the background has failed.
            SystemExit: after a signal.
        """
        refuse_inside_step("checkpoints.step_done() is called", "Call it in the training loop.")
        step = _num_steps(step)
        signal_number = self._look(wait=False)
        if signal_number:
            self._end(step, signal_number)
        if self._every is not None and step % self._every == 0:
            self.save(step)  # also where an earlier save has failed, which it raises then
        self._raise_failure()

    def save(self, step: int, *, asynchronous: bool | None = None) -> None:
        """Saves the run as it is now; call it on all ranks, between two steps.

        Where an earlier save is still being written, that is waited for. A step that was saved, or resumed
        from, is not saved again.

        Args:
            step: how many steps were done.
            asynchronous: return when copies are made, and write them while training goes on; None for
                what the constructor was told.

        Raises:
            CheckpointError: it cannot be saved; the checkpoints from before stay.
        """
        refuse_inside_step("checkpoints.save() is called", "Call it in the training loop.")
        step = _num_steps(step)
        self._wait()
        if step == self._last_step or (self._resumed is not None and self._resumed.waits):
            return
        if self._model.waits_for_memory:
            raise UsageError(
                "the model has no values yet: one on the meta device gets them in the first step. Save after "
                "that."
            )
        later = self._asynchronous if asynchronous is None else asynchronous
        begin_s = time.perf_counter()
        with first_cause_named(self._context):
            self._begin(step, copies=later)
        self._last_step = step
        if not later:
            self._wait()
        else:
            self._note("save_began", step=step, seconds=time.perf_counter() - begin_s)
        self._raise_failure()

    def wait(self) -> None:
        """Waits until what was saved is committed; call it on all ranks.

        Raises:
            CheckpointError: it could not be written.
        """
        self._wait()
        self._raise_failure()

    def close(self) -> None:
        """Waits for what is being saved; leaves signals alone, and the folder to others. `shutdown` calls it.

        A later save takes the folder again.

        Where an error is on its way, as in a ``finally``, this rank waits for no other.
        """
        try:
            if sys.exc_info()[1] is None:
                self.wait()
        finally:
            self._signals.close()
            self._under_way = None
            release(self.folder / _LOCK)
            atexit.unregister(self._tell_at_exit)

    # ---- inside ----

    def _wait(self) -> None:
        while self._under_way is not None:
            self._look(wait=True)

    def _raise_failure(self) -> None:
        """Raises that a save has failed, once."""
        failure, self._failed = self._failed, ""
        if failure:
            raise CheckpointError(failure)

    def _tell_at_exit(self) -> None:
        """Tells of a save that has failed after the last step, where nobody waited for it."""
        under_way = self._under_way
        if under_way is not None and under_way.problem is not None and self._context.rank == 0:
            sys.stderr.write(f"shardwright: {self._failure(under_way, under_way.problem)}\n")

    def _failure(self, under_way: SaveUnderWay, problem: str) -> str:
        where = show_path(self.folder)
        return (
            f"the checkpoint of step {under_way.step} was not saved in {where}: {problem.rstrip('.')}. "
            "Those from before stay, and training can go on."
        )

    def _folder(self, folder: str | os.PathLike[str] | None) -> Path:
        current = self._context
        assert current.reporter is not None
        if folder is None:
            chosen = current.reporter.folder
            if chosen is None:
                raise UsageError(
                    "run_dir is off, so there is no run folder for checkpoints. Give a folder: "
                    'sw.Checkpoints("checkpoints").'
                )
            path = chosen.path / "checkpoints"
        else:
            path = Path(folder).absolute()
        return Path(current.from_first_rank(lambda: str(_held(path))))

    def _begin(self, step: int, *, copies: bool) -> None:
        """Takes the snapshot and starts to write it; collective."""
        current = self._context
        meet("checkpoints.save()")
        self._model.step_end.numbers.compare(step=step)
        states, digests = self._together(self._states_of_now)
        told = self._tell(digests)
        alike = {name: all(own[name] == digest for own in told) for name, digest in digests.items()}
        mine = states if current.rank == 0 else {n: value for n, value in states.items() if not alike[n]}
        snapshot = self._together(
            lambda: take_snapshot(current, self._model, mine, alike=alike, copies=copies)
        )
        draft = current.from_first_rank(lambda: self._new_draft(step))
        draft = dataclasses.replace(draft, alike=alike)
        self._under_way = SaveUnderWay(
            draft,
            snapshot,
            mesh=current.mesh,
            rank=current.rank,
            store=default_store() if current.mesh.world_size > 1 else None,
            folder=self._store,
            disk=self._disk,
            timeout_s=current.config.timeout_s,
        )

    def _states_of_now(self) -> tuple[dict[str, Any], dict[str, str]]:
        """States of what the script has named, and digests of them."""
        states = self._states.taken()
        return states, {name: self._states.digest(name, value) for name, value in states.items()}

    def _new_draft(self, step: int) -> CheckpointDraft:
        """On the first rank."""
        _held(self.folder)
        try:
            if not self._collected and self.folder.is_dir():
                self._store.collect(keep=None)  # what crashes have left
                self._collected = True
            path = self._store.begin(step)
        except OSError as error:
            raise CheckpointError(
                f"the checkpoint of step {step} cannot be saved in {self.folder}: {error.strerror}. Those "
                "from before stay. Give a folder that can be written, on a disk that has room."
            ) from error
        key = f"shardwright/checkpoint/{secrets.token_hex(8)}"
        assert self._context.reporter is not None
        return CheckpointDraft(
            path=path,
            step=step,
            key=key,
            alike={},
            documents=self._documents(),
            keep=self._keep,
            calls=self._context.reporter.num_steps,
        )

    def _documents(self) -> dict[str, bytes]:
        documents = {}
        plan = self._context.plan
        if plan is not None:
            documents[PLAN] = plan.to_json().encode()
        to_json = getattr(getattr(self._model.module, "config", None), "to_json_string", None)
        if callable(to_json):  # of a Hugging Face model
            try:
                text = to_json(use_diff=False)
            except TypeError:  # not that of transformers
                return documents
            settings = json.loads(text)
            if not settings.get("architectures"):  # save_pretrained adds it, and pipelines look for it
                settings["architectures"] = [type(self._model.module).__name__]
            documents[CONFIG] = json.dumps(settings, indent=1).encode()
        return documents

    def _look(self, *, wait: bool) -> int:
        """Agrees with all ranks on signals, and on whether a save has ended.

        Args:
            wait: for some time, if it has not.

        Returns:
            The number of a signal that came on some rank; 0 where none has.
        """
        under_way, current = self._under_way, self._context
        if under_way is not None and wait:
            under_way.wait(_TICK_S)
        state = 0
        if under_way is not None and current.rank == 0 and under_way.has_ended:
            state = _DONE if under_way.problem is None else _FAILED
        signals, states = [self._signals.came], [state]
        if current.links.world is not None:
            row = torch.tensor([self._signals.came, state], dtype=torch.int64, device=current.device)
            with first_cause_named(current):
                rows = current.links.world.gather(row, Purpose.CHECKPOINT)
            signals, states = rows[:, 0].tolist(), rows[:, 1].tolist()
        if under_way is not None and states[0] in (_DONE, _FAILED):
            self._finish(under_way)
        return next((int(number) for number in signals if number), 0)

    def _finish(self, under_way: SaveUnderWay) -> None:
        """Tells how a save has ended; collective."""
        self._under_way = None
        problem, remark = self._context.from_first_rank(lambda: (under_way.problem, under_way.remark))
        if problem is None:
            self._note("saved", step=under_way.step, seconds=under_way.seconds, folder=str(self.folder))
            if remark and self._context.rank == 0:
                warnings.warn(f"{show_path(self.folder)}: {remark}", stacklevel=4)
            return
        self._last_step = None
        text = self._failure(under_way, problem)
        self._note("save_failed", step=under_way.step, problem=problem)
        if not self._warns:
            self._failed = text
        elif self._context.rank == 0:
            warnings.warn(text, stacklevel=4)

    def _end(self, step: int, number: int) -> None:
        """Saves, and ends the process."""
        name = signal.Signals(number).name
        self._wait()
        earlier, self._failed = self._failed, ""
        if earlier and self._context.rank == 0:
            warnings.warn(earlier, stacklevel=4)
        self.save(step, asynchronous=False)
        if self._last_step != step:
            raise CheckpointError(
                f"{name} came, and step {step} was not saved in {show_path(self.folder)}: see the warning "
                "before, or it was to be loaded in the first step, which was not made."
            )
        self._say("saved_on_signal", f"{name}: saved step {step} in {show_path(self.folder)}", step=step)
        assert self._context.reporter is not None
        self._context.reporter.ends_saved = True
        self._signals.close()
        sys.exit(SAVED)

    def _tell(self, fact: Any) -> list[Any]:
        return tell_all(fact) if self._context.mesh.world_size > 1 else [fact]

    def _together(self, make: Callable[[], _T]) -> _T:
        """Makes something on every rank, or on none if one rank cannot; collective over all ranks."""
        made: list[_T] = []
        problem = ""
        try:
            made.append(make())
        except CheckpointError as error:
            problem = str(error)
        except Exception as error:  # of the script's own objects, or no memory for the copies
            problem = f"rank {self._context.rank}: {type(error).__name__}: {error}"
        first = next((each for each in self._tell(problem) if each), None)
        if first is not None:
            raise CheckpointError(first)
        return made[0]

    def _point_out_weights(self, saved: SavedCheckpoint) -> None:
        """Warns of a run that goes on with infinities or NaN."""
        before = [each for each in self._store.commits() if each.step < saved.step]
        sound = next((each for each in reversed(before) if self._store.has_finite_weights(each)), None)
        remedy = f' checkpoints.resume("{sound.name}") goes on from the newest before.' if sound else ""
        warnings.warn(
            f"{show_path(saved.path)} has weights that are not finite ({shortened(saved.not_finite)}), and "
            f"the run goes on with them.{remedy}",
            stacklevel=4,
        )

    def _note(self, kind: str, **fields: Any) -> None:
        assert self._context.reporter is not None
        self._context.reporter.observer.event(f"checkpoint_{kind}", **fields)

    def _say(self, kind: str, text: str, **fields: Any) -> None:
        assert self._context.reporter is not None
        self._context.reporter.observer.status(f"shardwright: {text}")
        self._note(kind, **fields)


def _held(path: Path) -> Path:
    """Keeps other runs from saving in a folder; on the first rank."""
    refuse_one_checkpoint(path)
    if (path / "checkpoints" / COMMITTED).exists() and not (path / COMMITTED).exists():
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


def _num_steps(step: Any) -> int:
    if isinstance(step, bool) or not isinstance(step, Integral) or step < 0:
        raise UsageError(f"step is {step!r}, and must be how many steps were done: 0, 1, 2, ...")
    return int(step)
