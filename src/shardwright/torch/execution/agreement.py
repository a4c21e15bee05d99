"""Checks that the ranks of a replica agree; the protocol of a model that engines rely on."""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NoReturn, Protocol
from zlib import crc32

import torch
from torch import Tensor, nn

from shardwright.comm.joining.process_group import tell_all
from shardwright.comm.message_names import Purpose
from shardwright.comm.transport import SmallCollectives
from shardwright.errors import TraceMismatchError, UsageError
from shardwright.run.context import Context
from shardwright.torch.batch.batch import Batch
from shardwright.torch.batch.batch_broadcast import BatchBroadcast, loaded_another
from shardwright.torch.interception.unit_attributes import collects
from shardwright.torch.loss_scale import GradientScaling
from shardwright.torch.parameters.residency import Residency
from shardwright.torch.pytorch.modules import ModelTree
from shardwright.torch.pytorch.tensors import autocast_state
from shardwright.torch.randomness import get_state, set_state, state_as_tensor, state_from_tensor
from shardwright.torch.replicas.replicas import Replicas
from shardwright.torch.tracing.trace_data import Trace


class TrainedModel(Protocol):
    """The wrapped model: see `DistributedModel`.

    Attributes:
        labels_of_batch: about how many labels of a batch count, a power of two; alike on all ranks, 0 as
            long as no replicas need it.
    """

    average_grads_across_microbatches: bool
    tree: ModelTree
    replicas: Replicas
    scaling: GradientScaling | None
    labels_of_batch: float

    @property
    def partitioned(self) -> bool:
        """Whether ranks have taken their parts."""

    @property
    def waits_to_settle(self) -> bool:
        """Whether a state, or a hook, waits for the parts of this rank."""

    def get_module(self) -> nn.Module:
        """The script's own module."""

    @property
    def loss_scale(self) -> float:
        """The factor on losses."""

    def placed(self, residency: Residency) -> bool:
        """Records where parameters live; says whether the model is as it was."""

    def settle(self) -> None:
        """Called once this rank has only the parameters that it trains."""

    def local_parameters(self) -> Iterator[nn.Parameter]:
        """The parameters of this rank."""

    def stage_of(self, name: str) -> int:
        """The stage of a parameter."""


log = logging.getLogger(__name__)

Hooks = tuple[tuple[int, tuple[Any, ...], tuple[Any, ...]], ...]


def path_settings(modules: Sequence[nn.Module], hooks: Hooks) -> dict[str, Any]:
    """Settings that decide the path through a model, beside batch and function, by their names in errors."""
    return {
        "gradient mode (torch.no_grad)": torch.is_grad_enabled(),
        "autocast": autocast_state(),
        "default dtype": torch.get_default_dtype(),
        "training mode of modules": tuple([sub.training for sub in modules]),
        "requires_grad or dtype of parameters": tuple(
            [(p.requires_grad, p.dtype) for sub in modules for p in sub._parameters.values() if p is not None]
        ),
        "number of forward hooks of modules": tuple(
            (place, len(before), len(after)) for place, before, after in hooks
        ),
    }


def hooks_between_steps(modules: Sequence[nn.Module]) -> Hooks:
    """The forward hooks that are there now: place of the module, code of those before it and behind it.

    Not those that collect: a forward of transformers registers them when it first wants what they collect.
    """
    found = (
        (
            place,
            tuple(map(_code_of, sub._forward_pre_hooks.values())),
            tuple(_code_of(hook) for hook in sub._forward_hooks.values() if not collects(hook)),
        )
        for place, sub in enumerate(modules)
        if sub._forward_hooks or sub._forward_pre_hooks
    )
    return tuple((place, before, after) for place, before, after in found if before or after)


def _code_of(hook: Callable[..., Any]) -> Any:
    """Equal for the same function made again, as a lambda in a loop is; each callable object is another."""
    return getattr(hook, "__code__", None) or id(hook)


