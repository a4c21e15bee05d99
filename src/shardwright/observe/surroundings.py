"""Where a run happens: host, versions, commit of its script; and what of it may be a secret."""

import importlib.metadata
import os
import platform
import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

from shardwright.quantities import cores_of_host

HIDDEN = "(not shown)"
"""Stands in the place of a value."""

_WORDS = ("KEY", "TOKEN", "SECRET", "PASSWORD", "CREDENTIAL")
# `--hub-token abc`, `--hub_token=abc`, `TOKEN=abc`; the value may be in quotes.
_VALUE = re.compile(r"(?<!\S)(?P<name>-*[A-Za-z][\w-]*)(?P<between>=|\s+)(?P<value>'[^']*'|\"[^\"]*\"|\S+)")


def may_be_secret(name: str) -> bool:
    """Whether the value of an option or a variable of this name may be one.

    >>> may_be_secret("WANDB_API_KEY"), may_be_secret("--seed")
    (True, False)
    """
    return any(word in name.upper() for word in _WORDS)


def without_secrets(command: str) -> str:
    """A command line without the values of options whose names tell of secrets.

    >>> without_secrets("train.py --hub-token abc --seed 1 --api_key='a b'")
    'train.py --hub-token (not shown) --seed 1 --api_key=(not shown)'
    """
    parts, end = [], 0
    while (found := _VALUE.search(command, end)) is not None:
        hides = may_be_secret(found["name"]) and (found["between"] == "=" or found["name"].startswith("-"))
        # Of other words the next may be a name itself.
        next_end = found.end() if hides else found.end("name")
        parts.append(command[end : found.start("value")] + HIDDEN if hides else command[end:next_end])
        end = next_end
    return "".join([*parts, command[end:]])


_PACKAGES = (
    "torch",
    "tensorflow",
    "keras",
    "transformers",
    "accelerate",
    "lightning",
    "numpy",
)


def surroundings(script: Path, *, own_version: str, device: str) -> dict[str, Any]:
    loaded = {"shardwright": own_version, "python": platform.python_version()}
    loaded |= {name: found for name in _PACKAGES if (found := _version(name)) is not None}
    machine = {
        "host": socket.gethostname(),
        "device": device,
        "cores": str(cores_of_host()),
        "system": f"{platform.system()} {platform.release()}, {platform.machine()}",
    }
    return {"machine": machine, "versions": loaded, "commit": commit_of(script.absolute().parent)}


def _version(package: str) -> str | None:
    """Of a package that is loaded, with its build where it tells (``2.13.0+cu130``); None for others."""
    module = sys.modules.get(package)
    if module is None:
        return None
    found = getattr(module, "__version__", None)
    if isinstance(found, str):
        return str(found)
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:  # such as tensorflow of the package tensorflow-cpu
        return None


# In a container the files are mostly somebody else's, which git refuses by itself.
_ANY_OWNER = {"GIT_CONFIG_COUNT": "1", "GIT_CONFIG_KEY_0": "safe.directory", "GIT_CONFIG_VALUE_0": "*"}
_GIT_TIMEOUT_S = 5.0


def commit_of(folder: Path) -> str:
    """The commit that the repository around a folder is at; empty where there is none, or no git."""
    kept = {name: value for name, value in os.environ.items() if name not in ("GIT_DIR", "GIT_WORK_TREE")}
    try:
        found = subprocess.run(
            ["git", "rev-parse", "HEAD"],
            cwd=folder,
            env=kept | _ANY_OWNER,
            capture_output=True,
            text=True,
            timeout=_GIT_TIMEOUT_S,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return found.stdout.strip() if found.returncode == 0 else ""
