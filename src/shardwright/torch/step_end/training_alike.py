"""Whether all ranks train the same: parameters that are frozen, samples, factors on gradients.

A rank packs the gradients of the parameters it trains. If each replica has frozen as many numbers, no message
shows the difference::

    rank 0   a frozen    gradients of b, c  ──┐
    rank 1   b frozen    gradients of a, c  ──┴──► b + a, c + c

Nothing is wrong then with what is computed, but replicas beyond the first add nothing. A stream
(`IterableDataset`) knows nothing of ranks, so that it is refused before the first update.

A norm over all ``p.grad`` that are there is that of one rank's stages, or rows::

    train_step(...)      the largest entry of some gradients of this rank is noted
    p.grad.mul_(factor)  by the script
    optimizer.step()     stages compare theirs before the update; all ranks in the row of the next step's end
"""

import logging
import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from shardwright.comm.joining.process_group import tell_all
from shardwright.comm.message_names import Purpose
from shardwright.errors import UsageError
from shardwright.run.context import Context
from shardwright.run.joint_calls import call_together, first_cause_named
from shardwright.torch.batch.batch import Batch
from shardwright.torch.batch.splitter import is_batch_tensor
from shardwright.torch.pytorch.modules import user_line
from shardwright.torch.tensor_parallel.divided_tensor import local_of


def frozen_otherwise(
    context: Context, module: nn.Module, digests: Sequence[float], *, step: int
) -> UsageError | None:
    """Says which parameter only some replicas have trained; collective over all ranks where there is one."""
    if len(set(digests)) == 1:
        return None
    groups = context.mesh.groups("dp")
    if all(len({digests[rank] for rank in ranks}) == 1 for ranks in groups):
        return None
    trained = tell_all([name for name, parameter in module.named_parameters() if parameter.requires_grad])
    for first, *others in groups:
        for rank in others:
            for name in sorted({*trained[first]} ^ {*trained[rank]}):
                where, not_where = (first, rank) if name in trained[first] else (rank, first)
                return UsageError(
                    f"in step {step}, {name} is trained on rank {where} and frozen on rank {not_where}. They "
                    "are replicas of one model, and have added up gradients of different parameters. No rank "
                    "has made the update. Call requires_grad_() alike on all ranks."
                )
    return None


log = logging.getLogger(__name__)

_STEPS = 2
_SAMPLES_LOOKED_AT = 4096  # elements of a tensor


class _Streams:
    read = False


@contextmanager
def streams_noted() -> Iterator[None]:
    """Notes whether the script reads a stream of samples."""
    original = DataLoader.__iter__

    def iterate(self: DataLoader[Any]) -> Any:
        _Streams.read |= isinstance(self.dataset, IterableDataset)
        return original(self)

    _Streams.read = False
    DataLoader.__iter__ = iterate  # type: ignore[method-assign]
    try:
        yield
    finally:
        DataLoader.__iter__ = original  # type: ignore[method-assign]


def note_loader(loader: Any) -> None:
    """Notes one of another library that reads a stream: `streams_noted` does not see its loops."""
    _Streams.read |= isinstance(getattr(loader, "dataset", None), IterableDataset)


