"""The setting `compile`: which units it compiles, that they compute the same, what cannot be compiled."""

import copy
import logging
import re
import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from sharded import QUIET
from torch import Tensor, nn

import shardwright.torch as sw
from shardwright.config import Config
from shardwright.errors import ConfigError
from shardwright.observe.plan_text import format_plan_in_full
from shardwright.run.context import context
from shardwright.testing import run_ranks
from shardwright.torch.counting import compiled_modules
from shardwright.torch.interception.compiled_code import code_is_compiled
from shardwright.torch.measuring import compiled_times

WIDTH, LAYERS = 8, 4


class Block(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 16), nn.Linear(16, WIDTH)
        self.dropout = dropout

    def forward(self, x: Tensor) -> Tensor:
        inner = F.gelu(self.up(F.dropout(self.norm(x), self.dropout)))
        return x + F.dropout(self.down(inner), self.dropout)


class Counts:
    """Stands for the backends of PyTorch; counts the graphs, and how often they run."""

    def __init__(self, *, fails: bool = False):
        self.num_graphs = self.num_calls = 0
        self._fails = fails

    def __call__(self, backend: str, graph: Any, inputs: Any) -> Any:
        if self._fails:
            raise NotImplementedError(f"{backend} has no kernels here\nand says so at length")
        self.num_graphs += 1

        def call(*args: Any) -> Any:
            self.num_calls += 1
            return graph.forward(*args)

        return call


def trained(
    settings: dict[str, Any],
    backend: Any,
    dropout: float = 0.0,
    script: Callable[[nn.Module], Any] = lambda model: model,
) -> tuple[int, int, str, list[str]]:
    """Trains as a plain loop does; graphs, their calls in the last step, the plan's text, what was said."""
    warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is not a leaf")
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("shardwright").addHandler(handler)
    if isinstance(backend, Counts):
        compiled_modules.compile_with_backward = backend  # type: ignore[assignment]
    else:
        compiled_modules.BACKEND = backend
    torch.manual_seed(0)
    plain = nn.Sequential(*(Block(dropout) for _ in range(LAYERS))).double()
    sw.init({**QUIET, "microbatches": 2, "plan": "anew", **settings})
    try:
        model = sw.DistributedModel(script(copy.deepcopy(plain)))
        optimizer = sw.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        plain_optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)

        @sw.step
        def train(model: Any, x: Tensor) -> Tensor:
            loss = model(x).square().mean()
            model.backward(loss)
            return loss

        before = 0
        for number in range(3):
            torch.manual_seed(number)
            x = torch.randn(8, WIDTH, dtype=torch.float64)
            optimizer.zero_grad()
            plain_optimizer.zero_grad()
            drawn_before = torch.get_rng_state()
            for part in x.chunk(2):
                (plain(part).square().mean() / 2).backward()
            torch.set_rng_state(drawn_before)
            before = getattr(backend, "num_calls", 0)
            train(model, x.chunk(context().mesh.data)[context().data_rank])
            optimizer.step()
            plain_optimizer.step()
        torch.testing.assert_close(dict(model.state_dict()), dict(plain.state_dict()), rtol=1e-12, atol=1e-12)
        plan = context().plan
        text = "" if plan is None else format_plan_in_full(plan)
        return getattr(backend, "num_graphs", 0), getattr(backend, "num_calls", 0) - before, text, said
    finally:
        sw.shutdown()


STAGES = {"pipeline_parallel_degree": 2}
SHARDS = {"sharded_data_parallel_degree": 2, "sdp_param_persistence_threshold": 0}
RECOMPUTES = {"activation_checkpointing": "full"}


@pytest.mark.parametrize(
    ("ranks", "settings", "calls"),
    [
        (2, STAGES, 8),
        (2, {**STAGES, **RECOMPUTES}, 16),
        (2, {**SHARDS, **RECOMPUTES}, 32),
        (1, {}, 8),
        (1, {**RECOMPUTES, "plan_one_stage": True}, 16),
    ],
)
def test_units_are_compiled_once_a_kind(ranks: int, settings: dict[str, Any], calls: int) -> None:
    """They are called compiled in every microbatch, and recomputed so; one stage compiles no more at once."""
    on = {"compile": "on", **settings}
    found = run_ranks(trained, ranks, on, Counts(), timeout_s=120)
    assert sum(in_last_step for _, in_last_step, *_ in found) == calls
    for graphs, _, text, said in found:
        assert 0 < graphs <= 3  # one more where its input has no gradient, one where others are seen
        assert (", compiled\n" in text) is bool(text)
        assert said == []


@pytest.mark.thorough
@pytest.mark.parametrize("settings", [{**STAGES, "pipeline": "zb_h1"}, SHARDS])
def test_compiled_backwards_are_those_of_a_plain_loop(settings: dict[str, Any]) -> None:
    run_ranks(trained, 2, {"compile": "on", **settings}, "aot_eager", timeout_s=200)


@pytest.mark.thorough
def test_kernels_of_the_compiler_draw_the_numbers_of_a_plain_loop() -> None:
    run_ranks(trained, 2, {"compile": "on", **STAGES}, "inductor", 0.3, timeout_s=300)


