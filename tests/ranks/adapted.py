"""Tiny models with adapters, trained plainly by PEFT and spread over ranks, and what is compared of them."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

import shardwright.torch as sw

__all__ = [
    "Kept",
    "batch",
    "gpt2",
    "llama",
    "loss_of",
    "optimizer_of",
    "outputs",
    "train_both",
    "train_each",
    "with_adapter",
]

WORDS, STEPS = 96, 2


def llama(**settings: Any) -> nn.Module:
    """A Llama of which each head and each rank may have a part."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    settings = {"vocab_size": WORDS, "max_position_embeddings": 64, **sizes, **heads, **settings}
    return LlamaForCausalLM(LlamaConfig(**settings))


def gpt2() -> nn.Module:
    """A GPT-2, which computes in its own type alone."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    sizes = {"vocab_size": WORDS, "n_positions": 64, "n_embd": 32, "n_layer": 4, "n_head": 4}
    return GPT2LMHeadModel(GPT2Config(**sizes, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0))


def with_adapter(base: nn.Module, kind: Any = None, **settings: Any) -> Any:
    """A model of PEFT, of LoRA or another kind, whose adapters change something from the beginning."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(1)
    usual = (
        {"r": 4, "target_modules": ["q_proj", "v_proj"], "init_lora_weights": False} if kind is None else {}
    )
    model = get_peft_model(base, (kind or LoraConfig)(**{**usual, "task_type": "CAUSAL_LM", **settings}))
    if kind is not None:
        for parameter in model.parameters():
            if parameter.requires_grad:
                nn.init.normal_(parameter, std=0.05)
    return model


def batch(step: int, *, samples: int = 8) -> Tensor:
    return torch.randint(WORDS, (samples, 12), generator=torch.Generator().manual_seed(step))


def loss_of(model: Any, ids: Tensor) -> Tensor:
    """That of transformers, in the type of the model."""
    logits = model(input_ids=ids).logits
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def optimizer_of(model: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)


class Kept(dict[str, Any]):
    """The losses of both, here of this replica's samples; how far weights and gradients are apart."""


def train_both(
    build: Callable[[], Any], settings: Mapping[str, Any], then: Callable[[Any, Any], Any] | None = None
) -> Kept:
    """Trains a model plainly and spread over ranks; what `then` finds of both, last."""
    plain = build().train()
    optimizer = optimizer_of(plain)
    expected = []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = loss_of(plain, batch(step))
        loss.backward()
        optimizer.step()
        expected.append(loss.item())
    sw.init({"microbatches": 2, "profile": "estimated", "run_dir": "off", **settings})
    try:
        model = sw.DistributedModel(build().train())
        optimizer = sw.DistributedOptimizer(optimizer_of(model))

        @sw.step
        def train(model: Any, ids: Tensor) -> Tensor:
            loss = loss_of(model, ids)
            model.backward(loss)
            return loss

        found = []
        for step in range(STEPS):
            optimizer.zero_grad()
            own = batch(step).chunk(sw.rdp_size())[sw.rdp_rank()]
            found.append(train(model, own).reduce_mean().item())
            optimizer.step()
        ids = {id(parameter) for parameter in model.parameters() if parameter.requires_grad}
        if (reducer := model.replicas._reducer) is not None:
            assert reducer.parameter_ids <= ids  # nothing of frozen weights is summed
        assert {id(parameter) for parameter in optimizer.state} <= ids
        wanted, gradients = dict(plain.named_parameters()), 0.0
        for name, parameter in model.local_named_parameters():
            if not parameter.requires_grad:
                assert parameter.grad is None, name
                continue
            own = parameter.grad.full() if hasattr(parameter.grad, "full") else parameter.grad
            gradients = max(gradients, apart(own, wanted[name].grad))
        kept = Kept(losses=found, expected=expected, gradients=gradients)
        trained = [name for name, each in plain.named_parameters() if each.requires_grad]
        state = model.some_of_state(trained)
        kept["weights"] = max(apart(state[name], wanted[name]) for name in trained)
        kept["states"] = sum(len(group["params"]) for group in optimizer.param_groups)
        if then is not None:
            kept["then"] = then(plain, model)
        return kept
    finally:
        sw.shutdown()


def train_each(cases: Mapping[str, tuple[Any, Any]], then: Any = None) -> dict[str, Kept]:
    """`train_both` of several models and settings, in the same processes."""
    found = {}
    for name, (build, settings) in cases.items():
        try:
            found[name] = train_both(build, settings, then)
        except Exception as error:
            error.add_note(f"This happened in the case {name!r}.")
            raise
    return found


def apart(found: Tensor, expected: Tensor) -> float:
    """The largest difference, of the largest number."""
    difference = (found.detach().double() - expected.detach().double()).abs().max()
    return float(difference / expected.detach().double().abs().max().clamp(min=0.01))


def outputs(model: Any) -> Tensor:
    model.eval()
    with torch.no_grad():
        return model(input_ids=batch(9)).logits
