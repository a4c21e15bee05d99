"""A microbatch that is run from a list of calls, without the script's Python."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

from torch import Tensor

from shardwright.torch.execution.exchange import Returned
from shardwright.torch.execution.microbatches.microbatch_generators import MicrobatchGenerators
from shardwright.torch.execution.microbatches.microbatch_tensors import MicrobatchTensors
from shardwright.torch.execution.microbatches.shared_by_microbatches import SharedByMicrobatches
from shardwright.torch.execution.replay.flat_calls import run_calls
from shardwright.torch.execution.replay.flat_program import FlatProgram
from shardwright.torch.offload.stage_offload import StageOffload
from shardwright.torch.program.instructions import Instruction
from shardwright.torch.program.program import Program
from shardwright.torch.pytorch.tree import map_tree
from shardwright.torch.tensor_parallel.divided_tensor import DividedTensor, whole

__all__ = ["ReplayedMicrobatch"]

_NOTHING = nullcontext()


class _NoState:
    """Nothing is left in modules."""

    def as_left(self, stage: int) -> AbstractContextManager[None]:
        return _NOTHING

    def backward_ran(self) -> None:
        pass


class ReplayedMicrobatch:
    """A microbatch that is run from a list of calls; see `Microbatch` for what the executor asks of it.

    Args:
        index: which microbatch.
        program: what this rank does.
        flat: the same as lists.
        batch_leaves: of the arguments.
        batch: what it shares with the other microbatches of this rank.
    """

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
        self.index = index
        self.program = program
        self.flat = flat
        self.loss: Tensor | None = None
        self.loss_gradient: Tensor | None = None
        self.tensors = MicrobatchTensors(index, program, batch.receive, batch.buffers)
        self.generators = MicrobatchGenerators(index, batch.device)
        self.uses: dict[int, int] = {}
        self.offloads: dict[int, StageOffload] = {}
        self.outside_s = 0.0
        self.places = flat.places(batch_leaves)

    def forward(self, stage: int) -> None:
        """Runs the calls of a stage."""
        run_calls(self, stage)
        if stage == self.program.loss_stage and self.flat.trains:
            loss = self.program.trace.graph.loss
            assert loss is not None
            self.loss = self.tensors.values[loss]

    def come_to_backward(self) -> bool:
        """Whether the step function has called ``backward``."""
        return self.flat.trains

    def finish(self) -> Returned:
        """Runs what is left, and returns what the step function returned."""
        run_calls(self, None)
        flat, trace = self.flat, self.program.trace
        result = flat.result_structure.rebuild([self.places[place] for place in flat.result])
        result = self.tensors.in_result(result)
        loss_at = next((place for place, value in trace.result_values if value == trace.graph.loss), None)
        returned = Returned(result, trace.result_values, loss_at, flat.trains, loss=self.loss)
        if self.program.boundary is not None:
            returned = replace(returned, result=map_tree(_whole, returned.result), loss=_whole(returned.loss))
        self.close()
        return returned

    def running_again(self, stage: int) -> AbstractContextManager[None]:
        """Nothing: step code that computes again in a backward is not replayed."""
        return _NOTHING

    def keeping(self, instruction: Instruction) -> AbstractContextManager[None]:
        """Surrounds the run of a unit: what it keeps for its backward may be offloaded."""
        offload = self.offloads.get(instruction.stage)
        return _NOTHING if offload is None else offload.keeping(instruction.step.func)

    def close(self) -> None:
        """Ends the microbatch."""
        self.places = []
        self.tensors.clear()
        self.loss = self.loss_gradient = None


def _whole(item: Any) -> Any:
    return whole(item) if item.__class__ is DividedTensor else item
