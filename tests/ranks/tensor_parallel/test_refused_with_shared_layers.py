"""What a tensor degree does not go together with is refused, or said."""

import copy
import logging

import pytest
import torch
import torch.distributed as dist
from test_shared_layers import language
from torch import Tensor, nn

import shardwright.torch as sw
from shardwright.run.context import context
from shardwright.testing import RanksFailedError, run_ranks, run_ranks_outcomes
from shardwright.torch.tensor_parallel.divided_tensor import DividedTensor

QUIET = {"run_dir": "off", "profile": "estimated", "microbatches": 2}


def start(model: nn.Module, settings: dict[str, object]):
    sw.init({**QUIET, "tensor_parallel_degree": 2, **settings})
    torch.manual_seed(0)
    return sw, sw.DistributedModel(model.double())


def train(sw, model, batch: Tensor) -> Tensor:
    @sw.step
    def step(model, batch):
        loss = model(batch).square().mean()
        model.backward(loss)
        return loss

    return step(model, batch).reduce_mean()


def test_ranks_with_different_degrees():
    def start_alone():
        sw.init({**QUIET, "tensor_parallel_degree": 1 + dist.get_rank()})

    for outcome in run_ranks_outcomes(start_alone, 2):
        assert "rank 0 has pipeline(2) * data(1), shard 1" in outcome.error
        assert "rank 1 has pipeline(1) * data(1) * tensor(2)" in outcome.error


def test_a_degree_that_does_not_divide_the_ranks():
    def start_all():
        sw.init({**QUIET, "tensor_parallel_degree": 3})

    with pytest.raises(
        RanksFailedError, match=r"pipeline\(\?\) \* data\(\?\) \* tensor\(3\) != WORLD_SIZE\(2\)"
    ):
        run_ranks(start_all, 2)


class LooksAtMemory(nn.Linear):
    """As code around a kernel of another library does."""

    def __init__(self) -> None:
        super().__init__(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        assert y.data_ptr()
        return y


class LooksAtValues(nn.Module):
    """Goes one way or the other by the values of its input."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.first(x) if bool(x.mean() > 0) else self.second(x)


class SynchronisedBlock(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(8, 8), nn.SyncBatchNorm(8))


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (LooksAtMemory, "stays whole on all ranks: its code does not run on tensors without data"),
        (SynchronisedBlock, "stays whole on all ranks: replicas share its statistics"),
    ],
)
def test_a_module_that_cannot_be_divided_stays_whole(kind, text):
    def on_rank():
        said: list[str] = []
        handler = logging.Handler()
        handler.emit = lambda record: said.append(record.getMessage())
        logging.getLogger("shardwright").addHandler(handler)
        torch.manual_seed(0)
        plain = nn.Sequential(nn.Linear(8, 8), kind(), nn.Linear(8, 8)).double()
        sw, model = start(plain, {})
        batch = torch.randn(4, 8, dtype=torch.float64)
        train(sw, model, batch)
        train(sw, model, batch)
        divided = [name for name, p in model.local_named_parameters() if isinstance(p, DividedTensor)]
        return [line for line in said if "stays whole" in line], divided

    first, second = run_ranks(on_rank, 2)
    assert [text in line for line in first[0]] == [True]
    assert second[0] == []
    assert first[1] == second[1]
    assert first[1]
    assert not [name for name in first[1] if name.startswith("1.")]


def test_a_module_that_looks_at_values_is_divided_and_traced_again():
    """Bug: a trace of divided parameters sent tensors without data to the other ranks."""

    def on_rank():
        torch.manual_seed(0)
        plain = nn.Sequential(nn.Linear(8, 8), LooksAtValues(), nn.Linear(8, 8)).double()
        sw, model = start(copy.deepcopy(plain), {})
        batches = torch.randn(3, 4, 8, dtype=torch.float64)
        losses = [train(sw, model, batch).item() for batch in batches]
        expected = [torch.stack([plain(b).square().mean() for b in batch.split(2)]) for batch in batches]
        divided = [name for name, p in model.local_named_parameters() if isinstance(p, DividedTensor)]
        return losses, [each.mean().item() for each in expected], divided

    for losses, expected, divided in run_ranks(on_rank, 2):
        assert losses == pytest.approx(expected, rel=1e-12)
        assert {"1.first.weight", "1.second.weight"} <= set(divided)


def test_a_plan_with_cuts_is_followed_from_its_file(tmp_path):
    """The plan is the runtime's only input: what it leaves whole stays so, whatever a search would find."""

    def on_rank(path, plan):
        from pathlib import Path

        recipe = language(layers=4)
        sw, model = start(recipe.build(), {"plan": plan} if plan else {})
        torch.manual_seed(1)
        batch = recipe.batch(8, 12)

        @sw.step
        def step(model, batch):
            loss = recipe.loss(model, batch)
            model.backward(loss)
            return loss

        loss = step(model, batch).reduce_mean().item()
        if not plan:
            found = context().plan
            tensor = found.tensor.model_copy(
                update={"cuts": {k: c for k, c in found.tensor.cuts.items() if ".up." in k or ".down." in k}}
            )
            if sw.rank() == 0:
                found.model_copy(update={"tensor": tensor}).write(Path(path))
        return loss, [n for n, p in model.local_named_parameters() if isinstance(p, DividedTensor)]

    path = tmp_path / "plan.json"
    first = run_ranks(on_rank, 2, str(path), None)[0]
    second = run_ranks(on_rank, 2, str(path), str(path))[0]
    assert second[0] == pytest.approx(first[0], rel=1e-12)
    assert second[1] == [name for name in first[1] if ".up." in name or ".down." in name]
    assert len(second[1]) == 12
