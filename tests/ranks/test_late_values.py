"""What a step function reads of tensors of other ranks, where it may: numbers that are known at its end."""

from typing import Any

import pytest
import torch
from sharded import QUIET, Net, batches, loss_of

from shardwright.testing import RanksFailedError, run_ranks


def train(model: Any, x: torch.Tensor, y: torch.Tensor) -> Any:
    """Reads its loss and its predictions, and counts with them."""
    logits = model(x)
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), y.flatten())
    model.backward(loss)
    correct = logits.argmax(-1).eq(y).sum().item()
    rows = x.sum().item()  # of the batch: known now
    return {
        "loss": loss.item(),
        "scaled": 1 + 2 * loss.item() / 4 - correct,
        "share": correct / y.numel() + (rows - rows),
        "predicted": logits.argmax(-1).tolist(),
        "array": loss.detach().cpu().numpy(),
        "tensor": loss,
        "count": y.numel(),
    }


def on_ranks(function: Any, steps: int = 2, **settings: Any) -> Any:
    import shardwright.torch as sw
    from shardwright.torch.step import step_function

    sw.init({**QUIET, "microbatches": 2, **settings})
    torch.manual_seed(0)
    model = sw.DistributedModel(Net().double())
    step = step_function(function, reads_late=True)
    return [step(model, x, y) for x, y in batches(steps)]


def expected() -> list[dict[str, Any]]:
    """The same from a plain loop, before any update."""
    torch.manual_seed(0)
    model: Any = Net().double()
    model.backward = lambda loss: None
    found = []
    for x, y in batches(2):
        results = [train(model, a, b) for a, b in zip(x.chunk(2), y.chunk(2), strict=True)]
        found.append({name: [result[name] for result in results] for name in results[0]})
    return found


@pytest.mark.parametrize("ranks", [1, 2])
def test_values_are_those_of_a_plain_loop_on_every_rank(ranks: int) -> None:
    for results in run_ranks(on_ranks, ranks, train, pipeline_parallel_degree=ranks):
        for result, plain in zip(results, expected(), strict=True):
            assert result["count"] == plain["count"]
            for name in ("loss", "scaled", "share", "array"):
                wanted = [float(each) for each in plain[name]]
                assert [float(each) for each in result[name]] == pytest.approx(wanted, rel=1e-12), name
            assert all(type(each) is float for each in result["loss"])
            if ranks > 1:  # on one it is a list as any other, in which each number becomes a list
                assert result["predicted"] == plain["predicted"]
            assert result["tensor"].reduce_mean().item() == pytest.approx(sum(plain["loss"]) / 2)


def decides(model: Any, x: torch.Tensor, y: torch.Tensor) -> Any:
    """Asks at once."""
    loss = loss_of(model, x, y)
    if loss.item() > 1e9:
        loss = 2 * loss
    model.backward(loss)
    return loss


def test_nothing_is_decided_by_them() -> None:
    with pytest.raises(RanksFailedError, match=r"test_late_values\.py:\d+: its value is asked for inside"):
        run_ranks(on_ranks, 2, decides, pipeline_parallel_degree=2)


def reading_model(model: Any, x: torch.Tensor, y: torch.Tensor) -> Any:
    """Trains with `Looks`."""
    loss = model(x.double()).square().mean()
    model.backward(loss)
    return loss.item()


class Looks(torch.nn.Module):
    """Decides by what it computes, as a router may."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(5, 5)
        self.last = torch.nn.Linear(5, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        return self.last(x) if x.sum().item() > -1e9 else x


def test_a_module_that_looks_at_values_is_placed_whole() -> None:
    def run() -> Any:
        import shardwright.torch as sw
        from shardwright.torch.step import step_function

        sw.init({**QUIET, "microbatches": 2, "pipeline_parallel_degree": 2})
        torch.manual_seed(0)
        model = sw.DistributedModel(torch.nn.Sequential(Looks(), Looks(), Looks(), Looks()).double())
        return step_function(reading_model, reads_late=True)(model, *batches(1)[0])

    one, other = run_ranks(run, 2)
    assert one == other
    assert len(one) == 2
