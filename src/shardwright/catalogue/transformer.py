"""Transformers as numbers: their configuration, and the parameters that it makes."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Positions = Literal["learned", "rotary", "alibi", "relative", "none"]

_RELATIVE_BUCKETS = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentAttention:
    """Attention whose queries, keys and values are made of narrow vectors, as DeepSeek's (MLA).

    Attributes:
        query_rank: width of the vector that queries are made of; 0: they are made of the residual stream.
        key_rank: width of the vector that keys and values are made of.
        rotary_width: part of a head that has positions; its keys are one for all heads.
    """

    query_rank: int
    key_rank: int
    rotary_width: int
    value_width: int

    def parameters(self, hidden: int, heads: int, head_width: int) -> int:
        """Parameters of all products and of the norms of the narrow vectors."""
        queries = heads * head_width
        into = self.query_rank * (hidden + queries + 1) if self.query_rank else hidden * queries
        apart = heads * (head_width - self.rotary_width + self.value_width)
        keys = hidden * (self.key_rank + self.rotary_width) + self.key_rank * (apart + 1)
        return into + keys + heads * self.value_width * hidden


@dataclass(frozen=True, slots=True, kw_only=True)
class Transformer:
    """An architecture.

    Attributes:
        layers: blocks; of an encoder-decoder, those of the decoder.
        hidden: width of the residual stream.
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
        norm_biases: norms have a bias beside their scale.
        embedding_norm: there is one behind the embedding.
        encoder_layers: blocks of an encoder; the decoder's then attend to it, too.
        experts: MLPs of a block, of which a token takes `experts_per_token`.
        expert_groups: groups of the experts, of which those of a token lie in `groups_per_token`.
        router_biases: of the product that chooses experts.
        shared_ffn: width of an MLP that every token takes beside its experts; 0: there is none.
        dense_layers: first blocks that have one MLP in place of experts.
        latent: queries, keys and values are made of narrow vectors.
        head_norms: queries and keys have a norm over a head.
        sinks: each head has a score for attending to nothing.
        window: tokens that one attends to in `windowed_layers` of the blocks.
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
    expert_groups: int = 1
    groups_per_token: int = 1
    router_biases: bool = False
    shared_ffn: int = 0
    dense_layers: int = 0
    dense_ffn: int = 0
    latent: LatentAttention | None = None
    head_norms: bool = False
    sinks: bool = False
    window: int = 0
    windowed_layers: int = 0
    causal: bool = True
    source: str = ""

    @property
    def head_width(self) -> int:
        return self.head_size or self.hidden // self.heads

    @property
    def key_heads(self) -> int:
        return self.kv_heads or self.heads

    @property
    def num_parameters(self) -> int:
        """All parameters, those of experts that a token does not take too."""
        own = self.layers * self.block_parameters + self.encoder_layers * self.encoder_block_parameters
        own -= self.dense_layers * (self._experts(self.experts) - self._mlp(self.dense_ffn))
        return own + self.embedding_parameters + self.head_parameters + self._norm * self._final_norms

    @property
    def active_parameters(self) -> int:
        """Parameters in the products of a token: its experts alone, the head, and no embedding of inputs."""
        sparse = self.layers + self.encoder_layers - self.dense_layers
        idle = sparse * (self.experts - self.experts_per_token) * self._mlp(self.ffn)
        return self.num_parameters - idle - (0 if self.tied else self.vocabulary * self.hidden)

    @property
    def block_parameters(self) -> int:
        """Parameters of a block, with experts where there are any; with an encoder, of a decoder's block."""
        cross = self._attention + self._norm if self.encoder_layers else 0
        return self.encoder_block_parameters + cross

    @property
    def encoder_block_parameters(self) -> int:
        """Parameters of a block that attends to its own sequence alone."""
        return self._attention + self._experts(self.experts) + self.block_norms * self._norm

    @property
    def embedding_parameters(self) -> int:
        """Parameters of the embeddings of tokens and positions, and of the norm behind them."""
        found = self.vocabulary * self.hidden + self.embedding_norm * self._norm
        if self.positions == "learned":
            found += self.sequence * self.hidden
        if self.positions == "relative":
            found += _RELATIVE_BUCKETS * self.heads * (2 if self.encoder_layers else 1)
        return found

    @property
    def head_parameters(self) -> int:
        """Parameters of the head, without those that it shares with the embedding."""
        own = 0 if self.tied else self.vocabulary * self.hidden
        return own + self.vocabulary * self.head_biases

    @property
    def _attention(self) -> int:
        beside = self.head_norms * 2 * self.head_width + self.sinks * self.heads
        if self.latent is not None:
            return beside + self.latent.parameters(self.hidden, self.heads, self.head_width)
        queries, keys = self.heads * self.head_width, self.key_heads * self.head_width
        biases = self.attention_biases * (queries + 2 * keys) + self.output_biases * self.hidden
        return 2 * self.hidden * (queries + keys) + biases + beside

    def _experts(self, number: int) -> int:
        """Parameters of so many MLPs of a block, of the one that they share and of what chooses them."""
        router = (self.hidden + self.router_biases) * number if number > 1 else 0
        shared = self._mlp(self.shared_ffn) if self.shared_ffn else 0
        return number * self._mlp(self.ffn) + shared + router

    def _mlp(self, width: int) -> int:
        into = 1 + self.gated
        return (into + 1) * self.hidden * width + self.mlp_biases * (into * width + self.hidden)

    @property
    def _norm(self) -> int:
        return self.hidden * (1 + self.norm_biases)

    @property
    def _final_norms(self) -> int:
        return 2 if self.encoder_layers else 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """The work of one layer for one sample.

    Attributes:
        parameters: those that several layers use, on the first of them; frozen ones by the bytes of these.
        flops: of the forward's products; a multiply-add counts as two.
        moved: numbers that the forward reads and writes, parameters apart.
        kept: numbers that are kept for the backward.
        inputs: numbers that it reads from layers before: what recomputation keeps instead.
        crossing: numbers that go to later layers, this one's output and what passes it by.
        attention: FLOPs of fused attention, without what a causal mask hides.
        kernels: other kernels: a normalisation, an activation, an addition.
        product_moved: numbers that products read and write, half of them, parameters apart.
        collectives: of the ranks that share the layer, in a forward and backward; 0 where one has all of it.
        sent: numbers that one of them sends meanwhile.
        dispatch_s: seconds that Python takes for their operations, whatever the samples.
        frozen: of the parameters, those that it does not train.
    """

    name: str
    parameters: float
    flops: float
    moved: float
    kept: float
    inputs: float
    crossing: float
    attention: float = 0.0
    products: float = 1.0
    kernels: float = 3.0
    product_moved: float = 0.0
    collectives: float = 0.0
    sent: float = 0.0
    dispatch_s: float = 0.0
    frozen: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerChain:
    """A model that is cut between layers. With a tensor degree, layers are those of one rank of its group.

    Attributes:
        layers: in the order in which they are computed.
    """

    name: str
    layers: tuple[Layer, ...]
    sample: str = "sample"
    source: str = ""

    @property
    def num_parameters(self) -> int:
        return int(sum(layer.parameters for layer in self.layers))

    @property
    def flops(self) -> float:
        return sum(layer.flops + layer.attention for layer in self.layers)

    def column(self, name: str) -> Sequence[float]:
        return [getattr(layer, name) for layer in self.layers]