def early_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The part of `path_settings` that is the same in models that are not: for the first step."""
    return {
        name: sorted({repr(item) for item in value}) if isinstance(value, tuple) else value
        for name, value in settings.items()
    }


# Loaders that shuffle apart show it in any batch, so that not each has to be looked at.
_FIRST_COMPARED, _COMPARED_EVERY = 3, 16


class Agreement:
    """Agrees with the other ranks of the replica; every method is collective over them."""

    def __init__(self, context: Context):
        assert context.links.replica is not None
        self._context = context
        self._batches = 0
        self._settings: dict[str, Any] = {}
        self._digests = ""
        self._first = context.replica_ranks[0]
        self._looks_at_batches = context.rank == context.replica_ranks[1] and context.data_rank == 0
        self._broadcast = BatchBroadcast(context.links.replica, source=self._first, device=context.device)

    def on_batch(self, batch: Batch, settings: Mapping[str, Any], *, function: Callable[..., Any]) -> Batch:
        """The batch of the first rank of the replica, whose settings must be those of this rank, too."""
        if settings != self._settings:
            self._settings = dict(settings)
            self._digests = " ".join(f"{crc32(repr(value).encode()):x}" for value in settings.values())
        name_here = getattr(function, "__qualname__", type(function).__qualname__)
        mine = f"{self._digests} {name_here}"
        (first, theirs), _ = self._broadcast(((batch.arguments, mine), {}))
        if theirs != mine:
            self._refuse_other(name_here, theirs)
        agreed = batch if first is batch.arguments else batch.with_arguments(first)
        self._point_out_other_batches(batch, agreed)
        return agreed

    def _refuse_other(self, name_here: str, theirs: str) -> NoReturn:
        *digests, name_there = theirs.split(" ", len(self._settings))
        if name_there != name_here:
            raise UsageError(
                f"rank {self._context.rank} calls the step function {name_here} where rank "
                f"{self._first} calls {name_there}. Call the same ones on all ranks, in "
                "the same order, and not under `if sw.rank() == 0:`."
            )
        pairs = zip(self._settings, self._digests.split(" "), digests, strict=True)
        different = [name for name, mine, other in pairs if mine != other]
        raise UsageError(
            f"rank {self._context.rank} begins the step with another {' and another '.join(different)} "
            f"than rank {self._first}. Set it on the whole model, on every rank."
        )

    def _point_out_other_batches(self, own: Batch, agreed: Batch) -> None:
        """Says once that another rank loads batches of its own, to which no output belongs."""
        context = self._context
        if not self._looks_at_batches:
            return
        self._batches += 1
        looks = self._batches <= _FIRST_COMPARED or self._batches % _COMPARED_EVERY == 0
        if looks and loaded_another(own, agreed):
            self._looks_at_batches = False
            log.warning(
                "rank %d loads other batches than rank %d, on whose batches all ranks of the replica work: "
                "what a step returns belongs to those, and metrics that rank %d computes with targets of its "
                "own are wrong. Load the same on all ranks of a replica: sw.distributed_sampler(dataset) or "
                "sw.data_loader, by sw.rdp_rank() and not sw.dp_rank(), or by the same seed "
                "(sw.seed_everything).",
                context.rank,
                self._first,
                context.rank,
            )

    def on_trace(self, trace: Trace) -> None:
        """Refuses a model that the ranks of a replica trace differently."""
        described = [f"{n.kind} {n.label} {n.inputs} at {n.line}" for n in trace.graph.nodes]
        mine = (trace.graph.fingerprint, described)
        gathered = tell_all(mine, group=self._context.groups.model)
        for rank, (fingerprint, nodes) in enumerate(gathered):
            if fingerprint == gathered[0][0]:
                continue
            pairs = zip(gathered[0][1], nodes, strict=False)
            where = next(
                (f"{a!r} against {b!r}" for a, b in pairs if a.split(" at ")[0] != b.split(" at ")[0]), None
            )
            raise TraceMismatchError(
                f"ranks {self._first} and {self._context.replica_ranks[rank]} trace different models: "
                + (
                    where
                    or f"{len(gathered[0][1])} calls and operations against {len(nodes)}, or other shapes"
                )
                + ". Build the same model with the same settings on every rank."
            )

    def on_end(self, place: float) -> float:
        """The first of the places at which the traces of the ranks end."""
        assert self._context.links.replica is not None
        mine = torch.tensor(place, dtype=torch.float64, device=self._context.device)
        return float(self._context.links.replica.gather(mine, Purpose.AGREEMENT).min())

    def on_random_numbers(self, generators: Sequence[torch.Generator] = ()) -> None:
        """Gives all ranks of the replica the generators of its first."""
        context = self._context
        assert context.links.replica is not None
        agreed: list[Tensor | None] = []
        for state in get_state(context.device, generators):
            if state is not None:
                shared = state.to(context.device)
                context.links.replica.broadcast([shared], self._first, Purpose.AGREEMENT)
                state = shared.cpu()
            agreed.append(state)
        set_state(tuple(agreed), context.device, generators)

    def on_random_numbers_of_python(self) -> None:
        """Gives all ranks of the replica the generators of Python and NumPy of its first."""
        assert self._context.links.replica is not None
        self._share_python_state(self._context.links.replica, self._first)

    def on_first_trace(self) -> None:
        """Gives all ranks the generators of Python and NumPy of the first: traces follow choices by them."""
        assert self._context.links.world is not None
        self._share_python_state(self._context.links.world, 0)

    def _share_python_state(self, ranks: SmallCollectives, source: int) -> None:
        shared = state_as_tensor().to(self._context.device)
        ranks.broadcast([shared], source, Purpose.AGREEMENT)
        state_from_tensor(shared)

    def on_any(self, found: bool) -> bool:
        """Whether one of the ranks of the replica has found something; collective over the replica."""
        replica = self._context.links.replica
        assert replica is not None
        flags = replica.gather(torch.tensor(float(found), device=self._context.device), Purpose.AGREEMENT)
        return bool(flags.any())
