"""Explains a choice in sentences with numbers: why this way, what limits it, why not another."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from shardwright.quantities import format_bytes, format_seconds
from shardwright.topology.pins import pin_text
from shardwright.topology.pricing import bytes_of, fits, seconds_of
from shardwright.topology.search import NEAR_TIE, Answer, closest_way, drawbacks, search
from shardwright.topology.space import all_ways
from shardwright.topology.task import Task
from shardwright.topology.way import PARTS, Way, describe

__all__ = [
    "Comparison",
    "Sensitivity",
    "difference",
    "ideal_text",
    "not_run_text",
    "reasons",
    "sensitivities",
    "why_not",
]

_RATES = {
    "flops_per_s": "faster matrix products",
    "memory_Bps": "faster memory of the accelerators",
    "link_Bps": "faster links inside of nodes",
    "network_Bps": "a faster network between nodes",
}
_MORE = 1.1
_FELT = 0.002
_NUM_PARTS = 3


@dataclass(frozen=True, slots=True)
class Sensitivity:
    """The saving from a rate that is a tenth higher."""

    what: str
    share: float


@dataclass(frozen=True, slots=True)
class Comparison:
    """The best way beside one with options that somebody has in mind.

    Attributes:
        wanted: the best with these options; where nothing fits with them, the one that takes least memory.
    """

    best: Way
    wanted: Way
    fits: bool
    sentences: tuple[str, ...]


def sensitivities(task: Task, way: Way) -> list[Sensitivity]:
    """For each rate of the machines, what a tenth more of it would spare; the most first."""
    found = []
    for name, what in _RATES.items():
        seconds = float(seconds_of(task, way.options, faster={name: _MORE}).total)
        found.append(Sensitivity(what, 1 - seconds / way.step_s))
    return sorted(found, key=lambda each: -each.share)


def reasons(answer: Answer) -> list[str]:
    """The reasons for the best way, its limits, and the basis of the numbers."""
    task, best = answer.task, answer.best
    low, high = best.interval_s
    found = [
        f"Chosen of {answer.num_ways} ways, of which {answer.num_fitting} fit: {describe(best)} "
        f"(80% interval {format_seconds(low)} to {format_seconds(high)})."
    ]
    if answer.alternatives:
        found.append(f"The next best with other degrees: {difference(best, answer.alternatives[0])}.")
    found.append(f"Of a step: {_parts(best)}.")
    felt = [each for each in sensitivities(task, best) if each.share > _FELT]
    if felt:
        texts = [f"{each.what} {each.share:.1%}" for each in felt]
        found.append(f"A tenth more of one rate would spare: {', '.join(texts)}.")
    share = best.peak_bytes / best.limit_bytes
    found.append(
        f"Peak memory (busiest rank): {format_bytes(best.peak_bytes)} of {format_bytes(best.limit_bytes)} "
        f"({share:.0%}): {best.memory_text}."
    )
    if best.not_run_yet:
        found.append(
            f"This version does not run {_listed(best.not_run_yet)} yet, and nothing that it runs fits."
        )
    return [*found, f"The times are {best.provenance}."]


def ideal_text(best: Way, ideal: Way) -> str:
    """The best of all ways beside the best that this version runs."""
    faster, smaller = 1 - ideal.step_s / best.step_s, best.peak_bytes - ideal.peak_bytes
    gain = f"{faster:.1%} faster" if faster > 0 else f"{format_bytes(smaller)} smaller"
    return (
        f"*: the best of all ways, {gain}; this version does not run {_listed(ideal.not_run_yet)} yet.\n"
        f"{describe(ideal)}"
    )


def not_run_text(ways: Sequence[Way]) -> str:
    """What ways with a star in the table need that this version does not run."""
    parts = dict.fromkeys(part for way in ways for part in way.not_run_yet)
    return f"*: this version does not run {_listed(list(parts))} yet."


def _listed(parts: Sequence[str]) -> str:
    """
    >>> _listed(["tensor parallelism", "offload", "ZeRO-2"])
    'tensor parallelism, offload and ZeRO-2'
    """
    return " and ".join(part for part in (", ".join(parts[:-1]), parts[-1]) if part)


def why_not(task: Task, pins: dict[str, int]) -> Comparison:
    """Compares the best way with the best one that has these options."""
    answer = search(replace(task, pins={}))
    pinned = replace(task, pins=pins)
    ways = all_ways(pinned)
    first = f"The best way: {describe(answer.best)}."
    if fits(task, ways).any():
        other = search(pinned).best
        second = f"The best with {_text(pins)}: {difference(answer.best, other)}."
        return Comparison(answer.best, other, True, (first, second, *_where(answer.best, other)))
    closest = closest_way(pinned, ways, np.asarray(bytes_of(task, ways).total))
    over = closest.peak_bytes - closest.limit_bytes
    if over <= 0:
        second = (
            f"With {_text(pins)} nothing fits: what {closest.title} offloads is more than the "
            f"{format_bytes(task.host_bytes)} of the host's memory that a rank may use."
        )
        return Comparison(answer.best, closest, False, (first, second))
    second = (
        f"With {_text(pins)} nothing fits: what takes least memory ({closest.title}) needs "
        f"{format_bytes(closest.peak_bytes)} a rank, {format_bytes(over)} too much: {closest.memory_text}."
    )
    return Comparison(answer.best, closest, False, (first, second))


def difference(best: Way, other: Way) -> str:
    """Another way, with how much slower it is."""
    apart = other.step_s / best.step_s - 1
    return f"{describe(other)}, {abs(apart):.1%} {'slower' if apart >= 0 else 'faster'}"


def _where(best: Way, other: Way) -> list[str]:
    """The parts of a step that differ most, and what speaks against a way that is as fast."""
    apart = {name: other.seconds[name] - best.seconds[name] for name in best.seconds}
    felt = [
        name
        for name in sorted(apart, key=lambda name: -abs(apart[name]))
        if abs(apart[name]) > _FELT * best.step_s
    ]
    texts = [
        f"{PARTS[name]} {'+' if apart[name] > 0 else '-'}{format_seconds(abs(apart[name]))}" for name in felt
    ]
    found = [f"Where it differs: {', '.join(texts[:_NUM_PARTS])}."] if texts else []
    if other.step_s < best.step_s * NEAR_TIE and (against := drawbacks(other)):
        found.append(f"The times are as good as equal, and it {_listed(against)}.")
    return found


def _parts(way: Way) -> str:
    return ", ".join(f"{name} {seconds / way.step_s:.0%}" for name, seconds in way.waterfall)


def _text(pins: dict[str, int]) -> str:
    return ", ".join(pin_text(name, value) for name, value in pins.items())
