"""Is the planner right? Predicted steps, memory and choices against measured ones.

P  steps of pipelines, replicas, shards, shared layers, recomputation, microbatches
M  peak memory of the same
B  the plan that it chooses, against everything that two ranks can do

python benchmarks/planner.py
python benchmarks/planner.py --only one-host --ranks 2
python benchmarks/planner.py --quick             # does it still run?

Every configuration is planned from what it measures itself, and then run. On two hosts, which are network
namespaces of this machine (root and iproute2 are needed), most of those on four ranks are run again over a
link of 1 Gbit/s, with half of the cores for each host.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"
os.environ["PYTHONWARNINGS"] = "ignore"

from check import Check, lines
from machine import circumstances
from planner_ranks import TASKS, all_tried, predicted_and_measured, predicted_and_used_bytes
from shardwright.quantities import format_bytes, format_seconds
from shardwright.testing import run_ranks
from shardwright.testing.cluster import Cluster, missing_for_networks
from shardwright.text import align

_RATE = 1e9
_TIMEOUT_S = 900
_VERIFIED = 3
_TRIAL_STEPS = 3
_ROUNDS = 4


@dataclass(frozen=True, slots=True)
class Case:
    """A configuration.

    Attributes:
        ranks: that it has.
        task: what is trained; see `planner_ranks.TASKS`.
        settings: degrees, microbatches and recomputation.
        on_two_hosts: it is run there, too.
    """

    ranks: int
    task: str
    settings: Mapping[str, Any]
    on_two_hosts: bool = False

    def __str__(self) -> str:
        names = {
            "pipeline_parallel_degree": "pipeline",
            "data_parallel_degree": "data",
            "sharded_data_parallel_degree": "shard",
            "tensor_parallel_degree": "tensor",
            "activation_checkpointing": "recompute",
        }
        given = ", ".join(f"{names.get(key, key)} {value}" for key, value in self.settings.items())
        return f"{self.task}, {given}"


def _case(ranks: int, pipeline: int, data: int, shard: int = 1, **more: Any) -> Case:
    task, two = more.pop("task", "gpt"), more.pop("on_two_hosts", False)
    settings = {"pipeline_parallel_degree": pipeline, "data_parallel_degree": data}
    if shard > 1:
        settings["sharded_data_parallel_degree"] = shard
    return Case(ranks, task, settings | more, two)


_CASES = (
    _case(2, 2, 1, microbatches=4),
    _case(2, 2, 1, microbatches=8),
    _case(2, 2, 1, microbatches=4, activation_checkpointing="full"),
    _case(2, 1, 2, microbatches=1),
    _case(2, 1, 2, microbatches=4),
    _case(2, 1, 2, 2, microbatches=1),
    _case(2, 1, 2, 2, microbatches=4),
    _case(2, 1, 2, microbatches=1, activation_checkpointing="full"),
    _case(2, 2, 1, microbatches=4, task="conv net"),
    _case(2, 1, 2, microbatches=1, task="wide gpt"),
    _case(2, 1, 1, tensor_parallel_degree=2, microbatches=1),
    _case(2, 1, 1, tensor_parallel_degree=2, microbatches=4, task="wide gpt"),
    _case(4, 4, 1, microbatches=8, on_two_hosts=True),
    _case(4, 2, 2, microbatches=4, on_two_hosts=True),
    _case(4, 2, 2, 2, microbatches=4, on_two_hosts=True),
    _case(4, 1, 4, microbatches=1, on_two_hosts=True),
    _case(4, 1, 4, 2, microbatches=1, on_two_hosts=True),
    _case(4, 1, 4, 4, microbatches=1, on_two_hosts=True),
    _case(4, 1, 4, 4, microbatches=4, on_two_hosts=True),
    _case(4, 4, 1, microbatches=8, activation_checkpointing="full"),
    _case(4, 1, 4, 4, microbatches=1, task="wide gpt", on_two_hosts=True),
    _case(4, 2, 2, microbatches=4, task="conv net"),
)


def main() -> int:
    """Runs what is asked for."""
    options = _options()
    where = circumstances()
    if not options.check:
        print("\n".join(f"{key}: {value}" for key, value in where.items()), flush=True)
    checks: list[Check] = []
    figures: dict[str, Any] = {}
    for section, run in (("P", _steps), ("M", _memory), ("B", _choices)):
        if options.section in (None, section):
            found, table, section_checks = run(options)
            figures[section] = found
            checks += section_checks
            if not options.check and found:
                print(f"\n{align(table)}", flush=True)
    print("\n" + "\n".join(lines(checks)))
    if options.json is not None:
        verdicts = [asdict(check) | {"passes": check.passes} for check in checks]
        document = {"circumstances": where, "figures": figures, "checks": verdicts}
        options.json.write_text(json.dumps(document, indent=1))
    return 1 if options.check and not all(check.passes for check in checks) else 0


_Section = tuple[list[dict[str, Any]], list[list[str]], list[Check]]
"""Figures, a table, and what is checked."""


def _hosts(options: argparse.Namespace) -> Iterator[int]:
    """Numbers of hosts that are asked for, and that this machine can have."""
    for hosts in (1, 2):
        if options.only not in (None, ("one-host", "two-hosts")[hosts - 1]):
            continue
        if hosts == 2 and (missing := missing_for_networks()) is not None:
            print(f"two hosts: not measured, {missing}")
            continue
        yield hosts


def _cases(options: argparse.Namespace) -> list[Case]:
    cases = [case for case in _CASES if case.ranks in options.ranks and options.match in str(case)]
    return cases[:: 5 if options.quick else 1]


def _steps(options: argparse.Namespace) -> _Section:
    steps = 2 if options.quick else options.steps
    rows = [["hosts", "ranks", "configuration", "predicted", "measured", "error", "chosen"]]
    found = []
    for hosts in _hosts(options):
        for case in _cases(options):
            if hosts == 2 and not case.on_two_hosts:
                continue
            predicted, measured, chosen = (_on_one_host if hosts == 1 else _on_two_hosts)(case, steps)
            error = predicted / measured - 1
            found.append({"hosts": hosts, "case": str(case), "predicted": predicted, "measured": measured})
            times = (format_seconds(predicted), format_seconds(measured))
            rows.append([str(hosts), str(case.ranks), str(case), *times, f"{error:+.1%}", chosen])
            _tell(f"{case} on {hosts}: {error:+.1%}")
    return found, rows, _error_checks("P", "steps", found, targets=(0.07, 0.15))


def _memory(options: argparse.Namespace) -> _Section:
    rows = [["ranks", "configuration", "rank", "predicted", "in use", "error"]]
    found = []
    for case in _cases(options):
        figures = run_ranks(
            predicted_and_used_bytes, case.ranks, case.task, dict(case.settings), timeout_s=_TIMEOUT_S
        )
        for rank, (predicted, measured) in enumerate(figures):
            name = f"{case}, rank {rank}"
            found.append({"hosts": 1, "case": name, "predicted": predicted, "measured": measured})
            sizes = (format_bytes(predicted), format_bytes(measured))
            rows.append([str(case.ranks), str(case), str(rank), *sizes, f"{predicted / measured - 1:+.1%}"])
        _tell(f"memory of {case}")
    return found, rows, _error_checks("M", "peak memory", found, targets=(0.05, None))


def _choices(options: argparse.Namespace) -> _Section:
    """Everything that two ranks can do, on one host and on two: is the best by prediction the best?"""
    steps = 2 if options.quick else min(options.steps, _TRIAL_STEPS)
    rows = [["hosts", "model", "tried", "by prediction", "slower than the best", "of the best three"]]
    found = []
    for hosts in _hosts(options):
        tasks = [task for task in TASKS if options.match in task]
        for task in tasks[: 1 if options.quick else None]:
            rounds = 0 if options.quick else _ROUNDS
            try_all = _tried_on_one_host if hosts == 1 else _tried_on_two_hosts
            tried = try_all(task, steps, rounds)
            # Only what was tried in every round can be told to be better than the rest.
            often = [
                (n, statistics.median(each)) for n, (_, _, each) in enumerate(tried) if len(each) > rounds
            ]
            best = min(seconds for _, seconds in often)
            chosen, verified = (
                min(seconds for n, seconds in often if n < most) / best - 1 for most in (1, _VERIFIED)
            )
            found.append(
                {"hosts": hosts, "task": task, "tried": tried, "chosen": chosen, "verified": verified}
            )
            rows.append(
                [str(hosts), task, str(len(tried)), tried[0][0], f"{chosen:+.1%}", f"{verified:+.1%}"]
            )
            _tell(f"{task} on {hosts}: {chosen:+.1%}, {verified:+.1%}")
    checks = [
        Check(
            section="B",
            what=f"{what}: slower than the best",
            value=max((each[key] for each in found), default=0.0),
            target=0.03,
            percent=True,
        )
        for key, what in (("chosen", "plan by prediction"), ("verified", "best of 3 by prediction"))
    ]
    return found, rows, checks if found else []


def _tell(text: str) -> None:
    print(f"... {text}", file=sys.stderr, flush=True)


_Tried = list[tuple[str, float, list[float]]]


def _tried_on_one_host(task: str, steps: int, rounds: int) -> _Tried:
    found: _Tried = run_ranks(all_tried, 2, task, steps, rounds, timeout_s=_TIMEOUT_S)[0]
    return found


def _tried_on_two_hosts(task: str, steps: int, rounds: int) -> _Tried:
    words = ["--task", task, "--steps", str(steps), "--rounds", str(rounds)]
    found: _Tried = _under_torchrun(words, ranks_per_host=1)
    return found


def _under_torchrun(words: list[str], *, ranks_per_host: int) -> Any:
    """What `planner_ranks` writes on two hosts with a slow link and cores of their own."""
    script = str(Path(__file__).with_name("planner_ranks.py"))
    machines = Cluster(hosts=2, ranks_per_host=ranks_per_host, own_cores=True)
    with tempfile.TemporaryDirectory() as folder, machines:
        machines.network.set_rate(_RATE)
        out = Path(folder, "figures.json")
        machines.torchrun([script, *words, "--out", str(out)], timeout_s=_TIMEOUT_S)
        return json.loads(out.read_text())


def _on_one_host(case: Case, steps: int) -> tuple[float, float, str]:
    found: tuple[float, float, str] = run_ranks(
        predicted_and_measured, case.ranks, case.task, dict(case.settings), steps, timeout_s=_TIMEOUT_S
    )[0]
    return found


def _on_two_hosts(case: Case, steps: int) -> tuple[float, float, str]:
    words = ["--task", case.task, "--settings", json.dumps(dict(case.settings)), "--steps", str(steps)]
    predicted, measured, chosen = _under_torchrun(words, ranks_per_host=case.ranks // 2)
    return predicted, measured, chosen


def _error_checks(
    section: str, what: str, found: list[dict[str, Any]], *, targets: tuple[float, float | None]
) -> list[Check]:
    """The mean error and the worst one, which has no target where that is None."""
    if not found:
        return []
    errors = {
        f"{each['case']}, {each['hosts']} hosts": each["predicted"] / each["measured"] - 1 for each in found
    }
    worst = max(errors, key=lambda name: abs(errors[name]))
    mean = sum(map(abs, errors.values())) / len(errors)
    mean_target, worst_target = targets
    checks = [
        Check(section=section, what=f"{what}: mean error", value=mean, target=mean_target, percent=True)
    ]
    if worst_target is not None:
        checks.append(
            Check(
                section=section,
                what=f"{what}: worst error",
                value=abs(errors[worst]),
                target=worst_target,
                percent=True,
                where=worst,
            )
        )
    return checks


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--section", choices=["P", "M", "B"], help="steps, memory, or the best plan")
    parser.add_argument("--only", choices=["one-host", "two-hosts"])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--match", default="", help="only configurations, or models, with this text")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--quick", action="store_true", help="few configurations, two steps each")
    parser.add_argument("--check", action="store_true", help="only the targets; exit 1 where one is missed")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
