"""The trackers that a setting names."""

import importlib
from collections.abc import Iterable
from importlib.util import find_spec

from shardwright.errors import ConfigError
from shardwright.observe.trackers.tracker import Tracker

__all__ = ["check_installed", "named_trackers"]

_PACKAGE = "shardwright.observe.trackers"
_NAMED = {
    "csv": ("csv_file", "CsvTracker", "csv"),
    "mlflow": ("mlflow", "MlflowTracker", "mlflow"),
    "tensorboard": ("tensorboard", "TensorBoardTracker", "tensorboard"),
    "wandb": ("wandb", "WandbTracker", "wandb"),
}
"""A name -> our module, the class in it, and the package that it needs."""


def check_installed(names: Iterable[str]) -> None:
    """Refuses trackers whose package is not installed.

    Every rank asks, not only the one that writes: if that one failed alone, the others would wait for it.
    """
    for name in names:
        package = _NAMED[name][2]
        if find_spec(package) is None:
            raise ConfigError(
                f"trackers has {name}, but the package {package} is not installed. Run: pip install "
                f"'shardwright[{name}]', or leave it out."
            )


def named_trackers(names: Iterable[str]) -> list[Tracker]:
    """New trackers of these names; nothing is imported for others."""
    made: list[Tracker] = []
    for name in dict.fromkeys(names):
        module, kind, _ = _NAMED[name]
        made.append(getattr(importlib.import_module(f"{_PACKAGE}.{module}"), kind)())
    return made
