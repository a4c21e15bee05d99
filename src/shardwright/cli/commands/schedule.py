"""``shardwright schedule``: draws pipeline schedules."""

import shutil
import sys
from typing import Annotated

import typer

from shardwright.cli.asking.application import (
    NUM_RANKS,
    AsJson,
    print_json,
    show_text,
)
from shardwright.cli.showing.schedule_picture import SchedulePicture
from shardwright.errors import UsageError
from shardwright.quantities import MOST_MICROBATCHES, MOST_RANKS, MOST_SECONDS, MOST_STAGES_OF_RANK
from shardwright.schedule import (
    KINDS,
    Schedule,
    StageCost,
    build_schedule,
    place_stages,
)

__all__ = ["schedule"]

_MOST_ACTIONS = 200_000

Kind = Annotated[str, typer.Argument(metavar="KIND", help=f"One of {', '.join(KINDS)}.")]
NumRanks = Annotated[int, typer.Option(*NUM_RANKS, min=1, max=MOST_RANKS, help="Pipeline ranks.")]
Microbatches = Annotated[
    int, typer.Option("--microbatches", "-m", min=1, max=MOST_MICROBATCHES, help="Parts of a batch.")
]
StagesPerRank = Annotated[
    int | None,
    typer.Option(
        "--stages-per-rank",
        min=1,
        max=MOST_STAGES_OF_RANK,
        help="Default: what the kind usually has, 1 or 2.",
    ),
]
Active = Annotated[
    int | None,
    typer.Option(
        "--active",
        min=1,
        max=MOST_MICROBATCHES,
        help="Most microbatches under way on a rank; default: the kind's own.",
    ),
]
Forward = Annotated[float, typer.Option("--forward", metavar="SECONDS", help="Forward of one stage.")]
Backward = Annotated[
    float, typer.Option("--backward", metavar="SECONDS", help="Whole backward of one stage.")
]
Weight = Annotated[
    float | None,
    typer.Option(
        "--weight", metavar="SECONDS", help="Part of the backward that can wait (W); default: half of it."
    ),
]
Send = Annotated[float, typer.Option("--send", metavar="SECONDS", help="One message between two ranks.")]


def schedule(
    kind: Kind,
    num_ranks: NumRanks = 4,
    microbatches: Microbatches = 8,
    stages_per_rank: StagesPerRank = None,
    active: Active = None,
    forward_s: Forward = 1.0,
    backward_s: Backward = 2.0,
    weight_s: Weight = None,
    send_s: Send = 0.0,
    as_json: AsJson = False,
) -> None:
    """Draw a pipeline schedule: who works when, the bubble, what each rank keeps.

    For example: shardwright schedule zb_h1 -n 4 --microbatches 8
    """
    cost = _cost(forward_s, backward_s, weight_s)
    if not 0 <= send_s <= MOST_SECONDS:
        raise UsageError(f"--send is {send_s:g}, but a message takes 0 to {MOST_SECONDS:g} seconds.")
    built = _build(kind, num_ranks, microbatches, stages_per_rank, active, cost)
    picture = SchedulePicture(built, cost, send_s=send_s, active=active)
    if as_json:
        print_json(picture.to_dict())
    else:
        show_text(picture.text(width=shutil.get_terminal_size().columns if sys.stdout.isatty() else None))


def _cost(forward_s: float, backward_s: float, weight_s: float | None) -> StageCost:
    weight_s = backward_s / 2 if weight_s is None else weight_s
    for name, value in (("forward", forward_s), ("backward", backward_s)):
        if not 0 < value <= MOST_SECONDS:
            raise UsageError(
                f"--{name} is {value:g}, but work takes time. Give more than 0 seconds, and at most "
                f"{MOST_SECONDS:g}."
            )
    if not 0 < weight_s < backward_s:
        raise UsageError(
            f"--weight is {weight_s:g}, but it is a part of --backward {backward_s:g}: "
            f"give more than 0 and less than {backward_s:g}."
        )
    return StageCost(forward_s, backward_s, weight_s, saved_bytes=1)


def _check_length(stages: int, microbatches: int) -> None:
    actions = 2 * stages * microbatches
    if actions > _MOST_ACTIONS:
        raise UsageError(
            f"{microbatches} microbatches on {stages} stages are {actions} actions or more, which nobody can "
            f"look at. Take at most {_MOST_ACTIONS}."
        )


def _build(
    kind: str,
    num_ranks: int,
    microbatches: int,
    stages_per_rank: int | None,
    active: int | None,
    cost: StageCost,
) -> Schedule:
    kind = kind.lower().replace("-", "_")
    if stages_per_rank not in (None, 1) and kind in ("gpipe", "1f1b", "zb_h1"):
        raise UsageError(
            f"--stages-per-rank is {stages_per_rank}, but {kind} runs one stage on each rank. "
            "Leave it out, or ask for interleaved_1f1b."
        )
    _check_length(num_ranks * (stages_per_rank or 1), microbatches)
    stage_ranks = place_stages(kind, num_ranks=num_ranks, stages_per_rank=stages_per_rank)
    return build_schedule(
        kind,
        stage_ranks=stage_ranks,
        num_microbatches=microbatches,
        active_microbatches=active,
        costs=(cost,) * len(stage_ranks),
    )
