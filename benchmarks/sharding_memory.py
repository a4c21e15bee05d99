"""Section D of `sharding.py`: the memory that replicas save by sharing.

*States*: what a rank keeps of parameters, gradients and the optimizer's state, counted at the tensors,
against the formula.

*Largest model*: how many blocks of a GPT train within a limit for all ranks of a host together, which the
kernel keeps, against the same formula and what two small models take beside their states: a constant (the
processes, gradients under way) and something for each block (activations, objects of Python). Ranks are
forked from a server: what that one has imported does not count.
"""

from collections.abc import Callable, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from io import StringIO
from typing import Any

import torch

from check import Check
from memory_limit import MemoryLimit
from sharding_memory_ranks import Kept, kept_by_a_rank, train_inside
from sharding_ranks import GPT
from shardwright.config import Config
from shardwright.testing import run_ranks, run_ranks_outcomes

__all__ = ["Largest", "largest_checks", "largest_models", "state_check", "states"]

_RANKS = 4
_PRELOAD = ("shardwright.torch", "torch.distributed.tensor", "sharding_ranks")
# Gradients under way take as much in the small model as in the large ones.
_STATE_BLOCKS = 4
_SMALL_BLOCKS = 8, 24
_MIB = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Largest:
    """The largest models that train within a limit.

    Attributes:
        degree: of sharded data parallelism.
        beside_bytes: what all ranks take beside the states of the smaller of the small models.
        block_bytes: the same for each further block.
        block_states: states of a block on all ranks, in bytes.
        predicted: number of parameters.
        measured: number of parameters.
        kept_bytes: what all ranks have at their peak with that model, where freed memory is given back.
        default_bytes: the same with the default, where it is kept.
    """

    degree: int
    beside_bytes: int
    block_bytes: int
    block_states: int
    predicted: int
    measured: int
    kept_bytes: int
    default_bytes: int


# ---- states ----


def states(*, quick: bool) -> dict[str, tuple[Kept, Kept]]:
    """What the rank that is farthest from the formula keeps, and the formula, for each setting."""
    found = {}
    for degree in (1, 2, 4):
        for shares_state in (False, True):
            for bf16 in (False, True):
                if quick and (bf16, shares_state) != (True, degree < _RANKS):
                    continue
                settings = {
                    "data_parallel_degree": _RANKS,
                    "sharded_data_parallel_degree": degree,
                    "shard_optimizer_state": shares_state,
                    "bf16": bf16,
                }
                expected = formula(_STATE_BLOCKS, settings)
                kept = _run(kept_by_a_rank, _STATE_BLOCKS, settings)
                name = f"degree {degree}, {'bf16' if bf16 else 'float32'}"
                name += ", optimizer's state shared" if shares_state else ""
                found[name] = max(kept, key=lambda one: abs(one.total - expected.total)), expected
    return found


def formula(blocks: int, settings: dict[str, Any]) -> Kept:
    """What a rank keeps: for p ranks that share, of n replicas, in bytes a parameter.

    ::

        float32   4 / p + 4 / p + 8 / p      the last / n in the place of / p with `shard_optimizer_state`
        bf16      2 / p + 4 / p + 12 / p     gradients, updated copies and Adam's two numbers in float32

    Parameters below the threshold stay whole; n / p replicas share their optimizer's state (MiCS and ZeRO's
    16 / p; 4 bytes more where gradients are kept in float32 beside parameters in 16 bits).
    """
    config = Config.parse(settings)
    degree, threshold = config.sharded_data_parallel_degree, config.sdp_param_persistence_threshold
    weight, updated = (2, 12) if config.bf16 else (4, 8)
    sharers = _RANKS // degree if config.shard_optimizer_state else 1
    sizes = _sizes(blocks)
    kept = sum(size / degree if size >= threshold else size for size in sizes)
    return Kept(weight * kept, 4 * kept, updated * kept / sharers)


def state_check(found: dict[str, tuple[Kept, Kept]]) -> Check:
    """The worst setting."""
    ratios = {name: kept.total / expected.total for name, (kept, expected) in found.items()}
    worst = max(ratios, key=lambda name: abs(ratios[name] - 1))
    return Check(
        section="D",
        what="states of a rank / formula, worst",
        value=max(ratios[worst], 1 / ratios[worst]),
        target=1.02,
        where=f"{worst}; {len(found)} settings",
    )


# ---- the largest model ----


def largest_models(*, quick: bool) -> dict[int, Largest]:
    """For each degree, what trains within one limit; needs control groups."""
    limit_bytes = (1024 if quick else 1536) * _MIB
    return {degree: _largest_model(degree, limit_bytes, quick=quick) for degree in (1, 2, 4)[:: 1 + quick]}


