"""What a step function reads of tensors of other ranks, where it may: numbers that are known at its end."""

import math
from typing import Any

import numpy
import pytest
import torch
from sharded import QUIET, Net, batches, loss_of

from shardwright.testing import RanksFailedError, run_ranks

MICROBATCHES = 3  # of other sizes


def train(model: Any, x: torch.Tensor, y: torch.Tensor) -> Any:
    """Reads its loss and its predictions, and counts with them."""
    logits = model(x)
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), y.flatten())
    model.backward(loss)
    correct = logits.argmax(-1).eq(y).sum().item()
    rows = x.sum().item()  # of the batch: known now
    changed = loss.detach() * 3
    before = changed.item()
    changed.zero_()
    print(f"loss {loss.item():.3f}")
    return {
        "loss": loss.item(),
        "scaled": 1 + 2 * loss.item() / 4 - correct,
        "share": correct / y.numel() + (rows - rows),
        "predicted": logits.argmax(-1).tolist(),
        "array": loss.detach().cpu().numpy(),
        "before": before,
        "of many": [round(loss.item(), 2), abs(-loss.item()), loss.item() ** 2, 2 ** loss.item()],
        "whole": [correct // 2, correct % 2, 7 // (correct + 1), round(loss.item()), math.floor(loss.item())],
        "of both": [correct * loss.item() * len(x), numpy.float64(2) * loss.item(), loss.item() - correct],
        "of the last": logits.argmax(-1).tolist()[-1][0],
        "texts": [f"{loss.item():.3f}", str(correct), f"{correct} of {y.numel()}, {loss.item():>9.2e}!"],
        "formatted": f"{loss.item():.2f} {correct!r}",
        "tensor": loss,
        "count": y.numel(),
    }


def on_ranks(function: Any, steps: int = 2, **settings: Any) -> Any:
    import shardwright.torch as sw
    from shardwright.torch.step import step_function

    sw.init({**QUIET, "microbatches": MICROBATCHES, **settings})
    torch.manual_seed(0)
    model = sw.DistributedModel(Net().double())
    step = step_function(function, reads_late=True)
    return [step(model, x, y) for x, y in batches(steps)]


def expected(microbatches: int) -> list[dict[str, Any]]:
    """The same from a plain loop, before any update."""
    torch.manual_seed(0)
    model: Any = Net().double()
    model.backward = lambda loss: None
    found = []
    for x, y in batches(2):
        parts = zip(x.tensor_split(microbatches), y.tensor_split(microbatches), strict=True)
        results = [train(model, a, b) for a, b in parts]
        found.append({name: [result[name] for result in results] for name in results[0]})
    return found


@pytest.mark.parametrize("ranks", [1, 2])
def test_values_are_those_of_a_plain_loop_on_every_rank(ranks: int) -> None:
    microbatches = 2 if ranks == 1 else MICROBATCHES  # of one size where lists are lists, and put together
    settings = {"pipeline_parallel_degree": ranks, "microbatches": microbatches}
    for results in run_ranks(on_ranks, ranks, train, **settings):
        for result, plain in zip(results, expected(microbatches), strict=True):
            assert result["count"] == plain["count"]
            for name in ("loss", "scaled", "share", "array", "before", "of the last"):
                wanted = [float(each) for each in plain[name]]
                assert [float(each) for each in result[name]] == pytest.approx(wanted, rel=1e-12), name
            for name in ("of many", "whole", "of both"):
                for here, there in zip(result[name], zip(*plain[name], strict=True), strict=True):
                    assert here == pytest.approx(list(there), rel=1e-12), name
                    assert list(map(type, here)) == list(map(type, there)), name
            assert result["texts"] == list(map(list, zip(*plain["texts"], strict=True)))
            assert result["formatted"] == plain["formatted"]
            assert all(type(each) is float for each in result["loss"])
            if ranks > 1:  # on one it is a list as any other, in which each number becomes a list
                assert result["predicted"] == plain["predicted"]
            assert result["tensor"].reduce_mean().item() == pytest.approx(sum(plain["loss"]) / microbatches)


def decides(model: Any, x: torch.Tensor, y: torch.Tensor) -> Any:
    """Asks at once."""
    loss = loss_of(model, x, y)
    if loss.item() > 1e9:
        loss = 2 * loss
    model.backward(loss)
    return loss


def loss_in_numpy(model: Any, x: torch.Tensor, y: torch.Tensor) -> Any:
    return numpy.float32(loss_of(model, x, y).item())


def mean_in_numpy(model: Any, x: torch.Tensor, y: torch.Tensor) -> Any:
    return model(x).detach().numpy().mean()


def scaled_by_itself(model: Any, x: torch.Tensor, y: torch.Tensor) -> Any:
    loss = loss_of(model, x, y)
    return loss * loss.item()


def part_of_a_text(model: Any, x: torch.Tensor, y: torch.Tensor) -> Any:
    return f"{loss_of(model, x, y).item():.3f}"[:14]


REFUSED = {
    decides: "its value is asked for inside",
    loss_in_numpy: "its value is asked for inside",
    mean_in_numpy: "mean of something that was read",
    scaled_by_itself: "mul of a tensor, and of",
}


@pytest.mark.parametrize("function", REFUSED)
def test_nothing_is_decided_by_them(function: Any) -> None:
    """NumPy, and tensors, said something else of what they cannot compute with."""
    with pytest.raises(RanksFailedError, match=rf"test_late_values\.py:\d+: {REFUSED[function]}"):
        run_ranks(on_ranks, 2, function, pipeline_parallel_degree=2)


def test_a_text_that_was_cut_is_not_returned() -> None:
    with pytest.raises(RanksFailedError, match="was not known when the text was cut"):
        run_ranks(on_ranks, 2, part_of_a_text, pipeline_parallel_degree=2)


class Meter:
    """Adds up, as meters of scripts do."""

    def __init__(self) -> None:
        self.values: list[Any] = []


def test_what_a_step_leaves_elsewhere_is_known_when_it_has_returned() -> None:
    def run() -> Any:
        meter = Meter()

        def step(model: Any, x: torch.Tensor, y: torch.Tensor) -> Any:
            loss = loss_of(model, x, y)
            model.backward(loss)
            meter.values.append(100 * loss.item())
            return loss

        returned = on_ranks(step, steps=1, pipeline_parallel_degree=2)
        numbers = [100 * each.item() for each in returned[0].outputs]
        known = meter.values[-MICROBATCHES:]  # there are more of the trace
        assert [float(each) for each in known] == pytest.approx(numbers)
        assert [each > 0 for each in known] == [True] * MICROBATCHES
        assert f"{known[0]:.1f} {known[0] + known[1]:.1f}" == f"{numbers[0]:.1f} {sum(numbers[:2]):.1f}"
        return len(meter.values)

    assert run_ranks(run, 2)[0] >= MICROBATCHES


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
