"""Where a benchmark ran: machine, versions, command, date."""

import datetime
import os
import platform
import shlex
import sys

import torch

import shardwright
from shardwright.quantities import cores_of_host
from shardwright.run.machine import device_name

__all__ = ["circumstances"]


def circumstances() -> dict[str, str | int]:
    """What has to stand beside every figure."""
    return {
        "command": shlex.join(["python", *sys.argv]),
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "cpu": device_name(torch.device("cpu")),
        "cores": cores_of_host(),
        "load": " ".join(f"{value:.1f}" for value in os.getloadavg()),
        "system": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "shardwright": shardwright.__version__,
    }
