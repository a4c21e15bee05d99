"""Microbatches that are run from a list of calls: bit for bit what the script's Python would have made."""

import random
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import count
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import shardwright.torch as sw
from shardwright.run.context import context
from shardwright.testing import run_ranks

BATCHES = 7
TOLD: list[Any] = []
SCALE = 1.0


class Net(nn.Module):
    """Layers of which two stages have some each, with code between them."""

    def __init__(self, width: int = 8, *, dropout: float = 0.0, batch_norm: bool = False):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(6))
        self.norm = nn.BatchNorm1d(width) if batch_norm else nn.Identity()
        self.dropout = nn.Dropout(dropout)
        self.scale = 1.0
        self.seen: list[int] = []
        self.kept: dict[str, float] = {}
        self.numbers = count()
        self.drawn = (number / 7 for number in range(1000))

    def forward(self, x: Tensor, effect: Callable[["Net", Tensor], Tensor]) -> Tensor:
        for layer in self.layers[:3]:
            x = torch.tanh(layer(x))
        x = self.norm(x)
        x = effect(self, x * self.scale)
        for layer in self.layers[3:]:
            x = x + self.dropout(torch.tanh(layer(x)))
        return x


def nothing(net: Net, x: Tensor) -> Tensor:
    mask = torch.arange(x.shape[-1]) % 2
    return x.where(mask.bool(), 2 * x)


def under_no_grad(net: Net, x: Tensor) -> Tensor:
    with torch.no_grad():
        offset = x.mean(0) * 2
    return x - offset


