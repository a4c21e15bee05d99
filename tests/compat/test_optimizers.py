"""The members of ``smp.DistributedOptimizer``, and the optimizers of ``smp.optimizers``."""

import copy

import pytest
import torch
from torch import nn

import smdistributed.modelparallel.torch as smp
from choices import some_combinations
from compat.small_models import QUIET, batch, loss_of, net, plain_gradients
from shardwright.errors import UsageError
from shardwright.testing import run_ranks

CLOSE = 1e-10


def training(settings, make, *, wrap_first=True, **options):
    """A wrapped model and optimizer, made in one order or the other, and a training step."""
    smp.init({**QUIET, "ddp": True, "microbatches": 2, **settings})
    plain = net()
    if wrap_first:
        model = smp.DistributedModel(plain)
        optimizer = smp.DistributedOptimizer(make(model.parameters()), **options)
    else:
        optimizer = smp.DistributedOptimizer(make(plain.parameters()), **options)
        model = smp.DistributedModel(plain)

    @smp.step
    def train_step(model, optimizer, x, y):
        loss = loss_of(model, x, y)
        model.backward(loss)
        return loss

    return smp, model, optimizer, train_step


def plain_training(make, *, replicas=1, steps=3, before_step=None):
    """Parameters after plain training."""
    model = net()
    optimizer = make(model.parameters())
    for index in range(steps):
        batches = [batch(index, replica) for replica in range(replicas)]
        for name, gradient in plain_gradients(model, batches, microbatches=2).items():
            model.get_parameter(name).grad = gradient
        if before_step is not None:
            before_step(model)
        optimizer.step()
    return dict(model.named_parameters())


def difference(model, expected):
    state = model.state_dict()
    return max(float((state[name] - p.detach()).abs().max()) for name, p in expected.items())


MAKERS = {
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
    "FusedLAMB": lambda parameters: smp.optimizers.FusedLAMB(parameters, lr=0.01, max_grad_norm=0.1),
    "FusedNovoGrad": lambda parameters: smp.optimizers.FusedNovoGrad(parameters, lr=0.01, weight_decay=0.1),
}


@pytest.mark.parametrize(
    ("num_ranks", "name", "wrap_first"), some_combinations([1, 2], list(MAKERS), [True, False])
)
def test_updates_are_those_of_plain_training(name, num_ranks, wrap_first):
    def trained(name, num_ranks, wrap_first):
        make = MAKERS[name]
        _, model, optimizer, train_step = training({"partitions": num_ranks}, make, wrap_first=wrap_first)
        for index in range(3):
            optimizer.zero_grad(set_to_none=True)
            train_step(model, optimizer, *batch(index))
            optimizer.step()
        return difference(model, plain_training(make))

    assert max(run_ranks(trained, num_ranks, name, num_ranks, wrap_first)) < CLOSE


@pytest.mark.parametrize("name", ["FusedLAMB", "FusedNovoGrad"])
def test_optimizers_that_look_at_whole_tensors_know_shared_ones(name):
    def trained(name):
        settings = {
            "sharded_data_parallel_degree": 2,
            "sdp_param_persistence_threshold": 20,
            "sdp_gradient_clipping": 1e9,
        }
        smp, model, optimizer, train_step = training(settings, MAKERS[name])
        for index in range(3):
            optimizer.zero_grad()
            train_step(model, optimizer, *batch(index, smp.dp_rank()))
            optimizer.step()
        return difference(model, plain_training(MAKERS[name], replicas=2))

    assert max(run_ranks(trained, 2, name)) < CLOSE


def test_fp16_scales_the_loss_and_leaves_updates_out():
    def in_fp16():
        smp.init({**QUIET, "partitions": 2, "microbatches": 2, "fp16": True})
        torch.manual_seed(0)
        model = smp.DistributedModel(net().float())
        optimizer = smp.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1),
            static_loss_scale=None,
            dynamic_loss_scale=True,
            dynamic_loss_args={"scale_window": 2, "min_scale": 1, "delayed_shift": 1},
        )

        @smp.step
        def train_step(model, optimizer, x, y):
            loss = loss_of(model, x, y)
            optimizer.backward(loss, update_master_grads=False)
            return loss

        assert smp.state.cfg.fp16
        assert optimizer.loss_scale == 2.0**32
        seen = []
        x, y = batch(0)
        for _ in range(25):
            optimizer.zero_grad()
            train_step(model, optimizer, x.float(), y)
            optimizer.update_master_grads()
            norm = optimizer.clip_master_grads(1.0)
            seen.append((optimizer.overflow, norm == -1.0))
            optimizer.step()
        assert all(overflow == no_norm for overflow, no_norm in seen)
        assert optimizer.master_params_created
        return seen[0][0], seen[-1][0], optimizer.loss_scale < 2.0**32, optimizer.loss_scaler.dynamic

    assert run_ranks(in_fp16, 2) == [(True, False, True, True)] * 2


