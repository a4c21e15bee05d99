"""Models without memory whose layers ranks share: each rank makes its part of the values of one process."""

import copy
from typing import Any

import pytest
import torch
from test_shared_layers import LanguageModel, Layer, language
from torch import Tensor, nn

from choices import combinations_of, in_sweep, thorough
from shardwright.testing import run_ranks

QUIET = {"run_dir": "off", "profile": "estimated", "microbatches": 2, "seed": 3}


class Model(LanguageModel):
    """Its layers redraw a weight that was drawn before, as those of GPT-2 do, and write through `data`."""

    def __init__(self) -> None:
        super().__init__(tied=True)
        self.apply(self._init_weights)

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.trunc_normal_(module.weight, std=0.02)
            nn.init.zeros_(module.bias) if module.bias is not None else None
        elif isinstance(module, nn.Embedding):
            module.weight.data.normal_(mean=0.0, std=0.02)
        elif isinstance(module, Layer):
            module.down.weight.data.normal_(mean=0.0, std=0.01)
        elif module is self:
            for layer in self.modules():
                if isinstance(layer, Layer):
                    nn.init.trunc_normal_(layer.up.weight, std=0.03)


def build(built: str) -> nn.Module:
    import shardwright.torch as sw

    torch.manual_seed(4)
    torch.set_default_dtype(torch.float64)
    try:
        if built == "meta":
            with torch.device("meta"):
                return Model()
        with sw.delay_param_initialization(enabled=built == "delayed"):
            return Model()
    finally:
        torch.set_default_dtype(torch.float32)


def training(settings: dict[str, Any], built: str, *, state: dict[str, Any] | None = None) -> Any:
    """Losses of two steps of AdamW, the first values, the last ones, and how many parameters are divided."""
    import shardwright.torch as sw
    from shardwright.torch.tensor_parallel.divided_tensor import DividedTensor

    sw.init({**QUIET, **settings})
    model = sw.DistributedModel(build(built))
    optimizer = sw.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-2))
    first: dict[str, Tensor] = {}
    model.register_post_partition_hook(lambda model, _: first.update(copy.deepcopy(model.state_dict())))
    if state is not None:
        result = model.load_state_dict(state)
        assert not result.missing_keys
        assert not result.unexpected_keys

    recipe = language()

    @sw.step
    def train(model: Any, batch: dict[str, Tensor]) -> Tensor:
        loss = recipe.loss(model, batch)
        model.backward(loss)
        return loss

    losses = []
    for number in range(2):
        torch.manual_seed(number)
        optimizer.zero_grad()
        losses.append(train(model, recipe.batch(4, 8)).reduce_mean().item())
        optimizer.step()
    divided = sum(isinstance(p, DividedTensor) for p in model.local_parameters())
    return losses, first, model.state_dict(), divided


LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "layers": (2, {"tensor_parallel_degree": 2}),
    "stages": (4, {"tensor_parallel_degree": 2, "pipeline_parallel_degree": 2}),
    "three parts": (3, {"tensor_parallel_degree": 3}),
    "replicas": (4, {"tensor_parallel_degree": 2, "pipeline_parallel_degree": 1}),
}


@pytest.mark.parametrize(
    ("layout", "built"),
    [
        *combinations_of(
            ["layers", "three parts", "replicas"], ["meta", "delayed"], kept=[("layers", "delayed")]
        ),
        thorough("stages", "meta"),
        in_sweep("stages", "delayed"),
    ],
)
def test_values_are_those_of_one_process(layout: str, built: str) -> None:
    ranks, settings = LAYOUTS[layout]
    ((losses, first, last, _),) = run_ranks(training, 1, {}, built)
    found = run_ranks(training, ranks, settings, built)
    assert max(divided for *_, divided in found) > 4
    for own_losses, own_first, own_last, _ in found:
        assert own_losses == pytest.approx(losses, rel=1e-12)
        assert own_first.keys() == first.keys() == own_last.keys()
        for name, value in first.items():
            assert torch.equal(own_first[name], value), name
            torch.testing.assert_close(own_last[name], last[name], rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("built", ["meta", in_sweep("delayed")])
def test_a_state_waits_for_the_parts(built: str) -> None:
    torch.manual_seed(9)
    state = Model().double().state_dict()
    settings = {"tensor_parallel_degree": 2}
    ((losses, _, last, _),) = run_ranks(training, 1, {}, "ordinary", state=state)
    for own_losses, first, own_last, divided in run_ranks(training, 2, settings, built, state=state):
        assert divided > 4
        assert all(torch.equal(first[name], value) for name, value in state.items())
        assert own_losses == pytest.approx(losses, rel=1e-12)
        for name, value in last.items():
            torch.testing.assert_close(own_last[name], value, rtol=1e-7, atol=1e-9)
