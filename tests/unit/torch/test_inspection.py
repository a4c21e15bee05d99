"""A model of any size is traced without weights."""

import resource
import time

import pytest
import torch
from torch import nn

import shardwright.torch as sw


class Scaled(nn.Module):
    """A buffer of the model itself is used between units."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 1)
        self.register_buffer("scale", torch.ones(8))

    def forward(self, x):
        return self.second(self.first(x) * self.scale.square())


def test_buffers_between_units_may_be_without_data():
    with torch.device("meta"):
        model = Scaled()
    graph = sw.trace_model(model, torch.empty(2, 8), num_stages=2)
    assert [node.name for node in graph.nodes[:3]] == ["first", "mul", "second"]
    assert model.scale.is_meta


def test_a_hundred_billion_parameters_take_no_memory():
    transformers = pytest.importorskip("transformers")
    with torch.device("meta"):
        config = transformers.GPTNeoXConfig(
            hidden_size=12288, num_hidden_layers=56, num_attention_heads=96, intermediate_size=49152
        )
        model = transformers.GPTNeoXForCausalLM(config)
    assert sum(parameter.numel() for parameter in model.parameters()) > 100e9
    before, start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.perf_counter()
    ids = torch.empty(1, 2048, dtype=torch.int64, device="meta")
    graph = sw.trace_model(model, input_ids=ids, labels=ids, num_stages=8)
    grown_KiB = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert len(graph.calls) >= 58
    assert grown_KiB < 300 * 1024  # the weights alone would be 400 GB
    assert time.perf_counter() - start < 60  # 5 s on one core of 2026
