"""Keras optimizers over the stages: a rank updates its own variables, norms and loss scales are those of all.

::

    rank 0   gradients finite ──┐
                                ├─ no: no rank updates, and all halve the scale
    rank 1   gradients infinite ┘
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import tensorflow as tf
import torch

from shardwright.comm.message_names import Purpose
from shardwright.errors import UsageError
from shardwright.tensorflow import _private
from shardwright.tensorflow.channels import call_in_turn
from shardwright.tensorflow.keras_run import KerasRun
from shardwright.tensorflow.variables import tf_variable


@contextmanager
def optimizers_over_stages(run: KerasRun) -> Iterator[None]:
    """While it lasts, optimizers leave out variables of other ranks, and norms of gradients are those of all.

    Variables are left out before slots are made for them: a rank has slots for its own layers alone.
    """
    with ExitStack() as stack:
        for owner, method in _private.optimizer_classes():
            make = _apply_of_grads if method == "apply" else _apply_of_pairs
            stack.enter_context(_private.replaced(owner, method, partial(make, run)))
        for owner in _private.optimizer_bases():
            if not hasattr(owner, "get_gradients"):
                stack.enter_context(_private.added(owner, "get_gradients", _get_gradients))
            if hasattr(owner, "finalize_variable_values"):
                make = partial(_finalize_values, run)
                stack.enter_context(_private.replaced(owner, "finalize_variable_values", make))
        if run.mesh.pipeline > 1 or run.config.shard_optimizer_state:
            stack.enter_context(_private.replaced_global_norm(partial(_norm_over_stages, run)))
        yield


def _apply_of_pairs(run: KerasRun, original: Any) -> Any:
    def apply_gradients(self: Any, grads_and_vars: Any, *args: Any, **kwargs: Any) -> Any:
        pairs = list(grads_and_vars)
        if run.is_tracing:
            return given_in_step(
                run, self, pairs, lambda pairs: apply_gradients(self, pairs, *args, **kwargs)
            )
        with _update_of(run, self, pairs) as mine:
            if has_nothing_here(pairs, mine):
                return apply_nothing(run, self)
            return original(self, mine, *args, **kwargs)

    return apply_gradients


def _apply_of_grads(run: KerasRun, original: Any) -> Any:
    def apply(self: Any, grads: Any, trainable_variables: Any = None) -> Any:
        if trainable_variables is None:
            if run.is_tracing:
                raise _inside_of_a_step()
            return original(self, grads)
        pairs = list(zip(grads, trainable_variables, strict=True))
        if run.is_tracing:
            return given_in_step(run, self, pairs, lambda pairs: apply(self, *zip(*pairs, strict=True)))
        with _update_of(run, self, pairs) as mine:
            if has_nothing_here(pairs, mine):
                return apply_nothing(run, self)
            return original(self, [gradient for gradient, _ in mine], [variable for _, variable in mine])

    return apply


def has_nothing_here(pairs: Sequence[tuple[Any, Any]], mine: Sequence[tuple[Any, Any]]) -> bool:
    """Whether other ranks have all gradients; Keras refuses an update without any."""
    return len(mine) < len(pairs) and all(gradient is None for gradient, _ in mine)


def _finalize_values(run: KerasRun, original: Any) -> Any:
    """The end of ``fit``: averages of variables, as ``use_ema`` has them, take their place.

    Keras goes through averages, which are of this rank's variables, beside a list of all variables.
    """

    def finalize_variable_values(self: Any, var_list: Any) -> None:
        pairs = [(None, variable) for variable in var_list]
        if mine := run.pairs_to_update(pairs):
            original(self, [variable for _, variable in mine])
        if run.shared_updates is not None:
            run.shared_updates.bring([variable for _, variable in run.variables.pairs_here(pairs)])

    return finalize_variable_values


@contextmanager
def _update_of(
    run: KerasRun, optimizer: Any, pairs: Sequence[tuple[Any, Any]]
) -> Iterator[list[tuple[Any, Any]]]:
    """The pairs that this rank updates; afterwards the values that other replicas have made."""
    run.note_parts(optimizer, (variable for _, variable in pairs))
    mine = run.pairs_to_update(pairs)
    load_slots(run, optimizer, [pair for pair in mine if pair[0] is not None])
    with applying(run):
        yield mine
    if run.shared_updates is not None:
        here = run.variables.pairs_here(pairs)
        run.shared_updates.bring([variable for gradient, variable in here if gradient is not None])


def apply_nothing(run: KerasRun, optimizer: Any) -> Any:
    """An update on a rank that holds none of the variables: it counts, and joins the others' norm."""
    if getattr(optimizer, "global_clipnorm", None) is not None:
        tf.linalg.global_norm([None])
    return _private.count_update(optimizer)


