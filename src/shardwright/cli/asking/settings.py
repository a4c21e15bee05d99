"""Parses settings, and other NAME=VALUE words, from the command line."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from shardwright.errors import ConfigError, UsageError
from shardwright.text import printable

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
            raise UsageError(
                f"--set {printable(word)}: write it as KEY=VALUE, for example --set microbatches=4"
            )
        given = _value(word, value)
        if key in settings and settings[key] != given:
            raise UsageError(f"--set {printable(key)} is given twice, with two values. Give one.")
        settings[key] = given
    return settings


def read_settings(path: Path | None) -> dict[str, Any]:
    """Reads the file of ``--config``; nothing without one."""
    if path is None:
        return {}
    from shardwright.config import Config  # it imports pydantic: --help answers before
    from shardwright.files import UserFile

    file = UserFile(path, what="--config", error=ConfigError)
    found = file.read_yaml()
    if isinstance(found, dict) and "plan_version" in found:
        raise ConfigError(f"{file}: this is a plan, and no settings. Follow it with --plan {path}")
    Config.check(found, source=str(file))
    return found or {}


def _value(word: str, value: str) -> Any:
    from shardwright.files import DocumentError, parse_json

    try:
        return parse_json(value)
    except DocumentError as error:
        if not error.is_other_text:
            raise UsageError(f"--set {printable(word[:200])}: {error}.") from None
        return value
