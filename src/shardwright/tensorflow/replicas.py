"""Keeps replicas of a pipeline alike, and has ranks exchange what they did at the end of a step.

As in PyTorch, a row of figures a rank goes to all ranks after each step. The times of all actions, which are
kept in ``steps.json``, are gathered for a few steps alone: see `shardwright.observe.recorded_steps`.

::

    replica 0   gradients ─┐          ┌─ mean ─▶ updates a and c ─┐
                           ├─ bucket ─┤                           ├─ new values ─▶ a, b and c on both
    replica 1   gradients ─┘          └─ mean ─▶ updates b ───────┘

The ranks that hold the same stage in each replica do this among themselves. Where updates are divided, so
that none has the slots of all variables, a variable is updated whole, by one replica: optimizers of Keras
know no parts of variables.
"""

import statistics
import time
from collections.abc import Sequence
from typing import Any

import tensorflow as tf
import torch
import torch.distributed as dist

from shardwright.comm.message_names import Purpose
from shardwright.comm.transport import sums_over
from shardwright.run.context import Context
from shardwright.run.reporting import Reporter
from shardwright.run.step_recording import BatchRecord
from shardwright.runtime.action_loop import MeasuredRow
from shardwright.schedule import Schedule
from shardwright.tensorflow.batch import Arguments
from shardwright.tensorflow.channels import call_in_turn, to_tensorflow, to_torch
from shardwright.tensorflow.executor import Results
from shardwright.tensorflow.row_gradients import dense
from shardwright.tensorflow.variables import tf_variable


class StepEnd:
    """The end of every training step."""

    def __init__(self, context: Context):
        self._context = context

    @property
    def watches_memory(self) -> bool:
        """Whether the memory in use after each action of the next step will be asked for."""
        return self._reporter.draws_next_step

    def come(
        self,
        arguments: Arguments,
        *,
        losses: Sequence[float],
        schedule: Schedule | None,
        row: MeasuredRow,
        begun_s: float,
    ) -> None:
        """A training step has ended on this rank; collective over all ranks."""
        reporter, world = self._reporter, self._context.links.world
        record = BatchRecord(
            samples=arguments.num_samples or 0,
            tokens=arguments.num_tokens,
            row=row.events,
            memory=row.memory,
            schedule=schedule,
        )
        seconds = time.perf_counter() - begun_s
        reporter.begun_s = begun_s
        figures = reporter.figures_of(record.row)
        own = torch.tensor(figures, dtype=torch.float64, device=self._context.device)
        rows = own[None] if world is None else world.gather(own, Purpose.FIGURES)
        loss = statistics.fmean(losses) if losses else None
        reporter.step_done(record, rows.tolist(), seconds=seconds, loss=loss)

    @property
    def _reporter(self) -> Reporter:
        reporter = self._context.reporter
        assert isinstance(reporter, Reporter)
        return reporter


