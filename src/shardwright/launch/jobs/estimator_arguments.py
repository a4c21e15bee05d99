"""SageMaker estimator arguments that have no effect here, and the treatment of each.

They are accepted, so that published listings run: silently where nothing is lost, with one warning where a
user may miss something. The table is in docs/estimator.md.
"""

from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any

from shardwright.errors import ConfigError

__all__ = ["ALIASES", "WARNED", "sort_out"]

ALIASES = {
    "distributions": "distribution",
    "train_instance_count": "instance_count",
    "train_instance_type": "instance_type",
    "train_max_run": "max_run",
}
"""Names of older versions."""

# Who pays, who may, where it is stored in the cloud, how it is called: nothing of it is here.
_SILENT = frozenset(
    (
        "role sagemaker_session tags framework_version py_version pytorch_version transformers_version "
        "tensorflow_version volume_size train_volume_size volume_kms_key train_volume_kms_key "
        "output_kms_key code_location subnets security_group_ids encrypt_inter_container_traffic "
        "enable_network_isolation enable_sagemaker_metrics container_log_level "
        "keep_alive_period_in_seconds disable_profiler input_mode enable_infra_check enable_remote_debug "
        "enable_session_tag_chaining image_uri_region disable_output_compression script_mode "
        "model_channel_name training_repository_access_mode training_repository_credentials_provider_arn"
    ).split()
)

# What a user may wait for in vain, and what does it here.
WARNED = {
    "metric_definitions": "metrics of a run are in its folder, in metrics.jsonl and report.html",
    "checkpoint_s3_uri": "checkpoints stay where the script saves them",
    "checkpoint_local_path": "checkpoints stay where the script saves them",
    "use_spot_instances": "jobs run on the machines that there are",
    "max_wait": "jobs run on the machines that there are",
    "max_retry_attempts": "max_restarts says how often ranks start again after a failure",
    "debugger_hook_config": "SageMaker's Debugger is not here",
    "rules": "SageMaker's Debugger is not here",
    "tensorboard_output_config": "set tensorboard in Shardwright's settings",
    "profiler_config": "shardwright profile measures a model, and each run leaves a timeline",
    "compiler_config": "torch.compile is the script's own matter",
    "container_entry_point": "the entry point is what is started",
    "container_arguments": "hyperparameters are what the script gets",
    "instance_groups": "all hosts of a job are alike: instance_type and instance_count",
}

_REFUSED = {
    "git_config": "clone the repository, and give its folder as source_dir",
    "model_uri": 'give it as an input: fit({"model": "path/of/the/model"})',
    "algorithm_arn": "give the entry_point of a script",
}

_OFF: tuple[Any, ...] = (None, False, [], {}, 0)


def sort_out(given: Mapping[str, Any], *, known: list[str]) -> list[str]:
    """Looks through arguments that an estimator has no use for."""
    remarks = []
    for name, value in given.items():
        if name in _REFUSED and value not in _OFF:
            raise ConfigError(f"{name} cannot be used here: {_REFUSED[name]}.")
        if name == "input_mode" and value == "Pipe":
            remarks.append("input_mode is 'Pipe', but inputs are folders, as with 'File'")
        if name in _SILENT or name in _REFUSED or (name in WARNED and value in _OFF):
            continue
        if name not in WARNED:
            close = get_close_matches(name, [*known, *_SILENT, *WARNED, *ALIASES], n=1, cutoff=0.6)
            hint = f"Did you mean {close[0]}?" if close else "Remove it."
            raise ConfigError(f"an estimator has no argument {name}. {hint}")
        remarks.append(f"{name} changes nothing here: {WARNED[name]}")
    return remarks
