"""Shared parameters of which few may be gathered at once."""

import copy
import math
from typing import Any

import pytest
import torch
from sharded import QUIET, Net, batches, loss_of, on_hosts, plain_training, sharded_training, wish
from sharded import train as train_language
from torch import Tensor, nn

import shardwright.torch as sw
from shardwright.testing import RanksFailedError, run_ranks

# The largest parameters have 1024 elements, all together some 11 000.
FEW = 1200


def start(settings: dict[str, Any], model: nn.Module, *, ranks_per_host: int = 1):
    on_hosts(ranks_per_host)
    sw.init({**QUIET, "sharded_data_parallel_degree": 2, "sdp_max_live_parameters": FEW, **wish(settings)})
    plain = copy.deepcopy(model.double())
    wrapped = sw.DistributedModel(model)
    return sw, plain, wrapped


def arrivals_of(model: Any) -> Any:
    return model.replicas.sharding._as_used


def trains_the_same(model: nn.Module, loss: Any, settings: dict[str, Any], *, steps: int = 3) -> Any:
    """Compares losses and gradients with those of the plain model; gives the wrapped one."""
    sw, plain, wrapped = start(settings, model)

    @sw.step
    def train(model: Any, x: Tensor, y: Tensor) -> Tensor:
        value = loss(model, x, y)
        model.backward(value)
        return value

    for x, y in batches(steps):
        wrapped.zero_grad()
        plain.zero_grad()
        found = train(wrapped, x, y).reduce_mean()
        expected = loss(plain, x, y)
        expected.backward()
        torch.testing.assert_close(found, expected.detach(), rtol=1e-12, atol=1e-12)
        others = dict(plain.named_parameters())
        for name, parameter in wrapped.module.named_parameters():
            gradient = others[name].grad
            if gradient is None:
                assert parameter.grad is None, name
            else:
                full = parameter.grad.full() if hasattr(parameter.grad, "full") else parameter.grad
                torch.testing.assert_close(full, gradient, rtol=1e-10, atol=1e-12)
    return wrapped


@pytest.mark.parametrize(
    ("ranks_per_host", "degree", "microbatches", "ddp_dist_backend"),
    [(2, 4, 2, "auto"), (3, 4, 1, "auto"), (2, 2, 1, "gloo")],
)
def test_few_at_once(ranks_per_host, degree, microbatches, ddp_dist_backend):
    settings = {
        "sharded_data_parallel_degree": degree,
        "microbatches": microbatches,
        "sdp_max_live_parameters": FEW,
        "ddp_dist_backend": ddp_dist_backend,
    }
    expected, norms, state = plain_training(clip=1.0)
    for losses, own_norms, own_state, _ in run_ranks(
        sharded_training, 4, settings, ranks_per_host=ranks_per_host, clip=1.0
    ):
        assert losses == pytest.approx(expected, rel=1e-10)
        assert own_norms == pytest.approx(norms, rel=1e-10)
        for name, value in own_state.items():
            torch.testing.assert_close(value, state[name], rtol=1e-9, atol=1e-11)


@pytest.mark.thorough
def test_few_at_once_over_stages():
    settings = {
        "pipeline_parallel_degree": 2,
        "sharded_data_parallel_degree": 2,
        "microbatches": 2,
        "pipeline": "zb_h1",
        "activation_checkpointing": "full",
        "sdp_max_live_parameters": FEW,
        "every": False,
        "placement_strategy": "spread",
    }
    expected, _, state = plain_training()
    for losses, _, own_state, _ in run_ranks(sharded_training, 4, settings, ranks_per_host=1):
        assert losses == pytest.approx(expected, rel=1e-10)
        for name, value in own_state.items():
            torch.testing.assert_close(value, state[name], rtol=1e-9, atol=1e-11)


def stays_few(ranks_per_host):
    from torch.multiprocessing.reductions import StorageWeakRef

    from shardwright.comm.collectives.communicator import Communicator

    taken: list[tuple[StorageWeakRef, int]] = []
    original = Communicator.share_memory

    def share_memory(self: Communicator, num_bytes: int) -> Tensor:
        memory = original(self, num_bytes)
        taken.append((StorageWeakRef(memory.untyped_storage()), num_bytes))
        return memory

    def alive() -> int:
        """Elements that are kept by anything, such as a graph."""
        return sum(num_bytes for storage, num_bytes in taken if not storage.expired()) // 8

    Communicator.share_memory = share_memory
    settings = {"sharded_data_parallel_degree": 2 * ranks_per_host}
    sw, _, model = start(settings, Net(blocks=6), ranks_per_host=ranks_per_host)
    live = []

    @sw.step
    def train(model: Any, x: Tensor, y: Tensor) -> Tensor:
        loss = loss_of(model, x, y)
        live.append(alive())
        model.backward(loss)
        return loss

    for x, y in batches(3):
        train(model, x, y)
        assert alive() == 0
        for each in model.replicas.sharding.parameters.values():
            assert each.holder.untyped_storage().nbytes() == 0
    window = arrivals_of(model).window
    assert 0 < window.most <= FEW
    assert all(0 < size <= 1.2 * FEW for size in live)  # with numbers behind the rows


def test_no_more_than_allowed_are_at_hand():
    run_ranks(stays_few, 2, 1)


@pytest.mark.parametrize("most", [FEW, 10**9])
def test_a_parameter_that_is_read_from_a_variable(most):
    def run(most):
        model = Net()
        kept = model.mix.weight

        def loss(model: Any, x: Tensor, y: Tensor) -> Tensor:
            weight = kept if hasattr(model, "module") else model.mix.weight
            return weight.square().sum() + loss_of(model, x, y)

        trains_the_same(model, loss, {"sdp_max_live_parameters": most})

    run_ranks(run, 2, most)


def another_order():
    sw, _, model = start({"timeout_s": 10}, Net())

    @sw.step
    def train(model: Any, x: Tensor) -> Tensor:
        h = model.module.embedding(x)
        blocks = list(model.module.blocks)
        for block in reversed(blocks) if sw.rank() else blocks:
            h = block(h)
        loss = h.square().mean()
        model.backward(loss)
        return loss

    train(model, batches(1)[0][0])


def test_ranks_that_use_parameters_in_another_order_are_told():
    with pytest.raises(RanksFailedError, match="in another order than this one"):
        run_ranks(another_order, 2, timeout_s=60)


def evaluates():
    sw, plain, model = start({}, Net())

    @sw.step
    def evaluate(model: Any, x: Tensor) -> Tensor:
        return model(x)

    for guard in (torch.no_grad, torch.inference_mode):
        for x, _ in batches(2):
            with guard():
                found = evaluate(model, x).concat()
                torch.testing.assert_close(found, plain(x))
                torch.testing.assert_close(model(x), plain(x))
    train = sw.step(train_language)
    x, y = batches(1)[0]
    loss = train(model, x, y).reduce_mean().item()
    assert math.isclose(loss, loss_of(plain, x, y).item(), rel_tol=1e-12)


def test_evaluations_first():
    run_ranks(evaluates, 2)
