"""One race: contestants of both sides on one model, with one loss.

In the heats all run in turns. In the finals each of ours meets its fastest rival alone, so that the two run
right after one another, and ratios are taken round by round. Finals take turns, too, because a machine may be
slow for a minute: twice all of them, then, up to five times, those whose median is not known to a percent::

    heats     peer A   peer B   peer C   ours 1   ours 2     peer A   peer B ...
    finals    ours 1   peer B   peer B   ours 1     ours 2   peer C   peer C   ours 2     ours 1   peer B ...
"""

import math
import statistics
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

from duel import QUIET_CORES, Patience, Times, alternate, ratios
from models import Task
from team import Team
from team_ranks import Entry

__all__ = ["Final", "Match", "Result", "race"]

_SAME_LOSS = 1e-4
_HEATS = 3
_LEAST_TURNS, _MOST_TURNS = 2, 5
_KNOWN_TO = 0.01


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Match:
    """What a final is to show.

    Attributes:
        section: letter of the section.
        what: the figure.
        ours: the contestant.
        rivals: those of whom the fastest is met.
    """

    section: str
    what: str
    ours: str
    rivals: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Final:
    """How one of ours did against its fastest rival.

    Attributes:
        match: what it is to show.
        task: name of what was trained.
        ranks: number of ranks.
        microbatches: parts into which a batch was split.
        rival: whom it met.
        ours_times: its runs.
        rival_times: those of the rival.
    """

    match: Match
    task: str
    ranks: int
    microbatches: int
    rival: str
    ours_times: Times = field(default_factory=Times)
    rival_times: Times = field(default_factory=Times)

    @property
    def ours_s(self) -> float:
        """Median of ours."""
        return self.ours_times.median_s

    @property
    def rival_s(self) -> float:
        """The rival's."""
        return self.rival_times.median_s

    @property
    def ratios(self) -> list[float]:
        """Ours / rival, of the rounds that count."""
        return ratios(self.ours_times, self.rival_times)

    @property
    def ratio(self) -> float:
        """The median."""
        return statistics.median(self.ratios)

    @property
    def spread(self) -> float:
        """Interquartile range of the ratios."""
        if len(self.ratios) < 2:
            return 0.0
        low, _, high = statistics.quantiles(self.ratios, n=4, method="inclusive")
        return high - low

    @property
    def error(self) -> float:
        """Standard error of the median, for ratios that are spread normally; infinite for one ratio."""
        if len(self.ratios) < 2:
            return math.inf
        return 0.93 * self.spread / math.sqrt(len(self.ratios))


def race(
    section: str,
    task: Task,
    names: Sequence[str],
    matches: Sequence[Match],
    *,
    ranks: int,
    microbatches: int,
    rounds: int,
    patience_s: float,
) -> tuple[list[Result], list[Final]]:
    """Every contestant has processes of its own, as it has when a user trains with it, and they run in turns.

    Args:
        section: letter of the section.
        task: what is trained.
        names: contestants; see `contestant.contestant`.
        matches: the finals.
        ranks: processes of each.
        microbatches: parts into which a batch is split.
        rounds: of each turn of a final; the heats have no more than three.
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
        times = alternate(runs, rounds=min(rounds, _HEATS), patience=patience, warm_up=2)
        finals = [
            Final(
                match=match,
                task=task.name,
                ranks=ranks,
                microbatches=microbatches,
                rival=min(match.rivals, key=lambda name: times[name].median_s),
            )
            for match in matches
        ]
        for turn in range(_MOST_TURNS):
            for final in finals:
                if turn < _LEAST_TURNS or final.error > _KNOWN_TO:
                    names_in_turn = (final.match.ours, final.rival)[:: -1 if turn % 2 else 1]
                    pair = {name: runs[name] for name in names_in_turn}
                    found = alternate(pair, rounds=rounds, patience=patience)
                    final.ours_times.add(found[final.match.ours])
                    final.rival_times.add(found[final.rival])
        for final in finals:
            times[final.match.ours].add(final.ours_times)
            times[final.rival].add(final.rival_times)
        _check_losses({name: team.loss() for name, team in teams.items()})
    results = [
        _result(section, task, name, entered[name], times[name], ranks=ranks, microbatches=microbatches)
        for name in names
    ]
    return results, finals


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
