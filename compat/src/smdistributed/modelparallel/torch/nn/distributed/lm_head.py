"""``smp.nn.DistributedTransformerLMHead``.

Shapes: N samples, S positions, H hidden channels, V words.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from smdistributed.modelparallel.torch.nn.distributed.base import DistributedModule, named_inputs
from smdistributed.modelparallel.torch.nn.distributed.embedding import DistributedEmbedding
from smdistributed.modelparallel.torch.nn.distributed.first_weights import FirstWeights
from smdistributed.modelparallel.torch.nn.distributed.linear import DistributedLinear
from smdistributed.modelparallel.torch.nn.distributed.output import Activation
from smdistributed.modelparallel.torch.nn.distributed.transformer import DistributedTransformer


class DistributedTransformerLMHead(DistributedModule):
    """A transformer with embeddings of words and positions, and a head for language models.

    Args:
        num_layers: for this and what is not named here see `DistributedTransformer`.
        add_lm_head: map the result to words, by the weight of their embedding, without bias.
        distribute_embedding: each rank has some words; else every rank has all of them.
    """

    inputs = (
        ("input_ids", "attention_mask", "token_type_ids", "position_ids", "labels"),
        (
            "input_ids",
            "attention_mask",
            "token_type_ids",
            "position_ids",
            "cross_states",
            "cross_mask",
            "labels",
        ),
    )

    def __init__(
        self,
        num_layers: int = 12,
        num_attention_heads: int = 32,
        attention_head_size: int = 32,
        hidden_size: int = 1024,
        intermediate_size: int = 4096,
        vocab_size: int = 30522,
        num_positions: int = 1024,
        attention_dropout_prob: float = 0.1,
        hidden_dropout_prob: float = 0.1,
        activation: Activation = "gelu",
        layernorm_epsilon: float = 1e-5,
        num_token_types: int = 0,
        causal_mask_size: int | None = None,
        add_cross_attention: bool = False,
        add_lm_head: bool = True,
        initializer_range: float = 0.02,
        use_normal_initialization: bool = False,
        pre_layernorm: bool = False,
        post_layernorm: bool = True,
        *,
        distribute_embedding: bool = False,
        **kwargs: Any,
    ):
        super().__init__()
        self.causal_mask_size, self.add_cross_attention = causal_mask_size, add_cross_attention
        std = initializer_range if use_normal_initialization else None
        first = FirstWeights(std=std, zero=bool(kwargs.get("zero_init", False)))
        # Cut by words, the head needs no sum over ranks, and the loss no gathered logits.
        words = "rows" if distribute_embedding else "none"
        self.word_embedding = DistributedEmbedding(vocab_size, hidden_size, cut=words, first=first)
        self.position_embedding = DistributedEmbedding(num_positions, hidden_size, cut="none", first=first)
        self.token_type_embedding = None
        if num_token_types > 0:
            self.token_type_embedding = DistributedEmbedding(
                num_token_types, hidden_size, cut="none", first=first
            )
        self.dropout = nn.Dropout(hidden_dropout_prob)
        self.transformer = DistributedTransformer(
            num_layers=num_layers,
            num_attention_heads=num_attention_heads,
            attention_head_size=attention_head_size,
            hidden_size=hidden_size,
            intermediate_size=intermediate_size,
            attention_dropout_prob=attention_dropout_prob,
            hidden_dropout_prob=hidden_dropout_prob,
            activation=activation,
            layernorm_epsilon=layernorm_epsilon,
            initializer_range=initializer_range,
            use_normal_initialization=use_normal_initialization,
            causal_mask_size=causal_mask_size,
            add_cross_attention=add_cross_attention,
            pre_layernorm=pre_layernorm,
            post_layernorm=post_layernorm,
            **kwargs,
        )
        self.lm_head = None
        if add_lm_head:
            cut = "output" if distribute_embedding else "none"
            self.lm_head = DistributedLinear(hidden_size, vocab_size, bias=False, cut=cut, device="meta")
            self.lm_head.weight = self.word_embedding.weight

    def forward(self, *inputs: Any) -> Any:
        """Runs the model.

        Args:
            inputs: ``(input_ids, attention_mask, token_type_ids, position_ids, labels)``, or with
                `add_cross_attention` ``(input_ids, attention_mask, token_type_ids, position_ids,
                cross_states, cross_mask, labels)``, as one tuple; what is None or missing is not used.
                Numbers of words, types and positions are (N, S); the mask is (N, S), 1 where a position is
                masked; the mask of cross states is added to scores, (N, 1, 1, T).

        Returns:
            Logits (N, S, V); or hidden states (N, S, H) without a head. With labels ``(loss, logits)``: the
            mean cross entropy of the next words with `causal_mask_size`, else of the words; labels of -100
        """
        cross = ("cross_states", "cross_mask") if self.add_cross_attention else ()
        names = ("input_ids", "attention_mask", "token_type_ids", "position_ids", *cross, "labels")
        given = named_inputs(self, inputs, names)
        hidden = self.dropout(self._embedded(given))
        mask = given["attention_mask"]
        if mask is not None:
            mask = mask[:, None, None, :].to(hidden.dtype) * torch.finfo(hidden.dtype).min
        if self.add_cross_attention:
            hidden = self.transformer((hidden, given["cross_states"], mask, given["cross_mask"]))[0]
        else:
            hidden = self.transformer((hidden, mask))[0]
        if self.lm_head is None:
            return hidden
        logits = self.lm_head(hidden.to(self.lm_head.weight.dtype))
        labels = given["labels"]
        return logits if labels is None else (self._loss(logits, labels), logits)

    def _embedded(self, given: dict[str, Any]) -> Tensor:
        words, positions, types = given["input_ids"], given["position_ids"], given["token_type_ids"]
        if positions is None:
            positions = torch.arange(words.shape[1], device=words.device)[None]
        hidden: Tensor = self.word_embedding(words) + self.position_embedding(positions)
        if types is not None and self.token_type_embedding is not None:
            hidden = hidden + self.token_type_embedding(types)
        return hidden

    def _loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        if self.causal_mask_size is not None:
            logits, labels = logits[:, :-1], labels[:, 1:]
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())