@contextmanager
def applying(run: KerasRun) -> Iterator[None]:
    """Tells norms inside of an optimizer, which has this rank's gradients alone."""
    before, run.is_applying = run.is_applying, True
    try:
        yield
    finally:
        run.is_applying = before


def load_slots(run: KerasRun, optimizer: Any, here: Sequence[tuple[Any, Any]]) -> None:
    """Makes the slots that were restored before the optimizer has made its own."""
    load = run.slots_to_load.pop(id(optimizer), None)
    if load is not None and here:
        load(_private.scaled_optimizer(optimizer), [variable for _, variable in here])


def given_in_step(
    run: KerasRun, optimizer: Any, pairs: Sequence[tuple[Any, Any]], update: Callable[[Any], Any]
) -> Any:
    """Keeps gradients of a step function that is traced until the batch has ended, or has them applied."""
    recorder = run.engine().recorder
    if run.at_once and recorder is not None:
        with run.updating(pairs) as means:
            return update(means)
    if run.aside is None:
        raise _inside_of_a_step()
    variables = [variable for _, variable in pairs]
    run.aside.append((optimizer, [gradient for gradient, _ in pairs], variables))
    if recorder is not None:  # Keras 3 calls a step on shapes, too
        recorder.given(pairs, waits=True)
    return optimizer.iterations


def _inside_of_a_step() -> UsageError:
    return UsageError(
        "an optimizer is applied inside of a step function, which runs once for each microbatch. "
        "Return the gradients, and apply their mean outside: "
        "optimizer.apply_gradients(zip([g.accumulate() for g in gradients], model.trainable_variables))"
    )


def _get_gradients(self: Any, loss: Any, params: Sequence[Any]) -> Any:
    """Gradients of a loss inside of a step function, as Keras 2 had it."""
    return tf.gradients(loss, [tf_variable(variable) for variable in params])


def _norm_over_stages(run: KerasRun, original: Any) -> Any:
    """The global norm: outside of step functions, gradients of other ranks' variables are None here.

    Of tensors that every rank has, it is what one process computes. All ranks take a norm together, because
    a rank with variables of its own alone cannot tell one from the other.
    """

    def global_norm(t_list: Any, *args: Any, **kwargs: Any) -> Any:
        here = [tensor for tensor in t_list if tensor is not None]
        if not run.is_placed or run.is_tracing:
            return original(t_list, *args, **kwargs)
        is_of_stages = run.is_applying or len(here) < len(t_list)
        mine = original(here, *args, **kwargs) if here else tf.zeros([])
        is_part = run.is_applying and run.shared_updates is not None
        (norm,) = call_in_turn(
            lambda each: [_over_stages(run, is_of_stages, is_part, each)], [mine], [mine.dtype]
        )
        norm.set_shape([])
        return norm

    return global_norm


