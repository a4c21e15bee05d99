"""Runs a script or a module as Python would: the same ``__main__``, arguments and path."""

import importlib.util
import os
import sys
import types
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from pathlib import Path

from shardwright.errors import UsageError
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
