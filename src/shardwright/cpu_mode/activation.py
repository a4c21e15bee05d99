"""Activates CPU mode, once in a process."""

import os
import sys

import torch

from shardwright.comm.launchers import detect
from shardwright.cpu_mode import _private, cuda_functions, mixed_precision, modules, processes, tensors
from shardwright.cpu_mode import modules as data_loading
from shardwright.cpu_mode import modules as removed_modules
from shardwright.cpu_mode import modules as synchronised_norms
from shardwright.cpu_mode import tensors as factories
from shardwright.errors import LaunchError

_NOTICE = "shardwright: CPU mode: what this script puts on CUDA devices is on the CPU (--device cpu)"


class _State:
    is_enabled = False


def is_enabled() -> bool:
    """Whether CPU mode is in force in this process."""
    return _State.is_enabled


def enable(*, says_so: bool = True) -> None:
    """Puts CPU mode in force for the rest of this process, and for those that `multiprocessing` starts in it.

    Call it before the script and its libraries are imported: names that they have taken by then stay.
    """
    if _State.is_enabled:
        return
    _State.is_enabled = True
    # A GPU that is there is not used: Shardwright's own part asks the first, PyTorch's core the second.
    os.environ["SHARDWRIGHT_DEVICE"] = "cpu"
    if torch.backends.cuda.is_built():  # type: ignore[no-untyped-call]
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    rank, num_devices = _place()
    if says_so and rank == 0:
        print(_NOTICE, file=sys.stderr, flush=True)  # noqa: T201  (there is no run yet that could say it)
    factories.put_factories_in_force()
    tensors.put_in_force()
    modules.put_in_force()
    cuda_functions.put_in_force(num_devices)
    mixed_precision.put_in_force()
    _private.let_optimizers_be_capturable()
    processes.put_profilers_in_force()
    removed_modules.put_removed_in_force()
    processes.put_in_force()
    synchronised_norms.put_norms_in_force()
    data_loading.put_loading_in_force()
    processes.put_children_in_force(enable)


def _place() -> tuple[int, int]:
    """Rank, and how many ranks there are on this host: scripts expect a device for each."""
    try:
        environment = detect(os.environ)
    except LaunchError:
        return 0, 1  # whoever needs the ranks will say what is wrong
    return environment.rank, environment.local_world_size