def _over_stages(run: KerasRun, is_of_stages: bool, is_part: bool, mine: Any) -> Any:
    """The norm over all ranks."""
    row = torch.tensor([float(mine) ** 2, float(is_of_stages)], dtype=torch.float64)
    if is_part:
        assert run.shared_updates is not None
        run.shared_updates.sum_over_replicas(row[:1])
    rows = row[None] if run.links.replica is None else run.links.replica.gather(row, Purpose.NORM)
    squared, of_stages = rows.T
    return tf.constant(float(squared.sum().sqrt()), mine.dtype) if of_stages.any() else mine


@contextmanager
def loss_scales_over_stages(run: KerasRun) -> Iterator[None]:
    """While it lasts, optimizers that scale losses go by the gradients of all ranks of the pipeline."""
    with ExitStack() as stack:
        for owner, method in _private.loss_scale_classes():
            make = _scaled_apply_of_grads if method == "apply" else _scaled_apply_of_pairs
            stack.enter_context(_private.replaced(owner, method, partial(make, run)))
        stack.enter_context(_private.scales_made_early())
        if run.mesh.pipeline > 1:
            stack.enter_context(_private.replaced_finite_check(partial(_finite_on_all, run)))
        yield


def _scaled_apply_of_grads(run: KerasRun, original: Any) -> Any:
    """Keras 3. Pairs of other ranks stay: the optimizer inside leaves them out."""

    def apply(self: Any, grads: Any, trainable_variables: Any = None) -> Any:
        if trainable_variables is None:
            return original(self, grads)
        pairs = list(zip(grads, trainable_variables, strict=True))
        if run.is_tracing:
            return given_in_step(run, self, pairs, lambda pairs: apply(self, *zip(*pairs, strict=True)))
        here = run.variables.pairs_here(pairs)
        updated = run.pairs_to_update(pairs)
        load_slots(run, self, updated)
        if updated and not self.inner_optimizer.built:  # it would make its slots inside of a condition
            with tf.init_scope():
                self.inner_optimizer.build([variable for _, variable in updated])
        mine = {id(variable) for _, variable in here}
        known = [(gradient if id(variable) in mine else None, variable) for gradient, variable in pairs]
        return original(self, [gradient for gradient, _ in known], [variable for _, variable in known])

    return apply


def _scaled_apply_of_pairs(run: KerasRun, original: Any) -> Any:
    """Legacy Keras."""

    def apply_gradients(self: Any, grads_and_vars: Any, *args: Any, **kwargs: Any) -> Any:
        pairs = list(grads_and_vars)
        if run.is_tracing:
            return given_in_step(
                run, self, pairs, lambda pairs: apply_gradients(self, pairs, *args, **kwargs)
            )
        here = [pair for pair in run.variables.pairs_here(pairs) if pair[0] is not None]
        load_slots(run, self, run.pairs_to_update(here))
        if pairs and not here:
            return _apply_without_variables(run, self)
        with applying(run):
            return original(self, here, *args, **kwargs)

    return apply_gradients


def _apply_without_variables(run: KerasRun, optimizer: Any) -> Any:
    """An update on a rank that holds none of the variables: it takes part in what all ranks find."""
    inner = optimizer.inner_optimizer
    return tf.cond(
        _private.update_scale(optimizer),
        lambda: tf.convert_to_tensor(apply_nothing(run, inner)),
        lambda: tf.convert_to_tensor(inner.iterations.assign_add(1)),
    )


def _finite_on_all(run: KerasRun, original: Callable[[Sequence[Any]], Any]) -> Callable[[Sequence[Any]], Any]:
    def check(gradients: Sequence[Any]) -> Any:
        here = [each for each in gradients if each is not None]
        mine = original(here) if here else tf.constant(True)
        if not run.is_placed or run.is_tracing:
            return mine
        (found,) = call_in_turn(lambda each: [_all_say(run, each)], [mine], [tf.bool])
        found.set_shape([])
        return found

    return check


def _all_say(run: KerasRun, mine: Any) -> Any:
    assert run.links.replica is not None
    row = torch.tensor([float(bool(mine))], dtype=torch.float64)
    return tf.constant(bool(run.links.replica.gather(row, Purpose.NORM).all()))
