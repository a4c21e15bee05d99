"""Loss scales of ``mixed_float16`` over stages: all ranks take a step together, or leave it out together.

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
from shardwright.tensorflow import _private
from shardwright.tensorflow.channels import call_in_turn
from shardwright.tensorflow.keras_run import KerasRun
from shardwright.tensorflow.optimizer import apply_nothing, applying, given_in_step, load_slots


@contextmanager
def loss_scales_over_stages(run: KerasRun) -> Iterator[None]:
    """While it lasts, optimizers that scale losses go by the gradients of all ranks of the pipeline."""
    with ExitStack() as stack:
        for owner, method in _private.loss_scale_classes():
            make = _apply_of_grads if method == "apply" else _apply_of_pairs
            stack.enter_context(_private.replaced(owner, method, partial(make, run)))
        stack.enter_context(_private.scales_made_early())
        if run.mesh.pipeline > 1:
            stack.enter_context(_private.replaced_finite_check(partial(_finite_on_all, run)))
        yield


def _apply_of_grads(run: KerasRun, original: Any) -> Any:
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


def _apply_of_pairs(run: KerasRun, original: Any) -> Any:
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
