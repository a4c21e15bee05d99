"""Places stages on ranks.

Three placements are classic; any other map of stages to ranks works too::

    chain, p = 3          round robin, p = 3, v = 2      V, p = 3
    rank 0 | 0            rank 0 | 0     3               rank 0 | 0         5
    rank 1 |   1          rank 1 |   1     4             rank 1 |   1     4
    rank 2 |     2        rank 2 |     2     5           rank 2 |     2 3
"""

from collections.abc import Sequence
from dataclasses import dataclass

from shardwright.errors import ScheduleError
from shardwright.schedule.actions import Action, StageCost, check_costs

KINDS = ("gpipe", "1f1b", "interleaved_1f1b", "zb_h1", "zb_v")
"""Names of the schedule families."""

_DEFAULT_STAGES_PER_RANK = {"gpipe": 1, "1f1b": 1, "interleaved_1f1b": 2, "zb_h1": 1, "zb_v": 2}


def place_stages(kind: str, *, num_ranks: int, stages_per_rank: int | None = None) -> tuple[int, ...]:
    """The placement for which a family was invented.

    Args:
        kind: one of `KINDS`.
        num_ranks: pipeline ranks.
        stages_per_rank: None for the family's own: 2 for ``interleaved_1f1b`` and ``zb_v``, else 1.

    Returns:
        The pipeline rank of each stage.

    Raises:
        ScheduleError: the family is unknown, or is not defined for that many stages.

    >>> place_stages("interleaved_1f1b", num_ranks=3), place_stages("zb_v", num_ranks=3)
    ((0, 1, 2, 0, 1, 2), (0, 1, 2, 2, 1, 0))
    """
    check_kind(kind)
    if num_ranks < 1:
        raise ScheduleError(f"a pipeline of {num_ranks} ranks was asked for. Give 1 or more.")
    v = _DEFAULT_STAGES_PER_RANK[kind] if stages_per_rank is None else stages_per_rank
    if kind == "zb_v":
        if v != 2:
            raise ScheduleError(
                f"zb_v runs exactly 2 stages on each rank, not {v}. Leave stages_per_rank out."
            )
        return (*range(num_ranks), *reversed(range(num_ranks)))
    if v < 1:
        raise ScheduleError(f"{kind} was asked for with {v} stages per rank. Give 1 or more.")
    return tuple(range(num_ranks)) * v


def check_kind(kind: str) -> None:
    if kind not in KINDS:
        raise ScheduleError(f"there is no schedule {kind!r}. Choose one of {', '.join(KINDS)}.")


def _check_placement(stage_ranks: Sequence[int]) -> tuple[int, ...]:
    ranks = tuple(stage_ranks)
    if not ranks:
        raise ScheduleError("stage_ranks is empty. Give the pipeline rank of each stage, for example (0, 1).")
    missing = sorted(set(range(max(ranks) + 1)) - set(ranks))
    if min(ranks) < 0 or missing:
        wrong = f"rank {min(ranks)} is negative" if min(ranks) < 0 else f"rank {missing[0]} has no stage"
        raise ScheduleError(
            f"stage_ranks {ranks}: {wrong}. Number the ranks 0, 1, ... and give each a stage."
        )
    return ranks


def stages_by_rank(stage_ranks: Sequence[int]) -> list[list[int]]:
    """The stages of each rank, ascending."""
    owned: list[list[int]] = [[] for _ in range(max(stage_ranks) + 1)]
    for stage, rank in enumerate(stage_ranks):
        owned[rank].append(stage)
    return owned


def hops_to_end(stage_ranks: Sequence[int]) -> list[int]:
    """The number of changes of rank that a microbatch still makes after each stage.

    >>> hops_to_end((0, 1, 2)), hops_to_end((0, 1, 1)), hops_to_end((0, 1, 0))
    ([2, 1, 0], [1, 0, 0], [2, 1, 0])
    """
    hops = [0] * len(stage_ranks)
    for stage in range(len(stage_ranks) - 2, -1, -1):
        hops[stage] = hops[stage + 1] + (stage_ranks[stage] != stage_ranks[stage + 1])
    return hops


def is_chain(stage_ranks: Sequence[int]) -> bool:
    """Whether rank i runs stage i and nothing else."""
    return tuple(stage_ranks) == tuple(range(len(stage_ranks)))


def is_round_robin(stage_ranks: Sequence[int]) -> bool:
    """Whether the ranks take turns, each the same number of times."""
    num_ranks = max(stage_ranks) + 1
    return tuple(stage_ranks) == tuple(range(num_ranks)) * (len(stage_ranks) // num_ranks)


def is_v(stage_ranks: Sequence[int]) -> bool:
    """Whether the stages go down the ranks once and up again."""
    num_ranks = max(stage_ranks) + 1
    return tuple(stage_ranks) == (*range(num_ranks), *reversed(range(num_ranks)))


Rows = list[list[Action]]
"""The compute actions of each rank, in order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """The request to a schedule family.

    Attributes:
        num_microbatches: parts into which a batch is split.
        active_microbatches: bound on the microbatches under way on each rank; None for the family's own.
    """

    stage_ranks: tuple[int, ...]
    num_microbatches: int
    active_microbatches: int | None
    costs: tuple[StageCost, ...]

    @property
    def num_ranks(self) -> int:
        return max(self.stage_ranks) + 1

    @property
    def num_stages(self) -> int:
        return len(self.stage_ranks)


def check_request(
    kind: str,
    *,
    stage_ranks: Sequence[int],
    num_microbatches: int,
    active_microbatches: int | None,
    costs: Sequence[StageCost] | None,
) -> Request:
    ranks = _check_placement(stage_ranks)
    if num_microbatches < 1:
        raise ScheduleError(f"{kind} was asked for with {num_microbatches} microbatches. Give 1 or more.")
    if active_microbatches is not None and active_microbatches < 1:
        raise ScheduleError(
            f"{kind} was asked for with active_microbatches {active_microbatches}: nothing could start. "
            "The minimum is 1; leave it out for the family's own bound."
        )
    return Request(
        stage_ranks=ranks,
        num_microbatches=num_microbatches,
        active_microbatches=active_microbatches,
        costs=check_costs(costs, num_stages=len(ranks)),
    )
