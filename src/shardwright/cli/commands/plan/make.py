"""``shardwright plan make``: makes a plan without running anything."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer

from shardwright.cli.asking.application import NUM_RANKS, AsJson, Factory, say, show_text
from shardwright.cli.asking.dtype import DTYPE_HELP, full_name
from shardwright.cli.asking.factory_name import check_factory
from shardwright.cli.asking.measuring_order import Order
from shardwright.cli.asking.plan_output import Output, check_output, write_plan
from shardwright.cli.asking.settings import ConfigFile, Settings, parse_settings, read_settings
from shardwright.cli.commands.plan.verify import verified_plan
from shardwright.cli.commands.run import Endpoint, NodeRank, NumNodes
from shardwright.cluster import Cluster, Device, Link, find_machines
from shardwright.cluster.machine_file import read_cluster
from shardwright.config import Config
from shardwright.costs.run_cluster import cluster_of
from shardwright.errors import UsageError
from shardwright.limits import MOST_RANKS
from shardwright.observe.console import Console
from shardwright.observe.plan_text import format_plan_in_full
from shardwright.plan import Plan
from shardwright.planner.chain.profile_file import MeasuredProfile
from shardwright.quantities import format_bandwidth, format_flops, format_seconds

__all__ = ["make"]

_ASSUMED = Cluster(
    device=Device(name="assumed", flops_per_s=50e9, memory_Bps=10e9),
    ranks_per_node=8,
    intra_node=Link(latency_s=2e-5, bandwidth_Bps=5e9),
    inter_node=Link(latency_s=1e-4, bandwidth_Bps=1e9),
    host=Link(latency_s=1e-4, bandwidth_Bps=1e9),
)

_MOST_TRIAL_STEPS = 10_000

NumRanks = Annotated[int, typer.Option(*NUM_RANKS, min=1, max=MOST_RANKS, help="Ranks of the run.")]
Machine = Annotated[
    Path | None,
    typer.Option("--machine", metavar="FILE", help="The machines, YAML or JSON; see docs/commands.md."),
]
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
Verify = Annotated[
    int,
    typer.Option(
        "--verify",
        metavar="N",
        min=0,
        max=20,
        help="Measure on this machine, run the best N plans for some steps, keep the fastest.",
    ),
]
TrialSteps = Annotated[
    int | None,
    typer.Option(
        "--trial-steps", min=1, max=_MOST_TRIAL_STEPS, help="Steps of a trial of --verify (default: 5)."
    ),
]
_TRIAL_STEPS = 5
BuildOnSomething = Annotated[
    str | None,
    typer.Option(
        "--build-on",
        metavar="DEVICE",
        help="Where FACTORY runs; meta takes no memory. Default: meta, with --verify cpu.",
    ),
]


def make(
    factory: Factory,
    num_ranks: NumRanks,
    settings: Settings = None,
    config: ConfigFile = None,
    machine: Machine = None,
    machines: Machines = None,
    dtype: Dtype = None,
    output: Output = None,
    search_degrees: SearchDegrees = False,
    profile: ProfileFile = None,
    verify: Verify = 0,
    trial_steps: TrialSteps = None,
    num_nodes: NumNodes = 1,
    node_rank: NodeRank = None,
    endpoint: Endpoint = None,
    build_on: BuildOnSomething = None,
    as_json: AsJson = False,
) -> None:
    """Make a plan: of any model, for any number of ranks, without running it, or after trials of the best.

    Times are estimated from FLOPs, bytes and the rates of the machines, taken from a profile, or measured:

    shardwright plan make model.py:build -n 512 --cluster p4d.24xlarge*64 --dtype bfloat16

    shardwright plan make model.py:build -n 8 --profile profile.json --search-degrees

    shardwright plan make model.py:build -n 2 --verify 3
    """
    dtype = None if dtype is None else full_name(dtype)
    resolved = _with_dtype(Config.merge(read_settings(config), parse_settings(settings or ())), dtype)
    _check(resolved, num_ranks)
    if output is not None:
        check_output(output)
    if verify:
        _refuse_with_verify(
            {
                "--machine": machine,
                "--cluster": machines,
                "--profile": profile,
                "--dtype": dtype,
                "--search-degrees": search_degrees or None,
            }
        )
        order = Order(
            factory=factory,
            build_on=build_on or "cpu",
            settings=resolved.model_dump(exclude_defaults=True),
            most_trials=verify,
            steps=trial_steps or _TRIAL_STEPS,
        )
        plan = verified_plan(
            order, world=num_ranks, num_nodes=num_nodes, node_rank=node_rank, endpoint=endpoint
        )
    else:
        _refuse_without_verify(
            {
                "--nnodes": num_nodes if num_nodes > 1 else None,
                "--node-rank": node_rank,
                "--rdzv-endpoint": endpoint,
                "--trial-steps": trial_steps,
            }
        )
        measured = None if profile is None else MeasuredProfile.read(profile)
        cluster = _cluster(machine, machines, dtype, measured, config=resolved, world=num_ranks)
        check_factory(factory)  # before torch is imported for it
        plan = _plan(
            factory,
            build_on or "meta",
            config=resolved,
            world=num_ranks,
            cluster=cluster,
            measured=measured,
            search_degrees=search_degrees,
        )
    if plan is not None:
        _hand_out(plan, output=output, world=num_ranks, as_json=as_json)


_LOW = {"bfloat16": "bf16", "float16": "fp16"}
"""The setting that has a model train in a type of 16 bits."""


def _dtype_of(config: Config) -> str:
    return next((dtype for dtype, setting in _LOW.items() if getattr(config, setting)), "float32")


def _with_dtype(config: Config, dtype: str | None) -> Config:
    """The settings of a model that is stored and computes in a type.

    Raises:
        UsageError: there is no such type, or the settings say another one.
    """
    if dtype is None:
        return config
    if dtype != "float32" and dtype not in _LOW:
        raise UsageError(f"--dtype is {dtype!r}, but it must be one of {', '.join(_LOW)}, float32.")
    other = next(
        (setting for low, setting in _LOW.items() if low != dtype and getattr(config, setting)), None
    )
    if other is not None:
        raise UsageError(f"--dtype is {dtype}, but the settings have {other}. Drop one of the two.")
    return config if dtype == "float32" else Config.merge(config, {_LOW[dtype]: True})


def _cluster(
    machine: Path | None,
    machines: str | None,
    dtype: str | None,
    measured: MeasuredProfile | None,
    *,
    config: Config,
    world: int,
) -> Cluster:
    given = {"--machine": machine, "--cluster": machines, "--profile": measured}
    saying = [name for name, value in given.items() if value is not None]
    if len(saying) > 1:
        raise UsageError(
            f"{' and '.join(saying)} each say what the machines are, and costs of units hold where they were "
            f"measured alone. Drop {'all but one' if len(saying) > 2 else 'one of the two'}."
        )
    if dtype is not None and machines is None:
        raise UsageError(f"--dtype is {dtype}, but only --cluster has rates by dtype. Drop it, or add that.")
    if machine is not None:
        return read_cluster(machine)
    if machines is not None:
        found = find_machines(machines)
        if world > found.num_ranks:
            raise UsageError(
                f"--num-ranks is {world}, but {found.name} has {found.num_ranks} ranks. Take more nodes, or "
                "fewer ranks."
            )
        return cluster_of(found, dtype=_dtype_of(config))
    if measured is not None:
        return measured.cluster
    Console().status(_assumption())
    return _ASSUMED


def _hand_out(plan: Plan, *, output: Path | None, world: int, as_json: bool) -> None:
    if output is not None:
        write_plan(plan, output)
    show_text(plan.to_json() if as_json else format_plan_in_full(plan) + "\n", end="")
    if output is not None:
        say(f"wrote {output}; run it: shardwright run -n {world} --plan {output} train.py")


def _plan(
    factory: str,
    build_on: str,
    *,
    config: Config,
    world: int,
    cluster: Cluster,
    measured: MeasuredProfile | None,
    search_degrees: bool,
) -> Plan:
    # Here, because they import torch: the checks above answer before.
    from shardwright.cli.asking.factory import advice_on_meta, build
    from shardwright.torch.units.dry_run import plan_model

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


def _refuse_with_verify(given: Mapping[str, object]) -> None:
    for option, value in given.items():
        if value is not None:
            raise UsageError(
                f"--verify measures the present machines itself, so {option} {value} has no use. Drop one of "
                "the two."
            )


def _refuse_without_verify(given: Mapping[str, object]) -> None:
    for option, value in given.items():
        if value is not None:
            raise UsageError(
                f"{option} is {value}, but without --verify nothing runs. Drop it, or say how many plans to "
                "try: --verify 3"
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
        f"no --cluster and no --profile: assuming {_ASSUMED.ranks_per_node} ranks a host, each with "
        f"{format_flops(device.flops_per_s)}/s, {format_bandwidth(device.memory_Bps)} and unlimited memory; "
        f"links in a host {_describe(near)}, between hosts {_describe(far)}"
    )


def _describe(link: Link) -> str:
    return f"{format_bandwidth(link.bandwidth_Bps)} and {format_seconds(link.latency_s)}"