def drawing_as_written(model: nn.Module) -> Any:
    warnings.filterwarnings("ignore", message=r"`torch.jit.script_method` is deprecated")
    return torch.compile(model, options={"fallback_random": True})


@pytest.mark.thorough
def test_a_script_may_compile_kernels_that_draw_so() -> None:
    """As the refusal of other amounts of random numbers says."""
    run_ranks(trained, 2, STAGES, "inductor", 0.3, drawing_as_written, timeout_s=300)


def test_ranks_that_share_layers_run_as_written() -> None:
    found = run_ranks(trained, 2, {"compile": "on", "tensor_parallel_degree": 2}, Counts())
    assert [graphs for graphs, *_ in found] == [0, 0]
    (line,) = found[0][3]
    assert line.startswith("compile has no effect: a compiler does not see how 2 ranks share a layer's")
    assert found[1][3] == []


def test_what_cannot_be_compiled_is_named_once() -> None:
    for graphs, _, _, said in run_ranks(trained, 2, {"compile": "on", **STAGES}, Counts(fails=True)):
        assert graphs == 0
        assert said == ["Block runs as written: inductor cannot compile it: inductor has no kernels here"]


def raised_by_backends() -> None:
    from torch._dynamo.exc import BackendCompilerFailed, SkipFrame, TensorifyScalarRestartAnalysis

    no_memory = BackendCompilerFailed(None, torch.OutOfMemoryError("4 GiB"), None)
    for error in (TensorifyScalarRestartAnalysis(), SkipFrame("no bfloat16"), no_memory):

        def fail(*_: Any, error: Exception = error) -> Any:
            raise error

        compiled_modules.compile_with_backward = fail  # type: ignore[assignment]
        with pytest.raises(type(error)) as found:
            compiled_modules._or_as_written(None, None)
        assert found.value is error


def test_errors_for_the_compiler_reach_it() -> None:
    """It begins anew, or leaves a function; and where memory runs out, running as written hides why."""
    run_ranks(raised_by_backends, 1)


@pytest.mark.parametrize("settings", [{}, {"compile": "auto"}])
def test_nothing_is_compiled_on_cpus(settings: dict[str, Any]) -> None:
    for graphs, _, text, _ in run_ranks(trained, 2, {**STAGES, **settings, **MEASURED}, Counts()):
        assert graphs == 0
        assert "compiled" not in text


MEASURED = {"profile": "measured", "measure_s": 0.5}


def trained_as_on_gpus(worth: float) -> tuple[int, str, bool]:
    compiled_modules.auto_compiles = lambda device: True  # type: ignore[assignment]
    compiled_times._WORTH = worth
    _, calls, text, _ = trained({**STAGES, **MEASURED, "compile": "auto"}, Counts())
    return calls, text, code_is_compiled()


@pytest.mark.parametrize("is_faster", [True, False])
def test_units_run_as_they_take_less_time(is_faster: bool) -> None:
    """The compiler is out of the way again where they run as written."""
    found = run_ranks(trained_as_on_gpus, 2, 1e9 if is_faster else 0.0, timeout_s=120)
    assert sum(calls for calls, *_ in found) == (8 if is_faster else 0)
    for _, text, is_used in found:
        assert is_used is is_faster
        assert (", compiled\n" in text) is is_faster
        begin = "Units are compiled" if is_faster else "Units run as written"
        assert re.search(rf"{begin}: they take [\d.]+ .?s a microbatch compiled and [\d.]+ .?s as", text)


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_a_plan_has_units_compiled_on_gpus_alone(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[nn.Module] = []
    monkeypatch.setattr(compiled_modules, "compile_whole", compiled.append)
    mesh, config = SimpleNamespace(share=1), Config.parse({"compile": "auto"})
    here: Any = SimpleNamespace(config=config, device=torch.device(kind), mesh=mesh)
    plan: Any = SimpleNamespace(compiled=True)
    compiled_modules.compile_as_wished(nn.Linear(2, 2), here, plan)
    assert len(compiled) == (kind == "cuda")


def compiled_by_script(model: nn.Module) -> Any:
    return torch.compile(model, backend="eager")


def partly_compiled_by_script(model: nn.Module) -> Any:
    model[0].up.compile(backend="eager")  # type: ignore[index]
    model[3].compile(backend="eager")  # type: ignore[index]
    return model


def test_what_a_script_compiles_is_not_compiled_by_the_plan() -> None:
    for graphs, _, text, _ in run_ranks(trained, 2, STAGES, Counts(), 0.0, compiled_by_script):
        assert graphs == 0
        assert "compiled" not in text


def test_units_beside_those_that_a_script_compiles_are_compiled() -> None:
    on = {"compile": "on", **STAGES}
    found = run_ranks(trained, 2, on, Counts(), 0.0, partly_compiled_by_script, timeout_s=120)
    assert sum(calls for _, calls, *_ in found) == 6  # of three blocks, in two microbatches
    assert all(", compiled\n" in text for _, _, text, _ in found)


def test_values_of_the_setting() -> None:
    values = ({}, {"compile": True}, {"compile": False}, {"compile": "auto"})
    assert [Config.parse(each).compile for each in values] == ["off", "on", "off", "auto"]
    with pytest.raises(ConfigError, match=r"compile is 'maybe', but it must be one of 'auto', 'on' or 'off'"):
        Config.parse({"compile": "maybe"})
