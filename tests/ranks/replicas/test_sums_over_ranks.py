"""What scripts and libraries sum over all ranks after a step: each sample counts once, or a line says so."""

import importlib
import importlib.util
import logging
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import shardwright.torch as sw
from shardwright.testing import run_ranks

needs_torchmetrics = pytest.mark.skipif(
    importlib.util.find_spec("torchmetrics") is None, reason="needs torchmetrics"
)
SETTINGS = {"microbatches": 2, "profile": "estimated", "run_dir": "off", "pipeline_parallel_degree": 2}


def listen() -> list[str]:
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("shardwright").addHandler(handler)
    return said


def evaluation() -> Any:
    torch.manual_seed(0)
    sw.init(SETTINGS)
    model = sw.DistributedModel(nn.Sequential(*(nn.Linear(4, 4) for _ in range(3))))

    @sw.step
    def evaluate(model: Any, x: Tensor) -> Tensor:
        return model(x)

    def run(x: Tensor) -> Tensor:
        with torch.no_grad():
            return evaluate(model, x).concat()

    run.model = model  # type: ignore[attr-defined]
    return run


def metrics_of_a_library(*, is_early: bool) -> list[float]:
    if is_early:
        importlib.import_module("torchmetrics")
    run = evaluation()
    from torchmetrics import SumMetric

    ours, own_group, given = SumMetric(), SumMetric(process_group=dist.group.WORLD), SumMetric()
    for _ in range(2):
        samples = len(run(torch.ones(4, 4)))
        for metric in (ours, own_group, given):
            metric.update(samples)
    given.sync(process_group=dist.group.WORLD)
    return [ours.compute().item(), own_group.compute().item(), given.sum_value.item()]


@needs_torchmetrics
@pytest.mark.parametrize(("ranks", "is_early"), [(2, True), (4, False)])
def test_metrics_of_torchmetrics_count_each_sample_once(ranks: int, is_early: bool):
    """A confusion matrix of 64 samples summed to 128: torchmetrics synchronises over all ranks by itself."""
    samples = 4.0 * ranks  # two batches of 4 in each replica
    found = run_ranks(metrics_of_a_library, ranks, is_early=is_early)
    # A group that the script names is its own affair.
    assert found == [[samples, 2 * samples, 2 * samples]] * ranks


def batches_of_ranks(what: str) -> list[str]:
    said, run = listen(), evaluation()
    torch.manual_seed(sw.rank() if what == "shuffled" else 0)
    for number in range(4):
        x = torch.randn(4, 4)
        if sw.rank() == 1 and what == "zeros":
            x = torch.zeros(4, 4)
        if what == "nan":
            x[0, 0] = float("nan")
        if sw.rank() == 1 and what == "nothing":
            x = None  # type: ignore[assignment]
        run(x if number else torch.ones(4, 4))
    return [text for text in said if "loads other batches" in text]


def test_loaders_that_shuffle_apart():
    """Metrics of the second rank compared its own targets with outputs of other samples, and said nothing."""
    nothing, (text,) = run_ranks(batches_of_ranks, 2, "shuffled")
    assert not nothing
    assert text.startswith("rank 1 loads other batches than rank 0")
    assert "sw.distributed_sampler(dataset)" in text


@pytest.mark.parametrize("what", ["alike", "zeros", "nothing", "nan"])
def test_other_ranks_may_pass_anything_that_just_fills_a_place(what: str):
    assert run_ranks(batches_of_ranks, 2, what) == [[], []]
