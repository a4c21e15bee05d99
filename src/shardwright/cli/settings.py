"""Settings as they are written on a command line."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml

from shardwright.errors import ConfigError, UsageError

__all__ = ["ConfigFile", "Settings", "parse_settings", "read_settings"]

ConfigFile = Annotated[Path | None, typer.Option("--config", metavar="FILE", help="Settings, YAML or JSON.")]
Settings = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="One setting, stronger than the file; may be repeated."),
]


def parse_settings(words: Sequence[str]) -> dict[str, Any]:
    """Reads ``key=value`` words; a value is JSON where it can be read so, else text.

    >>> parse_settings(["microbatches=4", "pipeline=1f1b"])
    {'microbatches': 4, 'pipeline': '1f1b'}
    """
    settings: dict[str, Any] = {}
    for word in words:
        key, equals, value = word.partition("=")
        if not equals or not key:
            raise UsageError(f"--set {word}: write it as KEY=VALUE, for example --set microbatches=4")
        try:
            settings[key] = json.loads(value)
        except ValueError:
            settings[key] = value
    return settings


def read_settings(path: Path | None) -> dict[str, Any]:
    """Reads the file of ``--config``; nothing without one."""
    if path is None:
        return {}
    try:
        found = yaml.safe_load(path.read_text()) or {}
    except OSError as error:
        raise UsageError(f"--config {path} cannot be read: {error.strerror}.") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"--config {path} is neither YAML nor JSON: {error}") from error
    if not isinstance(found, dict):
        raise ConfigError(f"--config {path} holds no settings. Write lines such as microbatches: 4")
    return found
