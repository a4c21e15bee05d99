"""Builds the model named on the command line: ``model.py:build`` or ``package.model:build``.

The function takes nothing. It returns the model and one batch of one replica, and, if the model does not
return a loss itself, a function that reduces the model's output to one number::

    def build():
        model = GPT(layers=48)
        ids = torch.zeros(64, 1024, dtype=torch.long)
        return model, {"input_ids": ids, "labels": ids}

A dictionary batch goes to the model by name, a tuple or list by position, anything else alone. The function
runs on the meta device, so the model has shapes and no memory.
"""

import importlib
import importlib.util
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from shardwright.cli.asking.model import check_factory, split_factory
from shardwright.errors import ShardwrightError, TraceError, UsageError
from shardwright.run.joining import IMPORTED_FOR_MODEL


@dataclass(frozen=True, slots=True)
class Sample:
    """A model, one batch of one replica, and the function that makes a loss of the model's output."""

    model: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    loss: Callable[[Any], torch.Tensor] | None


def build(factory: str, *, device: str) -> Sample:
    with _own_words(factory):
        function = _function(factory)
        made = _called(function, factory, device)
    return _sample(factory, made)


def _called(function: Callable[[], Any], factory: str, device: str) -> Any:
    try:
        with torch.device(device):
            return function()
    except ShardwrightError:
        raise
    except Exception as error:
        hint = " If it needs tensors with data, add --build-on cpu." if device == "meta" else ""
        raise _failed(f"{factory} failed", error, hint) from error


@contextmanager
def _own_words(factory: str) -> Iterator[None]:
    """Gives a script that parses its command line when it is imported its own name, and no word of ours."""
    words = sys.argv
    script = split_factory(factory)[0]
    sys.argv = [script]
    imported = IMPORTED_FOR_MODEL.set(script)
    try:
        yield
    except SystemExit as error:
        raise UsageError(
            f"{factory} ended the process (exit code {error.code}) before it gave a model. Parse arguments "
            'under if __name__ == "__main__", or give them defaults: a factory gets none.'
        ) from error
    finally:
        sys.argv = words
        IMPORTED_FOR_MODEL.reset(imported)


@contextmanager
def advice_on_meta(device: str) -> Iterator[None]:
    """Adds to an error of tracing what helps if the model needs tensors with data."""
    try:
        yield
    except TraceError as error:
        if device != "meta":
            raise
        raise TraceError(
            f"{error}\nIf the model keeps tensors as attributes, which have no data on the meta device, add "
            "--build-on cpu."
        ) from error


def _function(factory: str) -> Callable[[], Any]:
    where, name = split_factory(check_factory(factory))
    module = _load(where)
    found = getattr(module, name, None)
    if not callable(found):
        own = [
            key
            for key, value in vars(module).items()
            if callable(value)
            and not isinstance(value, type)
            and getattr(value, "__module__", "") == module.__name__
        ]
        raise UsageError(f"{where} has no function {name}. It has {', '.join(own) or 'none'}.")
    function: Callable[[], Any] = found
    return function


def _load(where: str) -> ModuleType:
    path = Path(where)
    # As python does: a script sees the files beside it, a module those of the working directory.
    sys.path.insert(0, str(path.parent.absolute()) if path.suffix == ".py" else str(Path.cwd()))
    try:
        if path.suffix != ".py":
            return importlib.import_module(where)
        spec = importlib.util.spec_from_file_location(path.stem, path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[path.stem] = module
        spec.loader.exec_module(module)
        return module
    except ShardwrightError:
        raise
    except ModuleNotFoundError as error:
        if error.name is not None and (where == error.name or where.startswith(f"{error.name}.")):
            raise UsageError(
                f"there is no module {error.name}, seen from {Path.cwd()}. Give the path of a file, for "
                "example model.py:build, or a module that Python can import."
            ) from error
        raise _failed(f"importing {where} failed", error) from error
    except Exception as error:
        raise _failed(f"importing {where} failed", error) from error


def _failed(what: str, error: Exception, hint: str = "") -> UsageError:
    """An error of the user's code: the lines of it, none of ours."""
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if frame.filename != __file__ and "importlib" not in frame.filename
    ]
    lines = "".join(traceback.format_list(frames)).rstrip()
    return UsageError(f"{what} with {type(error).__name__}: {error}{hint}\n{lines}".rstrip())


def _sample(factory: str, made: Any) -> Sample:
    if not isinstance(made, tuple) or len(made) not in (2, 3) or not isinstance(made[0], nn.Module):
        kinds = (
            ", ".join(type(part).__name__ for part in made)
            if isinstance(made, tuple)
            else type(made).__name__
        )
        raise UsageError(
            f"{factory} returned ({kinds}), but it must return (model, batch) or (model, batch, loss): an "
            "nn.Module, what it is called with, and a function that makes one number of what it returns."
        )
    model, batch, *rest = made
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = {}
    if isinstance(batch, Mapping):
        kwargs = dict(batch)
    elif isinstance(batch, tuple | list):
        args = tuple(batch)
    else:
        args = (batch,)
    return Sample(model, args, kwargs, rest[0] if rest else None)
