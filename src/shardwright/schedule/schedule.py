"""The order of work of all pipeline ranks.

A *schedule* is the ordered list of actions of every pipeline rank. Nothing else decides the order: the
runtime executes the rows, the simulator adds up their costs, and they share nothing more::

    1f1b, stage_ranks (0, 1), 3 microbatches; a backward takes two units of time

    rank 0 | F0 F1 .  .  B0=== F2 B1=== .  B2===
    rank 1 | .  F0 B0=== F1 B1=== F2 B2===
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace

from shardwright.errors import ScheduleError
from shardwright.schedule.action_graph import compile_actions, host_copies_of, row_with_host_copies
from shardwright.schedule.actions import HOST_COPIES, TRANSFERS, Action, Kind, chain_edges, unit_costs
from shardwright.schedule.replay import action_seconds, replay


@dataclass(frozen=True, slots=True)
class Schedule:
    """The order of work of all pipeline ranks.

    A schedule without transfers says only who computes what when; `lower` adds the transfers.

    Attributes:
        kind: the family it was built by, or where it was read from.
        stage_ranks: pipeline rank of each stage.
        num_microbatches: parts into which a batch is split.
        actions: one row a rank, each in order of execution.
    """

    kind: str
    stage_ranks: tuple[int, ...]
    num_microbatches: int
    actions: tuple[tuple[Action, ...], ...]

    def __post_init__(self) -> None:
        if self.num_microbatches < 1 or not self.stage_ranks:
            raise ScheduleError(
                f"schedule {self.kind!r} has {self.num_stages} stages and {self.num_microbatches} "
                "microbatches. Give at least one of each."
            )
        if not 0 <= min(self.stage_ranks) <= max(self.stage_ranks) < len(self.actions):
            raise ScheduleError(
                f"schedule {self.kind!r} has {len(self.actions)} rows, but stage_ranks {self.stage_ranks}. "
                "Give one row for each rank."
            )

    @property
    def num_ranks(self) -> int:
        return len(self.actions)

    @property
    def num_stages(self) -> int:
        return len(self.stage_ranks)

    @property
    def splits_backward(self) -> bool:
        """Whether any backward is split in ``I`` and ``W``."""
        return self._has((Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT))

    @property
    def has_backward(self) -> bool:
        """False for a schedule that only runs forward."""
        return self._has((Kind.BACKWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT))

    @property
    def has_transfers(self) -> bool:
        """Whether sends and receives are in the rows (see `lower`)."""
        return self._has(TRANSFERS)

    @property
    def has_host_copies(self) -> bool:
        """Whether anything is copied to the memory of the host."""
        return self._has(HOST_COPIES)

    def with_host_copies(self, stages: Collection[int]) -> "Schedule":
        """The schedule with copies of what some stages keep: see `row_with_host_copies`."""
        if not stages or not self.has_backward:
            return self
        return replace(self, actions=tuple(row_with_host_copies(row, stages) for row in self.actions))

    def draw(self) -> str:
        """A picture in units of time: ``F``, ``I`` and ``W`` take one, a whole ``B`` two, transfers none.

        A copy to the host (``O``) or back (``L``) takes one, on a line of its own.

        >>> from shardwright.schedule import build_schedule
        >>> print(build_schedule("1f1b", stage_ranks=(0, 1), num_microbatches=3).draw())
        rank 0 | F0 F1 .  .  B0=== F2 B1=== .  B2===
        rank 1 | .  F0 B0=== F1 B1=== F2 B2===
        """
        graph = compile_actions(
            [[action for action in row if action.kind not in TRANSFERS] for row in self.actions],
            stage_ranks=self.stage_ranks,
            num_microbatches=self.num_microbatches,
            edges=chain_edges(self.num_stages),
        )
        seconds = action_seconds(graph, unit_costs(self.num_stages))
        copy_s = [(1.0, 0.0)] * (4 * self.num_stages)
        timeline = replay(graph, seconds, [(0.0, 0.0)] * graph.first_copy + copy_s)
        rows = [
            [(graph.actions[i], round(timeline.starts[i]), round(seconds[i])) for i in row]
            for row in graph.rows
        ]
        copies: list[list[tuple[Action, int, int]]] = [[] for _ in rows]
        for rank, action, start_s, end_s in host_copies_of(graph, timeline.departures):
            copies[rank].append((action, round(start_s), round(end_s - start_s)))
        return draw_rows(rows, name_stages=self.num_stages > self.num_ranks, copies=copies)

    def __str__(self) -> str:
        return "\n".join(f"rank {rank} | {' '.join(map(str, row))}" for rank, row in enumerate(self.actions))

    def _has(self, kinds: Iterable[Kind]) -> bool:
        wanted = tuple(kinds)
        return any(action.kind in wanted for row in self.actions for action in row)


Row = Sequence[tuple[Action, int, int]]
"""Actions with start and length in units of time."""

_LETTERS = {Kind.OFFLOAD: "O", Kind.LOAD: "L"}


def draw_rows(rows: Sequence[Row], *, name_stages: bool, copies: Sequence[Row] = ()) -> str:
    """Draws one line a rank, and one below for its host where anything is copied there."""
    lines: list[tuple[str, Row]] = []
    for rank, row in enumerate(rows):
        lines.append((f"rank {rank}", row))
        if copies and copies[rank]:
            lines.append((f"host {rank}", copies[rank]))
    width = max((len(_name(action, name_stages)) for row in rows for action, _, _ in row), default=1)
    label_width = len(f"rank {len(rows) - 1}")
    drawn = []
    for label, row in lines:
        cells, now = [label.ljust(label_width), "|"], 0
        for action, start, length in row:
            name = _name(action, name_stages)
            cells += [".".ljust(width)] * (start - now)
            cells.append(name.ljust(width) if length <= 1 else name.ljust(length * (width + 1) - 1, "="))
            now = start + length
        drawn.append(" ".join(cells).rstrip())
    return "\n".join(drawn)


def _name(action: Action, name_stages: bool) -> str:
    stage = str(action.stage) if name_stages else ""
    return f"{stage}{_LETTERS.get(action.kind, action.kind.value)}{action.microbatch}"
