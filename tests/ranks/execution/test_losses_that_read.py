"""Losses that look at values, as those of object detectors do, in steps of `sw.step`: as in a plain loop.

They were refused there and allowed in steps of `smp`: one rule holds for both now. A step function may read
what is behind its last call of the model, without a setting.
"""

import io
import re
from collections.abc import Callable
from contextlib import redirect_stdout
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from scipy.optimize import linear_sum_assignment
from sharded import QUIET
from torch import Tensor, nn

from choices import in_sweep
from shardwright.testing import run_ranks

WIDTH, CLASSES, QUERIES = 8, 5, 6
MICROBATCHES = 4
SIZES = (8, 7)  # of the batches of a replica: the last one does not divide


class Detector(nn.Module):
    """Gives for each query a class and a place; with objects, as those of transformers, the loss, too."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.queries = nn.Parameter(torch.randn(QUERIES, WIDTH))
        self.classify = nn.Linear(WIDTH, CLASSES + 1)
        self.locate = nn.Linear(WIDTH, 2)

    def forward(self, x_BD: Tensor, objects: Tensor | None = None) -> dict[str, Tensor]:
        hidden = self.stem(x_BD)[:, None] + self.queries
        for block in self.blocks:
            hidden = hidden + torch.tanh(block(hidden))
        found = {"logits": self.classify(hidden), "places": self.locate(hidden).sigmoid()}
        return found if objects is None else {**found, "loss": criterion(found, objects)}


class Criterion(nn.Module):
    """As that of DETR: matches queries with objects at the least cost, on the host, and weighs classes."""

    def __init__(self) -> None:
        super().__init__()
        weight = torch.ones(CLASSES + 1, dtype=torch.float64)
        weight[-1] = 0.1
        self.register_buffer("weight", weight)

    def forward(self, out: dict[str, Tensor], objects: Tensor) -> Tensor:
        """Objects: (samples, most objects, class and place); class -1: there is none."""
        pairs = self._pairs(out, objects)
        target = torch.full(out["logits"].shape[:2], CLASSES)
        distances = []
        for sample, (queries, found) in enumerate(pairs):
            present = objects[sample][objects[sample][:, 0] >= 0]
            target[sample, queries] = present[found, 0].long()
            distances.append(F.l1_loss(out["places"][sample, queries], present[found, 1:], reduction="sum"))
        count = max(sum(len(queries) for queries, _ in pairs), 1)
        classes = F.cross_entropy(out["logits"].transpose(1, 2), target, self.weight)
        return classes + torch.stack(distances).sum() / count

    @torch.no_grad()
    def _pairs(self, out: dict[str, Tensor], objects: Tensor) -> list[tuple[Tensor, Tensor]]:
        found = []
        for sample, each in enumerate(objects):
            present = each[each[:, 0] >= 0]
            cost = -out["logits"][sample].softmax(-1)[:, present[:, 0].long()]
            cost = cost + torch.cdist(out["places"][sample], present[:, 1:], p=1)
            rows, columns = linear_sum_assignment(cost.cpu().numpy())
            found.append((torch.as_tensor(rows), torch.as_tensor(columns)))
        return found


criterion = Criterion()


def matches(model: Any, x: Tensor, objects: Tensor) -> Any:
    loss = criterion(model(x), objects)
    model.backward(loss)
    return loss


def matches_inside(model: Any, x: Tensor, objects: Tensor) -> Any:
    """Refused before: the code of the model itself reads."""
    loss = model(x, objects)["loss"]
    model.backward(loss)
    return loss


def mines_hard_negatives(model: Any, x: Tensor, objects: Tensor) -> Any:
    """As SSD: of anchors without an object those count that are most wrong, three for each with one."""
    out = model(x)
    target = torch.where(objects[:, :, 0] >= 0, objects[:, :, 0], CLASSES).long()
    target = F.pad(target, (0, QUERIES - target.shape[1]), value=CLASSES)
    each = F.cross_entropy(out["logits"].transpose(1, 2), target, reduction="none")
    positive = target < CLASSES
    with torch.no_grad():
        rank = torch.where(positive, 0.0, each).argsort(1, descending=True).argsort(1)
    negative = rank < 3 * positive.sum(1, keepdim=True)
    loss = each[positive | negative].sum() / max(int(positive.sum()), 1)
    model.backward(loss)
    return loss


def skips_what_is_not_finite(model: Any, x: Tensor, objects: Tensor) -> Any:
    loss = criterion(model(x), objects)
    if objects[0, 0, 1] > 0.5:
        loss = loss / 0.0
    if not torch.isfinite(loss):
        return torch.zeros(())
    model.backward(loss)
    return loss.detach()


def reads_its_loss(model: Any, x: Tensor, objects: Tensor) -> Any:
    out = model(x)
    loss = out["logits"].square().mean() + out["places"].mean()
    model.backward(loss)
    print(f"loss {loss.item():.9f}", float(loss.detach()) > 0)
    return loss, loss.item()


def counts(model: Any, x: Tensor, objects: Tensor) -> Any:
    """An evaluation."""
    with torch.no_grad():
        chosen = model(x)["logits"].argmax(-1)
    return (chosen == CLASSES).sum().item(), str(chosen.tolist())


TRAINED = (matches, matches_inside, mines_hard_negatives, skips_what_is_not_finite, reads_its_loss)


class Plain(nn.Module):
    """A model in a plain loop."""

    def __init__(self, module: nn.Module):
        super().__init__()
        self.module = module
        self.share = 1.0  # of the samples, that the part at hand has

    def forward(self, *args: Any) -> Any:
        return self.module(*args)

    def backward(self, loss: Tensor) -> None:
        (loss * self.share).backward()


def batches(replicas: int) -> list[tuple[Tensor, Tensor]]:
    """Samples, and one to three objects in each."""
    generator = torch.Generator().manual_seed(1)
    found = []
    for size in SIZES:
        x = torch.randn(size * replicas, WIDTH, generator=generator, dtype=torch.float64)
        objects = torch.rand(size * replicas, 3, 3, generator=generator, dtype=torch.float64)
        objects[..., 0] = torch.randint(0, CLASSES, (size * replicas, 3), generator=generator)
        for sample in range(size * replicas):
            objects[sample, 1 + sample % 3 :, 0] = -1
        found.append((x, objects))
    return found


def plain_loop(function: Callable[..., Any], replicas: int) -> tuple[list[Any], list[Any], dict[str, Tensor]]:
    """What each microbatch of each replica returns, and weights."""
    torch.manual_seed(0)
    model = Plain(Detector().double())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def over(function: Callable[..., Any], batch: tuple[Tensor, Tensor]) -> list[Any]:
        of_replicas = zip(*(t.chunk(replicas) for t in batch), strict=True)
        parts = [zip(*(t.tensor_split(MICROBATCHES) for t in each), strict=True) for each in of_replicas]
        size = len(batch[0]) // replicas

        def one(part: tuple[Tensor, Tensor]) -> Any:
            model.share = len(part[0]) / size / replicas
            return numbers(function(model, *part))

        return [[one(part) for part in replica] for replica in parts]

    results = []
    for batch in batches(replicas):
        optimizer.zero_grad()
        results.append(over(function, batch))
        optimizer.step()
    return results, over(counts, batches(replicas)[-1]), model.module.state_dict()


def numbers(result: Any) -> Any:
    if isinstance(result, Tensor):
        return result.item()
    return [numbers(item) for item in result] if isinstance(result, list | tuple) else result


def over_stages(functions: list[Callable[..., Any]], settings: dict[str, Any]) -> list[Any]:
    """The same of this rank's replica, over stages, for one function after the other."""
    return [_over_stages(function, settings) for function in functions]


