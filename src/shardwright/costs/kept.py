"""The activations that a block keeps for its backward: below in 16 bits, twice as much in 32.

After Korthikanti et al. 2022, arXiv:2205.05198, with the actual key heads, MLP widths and experts::

    tokens * (10 h / (t or 1) + (8 h + 16 h + 5 a s) / t)      for h wide blocks with MLPs four times as wide
"""

import numpy as np

from shardwright.costs.inputs import Numbers, Options, Recompute
from shardwright.costs.shape import Shape

__all__ = ["kept_bytes", "tokens_of", "whole_block_bytes"]

_WHOLE = 10  # bytes of a token and hidden element that tensor parallelism leaves whole
_SCORES = 5  # bytes of a token, head and key


def kept_bytes(shape: Shape, options: Options) -> Numbers:
    """Bytes that a mean block keeps for the backward of one microbatch, wherever they are."""
    inputs = options.width * tokens_of(shape, options) * shape.hidden / _divided(options)
    kept = _block_bytes(shape, options, scores=options.recompute != Recompute.SELECTIVE)
    share = options.recomputed(shape.layers)
    return share * inputs + (1 - share) * kept


def whole_block_bytes(shape: Shape, options: Options) -> Numbers:
    """Bytes of a mean block when nothing of it is left to be computed again."""
    return _block_bytes(shape, options, scores=True)


def tokens_of(shape: Shape, options: Options) -> Numbers:
    """Tokens of a microbatch on a rank."""
    return options.microbatch * shape.sequence / options.context


def _block_bytes(shape: Shape, options: Options, *, scores: Numbers) -> Numbers:
    attention = (1 + shape.cross) * 2 * (shape.queries + shape.keys + shape.values + shape.outputs)
    mlp = 4 * shape.ffn_of_token * (1 + shape.gated)
    kept_scores = np.where(np.logical_and(scores, options.flash == 0), _SCORES, 0)
    of_scores = (1 + shape.cross) * kept_scores * shape.heads * shape.sequence / options.context
    # The narrow vectors of latent attention, before and behind their norms.
    whole = _WHOLE * shape.hidden / _divided(options) + 4 * shape.latent_width
    return (
        options.width
        / 2
        * tokens_of(shape, options)
        * (whole + (attention + mlp + of_scores) / options.tensor)
    )


def _divided(options: Options) -> Numbers:
    """Over how many ranks the residual stream is divided."""
    return np.where(options.sequence_parallel > 0, options.tensor, 1.0)
