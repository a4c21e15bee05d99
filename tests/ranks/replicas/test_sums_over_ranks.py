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


def confusion() -> list[Any]:
    from torchmetrics.classification import MulticlassConfusionMatrix

    run, metric = evaluation(), MulticlassConfusionMatrix(4)
    for _ in range(2):
        metric.update(run(torch.randn(16, 4)), torch.randint(0, 4, (16,)))
    total = metric.compute().sum().item()
    metric.sync()
    metric.unsync()
    return [total, metric.confmat.sum().item()]


@needs_torchmetrics
def test_a_confusion_matrix():
    assert run_ranks(confusion, 2) == [[32, 32]] * 2
    assert run_ranks(confusion, 4) == [[64, 32]] * 4


def sums_of_a_script(what: str) -> tuple[list[str], float]:
    said, run = listen(), evaluation()
    dist.all_reduce(torch.ones(()))  # before anything was computed
    correct = (run(torch.ones(4, 4)) < 9e9).sum()
    if what == "replicas":
        dist.all_reduce(correct, group=sw.get_dp_process_group())
    elif what == "parts":  # of each rank
        correct = sum(p.numel() + sw.rank() for p in run.model.local_parameters()) * torch.ones(())
        dist.all_reduce(correct)
    elif what == "largest":
        dist.all_reduce(correct, dist.ReduceOp.MAX)
    elif what == "flags":
        dist.all_reduce(torch.zeros(1))
    elif what == "gathered":
        parts = [torch.zeros_like(correct) for _ in range(sw.size())]
        dist.all_gather(parts, correct)
    else:
        dist.all_reduce(correct.clone())
        dist.all_reduce(tensor=correct, async_op=True).wait()
    sw.shutdown()
    dist.all_reduce(torch.ones(()))  # as before
    return [text for text in said if "all_" in text], float(correct)


@pytest.mark.parametrize("what", ["replicas", "parts", "largest", "flags"])
def test_sums_that_are_right(what: str):
    found = run_ranks(sums_of_a_script, 2, what)
    assert [said for said, _ in found] == [[], []]
    if what == "replicas":
        assert [correct for _, correct in found] == [16.0] * 2


def test_sums_that_count_each_sample_several_times():
    """``dist.all_reduce(correct)`` after a step counted each sample once for each rank of its pipeline."""
    ((text,), correct), (nothing, _) = run_ranks(sums_of_a_script, 2, "all")
    assert correct == 32.0
    assert not nothing
    assert (
        "dist.all_reduce goes over all 2 ranks, and the 2 ranks of each replica have given the same" in text
    )
    assert "test_sums_over_ranks.py" in text
    assert "group=sw.get_dp_process_group()" in text
    ((text,), _), *_ = run_ranks(sums_of_a_script, 4, "gathered")
    assert "dist.all_gather goes over all 4 ranks" in text


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


def test_the_group_of_replicas_of_a_single_process():
    def on_each_rank() -> bool:
        sw.init({"run_dir": "off"})
        return sw.get_dp_process_group() is None

    assert run_ranks(on_each_rank, 1) == [True]
