"""Predicted steps against measured ones: pipelines, replicas, shards, recomputation, microbatches.

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
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"
os.environ["PYTHONWARNINGS"] = "ignore"

from check import Check, lines
from machine import circumstances
from planner_ranks import predicted_and_measured
from shardwright.plan import align
from shardwright.testing import run_ranks
from shardwright.testing.cluster import Cluster, missing_for_networks
from shardwright.units import format_seconds

_RATE = 1e9
_TIMEOUT_S = 600


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
    steps = 2 if options.quick else options.steps
    cases = [case for case in _CASES if case.ranks in options.ranks and options.match in str(case)]
    cases = cases[:: 5 if options.quick else 1]
    rows = [["hosts", "ranks", "configuration", "predicted", "measured", "error", "chosen"]]
    found = []
    for hosts in (1, 2):
        if options.only not in (None, ("one-host", "two-hosts")[hosts - 1]):
            continue
        if hosts == 2 and (missing := missing_for_networks()) is not None:
            print(f"two hosts: not measured, {missing}")
            continue
        for case in cases:
            if hosts == 2 and not case.on_two_hosts:
                continue
            predicted, measured, chosen = (_on_one_host if hosts == 1 else _on_two_hosts)(case, steps)
            error = predicted / measured - 1
            found.append({"hosts": hosts, "case": str(case), "predicted": predicted, "measured": measured})
            times = (format_seconds(predicted), format_seconds(measured))
            rows.append([str(hosts), str(case.ranks), str(case), *times, f"{error:+.1%}", chosen])
            print(f"... {case} on {hosts}: {error:+.1%}", file=sys.stderr, flush=True)
    if not options.check:
        print(f"\n{align(rows)}\n")
    checks = _checks(found)
    print("\n".join(lines(checks)))
    if options.json is not None:
        verdicts = [asdict(check) | {"passes": check.passes} for check in checks]
        document = {"circumstances": where, "figures": found, "checks": verdicts}
        options.json.write_text(json.dumps(document, indent=1))
    return 1 if options.check and not all(check.passes for check in checks) else 0


def _on_one_host(case: Case, steps: int) -> tuple[float, float, str]:
    found: tuple[float, float, str] = run_ranks(
        predicted_and_measured, case.ranks, case.task, dict(case.settings), steps, timeout_s=_TIMEOUT_S
    )[0]
    return found


def _on_two_hosts(case: Case, steps: int) -> tuple[float, float, str]:
    script = str(Path(__file__).with_name("planner_ranks.py"))
    with (
        tempfile.TemporaryDirectory() as folder,
        Cluster(hosts=2, ranks_per_host=2, own_cores=True) as machines,
    ):
        machines.network.set_rate(_RATE)
        out = Path(folder, "figures.json")
        words = ["--task", case.task, "--settings", json.dumps(dict(case.settings)), "--steps", str(steps)]
        machines.torchrun([script, *words, "--out", str(out)], timeout_s=_TIMEOUT_S)
        predicted, measured, chosen = json.loads(out.read_text())
        return predicted, measured, chosen


def _checks(found: list[dict[str, Any]]) -> list[Check]:
    if not found:
        return []
    errors = {
        f"{each['case']}, {each['hosts']} hosts": each["predicted"] / each["measured"] - 1 for each in found
    }
    worst = max(errors, key=lambda name: abs(errors[name]))
    mean = sum(map(abs, errors.values())) / len(errors)
    return [
        Check(section="P", what="steps: mean error", value=mean, target=0.07, percent=True),
        Check(
            section="P",
            what="steps: worst error",
            value=abs(errors[worst]),
            target=0.15,
            percent=True,
            where=worst,
        ),
    ]


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--only", choices=["one-host", "two-hosts"])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--match", default="", help="only configurations whose line has this text")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--quick", action="store_true", help="few configurations, two steps each")
    parser.add_argument("--check", action="store_true", help="only the targets; exit 1 where one is missed")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
