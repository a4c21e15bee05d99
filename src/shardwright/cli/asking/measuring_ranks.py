"""The rank process of ``shardwright profile``: times the units of a model on the present machines."""

import datetime
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch.distributed as dist

from shardwright.cli.asking.application import say
from shardwright.cli.asking.factory import Sample, build
from shardwright.cli.asking.on_ranks import Order
from shardwright.config import Config
from shardwright.errors import ShardwrightError
from shardwright.exit_codes import exit_code_of
from shardwright.mesh import Mesh
from shardwright.planner import estimate_profile, meshes
from shardwright.planner.profiles import MeasuredProfile
from shardwright.run.context import context
from shardwright.run.joining import shutdown
from shardwright.run.machine import present_cluster
from shardwright.run.profiler import Profiler, ToProfile
from shardwright.torch.batch.batch import Batch
from shardwright.torch.measuring.device_rates import update_costs
from shardwright.torch.measuring.host_costs import with_host_costs
from shardwright.torch.measuring.measure import on_copies
from shardwright.torch.offload.offloading import with_tier
from shardwright.torch.startup import begin
from shardwright.torch.units.dry_run import with_data
from shardwright.torch.units.offline_planner import counts_of, traces_of


def measured(make: Callable[[], Sample], config: Config) -> MeasuredProfile:
    """Times the units of a model on the present machines; collective over all ranks, without a run.

    ::

        for each number of pipeline ranks:  units ─► traces, one for each number of microbatches ─┐
                                                                                                  ▼
                                         the profile ◄── their costs ◄── all units, timed together
    """
    with _run_of_one_pipeline(config):
        run, sample = context(), make()
        assert run.reporter is not None
        batch = Batch(with_data((sample.args, sample.kwargs), "cpu")).to(run.device)
        kinds = sorted({(mesh.pipeline, mesh.share > 1) for mesh in _grids(config)})
        with run.reporter.phase("tracing the model"):
            traces = {
                kind: traces_of(
                    sample.model,
                    batch,
                    counts_of(batch, config=config, pipeline=kind[0]),
                    loss=sample.loss,
                    config=config,
                    units=kind,
                    device=run.device,
                    memory={},
                )
                for kind in kinds
            }
        cluster = with_host_costs(run, with_tier(run, present_cluster(run, update_costs)))
        with run.reporter.phase("measuring units") as phase:
            sizes = [
                ToProfile(m, trace, estimate_profile(trace.graph, device=cluster.device))
                for of_pipeline in traces.values()
                for m, trace in of_pipeline.items()
            ]
            # Each way to cut the model into units has classes of its own.
            budget_s = run.config.measure_s * len(kinds)
            costs = Profiler(run, time_class=on_copies(run)).measure(sizes, budget_s=budget_s, phase=phase)
        return MeasuredProfile(
            fingerprint=sizes[0].trace.graph.model_fingerprint,
            costs={**{key: cost for size in sizes for key, cost in size.estimated.costs.items()}, **costs},
            cluster=cluster,
            num_ranks=run.mesh.world_size,
            when=f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d %H:%M UTC}",
        )


def _grids(config: Config) -> list[Mesh]:
    """The grids of the present ranks that settings leave open; ranks of a host may share layers."""
    run = context()
    return meshes(run.mesh.world_size, config, most_tensor=run.local_size)


@contextmanager
def _run_of_one_pipeline(config: Config) -> Iterator[None]:
    """A run in which every rank is a part of one pipeline, whatever the degrees are to be."""
    degrees = {
        "pipeline_parallel_degree": None,
        "data_parallel_degree": None,
        "tensor_parallel_degree": 1,
        "context_parallel_degree": 1,
        "expert_parallel_degree": 1,
        "sharded_data_parallel_degree": 1,
    }
    quiet = Config.merge(config, {"run_dir": "off", "log_interval": 10**9})
    begin(quiet.model_copy(update=degrees), None)
    try:
        yield
    finally:
        shutdown()


def main() -> None:
    """Does what the argument says; a mistake of the user's is told like those that a command finds itself."""
    try:
        _do(Order.from_json(sys.argv[1]))
    except ShardwrightError as error:
        # What the first rank says is seen; what another one says is in its log, which the launcher names.
        say(" ".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", ())]))
        sys.exit(exit_code_of(error))


def _do(order: Order) -> None:
    config = Config.parse(order.settings)
    found = measured(lambda: build(order.factory, device=order.build_on), config)
    if os.environ.get("RANK", "0") == "0":
        found.write(Path(order.out))
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
