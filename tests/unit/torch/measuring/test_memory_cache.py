"""What a trace has counted once is read by later runs."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from shardwright.torch.batch.batch import Batch
from shardwright.torch.measuring.last_plan import memory_cache
from shardwright.torch.tracing import recording
from shardwright.torch.units.dry_run import step_of
from shardwright.torch.units.model_traces import trace_parts

CPU = torch.device("cpu")


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("SHARDWRIGHT_CACHE", str(tmp_path))
    return memory_cache(SimpleNamespace(device=CPU))


def nodes_of(memory):
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
    parts = {1: Batch(((torch.ones(2, 8),), {}))}
    trace = trace_parts(model, step_of(model, None), parts, device=CPU, num_stages=4, memory=memory)[1]
    return [
        (n.name, n.cost_class, n.work_bytes, n.weight_bytes, n.split_work_bytes) for n in trace.graph.nodes
    ]


def test_the_second_run_counts_nothing_and_knows_the_same(cache, monkeypatch):
    """Half of a trace was spent on counting, in each run anew."""
    memory = cache.read()
    first = nodes_of(memory)
    cache.write(memory)
    monkeypatch.setattr(recording, "working_memory", lambda *args, **kwargs: pytest.fail("it was counted"))
    assert nodes_of(cache.read()) == first
    assert any(work_bytes for _, _, work_bytes, _, _ in first)


class Counted(nn.Module):
    """Counts how often it runs."""

    runs = 0

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x):
        Counted.runs += 1
        return self.inner(x)


def test_units_run_no_more_often_than_counting_takes():
    """Once to choose units, once for each size; a class that is not known twice more, also in two parts."""
    model = nn.Sequential(*(Counted() for _ in range(3)))
    sizes = {m: Batch(((torch.ones(4 // m, 8),), {})) for m in (1, 2)}
    memory, runs = {}, []
    for _ in range(2):
        Counted.runs = 0
        trace_parts(model, step_of(model, None), sizes, device=CPU, num_stages=3, memory=memory)
        runs.append(Counted.runs)
    classes = 2 * len(sizes)  # what takes the batch keeps less than what takes the results of others
    assert runs == [3 * (1 + len(sizes)) + 2 * classes, 3 * (1 + len(sizes))]