def _over_stages(function: Callable[..., Any], settings: dict[str, Any]) -> Any:
    import shardwright.torch as sw

    sw.init({**QUIET, "microbatches": MICROBATCHES, **settings})
    torch.manual_seed(0)
    model = sw.DistributedModel(Detector().double())
    optimizer = sw.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    step, evaluate = sw.step(loss_reduction="mean")(function), sw.step(counts)

    def part(batch: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
        return tuple(t.chunk(sw.dp_size())[sw.dp_rank()] for t in batch)

    results = []
    with redirect_stdout(io.StringIO()) as printed:
        for batch in batches(sw.dp_size()):
            optimizer.zero_grad()
            results.append(by_microbatch(step(model, *part(batch))))
            optimizer.step()
        evaluated = by_microbatch(evaluate(model, *part(batches(sw.dp_size())[-1])))
    lines = re.findall(r"loss (\S+) True", printed.getvalue())
    found = results, evaluated, model.state_dict(), sw.dp_rank(), lines
    sw.shutdown()
    return found


def by_microbatch(result: Any) -> list[Any]:
    if hasattr(result, "outputs"):
        return [each.item() for each in result.outputs]
    if isinstance(result, tuple):
        return [list(each) for each in zip(*map(by_microbatch, result), strict=True)]
    return list(result)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("ranks", "settings"),
    [
        in_sweep(2, {"pipeline": "1f1b"}),
        in_sweep(2, {"pipeline": "interleaved_1f1b", "virtual_stages": 2}),
        in_sweep(2, {"pipeline": "zb_h1"}),
        in_sweep(2, {"pipeline": "zb_v"}),
        in_sweep(2, {"pipeline": "gpipe"}),
        in_sweep(3, {"pipeline": "1f1b"}),
        (4, {"pipeline_parallel_degree": 2}),
    ],
    ids=lambda item: item.get("pipeline", "replicas") if isinstance(item, dict) else str(item),
)
def test_losses_that_read_are_those_of_a_plain_loop(ranks: int, settings: dict[str, Any]) -> None:
    replicas = 2 if "pipeline_parallel_degree" in settings else 1
    functions = list(TRAINED) if replicas == 1 else [matches, matches_inside]
    found = run_ranks(over_stages, ranks, functions, settings)
    for place, function in enumerate(functions):
        with redirect_stdout(io.StringIO()):
            results, evaluated, weights = plain_loop(function, replicas)
        for rank in found:
            own_results, own_evaluated, own_weights, replica, lines = rank[place]
            torch.testing.assert_close(own_results, [step[replica] for step in results], rtol=1e-10, atol=0)
            assert own_evaluated == evaluated[replica]
            torch.testing.assert_close(own_weights, weights, rtol=1e-10, atol=1e-12)
            if function is reads_its_loss:
                assert lines == [f"{loss:.9f}" for step in own_results for loss, _ in step]


def reads_nothing(model: Any, x: Tensor, objects: Tensor) -> Any:
    loss = model(x)["logits"].float().square().mean().double()
    model.backward(loss)
    return loss


def test_a_step_that_reads_nothing_takes_no_further_messages() -> None:
    """Only a mark of each microbatch, which the next batch overwrites."""

    def run() -> tuple[int, int]:
        import shardwright.torch as sw
        from shardwright.comm.joining.store import ValueBoard
        from shardwright.torch.execution.agreement import Agreement

        asked = [0, 0]
        for kind, name, place in ((Agreement, "on_any", 0), (ValueBoard, "put", 1)):
            plain = getattr(kind, name)

            def counted(*args: Any, plain: Any = plain, place: int = place) -> Any:
                asked[place] += number > 0
                return plain(*args)

            setattr(kind, name, counted)
        sw.init({**QUIET, "microbatches": MICROBATCHES})
        model = sw.DistributedModel(Detector().double())
        step = sw.step(reads_nothing)
        for number in range(3):  # noqa: B007  (read above)
            step(model, *batches(1)[0])
        return asked[0], asked[1]

    assert run_ranks(run, 2) == [(0, 0), (0, 0)]
