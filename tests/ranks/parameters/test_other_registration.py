"""Models that register their parts in another order on each rank are refused; in another run they may.

A loop over a set of names does so, as each interpreter has a hash seed of its own. Replicas averaged
gradients of different parameters, buffers were exchanged between names, and `state_dict()` over stages waited
until the timeout, all without a word.
"""

import copy
from collections import OrderedDict
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import shardwright.torch as sw
from shardwright.errors import UsageError
from shardwright.run.context import context
from shardwright.testing import run_ranks, run_ranks_outcomes

NAMES = ["audio", "depth", "pose", "text", "video"]
QUIET = {"profile": "estimated", "run_dir": "off", "microbatches": 2, "timeout_s": 30}


class Branch(nn.Module):
    """Parameters of one shape, and buffers that each batch changes; false, as its length is 0."""

    def __init__(self, names: list[str]):
        super().__init__()
        for name in ("weight", "gate") if names == NAMES else ("gate", "weight"):
            self.register_parameter(name, nn.Parameter(torch.randn(8, 8)))
        for name in ("mean", "peak") if names == NAMES else ("peak", "mean"):
            self.register_buffer(name, torch.zeros(8, dtype=torch.float64))

    def __len__(self) -> int:
        return 0

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(x @ self.weight.t()) * torch.sigmoid(x @ self.gate)
        with torch.no_grad():
            self.mean.mul_(0.5).add_(y.detach().mean(0), alpha=0.5)
            self.peak.copy_(torch.maximum(self.peak, y.detach().amax(0)))
        return y


class Net(nn.Module):
    """Branches in an order, and an ending that is tied to one of them."""

    def __init__(self, names: list[str]):
        super().__init__()
        self.branches = nn.ModuleDict({name: Branch(names) for name in names})
        self.end = nn.Linear(8, 8)
        self.end.weight = self.branches["pose"].weight

    def forward(self, x: Tensor) -> Tensor:
        y = sum(self.branches[name](x * (1 + number)) for number, name in enumerate(sorted(NAMES)))
        return self.end(y)


def batch_of(replica: int) -> Tensor:
    return torch.randn(4, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(replica))


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), 1e-2, weight_decay=0.1)


DATA = {"data_parallel_degree": 2}
TENSOR = {"tensor_parallel_degree": 2}


def wrapped(change: str) -> str:
    """What wrapping a model says that is another one on rank 1."""
    other = dist.get_rank() == 1
    net = nn.ModuleDict({"a": nn.Linear(4, 4), "b": nn.Linear(4, 4), "c": nn.Linear(4, 4)})
    net.register_buffer("seen", torch.zeros(3))
    optimizer = torch.optim.SGD([{"params": net["a"].parameters()}, {"params": net["b"].parameters()}], 0.1)
    if other and change == "name":
        net["d"] = net.pop("b")
    elif other and change == "shape":
        net["b"] = nn.Linear(4, 4, bias=False)
        net["b"].register_parameter("bias", nn.Parameter(torch.zeros(5)))
    elif other and change == "dtype":
        net["b"].double()
    elif other and change == "frozen":
        net["b"].weight.requires_grad_(False)
    elif other and change == "tied":
        net["c"].weight = net["b"].weight
    elif other and change == "buffer":
        net.register_buffer("seen", torch.zeros(4))
    elif other and change == "transient":
        net.register_buffer("seen", torch.zeros(3), persistent=False)
    elif other and change == "group":
        optimizer = torch.optim.SGD([{"params": [*net["a"].parameters(), *net["b"].parameters()]}], 0.1)
    sw.init(QUIET if change != "replicas" else {**QUIET, "data_parallel_degree": 2})
    sw.DistributedOptimizer(optimizer)
    try:
        sw.DistributedModel(net)
    except UsageError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ("name", "b is a module on rank 0, and not there on rank 1"),
        (
            "shape",
            "b.bias is a parameter of shape (4,) and torch.float32 on rank 0, and a parameter of shape (5,)",
        ),
        (
            "dtype",
            "b.weight is a parameter of shape (4, 4) and torch.float32 on rank 0, and a parameter of shape",
        ),
        ("frozen", "on rank 0, and a frozen parameter of shape (4, 4) and torch.float32 on rank 1"),
        (
            "tied",
            "on rank 0, and a parameter of shape (4, 4) and torch.float32, the same as b.weight, c.weight",
        ),
        ("buffer", "seen is a buffer of shape (3,) and torch.float32 on rank 0, and a buffer of shape (4,)"),
        ("transient", "seen is a buffer of shape (3,) and torch.float32 on rank 0, and a transient buffer"),
        (
            "group",
            "b.bias in optimizer 0 is in parameter group 1 on rank 0, and in parameter group 0 on rank 1",
        ),
        ("nothing", "no error"),
    ],
)
def test_another_model_on_a_rank_is_refused_on_all(change, expected):
    found = run_ranks(wrapped, 2, change)
    assert found[0] == found[1]
    assert expected in found[0]
    assert expected == "no error" or "ranks 0 and 1 have different models" in found[0]


