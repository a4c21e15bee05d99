"""Errors that the code of a model or a script raises itself while it is traced: shown as they are."""

from types import FrameType

from torch import nn

from shardwright.errors import ShardwrightError
from shardwright.torch.source_line import is_the_users

__all__ = ["is_own", "point_out"]

_SAID = "It is the script's or the model's own error, seen when the step was traced"


def is_own(on_fake_data: Exception, on_random_data: Exception) -> bool:
    """Whether a unit raises by itself, and not for the data that it was traced on: twice the same kind."""
    return type(on_fake_data) is type(on_random_data) and not isinstance(on_random_data, ShardwrightError)


def point_out(error: Exception, module: nn.Module, name: str = "") -> None:
    """Adds the line and the layer to an error of the user's own code, once.

    Args:
        error: as it was caught.
        module: in which the layer is looked for.
        name: of the module in the model.
    """
    if isinstance(error, ShardwrightError) or any(_SAID in note for note in getattr(error, "__notes__", ())):
        return
    names = {id(sub): ".".join(filter(None, (name, own))) for own, sub in module.named_modules()}
    line, layer = "", ""
    traceback = error.__traceback__
    while traceback is not None:
        frame: FrameType = traceback.tb_frame
        if is_the_users(frame):
            line = f": at {frame.f_code.co_filename}:{traceback.tb_lineno}"
        owner = frame.f_locals.get("self")
        if isinstance(owner, nn.Module) and id(owner) in names:
            layer = f", in {names[id(owner)] or 'the model'} ({type(owner).__name__})"
        traceback = traceback.tb_next
    error.add_note(f"{_SAID}{line}{layer}.")