class SameSamples:
    """Looks at the batches of the first training steps."""

    def __init__(self, context: Context):
        self._context = context
        self._left = _STEPS if context.mesh.data > 1 else 0

    def digest(self, batch: Batch) -> float:
        """A number for the samples of a batch, below 0 where a stream was read; 0 where nobody looks."""
        if not self._left:
            return 0.0
        tensors = [leaf.detach() for leaf in batch.leaves if is_batch_tensor(leaf) and _has_numbers(leaf)]
        digest = sum((_number(tensor, place) for place, tensor in enumerate(tensors)), 0.0)
        return -abs(digest) if _Streams.read else abs(digest)

    def look(self, digests: Sequence[float], *, step: int) -> UsageError | None:
        """Takes the digests of one step; warns at the last of the first steps, on rank 0."""
        if not self._left:
            return None
        mesh = self._context.mesh
        of_replicas = [digests[ranks[0]] for ranks in mesh.groups("mp")]
        alike = len(set(of_replicas)) == 1 and of_replicas[0] != 0
        self._left = self._left - 1 if alike else 0
        if alike and of_replicas[0] < 0:
            return UsageError(
                f"all {mesh.data} replicas have the same samples in step {step}: the data set of the loader "
                "is an IterableDataset, which every rank reads whole. Let sw.data_loader(stream, batch_size) "
                "give each replica its part of a batch; or let each read its own part: in its __iter__, "
                "itertools.islice(samples, sw.rdp_rank(), None, sw.rdp_size()), with workers as "
                "parts of that; for datasets of Hugging Face split_dataset_by_node(dataset, sw.rdp_rank(), "
                "sw.rdp_size())."
            )
        if not self._left and alike and self._context.rank == 0:
            log.warning(
                "all %d replicas had the same samples in the first %d steps, so that one replica would do. "
                "Give each its own part of the data: "
                "sw.data_loader(dataset, ...), or sw.distributed_sampler(dataset) in a DataLoader.",
                mesh.data,
                _STEPS,
            )
        return None


class SameStream:
    """Looks at the first global batch of a stream, of which each replica takes its part."""

    def __init__(self, context: Context):
        self._context = context

    def look(self, digests: Sequence[float], *, step: int) -> None:
        """Takes what `FirstBatch` has noted on each rank; warns of other samples, on rank 0."""
        firsts = (ranks[0] for ranks in self._context.mesh.groups("mp"))
        read = {rank: digests[rank] for rank in firsts if digests[rank]}
        other = next((rank for rank, digest in read.items() if digest != next(iter(read.values()))), None)
        if other is not None and self._context.rank == 0:
            log.warning(
                "the replicas take parts of one stream, and in step %d, rank %d had read other samples than "
                "rank %d: some are trained more than once, others never. If the stream shuffles, give it the "
                "same seed on all ranks, as in stream.shuffle(seed=0); if it has split itself by rank, give "
                "it whole. Only where samples differ by random changes (augmentation, masking) is all well.",
                *(step, other, next(iter(read))),
            )


def _has_numbers(tensor: Tensor) -> bool:
    return not (tensor.is_complex() or tensor.is_nested or tensor.is_meta)


