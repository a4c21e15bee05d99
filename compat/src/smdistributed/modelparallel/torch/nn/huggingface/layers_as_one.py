"""What a Hugging Face model calls in the place of its layers: all distributed layers, as one.

::

    for block in self.h:                          the model's own forward, of any release
        hidden = block(hidden, past, mask, ...)

    self.h = [LayersAsOne(self.seq_layers)]       one "block": hidden = self.seq_layers((hidden, mask))
"""

import ast
import inspect
import textwrap
from typing import Any

import torch
from torch import Tensor, nn

from shardwright.errors import UsageError
from smdistributed.modelparallel.torch.nn.distributed import DistributedTransformerLayer

_CACHES = ("past_key_values", "past_key_value", "layer_past")


class LayerCall:
    """How a Hugging Face model calls one of its layers, and what a distributed layer takes and returns."""

    def __init__(self, theirs: type[nn.Module], ours: DistributedTransformerLayer):
        self._names = tuple(inspect.signature(theirs.forward).parameters)[1:]
        self._returns_tuple = _returns_tuple(theirs)
        self._takes_cross_states = ours.add_cross_attention
        self._takes_positions = ours.options.rotary is not None

    def inputs(self, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """What distributed layers are called with, from what the model's own would be."""
        given = {**dict(zip(self._names, args, strict=False)), **kwargs}
        _refuse(given)
        hidden: Tensor = given["hidden_states"]
        mask = _as_numbers(given.get("attention_mask"), hidden)
        inputs: tuple[Any, ...] = (hidden, mask)
        if self._takes_cross_states:
            cross_mask = _as_numbers(given.get("encoder_attention_mask"), hidden)
            inputs = (hidden, given.get("encoder_hidden_states"), mask, cross_mask)
        return (*inputs, given.get("position_ids")) if self._takes_positions else inputs

    def result(self, outputs: tuple[Any, ...]) -> Any:
        """What the model's own layer would return."""
        return (outputs[0], None) if self._returns_tuple else outputs[0]


class LayersAsOne:
    """All distributed layers, as a Hugging Face model calls one of its own."""

    def __init__(self, layers: nn.Sequential, call: LayerCall):
        self._layers = layers
        self._call = call

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs them."""
        return self._call.result(self._layers(self._call.inputs(*args, **kwargs)))


def _returns_tuple(kind: type[nn.Module]) -> bool:
    """Whether the forward of a layer returns a tuple: it does in older releases of transformers."""
    source = textwrap.dedent(inspect.getsource(inspect.unwrap(kind.forward)))
    returned = [node.value for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Return)]
    last = returned[-1] if returned else None
    return not (isinstance(last, ast.Name) and last.id != "outputs")


def _refuse(given: dict[str, Any]) -> None:
    """Refuses what distributed layers do not do."""
    if given.get("output_attentions"):
        raise UsageError(
            "output_attentions=True, but distributed layers keep no attention weights. Leave it out, or "
            "create the model without tensor parallelism."
        )
    for name in _CACHES:
        cache = given.get(name)
        if cache is not None and _has_content(cache):
            raise UsageError(
                f"{name} has keys and values of earlier calls, but distributed layers keep none. Translate "
                "the state to Hugging Face's names, and generate with a model of transformers."
            )


def _has_content(cache: Any) -> bool:
    length = getattr(cache, "get_seq_length", None)
    return True if length is None else int(length()) > 0


def _as_numbers(mask: Tensor | None, hidden: Tensor) -> Tensor | None:
    """A mask of booleans, True where a position takes part, as what is added to scores."""
    if mask is None or mask.dtype is not torch.bool:
        return mask
    numbers = torch.zeros(mask.shape, dtype=hidden.dtype, device=mask.device)
    return numbers.masked_fill(~mask, torch.finfo(hidden.dtype).min)
