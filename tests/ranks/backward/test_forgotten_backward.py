"""A training step without a backward says so, once; an evaluation does not."""

import warnings

import pytest
import torch
from stacks import train as squares
from torch import nn
from torch.utils.checkpoint import checkpoint

import shardwright.torch as sw
from shardwright.errors import UsageError
from shardwright.testing import run_ranks


def warned_about():
    sw.init({"microbatches": 2, "profile": "estimated", "run_dir": "off"})
    model = sw.DistributedModel(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))

    @sw.step
    def forgetful(model, x):
        return model(x).square().mean()

    @sw.step
    @torch.no_grad()
    def evaluate(model, x):
        return model(x).square().mean()

    train = sw.step(squares)

    def evaluate_in_eval_mode(model, x):
        model.eval()
        forgetful(model, x)
        model.train()

    def evaluate_without_gradients(model, x):
        for without in (torch.no_grad, torch.inference_mode):
            with without():
                forgetful(model, x)

    def forget_again(model, x):
        forgetful(model, x)

    def forget(model, x):
        forgetful(model, x)

    found = {}
    for use in (train, evaluate, evaluate_in_eval_mode, evaluate_without_gradients, forget, forget_again):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            use(model, torch.randn(4, 4))
        found[use.__name__] = [str(warning.message) for warning in caught]
    return {name: texts for name, texts in found.items() if texts}


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_training_step_without_backward_is_pointed_out_once(num_ranks):
    first, *others = run_ranks(warned_about, num_ranks)
    assert list(first) == ["forget"]
    (text,) = first["forget"]
    assert "forgetful() ran the model in training mode" in text
    assert "model.backward(loss)" in text
    assert "model.eval()" in text
    assert others == [{}] * (num_ranks - 1)


def test_a_frozen_model_is_not_trained():
    def run():
        sw.init({"microbatches": 2, "profile": "estimated", "run_dir": "off"})
        model = sw.DistributedModel(nn.Linear(4, 4).requires_grad_(False))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            sw.step(lambda model, x: model(x))(model, torch.randn(4, 4))

    run_ranks(run, 1)


class KeepsItsLoss(nn.Module):
    """Its results do not lead to its loss."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x, how):
        if how == "reentrant":
            return checkpoint(lambda x: self.second(self.first(x)), x, use_reentrant=True).square().mean()
        loss = self.second(self.first(x)).square().mean()
        if how == "attribute":
            self.loss = loss
            return None
        if how == "parameter":
            return self.first.weight
        return Held(loss) if how == "object" else loss


class Held:
    """An object of the script's."""

    def __init__(self, loss):
        self.loss = loss


def loss_kept(model, x, how):
    result = model(x, how)
    if how == "attribute":
        return model.get_module().loss
    if how == "parameter":
        return result.square().mean()
    return result.loss if how == "object" else result


@pytest.mark.parametrize("how", ["reentrant", "attribute"])
def test_a_backward_outside_of_steps_is_refused_whatever_leads_to_it(how):
    """Only what the model returned was watched."""

    def called(how):
        sw.init({"pipeline_parallel_degree": 1, "run_dir": "off"})
        model = sw.DistributedModel(KeepsItsLoss())
        x = torch.ones(2, 4, requires_grad=True)

        @sw.step
        def train(model, x):
            model.backward(model(x, "reentrant"))

        for _ in range(2):  # steps go on, before and behind it
            train(model, x.detach().requires_grad_())
            assert all(p.grad is not None for p in model.parameters())
            model.zero_grad()
            with pytest.raises(UsageError, match="is outside of a step"):
                loss_kept(model, x, how).backward()
            assert all(p.grad is None for p in model.parameters())
        return True

    assert run_ranks(called, 2, how) == [True] * 2
