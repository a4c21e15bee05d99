"""Starts the ranks of a run, and reports how they ended.

::

    shardwright run ──► torchelastic's agent ──► one worker supervisor a rank ──► the user's script
     (launching.py)    (agent.py, from PyTorch)    (worker.py, no torch)       (forked: standby.py)

The agent counts restarts and serves the store where ranks meet. The supervisors write the logs, pass signals
on, kill what does not end by itself, and note how each rank ended; these notes make the report (`verdict`).

`Estimator` starts training jobs as SageMaker's SDK does. Its engines start ``shardwright run`` on each host::

    Estimator.fit ──► JobSpec ──► engine (Local, LocalCluster, Slurm, Kubernetes, Ray) ──► shardwright run

Names listed here are imported on first use. Otherwise import the modules themselves:
`shardwright.launch.ranks.agent` needs torch, and the supervisors start faster without it.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shardwright.launch.engines.kubernetes import Kubernetes
    from shardwright.launch.engines.local import Local, LocalCluster
    from shardwright.launch.engines.ray import Ray
    from shardwright.launch.engines.slurm import Slurm
    from shardwright.launch.estimator import Estimator, TensorFlow
    from shardwright.launch.estimator import Estimator as HuggingFace
    from shardwright.launch.estimator import Estimator as PyTorch

__all__ = [
    "Estimator",
    "HuggingFace",
    "Kubernetes",
    "Local",
    "LocalCluster",
    "PyTorch",
    "Ray",
    "Slurm",
    "TensorFlow",
]

_PLACES = {
    "Estimator": ("estimator", "Estimator"),
    # In listings only the import differs: from shardwright.launch import PyTorch
    "HuggingFace": ("estimator", "Estimator"),
    "PyTorch": ("estimator", "Estimator"),
    "TensorFlow": ("estimator", "TensorFlow"),
    "Kubernetes": ("engines.kubernetes", "Kubernetes"),
    "Local": ("engines.local", "Local"),
    "LocalCluster": ("engines.local", "LocalCluster"),
    "Ray": ("engines.ray", "Ray"),
    "Slurm": ("engines.slurm", "Slurm"),
}


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, attribute = _PLACES[name]
    return getattr(import_module(f"{__name__}.{module}"), attribute)
