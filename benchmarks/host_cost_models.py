"""Small models whose steps are mostly the host's work, by name: `model_of`.

===================  ======================================================================================
``tiny 8``           8 blocks of Linear(64) and Tanh; any number
``tiny 8 + 4``       the same, with 4 operations outside of all blocks before each of them
``GPT-2``            4 layers of width 64, labels and a mask; ``Llama``, ``OPT`` and ``T5`` alike
``conv net``         four convolutions with batch normalisation on pictures of 16 x 16
===================  ======================================================================================
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models import Classifier, ConvBlock, Layered, Task

__all__ = ["Model", "model_of"]

Batch = dict[str, Tensor]

_WIDTH, _VOCABULARY, _LENGTH, _PADDED = 64, 128, 32, 4


@dataclass(frozen=True, slots=True)
class Model:
    """What is trained.

    Attributes:
        name: as given to `model_of`.
        build: makes it; the same on every rank.
        batch: makes a batch of a number of rows, from a seed.
        loss: of the model, plain or wrapped, and a batch; a mean over rows.
        blocks: the parts that FSDP2 shards one by one.
        checkpoint: has the model keep no activations within its blocks.
    """

    name: str
    build: Callable[[], nn.Module]
    batch: Callable[[int, int], Batch]
    loss: Callable[[Any, Batch], Tensor]
    blocks: Callable[[nn.Module], list[nn.Module]]
    checkpoint: Callable[[nn.Module], None]

    def task(self, num_rows: int) -> Task:
        """The same for `peer_pipelining.Peer`; of layered models alone."""

        def data() -> tuple[Tensor, Tensor]:
            batch = self.batch(num_rows, 0)
            return batch["x"], batch["y"]

        loss = F.cross_entropy if self.name == "conv net" else F.mse_loss
        return Task(self.name, self.build, data, loss)  # type: ignore[arg-type]

    @property
    def is_layered(self) -> bool:
        """torch.distributed.pipelining takes it with stages made by hand."""
        return self.name == "conv net" or (self.name.startswith("tiny ") and "+" not in self.name)


def model_of(name: str) -> Model:
    """A model by its name: see above."""
    if name.startswith("tiny "):
        blocks, _, between = name.removeprefix("tiny ").partition(" + ")
        return _tiny(name, int(blocks), int(between or 0))
    if name == "conv net":
        return _conv_net()
    return _language_model(name)


# ---- layers


class Apart(Layered):
    """Operations of its own before each layer."""

    def __init__(self, layers: list[nn.Module], between: int):
        super().__init__(layers)
        self.between = between

    def forward(self, x: Tensor) -> Tensor:
        """As the class says."""
        for layer in self.layers:
            for _ in range(self.between):
                x = x * 0.99
            x = layer(x)
        return x


class Checkpointed(nn.Module):
    """A layer that is run again in the backward."""

    def __init__(self, layer: nn.Module):
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        """As the class says."""
        return torch.utils.checkpoint.checkpoint(self.layer, x, use_reentrant=False)  # type: ignore[no-any-return]


def _tiny(name: str, num_blocks: int, between: int) -> Model:
    def build() -> nn.Module:
        torch.manual_seed(0)
        layers: list[nn.Module] = [
            nn.Sequential(nn.Linear(_WIDTH, _WIDTH), nn.Tanh()) for _ in range(num_blocks)
        ]
        return Apart(layers, between) if between else Layered(layers)

    def batch(num_rows: int, seed: int) -> Batch:
        generator = torch.Generator().manual_seed(seed)
        shape = (num_rows, _WIDTH)
        return {name: torch.randn(shape, generator=generator) for name in "xy"}

    return Model(name, build, batch, _layered_loss(F.mse_loss), _layers, _checkpoint_layers)


def _conv_net() -> Model:
    def build() -> nn.Module:
        torch.manual_seed(0)
        channels = (3, 16, 16, 32, 32)
        blocks: list[nn.Module] = [
            ConvBlock(channels[i], channels[i + 1], pool=bool(i % 2)) for i in range(len(channels) - 1)
        ]
        return Layered(blocks, last=Classifier(channels[-1], 10))

    def batch(num_rows: int, seed: int) -> Batch:
        generator = torch.Generator().manual_seed(seed)
        pictures = torch.randn(num_rows, 3, 16, 16, generator=generator)
        return {"x": pictures, "y": torch.randint(0, 10, (num_rows,), generator=generator)}

    return Model("conv net", build, batch, _layered_loss(F.cross_entropy), _layers, _checkpoint_layers)


def _layered_loss(loss: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Any, Batch], Tensor]:
    return lambda model, batch: loss(model(batch["x"]), batch["y"])


def _layers(model: nn.Module) -> list[nn.Module]:
    return list(model.get_submodule("layers").children())


def _checkpoint_layers(model: nn.Module) -> None:
    layers = model.get_submodule("layers")
    assert isinstance(layers, nn.ModuleList)
    for i, layer in enumerate(layers):
        layers[i] = Checkpointed(layer)


# ---- language models


def _language_model(name: str) -> Model:
    def build() -> nn.Module:
        import transformers

        torch.manual_seed(0)
        kind, settings = _KINDS[name]
        config = getattr(transformers, f"{kind}Config")(vocab_size=_VOCABULARY, use_cache=False, **settings)
        suffix = {"GPT2": "LMHeadModel", "T5": "ForConditionalGeneration"}.get(kind, "ForCausalLM")
        model: nn.Module = getattr(transformers, f"{kind}{suffix}")(config)
        return model.train()

    def batch(num_rows: int, seed: int) -> Batch:
        generator = torch.Generator().manual_seed(seed)
        tokens = torch.randint(3, _VOCABULARY, (num_rows, _LENGTH), generator=generator)
        mask = torch.ones_like(tokens)
        mask[:, -_PADDED:] = 0  # in each row alike, so microbatches count alike in a plain loop
        return {"input_ids": tokens, "attention_mask": mask, "labels": tokens.where(mask > 0, -100)}

    def checkpoint(model: nn.Module) -> None:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})  # type: ignore[operator]

    return Model(name, build, batch, lambda model, given: model(**given).loss, _modules_in_lists, checkpoint)


def _modules_in_lists(model: nn.Module) -> list[nn.Module]:
    return [layer for each in model.modules() if isinstance(each, nn.ModuleList) for layer in each]


_DECODER = {
    "hidden_size": _WIDTH,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 2 * _LENGTH,
}
_GPT2 = {"n_embd": _WIDTH, "n_layer": 4, "n_head": 4, "n_positions": 2 * _LENGTH}
_OPT = {"ffn_dim": 4 * _WIDTH, "word_embed_proj_dim": _WIDTH, "dropout": 0.0, "layerdrop": 0.0}
_T5 = {"d_model": _WIDTH, "d_kv": 16, "d_ff": 4 * _WIDTH, "num_layers": 2, "num_decoder_layers": 2}
_KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "GPT-2": ("GPT2", {**_GPT2, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}),
    "Llama": ("Llama", {**_DECODER, "intermediate_size": 4 * _WIDTH}),
    "OPT": ("OPT", {**_DECODER, **_OPT}),
    "T5": ("T5", {**_T5, "num_heads": 4, "dropout_rate": 0.0, "decoder_start_token_id": 0}),
}
