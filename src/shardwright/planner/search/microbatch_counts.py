"""Into how many microbatches a batch may be split."""

from shardwright.config import Config
from shardwright.errors import PlanError

__all__ = ["microbatch_counts", "too_few_samples"]


def microbatch_counts(batch_size: int, *, config: Config, pipeline: int) -> tuple[int, ...]:
    """Into how many microbatches a batch could be split: what to trace and profile for `make_plan`.

    >>> microbatch_counts(32, config=Config(), pipeline=4)
    (4, 8, 16, 32)
    >>> microbatch_counts(32, config=Config(batch_statistics="batch"), pipeline=4)
    (1, 4, 8, 16, 32)
    """
    if batch_size < 1:
        raise PlanError("the batch is empty: it has no samples along its axis.")
    if config.microbatches is not None:
        if config.microbatches > batch_size:
            raise PlanError(too_few_samples("a batch of a replica", batch_size, config.microbatches))
        return (config.microbatches,)
    divisors = [d for d in range(1, batch_size + 1) if batch_size % d == 0]
    found = {1} if config.batch_statistics == "batch" else set()
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
