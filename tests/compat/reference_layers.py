"""Transformer layers in plain PyTorch, as the documentation of ``smp.nn`` describes the distributed ones."""

import math
from collections import OrderedDict

import torch
import torch.nn.functional as F
from torch import nn


class PlainAttention(nn.Module):
    """All scores in the open; names as in the documentation, so that states fit both."""

    def __init__(self, *, heads, size, hidden, pre, post, causal=False, cross=False, eps=1e-5):
        super().__init__()
        self.heads, self.size, self.causal, self.cross = heads, size, causal, cross
        self.query, self.key, self.value = (nn.Linear(hidden, heads * size) for _ in range(3))
        self.dense = nn.Linear(heads * size, hidden)
        self.pre_layernorm = nn.LayerNorm(hidden, eps) if pre else None
        self.layernorm = nn.LayerNorm(hidden, eps) if post else None

    def forward(self, hidden, mask, cross_states=None, bias=0.0):
        states = self.pre_layernorm(hidden) if self.pre_layernorm else hidden
        other = cross_states if self.cross else states

        def heads(tensor):
            return tensor.unflatten(-1, (self.heads, self.size)).transpose(1, 2)

        query, key, value = heads(self.query(states)), heads(self.key(other)), heads(self.value(other))
        scores = query @ key.transpose(-1, -2) / math.sqrt(self.size) + bias
        if self.causal and not self.cross:
            length = scores.shape[-1]
            scores = scores.masked_fill(torch.ones(length, length).triu(1).bool(), -1e300)
        weights = torch.softmax(scores + mask, -1)
        result = self.dense((weights @ value).transpose(1, 2).flatten(2))
        return self.layernorm(result + hidden) if self.layernorm else result


class PlainOutput(nn.Module):
    def __init__(self, *, hidden, intermediate, pre, post, activation="gelu", eps=1e-5):
        super().__init__()
        self.dense1, self.dense2 = nn.Linear(hidden, intermediate), nn.Linear(intermediate, hidden)
        self.activation = F.gelu if activation == "gelu" else F.relu
        self.pre_layernorm = nn.LayerNorm(hidden, eps) if pre else None
        self.layernorm = nn.LayerNorm(hidden, eps) if post else None

    def forward(self, hidden):
        states = self.pre_layernorm(hidden) if self.pre_layernorm else hidden
        result = self.dense2(self.activation(self.dense1(states)))
        return self.layernorm(hidden + result) if self.layernorm else result


class PlainLayer(nn.Module):
    def __init__(self, *, heads, size, hidden, intermediate, pre, post, causal, cross, activation="gelu"):
        super().__init__()
        common = {"heads": heads, "size": size, "hidden": hidden, "pre": pre, "post": post}
        self.attention = PlainAttention(**common, causal=causal)
        if cross:
            self.cross_attention = PlainAttention(**common, cross=True)
        self.output = PlainOutput(
            hidden=hidden, intermediate=intermediate, pre=pre, post=post, activation=activation
        )
        self.cross = cross

    def forward(self, hidden, mask, cross_states=None, cross_mask=None):
        result = self.attention(hidden, mask)
        if self.cross:
            result = self.cross_attention(result, cross_mask, cross_states)
        return self.output(result)


class PlainTransformer(nn.Module):
    def __init__(self, num_layers, **sizes):
        super().__init__()
        self.seq_layers = nn.ModuleList([PlainLayer(**sizes) for _ in range(num_layers)])

    def forward(self, hidden, *others):
        for layer in self.seq_layers:
            hidden = layer(hidden, *others)
        return hidden


class PlainLMHead(nn.Module):
    def __init__(self, *, vocab, positions, types, num_layers, hidden, **sizes):
        super().__init__()
        self.word_embedding = nn.Embedding(vocab, hidden)
        self.position_embedding = nn.Embedding(positions, hidden)
        self.token_type_embedding = nn.Embedding(types, hidden)
        self.transformer = PlainTransformer(num_layers, hidden=hidden, **sizes)

    def state_dict(self, *args, **kwargs):
        state = super().state_dict(*args, **kwargs)
        return OrderedDict([*state.items(), ("lm_head.weight", state["word_embedding.weight"])])

    def forward(self, ids, masked, types, labels):
        hidden = self.word_embedding(ids) + self.position_embedding.weight[: ids.shape[1]]
        hidden = hidden + self.token_type_embedding(types)
        mask = torch.zeros(ids.shape, dtype=hidden.dtype).masked_fill(masked.bool(), -1e300)[:, None, None]
        logits = self.transformer(hidden, mask) @ self.word_embedding.weight.T
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()), logits
