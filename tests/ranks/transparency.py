"""Compares a model that is pipelined with the same model in a plain loop.

Every rank runs both. The plain loop computes the microbatches of all replicas one after the other, so its
losses, gradients, parameters and buffers are what the pipeline must arrive at.
"""

import copy
import re
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import shardwright.torch as sw
from shardwright.errors import PlanError
from shardwright.torch.backward.loss_reduction import form_of_loss
from shardwright.torch.backward.loss_terms import Reduction
from shardwright.torch.pytorch.tree import flatten
from shardwright.torch.tensor_parallel.divided_tensor import DividedTensor

__all__ = ["EVALUATION", "TOO_SMALL", "Case", "Iteration", "Recipe", "differences", "differences_by_case"]

LEARNING_RATE = 0.05
TOO_SMALL = "the model has too few units"
_TOO_FEW_UNITS = re.compile(r"need at least \d+ stages")


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How a model is made and fed."""

    build: Callable[[], nn.Module]
    batch: Callable[[int, int], Any]
    loss: Callable[[nn.Module, Any], Tensor]
    place: Callable[[nn.Module], None] | None = None
    dtype: torch.dtype = torch.float64
    tolerance: float = 1e-10
    loss_tolerance: float = 1e-10


@dataclass(frozen=True, kw_only=True)
class Iteration:
    """One batch of each replica."""

    batch_size: int = 8
    length: int = 12
    train: bool = True
    inference: str = ""
    zero_grad: bool = True
    update: bool = True


EVALUATION = Iteration(train=False)


@dataclass(frozen=True, kw_only=True)
class Case:
    """One way to run a model."""

    config: Mapping[str, Any] = field(default_factory=lambda: {"microbatches": 4, "profile": "estimated"})
    iterations: Sequence[Iteration] = (Iteration(), Iteration())
    frozen: tuple[str, ...] = ()
    plain_backward: bool = False
    autocast: torch.dtype | None = None
    optimizer_first: bool = False
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] = lambda model: _sgd(model)
    tolerance: float | None = None
    clip: Callable[[Any], Any] | None = None
    least_divided: float = 0.0

    def loss(self, recipe: Recipe, model: nn.Module, batch: Any) -> Tensor:
        """The loss of one microbatch."""
        with nullcontext() if self.autocast is None else torch.autocast("cpu", self.autocast):
            return recipe.loss(model, batch)


def differences_by_case(
    recipe: Recipe, cases: Mapping[str, Case], *, may_be_too_small: bool = False
) -> dict[str, list[str]]:
    """What `differences` finds in several runs in one set of processes; cases without any are left out."""
    found = {}
    for name, case in cases.items():
        try:
            found[name] = differences(recipe, case)
        except Exception as error:
            if may_be_too_small and isinstance(error, PlanError) and _TOO_FEW_UNITS.search(str(error)):
                found[name] = [TOO_SMALL]
                continue
            error.add_note(f"This happened in the case {name!r}.")
            raise
    return {name: lines for name, lines in found.items() if lines}


def differences(recipe: Recipe, case: Case) -> list[str]:
    """Runs a model plainly and pipelined, on every rank of a process group, and tells how they differ."""
    with tempfile.TemporaryDirectory() as run_dir:
        sw.init({"run_dir": run_dir, **case.config})
        try:
            comparison = _Comparison(recipe, case)
            return [*comparison.run(), *comparison.too_little_divided()]
        finally:
            sw.shutdown()


class _Comparison:
    """The plain model, the pipelined one, and their optimizers."""

    def __init__(self, recipe: Recipe, case: Case):
        self._recipe, self._case = recipe, case
        torch.manual_seed(0)
        self._plain = recipe.build().to(recipe.dtype).train()
        for name, parameter in self._plain.named_parameters():
            if name.startswith(case.frozen):
                parameter.requires_grad_(False)
        module = copy.deepcopy(self._plain)
        if recipe.place is not None:
            recipe.place(module)
        self._plain_optimizer = case.optimizer(self._plain)
        optimizer = case.optimizer(module) if case.optimizer_first else None
        self._model = sw.DistributedModel(module)
        self._optimizer = sw.DistributedOptimizer(optimizer or case.optimizer(self._model))
        self._microbatches = case.config["microbatches"]
        self._reduction = Reduction.UNKNOWN  # of the loss, when it is known
        # Statistics are those of the first replica after each step, as under DistributedDataParallel.
        self._buffers_of_replica = [_buffers(self._plain)] * sw.rdp_size()

    def run(self) -> Iterable[str]:
        """Yields what differs after each iteration and at the end."""
        functions: list[Callable[..., Any]] = []
        for number, iteration in enumerate(self._case.iterations):
            for model, optimizer in ((self._plain, self._plain_optimizer), (self._model, self._optimizer)):
                model.train(iteration.train)
                if iteration.zero_grad:
                    optimizer.zero_grad()
            plain_losses = self._plain_iteration(number, iteration)
            functions = functions or self._step_functions()
            train, evaluate, infer = functions
            batch = self._batch(number, iteration, replica=sw.rdp_rank())
            torch.manual_seed(_seed(number, sw.rdp_rank()))
            function = train if iteration.train else infer if iteration.inference == "inside" else evaluate
            without = torch.inference_mode if iteration.inference == "around" else torch.no_grad
            with nullcontext() if iteration.train else without():
                losses = function(self._model, batch)
            lines = [*self._compare_losses(losses.outputs, plain_losses), *self._compare_gradients()]
            yield from (f"iteration {number}: {line}" for line in lines)
            if iteration.train and iteration.update:
                yield from (f"iteration {number}: {line}" for line in self._clip())
                self._plain_optimizer.step()
                self._optimizer.step()
        yield from self._compare_states()

    def _clip(self) -> Iterable[str]:
        if self._case.clip is None:
            return
        limit = self._case.tolerance or self._recipe.tolerance
        expected, found = self._case.clip(self._plain), self._case.clip(self._model)
        if expected is not None:
            yield from _difference("what clipping returns", found.double(), expected.double(), limit)
        for line in self._compare_gradients():
            yield f"after clipping: {line}"

    def _step_functions(self) -> list[Callable[..., Any]]:
        recipe, case = self._recipe, self._case

        # Where a loss is neither a mean nor a sum, each microbatch counts for itself, as in a loop.
        @sw.step(loss_reduction="mean" if self._reduction is Reduction.NEITHER else None)
        def train(model: Any, batch: Any) -> Tensor:
            loss = case.loss(recipe, model, batch)
            if case.plain_backward:
                loss.backward()
            else:
                model.backward(loss)
            return loss

        @sw.step
        def evaluate(model: Any, batch: Any) -> Tensor:
            return case.loss(recipe, model, batch)

        @sw.step
        @torch.inference_mode()
        def infer(model: Any, batch: Any) -> Tensor:
            return case.loss(recipe, model, batch)

        return [train, evaluate, infer]

    def too_little_divided(self) -> Iterable[str]:
        """Yields what tensor-parallel ranks share of the parameters, if it is less than the case wants."""
        parameters = list(self._model.local_parameters())
        divided = sum(each.numel() for each in parameters if isinstance(each, DividedTensor))
        share = divided / sum(each.numel() for each in parameters)
        if share < self._case.least_divided:
            yield f"only {share:.0%} of the parameters are divided"

    def _plain_iteration(self, number: int, iteration: Iteration) -> list[Tensor]:
        """Computes the microbatches of all replicas; returns the losses of this rank's replica."""
        losses: list[list[Tensor]] = []
        buffers: list[Any] = []
        counts: list[float] = []
        weights: list[float] = []
        earlier = {parameter: parameter.grad for parameter in self._plain.parameters() if iteration.train}
        for parameter in earlier:
            parameter.grad = None
        for replica in range(sw.rdp_size()):
            _load_buffers(self._plain, self._buffers_of_replica[0])
            batch = self._batch(number, iteration, replica=replica)
            torch.manual_seed(_seed(number, replica))
            losses.append([])
            parts = _split(batch, self._microbatches)
            for part in parts:
                with torch.set_grad_enabled(iteration.train):
                    loss = self._case.loss(self._recipe, self._plain, part)
                if iteration.train:
                    form = form_of_loss(loss, samples=_samples(part))
                    self._reduction = form.reduction
                    counts.append(form.counts[0]() if form.counts else float(_samples(part)))
                    # Where some layer has float32, what a loss is multiplied by rounds it.
                    first = counts[0] / _samples(parts[0])
                    share = counts[-1] / (_samples(batch) * sw.rdp_size()) / first
                    weights.append(1.0 if form.reduction is Reduction.SUM else share)
                    (loss * weights[-1]).backward()
                losses[-1].append(loss.detach())
            buffers.append(_buffers(self._plain))
        # Each replica has its own until the next batch begins with those of the first.
        self._buffers_of_replica = buffers
        _load_buffers(self._plain, buffers[sw.rdp_rank()])
        for parameter, before in earlier.items():
            if parameter.grad is not None and weights and self._reduction is not Reduction.SUM:
                parameter.grad /= sum(weights)
            if before is not None:
                parameter.grad = before if parameter.grad is None else before + parameter.grad
        return losses[sw.rdp_rank()]

    def _batch(self, number: int, iteration: Iteration, *, replica: int) -> Any:
        torch.manual_seed(1000 + _seed(number, replica))
        items, structure = flatten(self._recipe.batch(iteration.batch_size, iteration.length))
        return structure.rebuild([_cast(item, self._recipe.dtype) for item in items])

    def _compare_losses(self, losses: Sequence[Tensor], plain: Sequence[Tensor]) -> Iterable[str]:
        limit = self._case.tolerance or self._recipe.loss_tolerance
        for index, (loss, expected) in enumerate(zip(losses, plain, strict=True)):
            yield from _difference(f"loss of microbatch {index}", loss, expected, limit)

    def _compare_gradients(self) -> Iterable[str]:
        limit = self._case.tolerance or self._recipe.tolerance
        expected = dict(self._plain.named_parameters())
        local = dict(self._model.local_named_parameters())
        for name, parameter in local.items():
            yield from _difference(f"gradient of {name}", parameter.grad, expected[name].grad, limit)
        held: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(held, set(local))
        for name in expected.keys() - set().union(*held):
            yield f"no rank holds {name}"

    def _compare_states(self) -> Iterable[str]:
        limit = self._case.tolerance or self._recipe.tolerance
        expected, state = self._plain.state_dict(), self._model.state_dict()
        if list(state) != list(expected):
            yield f"state_dict() has the names {list(state)}, not {list(expected)}"
        for name in state.keys() & expected.keys():
            yield from _difference(f"state of {name}", state[name], expected[name], limit)


