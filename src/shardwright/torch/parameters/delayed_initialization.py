"""Builds models larger than memory, with exactly the values of an ordinary build.

::

    with sw.delay_param_initialization():       large tensors are shapes; what fills them is written down
        model = Net()
    model = sw.DistributedModel(model)
    train_step(model, batch)                    each rank does again what filled the parameters of its stages

Every operation that writes to a large tensor is recorded, with the generator state before it, so that it can
be replayed for some tensors alone. Random numbers are drawn and discarded, one tensor at a time, so that
later draws stay the same. Inside the context, large tensors look ordinary, because PyTorch's initialisers
skip meta tensors; after it, they are on the meta device.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from shardwright.errors import UsageError
from shardwright.run.context import context, is_initialized
from shardwright.run.memory import large_blocks_given_back
from shardwright.torch._private.tensors import storage_key
from shardwright.torch.parameters.initialization_recording import DelayedTensor, InitializationRecording

_RECORDINGS: list[InitializationRecording] = []


@contextmanager
def delay_param_initialization(enabled: bool = True) -> Iterator[None]:
    """Builds models without memory for their parameters, which get the values of an ordinary model later.

    With the same seed these are the same numbers, whatever the number of stages and ranks. Building takes
    about as long as it does otherwise, and memory for one parameter at a time.

    Args:
        enabled: False does nothing.

    Example:
        >>> import torch, shardwright.torch as sw
        >>> with sw.delay_param_initialization():
        ...     model = torch.nn.Linear(1000, 1000)
        >>> model.weight.device
        device(type='meta')
    """
    if not enabled:
        yield
        return
    recording = InitializationRecording()
    _RECORDINGS.append(recording)
    # What is drawn and thrown away would leave gaps that are of no use to the next draw.
    with large_blocks_given_back(then_kept=_keeps_freed_memory()):
        try:
            with recording:
                yield
        finally:
            recording.end()


def _keeps_freed_memory() -> bool:
    """Whether a model that is wrapped has had the heap keep what is freed."""
    return is_initialized() and context().model is not None


def is_recorded(tensor: Tensor) -> bool:
    """Whether what filled a tensor on the meta device is written down."""
    return _recording_of(tensor) is not None


def recorded_values(tensor: Tensor) -> Tensor | None:
    """The values that a tensor on the meta device was given; None where nobody has written them down."""
    recording = _recording_of(tensor)
    return None if recording is None else recording.values(tensor)


def cast_recorded(tensor: Tensor, dtype: torch.dtype) -> Tensor | None:
    """A tensor of another type with the same values to come; None where nothing is written down."""
    recording = _recording_of(tensor)
    return None if recording is None else recording.cast(tensor.detach(), dtype)


def copy_recorded(tensor: Tensor) -> Tensor | None:
    """A tensor in memory of its own, with the same values to come; None where nothing is written down."""
    recording = _recording_of(tensor)
    return None if recording is None else recording.copy(tensor.detach())


def refuse_half_built(module: nn.Module) -> None:
    """Refuses a model inside of the ``with`` statement in which it is built."""
    for name, parameter in module.named_parameters():
        if isinstance(parameter, DelayedTensor):
            raise UsageError(
                f"the model is wrapped inside of sw.delay_param_initialization(), where {name} has no values "
                "yet. Only build it there, and call sw.DistributedModel behind the with statement."
            )


def _recording_of(tensor: Tensor) -> InitializationRecording | None:
    if not tensor.is_meta:
        return None
    key = storage_key(tensor)
    return next((recording for recording in _RECORDINGS if recording.knows(key)), None)
