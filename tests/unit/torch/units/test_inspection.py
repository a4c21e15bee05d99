"""Graphs and plans without running, of models of any size without weights."""

import resource
import time

import pytest
import torch
from torch import nn

import shardwright.torch as sw
from shardwright.cluster import Cluster, Device, Link
from shardwright.config import Config
from shardwright.errors import ConfigError, PlanError
from shardwright.torch.units.dry_run import trace_model
from shardwright.torch.units.offline_planner import plan_model


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
            hidden_size=24576, num_hidden_layers=14, num_attention_heads=192, intermediate_size=98304
        )
        model = transformers.GPTNeoXForCausalLM(config)
    assert sum(parameter.numel() for parameter in model.parameters()) > 100e9
    before, start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.perf_counter()
    ids = torch.empty(1, 2048, dtype=torch.int64, device="meta")
    graph = sw.trace_model(model, input_ids=ids, labels=ids, num_stages=8)
    grown_KiB = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert len(graph.calls) >= 16
    assert grown_KiB < 300 * 1024  # the weights alone would be 400 GB
    assert time.perf_counter() - start < 60  # 2 s on one core of 2026


class Rotated(nn.Module):
    """Between its units it reads a table that is a buffer, as rotary embeddings do."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.register_buffer("frequencies", torch.arange(4.0), persistent=False)
        self.same = self.layers[0]
        self.same.register_buffer("frequencies", self.frequencies)

    def forward(self, x):
        turn = self.frequencies.cos()
        for layer in self.layers:
            x = layer(x) * turn
        return x


def on_meta():
    with torch.device("meta"):
        return Rotated(), torch.empty(8, 4)


def cluster():
    link = Link(latency_s=1e-6, bandwidth_Bps=1e9)
    device = Device(name="test", flops_per_s=1e9, memory_Bps=1e9)
    return Cluster(device=device, ranks_per_node=2, intra_node=link, inter_node=link)


def test_logits_of_a_model_without_data_are_computed_in_pieces():
    class Words(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.head = nn.Embedding(999, 8), nn.Linear(8, 999)

        def forward(self, ids):
            return nn.functional.cross_entropy(self.head(self.embed(ids)).flatten(0, 1), ids.flatten())

    with torch.device("meta"):
        model, ids = Words(), torch.zeros(8, 4, dtype=torch.long)
    link = Link(latency_s=1e-6, bandwidth_Bps=1e9)
    cluster = Cluster(device=Device(name="t"), ranks_per_node=2, intra_node=link, inter_node=link)
    saved = {}
    for chunks in ("off", 4):
        config = Config(loss_chunks=chunks, microbatches=1, activation_checkpointing="none")
        plan = plan_model(model, ids, config=config, world_size=2, cluster=cluster, loss=lambda loss: loss)
        saved[chunks] = plan.prediction.stages[-1].saved_bytes
    assert saved[4] < saved["off"]


def test_buffers_on_the_meta_device_do_not_hinder_splitting():
    samples = on_meta(), (Rotated(), torch.zeros(8, 4))
    graph, with_data = [trace_model(model, x) for model, x in samples]
    assert graph.labels == ("layers.0", "layers.1", "layers.2")
    assert graph == with_data
    assert graph.batch_size == 8


def test_the_model_is_left_as_it_was():
    model, x = on_meta()
    before = dict(model.named_buffers(remove_duplicate=False))
    trace_model(model, x)
    plan_model(model, x, config=Config(), world_size=2, cluster=cluster())
    after = dict(model.named_buffers(remove_duplicate=False))
    assert list(after) == ["frequencies", "layers.0.frequencies", "same.frequencies"]
    assert all(after[name] is buffer for name, buffer in before.items())
    with pytest.raises(RuntimeError, match="stop"):
        trace_model(model, x, loss=lambda _: (_ for _ in ()).throw(RuntimeError("stop")))
    assert all(buffer.is_meta for buffer in model.buffers())


def test_a_plan_keeps_what_is_pinned():
    model, x = on_meta()
    config = Config.parse({"microbatches": 4, "pipeline": "gpipe", "pipeline_parallel_degree": 3})
    plan = plan_model(model, x, config=config, world_size=6, cluster=cluster())
    assert (plan.mesh.pipeline, plan.mesh.data) == (3, 2)
    assert (plan.schedule.kind, plan.schedule.microbatches) == ("gpipe", 4)
    assert [stage.units for stage in plan.stages] == [("layers.0",), ("layers.1",), ("layers.2",)]
    assert plan.prediction is not None
    assert plan.prediction.provenance == "estimated"


class Normed(nn.Module):
    """A layer with a norm, which ranks share where they cut sequences."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.wide, self.narrow = nn.LayerNorm(64), nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x):
        return x + self.narrow(torch.relu(self.wide(self.norm(x))))


def test_sequences_are_cut_or_not_as_the_run_would_choose():
    """`plan` took "auto" for false."""
    with torch.device("meta"):
        model = nn.Sequential(*(Normed() for _ in range(4)))
        x = torch.empty(8, 128, 64)
    config = Config.parse({"tensor_parallel_degree": 2, "sequence_parallel": "auto"})
    plan = plan_model(model, x, config=config, world_size=2, cluster=cluster())
    assert plan.tensor is not None
    (said,) = (line for line in plan.why if line.startswith("Sequences "))
    assert (plan.tensor.between_units is not None) == said.startswith("Sequences are cut")


def test_what_cannot_be_planned_is_refused():
    model, x = on_meta()
    with pytest.raises(PlanError, match="a batch of a replica has 8 samples, but microbatches is 16"):
        plan_model(model, x, config=Config(microbatches=16), world_size=2, cluster=cluster())
    with pytest.raises(PlanError, match="no tensor that can be cut"):
        plan_model(model, 3, config=Config(), world_size=2, cluster=cluster())
    with pytest.raises(ConfigError, match=r"WORLD_SIZE\(3\)"):
        plan_model(model, x, config=Config(pipeline_parallel_degree=2), world_size=3, cluster=cluster())