@pytest.mark.parametrize("of", ["modules", "parameters"])
def test_another_order_is_refused(of):
    def wrap():
        is_first = dist.get_rank() == 0
        names = ["a", "b"] if is_first or of == "parameters" else ["b", "a"]
        sw.init(QUIET)
        parts = OrderedDict((name, nn.Linear(4, 4)) for name in names)
        if of == "parameters":
            parts["c"] = Branch(NAMES if is_first else NAMES[::-1])
        sw.DistributedModel(nn.Sequential(parts))

    said = {
        "modules": "the model registers a on rank 0 where it registers b on rank 1",
        "parameters": "c registers weight on rank 0 where it registers gate on rank 1",
    }
    for outcome in run_ranks_outcomes(wrap, 2):
        assert said[of] in outcome.error_line
        assert "sorted(names)" in outcome.error_line


def test_parts_that_come_after_wrapping_are_matched_by_name():
    """Before the first step, and, where ranks have the whole model, also later."""

    def train():
        torch.manual_seed(1)
        sw.init({**QUIET, "data_parallel_degree": 2})
        net = nn.ModuleDict({"a": nn.Linear(4, 4)}).double()
        model = sw.DistributedModel(net)

        @sw.step
        def step(model, x):
            net = model.get_module()
            loss = sum(net[name](x * number).square().mean() for number, name in enumerate(sorted(net)))
            model.backward(loss)
            return loss

        gradients = {}
        for names in ("bcd", "efg"):
            for name in names:
                torch.manual_seed(ord(name))
                net[name] = nn.Linear(4, 4).double()
            plain = copy.deepcopy(net)
            net.zero_grad()
            step(model, torch.ones(2, 4, dtype=torch.float64) * (1 + dist.get_rank()))
            for factor in (1, 2):
                x = torch.ones(2, 4, dtype=torch.float64) * factor
                loss = sum(plain[name](x * n).square().mean() for n, name in enumerate(sorted(plain)))
                (loss / 2).backward()
            own = dict(net.named_parameters())
            gradients[names] = max(
                float((own[name].grad - p.grad).abs().max()) for name, p in plain.named_parameters()
            )
        return gradients

    for found in run_ranks(train, 2):
        assert found == pytest.approx({"bcd": 0.0, "efg": 0.0}, abs=1e-12)


def on_one_rank_alone(what: str, settings: dict[str, Any]) -> None:
    """The last rank gets a part of its own after the first step; the model has no buffer before."""
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)).double()
    sw.init({**QUIET, **settings})
    model = sw.DistributedModel(net)

    def make(module: nn.Module, args: Any) -> None:
        if not hasattr(module, "late"):
            module.register_buffer("late", torch.zeros(2))

    train = sw.step(_train)
    train(model, batch_of(0))
    if sw.rank() == sw.size() - 1:
        if what == "parameter":
            net[2].late = nn.Parameter(torch.zeros(2, dtype=torch.float64))
        elif what == "buffer":
            net[2].register_buffer("late", torch.zeros(2))
        else:
            net[2].register_forward_pre_hook(make)
    train(model, batch_of(0))
    if what == "buffer of a forward":  # buffers agree when the next batch begins
        train(model, batch_of(0))


