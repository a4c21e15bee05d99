"""The public calls that save a run and resume it."""

import atexit
import os
import signal
import sys
import time
import warnings
from collections.abc import Iterable, Mapping
from numbers import Integral
from pathlib import Path
from typing import Any, Literal

from shardwright.checkpoint.folder import CheckpointFolder
from shardwright.checkpoint.saved import SavedCheckpoint
from shardwright.errors import CheckpointError, UsageError
from shardwright.exit_codes import SAVED
from shardwright.observe.run_folder import show_path
from shardwright.run.joint_calls import first_cause_named, meet, on_every_rank
from shardwright.text import shortened
from shardwright.torch.checkpoints.encoded import StateObjects
from shardwright.torch.checkpoints.resuming import Resumed, open_verified
from shardwright.torch.checkpoints.saves import Saves, SaveSignals, hold_folder, release_folder
from shardwright.torch.interception.glue import refuse_inside_step
from shardwright.torch.model.distributed_model import DistributedModel
from shardwright.torch.startup import script_run


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
        *others: object,
        state: Mapping[str, Any] | None = None,
        every: int | None = None,
        keep: int | None = 3,
        asynchronous: bool = True,
        signals: Iterable[str] = ("SIGTERM", "SIGUSR1", "SIGINT", "SIGHUP"),
        on_failed_save: Literal["raise", "warn"] = "raise",
    ):
        current = script_run()
        if current.model is None:
            raise UsageError("no model is wrapped. Call sw.DistributedModel(model) before sw.Checkpoints.")
        if others or not isinstance(folder, str | os.PathLike | None):
            raise UsageError(
                f"Checkpoints was given a {type(others[0] if others else folder).__name__} by position, "
                "where it takes a folder alone: it saves the model and the optimizers that are wrapped. "
                "Write sw.Checkpoints(every=100), or name what else there is: state={'scheduler': scheduler}."
            )
        for name, value in (("every", every), ("keep", keep)):
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise UsageError(f"{name} is {value!r}, and must be a whole number from 1, or None.")
        if on_failed_save not in ("raise", "warn"):
            raise UsageError(f"on_failed_save is {on_failed_save!r}, and must be 'raise' or 'warn'.")
        self._context = current
        self._model: DistributedModel = current.model
        self._states = StateObjects(state or {})
        self._every = every
        self._asynchronous = asynchronous
        self.folder = self._folder(folder)
        self._store = CheckpointFolder(self.folder)
        self._resumed: Resumed | None = None
        self._last_done = 0
        self._signals = SaveSignals(signals, says=current.rank == 0)
        self._saves = Saves(
            current,
            self._states,
            self.folder,
            keep=keep,
            warns=on_failed_save == "warn",
            signals=self._signals,
        )
        current.cleanup.callback(self.close)
        atexit.register(self._saves.tell_at_exit)

    # ---- resuming ----

    def resume(self, name: str | None = None, *, allow_older: bool = False, strict: bool = True) -> int:
        """Goes on from the newest checkpoint, if there is one; call it on all ranks, before the first step.

        Args:
            name: of a checkpoint, such as ``"step-00000120"``; None for the newest.
            allow_older: where it is damaged, take the newest one before that is not, and warn.
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
            saved = open_verified(current, self._store, name, allow_older=allow_older)
            if saved is None:
                return 0
            resumed = Resumed(current, self._model, saved, strict=strict)
            on_every_rank(current, lambda: resumed.check(self._states.objects))
            resumed.load(self._states.objects)
        self._resumed = resumed
        self._saves.last_step = self._last_done = resumed.step
        assert current.reporter is not None
        current.reporter.num_steps = resumed.calls
        missing = shortened(resumed.missing)
        anew = f"; what was imported has no {missing}: begun anew" if missing else ""
        text = f"resumed from {show_path(saved.path)}{anew}"
        self._say("resumed", text, step=resumed.step, name=saved.path.name)
        if not saved.has_finite_weights and current.rank == 0:
            self._point_out_weights(saved)
        return resumed.step

    # ---- saving ----

    def step_done(self, step: int) -> None:
        """Tells that a step ended, with the optimizer's update; call it on all ranks.

        Saves where one is due, or where a signal came on any rank: then the process ends with code 75.

        Raises:
            CheckpointError: a save in the background has failed.
            UsageError: `step` is 0 after a step: a loop that counts from 0 would repeat one when resumed. Or
                it is smaller than the last one.
            SystemExit: after a signal.
        """
        refuse_inside_step("checkpoints.step_done() is called", "Call it in the training loop.")
        step = _num_steps(step)
        assert self._context.reporter is not None
        if step == 0 and self._context.reporter.num_steps:
            raise UsageError(
                "step_done was given 0 after the first step, but it takes how many steps are done. In a loop "
                "that counts from 0, write checkpoints.step_done(step + 1); in one that adds up gradients of "
                "several batches, call it after the optimizer's step."
            )
        if step < self._last_done:
            raise UsageError(
                f"step_done was given {step} after {self._last_done}, but it takes how many steps are done "
                "in the whole run: over all epochs, and from what checkpoints.resume() returns. Write step = "
                "checkpoints.resume(), and in the loop step += 1; checkpoints.step_done(step)."
            )
        self._last_done = step
        signal_number = self._saves.look(wait=False)
        if signal_number:
            self._end(step, signal_number)
        if self._every is not None and step % self._every == 0:
            self.save(step)  # also where an earlier save has failed, which it raises then
        self._saves.raise_failure()

    def save(self, step: int, *, asynchronous: bool | None = None) -> None:
        """Saves the run as it is now; call it on all ranks, between two steps.

        Where an earlier save is still being written, that is waited for. A step that was saved, or resumed
        from, is not saved again.

        Args:
            asynchronous: return when copies are made, and write them while training goes on; None for
                what the constructor was told.

        Raises:
            CheckpointError: it cannot be saved; the checkpoints from before stay.
        """
        refuse_inside_step("checkpoints.save() is called", "Call it in the training loop.")
        step = _num_steps(step)
        self._saves.wait()
        if step == self._saves.last_step or (self._resumed is not None and self._resumed.waits):
            return
        if self._model.waits_for_memory:
            raise UsageError(
                "the model has no values yet: one on the meta device gets them in the first step. Save after "
                "that."
            )
        later = self._asynchronous if asynchronous is None else asynchronous
        begin_s = time.perf_counter()
        with first_cause_named(self._context):
            self._saves.begin(step, copies=later)
        if not later:
            self._saves.wait()
        else:
            self._saves.note("save_began", step=step, seconds=time.perf_counter() - begin_s)
        self._saves.raise_failure()

    def wait(self) -> None:
        """Waits until what was saved is committed; call it on all ranks.

        Raises:
            CheckpointError: it could not be written.
        """
        self._saves.wait()
        self._saves.raise_failure()

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
            self._saves.forget()
            release_folder(self.folder)
            atexit.unregister(self._saves.tell_at_exit)

    # ---- inside ----

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
        return Path(current.from_first_rank(lambda: str(hold_folder(path))))

    def _end(self, step: int, number: int) -> None:
        name = signal.Signals(number).name
        self._saves.wait()
        earlier = self._saves.take_failure()
        if earlier and self._context.rank == 0:
            warnings.warn(earlier, stacklevel=4)
        self.save(step, asynchronous=False)
        if self._saves.last_step != step:
            raise CheckpointError(
                f"{name} came, and step {step} was not saved in {show_path(self.folder)}: see the warning "
                "before, or it was to be loaded in the first step, which was not made."
            )
        assert self._context.reporter is not None
        self._context.reporter.ends_after_save()
        self._say("saved_on_signal", f"{name}: saved step {step} in {show_path(self.folder)}", step=step)
        self._signals.close()
        sys.exit(SAVED)

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

    def _say(self, kind: str, text: str, **fields: Any) -> None:
        assert self._context.reporter is not None
        self._context.reporter.observer.status(f"shardwright: {text}")
        self._saves.note(kind, **fields)


def _num_steps(step: Any) -> int:
    if isinstance(step, bool) or not isinstance(step, Integral) or step < 0:
        raise UsageError(f"step is {step!r}, and must be how many steps were done: 0, 1, 2, ...")
    return int(step)
