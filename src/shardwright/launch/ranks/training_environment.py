"""Sets the variables that SageMaker scripts read, for every rank of `shardwright run`.

This takes two steps, since a launcher does not know its host's number before the hosts have met::

    job_variables    before the ranks start, once a host: SM_HPS, SM_MODEL_DIR, SM_CHANNELS, SM_NUM_GPUS, ...
    rank_variables   in the supervisor of each rank (rank_environment.py): SM_HOSTS, SM_CURRENT_HOST,
                     SM_TRAINING_ENV, OMPI_*, ...

Variables that are already set stay: by a user, by `Estimator`, by SageMaker itself. Only the ranks' own
numbers (``OMPI_COMM_WORLD_*``) are always those of this run. ``RANK`` and ``WORLD_SIZE`` are set too, and
precede all of them in the order in which Shardwright looks for its launcher.

It imports no framework.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shardwright.launch.processes.host_cores import cores_of_host
from shardwright.launch.processes.process_text import without_too_long
from shardwright.launch.ranks.hyperparameters import from_words, hyperparameter_variables, to_text
from shardwright.launch.ranks.rank_environment import FRAMEWORK_MODULE, channels_of, json_or, missing
from shardwright.launch.ranks.request import LaunchRequest
from shardwright.launch.ranks.smp_parameters import encode_smp_parameters, read_smp_parameters

__all__ = [
    "PARAMETERS_VARIABLE",
    "framework_parameters",
    "job_variables",
    "result_folders",
]

PARAMETERS_VARIABLE = "SM_HP_MP_PARAMETERS"
"""The parameters of the model parallel library, as JSON."""


def framework_parameters(
    *,
    mpi: bool,
    processes_per_host: int,
    mpi_options: str = "",
    dataparallel: bool = False,
    instance_type: str = "local",
) -> dict[str, Any]:
    """The description in ``SM_FRAMEWORK_PARAMS`` of how ranks were started."""
    return {
        "sagemaker_mpi_enabled": mpi,
        "sagemaker_mpi_num_of_processes_per_host": processes_per_host,
        "sagemaker_mpi_custom_mpi_options": mpi_options,
        "sagemaker_distributed_dataparallel_enabled": dataparallel,
        "sagemaker_instance_type": instance_type,
    }


def result_folders(run_folder: Path) -> dict[str, Path]:
    """The folders for a script's results, by the variables that name them."""
    output = run_folder / "output"
    return {
        "SM_MODEL_DIR": run_folder / "model",
        "SM_OUTPUT_DATA_DIR": output / "data",
        "SM_OUTPUT_DIR": output,
    }


def job_variables(request: LaunchRequest, environ: Mapping[str, str], *, num_gpus: int) -> dict[str, str]:
    """The variables that are the same on all hosts, those only that `environ` lacks."""
    hyperparameters = from_words(request.arguments)
    if isinstance(words := hyperparameters.get("mp_parameters"), str):
        hyperparameters["mp_parameters"] = read_smp_parameters(words)
    known = {
        **{name: str(path.absolute()) for name, path in result_folders(request.run_folder).items()},
        "SM_HPS": to_text(hyperparameters),
        "SM_USER_ARGS": to_text(list(request.arguments)),
        "SM_USER_ENTRY_POINT": request.target if request.is_module else Path(request.target).name,
        "SM_MODULE_DIR": str(Path.cwd() if request.is_module else Path(request.target).absolute().parent),
        "SM_NUM_GPUS": str(num_gpus),
        "SM_NUM_CPUS": str(cores_of_host()),
        "SM_LOG_LEVEL": "20",
        "SM_FRAMEWORK_MODULE": FRAMEWORK_MODULE,
        "TRAINING_JOB_NAME": request.run_folder.name,
    }
    known |= {name: value for name, value in environ.items() if name in known and value}
    hyperparameters = json_or(known["SM_HPS"], {})
    known |= hyperparameter_variables(hyperparameters)
    if isinstance(parameters := hyperparameters.get("mp_parameters"), dict):
        known[PARAMETERS_VARIABLE] = encode_smp_parameters(parameters)
    known["SM_MODULE_NAME"] = known["SM_USER_ENTRY_POINT"].removesuffix(".py")
    channels = channels_of(environ)
    known["SM_CHANNELS"] = to_text(sorted(channels))
    known["SM_INPUT_DATA_CONFIG"] = to_text({name: {"TrainingInputMode": "File"} for name in channels})
    known["SM_FRAMEWORK_PARAMS"] = to_text(
        framework_parameters(
            mpi=bool(environ.get(PARAMETERS_VARIABLE) or known.get(PARAMETERS_VARIABLE)),
            processes_per_host=request.num_ranks,
            instance_type="local_gpu" if num_gpus and request.device != "cpu" else "local",
        )
    )
    return without_too_long(missing(known, environ))