class Replicas:
    """The ranks with the same stages, one in each replica."""

    def __init__(self, context: Context):
        assert context.groups.data is not None
        self._group = context.groups.data
        self._source = context.holders[0]
        self._is_source = context.data_rank == 0
        self._count = context.mesh.data
        self._alike: dict[int, Any] = {}  # held, so that no id is used again

    def begin_with(self, variables: Sequence[Any]) -> None:
        """Gives all replicas the first one's values of variables that had no first step yet; collective."""
        new = [own for own in map(tf_variable, variables) if id(own) not in self._alike]
        self._alike.update((id(own), own) for own in new)
        with tf.init_scope():  # a tf.function may be under way
            self.share(new)

    def share(self, variables: Sequence[Any]) -> None:
        """Gives all replicas the first one's values of these variables; collective."""
        pending = []
        for own in map(tf_variable, variables):
            value = to_torch(own.read_value()).clone()
            work = dist.broadcast(value, self._source, group=self._group, async_op=True)
            pending.append((own, value, work))
        for own, value, work in pending:
            if work is not None:
                work.wait()
            if not self._is_source:
                own.assign(to_tensorflow(value))

    def average(self, results: Results, num_microbatches: int) -> None:
        """Makes of this replica's sums of gradients the means over the microbatches of all; collective.

        Replicas may have different numbers of microbatches: each counts the same.
        """
        positions = sorted(results.sums)
        sums = [to_torch(results.sums[position]) for position in positions]
        means = sums_over(self._group, sums, divisor=num_microbatches * self._count)
        results.sums.update(zip(positions, map(to_tensorflow, means), strict=True))

    def means_in_turn(self, gradients: Sequence[Any]) -> list[Any]:
        """Gradients of a step function that is traced, as means over the replicas; None stays."""
        known = [dense(each) for each in gradients if each is not None]
        means = call_in_turn(self._means_of, known, [each.dtype for each in known])
        made = [tf.ensure_shape(mean, each.shape) for mean, each in zip(means, known, strict=True)]
        return [None if each is None else made.pop(0) for each in gradients]

    def _means_of(self, *gradients: Any) -> list[Any]:
        means = sums_over(self._group, list(map(to_torch, gradients)), divisor=self._count)
        return list(map(to_tensorflow, means))

    def totals(self, numbers: Sequence[float]) -> list[float]:
        """Numbers of all replicas added up; collective."""
        return [each * self._count for each in self.means(numbers)]

    def means(self, numbers: Sequence[float]) -> list[float]:
        """Numbers of this replica as means over all; collective."""
        row = torch.tensor(numbers, dtype=torch.float64)
        (found,) = sums_over(self._group, [row], divisor=self._count)
        return list(found.tolist())


class SharedUpdates:
    """The replica that updates each variable of this rank's stages."""

    def __init__(self, context: Context):
        assert context.groups.data is not None
        self._group = context.groups.data
        self._holders = context.holders
        self._rank = context.data_rank
        self._replica_of: dict[int, int] = {}
        self._known: list[Any] = []  # held, so that no id is used again
        self._bytes = [0] * context.mesh.data

    def mine(self, pairs: Sequence[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
        """The pairs of gradients and variables that this replica updates."""
        self._divide([tf_variable(variable) for _, variable in pairs])
        return [pair for pair in pairs if self._replica_of[id(tf_variable(pair[1]))] == self._rank]

    def bring(self, variables: Sequence[Any]) -> None:
        """Gives all replicas the new values; collective over them."""
        owns = [tf_variable(variable) for variable in variables]
        replicas = [self._replica_of[id(own)] for own in owns]
        mine = [
            own.read_value() for own, replica in zip(owns, replicas, strict=True) if replica == self._rank
        ]
        others = [own for own, replica in zip(owns, replicas, strict=True) if replica != self._rank]
        specs = [(tuple(own.shape.as_list()), own.dtype.name) for own in owns]

        def now(*given: Any) -> list[Any]:
            return self._broadcast(specs, replicas, given)

        for own, value in zip(others, call_in_turn(now, mine, [own.dtype for own in others]), strict=True):
            own.assign(tf.ensure_shape(value, own.shape))

    def sum_over_replicas(self, number: torch.Tensor) -> None:
        """Adds up what replicas have of a number, such as the square of a norm; collective over them."""
        dist.all_reduce(number, group=self._group)

    def _divide(self, owns: Sequence[Any]) -> None:
        """Gives new variables, the largest first, to the replica that has least to update."""
        new = [own for own in owns if id(own) not in self._replica_of]
        for own in sorted(new, key=lambda each: -each.shape.num_elements()):
            replica = self._bytes.index(min(self._bytes))
            self._replica_of[id(own)] = replica
            self._bytes[replica] += own.shape.num_elements() * own.dtype.size
            self._known.append(own)

    def _broadcast(
        self, specs: Sequence[tuple[tuple[int, ...], str]], replicas: Sequence[int], given: Sequence[Any]
    ) -> list[Any]:
        mine = iter(given)
        pending = []
        for (shape, dtype), replica in zip(specs, replicas, strict=True):
            is_mine = replica == self._rank
            value = to_torch(next(mine)) if is_mine else torch.empty(shape, dtype=getattr(torch, dtype))
            work = dist.broadcast(value, self._holders[replica], group=self._group, async_op=True)
            pending.append((None if is_mine else value, work))
        found = []
        for arriving, work in pending:
            if work is not None:
                work.wait()
            if arriving is not None:
                found.append(to_tensorflow(arriving))
        return found