def _buffers(model: nn.Module) -> dict[str, Tensor]:
    return {name: buffer.clone() for name, buffer in model.named_buffers()}


def _load_buffers(model: nn.Module, values: Mapping[str, Tensor]) -> None:
    for name, buffer in model.named_buffers():
        buffer.copy_(values[name])


def _seed(number: int, replica: int) -> int:
    return 10 * number + replica


def _sgd(model: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)


def _cast(item: Any, dtype: torch.dtype) -> Any:
    return item.to(dtype) if isinstance(item, Tensor) and item.is_floating_point() else item


def _samples(batch: Any) -> int:
    return next(len(item) for item in flatten(batch)[0] if isinstance(item, Tensor))


def _split(batch: Any, num_microbatches: int) -> list[Any]:
    items, structure = flatten(batch)
    columns = [
        torch.tensor_split(item, num_microbatches) if isinstance(item, Tensor) else [item] * num_microbatches
        for item in items
    ]
    return [structure.rebuild([column[index] for column in columns]) for index in range(num_microbatches)]


def _difference(what: str, found: Tensor | None, expected: Tensor | None, limit: float) -> Iterable[str]:
    if found is None or expected is None:
        if found is not expected:
            yield f"{what}: it is {_brief(found)}, not {_brief(expected)}"
        return
    if found.shape != expected.shape or found.dtype != expected.dtype:
        yield f"{what}: {_brief(found)} is not {_brief(expected)}"
        return
    if found.numel() == 0:
        return
    found, expected = found.detach().double(), expected.detach().double()
    scale = max(0.01, expected.abs().max().item())
    error = (found - expected).abs().max().item() / scale
    if not error <= limit:  # so that NaN counts
        yield f"{what}: differs by {error:.1e}, more than {limit:.0e} of {scale:.1e}"


def _brief(tensor: Tensor | None) -> str:
    return "None" if tensor is None else f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
