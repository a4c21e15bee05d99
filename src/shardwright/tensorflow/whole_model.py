"""The whole model on every rank, for as long as something reads all of it."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from shardwright.run.failure import first_cause_named
from shardwright.run.joint_calls import meet
from shardwright.tensorflow.exchange import broadcast_tensors
from shardwright.tensorflow.keras_run import KerasRun
from shardwright.tensorflow.trace import spec_of
from shardwright.tensorflow.variables import tf_variable

__all__ = ["whole_model"]


@contextmanager
def whole_model(run: KerasRun, where: str, variables: Sequence[Any] | None = None) -> Iterator[None]:
    """While it lasts, every rank has the values of all variables of the model; collective over all ranks.

    A rank needs memory for them meanwhile.
    """
    if run.mesh.pipeline == 1 or not run.is_placed or run.variables.are_whole:
        yield
        return
    with first_cause_named(run):
        meet(where)
        found = []
        for variable in run.keras_model.variables if variables is None else variables:
            holder = run.variables.holder(variable)
            if holder is None:
                continue
            own = tf_variable(variable)
            mine = [own.read_value()] if holder == run.pipeline_rank else None
            (value,) = broadcast_tensors(run, mine, [spec_of(own)], holder)
            if mine is None:
                found.append((variable, value))
    with run.variables.with_values(found, is_tracing=lambda: run.is_tracing):
        yield
