"""Counts the samples that statistics over a batch, such as those of batch norms, need in a microbatch.

Unlike all other layers, such layers compute something else once a batch is cut into microbatches. So the
planner, where it is free to choose, cuts the batch into few: a microbatch has 16 samples or more, or as many
as it can. (Torchvision's and Detectron's recipes have 16 on a device; below it the error of batch norms
grows, see Wu and He, "Group Normalization", 2018, figure 1.)
"""

from collections.abc import Mapping, Sequence

from shardwright.config import Config
from shardwright.errors import PlanError
from shardwright.model_graph import ModelGraph
from shardwright.profile import Profile
from shardwright.quantities import counted
from shardwright.text import shortened

NOT_CUT_FURTHER = "not cut further"
"""Ends the reason for few microbatches, by which others know that more are none to advise."""

ENOUGH_SAMPLES = 16


def count_groups(
    candidates: Mapping[int, tuple[ModelGraph, Profile]], counts: Sequence[int], *, config: Config
) -> list[list[int]]:
    """Numbers of microbatches in the order in which to try them: those with enough samples come first."""
    layers = _layers(candidates)
    if not layers:
        return [list(counts)]
    if config.microbatches is not None:
        return [list(counts)]
    enough = [m for m in counts if candidates[m][0].batch_size >= ENOUGH_SAMPLES] or [min(counts)]
    rest = [m for m in counts if m not in enough]
    return [enough, rest] if rest else [enough]


def statistics_reasons(
    candidates: Mapping[int, tuple[ModelGraph, Profile]], microbatches: int, *, config: Config, group: int
) -> tuple[str, ...]:
    """The plan's remarks on layers with statistics; empty if there are none."""
    layers, samples = _layers(candidates), candidates[microbatches][0].batch_size
    if not layers:
        return ()
    if microbatches == 1:
        return (f"Statistics over the batch ({_sample(layers)}) are those of all of it, one microbatch.",)
    text = f"Statistics over the batch ({_sample(layers)}) are those of a microbatch, "
    text += counted(samples, "sample")
    if config.microbatches is not None:
        return (f"{text}.",)
    if group:
        return (f"{text}: more in each would not fit in memory.",)
    goal = "for" if samples >= ENOUGH_SAMPLES else "to come close to"
    return (f"{text}: {goal} {ENOUGH_SAMPLES} or more in each, the batch is {NOT_CUT_FURTHER}.",)


def statistics_are_split(layers: Sequence[str], *, samples: int, batch: int) -> str:
    """The warning about statistics over a microbatch, with the remedy.

    >>> statistics_are_split(["bn"], samples=4, batch=32)[:93]
    '1 layer (bn) computes statistics over the 4 samples of a microbatch, not over the 32 of the b'
    """
    number, size = counted(len(layers), "layer"), counted(samples, "sample")
    computes = "computes" if len(layers) == 1 else "compute"
    return (
        f"{number} ({_sample(layers)}) {computes} statistics over the {size} of a microbatch, not "
        f"over the {batch} of the batch, as in a loop over the microbatches. For those of the whole batch "
        "set microbatches to 1."
    )


def _layers(candidates: Mapping[int, tuple[ModelGraph, Profile]]) -> tuple[str, ...]:
    """The layers with statistics, over all microbatch sizes: a trace of a single sample misses some."""
    found = (name for graph, _ in candidates.values() for name in graph.batch_statistics)
    return tuple(dict.fromkeys(found))


def _sample(layers: Sequence[str]) -> str:
    """``bn1, bn2, bn3 and 5 more``."""
    return shortened([layer or "the model" for layer in layers])


def microbatch_counts(batch_size: int, *, config: Config, pipeline: int) -> tuple[int, ...]:
    """Into how many microbatches a batch could be split: what to trace and profile for `make_plan`.

    >>> microbatch_counts(32, config=Config(), pipeline=4)
    (4, 8, 16, 32)
    """
    if batch_size < 1:
        raise PlanError("the batch is empty: it has no samples along its axis.")
    if config.microbatches is not None:
        if config.microbatches > batch_size:
            raise PlanError(too_few_samples("a batch of a replica", batch_size, config.microbatches))
        return (config.microbatches,)
    divisors = [d for d in range(1, batch_size + 1) if batch_size % d == 0]
    found = set()
    for wanted in (pipeline, 2 * pipeline, 4 * pipeline, 8 * pipeline):
        # Equal microbatches waste nothing: take the nearest divisor, unless none is near.
        nearest = min(divisors, key=lambda d: (max(d / wanted, wanted / d), d))
        near = max(nearest / wanted, wanted / nearest) <= 1.5
        found.add(nearest if near else min(wanted, batch_size))
    return tuple(sorted(found))


def too_few_samples(batch: str, num_samples: int, microbatches: int) -> str:
    """The error for a batch without one sample per microbatch, and the remedy.

    >>> too_few_samples("the batch", 1, 2)[:77]
    'the batch has 1 sample, but microbatches is 2: each needs at least one sample'
    """
    samples, most = f"{num_samples} samples", f"at most {num_samples}"
    if num_samples == 1:
        samples, most = "1 sample", "1"
    return (
        f"{batch} has {samples}, but microbatches is {microbatches}: each needs at least one sample. Use "
        f"batches of {microbatches} or more, or set microbatches to {most}."
    )
