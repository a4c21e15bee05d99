"""A plan that was made without ranks, followed by ranks."""

from shardwright.testing import run_ranks


def test_ranks_follow_a_plan_that_was_made_from_a_model_without_data():
    def on_each_rank():
        import torch
        from torch import nn

        import shardwright.torch as sw
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
