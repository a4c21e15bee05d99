"""Reads the measurements in a run's folder, and selects the bars of its timelines."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from shardwright.observe.recorded_steps import RecordedStep, read_recorded_steps
from shardwright.observe.run_folder import RunFolder
from shardwright.schedule import Kind, Simulation

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
    """

    rank: int
    kind: str
    start_s: float
    end_s: float
    name: str


def simulated_spans(simulation: Simulation, *, factor: float) -> tuple[Span, ...]:
    """The compute, the copies and the messages of a simulation, all of them longer by a factor."""
    messages = (event for event in simulation.transfers if event.end_s > event.start_s)
    return tuple(
        Span(e.rank, _KINDS.get(e.action.kind, "send"), e.start_s * factor, e.end_s * factor, str(e.action))
        for e in (*simulation.events, *simulation.host_copies, *messages)
    )


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


@dataclass(frozen=True, slots=True)
class MeasuredTimeline:
    """What all pipeline ranks did in one step, as measured.

    Attributes:
        spans: what each pipeline rank did, seconds from the start of the first work.
        memory: of each pipeline rank, (seconds, bytes in use); empty where nobody looked.
        seconds: that the step took, with what comes before and after the schedule.
        other_bytes: of each pipeline rank, what of these bytes is not the training's; empty if not known.
    """

    step: int
    seconds: float
    spans: tuple[Span, ...]
    memory: Mapping[int, tuple[tuple[float, float], ...]] = field(default_factory=dict)
    other_bytes: Mapping[int, int] = field(default_factory=dict)

    @classmethod
    def of(cls, step: RecordedStep) -> "MeasuredTimeline":
        """A recorded step: of each action, waiting first, as a span of its own, and then the work."""
        spans: list[Span] = []
        memory: dict[int, list[tuple[float, float]]] = {}
        for event in step.events:
            work_s, kind = event.work_start_s, _KINDS.get(event.action.kind, "send")
            if work_s > event.start_s:
                spans.append(Span(event.rank, "wait", event.start_s, work_s, f"wait for {event.action}"))
            spans.append(Span(event.rank, kind, work_s, event.end_s, str(event.action)))
            if event.bytes_in_use:
                memory.setdefault(event.rank, []).append((event.end_s, event.bytes_in_use))
        others = {rank: after.other_bytes for rank, after in enumerate(step.memory)}
        return cls(
            step=step.step,
            seconds=step.seconds,
            spans=tuple(spans),
            memory={rank: tuple(sorted(memory[rank])) for rank in sorted(memory)},
            other_bytes={rank: num_bytes for rank, num_bytes in others.items() if num_bytes is not None},
        )

    @property
    def schedule_s(self) -> float:
        """From the start of the first work to the end of the last."""
        return max((span.end_s for span in self.spans if span.kind in WORK), default=0.0)


def read_recorded(folder: RunFolder) -> tuple[MeasuredTimeline, ...]:
    """The steps that a run has recorded."""
    return tuple(MeasuredTimeline.of(step) for step in read_recorded_steps(folder) if step.events)
