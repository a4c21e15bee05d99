"""Activates CPU mode, once in a process, and runs a script or a module in it as Python would."""

import importlib.util
import os
import sys
import types
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from pathlib import Path

import torch

from shardwright.comm.launchers import detect
from shardwright.cpu_mode import _private, cuda_functions, modules, processes, tensors
from shardwright.cpu_mode import modules as mixed_precision
from shardwright.errors import LaunchError, UsageError
from shardwright.exit_codes import USAGE


def from_command_line(words: list[str], *, usage: str) -> Callable[[], None]:
    """What runs the script or module of a command line, ``SCRIPT ...`` or ``-m MODULE ...``.

    Exits where there is none, with the usage or what is wrong.
    """
    is_module = words[:1] == ["-m"]
    target = words[is_module : is_module + 1]
    if not target or target[0] in ("-h", "--help"):
        sys.stderr.write(usage)
        sys.exit(0 if target else USAGE)
    find = module if is_module else script
    try:
        return find(target[0], words[is_module + 1 :])
    except UsageError as error:
        sys.stderr.write(f"error: {error}\n")
        sys.exit(USAGE)


def script(path: str, arguments: list[str]) -> Callable[[], None]:
    """What runs a file, like ``python path arguments``."""
    try:
        code = compile(Path(path).read_bytes(), path, "exec")
    except OSError as error:
        raise UsageError(f"the script {path} cannot be read: {error.strerror}. Check its path.") from None

    def run() -> None:
        _put_first(str(Path(path).resolve().parent))
        sys.argv = [path, *arguments]
        main = _new_main(None)
        main.__dict__.update(__file__=path, __cached__=None, __package__=None)
        exec(code, main.__dict__)

    return run


def module(name: str, arguments: list[str]) -> Callable[[], None]:
    """What runs a module, like ``python -m name arguments``."""
    _put_first(str(Path.cwd()))
    spec = _spec(name)

    def run() -> None:
        sys.argv = [str(spec.origin), *arguments]
        main = _new_main(spec)
        main.__dict__.update(__file__=spec.origin, __cached__=spec.cached, __package__=spec.parent)
        exec(spec.loader.get_code(spec.name), main.__dict__)  # type: ignore[union-attr]

    return run


def _spec(name: str) -> ModuleSpec:
    try:
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.submodule_search_locations is not None:
            spec = importlib.util.find_spec(f"{name}.__main__")
    except ModuleNotFoundError:
        spec = None
    if spec is None or not hasattr(spec.loader, "get_code"):
        raise UsageError(f"there is no module {name} that can be run (looked in {Path.cwd()} and packages).")
    return spec


def _put_first(folder: str) -> None:
    """Has the folder first in the path, in place of the one that Python put there for the starter."""
    if "PYTHONSAFEPATH" in os.environ:
        return
    if sys.flags.safe_path:
        sys.path.insert(0, folder)
    else:
        sys.path[0] = folder


def _new_main(spec: ModuleSpec | None) -> types.ModuleType:
    """The module ``__main__``: kept until the end, for pickled classes and new processes look there."""
    main = types.ModuleType("__main__")
    main.__dict__.update(__builtins__=__builtins__, __spec__=spec, __loader__=getattr(spec, "loader", None))
    sys.modules["__main__"] = main
    return main


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
    tensors.put_factories_in_force()
    tensors.put_in_force()
    modules.put_in_force()
    cuda_functions.put_in_force(num_devices)
    mixed_precision.put_mixed_precision_in_force()
    _private.let_optimizers_be_capturable()
    processes.put_profilers_in_force()
    modules.put_removed_in_force()
    processes.put_in_force()
    modules.put_norms_in_force()
    modules.put_loading_in_force()
    processes.put_children_in_force(enable)


def _place() -> tuple[int, int]:
    """Rank, and how many ranks there are on this host: scripts expect a device for each."""
    try:
        environment = detect(os.environ)
    except LaunchError:
        return 0, 1  # whoever needs the ranks will say what is wrong
    return environment.rank, environment.local_world_size
