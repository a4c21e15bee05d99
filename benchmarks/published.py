"""Judges the formulas of costs by runs that were published, each predicted by a fit to all others.

python benchmarks/published.py
python benchmarks/published.py --quick            # a tenth of the runs is left out at a time
python benchmarks/published.py --tables more.json --write src/shardwright/costs/calibration.yaml

A  seconds of a step: error of each run that was left out of the fit, by family of accelerators
B  memory: bytes of states and activations against published ones, and of layouts that are known to fit
C  seconds again, of runs in bfloat16 that were published since 2024, of dense models and of mixtures: each is
   left out alone, and blind, with all of its table

Efficiencies belong to a family of accelerators, or to a runtime on it; none to a run or a model. Which rows
are not used is listed with the reason. The tables that come along hold facts with their sources.
"""

import argparse
import datetime
import json
import sys
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from numpy.typing import NDArray

from check import Check, lines
from fit import Fit, MeasuredRun, Runs, fit, leave_out, ratios
from machine import circumstances
from published_memory import layout_shares, memory_ratios
from published_runs import family, measured_run, recipe_runs, why_not
from shardwright.costs.calibration import TENTH, document_of
from shardwright.text import align

_HERE = Path(__file__).with_name("published")
_FAMILIES = ("A100", "H100")
_NUM_FOLDS = 10
_NUM_WORST = 10
_MEGATRON_AND_SMP = ("megatron", "smp")
_RECENT = 2024
_BFLOAT16 = ("bf16", "bfloat16")
_INSIDE = 0.8
"""Share of the runs that an interval should contain."""

_NOTES = {
    (
        "A100",
        "deepspeed",
    ): "of 2022; it changed much over the years (deepspeed-2021 is ZeRO-3 of a year before)"
}
"""Runtimes whose figures depend on their version."""


def main() -> int:
    """Runs what is asked for."""
    options = _options()
    where = circumstances()
    rows = json.loads(options.tables.read_text())
    recipes = recipe_runs(yaml.safe_load(options.recipes.read_text()))
    checks: list[Check] = []
    found: dict[str, Any] = {}
    written: dict[str, Any] = {}
    recent: list[tuple[bool, float, float]] = []
    for name in _FAMILIES:
        runs = [measured_run(row) for row in rows if family(row) == name and why_not(row) is None]
        runs += [run for run in recipes if run.accelerator == name]
        columns = Runs.of(runs)
        fitted = fit(columns)
        tenths = [number % _NUM_FOLDS for number in range(len(runs))] if options.quick else None
        apart = leave_out(columns, fitted, folds=tenths, told=partial(_told, f"{name}, alone"))
        tables = [run.group for run in runs]
        blind = leave_out(columns, fitted, folds=tables, told=partial(_told, f"{name}, blind"))
        found[name] = [
            {
                "run": run.name,
                "runtime": run.runtime,
                "group": run.group,
                "fit": float(a),
                "left out": float(b),
                "blind": float(c),
            }
            for run, a, b, c in zip(runs, ratios(columns, fitted), apart, blind, strict=True)
        ]
        recent += [
            (bool(run.shape.experts > 1), abs(float(b) - 1), abs(float(c) - 1))
            for run, b, c in zip(runs, apart, blind, strict=True)
            if run.year is not None and run.year >= _RECENT and run.dtype in _BFLOAT16
        ]
        written[name] = _calibration(name, runs, fitted, apart)
        checks += _checks(name, runs, apart)
        if not options.check:
            print(f"\n{name}: {len(runs)} runs\n{align(_groups(runs, ratios(columns, fitted), apart))}")
            print(f"\nthe worst\n{align(_worst(runs, apart))}")
    checks += _recent_checks(recent)
    if not options.check:
        reasons = Counter((row["group"], reason) for row in rows if (reason := why_not(row)))
        print("\nnot used\n" + align([[group, str(n), why] for (group, why), n in sorted(reasons.items())]))
    found["memory"] = memory = memory_ratios(json.loads(options.memory.read_text()))
    worst = max(memory, key=lambda name: abs(memory[name] - 1))
    value = max(memory[worst], 1 / memory[worst])
    checks.append(Check(section="B", what="bytes / published, worst", value=value, target=1.02, where=worst))
    shares = layout_shares(recipes)
    worst = max(shares, key=lambda name: shares[name])
    what = "bytes of what ran in 80 GB / of a search, most"
    checks.append(Check(section="B", what=what, value=shares[worst], target=1.0, where=worst))
    print("\n" + "\n".join(lines(checks)))
    if options.write is not None:
        created = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d")
        options.write.write_text(
            _HEAD + yaml.safe_dump(document_of(written, created=created), sort_keys=False)
        )
    if options.json is not None:
        verdicts = [asdict(check) | {"passes": check.passes} for check in checks]
        document = {"circumstances": where, "figures": found, "checks": verdicts}
        options.json.write_text(json.dumps(document, indent=1))
    return 1 if options.check and not all(check.passes for check in checks) else 0


