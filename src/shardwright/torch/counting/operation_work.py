"""The work of an operation, and its random draws in the sequence.

A draw continues the sequence if the generator is where the previous draw left it. It does not after a seed,
or in a backward inside a unit that recomputes something: such draws need no fast-forward::

    a unit         draws     fork_rng, manual_seed(7)   draws   end of fork_rng   draws
    generator   s0 ──▶ s1              s7               ──▶ ...       s1          ──▶ s2
    in the row      yes                                  no                       yes

Inside a unit, this is the whole rule. Between units each rank seeds for itself, so only free operations may
draw there, and only where no other operation can come in before them.

A generator of the script's own is followed in the same way. If the step function creates it, every rank has
one, and only the rank that draws from it advances it: later draws must be on the same stage.
"""

import ctypes
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

from shardwright.errors import TraceError
from shardwright.model_graph import Node, Together, Work
from shardwright.torch._private.tensors import generator_key
from shardwright.torch.interception.glue import plain_torch
from shardwright.torch.pytorch.functions import tensors_in
from shardwright.torch.randomness import Draw, get_state, is_default, set_state

aten = torch.ops.aten

_MOVE_NOTHING = frozenset({aten._unsafe_view, aten.alias, aten.empty, aten.empty_like, aten.lift_fresh})
"""Operations that launch no kernel, beside the views."""

_GATHERS = frozenset({aten.embedding, aten.index_select, aten.gather, aten.index})
"""Operations that read as much as they write, however large what they read from is."""


def flops_of(func: Any, args: Any, kwargs: Mapping[str, Any], result: Any) -> int:
    """The floating-point operations of an operation; a multiply-add counts as two."""
    count = _FLOPS.get(func.overloadpacket)
    return 0 if count is None else int(count(*args, **kwargs, out_val=result))


def attention_flops(*args: Any, out_val: Any, **kwargs: Any) -> int:
    """Two batched matrix products: queries by keys, weights by values.

    FlopCounterMode has no entry for attention on CPU and counts nothing. A causal mask is counted in full,
    as the kernels for which torch has formulas do.
    """
    query_BHSD, key_BHTD, value_BHTE = args[:3]
    *batch, seq_q, dim = query_BHSD.shape
    pairs = math.prod(batch) * seq_q * key_BHTD.shape[-2]
    return int(2 * pairs * (dim + value_BHTE.shape[-1]))


def _attention_packets() -> list[Any]:
    names = (
        "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_cudnn_attention",
        "_scaled_dot_product_fused_attention_overrideable",
    )
    return [getattr(aten, name) for name in names if hasattr(aten, name)]


def work_of(func: Any, args: Any, kwargs: Mapping[str, Any], result: Any, flops: int) -> Work:
    """Counts what one operation computes and moves; nothing for views."""
    written = tensors_in((result,))
    if getattr(func, "is_view", False) or func.overloadpacket in _MOVE_NOTHING or not written:
        return Work()
    if func.overloadpacket in _ATTENTION:
        # A causal mask hides half of what it is counted for.
        seen = flops / 2 if _argument(func, args, kwargs, "is_causal") else flops
        return Work(kernels=1, attention_flops=seen)
    read = written if func.overloadpacket in _GATHERS else tensors_in((*args, *kwargs.values()))
    num_bytes = sum(tensor.nbytes for tensor in (*read, *written) if tensor.layout is torch.strided)
    if flops:
        return Work(products=1, product_flops=flops, product_bytes=num_bytes / 2)
    return Work(kernels=1, moved_bytes=num_bytes)


def _argument(func: Any, args: Any, kwargs: Mapping[str, Any], name: str) -> Any:
    """The argument of an operation under a name of its schema; None if it is left out."""
    names = [argument.name for argument in func._schema.arguments]
    at = names.index(name) if name in names else len(args)
    return args[at] if at < len(args) else kwargs.get(name)


_ATTENTION = frozenset(_attention_packets())

_FLOPS: dict[Any, Callable[..., int]] = {
    **flop_registry,
    **dict.fromkeys(_ATTENTION, attention_flops),
}


_FIRST_SEED = 0x5EED_0000_0000


