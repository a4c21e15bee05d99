"""Runs of scripts from before 1.10, which bring along their own module and optimizer for fp16, go on."""

import torch
from torch import nn
from torch.optim import AdamW

import smdistributed.modelparallel.torch as smp
from compat.small_models import QUIET, batch, loss_of, net
from shardwright.testing import run_ranks


class HalfModule(nn.Module):
    """Around the model, and not in the names of its state; of loading it knows what PyTorch 1.8 did."""

    def __init__(self, module):
        super().__init__()
        self.module = module.bfloat16()

    def forward(self, x):
        return self.module(x.bfloat16()).double()

    def state_dict(self, destination=None, prefix="", keep_vars=False):
        return self.module.state_dict(destination=destination, prefix=prefix, keep_vars=keep_vars)

    def load_state_dict(self, state_dict, strict=True):
        self.module.load_state_dict(state_dict, strict=strict)


class HalfOptimizer:
    """Updates copies in float32, made when parameters are placed."""

    def __init__(self, model, optimizer):
        self.model, self.optimizer = model, optimizer
        self.dynamic_loss_scale, self.overflow, self.loss_scale = True, False, 4.0
        self.first_closure_call_this_step = True
        self.master_params_created = False
        self.fp16_groups, self.fp32_from_fp16_groups = [], []

    def init_master_params(self):
        for group in self.optimizer.param_groups:
            self.fp16_groups.append(group["params"])
            group["params"] = [nn.Parameter(parameter.detach().float()) for parameter in group["params"]]
            self.fp32_from_fp16_groups.append(group["params"])
        self.master_params_created = True

    def pairs(self):
        for own, copies in zip(self.fp16_groups, self.fp32_from_fp16_groups, strict=True):
            yield from zip(own, copies, strict=True)

    def zero_grad(self):
        for parameter, _ in self.pairs():
            parameter.grad = None

    def backward(self, loss):
        self.model.backward(loss * self.loss_scale)

    @torch.no_grad()
    def step(self):
        for parameter, copy in self.pairs():
            copy.grad = parameter.grad.float() / self.loss_scale
        self.optimizer.step()
        for parameter, copy in self.pairs():
            parameter.copy_(copy)


def trained(steps, loaded=None, *, partial=False):
    """Losses, and what is saved in the end."""
    smp.init({**QUIET, "partitions": 2, "microbatches": 2})
    model = smp.DistributedModel(HalfModule(net()))
    optimizer = smp.DistributedOptimizer(HalfOptimizer(model, AdamW(model.parameters(), lr=0.01)))
    model.register_post_partition_hook(lambda model, optimizer: optimizer.init_master_params())
    if loaded is not None:
        model.load_state_dict(loaded["model"])
        optimizer.load_state_dict(loaded["optimizer"])
        optimizer.loss_scale, optimizer.overflow = loaded["loss_scale"], False
        optimizer.first_closure_call_this_step = optimizer.dynamic_loss_scale = False

        def put_back(model, optimizer):
            own = {id(parameter): name for name, parameter in model.virtual_named_parameters()}
            with torch.no_grad():
                for parameter, copy in optimizer.pairs():
                    copy.copy_(loaded["copies"][own[id(parameter)]])

        model.register_post_partition_hook(put_back)

    @smp.step
    def train_step(model, optimizer, x, y):
        loss = loss_of(model, x, y)
        optimizer.backward(loss)
        return loss

    losses = []
    for index in steps:
        optimizer.zero_grad()
        losses.append(train_step(model, optimizer, *batch(index)).reduce_mean().item())
        optimizer.step()
        optimizer.loss_scale = optimizer.helper.loss_scale * 2
    names = {id(parameter): name for name, parameter in model.virtual_named_parameters()}
    saved = {
        "model": model.local_state_dict() if partial else model.state_dict(),
        "optimizer": optimizer.local_state_dict() if partial else optimizer.state_dict(),
        "copies": {names[id(parameter)]: copy for parameter, copy in optimizer.pairs()},
        "loss_scale": optimizer.loss_scale,
    }
    if loaded is not None:
        assert (optimizer.helper.first_closure_call_this_step, optimizer.helper.overflow) == (False, False)
        assert optimizer.helper.dynamic_loss_scale is False
    smp.shutdown()
    return losses, saved


def test_a_run_with_its_own_half_precision_goes_on():
    def resumed():
        first, saved = trained(range(3), partial=True)
        second, _ = trained(range(3, 6), saved, partial=True)
        whole, _ = trained(range(6), partial=True)
        return first + second, whole, saved

    for losses, whole, saved in run_ranks(resumed, 2):
        assert losses == whole
        assert saved["loss_scale"] == 32.0
        assert "first.0.weight" in saved["model"] or "head.weight" in saved["model"]
        assert not any(name.startswith("module.") for name in saved["model"])
        kept = saved["optimizer"]["state"]
        assert {value["exp_avg"].dtype for value in kept.values()} == {torch.float32}