def in_bfloat16(net: Net, x: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return (x @ torch.ones(8, 8)).float()


def in_containers(net: Net, x: Tensor) -> Tensor:
    halves = list(x.chunk(2, -1))
    halves.reverse()
    return torch.cat(halves, dim=-1)


def appends(net: Net, x: Tensor) -> Tensor:
    net.seen.append(len(net.seen))
    return x * (1 + len(net.seen) % 3)


def sets_an_attribute(net: Net, x: Tensor) -> Tensor:
    setattr(net, f"number_{len(vars(net))}", 1.0)
    return x * len(vars(net))


def counts_in_a_class(net: Net, x: Tensor) -> Tensor:
    Counter.calls += 1
    return x * (1 + Counter.calls % 2)


class Counter:
    calls = 0


def appends_to_a_global(net: Net, x: Tensor) -> Tensor:
    TOLD.append(1)
    return x * (1 + len(TOLD) % 4)


def sets_a_global(net: Net, x: Tensor) -> Tensor:
    global SCALE
    SCALE = 1.0 + SCALE % 3
    return x * SCALE


def counts_in_an_iterator(net: Net, x: Tensor) -> Tensor:
    return x * (1 + next(net.numbers) % 3)


def reads_a_generator(net: Net, x: Tensor) -> Tensor:
    return x * next(net.drawn)


def keeps_in_a_dictionary(net: Net, x: Tensor) -> Tensor:
    net.kept["last"] = net.kept.get("last", 0.0) + 1
    return x * net.kept["last"]


def draws_with_python(net: Net, x: Tensor) -> Tensor:
    return x * random.random()


def draws_with_numpy(net: Net, x: Tensor) -> Tensor:
    return x * float(np.random.rand())


def asks_for_the_time(net: Net, x: Tensor) -> Tensor:
    TOLD.append(time.time())
    return x


def prints(net: Net, x: Tensor) -> Tensor:
    print(len(x), file=Written())
    return x


class Written:
    def write(self, text: str) -> None:
        Counter.calls += 1


def counted() -> Callable[[Net, Tensor], Tensor]:
    calls = 0

    def effect(net: Net, x: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return x * (1 + calls % 3)

    return effect


def train(
    config: dict[str, Any],
    make_effect: Callable[[], Callable[[Net, Tensor], Tensor]],
    between: Callable[[Net, int], None] | None = None,
    **of_net: Any,
) -> tuple[list[float], list[float], int, str]:
    """Losses, sums of parameters, what was appended, and how microbatches were run at the end."""
    global SCALE
    SCALE, Counter.calls = 1.0, 0
    TOLD.clear()
    for seed in (torch.manual_seed, random.seed, np.random.seed):
        seed(0)
    net = Net(**of_net)
    effect = make_effect()
    model = sw.DistributedModel(net)
    optimizer = sw.DistributedOptimizer(torch.optim.SGD(net.parameters(), 0.05))

    @sw.step
    def step(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        loss = (model(x, effect) - y).square().mean()
        model.backward(loss)
        return loss

    losses = []
    for number in range(BATCHES):
        generator = torch.Generator().manual_seed(number)
        x, y = torch.randn(2, 8, 8, generator=generator)
        if between is not None:
            between(net, number)
        optimizer.zero_grad()
        losses.append(step(model, x, y).reduce_mean().item())
        optimizer.step()
    sums = [value.double().sum().item() for value in model.state_dict().values()]
    told = next(iter(model._engine._programs._cache._entries.values()))[0].program.replay
    return losses, sums, len(TOLD), "off" if told is None else told.told


def both(config: dict[str, Any], *args: Any, by_one_plan: bool = False, **kwargs: Any) -> tuple[Any, Any]:
    """As written, and with replays.

    Args:
        by_one_plan: the second run follows the plan of the first: the ends of stages decide about rounding.
    """
    settings = {"microbatches": 4, "profile": "estimated", **config}
    sw.init({**settings, "replay": "off"})
    written, plan = train(config, *args, **kwargs), context().plan
    sw.shutdown()
    sw.init(plan if by_one_plan else settings)
    replayed = train(config, *args, **kwargs)
    sw.shutdown()
    return written, replayed


TWO_STAGES = {"pipeline_parallel_degree": 2, "pipeline": "1f1b"}
PURE = [nothing, under_no_grad, in_bfloat16, in_containers]
EFFECTS = [
    *(appends, sets_an_attribute, counts_in_a_class, appends_to_a_global, sets_a_global),
    *(counts_in_an_iterator, reads_a_generator, keeps_in_a_dictionary, draws_with_python),
    *(draws_with_numpy, asks_for_the_time, prints),
]
DROPOUT = {"dropout": 0.3, "batch_norm": True}


def each(runs: list[tuple[dict[str, Any], Any, Any, dict[str, Any]]], **options: bool) -> list[Any]:
    """The same of several effects: ranks start once for all of them."""
    return [both(config, make, between, **of_net, **options) for config, make, between, of_net in runs]


def results(runs: list[Any], **options: bool) -> Iterator[tuple[str, Any, Any]]:
    """Of every run, on every rank: for messages, as written, with replays."""
    for of_rank in run_ranks(partial(each, runs, **options), num_ranks=2):
        for (config, make, *_), (written, replayed) in zip(runs, of_rank, strict=True):
            yield f"{config}, {getattr(make, 'args', make)}", written, replayed


@pytest.mark.parametrize("effects", [PURE[:1], pytest.param(PURE[1:], marks=pytest.mark.thorough)])
def test_a_replayed_step_computes_the_same_bits(effects: list[Any]) -> None:
    for name, written, replayed in results(
        [(TWO_STAGES, partial(_given, effect), None, {}) for effect in effects]
    ):
        assert replayed[:3] == written[:3], name
        assert replayed[3] == "from a list of calls", name


@pytest.mark.parametrize(
    "configs",
    [
        [
            {"pipeline_parallel_degree": 2, "pipeline": "zb_h1"},
            {"tensor_parallel_degree": 2},
        ],
        pytest.param(
            [
                {"pipeline_parallel_degree": 2, "pipeline": "zb_v"},
                {"pipeline_parallel_degree": 2, "pipeline": "interleaved_1f1b", "virtual_stages": 2},
                {**TWO_STAGES, "offload_activations": True},
                {**TWO_STAGES, "activation_checkpointing": "full"},
            ],
            marks=pytest.mark.thorough,
        ),
    ],
    ids=["", "further"],
)
def test_every_schedule_and_memory_saver_is_replayed(configs: list[dict[str, Any]]) -> None:
    runs = [(config, partial(_given, nothing), None, DROPOUT) for config in configs]
    for name, written, replayed in results(runs, by_one_plan=True):
        assert replayed[:3] == written[:3], name
        assert replayed[3] == "from a list of calls", name


@pytest.mark.parametrize("effects", [EFFECTS[::4], pytest.param(EFFECTS, marks=pytest.mark.thorough)])
def test_effects_keep_a_step_as_written(effects: list[Any]) -> None:
    for name, written, replayed in results(
        [(TWO_STAGES, partial(_given, effect), None, {}) for effect in effects]
    ):
        assert replayed[:3] == written[:3], name
        assert replayed[3].startswith("as written: "), name


def test_a_counter_of_an_enclosing_function_keeps_a_step_as_written() -> None:
    for _, written, replayed in results([(TWO_STAGES, counted, None, {})]):
        assert replayed[:3] == written[:3]
        assert replayed[3].startswith("as written: counted.<locals>.effect sets the variable calls")


def _given(effect: Any) -> Any:
    return effect


def reads_a_global(net: Net, x: Tensor) -> Tensor:
    return x * SCALE


def reads_a_list(net: Net, x: Tensor) -> Tensor:
    return x * sum(net.seen, 1)


def set_a_global(net: Net, number: int) -> None:
    global SCALE
    SCALE = 2.0 if number == BATCHES - 2 else 1.0


def set_an_attribute(net: Net, number: int) -> None:
    net.scale = 3.0 if number == BATCHES - 2 else 1.0


def lengthen_a_list(net: Net, number: int) -> None:
    net.seen[:] = [2] if number == BATCHES - 2 else []


def test_what_a_script_sets_between_steps_counts_at_once() -> None:
    pairs = (reads_a_global, set_a_global), (nothing, set_an_attribute), (reads_a_list, lengthen_a_list)
    for name, written, replayed in results(
        [(TWO_STAGES, partial(_given, effect), between, {}) for effect, between in pairs]
    ):
        assert replayed[:3] == written[:3], name
        assert len(set(written[0])) == BATCHES


class Settings:
    """Read by a name that stands nowhere in the code."""

    def __init__(self) -> None:
        self.weight_1 = 1.0


CRITERION = nn.CrossEntropyLoss()
SETTINGS = Settings()
LIMIT = torch.tensor(1.0)


def with_a_criterion(net: Net, x: Tensor) -> Tensor:
    return x * CRITERION(x.detach(), torch.ones(x.shape[0], dtype=torch.long))


def with_settings(net: Net, x: Tensor) -> Tensor:
    return x * getattr(SETTINGS, f"weight_{int(net.scale)}")


def with_a_read(net: Net, x: Tensor) -> Tensor:
    return x * (LIMIT * 1).item()


def set_smoothing(net: Net, number: int) -> None:
    CRITERION.label_smoothing = 0.5 if number == BATCHES - 2 else 0.0


def set_settings(net: Net, number: int) -> None:
    SETTINGS.weight_1 = 3.0 if number == BATCHES - 2 else 1.0


def fill_limit(net: Net, number: int) -> None:
    LIMIT.fill_(3.0 if number == BATCHES - 2 else 1.0)


@pytest.mark.thorough
def test_what_is_outside_of_the_model_counts_by_whatever_name() -> None:
    pairs = (with_a_criterion, set_smoothing), (with_settings, set_settings), (with_a_read, fill_limit)
    for name, written, replayed in results(
        [(TWO_STAGES, partial(_given, effect), between, {}) for effect, between in pairs]
    ):
        assert replayed[:3] == written[:3], name
