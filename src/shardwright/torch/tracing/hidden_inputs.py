"""Finds inputs that a unit was not given: what another unit left in an object or a list.

A graph knows what a call is given and returns. Python has other ways from one module to the next::

    def forward(self, x, notes):        # notes: an object of a class of the user's own
        if notes.first is None:
            notes.first = self.value(x)     made by one unit
        return x + notes.first              used by all

A later stage would find nothing there, or what it left itself. So such units share a stage. What follows
from shapes alone (a table of angles, behind ``lru_cache`` or in a global) each rank makes for itself.
"""

from collections.abc import Callable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from shardwright.errors import DeferredReadError
from shardwright.model_graph import Node, Together
from shardwright.torch._private.tensors import FakeTensor, storage_key
from shardwright.torch.interception.deferred import REMEDY, DeferredTensor
from shardwright.torch.python_state.shared_state import SharedState
from shardwright.torch.pytorch.functions import tensors_in
from shardwright.torch.pytorch.modules import user_line
from shardwright.torch.tracing.traced_values import TracedValues, with_history


class HiddenInputs:
    """Sees what each call of a unit makes, changes and uses."""

    def __init__(self, values: TracedValues):
        # Called with the tensors that each operation of a call is given.
        self.on_use: Callable[[Sequence[Tensor]], None] = _ignore
        self._values = values
        self._makers: MutableMapping[Tensor, Any] = WeakTensorKeyDictionary()
        # Of real tensors, which are there on every rank: memory -> nodes; None is code between units.
        self._readers: dict[int, set[int | None]] = {}
        self._writers: dict[int, set[int]] = {}
        self._keep_alive: list[Tensor] = []
        self._found: dict[int, set[int]] = {}  # node -> those that left what it uses
        self._node: int | None = None
        self._given: set[int] = set()
        self._used: set[int] | None = set()  # identities of tensors; None for any, where a copy has run
        self._state = SharedState(self._uses_state, self._note_left, self._is_everywhere, self._faked)

    @contextmanager
    def of_call(self, node: int, unit: nn.Module, fakes: Sequence[Any]) -> Iterator[None]:
        self._node, self._used = node, set()
        self._given = {id(fake) for fake in fakes if isinstance(fake, Tensor)}
        self._state.enter(node, unit, fakes)
        try:
            yield
        finally:
            self._state.leave()
            self._node = None

    def forget(self) -> None:
        """Leaves classes as they were; at the end of the trace."""
        self.on_use = _ignore  # a circle of references would keep the copies of the batch
        self._state.forget()

    # ---- operations of a call ----

    def ran(self, arguments: Sequence[Any], result: Any, *, draws: bool) -> None:
        if self._node is not None:
            given = list(tensors_in(arguments))
            self.on_use(given)
            for tensor in given:
                if self._used is not None:
                    self._used.add(id(tensor))
                self._note_use(self._node, tensor)
            self._note_made(arguments, result, draws=draws)

    def rehearsed(self, arguments: Sequence[Any], result: Any) -> None:
        """Records an operation that ran to be counted: the call may leave its result somewhere, too."""
        if self._node is not None:
            self._note_made(arguments, result, draws=False)

    def _note_use(self, node: int, tensor: Tensor) -> None:
        if self._is_known(tensor):
            return
        maker = self._maker(tensor)
        if maker is not None and maker != node:
            self._found.setdefault(node, set()).add(maker)
        elif not isinstance(tensor, FakeTensor):
            self._note_real(tensor, self._readers)

    def _maker(self, tensor: Tensor) -> int | None:
        """The node that has made it; what is left in an attribute of a module is a value of the graph."""
        value = self._values.find(tensor) if isinstance(tensor, FakeTensor | DeferredTensor) else None
        found: int | None = self._makers.get(tensor) if value is None else self._values[value].producer
        return found

    def _note_made(self, arguments: Sequence[Any], result: Any, *, draws: bool) -> None:
        """Records a result that follows from more than shapes."""
        if draws or any(self._holds_data(tensor) for tensor in tensors_in(arguments)):
            for tensor in tensors_in((result,)):
                if not self._is_known(tensor) and tensor not in self._makers:
                    self._makers[tensor] = self._node

    def _holds_data(self, tensor: Tensor) -> bool:
        is_written = not isinstance(tensor, FakeTensor) and storage_key(tensor) in self._writers
        return self._is_known(tensor) or tensor in self._makers or is_written

    def wrote(self, tensor: Tensor) -> None:
        """Records a write of the call to a tensor that every rank has."""
        if self._node is not None and not isinstance(tensor, FakeTensor) and not self._is_known(tensor):
            self._note_real(tensor, self._writers)

    def _note_real(self, tensor: Tensor, nodes: dict[int, set[Any]]) -> None:
        found = nodes.setdefault(storage_key(tensor), set())
        if self._node not in found:
            found.add(self._node)
            self._keep_alive.append(tensor)

    def _is_known(self, tensor: Tensor) -> bool:
        return id(tensor) in self._given or id(tensor) in self._values.lent_for

    def _is_everywhere(self, value: Any) -> bool:
        """Whether a value that a unit leaves somewhere is the same on every rank that makes it."""
        # What it was given it leaves there on its own rank only.
        return isinstance(value, Tensor) and value not in self._makers and id(value) not in self._given

    def _note_left(self, tensor: Tensor) -> None:
        """Records a tensor that is left in a list: what the call was given is there on this rank only."""
        if id(tensor) in self._given and tensor not in self._makers:
            self._makers[tensor] = self._node

    def _faked(self, tensor: Tensor) -> Tensor:
        """The fake tensor for a tensor that a call on random data has made."""
        fake: Tensor = self._values.fake_mode.from_tensor(tensor.detach(), static_shapes=True)
        self._makers[fake] = self._node
        return with_history(fake, self._values.fake_mode) if tensor.requires_grad else fake

    # ---- what else a call uses ----

    def _uses_state(self, writer: int, key: Any) -> None:
        """Records a read of an object's attribute, or a container's entry, that a unit has changed."""
        if self._node is None:
            raise DeferredReadError(
                f"{user_line()}: the attribute {key} of an object is read here, which a module has changed. "
                f"Only the rank of that module has the change. {REMEDY}"
            )
        self._found.setdefault(self._node, set()).add(writer)

    def stands_for(self, own: Any, item: Any) -> None:
        """Records a stand-in, a tensor or an object, in a call on random data."""
        if isinstance(item, Tensor):
            maker = self._maker(item)
            if maker is not None:
                self._makers[own] = maker
            return
        self._state.stands_for(own, item)

    def has_used(self, item: Any) -> bool:
        """Whether an operation of the last call has been given a tensor; of a copy that is not known."""
        return self._used is None or id(item) in self._used

    def gives(self, items: Sequence[Any]) -> None:
        """Adds to the arguments of a call that runs on a copy of its unit."""
        self._used = None
        self._given.update(id(tensor) for tensor in tensors_in(items))

    def ran_on_a_copy(self, held: Sequence[Tensor], changed: Sequence[Tensor]) -> None:
        """Records a call on a copy of its unit, of which nobody knows the tensors that it has read."""
        for tensor in held:
            self._note_real(tensor, self._readers)
        for tensor in changed:
            self._note_real(tensor, self._writers)

    def read_between(self, items: Sequence[Any]) -> None:
        """Records tensors with which code between units computes."""
        for tensor in tensors_in(items):
            if type(tensor) is Tensor:
                self._note_real(tensor, self._readers)

    # ---- the end ----

    def in_graph(self, nodes: tuple[Node, ...]) -> tuple[Node, ...]:
        """The nodes, with the others by which gradients come back to them."""
        if not self._found:
            return nodes
        makers = set().union(*self._found.values())
        return tuple(
            replace(
                node,
                finds=tuple(sorted(self._found.get(index, ()))),
                # What it has left may lead back to any of its inputs.
                detached=() if index in makers else node.detached,
            )
            for index, node in enumerate(nodes)
        )

    def together(self, nodes: Sequence[Node]) -> list[Together]:
        """Groups calls with those that left what they use, users of a tensor with those that change it."""
        for memory, writers in self._writers.items():
            users = {*writers, *self._readers.get(memory, ())}
            if None in users:
                raise DeferredReadError(
                    f"{nodes[min(writers)].line}: {nodes[min(writers)].name} writes to a tensor that is no "
                    f"buffer, and that code between modules reads. Only its rank has the change. {REMEDY}"
                )
            first, *others = sorted(user for user in users if user is not None)
            for user in others:
                self._found.setdefault(user, set()).add(first)
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
                    remedy=f"Return it from {one} and pass it on as an argument."
                    if nodes[min(makers)].kind == "unit"
                    else f"Pass it on as an argument, or keep it in an attribute of {other} itself.",
                )
            )
        return found


def _ignore(tensors: Sequence[Tensor]) -> None:
    """Does nothing."""
