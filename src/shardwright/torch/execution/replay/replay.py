"""Decides which microbatches of a program are run from a list of calls, and runs them.

The first microbatch of a batch is recorded, twice. Where both recordings are alike, and what the code between
units can get at is the same before and after, the batches that follow are run from the list, as long as that
stays the same. Now and then a microbatch is recorded again, and compared.
"""

import logging
import sys
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any

from shardwright.torch.execution.exchange import Returned
from shardwright.torch.execution.microbatches.microbatch import Microbatch
from shardwright.torch.execution.microbatches.rank_microbatch import (
    NOTHING,
    RankMicrobatch,
    SharedByMicrobatches,
)
from shardwright.torch.execution.replay.flat_calls import CodeWatch, run_calls
from shardwright.torch.execution.replay.flat_program import FlatProgram, why_not
from shardwright.torch.execution.replay.held_state import HeldState, ImpureError
from shardwright.torch.execution.replay.recording import Recording, RecordingMicrobatch, settings_now
from shardwright.torch.program.program import Program
from shardwright.torch.pytorch.tree import same_entries


class _NoState:
    """Nothing is left in modules."""

    def as_left(self, stage: int) -> AbstractContextManager[None]:
        return NOTHING

    def backward_ran(self) -> None:
        pass


class _ReplayedMicrobatch(RankMicrobatch):
    """A microbatch that is run from a list of calls; see `Microbatch` for what the executor asks of it."""

    is_behind_end = False
    state = _NoState()

    def __init__(
        self,
        index: int,
        program: Program,
        flat: FlatProgram,
        batch_leaves: Sequence[Any],
        batch: SharedByMicrobatches,
    ):
        super().__init__(index, program, batch)
        self.flat = flat
        self.places = flat.places(batch_leaves)

    def forward(self, stage: int) -> None:
        run_calls(self, stage)
        if stage == self.program.loss_stage and self.flat.trains:
            self.take_loss()

    def come_to_backward(self) -> bool:
        return self.flat.trains

    def finish(self) -> Returned:
        """Runs what is left, and returns what the step function returned."""
        run_calls(self, None)
        flat = self.flat
        result = flat.result_structure.rebuild([self.places[place] for place in flat.result])
        return self.finished(self.returned(result, trains=flat.trains))

    def close(self) -> None:
        self.places = []
        super().close()


log = logging.getLogger(__name__)

_OTHERS = "microbatches call other functions each time"
_TIMES_TRIED = 4
_BATCHES_BETWEEN_AUDITS = 500


class Replay:
    """The replay of one program.

    Attributes:
        why_not: it is not replayed; empty where it is, or may be.
    """

    def __init__(self, program: Program):
        self.why_not = why_not(program)
        self._program = program
        self._flat: FlatProgram | None = None
        self._key: Any = None
        self._entry: Any = None
        self._state: HeldState | None = None
        self._given: dict[int, Any] = {}
        self._tried = 0
        self._batches = 0
        self._recording: Recording | None = None
        self._recorded = self._before = Recording()
        self._watch: CodeWatch | None = None
        self._function: Any = None
        self._modules: frozenset[int] = frozenset()
        self._attributes: list[tuple[Any, dict[str, Any]]] = []

    @property
    def told(self) -> str:
        """How microbatches are run, for reports."""
        if self._flat is not None:
            return "from a list of calls"
        return f"as written: {self.why_not}" if self.why_not else "as written, to be recorded"

    def begin_batch(self) -> bool:
        """Whether the microbatches of the coming batch are run from the list; decides which is recorded."""
        if self.why_not:
            return False
        self._recording = None
        if self._flat is None:
            changed = None if self._state is None else self._state.changed()
            if changed is None:
                self._record()
            else:
                self._start_anew(f"{changed} changes")
            return False
        self._batches += 1
        if self._batches % _BATCHES_BETWEEN_AUDITS == 0:
            self._record()
            return False
        changed = "the settings of PyTorch" if settings_now() != self._entry else self._changed()
        if changed is None:
            return True
        self._start_anew(f"{changed} changes")
        return False

    def microbatch(
        self, index: int, part: Any, shared: SharedByMicrobatches, *, from_list: bool
    ) -> Microbatch | _ReplayedMicrobatch:
        if from_list:
            assert self._flat is not None
            return _ReplayedMicrobatch(index, self._program, self._flat, part.leaves, shared)
        recording, self._recording = self._recording, None
        if recording is None:
            return Microbatch(index, self._program, part.arguments, shared)
        self._function = shared.function
        self._modules = frozenset(map(id, shared.model.modules()))
        assert self._watch is not None
        self._recorded = recording
        return RecordingMicrobatch(
            index,
            self._program,
            part,
            shared,
            recording=recording,
            watch=self._watch,
            state=self._state,
        )

    def end_batch(self) -> None:
        watch, self._watch = self._watch, None
        if watch is None or self._recording is not None:
            return
        try:
            self._take(self._recorded, watch)
        except ImpureError as error:
            self._refuse(str(error))
        except Exception as error:  # a script's objects may do anything when they are looked at
            log.debug("a replay is not possible", exc_info=True)
            self._refuse(f"{type(error).__name__}: {error}")

    # ---- inside ----

    def _record(self) -> None:
        if sys.gettrace() is None:
            self._recording, self._watch = Recording(), CodeWatch()
            # Also what no name in the code tells of: setattr(self, f"seen_{number}", ...)
            held = (item for item in self._given.values() if type(item).__dictoffset__)
            self._attributes = [(item, dict(vars(item))) for item in held]

    def _take(self, recording: Recording, watch: CodeWatch) -> None:
        if recording.why:
            raise ImpureError(recording.why)
        given = {id(item): item for item in watch.given()}
        watch.resolve([self._function, *given.values()])
        for item, attributes in self._attributes:
            if not same_entries(attributes, dict(vars(item))):
                raise ImpureError(f"attributes of {type(item).__name__} change in a step")
        key = recording.key
        if self._flat is not None:
            changed = self._changed()
            if changed is not None or key != self._key:
                raise ImpureError(changed or _OTHERS)
            return
        before, state = self._key, self._state
        # What both microbatches were given was there before them.
        common = [item for item in given.values() if self._given.get(id(item)) is item]
        earlier, self._before = self._before, recording
        self._key, self._given, self._tried = key, given, self._tried + 1
        if before is None:
            self._state = self._state_of(watch, given.values())
            return
        assert state is not None
        changed = state.changed()
        self._state = self._state_of(watch, common)
        if changed is not None or key != before:
            if self._tried == _TIMES_TRIED:
                raise ImpureError(f"{changed} changes" if changed else _OTHERS)
            return
        self._entry = recording.entry
        self._flat = FlatProgram(self._program, recording, earlier)
        self._recorded = self._before = Recording()
        log.debug(
            "microbatches are run from a list of calls; %d objects are looked at", self._state.num_holders
        )

    def _state_of(self, watch: CodeWatch, given: Iterable[Any]) -> HeldState:
        return HeldState(watch.bindings, given, names=watch.names, modules=self._modules)

    def _changed(self) -> str | None:
        assert self._state is not None
        return self._state.changed()

    def _start_anew(self, why: str) -> None:
        self._flat = self._key = self._state = None
        self._given = {}
        if self._tried >= _TIMES_TRIED:
            self._refuse(why)
        else:
            self._record()

    def _refuse(self, why: str) -> None:
        self.why_not = why
        self._flat = self._key = self._state = self._recording = self._function = None
        self._recorded = self._before = Recording()
        self._attributes = []
        self._given = {}
        log.debug("microbatches are run as written: %s", why)
