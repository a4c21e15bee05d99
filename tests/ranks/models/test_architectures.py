"""Unmodified architectures of Hugging Face transformers train over several ranks as in one process."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transparency import Case, Recipe, differences

from shardwright.testing import run_ranks

pytest.importorskip("transformers")

from architectures import ARCHITECTURES
from architectures_further import FURTHER_ARCHITECTURES

pytestmark = [pytest.mark.sweep, pytest.mark.filterwarnings("ignore")]  # transformers warns a lot

SHARED = {"microbatches": 2, "profile": "estimated"}
ENVIRONMENT = {"TRANSFORMERS_VERBOSITY": "error"}

# They round to float32 inside; the order of sums turns into 1e-6 of a gradient of BLIP that is nearly zero.
ROUNDS = {"BLIP": 1e-4, "ProphetNet": 1e-6}
# Gradients grow a hundredfold from one step to the next, and so does what the order of sums makes of a bit.
GROWS = {"MobileNetV2": 1e-8}


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_an_architecture_trains_unmodified(name):
    recipe = ARCHITECTURES[name].recipe()
    found = run_ranks(differences, 2, recipe, Case(), timeout_s=60, env=ENVIRONMENT)
    assert found == [[], []]


@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_ranks_share_the_layers_of_an_architecture(name, num_ranks):
    """Three ranks get parts of different sizes."""
    recipe = ARCHITECTURES[name].recipe()
    config = SHARED | {"tensor_parallel_degree": num_ranks}
    case = Case(config=config, tolerance=(ROUNDS | GROWS).get(name), least_divided=0.5)
    found = run_ranks(divided_differences, num_ranks, recipe, case, timeout_s=120, env=ENVIRONMENT)
    assert found == [[]] * num_ranks


# Most of their parameters are those of a patch embedding, which text does not use.
MOSTLY_OF_PICTURES = {"FuyuForCausalLM": 0.25, "NeoMMEForMaskedLM": 0.45}


@pytest.mark.parametrize("name", FURTHER_ARCHITECTURES)
def test_ranks_share_the_layers_of_an_architecture_held_out(name):
    recipe = FURTHER_ARCHITECTURES[name].recipe()
    case = Case(
        config=SHARED | {"tensor_parallel_degree": 2}, least_divided=MOSTLY_OF_PICTURES.get(name, 0.5)
    )
    found = run_ranks(divided_differences, 2, recipe, case, timeout_s=120, env=ENVIRONMENT)
    assert found == [[], []]


FEW_KEY_HEADS = ("Gemma2", "GLM", "Llama", "Mistral", "Mixtral", "Phi3", "Qwen2", "Starcoder2")


@pytest.mark.parametrize("key_heads", [1, 2])
@pytest.mark.parametrize("name", FEW_KEY_HEADS)
def test_four_ranks_share_layers_with_fewer_key_heads(name, key_heads):
    """Each has a query head of its own, and shares the key head with others."""
    architecture = ARCHITECTURES[name]
    settings = {**architecture.settings, "num_key_value_heads": key_heads}
    recipe = replace(architecture, settings=settings).recipe()
    case = Case(config=SHARED | {"tensor_parallel_degree": 4}, least_divided=0.5)
    found = run_ranks(divided_differences, 4, recipe, case, timeout_s=120, env=ENVIRONMENT)
    assert found == [[]] * 4


def divided_differences(recipe: Recipe, case: Case) -> list[str]:
    with float64_throughout() if recipe.dtype is torch.float64 else nullcontext():
        return differences(recipe, case)


@contextmanager
def float64_throughout() -> Iterator[None]:
    """Keeps transformers from computing norms, softmax and losses of float64 tensors in float32."""
    to, to_float32, softmax = Tensor.to, Tensor.float, nn.functional.softmax

    def stays(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        asked = torch.float32 in args or kwargs.get("dtype") == torch.float32
        return self if self.dtype == torch.float64 and asked else to(self, *args, **kwargs)

    def own_softmax(x: Tensor, dim: Any = None, _stacklevel: int = 3, dtype: Any = None) -> Tensor:
        return softmax(x, dim, dtype=None if x.dtype == torch.float64 else dtype)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Tensor, "to", stays)
        patch.setattr(Tensor, "float", lambda self: self if self.dtype == torch.float64 else to_float32(self))
        patch.setattr(nn.functional, "softmax", own_softmax)
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)
        try:
            yield
        finally:
            torch.set_default_dtype(before)