@pytest.mark.parametrize("what", ["parameter", "buffer", "buffer of a forward"])
def test_what_one_replica_alone_is_given_is_refused_at_once(what):
    """The others waited for it until the timeout, or were told of two collectives."""
    outcomes = run_ranks_outcomes(on_one_rank_alone, 2, what, {"data_parallel_degree": 2})
    for outcome in outcomes:
        assert outcome.error_type == "UsageError"
        assert "2.late is" in outcome.error
        assert "not there on rank 0" in outcome.error or "not on rank 0" in outcome.error
        assert "on rank 1" in outcome.error


def evaluated_by_one_replica() -> float:
    """Without buffers nothing is exchanged, so that the other replica need not be there."""
    torch.manual_seed(1)
    net = nn.Linear(8, 8).double()
    sw.init({**QUIET, "data_parallel_degree": 2})
    model = sw.DistributedModel(net)
    train = sw.step(_train)
    train(model, batch_of(0))
    difference = 0.0
    if sw.rank() == 0:
        with torch.no_grad():
            found = sw.step(lambda model, x: model(x).square().mean())(model, batch_of(0)).reduce_mean()
            difference = abs(float(found - net(batch_of(0)).square().mean()))
    train(model, batch_of(0))
    return difference


def test_one_replica_alone_may_evaluate():
    assert max(run_ranks(evaluated_by_one_replica, 2)) < 1e-12


def test_sets_have_other_orders_on_the_ranks():
    """The models of these tests are reversed by hand; this one is as scripts are."""

    def orders():
        return list({"audio", "depth", "pose", "text", "video", "touch", "smell"})

    first, second = run_ranks(orders, 2)
    assert sorted(first) == sorted(second)
    assert first != second  # one in 5,040


def in_two_runs(settings: dict[str, Any], way: str, folder: str) -> float:
    """How far a run that goes on with another order is from one that goes on as it was."""

    def begin(names: list[str], *, saved: Any = None) -> tuple[Any, Any, Any, Any]:
        torch.manual_seed(1)
        net = Net(names).double()
        sw.init({**QUIET, **settings, **plan})
        optimizer = sw.DistributedOptimizer(optimizer_of(net))
        if saved is not None and way == "before wrapping":
            optimizer.load_state_dict(saved[1])
        model = sw.DistributedModel(net)
        if saved is not None:
            model.load_state_dict(saved[0])
        checkpoints = sw.Checkpoints(folder, every=100) if way == "checkpoints" else None
        return model, optimizer, sw.step(_train), checkpoints

    x = batch_of(0)
    plan: dict[str, str] = {}
    model, optimizer, train, checkpoints = begin(NAMES)
    for _ in range(2):
        optimizer.zero_grad()
        train(model, x)
        optimizer.step()
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    if checkpoints is not None:
        checkpoints.save(2)
        checkpoints.close()
    optimizer.zero_grad()
    train(model, x)
    optimizer.step()
    expected = model.state_dict()
    if (made := context().plan) is not None and way != "checkpoints":
        plan["plan"] = f"{folder}/{sw.rank()}.json"
        made.write(plan["plan"])
    sw.shutdown()
    model, optimizer, train, checkpoints = begin(NAMES[::-1], saved=None if way == "checkpoints" else saved)
    if checkpoints is not None:
        assert checkpoints.resume() == 2
    elif way == "after the first step":
        train(model, x)
        model.load_state_dict(saved[0])
    if way.startswith("after"):
        optimizer.load_state_dict(saved[1])
    optimizer.zero_grad()
    train(model, x)
    optimizer.step()
    found = model.state_dict()
    return max(float((found[name] - value).abs().max()) for name, value in expected.items())


def _train(model: Any, x: Tensor) -> Tensor:
    loss = model(x).square().mean()
    model.backward(loss)
    return loss


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("ranks", "settings", "way"),
    [
        (1, {}, "before wrapping"),
        (1, {}, "after wrapping"),
        (2, {}, "before wrapping"),
        (2, DATA, "after wrapping"),
        (2, {}, "checkpoints"),
        (4, {**TENSOR, "pipeline_parallel_degree": 2}, "after the first step"),
    ],
)
def test_the_state_of_an_optimizer_goes_by_name(ranks, settings, way, tmp_path):
    """The next run of a script has other hash seeds; PyTorch numbers parameters by their places."""
    for difference in run_ranks(in_two_runs, ranks, settings, way, str(tmp_path)):
        assert difference < 1e-14
