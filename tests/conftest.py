"""What every test session needs: one thread a process, a warm fork server, a header that hides no skip."""

import atexit
import importlib.util
import os
import shutil
import sys
import tempfile
from functools import partial
from pathlib import Path

# Before anything imports numpy or torch: with their thread pools ranks would wait for each other's cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# What units cost here, and what runs took, is kept between tests, and not between sessions.
if "SHARDWRIGHT_CACHE" not in os.environ:
    os.environ["SHARDWRIGHT_CACHE"] = tempfile.mkdtemp(prefix="shardwright-tests-")

    @partial(atexit.register, owner=os.getpid(), cache=os.environ["SHARDWRIGHT_CACHE"])
    def _remove(owner: int, cache: str) -> None:
        if os.getpid() == owner:  # ranks are forked
            shutil.rmtree(cache, ignore_errors=True)


import pytest

from cpu_seconds import CpuSeconds
from mounts import can_mount
from shardwright.launch.hosts_network import missing_for_networks
from shardwright.testing import preload

_TRANSFORMERS_MODULES = (
    "transformers",
    "transformers.modeling_utils",
    "transformers.models.gpt2.modeling_gpt2",
)

# Programs that tests start: they train, or ask for what a test gives them, when they are imported.
collect_ignore_glob = [
    "compat/scripts/*",
    "compat_trainer/finetune.py",
    "ecosystem/scripts/*",
    "e2e/cuda_scripts/*",
    "e2e/stand_ins/*",
]

if importlib.util.find_spec("transformers") is not None:
    preload(*_TRANSFORMERS_MODULES)


def pytest_addoption(parser: pytest.Parser) -> None:
    """What CI gives, see ``cpu_seconds.py``."""
    told = "fail where the session takes more CPU seconds"
    parser.addoption("--cpu-budget", type=float, metavar="S", help=told)


def pytest_configure(config: pytest.Config) -> None:
    """In each process of a session.

    A rank that comes late on a busy machine is no fault; other warnings are errors. Tests that ask for this
    one wait for a second and expect it.
    """
    config.addinivalue_line("filterwarnings", r"default:.*ha(s|ve) not come after \d+ s:UserWarning")
    if (budget_s := config.getoption("--cpu-budget")) is not None:
        config.pluginmanager.register(CpuSeconds(budget_s))


def _capabilities() -> dict[str, bool]:
    """What some tests need and this machine may lack."""
    is_root = hasattr(os, "geteuid") and os.geteuid() == 0
    return {
        "fork": hasattr(os, "fork"),
        "/proc": Path("/proc/self/stat").exists(),
        "network namespaces": missing_for_networks() is None,
        "mounts": can_mount(),
        "cgroups": is_root and os.access("/sys/fs/cgroup", os.W_OK),
        "GPU": Path("/dev/nvidia0").exists(),
        "transformers": importlib.util.find_spec("transformers") is not None,
        "mpirun": shutil.which("mpirun") is not None,
        "headless browser": _has_browser(),
        "Slurm": is_root and all(map(_has_program, ("slurmctld", "slurmd", "sbatch", "srun"))),
        "ray": importlib.util.find_spec("ray") is not None,
        "accelerate": importlib.util.find_spec("accelerate") is not None,
        "lightning": importlib.util.find_spec("lightning") is not None,
        "notebooks": importlib.util.find_spec("nbclient") is not None,
        "tensorflow": importlib.util.find_spec("tensorflow") is not None,
    }


def _has_program(name: str) -> bool:
    """Daemons are where few users have their path."""
    return shutil.which(name, path=f"{os.environ['PATH']}{os.pathsep}/usr/sbin") is not None


def _has_browser() -> bool:
    """Debian's chromium with its driver, selenium that speaks to it, plotly that draws."""
    programs = all(shutil.which(name) for name in ("chromium", "chromedriver"))
    return programs and all(importlib.util.find_spec(name) for name in ("selenium", "plotly"))


def pytest_report_header() -> list[str]:
    """Says at the top which tests cannot run here, so that a green run does not claim more than it tried."""
    capabilities = _capabilities()
    present = ", ".join(name for name, there in capabilities.items() if there)
    absent = ", ".join(name for name, there in capabilities.items() if not there)
    return [
        f"machine: {os.cpu_count()} cores, {sys.platform}; it has {present}",
        f"not here, so tests that need it are skipped: {absent or 'nothing'}",
    ]


@pytest.fixture(autouse=True)
def _search_path():
    """A test leaves in `sys.path` what was there: ranks import their test modules from it."""
    before = list(sys.path)
    yield
    gone = [folder for folder in before if folder not in sys.path]
    sys.path.extend(gone)
    assert not gone, f"this test took {', '.join(gone)} out of sys.path"


@pytest.fixture(scope="session")
def capabilities() -> dict[str, bool]:
    """The same, for tests that decide by it."""
    return _capabilities()
