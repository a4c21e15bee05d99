"""Attention that keeps no scores, for what no fused kernel computes: windows, dropout on CPUs.

A block of queries sees all its keys at once, so that its softmax is complete. Backward computes the block
again, with the same dropout. What is kept are queries, keys, values and the mask, as they came::

                 keys ──────────►
    queries   ┌ ▓▓                    rows 0 to 2: one block, which reads keys 0 to 2
       │      │ ▓▓▓
       ▼      ├ ─▓▓▓─                 rows 3 to 5: with a window of 3 positions, keys 1 to 5
              │   ▓▓▓

Shapes: B samples, H heads, Q queries, K keys, D channels of a query and a key, E channels of a value; R rows
of a block and C keys that it reads.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

# Scores of a block: some MiB, which stay in the cache of a core; a GPU needs more to be busy.
_SCORES_ON_CPU = 2**19
_SCORES_ON_GPU = 2**25
_LEAST_ROWS = 16


@dataclass(frozen=True, slots=True)
class Seen:
    """Which keys a query sees, by its position.

    Attributes:
        causal: those up to its own position.
        shift: position of the first query among the keys.
        window: so many at most, of which its own is the last; None for all. Only with `causal`.
        score_beyond: score of the other keys, to which a mask is added. A large negative number is not the
            same as minus infinity for a query that a mask hides all other keys from.
    """

    causal: bool = False
    shift: int = 0
    window: int | None = None
    score_beyond: float = float("-inf")

    def simplified(self, num_queries: int, num_keys: int) -> "Seen":
        """The same for so many queries and keys, without a bound that hides nothing."""
        if not self.causal:
            return self
        last = num_queries - 1 + self.shift
        window = self.window if self.window is not None and self.window <= last else None
        if window is None and self.shift >= num_keys - 1:
            return Seen()
        return replace(self, window=window)

    def keys(self, rows: range, num_keys: int) -> range:
        """The keys that some query of a block attends to."""
        if not self.causal or self.score_beyond > float("-inf"):
            return range(num_keys)
        first = 0 if self.window is None else max(0, rows.start + self.shift - self.window + 1)
        return range(first, max(first + 1, min(num_keys, rows.stop + self.shift)))

    def hidden(self, rows: range, keys: range, device: torch.device) -> Tensor | None:
        """(R, C), True where a query does not see a key; None where all see all."""
        if not self.causal:
            return None
        position_R1 = torch.arange(rows.start, rows.stop, device=device)[:, None] + self.shift
        key_C = torch.arange(keys.start, keys.stop, device=device)
        hidden_RC = key_C > position_R1
        if self.window is not None:
            hidden_RC |= key_C <= position_R1 - self.window
        return hidden_RC


def blockwise_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    scale: float,
    mask: Tensor | None = None,
    seen: Seen | None = None,
    dropout: float = 0.0,
    hidden_score: float = float("-inf"),
) -> Tensor:
    """Attends, with memory that grows linearly with the number of queries and keys.

    Scores and weights are float32 for types of 16 bits, and have the type of the queries otherwise. The
    weights take the type of the values before these are summed, as in plain attention.
    """
    if mask is not None:
        mask = mask[(None,) * (4 - mask.dim())]
    with torch.autocast(query.device.type, enabled=False):
        result: Tensor = _Blockwise.apply(  # type: ignore[no-untyped-call]
            query, key, value, mask, _How(scale, seen or Seen(), dropout, hidden_score)
        )
    return result


@dataclass(frozen=True, slots=True)
class _How:
    scale: float
    seen: Seen
    dropout: float
    hidden_score: float


class _Blockwise(torch.autograd.Function):
    """Keeps what it is given, and the state of the generator."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, how: _How
    ) -> Tensor:
        ctx.how = how
        ctx.generator = _generator_state(query.device) if how.dropout else None
        ctx.save_for_backward(query, key, value, mask)
        result = query.new_empty((*query.shape[:-1], value.shape[-1]), dtype=value.dtype)
        for rows in _blocks(query, key, how.seen):
            block = _Block(query, key, value, mask, how, rows)
            weights, kept = block.weights(), block.kept_share()
            dropped = weights if kept is None else weights * kept
            result[:, :, rows.start : rows.stop] = dropped.to(value.dtype) @ block.value
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        query, key, value, mask = ctx.saved_tensors
        how: _How = ctx.how
        (gradient,) = gradients
        d_query, d_key, d_value = torch.zeros_like(query), _sums(key), _sums(value)
        d_mask = torch.zeros_like(mask) if ctx.needs_input_grad[3] else None
        with torch.autocast(query.device.type, enabled=False), _drawing_again(query.device, ctx.generator):
            for rows in _blocks(query, key, how.seen):
                block = _Block(query, key, value, mask, how, rows)
                weights, kept = block.weights(), block.kept_share()
                d_out = gradient[:, :, rows.start : rows.stop]
                dropped = weights if kept is None else weights * kept
                keys = slice(block.keys.start, block.keys.stop)
                d_value[:, :, keys] += (dropped.to(value.dtype).mT @ d_out).to(d_value.dtype)
                d_weights = (d_out @ block.value.mT).to(weights.dtype)
                if kept is not None:
                    d_weights = d_weights * kept
                d_scores = weights * (d_weights - (d_weights * weights).sum(-1, keepdim=True))
                if d_mask is not None:
                    _add_to_mask(d_mask, d_scores, rows, block.keys)
                d_products = block.of_products(d_scores) * how.scale
                d_query[:, :, rows.start : rows.stop] = (d_products @ block.key).to(query.dtype)
                d_key[:, :, keys] += (d_products.mT @ block.query).to(d_key.dtype)
        return d_query, d_key.to(key.dtype), d_value.to(value.dtype), d_mask, None


