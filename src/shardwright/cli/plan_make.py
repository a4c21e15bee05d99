"""``shardwright plan make``: a plan without running anything."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from shardwright.cli.application import AsJson, BuildOn, Factory
from shardwright.cli.settings import ConfigFile, Settings, parse_settings, read_settings
from shardwright.cluster import Cluster, Device, Link
from shardwright.cluster.machine_file import read_cluster
from shardwright.config import Config
from shardwright.errors import UsageError
from shardwright.observe.console import Console
from shardwright.observe.plan_text import format_plan_in_full
from shardwright.plan import Plan
from shardwright.units import format_seconds

__all__ = ["make"]

_ASSUMED = Cluster(
    device=Device(name="assumed", flops_per_s=50e9, memory_Bps=10e9),
    ranks_per_node=8,
    intra_node=Link(latency_s=2e-5, bandwidth_Bps=5e9),
    inter_node=Link(latency_s=1e-4, bandwidth_Bps=1e9),
)

World = Annotated[int, typer.Option("--world", "-n", min=1, help="Ranks of the run.")]
Machine = Annotated[
    Path | None,
    typer.Option("--machine", metavar="FILE", help="The machines, YAML or JSON; see docs/commands.md."),
]
SearchDegrees = Annotated[
    bool,
    typer.Option(
        "--search-degrees", help="Choose pipeline, data and shard degrees, too, where they are not set."
    ),
]
Output = Annotated[
    Path | None, typer.Option("--output", "-o", metavar="FILE", help="Write the plan file, for run --plan.")
]


def make(
    factory: Factory,
    world: World,
    settings: Settings = None,
    config: ConfigFile = None,
    machine: Machine = None,
    output: Output = None,
    search_degrees: SearchDegrees = False,
    build_on: BuildOn = "meta",
    as_json: AsJson = False,
) -> None:
    """Make a plan without running it: of any model, for any number of ranks, on this machine.

    Times are estimated from FLOPs, bytes and the rates of the machines. For example:

    shardwright plan make model.py:build --world 512 --machine a100.yaml
    """
    resolved = Config.merge(read_settings(config), parse_settings(settings or ()))
    _check(resolved, world)
    cluster = _ASSUMED if machine is None else read_cluster(machine)
    console = Console()
    if machine is None:
        console.status(_assumption())
    plan = _plan(
        factory,
        build_on,
        config=resolved,
        world=world,
        cluster=cluster,
        search_degrees=search_degrees,
        console=console,
    )
    if output is not None:
        try:
            plan.write(output)
        except OSError as error:
            raise UsageError(f"--output {output} cannot be written: {error.strerror}.") from error
    print(plan.to_json() if as_json else format_plan_in_full(plan) + "\n", end="")
    if output is not None:
        print(f"wrote {output}; run it: shardwright run -n {world} --plan {output} train.py", file=sys.stderr)


def _plan(
    factory: str,
    build_on: str,
    *,
    config: Config,
    world: int,
    cluster: Cluster,
    search_degrees: bool,
    console: Console,
) -> Plan:
    # Here, because they import torch: the checks above answer before.
    from shardwright.cli.factory import advice_on_meta, build
    from shardwright.torch.inspection import plan_model

    with console.phase(f"building {factory}"):
        sample = build(factory, device=build_on)
    with console.phase(f"tracing and planning for {world} ranks"), advice_on_meta(build_on):
        return plan_model(
            sample.model,
            *sample.args,
            config=config,
            world_size=world,
            cluster=cluster,
            loss=sample.loss,
            search_degrees=search_degrees,
            **sample.kwargs,
        )


def _check(config: Config, world: int) -> None:
    if config.plan is not None:
        raise UsageError(
            f"plan is {config.plan!r}, but a plan is to be made. Remove it, or: plan show {config.plan}"
        )
    if not config.auto_partition:
        raise UsageError(
            "auto_partition is false, but only a training script says where sw.partition puts the units. "
            "Run it once: its run folder has the plan."
        )
    config.resolve_world(world)


def _assumption() -> str:
    device, near, far = _ASSUMED.device, _ASSUMED.intra_node, _ASSUMED.inter_node
    return (
        f"no --machine: assuming {_ASSUMED.ranks_per_node} ranks a host, each with "
        f"{device.flops_per_s / 1e9:.0f} GFLOP/s, {device.memory_Bps / 1e9:.0f} GB/s and unlimited memory; "
        f"links in a host {_describe(near)}, between hosts {_describe(far)}"
    )


def _describe(link: Link) -> str:
    return f"{link.bandwidth_Bps / 1e9:.0f} GB/s and {format_seconds(link.latency_s)}"
