"""A training step without a backward says so, once; an evaluation does not."""

import warnings

import pytest
import torch
from torch import nn

from shardwright.testing import run_ranks


def warned_about():
    import shardwright.torch as sw

    sw.init({"microbatches": 2, "profile": "estimated", "run_dir": "off"})
    model = sw.DistributedModel(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))

    @sw.step
    def forgetful(model, x):
        return model(x).square().mean()

    @sw.step
    @torch.no_grad()
    def evaluate(model, x):
        return model(x).square().mean()

    @sw.step
    def train(model, x):
        loss = model(x).square().mean()
        model.backward(loss)
        return loss

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
        import shardwright.torch as sw

        sw.init({"microbatches": 2, "profile": "estimated", "run_dir": "off"})
        model = sw.DistributedModel(nn.Linear(4, 4).requires_grad_(False))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            sw.step(lambda model, x: model(x))(model, torch.randn(4, 4))

    run_ranks(run, 1)
