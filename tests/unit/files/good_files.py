"""One good file of each kind that a user names, and what each reader makes of one."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from observe.run_folders import run_folder
from planned import planned

from shardwright.cli.asking.model import model_of
from shardwright.cli.asking.settings import read_settings
from shardwright.cluster import Cluster, Device, Link, find_machines
from shardwright.cluster.cluster_file import read_inventory, write_inventory
from shardwright.collectives.prices import Curve, Line, Prices, read_prices, write_prices
from shardwright.collectives.steps import Topology
from shardwright.config import Config
from shardwright.launch.distribution import read_distribution
from shardwright.launch.ranks.smp_parameters import check_smp_parameters, read_smp_parameters
from shardwright.observe.report import gather
from shardwright.observe.summary import summarize
from shardwright.planner.profiles import MeasuredProfile
from shardwright.profile import UnitCost

__all__ = ["READERS", "Reader"]


@dataclass(frozen=True)
class Reader:
    """A reader of files."""

    name: str
    write: Callable[[Path], Any]
    read: Callable[[Path], Any]

    def __str__(self) -> str:
        return self.name

    def path(self, folder: Path) -> Path:
        return folder / self.name


def _profile(folder: Path) -> None:
    link = Link(latency_s=1e-5, bandwidth_Bps=1e9)
    device = Device(name="cpu", flops_per_s=1e9, memory_Bps=1e9)
    cluster = Cluster(device=device, ranks_per_node=2, cores_per_node=2, intra_node=link, inter_node=link)
    costs = {"Linear": UnitCost(forward_s=0.1, backward_s=0.2, provenance="measured")}
    found = MeasuredProfile(fingerprint="f", costs=costs, cluster=cluster, num_ranks=2, when="now")
    found.write(folder / "profile.json")


def _prices(folder: Path) -> None:
    line, curve = Line(1e-6, 1e9), Curve(((1e3, 1e-5), (1e6, 1e-3)))
    prices = Prices(
        own={"all_reduce": curve},
        copy=line,
        combine=line,
        note_s=1e-6,
        message=line,
        local_message=line,
        gloo={"all_reduce": curve},
        source="here",
    )
    write_prices(folder / "prices.json", prices, Topology(((0, 1), (2, 3))))


def _hugging_face(folder: Path) -> None:
    config = {
        "model_type": "llama",
        "num_attention_heads": 8,
        "num_hidden_layers": 4,
        "hidden_size": 64,
        "vocab_size": 100,
        "max_position_embeddings": 128,
        "intermediate_size": 256,
        "chat_template": "two\nlines",
    }
    (folder / "config.json").write_text(json.dumps(config, indent=1))


def _run(folder: Path) -> Path:
    return run_folder(folder / "run", planned())


READERS = (
    Reader("plan.json", lambda f: planned().write(f / "plan.json"), lambda f: gather(f / "plan.json")),
    Reader(
        "cluster.yaml",
        lambda f: write_inventory(f / "cluster.yaml", find_machines("p4d.24xlarge*2")),
        lambda f: read_inventory(f / "cluster.yaml"),
    ),
    Reader("profile.json", _profile, lambda f: MeasuredProfile.read(f / "profile.json")),
    Reader("prices.json", _prices, lambda f: read_prices(f / "prices.json")),
    Reader(
        "config.json", _hugging_face, lambda f: model_of(str(f / "config.json"), "", on_accelerators=True)
    ),
    Reader(
        "settings.yaml",
        lambda f: (f / "settings.yaml").write_text("microbatches: 4\npipeline: 1f1b\nrun_name: first\n"),
        lambda f: Config.parse(read_settings(f / "settings.yaml")),
    ),
    Reader(
        "distribution.yaml",
        lambda f: (f / "distribution.yaml").write_text("microbatches: 4\n"),
        lambda f: read_distribution({"shardwright": {"parameters": str(f / "distribution.yaml")}}),
    ),
    Reader(
        "smp.json",
        lambda f: (f / "smp.json").write_text('{"partitions": 2, "microbatches": 4}'),
        lambda f: check_smp_parameters(read_smp_parameters(f / "smp.json")),
    ),
    Reader("run/metrics.jsonl", _run, lambda f: (summarize(f / "run"), gather(f / "run"))),
    Reader("run/steps.json", _run, lambda f: gather(f / "run")),
    Reader("run/plan.json", _run, lambda f: (summarize(f / "run"), gather(f / "run"))),
)
