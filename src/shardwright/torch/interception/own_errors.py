"""Shows errors raised by the model's or the script's own code as they are, with layer and line."""

from collections.abc import Iterator
from types import TracebackType

from torch import nn

from shardwright.errors import ShardwrightError
from shardwright.torch.pytorch.source_line import is_the_users

__all__ = ["is_own", "point_out", "point_out_in_run"]

_SAID = "It is the script's or the model's own error"


def is_own(on_fake_data: Exception, on_random_data: Exception) -> bool:
    """Whether a unit raises by itself, and not for the data that it was traced on: twice the same kind."""
    return type(on_fake_data) is type(on_random_data) and not isinstance(on_random_data, ShardwrightError)


def point_out(error: Exception, module: nn.Module, name: str = "") -> None:
    """Adds the line and the layer to an error of the user's own code, once."""
    _add_note(error, f"{_SAID}, seen when the step was traced", module, name)


def point_out_in_run(error: Exception, module: nn.Module) -> None:
    """The same for an error of a step that runs; one that our own code raised is none of the user's."""
    modules = {id(sub) for sub in module.modules()}
    for traceback in reversed(list(_tracebacks(error))):
        frame = traceback.tb_frame
        if is_the_users(frame) or id(frame.f_locals.get("self")) in modules:
            _add_note(error, _SAID, module, "")
            return
        if frame.f_globals.get("__name__", "").startswith("shardwright."):
            return


def _add_note(error: Exception, said: str, module: nn.Module, name: str) -> None:
    if isinstance(error, ShardwrightError) or any(_SAID in note for note in getattr(error, "__notes__", ())):
        return
    names = {id(sub): ".".join(filter(None, (name, own))) for own, sub in module.named_modules()}
    line, layer = "", ""
    for traceback in _tracebacks(error):
        frame = traceback.tb_frame
        if is_the_users(frame):
            line = f": at {frame.f_code.co_filename}:{traceback.tb_lineno}"
        owner = frame.f_locals.get("self")
        if isinstance(owner, nn.Module) and id(owner) in names:
            layer = f", in {names[id(owner)] or 'the model'} ({type(owner).__name__})"
    error.add_note(f"{said}{line}{layer}.")


def _tracebacks(error: Exception) -> Iterator[TracebackType]:
    """From the outermost frame to the one that raised it."""
    traceback = error.__traceback__
    while traceback is not None:
        yield traceback
        traceback = traceback.tb_next
