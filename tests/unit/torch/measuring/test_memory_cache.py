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
