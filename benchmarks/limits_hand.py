"""Cases of section F with stages made by hand: small models, both sides, every rank."""

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

import shardwright.torch as sw
from models import Block, Layered, Task, even_stages, gpt

__all__ = ["CASES", "difference", "train_ours"]

Attempt = Callable[[], float]
Gradients = Mapping[str, Tensor | None]

_MICROBATCHES = 4
_LENGTH = 8


def difference(found: Gradients, wanted: Gradients) -> float:
    """The largest difference of any gradient that is held here; a missing one counts as zeros."""
    return max(
        float((wanted_one - (0 if found[name] is None else found[name])).abs().max())  # type: ignore[operator]
        for name, wanted_one in wanted.items()
        if name in found and wanted_one is not None
    )


def train_ours(model: nn.Module, loss: Callable[..., Tensor], *batches: tuple[Tensor, ...]) -> float:
    """Trains on one batch after the other; the largest difference from one process."""
    sw.init({"run_dir": "off", "pipeline": "1f1b", "microbatches": _MICROBATCHES, "profile": "estimated"})
    wrapped = sw.DistributedModel(copy.deepcopy(model))

    @sw.step
    def train_step(model: sw.DistributedModel, *batch: Tensor) -> Tensor:
        found = loss(model, *batch)
        model.backward(found)
        return found

    worst = 0.0
    for batch in batches:
        wrapped.zero_grad(set_to_none=True)
        train_step(wrapped, *batch)
        held = {name: p.grad for name, p in wrapped.local_named_parameters()}
        worst = max(worst, difference(held, _alone(model, loss, batch)))
    return worst


def _alone(model: nn.Module, loss: Callable[..., Tensor], batch: tuple[Tensor, ...]) -> Gradients:
    """Gradients of one process: the mean over the same microbatches."""
    plain = copy.deepcopy(model)
    pieces = [t.tensor_split(_MICROBATCHES) for t in batch]
    for piece in zip(*pieces, strict=True):
        (loss(plain, *piece) / _MICROBATCHES).backward()
    return {name: p.grad for name, p in plain.named_parameters()}


class _Stages:
    """The peer's 1F1B over two hand-made stages, one a rank."""

    def __init__(self, model: Layered, loss: Callable[[Tensor, Tensor], Tensor]):
        self._rank = dist.get_rank()
        self._names = even_stages(model, 2)[self._rank]
        self._parts = [copy.deepcopy(model.get_submodule(name)) for name in self._names]
        self.module = nn.Sequential(*self._parts)
        stage = PipelineStage(self.module, self._rank, 2, torch.device("cpu"))
        self.schedule = Schedule1F1B(stage, _MICROBATCHES, loss_fn=loss)

    def train(self, inputs: Tensor, targets: Tensor) -> None:
        self.module.zero_grad(set_to_none=True)
        if self._rank == 0:
            self.schedule.step(inputs)
        else:
            self.schedule.step(target=targets)

    def gradients(self) -> Gradients:
        return {
            f"{name}.{inner}": p.grad
            for name, part in zip(self._names, self._parts, strict=True)
            for inner, p in part.named_parameters()
        }


def _small(*, batch: int = 8) -> tuple[Task, Layered, tuple[Tensor, Tensor]]:
    task = gpt(layers=4, width=16, vocab=32, length=_LENGTH, batch=batch)
    return task, task.build(), task.batch()


def _loss_of(task: Task) -> Callable[..., Tensor]:
    return lambda model, x, y: task.loss(model(x), y)


def _peer_on(*batches: int | tuple[int, int]) -> float:
    """Trains on batches of given sizes (or sizes and lengths)."""
    task, model, _ = _small()
    stages, worst = _Stages(model, task.loss), 0.0
    for inputs, targets in _batches(batches):
        stages.train(inputs, targets)
        worst = max(worst, difference(stages.gradients(), _alone(model, _loss_of(task), (inputs, targets))))
    return worst


def _ours_on(*batches: int | tuple[int, int]) -> float:
    task, model, _ = _small()
    return train_ours(model, _loss_of(task), *_batches(batches))


