"""``shardwright plan``: makes a plan without running anything."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shardwright.cli.asking.application import (
    NUM_RANKS,
    AsJson,
    Factory,
    say,
    show_text,
)
from shardwright.cli.asking.model import (
    DTYPE_HELP,
    DTYPES,
    Output,
    check_factory,
    check_output,
    full_name,
    write_plan,
)
from shardwright.cli.asking.settings import ConfigFile, Settings, parse_settings, read_settings
from shardwright.errors import UsageError
from shardwright.quantities import MOST_RANKS

if TYPE_CHECKING:
    from shardwright.cluster import Cluster
    from shardwright.config import Config
    from shardwright.plan import Plan
    from shardwright.planner.profiles import MeasuredProfile

NumRanks = Annotated[int, typer.Option(*NUM_RANKS, min=1, max=MOST_RANKS, help="Ranks of the run.")]
Machines = Annotated[
    str | None,
    typer.Option(
        "--cluster",
        metavar="MACHINES",
        help="The machines by name, p4d.24xlarge*4, or a cluster file of shardwright probe.",
    ),
]
Dtype = Annotated[str | None, typer.Option("--dtype", help=DTYPE_HELP)]
SearchDegrees = Annotated[
    bool,
    typer.Option(
        "--search-degrees", help="Choose pipeline, data and shard degrees, too, where they are not set."
    ),
]
ProfileFile = Annotated[
    Path | None,
    typer.Option("--profile", metavar="FILE", help="Measured costs and machines, from shardwright profile."),
]
BuildOnSomething = Annotated[
    str,
    typer.Option(
        "--build-on",
        metavar="DEVICE",
        help="Where FACTORY runs; meta takes no memory.",
    ),
]


def plan(
    factory: Factory,
    num_ranks: NumRanks,
    settings: Settings = None,
    config: ConfigFile = None,
    machines: Machines = None,
    dtype: Dtype = None,
    output: Output = None,
    search_degrees: SearchDegrees = False,
    profile: ProfileFile = None,
    build_on: BuildOnSomething = "meta",
    as_json: AsJson = False,
) -> None:
    """Make a plan: of any model, for any number of ranks, without running it.

    Times are estimated from FLOPs, bytes and the rates of the machines, or taken from a profile:

    shardwright plan model.py:build -n 512 --cluster p4d.24xlarge*64 --dtype bfloat16

    shardwright plan model.py:build -n 8 --profile profile.json --search-degrees
    """
    # Here, because they import pydantic: --help answers before.
    from shardwright.config import Config
    from shardwright.planner.profiles import MeasuredProfile

    dtype = None if dtype is None else full_name(dtype)
    resolved = _with_dtype(Config.merge(read_settings(config), parse_settings(settings or ())), dtype)
    _check(resolved, num_ranks)
    if output is not None:
        check_output(output)
    measured = None if profile is None else MeasuredProfile.read(profile)
    cluster = _cluster(machines, dtype, measured, config=resolved, world=num_ranks)
    check_factory(factory)  # before torch is imported for it
    found = _planned(
        factory,
        build_on,
        config=resolved,
        world=num_ranks,
        cluster=cluster,
        measured=measured,
        search_degrees=search_degrees,
    )
    _hand_out(found, output=output, world=num_ranks, as_json=as_json)


_LOW = {dtype: setting for dtype, setting in DTYPES.items() if dtype != "float32"}
"""The setting that has a model train in a type of 16 bits."""


def _with_dtype(config: "Config", dtype: str | None) -> "Config":
    """The settings of a model that is stored and computes in a type."""
    if dtype is None:
        return config
    if dtype != "float32" and dtype not in _LOW:
        raise UsageError(f"--dtype is {dtype!r}, but it must be one of {', '.join(_LOW)}, float32.")
    other = next(
        (setting for low, setting in _LOW.items() if low != dtype and getattr(config, setting)), None
    )
    if other is not None:
        raise UsageError(f"--dtype is {dtype}, but the settings have {other}. Drop one of the two.")
    return config if dtype == "float32" else config.merge(config, {_LOW[dtype]: True})


def _cluster(
    machines: str | None,
    dtype: str | None,
    measured: "MeasuredProfile | None",
    *,
    config: "Config",
    world: int,
) -> "Cluster":
    from shardwright.cluster import find_machines
    from shardwright.costs.run_cluster import cluster_of

    if machines is not None and measured is not None:
        raise UsageError(
            "--cluster and --profile each say what the machines are, and costs of units hold where they were "
            "measured alone. Drop one of the two."
        )
    if dtype is not None and machines is None:
        raise UsageError(f"--dtype is {dtype}, but only --cluster has rates by dtype. Drop it, or add that.")
    if measured is not None:
        return measured.cluster
    if machines is None:
        return _assumed()
    found = find_machines(machines)
    if world > found.num_ranks:
        raise UsageError(
            f"--num-ranks is {world}, but {found.name} has {found.num_ranks} ranks. Take more nodes, or "
            "fewer ranks."
        )
    own = next((dtype for dtype, setting in _LOW.items() if getattr(config, setting)), "float32")
    return cluster_of(found, dtype=own)


def _assumed() -> "Cluster":
    """Machines where none are named, which is said."""
    from shardwright.cluster import Cluster, Device, Link
    from shardwright.observe.console import Console
    from shardwright.quantities import format_bandwidth, format_flops, format_seconds

    device = Device(name="assumed", flops_per_s=50e9, memory_Bps=10e9)
    near, far = (
        Link(latency_s=2e-5, bandwidth_Bps=5e9),
        Link(latency_s=1e-4, bandwidth_Bps=1e9),
    )
    links = [
        f"{format_bandwidth(each.bandwidth_Bps)} and {format_seconds(each.latency_s)}" for each in (near, far)
    ]
    Console().status(
        f"no --cluster and no --profile: assuming 8 ranks a host, each with "
        f"{format_flops(device.flops_per_s)}/s, {format_bandwidth(device.memory_Bps)} and unlimited memory; "
        f"links in a host {links[0]}, between hosts {links[1]}"
    )
    return Cluster(device=device, ranks_per_node=8, intra_node=near, inter_node=far, host=far)


def _hand_out(plan: "Plan", *, output: Path | None, world: int, as_json: bool) -> None:
    if output is not None:
        write_plan(plan, output)
    from shardwright.observe.plan_text import format_plan_in_full

    show_text(plan.to_json() if as_json else format_plan_in_full(plan) + "\n", end="")
    if output is not None:
        say(f"wrote {output}; run it: shardwright run -n {world} --plan {output} train.py")


def _planned(
    factory: str,
    build_on: str,
    *,
    config: "Config",
    world: int,
    cluster: "Cluster",
    measured: "MeasuredProfile | None",
    search_degrees: bool,
) -> "Plan":
    # Here, because they import torch: the checks above answer before.
    from shardwright.cli.asking.factory import advice_on_meta, build
    from shardwright.observe.console import Console
    from shardwright.torch.units.offline_planner import plan_model

    console = Console()
    with console.phase(f"building {factory}"):
        sample = build(factory, device=build_on)
    with console.phase(f"tracing and planning for {world} ranks") as phase, advice_on_meta(build_on):
        return plan_model(
            sample.model,
            *sample.args,
            config=config,
            world_size=world,
            cluster=cluster,
            measured=measured,
            loss=sample.loss,
            search_degrees=search_degrees,
            progress=lambda done, total: phase.update(done, total=total),
            **sample.kwargs,
        )


def _check(config: "Config", world: int) -> None:
    if config.plan_file is not None:
        raise UsageError(
            f"plan is {config.plan!r}, but a plan is to be made. Remove it, or: shardwright show "
            f"{config.plan}"
        )
    if not config.auto_partition:
        raise UsageError(
            "auto_partition is false, but only a training script says where sw.partition puts the units. "
            "Run it once: its run folder has the plan."
        )
    config.resolve_world(world)
