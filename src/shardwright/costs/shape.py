"""A transformer as the closed forms see it: numbers, or arrays with an entry for each model."""

from dataclasses import asdict, dataclass, fields

import numpy as np

from shardwright.catalogue import Transformer
from shardwright.costs.inputs import Columns, Numbers


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape(Columns):
    """A transformer.

    Attributes:
        gated: 1 where the MLP has three products.
        causal: 1 where tokens attend to those before them alone.
        expert_groups: groups of the experts, of which those of a token lie in `groups_per_token`.
        shared_ffn: width of the MLP that every token takes beside its experts.
        dense: share of the blocks that have one MLP in place of experts; they are the first.
        query_rank: width of the vector that queries are made of; 0: of the residual stream.
        key_rank: width of the vector that keys and values are made of; 0: of the residual stream.
        rotary_width: part of a head whose keys, made beside that vector, are one for all heads.
        value_width: width of a head of values; 0: as of keys.
        window: tokens that one attends to in a share of the blocks.
        cross: share of the blocks that attend to an encoder, too.
        tied: 1 where the head is the embedding.
        trained: share of the parameters that is trained; the others are frozen, as beside adapters.
    """

    layers: Numbers
    hidden: Numbers
    heads: Numbers
    head_width: Numbers
    key_heads: Numbers
    ffn: Numbers
    vocabulary: Numbers
    sequence: Numbers
    gated: Numbers = 0.0
    causal: Numbers = 1.0
    experts: Numbers = 1.0
    experts_per_token: Numbers = 1.0
    expert_groups: Numbers = 1.0
    groups_per_token: Numbers = 1.0
    shared_ffn: Numbers = 0.0
    dense: Numbers = 0.0
    dense_ffn: Numbers = 0.0
    query_rank: Numbers = 0.0
    key_rank: Numbers = 0.0
    rotary_width: Numbers = 0.0
    value_width: Numbers = 0.0
    window: Numbers = 0.0
    windowed: Numbers = 0.0
    cross: Numbers = 0.0
    tied: Numbers = 1.0
    trained: Numbers = 1.0

    @property
    def flops_per_token(self) -> Numbers:
        """Of forward and backward, as model FLOPs utilisation counts them.

        Six for each parameter of a product that a token takes, and twelve for each score and component of a
        head, masked or not, inside of a window. Source: Chowdhery et al. 2022, appendix B. A frozen parameter
        has no gradient, and takes two less.
        """
        taken = self.attention_parameters + self.latent_parameters + self._mlp(self.ffn_of_token)
        near = np.minimum(self.window, self.sequence)
        seen = (1 - self.windowed) * self.sequence + self.windowed * near
        scores = (1 + self.cross) * seen * (self.queries + self.outputs)
        frozen = (1 - np.asarray(self.trained)) * (self.layers * taken + self.hidden * self.vocabulary)
        return 6 * (self.layers * (taken + scores) + self.hidden * self.vocabulary) - 2 * frozen

    @classmethod
    def of(cls, model: Transformer, *, sequence: int | None = None, trained: float = 1.0) -> "Shape":
        layers = model.layers + model.encoder_layers
        alike = {f.name: float(getattr(model, f.name)) for f in fields(cls) if hasattr(model, f.name)}
        if model.latent is not None:
            alike |= {name: float(value) for name, value in asdict(model.latent).items()}
        return cls(
            **alike
            | {
                "layers": float(layers),
                "key_heads": float(model.key_heads if model.latent is None else model.heads),
                "sequence": float(sequence or model.sequence),
                "trained": trained,
                "dense": model.dense_layers / layers,
                "windowed": model.windowed_layers / layers,
                "cross": model.layers / layers if model.encoder_layers else 0.0,
            }
        )

    @property
    def queries(self) -> Numbers:
        return self.heads * self.head_width

    @property
    def keys(self) -> Numbers:
        return self.key_heads * self.head_width

    @property
    def value_head(self) -> Numbers:
        """Width of a head of values."""
        return np.where(np.asarray(self.value_width) > 0, self.value_width, self.head_width)

    @property
    def values(self) -> Numbers:
        return self.key_heads * self.value_head

    @property
    def outputs(self) -> Numbers:
        """Width of what attention makes: a value for each head of queries."""
        return self.heads * self.value_head

    @property
    def latent_width(self) -> Numbers:
        """Width of the vectors that queries, keys and values are made of; 0: of the residual stream."""
        return self.query_rank + self.key_rank + np.where(np.asarray(self.key_rank) > 0, self.rotary_width, 0)

    @property
    def latent_parameters(self) -> Numbers:
        """Parameters of the products that make these, which every tensor parallel rank has whole."""
        return self.hidden * self.latent_width

    @property
    def attention_parameters(self) -> Numbers:
        """Parameters of the products around attention in a mean block, without `latent_parameters`."""
        into = self.query_source * self.queries + self.key_source * self.made_keys
        return (1 + self.cross) * (into + self.outputs * self.hidden)

    @property
    def query_source(self) -> Numbers:
        """Width of what queries are made of."""
        return np.where(np.asarray(self.query_rank) > 0, self.query_rank, self.hidden)

    @property
    def key_source(self) -> Numbers:
        """Width of what keys and values are made of."""
        return np.where(np.asarray(self.key_rank) > 0, self.key_rank, self.hidden)

    @property
    def made_keys(self) -> Numbers:
        """Width of the keys and values that are made of it: the rotary part is there already."""
        there = np.where(np.asarray(self.key_rank) > 0, self.key_heads * self.rotary_width, 0)
        return self.keys + self.values - there

    @property
    def attended(self) -> Numbers:
        """Keys that a query of a mean block attends to, without what masks hide."""
        whole = self.sequence * (1 - 0.5 * self.causal)
        window = np.minimum(self.window, self.sequence)
        # The first tokens of a sample have fewer than a window before them.
        near = window * (1 - 0.5 * self.causal * window / self.sequence)
        return (1 - self.windowed) * whole + self.windowed * near

    @property
    def mlp_parameters(self) -> Numbers:
        return self._mlp(self.ffn)

    @property
    def ffn_of_token(self) -> Numbers:
        """Width of all MLPs of a mean block that a token takes."""
        sparse = self.ffn * self.experts_per_token + self.shared_ffn
        return (1 - self.dense) * sparse + self.dense * self.dense_ffn

    @property
    def block_parameters(self) -> Numbers:
        """Parameters of a mean block, without biases and norms."""
        return self.attention_parameters + self.latent_parameters + self.held_parameters(self.experts)

    def held_parameters(self, experts: Numbers) -> Numbers:
        """Parameters of a mean block's MLPs where so many of its experts are held."""
        sparse = self.shared_parameters + experts * self.mlp_parameters
        return (1 - self.dense) * sparse + self.dense * self.dense_parameters

    @property
    def dense_parameters(self) -> Numbers:
        """Parameters of the MLP of a block without experts."""
        return self._mlp(self.dense_ffn)

    @property
    def shared_parameters(self) -> Numbers:
        """Of a block with experts: parameters of the MLP that all tokens take, and of the router."""
        router = np.where(np.asarray(self.experts) > 1, self.hidden * self.experts, 0)
        return self._mlp(self.shared_ffn) + router

    def _mlp(self, width: Numbers) -> Numbers:
        return (2 + self.gated) * self.hidden * width

    @property
    def embedding_parameters(self) -> Numbers:
        """Parameters of the embedding of tokens, or of the head."""
        return self.vocabulary * self.hidden

    def table_parameters(self, pipeline: Numbers) -> Numbers:
        """Parameters of those on one of so many pipeline ranks."""
        both = (np.asarray(pipeline) == 1) & (np.asarray(self.tied) == 0)
        return np.where(both, 2.0, 1.0) * self.embedding_parameters
