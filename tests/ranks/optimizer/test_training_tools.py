"""What a script uses around the step: scalers, schedulers, clipping, recomputation, placement by hand."""

import copy
import gc
import itertools

import pytest
import torch
from stacks import train as squares
from torch import nn

import shardwright.torch as sw
from shardwright.run.context import context
from shardwright.testing import run_ranks

QUIET = {"run_dir": "off", "profile": "estimated"}


class Network(nn.Module):
    """Convolutions with running statistics; activations work in place."""

    def __init__(self):
        super().__init__()
        widths = [3, 8, 8, 8, 8]
        self.blocks = nn.Sequential(
            *(
                nn.Sequential(nn.Conv2d(a, b, 3, padding=1), nn.BatchNorm2d(b), nn.ReLU(inplace=True))
                for a, b in itertools.pairwise(widths)
            )
        )
        self.head = nn.Linear(8, 5)

    def forward(self, x_BCHW):
        return self.head(self.blocks(x_BCHW).mean((2, 3)))


def compare(config, prepare=None, steps=2):
    """Largest difference of gradients and of the state after some steps, and the ranks of the stages."""
    sw.init({**QUIET, "microbatches": 4, **config})
    torch.manual_seed(0)
    model = Network().double()
    plain = copy.deepcopy(model)
    if prepare is not None:
        prepare(sw, model)
    wrapped = sw.DistributedModel(model)
    train = sw.step(squares)
    x = torch.randn(8, 3, 6, 6, dtype=torch.float64)
    worst = 0.0
    for _ in range(steps):
        for parameter in (*wrapped.parameters(), *plain.parameters()):
            parameter.grad = None
        train(wrapped, x)
        for part in x.tensor_split(4):
            (plain(part).square().mean() / 4).backward()
        expected = dict(plain.named_parameters())
        for name, parameter in wrapped.local_named_parameters():
            worst = max(worst, (parameter.grad - expected[name].grad).abs().max().item())
    state, expected_state = wrapped.state_dict(), plain.state_dict()
    apart = max((state[key] - value).abs().max().item() for key, value in expected_state.items())
    plan = context().plan
    return worst, apart, [stage.rank for stage in plan.stages], [len(s.recompute) for s in plan.stages]


def recompute_blocks(sw, model):
    sw.set_activation_checkpointing(model.blocks)


def recompute_pairs(sw, model):
    with pytest.warns(UserWarning, match="one by one"):
        sw.set_activation_checkpointing(model.blocks, strategy="group_2")


def to_and_fro(sw, model):
    sw.set_partition(model.blocks[1], 1)
    sw.set_partition(model.head, 1)


@pytest.mark.parametrize(
    ("config", "prepare"),
    [
        ({"pipeline": "zb_v"}, recompute_blocks),
        ({}, recompute_pairs),
        ({"activation_checkpointing": "full"}, None),
        ({"auto_partition": False, "default_partition": 0}, to_and_fro),
    ],
)
def test_gradients_and_running_statistics_are_those_of_one_process(config, prepare):
    for worst, apart, ranks, recomputed in run_ranks(compare, 2, config, prepare):
        assert worst < 1e-10
        assert apart < 1e-10
        if prepare is to_and_fro:
            assert ranks == [0, 1, 0, 1]
        if config.get("activation_checkpointing") == "full":
            assert sum(recomputed) > 0


def test_a_stock_scaler_agrees_over_ranks_and_schedulers_step():
    def job():
        sw.init({**QUIET, "microbatches": 2})
        torch.manual_seed(0)
        model = sw.DistributedModel(nn.Sequential(*(nn.Linear(16, 16) for _ in range(4))))
        optimizer = sw.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=0.1))
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)

        @sw.step
        def train(model, x):
            loss = model(x).square().mean()
            model.backward(scaler.scale(loss))
            return loss

        scales, moved = [], []
        for step in range(3):
            x = torch.randn(4, 16) * (1e30 if step == 1 else 1.0)
            optimizer.zero_grad()
            train(model, x)
            if step == 1 and sw.rank() == 1:
                for parameter in model.local_parameters():
                    parameter.grad.nan_to_num_(0, 0, 0)  # only the other rank sees infinities
            before = [p.detach().clone() for p in model.local_parameters()]
            scaler.step(optimizer)
            scaler.update()
            scheduler.step()
            moved.append(
                any(not torch.equal(a, b) for a, b in zip(before, model.local_parameters(), strict=True))
            )
            scales.append(scaler.get_scale())
        return scales, moved, optimizer.param_groups[0]["lr"], len(optimizer.state)

    first, second = run_ranks(job, 2)
    assert first[:3] == second[:3] == ([1024.0, 512.0, 512.0], [True, False, True], 0.0125)
    assert first[3] + second[3] == 8  # each rank holds the state of its own parameters only


def test_a_finished_step_leaves_no_tensors_behind():
    """Microbatch, coroutine and function referred to each other in a circle, and kept tensors until Python's
    garbage collector came by: memory grew by megabytes a step."""

    def job():
        from shardwright.comm import local_link

        local_link._MOST_VIEWS = 1  # views of messages are kept; they have no memory of their own
        sw.init({**QUIET, "microbatches": 4, "pipeline": "gpipe"})
        model = sw.DistributedModel(nn.Sequential(*(nn.Linear(8, 8) for _ in range(4))))
        train = sw.step(squares)

        def live():
            return sum(isinstance(item, torch.Tensor) for item in gc.get_objects())

        counts = []
        for _ in range(3):
            train(model, torch.ones(8, 8))
        gc.collect()
        gc.disable()
        for _ in range(10):
            train(model, torch.ones(8, 8))
            counts.append(live())
        return counts

    for counts in run_ranks(job, 2):
        assert max(counts) - min(counts) <= 2  # ten steps of four microbatches


def test_what_another_stage_made_is_there_after_the_backward():
    """A tensor that came in is emptied after the backward. A metric that was computed of it then was zero."""

    def job():
        sw.init({**QUIET, "microbatches": 2, "pipeline": "1f1b"})
        torch.manual_seed(0)
        layers = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
        plain = copy.deepcopy(layers)
        model = sw.DistributedModel(layers)

        def run(layers, x, backward):
            outputs = [x]
            for layer in layers:
                outputs.append(layer(outputs[-1]))
            backward(outputs[-1].square().mean())
            with torch.no_grad():
                return sum((y * outputs[-1][:, :1]).sum() for y in outputs[1:])

        @sw.step
        def train(model, x):
            return run(model.get_module(), x, model.backward)

        x = torch.randn(4, 8)
        expected = [run(plain, part, torch.Tensor.backward) for part in x.tensor_split(2)]
        return torch.stack(expected).sub(train(model, x).stack()).abs().max().item(), expected[0].item()

    for apart, value in run_ranks(job, 2):
        assert apart < 1e-6 < abs(value)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_hook_is_called_when_every_rank_has_its_part(ranks):
    """It could not be registered: a handle needs a weak reference to where hooks are kept."""

    def job():
        sw.init(QUIET)
        model = sw.DistributedModel(nn.Sequential(*(nn.Linear(8, 8) for _ in range(4))))
        calls = []
        model.register_post_partition_hook(lambda wrapped, _: calls.append(wrapped is model))

        @sw.step
        def evaluate(model, x):
            return model(x)

        with torch.no_grad():
            evaluate(model, torch.ones(8, 8))
        model.register_post_partition_hook(lambda *_: calls.append("late"))
        return calls

    assert run_ranks(job, ranks) == [[True, "late"]] * ranks
