"""Describes this machine, and anything on it that will cause trouble: a block to paste into an issue.

It imports no framework: versions come from the installed packages, GPUs from the driver.
"""

import importlib.metadata
import os
import platform
import resource
import shutil
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardwright.cluster.named import host_memory_bytes
from shardwright.comm.launchers import detect
from shardwright.errors import LaunchError
from shardwright.observe.surroundings import HIDDEN, may_be_secret
from shardwright.quantities import cores_of_host, format_bytes

_PACKAGES = (
    "shardwright",
    "torch",
    "greenlet",
    "numpy",
    "pydantic",
    "scipy",
    "transformers",
    "deepspeed",
    "tensorflow",
)
_NEEDED_TO_TRAIN = ("torch", "greenlet")
_PREFIXES = (
    "SHARDWRIGHT_",
    "OMP_",
    "MKL_",
    "NCCL_",
    "GLOO_",
    "TORCH_",
    "CUDA_",
    "SLURM_",
    "OMPI_COMM",
    "PMI_",
    "PET_",
    "SM_",
    "MASTER_",
)
_NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "JOB_COMPLETION_INDEX")
_FEW_FILES = 4096
_LITTLE_SHARED = 64 * 2**20
_LITTLE_DISK = 2**30


@dataclass(frozen=True, slots=True)
class _Findings:
    """The findings about a machine.

    Attributes:
        facts: by name, as text; in the order in which they are shown.
        document: the same for programs: sizes in bytes, None where one is not known.
        problems: what will be in the way, each with what to do.
        faults: those of them without which nothing can be trained.
    """

    facts: dict[str, str]
    document: dict[str, Any]
    problems: tuple[str, ...]
    faults: tuple[str, ...]


def examine(environ: Mapping[str, str], *, folder: Path) -> _Findings:
    versions = {name: version for name in _PACKAGES if (version := _version(name)) is not None}
    document: dict[str, Any] = {
        "python": platform.python_version(),
        "executable": sys.executable,
        "system": platform.platform(),
        "machine": platform.machine(),
        "versions": versions,
        "cores": os.cpu_count() or 1,
        "usable_cores": cores_of_host(),
        **_memory(),
        "shared_memory_free_bytes": _shared_bytes(),
        "open_files": _open_files(),
        "gpus": _gpus(),
        "host": socket.gethostname(),
        "run_folder": str(folder.absolute()),
        "run_folder_free_bytes": _free(folder),
        "ranks": _ranks(environ),
        "environment": dict(_variables(environ)),
    }
    faults = tuple(
        f"{name} is not installed, which training needs: pip install 'shardwright[torch]'."
        for name in _NEEDED_TO_TRAIN
        if name not in versions
    )
    return _Findings(_as_text(document), document, (*_problems(environ, folder), *faults), faults)


def _as_text(document: Mapping[str, Any]) -> dict[str, str]:
    cores, usable = document["cores"], document["usable_cores"]
    shared = document["shared_memory_free_bytes"]
    return {
        "python": f"{document['python']} ({document['executable']})",
        "system": f"{document['system']}, {document['machine']}",
        **document["versions"],
        "cores": f"{usable}" if usable == cores else f"{usable} of {cores} may be used",
        "memory": _memory_text(document),
        "shared memory": "no /dev/shm" if shared is None else f"{format_bytes(shared)} free in /dev/shm",
        "open files": str(document["open_files"]),
        "GPUs": ", ".join(document["gpus"]) or "none that an NVIDIA driver shows",
        "host": document["host"],
        "run folder": f"{document['run_folder']}, {format_bytes(document['run_folder_free_bytes'])} free",
        "ranks": document["ranks"],
        **{f"${name}": value for name, value in document["environment"].items()},
    }


def _problems(environ: Mapping[str, str], folder: Path) -> list[str]:
    found = []
    threads = environ.get("OMP_NUM_THREADS", "")
    if threads.isdecimal() and int(threads) > cores_of_host():
        found.append(
            f"OMP_NUM_THREADS is {threads}, but this process may use {cores_of_host()} cores: threads would "
            "wait for one another. Set it to the cores of a rank."
        )
    shared = _shared_bytes()
    if shared is not None and shared < _LITTLE_SHARED:
        found.append(
            f"/dev/shm has {format_bytes(shared)} free, which data loaders with workers may need. In a "
            "container: --shm-size=1g."
        )
    if _open_files() < _FEW_FILES:
        found.append(f"a process may open {_open_files()} files. With many ranks: ulimit -n 65536.")
    try:
        socket.getaddrinfo(socket.gethostname(), None)
    except OSError:
        found.append(
            f"the name of this host, {socket.gethostname()}, has no address: other hosts, and gloo, cannot "
            "find it. Add it to /etc/hosts, or set GLOO_SOCKET_IFNAME."
        )
    if _free(folder) < _LITTLE_DISK:
        found.append(f"{folder.absolute()} has {format_bytes(_free(folder))} left for runs. Make room there.")
    if not os.access(_existing(folder), os.W_OK):
        found.append(f"{folder.absolute()} cannot be written to. Set run_dir to a folder that can.")
    try:
        detect(environ)
    except LaunchError as error:
        found.append(f"a run would not start: {error}")
    return found


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _memory() -> dict[str, int | None]:
    try:
        lines = Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    sizes = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines if line.split()[1:]}
    total, usable = sizes.get("MemTotal"), host_memory_bytes()
    return {
        "memory_bytes": total,
        "memory_available_bytes": sizes.get("MemAvailable"),
        "memory_limit_bytes": usable if total is not None and 0 < usable < total else None,
    }


def _memory_text(document: Mapping[str, Any]) -> str:
    total, available = document["memory_bytes"], document["memory_available_bytes"]
    if total is None or available is None:
        return "not known"
    text = f"{format_bytes(total)}, {format_bytes(available)} available"
    limit = document["memory_limit_bytes"]
    return text if limit is None else f"{text}; a control group allows {format_bytes(limit)}"


def _shared_bytes() -> int | None:
    try:
        return shutil.disk_usage("/dev/shm").free
    except OSError:
        return None


def _open_files() -> int:
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def _gpus() -> list[str]:
    found = []
    for path in sorted(Path("/proc/driver/nvidia/gpus").glob("*/information")):
        lines = path.read_text(encoding="utf-8").splitlines()
        found += [line.split(":", 1)[1].strip() for line in lines if line.startswith("Model")]
    return found


def _existing(folder: Path) -> Path:
    """The folder, or the next one above it that is there."""
    folder = folder.absolute()
    return next(path for path in (folder, *folder.parents) if path.exists())


def _free(folder: Path) -> int:
    return shutil.disk_usage(_existing(folder)).free


def _ranks(environ: Mapping[str, str]) -> str:
    try:
        return str(detect(environ))
    except LaunchError:
        return "not clear: see below"


def _variables(environ: Mapping[str, str]) -> list[tuple[str, str]]:
    """The environment variables that runs read, without possible secrets."""
    return [
        (name, HIDDEN if may_be_secret(name) else value)
        for name, value in sorted(environ.items())
        if name.startswith(_PREFIXES) or name in _NAMES
    ]
