"""The partition decision in a file: ``partition_file`` and ``load_partition``.

::

    partition_file only                  the decision is stored there after the first step
    load_partition and partition_file    the decision that is there holds

The file is a plan of Shardwright.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shardwright.checkpoint.disk import Disk
from shardwright.errors import ConfigError, PlanError
from shardwright.plan import Plan
from shardwright.problems import join
from smdistributed.modelparallel.ranks_of_run import present_run, ranks_of_run

_KEYS = ("load_partition", "partition_file")


def settings_with_partition(settings: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of Shardwright, for those of the library."""
    found = {key: value for key, value in settings.items() if key not in _KEYS}
    if not values["load_partition"]:
        return found
    file = values["partition_file"]
    if not file:
        raise ConfigError(
            "load_partition is True, but partition_file is not set. Set it to the file that a run with "
            "partition_file has stored."
        )
    try:
        plan = Plan.read(str(file), what="partition_file")
    except PlanError as error:
        raise ConfigError(f"{error} A run without load_partition stores it.") from error
    _refuse_contradictions(plan, values, file=str(file))
    return {**found, "plan": str(file)}


def _refuse_contradictions(plan: Plan, values: Mapping[str, Any], *, file: str) -> None:
    pairs = {
        "partitions": (plan.mesh.pipeline, values["pipeline_parallel_degree"]),
        "tensor_parallel_degree": (plan.mesh.tensor, values["tensor_parallel_degree"]),
        "microbatches": (plan.schedule.microbatches, values["microbatches"]),
        "sharded_data_parallel_degree": (plan.mesh.shard, values["sharded_data_parallel_degree"]),
    }
    problems = [
        f"{key} is {there} in the file, and {here} in the settings"
        for key, (there, here) in pairs.items()
        if there != here
    ]
    if problems:
        raise ConfigError(
            join(f"partition_file {file} contradicts the settings:", problems)
            + "\nGive the settings that it was made with, or remove load_partition to partition anew."
        )


def store_partition() -> None:
    """Writes the decision of this run where the settings ask for it; on the first rank."""
    run, configuration = present_run(), ranks_of_run.configuration
    assert configuration is not None
    file, loaded = configuration.values["partition_file"], configuration.values["load_partition"]
    if not file or loaded or run.rank != 0 or run.plan is None:
        return
    path = Path(str(file))
    path.parent.mkdir(parents=True, exist_ok=True)
    Disk().replace(path, run.plan.to_json().encode())