class TracedDraws:
    """Follows the generators through a trace.

    Attributes:
        set_at: line where the step function draws, or ends, with generators that were set, so that ranks
            would draw other numbers than a plain loop; empty if it does not.
    """

    def __init__(self, device: torch.device, line: Callable[[], str]):
        self.set_at = ""
        self._device = device
        self._line = line
        self._num_moved = 0
        self._own: dict[int, tuple[torch.Generator, Tensor]] = {}  # with the state at the start
        self._others: dict[int, tuple[torch.Generator, Tensor]] = {}  # made inside, or not found
        # Of others: where they were left, and by which node; None is a free operation.
        self._others_left: dict[int, tuple[bytes, int | None]] = {}
        self._handed_on: dict[tuple[int, int], None] = {}  # from which node to which
        self._found = b""
        self._node: int | None = None
        self._own_left: dict[int, bytes] = {}
        self._own_drawn: set[int] = set()
        # A script may have set the very seed that its step function sets.
        torch.default_generator.manual_seed(_FIRST_SEED)
        self._left = self._state()
        self._nodes_when_set: int | None = None

    @property
    def generators(self) -> Collection[torch.Generator]:
        return [generator for generator, _ in self._own.values()]

    def follow(self, items: Iterable[Any]) -> None:
        """Records the generators that exist before the step function is called."""
        for item in items:
            if isinstance(item, torch.Generator) and not is_default(item):
                state = item.get_state()
                self._own[generator_key(item)] = item, state
                self._own_left[generator_key(item)] = _content(state)

    def put_back(self) -> None:
        """Sets all generators that were given to operations back to their start."""
        for generator, state in (*self._own.values(), *self._others.values()):
            generator.set_state(state)

    @contextmanager
    def apart(self) -> Iterator[None]:
        """Around what one rank alone runs, as all must see who sets generators."""
        state = get_state(self._device)
        try:
            yield
        finally:
            set_state(state, self._device)

    def has(self, draw: Draw) -> bool:
        """Whether a draw that is about to run is in the row."""
        own = draw.generator
        if own is None:
            return self.in_row
        if generator_key(own) not in self._own:
            self._find_other(own)
            return False
        return self._own_left[generator_key(own)] == _content(own.get_state())

    def _find_other(self, generator: torch.Generator) -> None:
        """Looks who has left a generator, that is about to be drawn from, as it is."""
        key, state = generator_key(generator), generator.get_state()
        self._others.setdefault(key, (generator, state))
        self._found = _content(state)
        left, maker = self._others_left.get(key, (b"", None))
        if maker is None or maker == self._node or left != self._found:
            return
        if self._node is None:
            raise TraceError(
                f"{self._line()}: numbers are drawn here from a torch.Generator that was made in the step "
                "function, and from which a module has drawn before. Only the rank of that module has it as "
                "the module leaves it. Make another generator, or keep one in the model or in a variable of "
                "the script: it is the same on all ranks."
            )
        self._handed_on[maker, self._node] = None

    @property
    def in_row(self) -> bool:
        """Whether the generators are where the last draw has left them."""
        return self._state() == self._left

    def drawn(self, draw: Draw) -> None:
        """A draw in the row has run; where it had no data, the generator is moved on in its place."""
        own = draw.generator
        if self.has(draw):
            self._num_moved += 1
            (own or torch.default_generator).manual_seed(_FIRST_SEED + self._num_moved)
        if own is None:
            self._left = self._state()
        else:
            self._own_left[generator_key(own)] = _content(own.get_state())
            self._own_drawn.add(generator_key(own))

    def drawn_elsewhere(self, draw: Draw) -> None:
        """A draw that is not in the row has run; records the generator that was made in between."""
        own = draw.generator
        if own is None or generator_key(own) in self._own:
            return
        if self._found == _content(own.get_state()):  # there was no data
            self._num_moved += 1
            own.manual_seed(_FIRST_SEED + self._num_moved)
        self._others_left[generator_key(own)] = _content(own.get_state()), self._node

    def before_step(self, num_nodes: int, *, free: bool = False) -> None:
        self._node = None if free else num_nodes
        if self.in_row:
            self._nodes_when_set = None
        elif self._nodes_when_set is None:
            self._nodes_when_set = num_nodes

    def after_step(self, num_nodes: int, *, draws: bool, free: bool) -> None:
        since = self._nodes_when_set
        elsewhere = since is not None and draws and not (free and num_nodes == since)
        sets = since is None and not free and not self.in_row
        if elsewhere or sets:
            self.set_at = self.set_at or self._line()

    def at_end(self, *, draws: bool) -> None:
        """To be called when the step function has returned."""
        moved = any(_content(self._own[key][0].get_state()) != self._own_left[key] for key in self._own_drawn)
        if moved or (draws and not self.in_row):
            self.set_at = self.set_at or "at the end of the step function"

    def together(self, nodes: Sequence[Node]) -> list[Together]:
        """Nodes that draw from one generator which the step function has made."""
        return [
            Together(
                pair,
                what="a torch.Generator that is made in the step function",
                line=nodes[pair[1]].line,
                why=f"{nodes[pair[1]].name} draws from a torch.Generator from which {nodes[pair[0]].name} "
                "has drawn, and another stage would not have it as that leaves it.",
                remedy="Keep the generator in the model or in a variable of the script, where it is the same "
                "on all stages, or make one for each module.",
            )
            for pair in self._handed_on
        ]

    def _state(self) -> tuple[bytes, ...]:
        return tuple(_content(state) for state in get_state(self._device) if state is not None)


def _content(state: Tensor) -> bytes:
    """Read past all modes, in which tensors have no data, and by no operation of the step function."""
    with plain_torch():
        return ctypes.string_at(state.data_ptr(), state.nbytes)
