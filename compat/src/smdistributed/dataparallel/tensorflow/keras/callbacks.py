"""Callbacks of ``model.fit`` for ranks with different data."""

from collections.abc import Callable, MutableMapping
from typing import Any

import numpy as np
import tensorflow as tf

from shardwright.errors import UsageError
from shardwright.tensorflow import _private
from smdistributed.dataparallel.data_ranks import data_ranks
from smdistributed.dataparallel.tensorflow.collectives import broadcast_variables, reduced

_Callback: Any = tf.keras.callbacks.Callback


class BroadcastGlobalVariablesCallback(_Callback):  # type: ignore[misc]
    """Gives all ranks the model and optimizer of one after the first batch: then all variables are there."""

    def __init__(self, root_rank: int, device: str = ""):
        super().__init__()
        self._root_rank = root_rank
        self._is_done = False

    def on_batch_end(self, batch: int, logs: Any = None) -> None:
        """Broadcasts, the first time."""
        if self._is_done:
            return
        self._is_done = True
        broadcast_variables(self.model.variables, self._root_rank)
        broadcast_variables(_private.optimizer_variables(self.model.optimizer), self._root_rank)


class MetricAverageCallback(_Callback):  # type: ignore[misc]
    """Averages the metrics of an epoch over all ranks; put it before callbacks that read them."""

    def __init__(self, device: str = ""):
        super().__init__()

    def on_epoch_end(self, epoch: int, logs: MutableMapping[str, Any] | None = None) -> None:
        """Averages them, in the order of their names, as all ranks do."""
        if not logs:
            return
        names = sorted(name for name, value in logs.items() if np.ndim(value) == 0)
        mine = tf.constant([float(logs[name]) for name in names], tf.float64)
        logs.update(zip(names, reduced(mine).numpy().tolist(), strict=True))


class LearningRateScheduleCallback(_Callback):  # type: ignore[misc]
    """Multiplies the learning rate, in some epochs.

    Args:
        staircase: the function is called once for each epoch; else for each batch, with a fraction of the
            epoch. A number is set once for each epoch.
        momentum_correction: changes nothing; where Horovod scales the momentum for a batch after the learning
            rate has changed, it stays as it is.
    """

    def __init__(
        self,
        initial_lr: float,
        multiplier: float | Callable[[float], float],
        start_epoch: int = 0,
        end_epoch: int | None = None,
        staircase: bool = True,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
    ):
        super().__init__()
        self._rate = initial_lr
        self._multiplier = multiplier
        self._start = start_epoch
        self._end = end_epoch
        self._staircase = staircase or not callable(multiplier)
        self._steps = steps_per_epoch
        self._epoch = 0

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Takes note of the epoch."""
        self._epoch = epoch

    def on_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Sets the learning rate of a batch."""
        is_before_end = self._end is None or self._epoch < self._end
        if self._epoch < self._start or not is_before_end or (self._staircase and batch != 0):
            return
        epoch = self._epoch if self._staircase else self._epoch + batch / self._batches()
        factor = self._multiplier(epoch) if callable(self._multiplier) else self._multiplier
        self.model.optimizer.learning_rate = self._rate * factor

    def _batches(self) -> int:
        steps = self._steps or (self.params or {}).get("steps")
        if not steps:
            raise UsageError(
                f"{type(self).__name__} does not know how many batches an epoch has. Give it steps_per_epoch."
            )
        return int(steps)


class LearningRateWarmupCallback(LearningRateScheduleCallback):
    """Raises the learning rate from that of one rank to that of all, over some epochs, batch by batch."""

    def __init__(
        self,
        initial_lr: float,
        warmup_epochs: int = 5,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
        verbose: int = 0,
    ):
        def multiplier(epoch: float) -> float:
            # The last batch of the last epoch has the whole learning rate.
            share = (epoch + 1 / self._batches()) / warmup_epochs
            size = data_ranks().size
            return (share * (size - 1) + 1) / size

        super().__init__(
            initial_lr,
            multiplier,
            end_epoch=warmup_epochs,
            staircase=False,
            steps_per_epoch=steps_per_epoch,
        )
        self._last_epoch = warmup_epochs - 1
        self._verbose = verbose

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Tells where it has ended."""
        if self._verbose and epoch == self._last_epoch:
            tf.print(f"Epoch {epoch + 1}: the learning rate has reached {self._rate:g}")
