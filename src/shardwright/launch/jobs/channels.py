"""The data of a training job: folders, by channel name."""

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlparse

from shardwright.errors import ConfigError

__all__ = ["local_path", "read_channels"]

_ALONE = "training"
"""The channel of inputs that have no name, as SageMaker calls it."""

_NAME = re.compile(r"[A-Za-z0-9._-]+")


def read_channels(
    inputs: Any, *, s3_to_local: Mapping[str, str | os.PathLike[str]], must_exist: bool = True
) -> dict[str, str]:
    """The folders by the names of their channels, absolute."""
    if inputs is None:
        return {}
    named = inputs if isinstance(inputs, Mapping) else {_ALONE: inputs}
    channels: dict[str, str] = {}
    for name, value in named.items():
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise ConfigError(
                f"an input is called {name!r}, but the name of a channel is of letters, digits, '-', '_' "
                "and '.', such as train."
            )
        path = local_path(_address(value, name), what=f"input {name}", s3_to_local=s3_to_local)
        channels[name] = _checked(path, name) if must_exist else str(path)
    return channels


def local_path(address: str, *, what: str, s3_to_local: Mapping[str, str | os.PathLike[str]]) -> Path:
    """The path of an address: a path, a ``file://`` address, or one in S3 for which a folder stands."""
    if address.startswith("s3://"):
        return _instead_of_s3(address, what, s3_to_local)
    parts = urlparse(address)
    if parts.scheme == "file":
        return Path(
            unquote(f"/{parts.netloc}{parts.path}" if parts.netloc not in ("", "localhost") else parts.path)
        )
    if "://" in address:
        raise ConfigError(f"{what} is {address}, but only folders can be read. Copy it, and give the folder.")
    return Path(address).expanduser()


def _instead_of_s3(address: str, what: str, s3_to_local: Mapping[str, str | os.PathLike[str]]) -> Path:
    """The mapping with the longest address that `address` begins with."""
    for prefix in sorted(s3_to_local, key=len, reverse=True):
        stem = prefix.rstrip("/")
        if address.rstrip("/") == stem or address.startswith(f"{stem}/"):
            return Path(s3_to_local[prefix]).expanduser() / address[len(stem) :].strip("/")
    bucket = "/".join(address.split("/")[:3])
    raise ConfigError(
        f"{what} is {address}, and S3 is not read here. Copy it (aws s3 sync {address} data) and give the "
        "local folder, or say where the copy of the bucket is: "
        f'Estimator(..., s3_to_local={{"{bucket}": "data"}}).'
    )


def _address(value: Any, name: str) -> str:
    if isinstance(value, str | os.PathLike):
        return os.fspath(value)
    # SageMaker's TrainingInput and its like keep what they are in a dictionary of that shape.
    config = getattr(value, "config", None)
    source = config.get("DataSource", {}) if isinstance(config, Mapping) else {}
    address = source.get("S3DataSource", {}).get("S3Uri") or source.get("FileSystemDataSource", {}).get(
        "DirectoryPath"
    )
    if not isinstance(address, str):
        raise ConfigError(
            f"input {name} is a {type(value).__name__}, but it must be the path of a folder: "
            f'fit({{"{name}": "data/{name}"}}).'
        )
    return address


def _checked(path: Path, name: str) -> str:
    if path.is_file():
        raise ConfigError(f"input {name} is the file {path}, but a channel is a folder: give {path.parent}.")
    if not path.is_dir():
        raise ConfigError(f"input {name} is {path}, but there is no such folder (looked in {Path.cwd()}).")
    return str(path.absolute())
