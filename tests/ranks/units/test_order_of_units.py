"""A step may call the units in another order than the one for which the plan was made.

A plan that was made without ranks, followed by ranks.
"""

import torch
from torch import Tensor, nn
from transparency import Case, Iteration, Recipe, differences_by_case
from zoo import classify, features
from zoo_modules import CLASSES, WIDTH, Block

import shardwright.torch as sw
from shardwright.testing import run_ranks


class EitherWay(nn.Module):
    """Odd lengths go through the blocks from the last to the first."""

    def __init__(self, *, tied: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(8))
        self.scale = nn.Parameter(torch.rand(WIDTH))
        self.head = nn.Linear(WIDTH, CLASSES)
        if tied:
            self.blocks[7].up.weight = self.blocks[0].up.weight
            self.blocks[6].down.weight = self.blocks[2].down.weight

    def forward(self, x: Tensor) -> Tensor:
        backwards = x.shape[1] % 2
        for number in reversed(range(8)) if backwards else range(8):
            x = self.blocks[number](x)
            if number == 6:
                x = x * self.scale
        return self.head(x)


def with_a_bucket_for_each_parameter(recipe, cases):
    sw.DistributedModel.__init__.__kwdefaults__["bucket_cap_mb"] = 1e-6
    return differences_by_case(recipe, cases)


def test_replicas_and_ties_in_another_order():
    recipe = Recipe(build=lambda: EitherWay(tied=True), batch=features, loss=classify)
    iterations = (Iteration(), Iteration(length=13), Iteration())
    settings = {"microbatches": 4, "profile": "estimated", "pipeline_parallel_degree": 2}
    cases = {kind: Case(config={**settings, "pipeline": kind}, iterations=iterations) for kind in ("zb_v",)}
    assert run_ranks(with_a_bucket_for_each_parameter, 4, recipe, cases, timeout_s=60) == [{}] * 4


def test_ranks_follow_a_plan_that_was_made_from_a_model_without_data():
    def on_each_rank():
        import torch
        from torch import nn

        from shardwright.cluster import Cluster, Device, Link
        from shardwright.config import Config
        from shardwright.torch.units.offline_planner import plan_model

        def build():
            return nn.Sequential(*(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(4)))

        link = Link(latency_s=1e-6, bandwidth_Bps=1e9)
        cluster = Cluster(device=Device(name="t"), ranks_per_node=2, intra_node=link, inter_node=link)
        config = Config.parse({"microbatches": 4, "pipeline": "1f1b"})
        with torch.device("meta"):
            plan = plan_model(build(), torch.empty(8, 6), config=config, world_size=2, cluster=cluster)

        torch.manual_seed(0)
        x, plain = torch.randn(8, 6), build()
        expected = plain(x).mean()
        plan.write("plan.json")
        sw.init({"plan": "plan.json", "run_dir": "off"})
        model = sw.DistributedModel(plain)

        @sw.step
        def step(model, x):
            loss = model(x).mean()
            model.backward(loss)
            return loss

        loss = step(model, x).reduce_mean()
        assert torch.allclose(loss, expected)
        return sorted(name for name, _ in model.local_named_parameters())

    first, second = run_ranks(on_each_rank, 2)
    assert first
    assert second
    assert sorted(first + second) == [f"{i}.0.{what}" for i in range(4) for what in ("bias", "weight")]
