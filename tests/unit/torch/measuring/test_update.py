"""How long the optimizer's update takes: foreseen, measured, written down."""

import time

import pytest
import torch
from torch import nn

import shardwright.torch as sw
from shardwright.observe import read_json_lines
from shardwright.run.context import context
from shardwright.torch.measuring.device_rates import update_costs
from shardwright.torch.optimizer.distributed_optimizer import UpdateClock


def test_a_clock_adds_up_until_it_is_asked():
    clock = UpdateClock()
    assert clock.taken() is None
    for _ in range(2):
        clock.run(lambda: time.sleep(0.01), torch.device("cpu"))
    taken = clock.taken()
    assert taken is not None
    assert 0.02 <= taken < 30
    assert clock.taken() is None


class Odd(torch.optim.SGD):
    """An optimizer that cannot be tried."""

    def step(self, closure=None):
        raise RuntimeError("a closure is needed")


def test_the_rate_is_that_of_the_own_optimizer_and_0_where_it_cannot_be_tried(tmp_path):
    sw.init({"run_dir": "off"})
    try:
        drawn = torch.random.get_rng_state()
        adam, each_s = update_costs(context())
        assert torch.equal(torch.random.get_rng_state(), drawn)
        sw.DistributedOptimizer(torch.optim.SGD([nn.Parameter(torch.zeros(2))], lr=0.1))
        sgd, sgd_each_s = update_costs(context())
        assert each_s > sgd_each_s > 0
        assert 0 < adam < sgd  # which has neither averages nor a root
        for kind in (torch.optim.AdamW, torch.optim.Adam, torch.optim.NAdam, torch.optim.RMSprop):
            context().optimizers.clear()
            sw.DistributedOptimizer(kind([nn.Parameter(torch.zeros(2))], lr=0.1))
            assert min(update_costs(context())) > 0
        context().optimizers.clear()
        sw.DistributedOptimizer(Odd([nn.Parameter(torch.zeros(2))], lr=0.1))
        assert update_costs(context()) == (0.0, 0.0)
    finally:
        sw.shutdown()


@pytest.mark.parametrize("width", [512, 8])  # by bytes alone, the small one would take next to nothing
def test_a_run_writes_down_its_updates_and_its_plan_foresees_them(tmp_path, width):
    sw.init({"run_dir": str(tmp_path), "run_name": "run", "plan_one_stage": True, "report": False})
    try:
        model = sw.DistributedModel(nn.Sequential(*(nn.Linear(width, width) for _ in range(8))))
        optimizer = sw.DistributedOptimizer(torch.optim.AdamW(model.parameters()))

        @sw.step
        def train(model, x):
            model.backward(model(x).square().mean())

        for _ in range(4):
            train(model, torch.randn(4, width))
            optimizer.step()
            optimizer.zero_grad()
        prediction = context().plan.prediction
    finally:
        sw.shutdown()
    (folder,) = tmp_path.iterdir()
    found = [record.get("time/update(s)") for record in read_json_lines(folder / "metrics.jsonl")]
    assert found[0] is None
    assert all(seconds > 0 for seconds in found[1:])
    assert 0.1 < prediction.update_s / min(found[1:]) < 10
