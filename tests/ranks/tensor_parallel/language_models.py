"""Small models of Hugging Face, unedited, in 64 bits from end to end."""

import warnings
from contextlib import contextmanager
from unittest import mock

import torch
from torch import Tensor

WORDS = 96
_SIZES = {
    "hidden_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 96,
    "vocab_size": WORDS,
    "max_position_embeddings": 32,
}
_NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
_GPT2 = {"n_embd": 48, "n_layer": 2, "n_head": 4, "vocab_size": WORDS, "n_positions": 32}
_GPT2_NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}

MODELS = {
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", _GPT2 | _GPT2_NO_DROPOUT),
    "gpt2 with dropout": ("GPT2LMHeadModel", "GPT2Config", _GPT2),
    "gpt2 odd": (
        "GPT2LMHeadModel",
        "GPT2Config",
        _GPT2 | _GPT2_NO_DROPOUT | {"n_embd": 45, "n_head": 5, "vocab_size": 97},
    ),
    "llama": ("LlamaForCausalLM", "LlamaConfig", _SIZES | {"num_key_value_heads": 2}),
    "llama with one key head": ("LlamaForCausalLM", "LlamaConfig", _SIZES | {"num_key_value_heads": 1}),
    "bert": ("BertForMaskedLM", "BertConfig", _SIZES | _NO_DROPOUT),
    "gpt_bigcode": ("GPTBigCodeForCausalLM", "GPTBigCodeConfig", _GPT2 | _GPT2_NO_DROPOUT),
    "gpt_neox": (
        "GPTNeoXForCausalLM",
        "GPTNeoXConfig",
        _SIZES | {"hidden_dropout": 0.0, "attention_dropout": 0.0},
    ),
    "bloom": (
        "BloomForCausalLM",
        "BloomConfig",
        {
            "hidden_size": 48,
            "n_layer": 2,
            "n_head": 4,
            "vocab_size": WORDS,
            "hidden_dropout": 0.0,
            "attention_dropout": 0.0,
        },
    ),
    "t5": (
        "T5ForConditionalGeneration",
        "T5Config",
        {
            "vocab_size": WORDS,
            "d_model": 48,
            "d_kv": 12,
            "d_ff": 96,
            "num_layers": 2,
            "num_heads": 4,
            "dropout_rate": 0.0,
            "decoder_start_token_id": 0,
        },
    ),
    "mixtral": (
        "MixtralForCausalLM",
        "MixtralConfig",
        _SIZES | {"num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    "mamba": (
        "MambaForCausalLM",
        "MambaConfig",
        {"hidden_size": 48, "num_hidden_layers": 2, "vocab_size": WORDS, "state_size": 8},
    ),
}


@contextmanager
def all_in_64_bits():
    """Keeps transformers from going to 32 bits in norms, softmax and losses."""
    to, softmax = Tensor.to, torch.nn.functional.softmax

    def to_(self, *args, **kwargs):
        if self.dtype == torch.float64 and (torch.float32 in args or kwargs.get("dtype") == torch.float32):
            return self
        return to(self, *args, **kwargs)

    def float_(self):
        return self if self.dtype == torch.float64 else to(self, torch.float32)

    def softmax_(x, dim=None, _stacklevel=3, dtype=None):
        return softmax(x, dim, dtype=None if x.dtype == torch.float64 else dtype)

    with (
        mock.patch.object(Tensor, "to", to_),
        mock.patch.object(Tensor, "float", float_),
        mock.patch.object(torch.nn.functional, "softmax", softmax_),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        yield


def build(name):
    """The model, in training, and a batch."""
    import transformers

    kind, config, sizes = MODELS[name]
    torch.manual_seed(0)
    config = getattr(transformers, config)(**sizes)
    config.use_cache = False
    # The kernel that multiplies all experts at once knows no 64 bits.
    config._experts_implementation = "eager"
    model = getattr(transformers, kind)(config).double().train()
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, WORDS, (3, 10), generator=generator)
    return model, {"input_ids": ids, "labels": ids.clone()}
