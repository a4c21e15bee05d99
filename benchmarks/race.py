"""One race: contestants of both sides on one model, with one loss."""

import math
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from duel import QUIET_CORES, Patience, Times, alternate
from models import Task
from team import Team
from team_ranks import Entry

__all__ = ["Result", "race"]

_SAME_LOSS = 1e-4


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """How one contestant did.

    Attributes:
        section: letter of the section.
        task: name of what was trained.
        ranks: number of ranks.
        microbatches: parts into which a batch was split.
        side: ``peer``, ``ours`` or ``plain``.
        kind: its schedule, as the race was asked for.
        chosen: what the library chose where it was free.
        times: round by round.
        predicted_s: what the plan predicts for a step.
        profiled_with: cores that others kept busy while the library measured the model.
    """

    section: str
    task: str
    ranks: int
    microbatches: int
    side: str
    kind: str
    times: Times
    chosen: str = ""
    predicted_s: float | None = None
    profiled_with: float = 0.0


def race(
    section: str,
    task: Task,
    names: Sequence[str],
    *,
    ranks: int,
    microbatches: int,
    rounds: int,
    patience_s: float,
) -> list[Result]:
    """Every contestant has processes of its own, as it has when a user trains with it, and they run in turns.

    Args:
        section: letter of the section.
        task: what is trained.
        names: contestants; see `contestant.contestant`.
        ranks: processes of each.
        microbatches: parts into which a batch is split.
        rounds: how many quiet runs of each are wanted.
        patience_s: seconds that may be spent on that.

    Raises:
        RuntimeError: a contestant failed, or computed another loss than the others.
    """
    patience = Patience(patience_s)
    with ExitStack() as stack:
        teams = {
            name: stack.enter_context(Team(name, task, ranks=ranks, microbatches=microbatches))
            for name in names
        }
        entered = {
            name: _enter(team, patience, measures=name.startswith("ours")) for name, team in teams.items()
        }
        runs = {name: team.run for name, team in teams.items()}
        # Ours has run a step by now, the peer none, and its first one finds out shapes.
        times = alternate(runs, rounds=rounds, patience=patience, warm_up=2)
        _check_losses({name: team.loss() for name, team in teams.items()})
    return [
        _result(section, task, name, entered[name], times[name], ranks=ranks, microbatches=microbatches)
        for name in names
    ]


def _enter(team: Team, patience: Patience, *, measures: bool) -> Entry:
    """Has a contestant get ready; once more where others were busy while it measured."""
    while True:
        if not patience.ended:
            patience.wait()
        entry = team.enter()
        if not measures or entry.foreign < QUIET_CORES or patience.ended:
            return entry
        patience.spend(entry.seconds)


def _result(
    section: str, task: Task, name: str, entry: Entry, times: Times, *, ranks: int, microbatches: int
) -> Result:
    label, kind = name.split(" ", 1)
    return Result(
        section=section,
        task=task.name,
        ranks=ranks,
        microbatches=microbatches,
        side=label,
        kind=kind,
        times=times,
        chosen=entry.chosen,
        predicted_s=entry.predicted_s,
        profiled_with=entry.foreign if label == "ours" else 0.0,
    )


def _check_losses(losses: dict[str, float]) -> None:
    """Refuses to compare the speed of different work."""
    first = next(iter(losses.values()))
    for name, value in losses.items():
        if not math.isclose(value, first, rel_tol=_SAME_LOSS):
            raise RuntimeError(f"{name} has another loss than the others: {losses}")
