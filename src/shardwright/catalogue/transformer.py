"""Transformers as numbers: their configuration, and the parameters that it makes."""

from dataclasses import dataclass
from typing import Literal

__all__ = ["Transformer"]

Positions = Literal["learned", "rotary", "alibi", "relative", "none"]

_RELATIVE_BUCKETS = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Transformer:
    """An architecture.

    Attributes:
        name: for display.
        layers: blocks; of an encoder-decoder, those of the decoder.
        hidden: width of the residual stream.
        heads: attention heads.
        vocabulary: entries of the embedding.
        sequence: tokens of a sample, as it was trained; entries of learned positions.
        ffn: width between the two products of the MLP.
        kv_heads: heads of keys and values; 0: as many as `heads`.
        head_size: width of a head; 0: ``hidden / heads``.
        gated: the MLP has a third product, whose result is multiplied.
        tied: the head is the embedding.
        positions: how tokens know where they are.
        attention_biases: of the products of queries, keys and values.
        output_biases: of the product after attention.
        mlp_biases: of the products of the MLP.
        head_biases: of the head.
        norm_biases: norms have a bias beside their scale.
        block_norms: norms of a block.
        embedding_norm: there is one behind the embedding.
        encoder_layers: blocks of an encoder; the decoder's then attend to it, too.
        experts: MLPs of a block, of which a token takes `experts_per_token`.
        experts_per_token: see there.
        causal: tokens attend to those before them alone.
        source: where the numbers are from.
    """

    name: str
    layers: int
    hidden: int
    heads: int
    vocabulary: int
    sequence: int
    ffn: int
    kv_heads: int = 0
    head_size: int = 0
    gated: bool = False
    tied: bool = True
    positions: Positions = "learned"
    attention_biases: bool = True
    output_biases: bool = True
    mlp_biases: bool = True
    head_biases: bool = False
    norm_biases: bool = True
    block_norms: int = 2
    embedding_norm: bool = False
    encoder_layers: int = 0
    experts: int = 1
    experts_per_token: int = 1
    causal: bool = True
    source: str = ""

    @property
    def head_width(self) -> int:
        """Width of a head."""
        return self.head_size or self.hidden // self.heads

    @property
    def key_heads(self) -> int:
        """Heads of keys and values."""
        return self.kv_heads or self.heads

    @property
    def num_parameters(self) -> int:
        """All parameters, those of experts that a token does not take too."""
        own = self.layers * self.block_parameters + self.encoder_layers * self.encoder_block_parameters
        return own + self.embedding_parameters + self.head_parameters + self._norm * self._final_norms

    @property
    def block_parameters(self) -> int:
        """Of a block; of an encoder-decoder, of the decoder's."""
        cross = self._attention + self._norm if self.encoder_layers else 0
        return self.encoder_block_parameters + cross

    @property
    def encoder_block_parameters(self) -> int:
        """Of a block that attends to its own sequence alone."""
        router = self.hidden * self.experts if self.experts > 1 else 0
        return self._attention + self.experts * self._mlp + router + self.block_norms * self._norm

    @property
    def embedding_parameters(self) -> int:
        """Of the embedding of tokens, of positions, and of the norm behind it."""
        found = self.vocabulary * self.hidden + self.embedding_norm * self._norm
        if self.positions == "learned":
            found += self.sequence * self.hidden
        if self.positions == "relative":
            found += _RELATIVE_BUCKETS * self.heads * (2 if self.encoder_layers else 1)
        return found

    @property
    def head_parameters(self) -> int:
        """Of the head, without those that it shares with the embedding."""
        own = 0 if self.tied else self.vocabulary * self.hidden
        return own + self.vocabulary * self.head_biases

    @property
    def _attention(self) -> int:
        queries, keys = self.heads * self.head_width, self.key_heads * self.head_width
        biases = self.attention_biases * (queries + 2 * keys) + self.output_biases * self.hidden
        return 2 * self.hidden * (queries + keys) + biases

    @property
    def _mlp(self) -> int:
        into = 1 + self.gated
        return (into + 1) * self.hidden * self.ffn + self.mlp_biases * (into * self.ffn + self.hidden)

    @property
    def _norm(self) -> int:
        return self.hidden * (1 + self.norm_biases)

    @property
    def _final_norms(self) -> int:
        return 2 if self.encoder_layers else 1
