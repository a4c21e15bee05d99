"""Cases of section F with Hugging Face models: the peer cuts them by `torch.export`, ours as they are."""

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import pipelining as torch_pipelining

from limits_hand import difference, train_ours

__all__ = ["CASES"]

_VOCABULARY, _LENGTH, _BATCH, _MICROBATCHES = 64, 16, 8, 4
_SIZES = {
    "vocab_size": _VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "max_position_embeddings": 64,
    "use_cache": False,
}


class _Scores(nn.Module):
    """A Hugging Face model that returns its scores alone, because the peer passes tensors only."""

    def __init__(self, model: nn.Module, *, encoder_decoder: bool = False):
        super().__init__()
        self.model = model
        self._encoder_decoder = encoder_decoder

    def forward(self, ids: Tensor) -> Tensor:
        both = {"decoder_input_ids": ids} if self._encoder_decoder else {}
        return self.model(input_ids=ids, **both, return_dict=False)[0]


def _gpt_neox() -> nn.Module:
    from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

    return _Scores(GPTNeoXForCausalLM(GPTNeoXConfig(**_SIZES)))


def _llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return _Scores(LlamaForCausalLM(LlamaConfig(**_SIZES)))


def _t5(attention: str) -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=_VOCABULARY,
        d_model=32,
        d_kv=8,
        d_ff=64,
        num_layers=2,
        num_decoder_layers=2,
        num_heads=4,
        dropout_rate=0.0,
        use_cache=False,
        decoder_start_token_id=0,
        attn_implementation=attention,
    )
    return _Scores(T5ForConditionalGeneration(config), encoder_decoder=True)


def _loss(scores: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(scores.flatten(0, 1), targets.flatten())


def _made(build: Callable[[], nn.Module]) -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    torch.manual_seed(0)
    model = build()
    ids = torch.randint(0, _VOCABULARY, (_BATCH, _LENGTH + 1))
    return model, (ids[:, :-1].contiguous(), ids[:, 1:].contiguous())


def _peer(build: Callable[[], nn.Module], split_at: str) -> float:
    """Cuts at one block, as the peer's tutorial does, and trains with 1F1B."""
    model, (inputs, targets) = _made(build)
    plain, rank = copy.deepcopy(model), dist.get_rank()
    pipe = torch_pipelining.pipeline(
        model,
        mb_args=(inputs.chunk(_MICROBATCHES)[0],),
        split_spec={split_at: torch_pipelining.SplitPoint.BEGINNING},
    )
    stage = pipe.build_stage(rank, torch.device("cpu"))
    schedule = torch_pipelining.Schedule1F1B(stage, _MICROBATCHES, loss_fn=_loss)
    if rank == 0:
        schedule.step(inputs)
    else:
        schedule.step(target=targets)
    for x, y in zip(inputs.chunk(_MICROBATCHES), targets.chunk(_MICROBATCHES), strict=True):
        (_loss(plain(x), y) / _MICROBATCHES).backward()
    wanted = {name: p.grad for name, p in plain.named_parameters()}
    return difference({name: p.grad for name, p in stage.submod.named_parameters()}, wanted)


def _ours(build: Callable[[], nn.Module]) -> float:
    model, batch = _made(build)

    def loss(model: Any, x: Tensor, y: Tensor) -> Tensor:
        return _loss(model(x), y)

    return train_ours(model, loss, batch)


CASES = {
    "Hugging Face GPT-NeoX": (
        lambda: _peer(_gpt_neox, "model.gpt_neox.layers.2"),
        lambda: _ours(_gpt_neox),
    ),
    "Hugging Face Llama": (lambda: _peer(_llama, "model.model.layers.2"), lambda: _ours(_llama)),
    "Hugging Face T5, default attention": (
        lambda: _peer(lambda: _t5("sdpa"), "model.decoder.block.0"),
        lambda: _ours(lambda: _t5("sdpa")),
    ),
    "Hugging Face T5, eager attention": (
        lambda: _peer(lambda: _t5("eager"), "model.decoder.block.0"),
        lambda: _ours(lambda: _t5("eager")),
    ),
}
"""For each case, the peer's attempt and ours; they return the largest difference from one process."""