def test_names_and_positions_of_parameters():
    def named():
        from smdistributed.modelparallel.torch.state_mod import state  # this rank's

        smp, model, optimizer, train_step = training({"partitions": 2}, MAKERS["SGD"])
        assert not optimizer.master_params_created
        train_step(model, optimizer, *batch(0))
        assert optimizer.master_params_created
        names = optimizer.param_name_to_index()
        assert [name for name, _ in model.local_named_parameters()] == list(names)
        assert list(names.values()) == list(range(len(names)))
        assert state is smp.state
        assert state.param_name_to_index_tp_group == [names]
        assert state.param_index_to_name_tp_group == [{index: name for name, index in names.items()}]
        assert list(optimizer.master_distribution_axis.values()) == [None] * len(names)
        assert (state.model, state.optimizer) == (model, optimizer)
        optimizer.init_master_params()
        return len(names)

    assert sum(run_ranks(named, 2)) == 6


def tensors():
    torch.manual_seed(0)
    return [nn.Parameter(torch.randn(shape, dtype=torch.float64)) for shape in ((3, 4), (5,))]


def gradients(step):
    torch.manual_seed(10 + step)
    return [torch.randn(3, 4, dtype=torch.float64), torch.randn(5, dtype=torch.float64)]


@pytest.mark.parametrize("max_grad_norm", [None, 1.0])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_lamb_is_the_published_algorithm(weight_decay, max_grad_norm):
    lr, beta1, beta2, eps = 0.01, 0.9, 0.999, 1e-6
    found = tensors()
    optimizer = smp.optimizers.FusedLAMB(
        found, lr=lr, weight_decay=weight_decay, max_grad_norm=max_grad_norm, use_nvlamb=True
    )
    expected = [p.detach().clone() for p in found]
    first = [torch.zeros_like(p) for p in expected]
    second = [torch.zeros_like(p) for p in expected]
    for step in range(1, 5):
        given = gradients(step)
        norm = torch.cat([g.reshape(-1) for g in given]).norm()
        scale = 1.0 if max_grad_norm is None else 1 / max(1.0, float(norm) / max_grad_norm)
        for index, g in enumerate(given):
            found[index].grad = g.clone()
            g = g * scale
            first[index] = beta1 * first[index] + (1 - beta1) * g
            second[index] = beta2 * second[index] + (1 - beta2) * g**2
            direction = (
                first[index] / (1 - beta1**step) / ((second[index] / (1 - beta2**step)) ** 0.5 + eps)
                + weight_decay * expected[index]
            )
            expected[index] = expected[index] - lr * expected[index].norm() / direction.norm() * direction
        optimizer.step()
    assert all(torch.allclose(a, b, rtol=1e-12) for a, b in zip(found, expected, strict=True))


def test_novograd_is_the_published_algorithm():
    lr, beta1, beta2, eps, decay = 0.01, 0.95, 0.98, 1e-8, 0.1
    found = tensors()
    optimizer = smp.optimizers.FusedNovoGrad(
        found,
        lr=lr,
        betas=(beta1, beta2),
        eps=eps,
        weight_decay=decay,
        reg_inside_moment=True,
        grad_averaging=False,
        bias_correction=False,
    )
    expected = [p.detach().clone() for p in found]
    first, second = [torch.zeros_like(p) for p in expected], [None, None]
    for step in range(4):
        for index, g in enumerate(gradients(step)):
            found[index].grad = g.clone()
            square = g.norm() ** 2
            second[index] = square if second[index] is None else beta2 * second[index] + (1 - beta2) * square
            first[index] = beta1 * first[index] + (g / (second[index] ** 0.5 + eps) + decay * expected[index])
            expected[index] = expected[index] - lr * first[index]
        optimizer.step()
    assert all(torch.allclose(a, b, rtol=1e-12) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("kind", ["FusedLAMB", "FusedNovoGrad"])
def test_their_states_are_saved_and_loaded(kind):
    def run(optimizer, parameters, steps):
        for step in steps:
            for p, g in zip(parameters, gradients(step), strict=True):
                p.grad = g
            optimizer.step()

    make = getattr(smp.optimizers, kind)
    straight = tensors()
    run(make(straight), straight, range(4))
    halfway = tensors()
    first = make(halfway)
    run(first, halfway, range(2))
    second = make(halfway)
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    run(second, halfway, range(2, 4))
    assert all(torch.equal(a, b) for a, b in zip(straight, halfway, strict=True))
    with pytest.raises(UsageError, match="no AMSGrad variant"):
        make(tensors(), amsgrad=True)