def largest_checks(found: dict[int, Largest]) -> list[Check]:
    """Against the prediction, each by itself and in its growth over degree 1."""
    worst = min(found.values(), key=lambda one: one.measured / one.predicted)
    checks = [
        Check(
            section="D",
            what="largest model within a limit / predicted, worst",
            value=worst.measured / worst.predicted,
            target=0.9,
            at_least=True,
            where=f"degree {worst.degree}",
        )
    ]
    share = max(found.values(), key=lambda one: one.block_bytes / one.block_states)
    checks.append(
        Check(
            section="D",
            what="memory of a block beside its states / states, worst",
            value=share.block_bytes / share.block_states,
            target=0.2,
            where=f"degree {share.degree}",
        )
    )
    for degree in sorted(found)[1:]:
        measured = found[degree].measured / found[1].measured
        predicted = found[degree].predicted / found[1].predicted
        checks.append(
            Check(
                section="D",
                what=f"largest model, degree {degree} over 1, off its predicted growth",
                value=max(measured / predicted, predicted / measured),
                target=1.1,
                where=f"{measured:.2f} times, predicted {predicted:.2f}",
            )
        )
    return checks


def _largest_model(degree: int, limit_bytes: int, *, quick: bool) -> Largest:
    settings = {
        "data_parallel_degree": _RANKS,
        "sharded_data_parallel_degree": degree,
    }
    first, second = _SMALL_BLOCKS
    beside, more = (_peak_bytes(blocks, settings) - _host_bytes(blocks, settings) for blocks in _SMALL_BLOCKS)
    block_bytes = (more - beside) // (second - first)

    def fits(blocks: int) -> bool:
        return beside + (blocks - first) * block_bytes + _host_bytes(blocks, settings) <= limit_bytes

    predicted = _last(fits, first)
    resolution = max(1, predicted // (20 if quick else 50))
    measured = _last(lambda blocks: _trains(blocks, settings, limit_bytes), predicted, resolution=resolution)
    return Largest(
        degree=degree,
        beside_bytes=beside,
        block_bytes=block_bytes,
        block_states=_host_bytes(1, settings) - _host_bytes(0, settings),
        predicted=sum(_sizes(predicted)),
        measured=sum(_sizes(measured)),
        kept_bytes=_peak_bytes(measured, settings),
        default_bytes=_peak_bytes(measured, {**settings, "keeps": True}),
    )


def _last(holds: Callable[[int], bool], guess: int, *, resolution: int = 1) -> int:
    """The largest number for which something holds, as it does for all smaller ones."""
    stride = max(resolution, guess // 10)
    if holds(guess):
        low, high = guess, guess + stride
        while holds(high):
            low, high = high, high + stride
    else:
        low, high = guess - stride, guess
        while low > 0 and not holds(low):
            low, high = low - stride, low
    while high - low > resolution:
        middle = (low + high) // 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low


def _trains(blocks: int, settings: dict[str, Any], limit_bytes: int) -> bool:
    """Whether a model trains within a limit.

    Raises:
        RuntimeError: it fails for another reason.
    """
    with MemoryLimit(limit_bytes) as limit:
        outcomes = run_ranks_outcomes(
            train_inside, _RANKS, limit.folder, blocks, settings, timeout_s=120, grace_s=1, preload=_PRELOAD
        )
        if all(outcome.ok for outcome in outcomes):
            return True
        if not limit.num_killed:
            raise RuntimeError(f"{blocks} blocks: {'; '.join(outcome.cause for outcome in outcomes)}")
        return False


def _peak_bytes(blocks: int, settings: dict[str, Any]) -> int:
    """What all ranks have at their peak, without a limit."""
    with MemoryLimit(2**40) as limit:
        _run(train_inside, limit.folder, blocks, settings)
        return limit.peak_bytes


def _host_bytes(blocks: int, settings: dict[str, Any]) -> int:
    """The states of all ranks: rows that several see are counted by the one that keeps them."""
    return round(_RANKS * formula(blocks, settings).total)


def _run(function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """What a function returns on each rank; what the ranks say is left out."""
    with redirect_stdout(StringIO()), redirect_stderr(StringIO()):
        return run_ranks(function, _RANKS, *arguments, timeout_s=120, preload=_PRELOAD)


def _sizes(blocks: int) -> Sequence[int]:
    """Elements of each parameter."""
    with torch.device("meta"):
        return [parameter.numel() for parameter in GPT(blocks).parameters()]
