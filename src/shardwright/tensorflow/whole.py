"""The whole model, and its whole optimizer, on every rank, for as long as something reads all of it.

Also parts of it outside of steps: ``decoder.predict(x)``, ``encoder(x)``, ``layer.get_weights()``. A part has
variables that other ranks hold. All ranks come to such a call together.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import tensorflow as tf
import torch

from shardwright.comm.joining.process_group import tell_all
from shardwright.comm.message_names import Purpose
from shardwright.run.joint_calls import first_cause_named, meet
from shardwright.tensorflow import _private
from shardwright.tensorflow.channels import to_tensorflow, to_torch
from shardwright.tensorflow.exchange import broadcast_tensors
from shardwright.tensorflow.keras_run import KerasRun
from shardwright.tensorflow.trace import spec_of
from shardwright.tensorflow.variables import tf_variable, variables_by_name


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


@contextmanager
def whole_optimizer(run: KerasRun) -> Iterator[None]:
    """While it lasts, the first rank's model has the optimizer of one process; collective over all ranks.

    Each rank has slots for its own variables alone, and Keras drops slots that it reads from a file if they
    are not those of all variables. All variables of the model have values meanwhile: see `whole_model`.
    """
    model = run.keras_model
    own = getattr(model, "optimizer", None)
    if run.mesh.world_size == 1 or not run.is_placed or own is None:
        yield
        return
    slots = _slots_of_all(run, own)
    if not slots:
        yield
        return
    made: list[Any] = []
    # An optimizer that cannot be made again fails on all ranks: the others wait for the first one to write.
    run.from_first_rank(lambda: made.append(_with_slots(own, model, slots)))
    if not made:
        yield
        return
    (model.optimizer,) = made
    try:
        yield
    finally:
        model.optimizer = own


@contextmanager
def optimizer_from_file(run: KerasRun, model: Any) -> Iterator[None]:
    """While it lasts, the model has an optimizer that takes all slots of a file; then its own takes its part.

    Keras leaves out the slots of a file if they are not as many as an optimizer has. One without slots gets
    those of this rank with its first update.
    """
    own = getattr(model, "optimizer", None)
    if run.mesh.world_size == 1 or own is None:
        yield
        return
    given: dict[int, Any] = {}  # values from the file, by the id of a slot; None for those of other ranks
    of_others: set[int] = set()
    with _slots_without_values(given, of_others):
        whole = _with_slots(own, model, {})
    given.clear()
    for variable in filter(run.variables.is_remote, model.trainable_variables):
        of_others.update(id(tf_variable(slot)) for slot in _private.slots_of(whole, variable).values())
    before = [each.numpy() for each in _others(whole)]
    model.optimizer = whole
    try:
        yield
    finally:
        model.optimizer = own
    after = [each.numpy() for each in _others(whole)]
    if not given and all(np.array_equal(*each) for each in zip(before, after, strict=True)):
        return  # a file without an optimizer

    def take(optimizer: Any, variables: Sequence[Any]) -> None:
        with tf.init_scope():
            if not _private.has_slots(optimizer):
                _private.make_slots(optimizer, list(variables))
            for variable in variables:
                there = _private.slots_of(whole, variable)
                for slot, target in _private.slots_of(optimizer, variable).items():
                    made = tf_variable(there[slot])
                    target.assign(given.get(id(made), made))

    for mine, theirs in zip(_others(own), _others(whole), strict=True):
        mine.assign(theirs)
    if _private.has_slots(own):
        take(own, [each for each in model.trainable_variables if not run.variables.is_remote(each)])
    else:
        run.slots_to_load[id(own)] = take


@contextmanager
def _slots_without_values(given: dict[int, Any], of_others: Collection[int]) -> Iterator[None]:
    """Slots that are made inside have no memory."""

    def create(next_creator: Callable[..., Any], **options: Any) -> Any:
        begins_as = options.get("initial_value")
        if isinstance(begins_as, tf.Variable):  # as an average of legacy Keras does; it may be another rank's
            options["initial_value"] = partial(tf.zeros, begins_as.shape, begins_as.dtype)
        slot = _private.made_without_value(options)
        if slot is None:
            return next_creator(**options)

        def take(value: Any) -> None:
            is_here = id(slot) not in of_others
            given[id(slot)] = tf.convert_to_tensor(value, slot.dtype) if is_here else None

        _private.given_up(slot, lambda: False, f"{slot.name} is there for a file to be read.", take)
        return slot

    with tf.variable_creator_scope(create):
        yield


def _slots_of_all(run: KerasRun, optimizer: Any) -> dict[str, Any]:
    """The slots of all ranks by name; collective over all ranks."""
    mine = {
        f"{slot}/{name}": tf_variable(variable)
        for name, each in variables_by_name(run.keras_model).items()
        if not run.variables.is_remote(each)
        for slot, variable in _private.slots_of(optimizer, each).items()
    }
    shapes = {name: (tuple(each.shape.as_list()), each.dtype.name) for name, each in mine.items()}
    world = run.links.world
    assert world is not None
    found: dict[str, Any] = {}
    for rank, told in enumerate(tell_all(shapes)):
        for name, (shape, dtype) in told.items():
            if name in found:  # another replica has it, too
                continue
            if rank == run.rank:
                value = to_torch(mine[name].read_value()).clone()
            else:
                value = torch.empty(shape, dtype=getattr(torch, dtype))
            world.broadcast([value], rank, Purpose.OUTPUTS)
            found[name] = to_tensorflow(value)
    return found


def _with_slots(own: Any, model: Any, slots: Mapping[str, Any]) -> Any:
    """An optimizer like one that has a part of the slots, with all of them."""
    whole = type(own).from_config(own.get_config())
    variables = list(model.trainable_variables)
    whole.build(variables) if hasattr(whole, "build") else _private.make_slots(whole, variables)
    for name, variable in variables_by_name(model).items():
        for slot, target in _private.slots_of(whole, variable).items():
            if f"{slot}/{name}" in slots:
                target.assign(slots[f"{slot}/{name}"])
    for theirs, mine in zip(_others(whole), _others(own), strict=True):
        theirs.assign(mine)
    return whole


def _others(optimizer: Any) -> list[Any]:
    """What an optimizer has once: its counter, learning rate and scale."""
    found = _private.optimizer_variables(optimizer)
    return [each for each in found if not _private.is_slot(optimizer, each)]


@contextmanager
def parts_over_ranks(run: KerasRun) -> Iterator[None]:
    """While it lasts, layers and models that a wrapped one is made of can be called on all ranks."""

    def make(name: str) -> Callable[[Any], Any]:
        def around(original: Any) -> Any:
            def method(self: Any, *args: Any, **kwargs: Any) -> Any:
                if not _has_parts_elsewhere(run, self, name):
                    return original(self, *args, **kwargs)
                where = f"{self.name}{'' if name == '__call__' else f'.{name}'}()"
                with whole_model(run, where, self.variables):
                    return original(self, *args, **kwargs)

            return method

        return around

    with _private.parts_called(make):
        yield


def _has_parts_elsewhere(run: KerasRun, part: Any, name: str) -> bool:
    """Whether a call reads variables of several ranks, and is no step of the wrapped model."""
    if not run.is_placed or run.mesh.pipeline == 1 or run.is_tracing or run.variables.are_whole:
        return False
    if (part is run.keras_model and name != "__call__") or not tf.executing_eagerly():
        return False
    return any(run.variables.holder(each) is not None for each in part.variables)
