"""Moments in 16 and 8 bits: bounds of their errors, what is exact, and what stays when packed again."""

import copy
import io
import math
from contextlib import nullcontext
from typing import Any, get_args

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from shardwright.errors import UsageError
from shardwright.torch.optimizer import packing
from shardwright.torch.optimizer.packed_tensor import BLOCK, Format, PackedTensor
from shardwright.torch.optimizer.packing import Packing

KINDS = get_args(Format)
LEAST = {"bf16": 0.0, "signed": 2.0**-19 * 1.13, "unsigned": 2.0**-35 * 1.13}
salts = st.integers(-(2**31), 2**31 - 1)


def packed(values: Tensor, kind: Format, salt: int) -> PackedTensor:
    made = PackedTensor.empty(values, kind, values.device)
    made.write(0, values.reshape(-1), salt)
    return made


@st.composite
def moments(draw: Any) -> tuple[Tensor, Format]:
    """Values of many sizes, with zeros, of a shape with a remainder of a block."""
    kind = draw(st.sampled_from(KINDS))
    shape = draw(st.sampled_from([(), (1,), (0,), (3, 5), (BLOCK,), (7, 50), (2, 3, BLOCK + 1)]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    sizes = torch.rand(shape, generator=generator) * draw(st.sampled_from([1, 8, 30])) - 20
    values = torch.randn(shape, generator=generator) * 10.0**sizes
    values *= torch.rand(shape, generator=generator) > draw(st.sampled_from([0.0, 0.5, 1.0]))
    return (values.abs() if kind == "unsigned" else values), kind


@given(moments(), salts, salts)
def test_errors_are_less_than_a_step(case: tuple[Tensor, Format], salt: int, again: int) -> None:
    values, kind = case
    moment = packed(values, kind, salt)
    found = moment.unpacked()
    assert found.shape == values.shape
    assert found.dtype is values.dtype
    assert bool(((found == 0) == (values == 0))[(values == 0) | (kind != "signed")].all())
    assert bool((found.sign() * values.sign() >= 0).all())
    flat, error = values.reshape(-1), (found - values).abs().reshape(-1)
    for block, of_block in zip(flat.split(BLOCK), error.split(BLOCK), strict=True):
        largest = block.abs().amax() if len(block) else torch.tensor(0.0)
        step = 2.0**-7 if kind == "bf16" else 2.0**-3
        assert bool((of_block <= 1.001 * step * block.abs() + LEAST[kind] * largest + 1e-37).all())
        if kind != "bf16" and largest > 2.0**-120:
            at = block.abs() == largest
            assert torch.equal(found.reshape(-1)[: len(flat)][flat.abs() == largest].abs()[:1], largest[None])
            assert bool((of_block[at] == 0).all())
    twice = packed(found, kind, again)
    assert torch.equal(twice.codes, moment.codes)
    assert torch.equal(twice.unpacked(), found)


@pytest.mark.parametrize("kind", KINDS)
def test_rounding_is_right_on_average(kind: Format) -> None:
    """Of each value alone, over the steps; and of many values in one."""
    values = torch.linspace(0.001, 1.0, 4 * BLOCK)
    generator = torch.Generator().manual_seed(0)
    errors = []
    for salt in torch.randint(-(2**31), 2**31, (800,), generator=generator).tolist():
        errors.append(packed(values, kind, salt).unpacked() / values - 1)
    relative = torch.stack(errors)
    step = 2.0**-7 if kind == "bf16" else 2.0**-3
    assert float(relative.abs().max()) > step / 3
    assert float(relative.mean(0).abs().max()) < 5 * step / 2 / math.sqrt(800)
    assert float(relative.mean(1).abs().max()) < 6 * step / 2 / math.sqrt(len(values))


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_not_finite_is_not_hidden(kind: Format) -> None:
    values = torch.ones(2 * BLOCK)
    values[3], values[5] = math.nan, math.inf
    values.view(torch.int32)[7] = 0x7FFFFFFF  # what a GPU calls NaN
    found = packed(values, kind, 1).unpacked()
    assert not bool(found[3].isfinite())
    assert not bool(found[5].isfinite())
    assert kind != "bf16" or bool(found[7].isnan())
    assert torch.equal(found[BLOCK:], values[BLOCK:])


@pytest.mark.parametrize(
    "write",
    [
        lambda moment: moment.zero_(),
        lambda moment: moment.__setitem__(slice(0, 4), 0),
        lambda moment: torch._foreach_mul_([moment], 0),
        lambda moment: torch.add(torch.ones(300), 1, out=moment),
    ],
)
def test_writing_is_refused(write: Any) -> None:
    moment = packed(torch.ones(300), "bf16", 0)
    with pytest.raises(UsageError, match="is changed in place, which would change nothing"):
        write(moment)


def test_it_is_read_as_an_ordinary_tensor() -> None:
    values = torch.randn(3, 100, dtype=torch.float64)
    moment = packed(values, "signed", 0)
    whole = moment.unpacked()
    assert torch.equal(moment + 0, whole)
    assert torch.equal(moment.view(-1)[5:7], whole.view(-1)[5:7])
    assert torch.equal(torch.zeros_like(whole).copy_(moment), whole)
    assert type(copy.deepcopy(moment)) is type(moment.clone()) is type(moment.to("cpu")) is PackedTensor
    assert moment.float().dtype is torch.float32
    file = io.BytesIO()
    torch.save({"exp_avg": moment}, file)
    file.seek(0)
    assert torch.equal(torch.load(file, weights_only=True)["exp_avg"], whole)


OPTIMIZERS: dict[str, dict[str, Any]] = {
    "SGD": {"lr": 0.02, "momentum": 0.9},
    "Adam": {"lr": 0.02, "amsgrad": True},
    "AdamW": {"lr": 0.02, "fused": True},
    "NAdam": {"lr": 0.02},
    "RAdam": {"lr": 0.02},
    "Adamax": {"lr": 0.02, "foreach": True},
    "Adadelta": {"lr": 2.0},
    "RMSprop": {"lr": 0.005, "momentum": 0.5},
}


def losses(
    name: str, kind: str, steps: int = 60, **options: Any
) -> tuple[list[float], torch.optim.Optimizer]:
    """Of a small network that learns products; two groups, a scalar, and a weight in another order."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 40), nn.Tanh(), nn.Linear(40, 40), nn.Tanh(), nn.Linear(40, 1))
    net[2].weight = nn.Parameter(net[2].weight.detach().t().contiguous().t())
    scale = nn.Parameter(torch.ones(()))
    groups: list[Any] = [{"params": net[:3].parameters()}, {"params": [*net[3:].parameters(), scale]}]
    optimizer = getattr(torch.optim, name)(groups, **OPTIMIZERS[name], **options)
    kept = None if kind == "as_is" else Packing(optimizer, kind, 0)
    found = []
    for step in range(steps):
        x = torch.randn(64, 8, generator=torch.Generator().manual_seed(step % 8))
        optimizer.zero_grad()
        loss = (net(x) * scale - x[:, :1] * x[:, 1:2]).square().mean()
        loss.backward()
        if kept is not None:
            kept._salt = lambda step=step: hash((1, step)) % 2**31  # type: ignore[method-assign, misc]
        with nullcontext() if kept is None else kept.in_pieces():
            optimizer.step()
        found.append(loss.item())
    return found, optimizer


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_trainings_end_where_plain_ones_do(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "_PIECE", BLOCK)
    plain, _ = losses(name, "as_is")
    for kind, most in (("bf16", 0.02), ("8bit", 0.2)):
        found, optimizer = losses(name, kind)
        end, of_plain = (sum(each[-8:]) / 8 for each in (found, plain))
        assert end == pytest.approx(of_plain, rel=most)
        assert found[1] == pytest.approx(plain[1], rel=1e-6)
        steps = {float(values["step"]) for values in optimizer.state.values() if "step" in values}
        assert steps <= {60.0}
        assert all(len(group["params"]) >= 3 for group in optimizer.param_groups)
        assert len(optimizer.state) == 7


def test_an_update_that_fails_leaves_the_rest_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    _, optimizer = losses("AdamW", "8bit", steps=2)
    before = {p: dict(values) for p, values in optimizer.state.items()}
    monkeypatch.setattr(torch.optim.AdamW, "_init_group", lambda *_: 1 / 0)
    monkeypatch.setattr(Packing, "_salt", lambda _: 0)
    with pytest.raises(ZeroDivisionError), Packing(optimizer, "8bit", 0).in_pieces():
        optimizer.step()
    assert optimizer.state.keys() == before.keys()
    assert isinstance(optimizer.param_groups, list)
