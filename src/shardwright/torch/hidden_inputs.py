"""What a unit uses without having been given it: what another unit left in an object or a list.

A graph knows what a call is given and returns. Python has other ways from one module to the next::

    def forward(self, x, notes):        # notes: an object of a class of the user's own
        if notes.first is None:
            notes.first = self.value(x)     made by one unit
        return x + notes.first              used by all

A later stage would find nothing there, or what it left itself. So such units share a stage.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from shardwright.errors import DeferredReadError
from shardwright.model_graph import Node, Together
from shardwright.torch.deferred import REMEDY
from shardwright.torch.object_states import ObjectStates
from shardwright.torch.source_line import user_line
from shardwright.torch.traced_values import TracedValues

__all__ = ["HiddenInputs"]


class HiddenInputs:
    """Sees what each call of a unit makes, changes and uses.

    Args:
        values: of the trace.
    """

    def __init__(self, values: TracedValues):
        self._values = values
        self._makers: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
        self._found: dict[int, set[int]] = {}  # node -> those whose tensors it uses
        self._node: int | None = None
        self._given: set[int] = set()
        self._objects = ObjectStates(self._read)

    @contextmanager
    def of_call(self, node: int, unit: nn.Module, fakes: Sequence[Any]) -> Iterator[None]:
        """A unit is called inside.

        Args:
            node: index of the call.
            unit: the unit.
            fakes: leaves of its arguments.
        """
        self._node = node
        self._given = {id(fake) for fake in fakes if isinstance(fake, Tensor)}
        self._objects.enter(node, [unit, *fakes])
        try:
            yield
            self._objects.leave()
        finally:
            self._node = None

    def _read(self, writer: int, name: str) -> None:
        """Somebody reads an attribute of an object that a unit has written."""
        if self._node is None:
            raise DeferredReadError(
                f"{user_line()}: the attribute {name} of an object is read here, which a module has changed. "
                f"Only the rank of that module has the change. {REMEDY}"
            )
        self._found.setdefault(self._node, set()).add(writer)

    def forget(self) -> None:
        """Leaves classes as they were; at the end of the trace."""
        self._objects.forget()

    def uses(self, arguments: Sequence[Any]) -> None:
        """The call computes with these; lists of tensors may be among them."""
        for item in arguments:
            for tensor in item if isinstance(item, list | tuple) else (item,):
                if not isinstance(tensor, Tensor) or id(tensor) in self._given:
                    continue
                if tensor not in self._makers or self._values.find(tensor) is not None:
                    continue  # what a unit leaves in an attribute of a module is a value of the graph
                maker = self._makers[tensor]
                if self._node is not None and maker != self._node:
                    self._found.setdefault(self._node, set()).add(maker)

    def makes(self, result: Any) -> None:
        """The call has computed this: a tensor, or several."""
        if self._node is None:
            return
        for tensor in result if isinstance(result, list | tuple) else (result,):
            if isinstance(tensor, Tensor) and not self._was_there(tensor):
                self._makers[tensor] = self._node

    def _was_there(self, tensor: Tensor) -> bool:
        """Whether an operation has given back what it was given, changed or not."""
        is_known = id(tensor) in self._given or id(tensor) in self._values.lent_for
        return is_known or tensor in self._makers

    def stands_for(self, own: Tensor, fake: Tensor) -> None:
        """A call uses one tensor in place of another."""
        if fake in self._makers:
            self._makers[own] = self._makers[fake]

    def together(self, nodes: Sequence[Node]) -> list[Together]:
        """Each call with those whose tensors it uses."""
        found = []
        for user, makers in self._found.items():
            one, other = nodes[min(makers)].name, nodes[user].name
            found.append(
                Together(
                    tuple(sorted({*makers, user})),
                    what="what modules find in an object or a list",
                    line=nodes[user].line,
                    why=f"{other} uses what {one} has left in an object, a list or a variable, and another "
                    "stage would not find it there.",
                    remedy=f"Return it from {one} and pass it on as an argument.",
                )
            )
        return found
