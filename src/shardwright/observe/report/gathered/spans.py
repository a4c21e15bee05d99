"""Selects the bars of a timeline for a page: some ranks, and the two ends of very long rows."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from shardwright.observe.recorded_steps import RecordedStep
from shardwright.schedule import Kind, Simulation

__all__ = [
    "MOST_LANES",
    "WORK",
    "Span",
    "choose_ranks",
    "recorded_spans",
    "scaled",
    "seconds_of_stages",
    "simulated_spans",
    "thin",
]

MOST_LANES = 24
"""Ranks shown one by one; of more, some stand for all."""

_MOST_SPANS = 6000
WORK = {"forward": "forward", "backward": "backward", "input": "backward", "weight": "backward"}
"""Kinds of spans in which a rank computes, and the half of training that each belongs to."""

_ACTION = re.compile(r"(?P<stage>\d+)(?:F|B|I|W)(?P<microbatch>\d+)")
_KINDS = {
    Kind.FORWARD: "forward",
    Kind.BACKWARD: "backward",
    Kind.BACKWARD_INPUT: "input",
    Kind.BACKWARD_WEIGHT: "weight",
    Kind.OFFLOAD: "offload",
    Kind.LOAD: "load",
}


@dataclass(frozen=True, slots=True)
class Span:
    """One bar of a timeline.

    Attributes:
        kind: forward, backward, input, weight, send, wait, offload or load.
        start_s: seconds from the start of the first work.
        name: such as 0F3.
    """

    rank: int
    kind: str
    start_s: float
    end_s: float
    name: str


def simulated_spans(simulation: Simulation) -> tuple[Span, ...]:
    """The compute, the messages and the copies to the host of a simulation."""
    spans = [
        Span(e.rank, _KINDS[e.action.kind], e.start_s, e.end_s, str(e.action))
        for e in (*simulation.events, *simulation.host_copies)
    ]
    spans += [
        Span(e.rank, "send", e.start_s, e.end_s, str(e.action))
        for e in simulation.transfers
        if e.end_s > e.start_s
    ]
    return tuple(spans)


def recorded_spans(step: RecordedStep) -> tuple[Span, ...]:
    """What ranks did in a recorded step: waiting first, as a span of its own, and then the work."""
    spans = []
    for event in step.events:
        work_s = event.work_start_s
        if work_s > event.start_s:
            spans.append(Span(event.rank, "wait", event.start_s, work_s, f"wait for {event.action}"))
        kind = _KINDS.get(event.action.kind, "send")
        spans.append(Span(event.rank, kind, work_s, event.end_s, str(event.action)))
    return tuple(spans)


def scaled(spans: Iterable[Span], factor: float) -> tuple[Span, ...]:
    """The same spans, all of them longer by a factor."""
    return tuple(replace(span, start_s=span.start_s * factor, end_s=span.end_s * factor) for span in spans)


def seconds_of_stages(spans: Iterable[Span]) -> dict[int, tuple[float, float]]:
    """Forward and backward of one microbatch, by stage: the means over all microbatches of a step."""
    sums: dict[int, dict[str, float]] = {}
    microbatches: dict[int, set[int]] = {}
    for span in spans:
        half = WORK.get(span.kind)
        named = _ACTION.fullmatch(span.name)
        if half is None or named is None:
            continue
        stage = int(named["stage"])
        of_stage = sums.setdefault(stage, {"forward": 0.0, "backward": 0.0})
        of_stage[half] += span.end_s - span.start_s
        microbatches.setdefault(stage, set()).add(int(named["microbatch"]))
    return {
        stage: (
            of_stage["forward"] / len(microbatches[stage]),
            of_stage["backward"] / len(microbatches[stage]),
        )
        for stage, of_stage in sorted(sums.items())
    }


def choose_ranks(num_ranks: int, *, important: Iterable[int] = ()) -> tuple[int, ...]:
    """The ranks to show: all, or the important ones and others at even distances.

    >>> choose_ranks(3), len(choose_ranks(512, important=[100])), 100 in choose_ranks(512, important=[100])
    ((0, 1, 2), 24, True)
    """
    if num_ranks <= MOST_LANES:
        return tuple(range(num_ranks))
    chosen = {0, num_ranks - 1, *important}
    count = MOST_LANES - len(chosen) + 2
    for step in range(count):
        if len(chosen) < MOST_LANES:
            chosen.add(step * (num_ranks - 1) // (count - 1))
    return tuple(sorted(chosen))


def thin(spans: Sequence[Span], ranks: Sequence[int]) -> tuple[Span, ...]:
    """The spans of some ranks; of rows that are too long, the first and the last ones."""
    rows: dict[int, list[Span]] = {rank: [] for rank in ranks}
    for span in spans:
        if span.rank in rows:
            rows[span.rank].append(span)
    most = max(2, _MOST_SPANS // max(1, len(ranks)))
    found: list[Span] = []
    for row in rows.values():
        row.sort(key=lambda span: span.start_s)
        found += row if len(row) <= most else row[: most // 2] + row[len(row) - most // 2 :]
    return tuple(found)