def _number(tensor: Tensor, place: int) -> float:
    """Equal for equal tensors in the same place of a batch."""
    flat = tensor.to_dense().reshape(-1)
    some = flat[
        :: max(1, len(flat) // _SAMPLES_LOOKED_AT)
    ].double()  # not its begin alone, which may be padding
    weights = torch.linspace(1.0, 2.0, len(some), dtype=torch.float64, device=some.device)
    return float(torch.nan_to_num(some @ weights)) * (place + 1)


_UPDATES = 3
_LOOKED_AT = 16  # gradients of a rank
_TOLERANCE = 0.02  # float16 rounds by less
_SAME_NORM = 0.002


class OwnScaling:
    """Looks at gradients before and behind what a script does to them, for the first updates.

    Attributes:
        factor: of all this rank's gradients before the last update; 0 where that is no one number.
    """

    _clipped_together: ClassVar[bool] = False

    @classmethod
    def clipped_together(cls) -> None:
        """All ranks of the replica have taken the norm of gradients together; some of them may change."""
        cls._clipped_together = True

    def __init__(self, context: Context) -> None:
        self._context = context
        self._left = _UPDATES if context.mesh.world_size > 1 else 0
        self._compares = 0 if context.links.replica is None else _UPDATES
        self._ended = False
        self._noted: list[tuple[Tensor, int, float]] = []
        self.factor = 0.0

    def end(self, parameters: Iterable[Tensor]) -> None:
        """A training step has ended; before anything is done to its gradients."""
        if not self._left:
            return
        self._ended = True
        there = ((parameter, _gradient(parameter)) for parameter in parameters)
        places = (
            (p, gradient, int(gradient.abs().argmax())) for p, gradient in there if gradient is not None
        )
        self._noted = [(p, at, float(gradient[at])) for p, gradient, at in islice(places, _LOOKED_AT)]

    def note(self, parameters: Iterable[Tensor]) -> None:
        """An optimizer is to update the model; for the first updates collective over the replica."""
        if not self._ended:
            return
        self._ended, self.factor, self._left = False, self._own_factor(), self._left - 1
        together, OwnScaling._clipped_together = OwnScaling._clipped_together, False
        if together:  # by a norm over all ranks, which may be that of a module on some of them
            self.factor = 0.0
        if self._compares:
            self._compares -= 1
            if not together:
                self._refuse_own_norm(_norm(parameters))

    def _refuse_own_norm(self, norm: float) -> None:
        """Refuses clipping by the norm of one stage: other factors, and then the same norm on all ranks."""
        ranks, replica = self._context.replica_ranks, self._context.links.replica
        assert replica is not None
        told = torch.tensor([self.factor, norm], dtype=torch.float64, device=self._context.device)
        with first_cause_named(self._context), call_together("optimizer.step()", ranks):
            rows: list[list[float]] = replica.gather(told, Purpose.UPDATE).tolist()
        scaled = {
            rank: row
            for rank, row in zip(ranks, rows, strict=True)
            if row[0] and not math.isclose(row[0], 1.0)
        }
        if len(scaled) < 2:
            return
        (least, (low, _)), *_, (most, (high, other)) = sorted(scaled.items(), key=lambda item: item[1][0])
        norms = [norm for _, norm in scaled.values()]
        if math.isclose(low, high, rel_tol=_TOLERANCE) or max(norms) > min(norms) * (1 + _SAME_NORM):
            return
        raise UsageError(
            f"{user_line()}: between the step function and the update, rank {least} multiplied its gradients "
            f"by {low:.3g}, and rank {most} by {high:.3g}, so that those of each have the norm {other:.3g}. "
            "That is clipping by the norm of one rank's gradients, and not of the model's. No rank has made "
            "the update. Clip by that of all: torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)."
        )

    def _own_factor(self) -> float:
        factors = []
        for parameter, place, before in self._noted:
            gradient = _gradient(parameter)
            if gradient is not None and before:
                factors.append(float(gradient[place]) / before)
        self._noted = []
        alike = len(factors) > 1 and all(math.isclose(f, factors[0], rel_tol=_TOLERANCE) for f in factors)
        return factors[0] if alike and math.isfinite(factors[0]) else 0.0

    def look(self, factors: Sequence[float]) -> None:
        """Takes the factors of all ranks."""
        if not any(factors):
            return
        self.factor = 0.0
        known = {rank: factor for rank, factor in enumerate(factors) if factor}
        least, most = min(known, key=known.__getitem__), max(known, key=known.__getitem__)
        if not math.isclose(known[least], known[most], rel_tol=_TOLERANCE):
            self._left = 0
            if self._context.rank:
                return
            log.warning(
                "between the step function and the update, rank %d multiplied its gradients by %.3g, and "
                "rank %d by %.3g. If that is clipping, it takes the norm of one rank's gradients for that of "
                "the model. That of all ranks: torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm).",
                *(least, known[least], most, known[most]),
            )


def _norm(parameters: Iterable[Tensor]) -> float:
    gradients = [gradient for gradient in map(_gradient, parameters) if gradient is not None]
    return math.hypot(*(float(torch.linalg.vector_norm(each, dtype=torch.float64)) for each in gradients))


def _gradient(parameter: Tensor) -> Tensor | None:
    """What this rank has of a gradient, as one row; None where that is nothing that can be looked at."""
    gradient = parameter.grad
    if gradient is None or gradient.is_meta or gradient.layout is not torch.strided:
        return None
    own = local_of(gradient)
    own = getattr(own, "local", own).detach()
    own = (torch.view_as_real(own.resolve_conj()) if own.is_complex() else own).flatten()
    return own if own.numel() and own.isfinite().all() else None
