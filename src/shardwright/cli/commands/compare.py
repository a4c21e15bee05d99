"""``shardwright compare``: two plans side by side."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path
from typing import Annotated, Any

import typer

from shardwright.cli.asking.application import AsJson, print_json, show_text
from shardwright.cli.asking.run_path import read_plan, run_path
from shardwright.exit_codes import FAILED
from shardwright.plan import Plan, stage_of_label
from shardwright.quantities import format_bytes, format_seconds
from shardwright.text import align, shortened


@dataclass(frozen=True, slots=True)
class Change:
    """One difference: its subject, and its words in the first and in the second plan."""

    what: str
    before: str
    after: str


@dataclass(frozen=True, slots=True)
class _PlanDiff:
    """The differences between two plans.

    Attributes:
        prediction: what is expected otherwise. Two runs that measure the same model never agree to the last
            digit, so this does not make plans different.
    """

    decision: tuple[Change, ...]
    prediction: tuple[Change, ...]

    def __str__(self) -> str:
        lines = ["the plans decide alike" if not self.decision else "the plans differ"]
        lines += _lines(self.decision)
        if self.prediction:
            lines += ["predictions", *_lines(self.prediction)]
        return "\n".join(lines)


def diff_plans(first: Plan, second: Plan) -> _PlanDiff:
    """Compares two plans; reasons and runners-up, which are text about the predictions, do not count."""
    return _PlanDiff(
        decision=(
            *_fields(first, second, ("model.fingerprint", "model.num_parameters")),
            *_units(first, second),
            *_fields(first, second, ("mesh.pipeline", "mesh.data", "mesh.tensor", "mesh.context")),
            *_fields(first, second, ("mesh.expert", "mesh.placement_strategy")),
            *_fields(
                first, second, ("schedule.kind", "schedule.microbatches", "schedule.active_microbatches")
            ),
            *_stages(first, second),
            *_kept_otherwise(first, second),
            *_items("replicated", first.replicated, second.replicated),
            *_items("tensor.cuts", _cuts(first), _cuts(second)),
            *_items("pins", first.pins, second.pins),
        ),
        prediction=tuple(_predictions(first, second)),
    )


def _lines(changes: Sequence[Change]) -> list[str]:
    rows = [(f"  {change.what}", f"{change.before} -> {change.after}") for change in changes]
    return align(rows).splitlines() if rows else []


def _fields(first: Plan, second: Plan, paths: Iterable[str]) -> Iterator[Change]:
    for path in paths:
        record, name = path.split(".")
        a, b = (getattr(getattr(plan, record), name) for plan in (first, second))
        if a != b:
            yield Change(path, _text(a), _text(b))


def _units(first: Plan, second: Plan) -> Iterator[Change]:
    known = [set(plan.model.units) for plan in (first, second)]
    gone = [unit for unit in first.model.units if unit not in known[1]]
    new = [unit for unit in second.model.units if unit not in known[0]]
    if gone or new:
        yield Change("model.units", f"{_sample(gone)} only here", f"{_sample(new)} only here")
    elif first.model.units != second.model.units:
        yield Change("model.units", "one order", "another order")


def _stages(first: Plan, second: Plan) -> Iterator[Change]:
    if len(first.stages) != len(second.stages):
        yield Change("stages", str(len(first.stages)), str(len(second.stages)))
    for index, (a, b) in enumerate(zip(first.stages, second.stages, strict=False)):
        if a.rank != b.rank:
            yield Change(f"stage {index}", f"rank {a.rank}", f"rank {b.rank}")
    before, after = stage_of_label(first), stage_of_label(second)
    moves = [(unit, before[unit], after[unit]) for unit in first.model.units if unit in after]
    for (source, target), group in groupby(moves, key=lambda move: move[1:]):
        if source != target:
            names = [unit for unit, _, _ in group]
            yield Change(_span(names), f"stage {source}", f"stage {target}")


def _kept_otherwise(first: Plan, second: Plan) -> Iterator[Change]:
    for what, name in (("recomputed units", "recompute"), ("offloaded units", "offload")):
        a, b = ([unit for stage in plan.stages for unit in getattr(stage, name)] for plan in (first, second))
        if a != b:
            yield Change(what, _sample(a), _sample(b))


def _items(what: str, first: Mapping[str, Any], second: Mapping[str, Any]) -> Iterator[Change]:
    for key in dict.fromkeys((*first, *second)):
        if first.get(key) != second.get(key):
            yield Change(f"{what}.{key}", _text(first.get(key)), _text(second.get(key)))


def _cuts(plan: Plan) -> Mapping[str, Any]:
    return {} if plan.tensor is None else plan.tensor.cuts


def _predictions(first: Plan, second: Plan) -> Iterator[Change]:
    a, b = first.prediction, second.prediction
    if a is None or b is None:
        if a is not b:
            yield Change("prediction", "none" if a is None else "there", "none" if b is None else "there")
        return
    if a.step_s != b.step_s:
        share = f" ({b.step_s / a.step_s - 1:+.1%})" if a.step_s else ""
        yield Change("step", format_seconds(a.step_s), format_seconds(b.step_s) + share)
    if a.bubble != b.bubble:
        yield Change("bubble", f"{a.bubble:.1%}", f"{b.bubble:.1%}")
    for rank, (x, y) in enumerate(zip(a.memory, b.memory, strict=False)):
        if x.peak_bytes != y.peak_bytes:
            yield Change(f"memory of rank {rank}", format_bytes(x.peak_bytes), format_bytes(y.peak_bytes))
    if a.provenance != b.provenance:
        yield Change("times of units", a.provenance, b.provenance)


def _text(value: Any) -> str:
    if isinstance(value, list | tuple):
        return ", ".join(map(str, value))
    return "unset" if value is None else str(value)


def _span(names: Sequence[str]) -> str:
    if len(names) == 1:
        return names[0]
    return f"{names[0]} .. {names[-1]} ({len(names)})"


def _sample(names: Sequence[str]) -> str:
    return shortened(names) or "none"


First = Annotated[
    Path, typer.Argument(metavar="PLAN", callback=run_path, help="A plan file, or a run, by name or folder.")
]
Second = Annotated[
    Path, typer.Argument(metavar="OTHER_PLAN", callback=run_path, help="What to compare it with.")
]


def compare(first: First, second: Second, as_json: AsJson = False) -> None:
    """Compare two plans, or those of two runs: which units, degrees and settings differ.

    Exit code 0: they decide alike (predictions may differ). 1: they differ.

    For example: shardwright compare runs/train runs/train-2
    """
    found = diff_plans(read_plan(first), read_plan(second))
    if as_json:
        print_json({"alike": not found.decision, **asdict(found)})
    else:
        show_text(found)
    if found.decision:
        raise typer.Exit(FAILED)
