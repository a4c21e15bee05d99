"""Functions and modules under `torch.compile` and TorchScript, over two stages."""

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from sharded import QUIET
from torch import Tensor, nn

import shardwright.torch as sw
from shardwright.testing import RanksFailedError, run_ranks

WIDTH, MICROBATCHES = 8, 2


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = (
            nn.Linear(WIDTH, WIDTH),
            nn.BatchNorm1d(WIDTH),
            nn.Linear(WIDTH, WIDTH),
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(torch.tanh(self.norm(self.first(x))))


class Between(nn.Module):
    """Calls a function between its layers, with a parameter that several stages use."""

    def __init__(self, function: Callable[[Tensor, Tensor], Tensor]):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.function = (function,)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = self.function[0](layer(x), self.scale)
        return x


class Fuses(nn.Module):
    """Has its own forward, or what it calls there, compiled."""

    def __init__(self, function: Callable[[Tensor, Tensor], Tensor]):
        super().__init__()
        self.linear, self.scale = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.ones(WIDTH))
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.linear(x), self.scale)


def gelu(x: Tensor, scale: Tensor) -> Tensor:
    return F.gelu(x * scale) + x


class Compiler:
    """A backend that counts what it is given."""

    def __init__(self) -> None:
        self.num_graphs = 0

    def __call__(self, graph: Any, inputs: Any) -> Any:
        self.num_graphs += 1
        return graph.forward


def loss_of(model: Any, x: Tensor) -> Tensor:
    return model(x).square().mean()


def seeded(build: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return build().double()


def trained(
    network: nn.Module,
    plain: nn.Module,
    *,
    loss: Callable[..., Tensor] = loss_of,
    steps: int = 2,
    **config: Any,
) -> dict[str, Tensor]:
    """Trains a model and a plain one; asserts that they agree, and returns the state."""
    # The compiler asks for it of what is no leaf, in a plain loop, too.
    warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is not a leaf")
    sw.init({**QUIET, "pipeline_parallel_degree": 2, "microbatches": MICROBATCHES, **config})
    try:
        model = sw.DistributedModel(network)
        optimizer = sw.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        plain_optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)

        @sw.step
        def train(model: Any, x: Tensor) -> Tensor:
            value = loss(model, x)
            model.backward(value)
            return value

        for number in range(steps):
            torch.manual_seed(number)
            x = torch.randn(8, WIDTH, dtype=torch.float64)
            expected = [loss(plain, part) for part in x.chunk(MICROBATCHES)]
            optimizer.zero_grad()
            plain_optimizer.zero_grad()
            torch.stack(expected).mean().backward()
            given = train(model, x)
            torch.testing.assert_close(torch.stack(list(given)), torch.stack(expected).detach())
            optimizer.step()
            plain_optimizer.step()
        state = model.state_dict()
        torch.testing.assert_close(dict(state), dict(plain.state_dict()), rtol=1e-12, atol=1e-12)
        local, parameters = list(model.local_parameters()), list(model.parameters())
        assert len(local) < len(parameters)  # it was really spread
        return state
    finally:
        sw.shutdown()


@pytest.mark.thorough
def test_scripted_functions_between_units():
    """One ended in an error without words, because it ran on stand-ins."""

    def job():
        warnings.simplefilter(
            "ignore"
        )  # of TorchScript: it is deprecated, and traces what follows from shapes
        sample = torch.ones(2, WIDTH, dtype=torch.float64)
        for function in (torch.jit.script(gelu), torch.jit.trace(gelu, (sample, sample))):
            trained(seeded(lambda function=function: Between(function)), seeded(lambda: Between(gelu)))

    run_ranks(job, 2)


@pytest.mark.thorough
def test_compiled_functions_inside_units_are_compiled_once():
    """A module that calls one is a unit, so that it runs compiled, if it is not more than a stage."""

    def job():
        compiler = Compiler()
        function = torch.compile(gelu, backend=compiler)

        def fuses(called: Any) -> nn.Module:
            return seeded(lambda: nn.Sequential(*(Fuses(called) for _ in range(4))))

        trained(fuses(function), fuses(gelu))
        return compiler.num_graphs

    assert run_ranks(job, 2) == [1, 1]


@pytest.mark.parametrize("how", ["the model", "a decorated method"])
def test_compiled_modules(how):
    """They were refused. Units are compiled in the first step, under names without `_orig_mod`."""

    def job():
        compiler, seen = Compiler(), []

        def loss(model: Any, x: Tensor) -> Tensor:
            seen.append(compiler.num_graphs)
            return loss_of(model, x)

        plain = seeded(lambda: nn.Sequential(*(Block() for _ in range(4))))
        network: Any = copy.deepcopy(plain)
        if how == "the model":
            network = torch.compile(network, backend=compiler, fullgraph=True)
        else:

            class Decorated(Block):
                forward = torch.compile(Block.forward, backend=compiler)

            network = seeded(lambda: nn.Sequential(*(Decorated() for _ in range(4))))
        names = trained(network, plain, loss=loss).keys()
        assert names == plain.state_dict().keys()
        in_second_step = seen[-2 * MICROBATCHES :]
        assert set(in_second_step) == {compiler.num_graphs}
        return compiler.num_graphs

    # Not one for each of eight layers: one for each kind, and one more where its input has no gradient.
    assert all(0 < number <= 4 for number in run_ranks(job, 2))


