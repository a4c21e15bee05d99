"""Tables and targets of the races: sections A to D, and the predictions of G."""

from collections.abc import Sequence
from itertools import groupby

from check import Check
from race import Final, Result
from shardwright.quantities import cores_of_host

__all__ = ["finals_table", "prediction_check", "prediction_rows", "speed_checks", "speed_tables"]

Table = tuple[str, list[list[str]]]

_TARGETS = {"A": 1.0, "B": 1.0, "C": 0.9, "D": 0.9}

_TITLES = {
    "A": "A, B. The same layers on every stage, and the schedule that the library chooses",
    "C": "C. Uneven models: stages by the library against an even split of the layers",
    "D": "D. Against one process with one thread",
}


def speed_tables(results: Sequence[Result]) -> list[Table]:
    """One table a section: all contestants of all races."""
    tables = []
    for letter, rows in groupby(sorted(results, key=_order), key=_letter):
        table = [["model", "ranks", "m", "contestant", "median", "IQR", "of best peer", "runs", "note"]]
        for _, field in groupby(rows, key=_course):
            table += _rows(list(field))
        tables.append((_TITLES[letter], table))
    return tables


def _rows(field: list[Result]) -> list[list[str]]:
    peers = [r.times.median_s for r in field if r.side in ("peer", "plain") and r.kind != "crowd"]
    rows = []
    for result in field:
        times = result.times
        note = result.chosen if result.side == "ours" and result.kind == "free" else ""
        rows.append(
            [
                result.task,
                str(result.ranks),
                str(result.microbatches),
                f"{result.side} {result.kind}",
                f"{times.median_s * 1e3:.1f} ms",
                f"{times.spread:.1%}",
                f"{times.median_s / min(peers):.3f}",
                f"{len(times.counted)}{' (disturbed)' if times.disturbed else ''}",
                note,
            ]
        )
    return rows


def finals_table(finals: Sequence[Final]) -> list[list[str]]:
    """Every final."""
    table = [
        [
            "section",
            "model",
            "ranks",
            "m",
            "ours",
            "rival",
            "time of ours",
            "of the rival",
            "ours / rival",
            "error",
            "IQR",
            "rounds",
        ]
    ]
    for final in finals:
        table.append(
            [
                final.match.section,
                final.task,
                str(final.ranks),
                str(final.microbatches),
                final.match.ours.removeprefix("ours "),
                final.rival,
                f"{final.ours_s * 1e3:.1f} ms",
                f"{final.rival_s * 1e3:.1f} ms",
                f"{final.ratio:.3f}",
                f"{final.error:.3f}",
                f"{final.spread:.3f}",
                str(len(final.ratios)),
            ]
        )
    return table


def speed_checks(finals: Sequence[Final]) -> list[Check]:
    """The targets of sections A to D, each with its worst figure."""
    return [
        min((_check(final) for final in finals if final.match.what == what), key=lambda check: check.margin)
        for what in dict.fromkeys(final.match.what for final in finals)
    ]


def _check(final: Final) -> Check:
    section = final.match.section
    value, where = final.ratio, f"{final.ranks} ranks, {final.microbatches} microbatches"
    if section == "D":
        # Schedules with smaller bubbles may beat the ideal of 1F1B.
        ideal, cores = _ideal_speed_up(final)
        value, where = 1 / final.ratio / ideal, f"{1 / final.ratio:.2f} of {ideal:.2f}{cores}"
    return Check(
        section=section,
        what=final.match.what,
        value=value,
        target=_TARGETS[section],
        at_least=section == "D",
        where=where,
    )


def _ideal_speed_up(final: Final) -> tuple[float, str]:
    """1F1B on p ranks with m microbatches gives p m / (m + p - 1), where every rank has a core."""
    p, m, cores = final.ranks, final.microbatches, cores_of_host()
    ideal = p * m / (m + p - 1)
    return (ideal, "") if cores >= p else (min(ideal, float(cores)), f", {cores} cores")


def prediction_rows(results: Sequence[Result]) -> list[list[str]]:
    """Every prediction beside its measurement, worst last."""
    known = [(_error(r), r) for r in results if r.predicted_s is not None]
    table = [["model", "ranks", "m", "ours", "predicted", "measured", "error", "others while profiling"]]
    for error, result in sorted(known, key=lambda row: abs(row[0])):
        assert result.predicted_s is not None
        table.append(
            [
                result.task,
                str(result.ranks),
                str(result.microbatches),
                result.kind,
                f"{result.predicted_s * 1e3:.1f} ms",
                f"{result.times.median_s * 1e3:.1f} ms",
                f"{error:+.1%}",
                f"{result.profiled_with:.2f} cores",
            ]
        )
    return table


def prediction_check(results: Sequence[Result]) -> list[Check]:
    """The target of section G."""
    known = [(abs(_error(r)), r) for r in results if r.predicted_s is not None]
    if not known:
        return []
    error, worst = max(known, key=lambda row: row[0])
    close = sum(e <= 0.1 for e, _ in known)
    where = f"{worst.task}, {worst.kind}, {worst.ranks} ranks; {close} of {len(known)} within 10 %"
    return [
        Check(
            section="G",
            what="predicted step: worst error",
            value=error,
            target=0.1,
            where=where,
            percent=True,
        )
    ]


def _error(result: Result) -> float:
    assert result.predicted_s is not None
    return result.predicted_s / result.times.median_s - 1


def _letter(result: Result) -> str:
    return "A" if result.section in ("A", "B", "AB") else result.section


def _order(result: Result) -> tuple[str, str, int, int]:
    return _letter(result), result.task, result.ranks, result.microbatches


def _course(result: Result) -> tuple[str, int, int]:
    return result.task, result.ranks, result.microbatches
