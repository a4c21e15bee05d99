"""Shared layers in 16 bits train as the same model on one rank does, within what the type can tell apart."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from test_shared_layers import WIDTH, adamw, case, check, language, sgd
from torch import Tensor

import shardwright.torch as sw
from shardwright.testing import run_ranks
from shardwright.torch.tensor_parallel.divided_tensor import DividedTensor, local_of

QUIET = {"run_dir": "off", "profile": "estimated", "microbatches": 2}
TENSOR = {"tensor_parallel_degree": 2, "pipeline_parallel_degree": 1}


def training(settings: dict[str, Any], make: Any = adamw, **scaling: Any):
    """(losses, gradients, state, types, elements of master weights) of a rank, after three steps."""
    recipe = language()
    sw.init({**QUIET, **settings})
    torch.manual_seed(0)
    plain = recipe.build()
    model = sw.DistributedModel(plain)
    optimizer = sw.DistributedOptimizer(make(model), **scaling)

    @sw.step
    def train(model: Any, batch: Any) -> Tensor:
        loss = recipe.loss(model, batch)
        model.backward(loss)
        return loss

    losses, gradients = [], {}
    for number in range(3):
        torch.manual_seed(number)
        batch = recipe.batch(8, 12)
        batch = {key: value.chunk(sw.rdp_size())[sw.rdp_rank()] for key, value in batch.items()}
        optimizer.zero_grad()
        loss = train(model, batch).reduce_mean().detach().clone()
        if torch.distributed.is_initialized():
            torch.distributed.all_reduce(loss)
            loss /= torch.distributed.get_world_size()
        losses.append(loss.item())
        if not gradients:
            for name, p in model.local_named_parameters():
                gradients[name] = p.grad + torch.zeros(p.shape)
        optimizer.step()
    parameters = list(model.local_parameters())
    cut = sum(isinstance(p, DividedTensor) or getattr(p, "spec", None) is not None for p in parameters)
    types = {p.dtype for p in parameters}, {p.grad.dtype for p in parameters}
    parts = model.replicas.updated_parts
    masters = [parts.master(p) for p in parameters]
    elements = sum(0 if m is None else local_of(m).numel() for m in masters)
    whole = {name: getattr(g, "full", lambda g=g: g)() for name, g in gradients.items()}
    whole = {name: torch.empty(g.shape).copy_(g) for name, g in whole.items()}
    return losses, whole, model.state_dict(), types, cut, elements


def relative(name: str, found: Tensor, expected: Tensor) -> float:
    """The norm of the difference."""
    if name.endswith("qkv.bias"):
        found, expected = (torch.cat([value[:WIDTH], value[2 * WIDTH :]]) for value in (found, expected))
    found, expected = found.double(), expected.double()
    return ((found - expected).norm() / expected.norm().clamp_min(1e-3)).item()


def compare(num_ranks: int, settings: dict[str, Any], dtype: torch.dtype, limit: float, **options: Any):
    name = "bf16" if dtype is torch.bfloat16 else "fp16"
    whole = run_ranks(training, 1, {name: True}, **options)[0]
    found = run_ranks(training, num_ranks, {name: True, **settings}, timeout_s=200, **options)
    for losses, gradients, state, types, cut, _ in found:
        assert types == ({dtype}, {torch.float32})
        assert cut
        assert losses == pytest.approx(whole[0], rel=limit)
        for key, value in gradients.items():
            assert relative(key, value, whole[1][key]) < 10 * limit, key
        assert state.keys() == whole[2].keys()
        for key, value in state.items():
            assert value.dtype is dtype
            assert relative(key, value, whole[2][key]) < 10 * limit, key
    return whole, found


def test_16_bits():
    whole, found = compare(2, TENSOR, torch.bfloat16, 1e-2)
    assert whole[-1] <= sum(each[-1] for each in found) < 1.1 * whole[-1]


def test_autocast():
    """Parameters stay in float32; products are in 16 bits."""
    recipe = replace(language(layers=2), dtype=torch.float32)
    cases = {"": case(2, autocast=torch.bfloat16, optimizer=sgd, tolerance=0.03)}
    check(recipe, cases, num_ranks=2)


def test_double_precision_is_not_touched():
    def on_rank():
        sw.init({**QUIET, **TENSOR})
        model = sw.DistributedModel(language().build().double())
        return model.replicas.updated_parts

    assert run_ranks(on_rank, 2) == [None, None]