@pytest.mark.thorough
def test_a_compiled_backward_may_be_asked_for_its_inputs_first():
    """Schedules that put weight gradients off find the backward of a compiled unit in one piece."""

    def job():
        plain = seeded(lambda: nn.Sequential(*(Block() for _ in range(4))))
        network = nn.Sequential(*(torch.compile(b, backend="aot_eager") for b in copy.deepcopy(plain)))
        trained(network, plain, pipeline="zb_h1")

    run_ranks(job, 2, timeout_s=120)


def test_states_of_compiled_models_can_be_loaded():
    def job():
        saved = torch.compile(nn.Sequential(nn.Linear(4, 4)), backend="eager")
        sw.init({**QUIET})
        model = sw.DistributedModel(torch.compile(nn.Sequential(nn.Linear(4, 4)), backend="eager"))
        model.load_state_dict(saved.state_dict())
        assert model.state_dict().keys() == {"0.weight", "0.bias"}
        assert torch.equal(model.state_dict()["0.weight"], saved.state_dict()["_orig_mod.0.weight"])

    run_ranks(job, 1)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        from torch.nn.attention.flex_attention import flex_attention

        x_BHSD = self.project(x).unflatten(-1, (2, WIDTH // 2)).transpose(1, 2)
        attend: Any = flex_attention
        return attend(x_BHSD, x_BHSD, x_BHSD).transpose(1, 2).flatten(-2)


@pytest.mark.thorough
def test_flex_attention_makes_its_module_a_unit():
    """It compiles by itself, from functions that it is given. PyTorch has no backward of it for CPUs."""

    def job():
        warnings.filterwarnings("ignore", message="flex_attention called without torch.compile")
        sw.init({**QUIET, "pipeline_parallel_degree": 2, "microbatches": MICROBATCHES})
        torch.manual_seed(0)
        plain = nn.Sequential(*(Attention() for _ in range(2)))
        model = sw.DistributedModel(copy.deepcopy(plain))

        @sw.step
        def evaluate(model: Any, x: Tensor) -> Tensor:
            return model(x).square().mean()

        x = torch.randn(2, 4, WIDTH)
        with torch.no_grad():
            loss = evaluate(model, x).reduce_mean()
            torch.testing.assert_close(
                loss, torch.stack([loss_of(plain, part) for part in x.chunk(2)]).mean()
            )

    run_ranks(job, 2, timeout_s=120)


def refused(build: Callable[[], nn.Module]) -> str:
    def job():
        warnings.simplefilter("ignore", DeprecationWarning)
        sw.init({**QUIET, "pipeline_parallel_degree": 2})
        sw.DistributedModel(build())

    with pytest.raises(RanksFailedError) as failed:
        run_ranks(job, 2)
    return str(failed.value)


@pytest.mark.parametrize(("whole", "where"), [(True, "it"), (False, "its module 1")])
def test_a_scripted_module_is_refused_where_ranks_share_the_model(whole: bool, where: str):
    def build() -> nn.Module:
        parts = nn.Linear(2, 2), nn.Linear(2, 2)
        return (
            torch.jit.script(nn.Sequential(*parts))
            if whole
            else nn.Sequential(parts[0], torch.jit.script(parts[1]))
        )

    text = refused(build)
    assert f"{where} is compiled by torch.jit.script" in text
    assert "Take the Python module that it was made of" in text


def test_replicas_train_a_scripted_module():
    def job():
        warnings.simplefilter("ignore", DeprecationWarning)
        plain = seeded(lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)))
        network = copy.deepcopy(plain)
        network[1] = torch.jit.script(network[1])
        sw.init({**QUIET, "data_parallel_degree": 2})
        model = sw.DistributedModel(network)
        optimizer = sw.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        plain_optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)

        @sw.step
        def train(model: Any, x: Tensor) -> Tensor:
            loss = loss_of(model, x)
            model.backward(loss)
            return loss

        for number in range(2):
            torch.manual_seed(number)
            x = torch.randn(8, WIDTH, dtype=torch.float64)
            loss_of(plain, x).backward()
            train(model, x.chunk(2)[sw.dp_rank()])
            for each in (optimizer, plain_optimizer):
                each.step()
                each.zero_grad()
        torch.testing.assert_close(dict(model.state_dict()), dict(plain.state_dict()))

    run_ranks(job, 2)
