"""What microbatches count in ``fit``, so that their number and sizes never change the training.

What the loss is tells it, by `loss_reduction`: of a mean, microbatches count by their samples; of a sum, each
counts whole. What is neither is refused, and so are uses of gradients that are another for each microbatch.
"""

import warnings
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from shardwright.errors import UsageError
from shardwright.tensorflow import _private
from shardwright.tensorflow.keras_run import KerasRun
from shardwright.tensorflow.loss_reduction import LossReduction
from shardwright.tensorflow.recorder import Recorder
from shardwright.tensorflow.trace import Trace

# None: each microbatch counts 1, as against the mean over all. ("mean", what a sample counts), or
# ("sum", what a microbatch counts, samples of the batch).
Weight = tuple[Any, ...] | None


class BatchWeights:
    """The weights of batches, for one step function of ``fit`` or ``evaluate``."""

    def __init__(self, run: KerasRun, one_step: Any):
        self._run = run
        self._one_step = one_step
        self._is_sum: bool | None = None

    def of(self, data: Any, samples: int) -> Weight:
        """The weight that the step function takes with this batch; collective."""
        run = self._run
        if run.plan is None:
            self._one_step.prepare(data, None)
        assert run.plan is not None
        replicas = run.mesh.data if run.averages_replicas else 1
        most = run.plan.schedule.microbatches
        if most * replicas == 1:
            return None
        if self._is_sum is None:
            self._is_sum = self._decided(data, f"{most} microbatches in {replicas} replicas")
        microbatches = min(samples, most)
        total = samples
        if replicas > 1:
            (mean,) = run.means_over_replicas([samples])
            total = round(mean * replicas)
        if self._is_sum:
            return "sum", float(microbatches * replicas), total
        if samples % microbatches == 0 and total == samples * replicas:
            return None
        return "mean", microbatches * replicas / total

    def _decided(self, data: Any, cut: str) -> bool:
        trace: Trace
        found: LossReduction
        trace, found = self._one_step.loss_reduction(data, None)
        _refuse(found, cut)
        if trace.recorder.trains:
            _refuse_uses(trace, cut, is_sum=found.kind == "sum")
        return found.kind == "sum"


def _refuse(found: LossReduction, cut: str) -> None:
    if found.kind == "neither":
        raise UsageError(
            f"{found.line}: this loss is neither a mean nor a sum over the samples of a batch: it compares "
            f"samples, is a root or a product of means, or a sum to which a mean is added. Over {cut} it "
            "would be another loss. Set microbatches to 1, and let one pipeline take all ranks; or write it "
            "as a mean over samples (Keras' losses and their weights are)."
        )
    if found.kind == "unknown":
        warnings.warn(
            f"whether the loss {f'of {found.line} ' if found.line else ''}is a mean over the samples cannot "
            f"be found out. Over {cut} it is taken for one. With microbatches: 1 in one pipeline it may be "
            "anything.",
            stacklevel=2,
        )


def factor_of(weight: Weight, samples: int) -> float | None:
    """What the gradients of a microbatch are multiplied by; None: as they are."""
    if weight is None:
        return None
    return float(weight[1] * samples if weight[0] == "mean" else weight[1])


# ---- told losses that are sums ----

_ADDITIONS = frozenset("AddV2 Add AddN Sub Neg Identity Cast Mul".split())
_NO_LOSSES = frozenset(("Const", "ReadVariableOp", "Placeholder"))


@tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
def told_as_sums(recorder: Recorder | None, logs: Any, scale: float) -> Any:
    """Has metrics and results of the step that is traced take losses that are sums times a number.

    Metrics take the mean over samples, or over microbatches. So do terms that are added up in a loss.
    """
    if recorder is None:
        return logs
    pending = [(loss, None) for loss in recorder.losses]
    made: dict[str, Any] = {}
    while pending:
        loss, adder = pending.pop()
        if loss.name in made or loss.op.type in _NO_LOSSES or loss.shape.rank != 0:
            continue
        takers = [each for each in loss.consumers() if each is not adder]
        made[loss.name] = scaled = loss * tf.cast(scale, loss.dtype)
        for taker in takers:
            if not recorder.notes[taker.name].in_gradient and not _is_added(taker, made):
                _private.give_instead(taker, loss, scaled)
        if loss.op.type in _ADDITIONS:
            pending += [(term, loss.op) for term in loss.op.inputs]
    if recorder.target is not None:
        recorder.target = made.get(recorder.target.name, recorder.target)
    return tf.nest.map_structure(lambda each: made.get(getattr(each, "name", ""), each), logs)


def _is_added(taker: Any, made: dict[str, Any]) -> bool:
    """Whether an operation adds up a loss whose scaled value is there."""
    return taker.type in _ADDITIONS and any(output.name in made for output in taker.outputs)


# ---- uses of gradients ----

_LINEAR = frozenset(
    "Identity Neg Cast Reshape Transpose Pack Unpack ConcatV2 Split SplitV StridedSlice ExpandDims Squeeze "
    "Sum Mean UnsortedSegmentSum CheckNumerics".split()
)
_SUMS = frozenset("AddN AddV2 Add Sub".split())
_PRODUCTS = frozenset("Mul MatMul RealDiv DivNoNan Div".split())
_NO_VALUES = frozenset("Shape Size Rank ZerosLike OnesLike NoOp".split())


def _refuse_uses(trace: Trace, cut: str, *, is_sum: bool) -> None:
    """Refuses what a step makes of gradients, if that of their mean would be another."""
    graph, notes = trace.function.graph, trace.recorder.notes
    of_batch = {each.name for each in trace.function.inputs if each.name not in trace.captures}
    gradients = set(trace.recorder.gradients)
    for operation in graph.get_operations():
        names = [tensor.name for tensor in operation.inputs]
        note = notes.get(operation.name)
        is_between = note is not None and not note.in_gradient
        if is_between and not gradients.isdisjoint(names) and operation.type not in _NO_VALUES:
            given = [name in gradients for name in names]
            batch = any(name in of_batch and not is_one for name, is_one in zip(names, given, strict=True))
            if batch or not _is_linear(operation.type, given, is_sum):
                raise UsageError(_text(_private.line_of(operation), cut))
            gradients.update(tensor.name for tensor in operation.outputs)
        elif not of_batch.isdisjoint(names):
            of_batch.update(tensor.name for tensor in operation.outputs)


def _is_linear(kind: str, given: Sequence[bool], is_sum: bool) -> bool:
    if kind in _SUMS:
        return all(given) or not is_sum
    if kind in _PRODUCTS:
        return sum(given) == 1 and (given[0] or kind in ("Mul", "MatMul"))
    return kind in _LINEAR


def _text(line: str, cut: str) -> str:
    return (
        f"{line}: the train_step makes of gradients what is not their sum (it clips, takes a norm, changes "
        f"variables by them). Over {cut} it would do so with those of each microbatch, and not of the batch. "
        "Have the optimizer clip: model.compile(keras.optimizers.Adam(global_clipnorm=1.0)), clipnorm or "
        "clipvalue, which take the gradients of the batch; gradient_accumulation_steps adds up those of "
        "several. Or set microbatches to 1, and let one pipeline take all ranks."
    )