_HEAD = """\
# Efficiencies fitted to published runs by benchmarks/published.py --write; docs/planning_costs.md tells more.
# spread: of log(predicted / measured) of runs left out of the fit; eight of ten are within 1.28 times it.
# network_Bps: of a node, the fastest of the runs.
# note: what is known of the runtime's versions; intervals are wider there.
"""


def _checks(name: str, runs: Sequence[MeasuredRun], apart: NDArray[np.float64]) -> list[Check]:
    errors = abs(apart - 1)
    checks = [
        Check(
            section="A",
            what=f"{name}: mean error of all runs, left out",
            value=float(errors.mean()),
            target=0.08,
            percent=True,
        )
    ]
    chosen = np.array([run.runtime in _MEGATRON_AND_SMP for run in runs])
    if chosen.any() and name == "A100":
        what = f"{name}: mean error of Megatron and SMP, left out"
        value = float(errors[chosen].mean())
        checks.append(Check(section="A", what=what, value=value, target=0.06, percent=True))
    return checks


def _recent_checks(recent: Sequence[tuple[bool, float, float]]) -> list[Check]:
    checks = []
    for mixture, kind, target in ((False, "dense models", 0.12), (True, "mixtures", 0.18)):
        errors = np.array([each[1:] for each in recent if each[0] == mixture]).mean(axis=0)
        for how, value in zip(("left out", "blind"), errors.tolist(), strict=True):
            what = f"bfloat16 since {_RECENT}, {kind}: mean error, {how}"
            checks.append(Check(section="C", what=what, value=value, target=target, percent=True))
    return checks


def _told(what: str, done: int, number: int) -> None:
    if done == number or done % 10 == 0:
        print(f"{what}: {done} of {number} runs", file=sys.stderr, flush=True)


def _groups(
    runs: Sequence[MeasuredRun], fitted: NDArray[np.float64], apart: NDArray[np.float64]
) -> list[list[str]]:
    members: dict[str, list[int]] = defaultdict(list)
    for number, run in enumerate(runs):
        members[f"{run.runtime}, {run.group}"].append(number)
    runtime, errors = np.array([run.runtime for run in runs]), abs(np.log(apart))
    spread = {name: _spread(errors[runtime == name]) for name in set(runtime.tolist())}
    rows = [["runtime, table", "runs", "fit", "left out", "bias", "worst", "in the interval"]]
    for name, numbers in sorted(members.items()):
        own = apart[numbers] - 1
        inside = (errors[numbers] <= TENTH * spread[runs[numbers[0]].runtime]).mean()
        figures = (abs(fitted[numbers] - 1).mean(), abs(own).mean(), own.mean(), abs(own).max(), inside)
        rows.append([name, str(len(numbers)), *(f"{figure:.1%}" for figure in figures)])
    return rows


def _worst(runs: Sequence[MeasuredRun], apart: NDArray[np.float64]) -> list[list[str]]:
    order = np.argsort(-abs(np.log(apart)))[:_NUM_WORST]
    return [[f"{apart[number] - 1:+.0%}", runs[number].runtime, runs[number].name] for number in order]


def _calibration(
    name: str, runs: Sequence[MeasuredRun], fitted: Fit, apart: NDArray[np.float64]
) -> dict[str, Any]:
    runtime = np.array([run.runtime for run in runs])
    found: dict[str, Any] = {}
    for each, values in fitted.of_runtimes.items():
        errors = abs(np.log(apart[runtime == each]))
        found[each] = {
            "runs": len(errors),
            "network_Bps": max(float(run.rates.network_Bps) for run in runs if run.runtime == each),
            "spread": _spread(errors),
            **({"note": _NOTES[name, each]} if (name, each) in _NOTES else {}),
            "efficiencies": _rounded(values),
        }
    return {"common": _rounded(fitted.of_accelerators), "runtimes": found}


def _spread(errors: NDArray[np.float64]) -> float:
    """The spread whose interval contains eight of ten such errors, and as many of those to come."""
    share = min(1.0, _INSIDE * (len(errors) + 1) / len(errors))
    return float(f"{np.quantile(errors, share) / TENTH:.3g}")


def _rounded(values: dict[str, float]) -> dict[str, float]:
    return {name: float(f"{value:.4g}") for name, value in values.items()}


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--tables", type=Path, default=_HERE / "runs.json", help="published runs")
    parser.add_argument("--recipes", type=Path, default=_HERE / "recipes.yaml", help="of others")
    parser.add_argument("--memory", type=Path, default=_HERE / "memory.json", help="published memory")
    parser.add_argument("--write", type=Path, help="where the fitted efficiencies go")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--quick", action="store_true", help="leave ten groups out, not each run")
    parser.add_argument("--check", action="store_true", help="only the targets; exit 1 where one is missed")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
