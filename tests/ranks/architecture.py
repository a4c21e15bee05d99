"""Tiny, unmodified models of Hugging Face transformers, made from their configurations."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transparency import Recipe

__all__ = ["Architecture"]

VOCABULARY = 99
TEXT = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
SEQ2SEQ = {
    **{key: TEXT[key] for key in ("vocab_size", "max_position_embeddings", "pad_token_id", "bos_token_id")},
    "eos_token_id": 2,
    "decoder_start_token_id": 2,
    "forced_eos_token_id": None,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
}
VISION = {
    "image_size": 32,
    "patch_size": 8,
    "num_channels": 3,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_labels": 5,
}
SPEECH = {
    **TEXT,
    "conv_dim": (16, 16, 16),
    "conv_kernel": (10, 3, 3),
    "conv_stride": (5, 2, 2),
    "num_feat_extract_layers": 3,
    "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 4,
    "apply_spec_augment": False,
    "mask_time_prob": 0.0,
    "classifier_proj_size": 16,
    "num_labels": 5,
}


@dataclass(frozen=True)
class Architecture:
    """A model class and how to make a small one."""

    model: str
    feed: Callable[[int, int], dict[str, Tensor]]
    settings: dict[str, Any] = field(default_factory=dict)
    config: str | None = None
    dtype: torch.dtype = torch.float64
    loss: Callable[[Any], Tensor] = lambda output: output.loss
    tolerance: float | None = None

    def build(self) -> nn.Module:
        """A model with random weights and no random operations."""
        import transformers  # here, because only ranks need it: they have it from the fork server

        model_class = getattr(transformers, self.model)
        config_class = getattr(transformers, self.config) if self.config else model_class.config_class
        config = config_class(**self.settings)
        _switch_off_random_numbers(config)
        return model_class(config)

    def recipe(self) -> Recipe:
        """For `transparency.differences`."""
        tolerance = self.tolerance or (1e-10 if self.dtype is torch.float64 else 2e-5)
        return Recipe(
            build=self.build,
            batch=self.feed,
            loss=lambda model, batch: self.loss(model(**batch)),
            dtype=self.dtype,
            tolerance=tolerance,
            loss_tolerance=max(tolerance, 1e-6),
        )


def _switch_off_random_numbers(config: Any) -> None:
    for name, value in vars(config).items():
        if hasattr(value, "to_dict"):
            _switch_off_random_numbers(value)
        elif ("drop" in name or "jitter" in name) and isinstance(value, float):
            setattr(config, name, 0.0)
        elif "drop" in name and isinstance(value, list | tuple):
            setattr(config, name, [0.0] * len(value))


def tokens(batch_size: int, length: int) -> Tensor:
    return torch.randint(3, VOCABULARY, (batch_size, length))


def text(batch_size: int, length: int) -> dict[str, Tensor]:
    ids = tokens(batch_size, length)
    return {"input_ids": ids, "labels": ids}


def masked_text(batch_size: int, length: int) -> dict[str, Tensor]:
    """With padding on the right, so that the mask matters."""
    mask = torch.ones(batch_size, length, dtype=torch.int64)
    mask[:, -2:] = torch.randint(0, 2, (batch_size, 2)).sort(descending=True).values
    return {**text(batch_size, length), "attention_mask": mask}


def pairs(batch_size: int, length: int) -> dict[str, Tensor]:
    return {"input_ids": tokens(batch_size, length), "labels": tokens(batch_size, length - 3)}


def images(batch_size: int, _: int) -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(batch_size, 3, 32, 32), "labels": torch.randint(0, 5, (batch_size,))}


def only_images(batch_size: int, _: int) -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(batch_size, 3, 32, 32)}


def captioned_images(batch_size: int, length: int) -> dict[str, Tensor]:
    return {**only_images(batch_size, length), "input_ids": tokens(batch_size, length)}


def sounds(batch_size: int, _: int) -> dict[str, Tensor]:
    return {"input_values": torch.randn(batch_size, 600), "labels": torch.randint(0, 5, (batch_size,))}


def transcribed_sounds(batch_size: int, _: int) -> dict[str, Tensor]:
    return {"input_values": torch.randn(batch_size, 600), "labels": tokens(batch_size, 5)}


def decoder(model: str, *, dtype: torch.dtype = torch.float64, **settings: Any) -> Architecture:
    return Architecture(model, text, {**TEXT, **settings}, dtype=dtype)


def encoder(model: str, **settings: Any) -> Architecture:
    return Architecture(model, masked_text, {**TEXT, **settings})


def seq2seq(model: str, *, dtype: torch.dtype = torch.float64, **settings: Any) -> Architecture:
    return Architecture(model, pairs, {**SEQ2SEQ, **settings}, dtype=dtype)


def image_classifier(model: str, **settings: Any) -> Architecture:
    return Architecture(model, images, {**VISION, **settings})


def mixture(model: str, **settings: Any) -> Architecture:
    """Of experts, in float32: their grouped matrix product knows no other type on a CPU."""
    return decoder(model, dtype=torch.float32, **EXPERTS, **settings)
