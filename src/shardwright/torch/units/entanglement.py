"""Finds modules that cannot be split, although each module inside could be a unit.

The code of such a module, between the calls of the modules inside it,

- keeps a tensor in an attribute of a module inside it (``self.cell.state = None``): with stages in between,
  other microbatches would find it there; or
- calls a custom ``autograd.Function`` that calls them (reversible layers): its backward runs them again, on
  tensors that are on other ranks; or
- gives them packed sequences, whose layout is in values that no trace knows; or
- calls them under ``torch.func``, on tensors or with weights that are no real ones.

The module is watched while the model runs once as a whole.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from shardwright.errors import TraceError
from shardwright.torch._private import function_transforms_active
from shardwright.torch.pytorch.source_line import custom_function_call, frames_up_to, is_running, user_line

__all__ = ["Entanglement"]


class Entanglement:
    """Watches one forward of a model; give it every call of a module.

    Attributes:
        whole: names of the modules that cannot be split.
        hard: names of those that cannot even be traced in pieces -> what they do.
    """

    def __init__(self) -> None:
        self.whole: set[str] = set()
        self.hard: dict[str, str] = {}
        self._open: list[tuple[str, int | None]] = []
        # Copies of the model come and go where fake tensors cannot get through: none takes another's name.
        self._names: WeakKeyDictionary[nn.Module, str] = WeakKeyDictionary()
        self._written: dict[tuple[str, str], set[str]] = {}
        self._holds_tensor: set[tuple[str, str]] = set()

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watches writes to attributes of modules."""
        plain = nn.Module.__setattr__

        def write(module: nn.Module, key: str, value: Any) -> None:
            self._note(module, key, value)
            plain(module, key, value)

        nn.Module.__setattr__ = write  # type: ignore[method-assign, assignment]
        try:
            yield
        finally:
            nn.Module.__setattr__ = plain  # type: ignore[method-assign]
        for place in self._holds_tensor & self._written.keys():
            # The model itself has to be split. Each microbatch has its own attributes (`own_attributes`).
            self.whole.update(self._written[place] - {""})

    def enter(self, name: str, module: nn.Module, args: tuple[Any, ...]) -> None:
        """A module is called."""
        if module not in self._names:
            # The first call; or that of a copy, after an attempt that failed inside of it.
            del self._open[1:]
            prefix = f"{name}." if name else ""
            for inner, sub in module.named_modules():
                self._names[sub] = prefix + inner if inner else name
        frame = custom_function_call()
        if self._open and frame is not None and frame != self._open[-1][1]:
            self.whole.add(self._open[-1][0])
        what = _done_to_a_call(args)
        if what and self._open:
            self.hard[self._open[-1][0]] = what
            self.whole.add(self._open[-1][0])
        elif what.startswith("uses torch.func"):
            raise TraceError(
                f"{user_line()}: the step function {what} around {name or 'the model'}, whose modules then "
                "cannot be placed one by one. Do that in the forward of a module inside the model, which is "
                "then one unit; or have one stage: pipeline_parallel_degree 1."
            )
        self._open.append((name, frame))

    def leave(self) -> None:
        """The module entered last returns."""
        self._open.pop()

    def _note(self, module: nn.Module, key: str, value: Any) -> None:
        name = self._names.get(module)
        if not self._open or name is None:
            return
        if isinstance(value, Tensor):
            self._holds_tensor.add((name, key))
        writer = self._open[-1][0]
        # A hook of the module itself runs before it is entered: what it computes is the module's own.
        if writer != name and not is_running(module._forward_pre_hooks.values()):
            self._written.setdefault((name, key), set()).add(_common_ancestor(writer, name))


def _done_to_a_call(args: tuple[Any, ...]) -> str:
    """Describes what keeps a module from being a unit, in the code that calls it; mostly nothing."""
    if any(isinstance(item, PackedSequence) for item in args):
        return "packs sequences (pack_padded_sequence)"
    if function_transforms_active():
        return "uses torch.func (vmap, grad, jvp)"
    between = frames_up_to("torch.nn.utils.stateless")
    if between is not None and all(n.startswith(("torch.nn.modules.", "shardwright.")) for n in between):
        return "uses torch.func.functional_call"
    return ""


def _common_ancestor(first: str, second: str) -> str:
    parts: list[str] = []
    for a, b in zip(first.split("."), second.split("."), strict=False):
        if a != b:
            break
        parts.append(a)
    return ".".join(parts)
