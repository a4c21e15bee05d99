"""Tables and targets of the races: sections A to D, and the predictions of G."""

from collections.abc import Sequence
from itertools import groupby

from check import Check
from courses import FAMILIES
from race import Result
from shardwright.torch.machine import cores_of_host

__all__ = ["prediction_check", "prediction_rows", "speed_checks", "speed_tables"]

Table = tuple[str, list[list[str]]]

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


def speed_checks(results: Sequence[Result]) -> list[Check]:
    """The targets of sections A to D, each with its worst figure."""
    checks = []
    fields = [list(field) for _, field in groupby(sorted(results, key=_order), key=_course)]
    for family, (theirs, own) in FAMILIES.items():
        ratios = [_ratio(field, theirs, own) for field in fields if "A" in field[0].section]
        checks += _worst("A", f"{family}: ours / peer, same stages", ratios, target=1.0)
    ratios = [_ratio(field, None, ("free",)) for field in fields if "B" in field[0].section]
    checks += _worst("B", "chosen by the library / best of the peer's", ratios, target=1.0)
    for task in dict.fromkeys(r.task for r in results if r.section == "C"):
        ratios = [_ratio(field, None, ("free",)) for field in fields if field[0].task == task]
        checks += _worst("C", f"{task}: planned / peer's even split", ratios, target=0.9)
    for field in fields:
        if field[0].section == "D":
            checks += _speed_ups(field)
    return checks


def _ratio(field: list[Result], theirs: Sequence[str] | None, own: Sequence[str]) -> tuple[float, str]:
    """Median of ours by the best median of the peer's, and where."""
    times = {(r.side, r.kind): r.times.median_s for r in field}
    peer = min(s for (side, kind), s in times.items() if side == "peer" and (not theirs or kind in theirs))
    ours = min(s for (side, kind), s in times.items() if side == "ours" and kind in own)
    where = f"{field[0].ranks} ranks, {field[0].microbatches} microbatches"
    disturbed = any(r.times.disturbed for r in field if r.times.median_s in (ours, peer))
    return ours / peer, f"{where}, disturbed" if disturbed else where


def _worst(section: str, what: str, ratios: list[tuple[float, str]], *, target: float) -> list[Check]:
    if not ratios:
        return []
    value, where = max(ratios)
    return [Check(section=section, what=what, value=value, target=target, where=where)]


def _speed_ups(field: list[Result]) -> list[Check]:
    """Speed-up over one process as a share of the ideal of 1F1B, which schedules without bubbles may beat."""
    times = {f"{r.side} {r.kind}": r.times.median_s for r in field}
    one = min(times["plain batch"], times["plain microbatches"])
    ideal, where = _ideal_speed_up(field[0])
    return [
        Check(
            section="D",
            what=f"{field[0].ranks} ranks, {kind}: speed-up over one process / 1F1B's ideal",
            value=one / times[f"ours {kind}"] / ideal,
            target=0.9,
            at_least=True,
            where=f"{one / times[f'ours {kind}']:.2f} of {ideal:.2f}{where}",
        )
        for kind in ("1f1b", "free")
    ]


def _ideal_speed_up(result: Result) -> tuple[float, str]:
    """1F1B on p ranks with m microbatches gives p m / (m + p - 1), where every rank has a core."""
    p, m, cores = result.ranks, result.microbatches, cores_of_host()
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
