"""Closed forms leave the best grid of ranks: planning every grid is the judge."""

import functools
import itertools

import pytest
import torch
from torch import nn

from choices import in_every_run, in_sweep
from shardwright.cluster import Cluster, Device, Link
from shardwright.config import Config
from shardwright.errors import PlanError
from shardwright.planner import best_of_meshes, meshes
from shardwright.torch.units.dry_run import with_data
from shardwright.torch.units.offline_planner import OfflinePlanner


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.up, self.down = (
            nn.LayerNorm(width),
            nn.Linear(width, 4 * width),
            nn.Linear(4 * width, width),
        )

    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Blocks(nn.Module):
    """An embedding, equal blocks, and a head that takes as long as some of them."""

    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(4000, 256), nn.Linear(256, 4000, bias=False)
        self.blocks = nn.Sequential(*(Block(256) for _ in range(4)))

    def forward(self, ids):
        return self.head(self.blocks(self.embedding(ids))).logsumexp(-1).mean()


def uneven():
    widths = [64, 128, 256, 512, 1024, 2048, 1024, 512, 256, 128, 64]
    return nn.Sequential(*(nn.Sequential(nn.Linear(a, b), nn.ReLU()) for a, b in itertools.pairwise(widths)))


def narrowing():
    channels = [3, 16, 32, 64, 128]
    pairs = itertools.pairwise(channels)
    layers = [nn.Sequential(nn.Conv2d(a, b, 3, stride=2, padding=1), nn.BatchNorm2d(b)) for a, b in pairs]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(2048, 10))


MODELS = {
    "blocks": (Blocks, lambda: torch.zeros(8, 64, dtype=torch.long)),
    "uneven": (uneven, lambda: torch.zeros(16, 64)),
    "narrowing": (narrowing, lambda: torch.zeros(64, 3, 64, 64)),
}


def cluster(*, per_node=8, flops=1e13, near=1e11, far=1e10, cores=0, slowness=()):
    device = Device(name="test", flops_per_s=flops, memory_Bps=flops / 100, overhead_s=2e-6)
    return Cluster(
        device=device,
        ranks_per_node=per_node,
        cores_per_node=cores,
        intra_node=Link(latency_s=5e-6, bandwidth_Bps=near, occupancy=float(cores > 0)),
        inter_node=Link(latency_s=3e-5, bandwidth_Bps=far),
        slowness=slowness,
    )


MACHINES = {
    "one host": cluster(),
    "slow devices": cluster(flops=1e11),
    "a slow network": cluster(per_node=4, far=3e7),
    "hosts of two": cluster(per_node=2, far=1e9),
    "a host of cores": cluster(flops=5e10, near=3e9, cores=4),
    "uneven hosts": cluster(per_node=4, slowness=(0.5, 1.0)),
}
SETTINGS = {
    "free": {},
    "little memory": {"memory_limit": 0.2},
    "no recomputation": {"memory_limit": 0.5, "activation_checkpointing": "none"},
    "1f1b": {"pipeline": "1f1b"},
    "layers shared": {"tensor_parallel_degree": 4},
}
CASES = {
    "blocks": [
        *((machines, "free") for machines in MACHINES),
        ("slow devices", "layers shared"),
        ("a slow network", "no recomputation"),
        ("hosts of two", "1f1b"),
    ],
    "uneven": [
        *((machines, "free") for machines in MACHINES),
        *((machines, "little memory") for machines in ("slow devices", "a slow network")),
    ],
    "narrowing": [("one host", "free")],
}
IN_EVERY_RUN = ("narrowing", [("a slow network", "free")])

LAYERS_SHARED = [("blocks", "slow devices"), ("blocks", "hosts of two"), ("narrowing", "one host")]
"""Where ranks of a host may share layers, too."""


@functools.cache
def built(model):
    build, batch = MODELS[model]
    with torch.device("meta"):
        return build(), batch()


GRAPHS = {}


class Planner(OfflinePlanner):
    """Traces of one model serve all machines; each grid is planned once."""

    def __init__(self, name, machines, settings, measured=None):
        model, batch = built(name)
        config = dict(settings)
        if "memory_limit" in config:
            states = sum(parameter.numel() * 16 for parameter in model.parameters())
            config["memory_limit"] = int(config["memory_limit"] * states)
        arguments = with_data(((batch,), {}), "cpu")
        self.config = Config.parse(config)
        super().__init__(model, arguments, config=self.config, cluster=machines, measured=measured)
        self.name, self.plans, self.asked = name, {}, []

    def _graphs(self, pipeline, counts, *, divides=False):
        key = self.name, pipeline, divides, bool(self._cluster.cores_per_node)
        if key not in GRAPHS:
            graphs = super()._graphs(pipeline, self._counts(pipeline), divides=divides)
            GRAPHS[key] = graphs, self._traces[pipeline, divides]
        graphs, self._traces[pipeline, divides] = GRAPHS[key]
        return {m: graphs[m] for m in counts}

    def make(self, mesh):
        self.asked.append(mesh)
        if mesh not in self.plans:
            try:
                self.plans[mesh] = self.plan(mesh)
            except PlanError as error:
                self.plans[mesh] = error
        if isinstance(self.plans[mesh], PlanError):
            raise self.plans[mesh]
        return self.plans[mesh]

    def answers(self, world_size, *, most_tensor=1):
        """The plan of all grids, and of those that closed forms leave; and how many those are."""
        grids = meshes(world_size, self.config, most_tensor=most_tensor)
        judge = outcome(lambda: best_of_meshes(grids, self.make))
        self.asked.clear()
        found = outcome(lambda: best_of_meshes(grids, self.make, expected=self.expected_seconds(grids)))
        return judge, found, len(self.asked), len(grids)


def outcome(make):
    try:
        plan = make()
    except PlanError as error:
        return str(error)
    assert plan.why[-1].startswith("Degrees: ")
    return plan.model_copy(update={"why": plan.why[:-1]})


@pytest.mark.parametrize(("model", "cases"), [IN_EVERY_RUN, *(in_sweep(*each) for each in CASES.items())])
def test_the_best_of_all_grids_is_among_those_that_closed_forms_leave(
    model: str, cases: list[tuple[str, str]]
) -> None:
    wrong, planned, total = [], 0, 0
    for machines, settings in cases:
        most_tensor = MACHINES[machines].ranks_per_node if (model, machines) in LAYERS_SHARED else 1
        planner = Planner(model, MACHINES[machines], SETTINGS[settings])
        judge, found, number, of = planner.answers(8, most_tensor=most_tensor)
        if found != judge:
            wrong.append((machines, settings))
        planned, total = planned + number, total + of
    assert not wrong
    assert planned < 0.7 * total


@pytest.mark.thorough
@pytest.mark.parametrize("machines", in_every_run(["slow devices", "hosts of two"], ["slow devices"]))
def test_closed_forms_agree_with_plans_where_ranks_share_layers(machines: str) -> None:
    planner = Planner("blocks", MACHINES[machines], {})
    grids = [m for m in meshes(8, Config(), most_tensor=MACHINES[machines].ranks_per_node) if m.tensor > 1]
    assert {mesh.tensor for mesh in grids} == ({2} if machines == "hosts of two" else {2, 4, 8})
    for mesh, seconds in zip(grids, planner.expected_seconds(grids), strict=True):
        plan = planner.make(mesh)
        assert plan.mesh.tensor == mesh.tensor
        assert plan.tensor.cuts
        assert sum(stage.exchange_bytes for stage in plan.prediction.stages) > 0
        assert seconds == pytest.approx(plan.prediction.step_s / mesh.data, rel=0.3), mesh
