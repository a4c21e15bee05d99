"""Section F: what the peer can hardly run, or not, tried on both sides, each attempt with a hard time limit.

Every case trains on two ranks with 1F1B and compares gradients (or scores) with those of one process. An
attempt returns the largest difference, or fails, or hangs and is killed.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import limits_export
import limits_hand
from check import Check
from shardwright.testing import run_ranks_outcomes
from shardwright.testing.job import Outcome

__all__ = ["Verdict", "limits_check", "limits_table", "try_limits"]

_RANKS = 2
_EXACT = 1e-5
_LONGEST = 90


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What became of one case.

    Attributes:
        case: its name.
        peer: how the peer did, in words.
        ours: how the library did, in words.
        peer_right: the peer ran and was right.
        ours_right: the library ran and was right.
    """

    case: str
    peer: str
    ours: str
    peer_right: bool
    ours_right: bool


def try_limits(*, quick: bool) -> list[Verdict]:
    """Tries all cases; a hang takes its whole time limit."""
    cases = {**limits_hand.CASES, **limits_export.CASES}
    if quick:
        cases = {name: cases[name] for name in ("tied embedding and head", "uneven last batch")}
    found = []
    for name, (peer, ours) in cases.items():
        theirs = _tried(peer, timeout_s=20.0)
        own = _tried(ours, timeout_s=60.0)
        found.append(
            Verdict(
                case=name,
                peer=_words(theirs),
                ours=_words(own),
                peer_right=_right(theirs),
                ours_right=_right(own),
            )
        )
    return found


def limits_table(verdicts: Sequence[Verdict]) -> list[list[str]]:
    """Case by case."""
    return [["case", "peer", "ours"], *([v.case, v.peer, v.ours] for v in verdicts)]


def limits_check(verdicts: Sequence[Verdict]) -> list[Check]:
    """All must be right; says how many of them the peer can run after all."""
    right = sum(v.ours_right for v in verdicts)
    wrong = [f"wrong: {v.case}" for v in verdicts if not v.ours_right]
    both = [f"the peer is right, too: {v.case}" for v in verdicts if v.peer_right]
    return [
        Check(
            section="F",
            what=f"of {len(verdicts)} cases at the peer's limits, ours right",
            value=right / len(verdicts),
            target=1.0,
            at_least=True,
            where="; ".join(wrong + both),
            percent=True,
        )
    ]


def _tried(attempt: Callable[[], float], *, timeout_s: float) -> list[Outcome]:
    # Both ranks may take until the limit: whether the other one hangs is part of the answer.
    return run_ranks_outcomes(attempt, _RANKS, timeout_s=timeout_s)


def _right(outcomes: Sequence[Outcome]) -> bool:
    return all(outcome.ok and outcome.value <= _EXACT for outcome in outcomes)


def _words(outcomes: Sequence[Outcome]) -> str:
    if all(outcome.ok for outcome in outcomes):
        worst = max(outcome.value for outcome in outcomes)
        return f"right, within {worst:.0e}" if _right(outcomes) else f"WRONG by {worst:.0e}, no error"
    failed = sorted((o for o in outcomes if o.error is not None), key=lambda outcome: outcome.seconds)
    hanging = [str(outcome.rank) for outcome in outcomes if outcome.stopped == "timeout"]
    words = [f"rank {failed[0].rank} fails: {_headline(failed[0].error or '')}"] if failed else []
    if hanging:
        words.append(f"rank {' and '.join(hanging)} hang{'s' if len(hanging) == 1 else ''}")
    return "; ".join(words) or "; ".join(dict.fromkeys(outcome.cause for outcome in outcomes))


def _headline(traceback: str) -> str:
    """The last line of a traceback that says what went wrong, without what follows it."""
    named = [line for line in traceback.splitlines() if re.match(r"[\w.]*(Error|Exception): \S", line)]
    name, _, text = (named or [traceback.strip()])[-1].partition(": ")
    whole = f"{name.rsplit('.', 1)[-1]}: {text}"
    return whole if len(whole) <= _LONGEST else whole[: _LONGEST - 4] + " ..."