class _Block:
    """Some queries, and the keys and values that they see.

    Attributes:
        query: (B, H, R, D), of the type of scores.
        key: (B, H, C, D), likewise.
        value: (B, H, C, E), of its own type.
    """

    __slots__ = ("_how", "_mask", "_rows", "key", "keys", "query", "value")

    def __init__(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, how: _How, rows: range
    ):
        self.keys = how.seen.keys(rows, key.shape[2])
        type_of_scores = _type_of_scores(query, key)
        self.query = query[:, :, rows.start : rows.stop].to(type_of_scores)
        self.key = key[:, :, self.keys.start : self.keys.stop].to(type_of_scores)
        self.value = value[:, :, self.keys.start : self.keys.stop]
        self._mask = None if mask is None else _part(mask, rows, self.keys)
        self._how = how
        self._rows = rows

    def weights(self) -> Tensor:
        """(B, H, R, C): the softmax of the scores."""
        scores = (self.query @ self.key.mT) * self._how.scale
        hidden = self._how.seen.hidden(self._rows, self.keys, scores.device)
        if hidden is not None:
            scores = scores.masked_fill(hidden, self._how.seen.score_beyond)
        hidden_score = self._how.hidden_score
        if self._mask is not None and self._mask.dtype is torch.bool:
            scores = torch.where(self._mask, scores, scores + hidden_score)
        elif self._mask is not None:
            scores = scores + self._mask
        weights = torch.softmax(scores, -1)
        if self._mask is not None and hidden_score == float("-inf"):
            sees_none = (scores == float("-inf")).all(-1, keepdim=True)
            weights = weights.masked_fill(sees_none, 0.0)
        return weights

    def of_products(self, d_scores: Tensor) -> Tensor:
        """(B, H, R, C): the gradient of the scores, where they come from products of queries and keys."""
        hidden = self._how.seen.hidden(self._rows, self.keys, d_scores.device)
        return d_scores if hidden is None else d_scores.masked_fill(hidden, 0.0)

    def kept_share(self) -> Tensor | None:
        """(B, H, R, C): 0 for a weight that is dropped, and the factor of the others; None for no dropout."""
        if not self._how.dropout:
            return None
        shape = (*self.query.shape[:-1], len(self.keys))
        return F.dropout(self.query.new_ones(shape), self._how.dropout)


def _blocks(query: Tensor, key: Tensor, seen: Seen) -> Iterator[range]:
    """Rows of each block: the same forward and backward, because dropout is drawn block by block."""
    heads, num_rows, num_keys = query.shape[0] * query.shape[1], query.shape[2], key.shape[2]
    scores = (_SCORES_ON_CPU if query.device.type == "cpu" else _SCORES_ON_GPU) // max(1, heads)
    size = scores // max(1, num_keys)
    if seen.window is not None and seen.score_beyond == float("-inf"):
        size = max(size, math.isqrt(scores) - seen.window)  # size * (size + window) scores at most
    size = min(max(1, num_rows), max(_LEAST_ROWS, size))
    for start in range(0, num_rows, size):
        yield range(start, min(start + size, num_rows))


def _type_of_scores(query: Tensor, key: Tensor) -> torch.dtype:
    return torch.promote_types(torch.promote_types(query.dtype, key.dtype), torch.float32)


def _part(mask: Tensor, rows: range, keys: range) -> Tensor:
    """What a mask, (B or 1, H or 1, Q or 1, K or 1), says of a block."""
    if mask.shape[2] > 1:
        mask = mask[:, :, rows.start : rows.stop]
    return mask[..., keys.start : keys.stop] if mask.shape[3] > 1 else mask


def _add_to_mask(d_mask: Tensor, d_scores: Tensor, rows: range, keys: range) -> None:
    part = _part(d_mask, rows, keys)
    part += d_scores.sum_to_size(part.shape).to(d_mask.dtype)


def _sums(tensor: Tensor) -> Tensor:
    """Zeros to which blocks add; float32 for types of 16 bits, which would lose small parts."""
    return torch.zeros_like(tensor, dtype=torch.promote_types(tensor.dtype, torch.float32))


def _generator_state(device: torch.device) -> Tensor:
    if device.type == "cpu":
        return torch.get_rng_state()
    return torch.get_device_module(device).get_rng_state(device)  # type: ignore[no-any-return]


@contextmanager
def _drawing_again(device: torch.device, state: Tensor | None) -> Iterator[None]:
    """Draws from a state of the generator, which is as before behind it."""
    if state is None:
        yield
        return
    devices = [] if device.type == "cpu" else [device]
    with torch.random.fork_rng(devices, device_type=device.type if devices else "cuda"):
        if devices:
            torch.get_device_module(device).set_rng_state(state, device)
        else:
            torch.set_rng_state(state)
        yield