def _batches(sizes: tuple[int | tuple[int, int], ...]) -> list[tuple[Tensor, Tensor]]:
    torch.manual_seed(2)
    shapes = [(size, _LENGTH) if isinstance(size, int) else size for size in sizes]
    return [(torch.randint(0, 32, shape), torch.randint(0, 32, shape)) for shape in shapes]


# ---- evaluation after training
# ----------------------------------------------------------------------------------


def _peer_evaluates() -> float:
    task, model, (inputs, targets) = _small()
    stages = _Stages(model, task.loss)
    stages.train(inputs, targets)
    if dist.get_rank() == 0:
        stages.schedule.eval(inputs)
        return 0.0
    scores = stages.schedule.eval(target=targets)  # it has to be told them, because it takes the loss
    return float((scores - model(inputs)).abs().max())


def _ours_evaluates() -> float:
    task, model, batch = _small()
    worst = train_ours(model, _loss_of(task), batch)
    from shardwright.run.context import context

    @sw.step
    def evaluate(model: sw.DistributedModel, x: Tensor) -> Tensor:
        return model(x)

    with torch.no_grad():
        scores = evaluate(context().model, batch[0]).concat()
        return max(worst, float((scores - model(batch[0])).abs().max()))


# ---- layers that return dictionaries
# ----------------------------------------------------------------------------


class _DictBlock(nn.Module):
    """Takes and returns hidden states with their mean."""

    def __init__(self, width: int):
        super().__init__()
        self.block = Block(width)

    def forward(self, x: Any) -> dict[str, Tensor]:
        hidden = self.block(x["hidden"] if isinstance(x, dict) else x)
        return {"hidden": hidden, "mean": hidden.mean(-1, keepdim=True)}


class _FromDict(nn.Module):
    """Reads both."""

    def __init__(self, width: int, vocab: int):
        super().__init__()
        self.scores = nn.Linear(width, vocab)

    def forward(self, x: Any) -> Tensor:
        return self.scores(x["hidden"] - x["mean"])


def _with_dicts() -> tuple[Task, Layered, tuple[Tensor, Tensor]]:
    task, model, batch = _small()
    torch.manual_seed(3)
    return task, Layered([_DictBlock(16) for _ in range(4)], model.first, _FromDict(16, 32)), batch


def _peer_dicts() -> float:
    task, model, (inputs, targets) = _with_dicts()
    stages = _Stages(model, task.loss)
    stages.train(inputs, targets)
    return difference(stages.gradients(), _alone(model, _loss_of(task), (inputs, targets)))


def _ours_dicts() -> float:
    task, model, batch = _with_dicts()
    return train_ours(model, _loss_of(task), batch)


# ---- one weight in two places
# -----------------------------------------------------------------------------------


def _tied() -> tuple[Task, Layered, tuple[Tensor, Tensor]]:
    task, model, batch = _small()
    model.last.scores.weight = model.first.tokens.weight  # type: ignore[union-attr]
    return task, model, batch


def _peer_tied() -> float:
    task, model, (inputs, targets) = _tied()
    stages = _Stages(model, task.loss)
    stages.train(inputs, targets)
    return difference(stages.gradients(), _alone(model, _loss_of(task), (inputs, targets)))


def _ours_tied() -> float:
    task, model, batch = _tied()
    return train_ours(model, _loss_of(task), batch)


CASES: dict[str, tuple[Attempt, Attempt]] = {
    "uneven last batch": (lambda: _peer_on(8, 6), lambda: _ours_on(8, 6)),
    "batch of 10 in 4 microbatches": (lambda: _peer_on(10), lambda: _ours_on(10)),
    "evaluation after training": (_peer_evaluates, _ours_evaluates),
    "layers that return a dict": (_peer_dicts, _ours_dicts),
    "another sequence length": (lambda: _peer_on((8, 8), (8, 6)), lambda: _ours_on((8, 8), (8, 6))),
    "tied embedding and head": (_peer_tied, _ours_tied),
}
