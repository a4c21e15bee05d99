"""Encodes the state of schedulers, samplers and the like as JSON plus tensors, never a pickle.

JSON has no tuples, bytes or infinities, and its keys are strings only. Such values become an object with one
key that begins with ``$``::

    (1, 2)            {"$tuple": [1, 2]}
    {0: "a"}          {"$dict": [[0, "a"]]}
    tensor            {"$tensor": "extra/scheduler/base"}      the tensor of that name in the files
"""

import json
import math
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Mapping
from hashlib import sha256
from typing import Any

import numpy
import torch
from torch import Tensor
from torch.optim import Optimizer

from shardwright.checkpoint.disk import is_plain_name
from shardwright.errors import CheckpointError, CorruptCheckpointError, UsageError
from shardwright.torch.checkpoints.state_dict_files import stored
from shardwright.torch.model.distributed_model import DistributedModel
from shardwright.torch.step_end.training_alike import note_loader
from shardwright.torch.tensor_parallel.divide import all_elements

_DEEPEST = 48
_SIMPLE = frozenset({str, bool, int, float, type(None)})


def encode(value: Any, *, name: str, tensors: dict[str, Tensor]) -> Any:
    return _encoded(value, name, tensors, frozenset())


def decode(document: Any, *, name: str, tensor: Callable[[str], Tensor]) -> Any:
    if isinstance(document, list):
        return _decoded_items(document, name, tensor)
    if not isinstance(document, Mapping):
        return document
    if len(document) == 1:
        ((kind, content),) = document.items()
        if kind.startswith("$"):
            return _special(kind, content, name, tensor)
    return {key: decode(item, name=f"{name}.{key}", tensor=tensor) for key, item in document.items()}


def _decoded_items(found: list[Any], name: str, tensor: Callable[[str], Tensor]) -> list[Any]:
    return [
        item if type(item) in _SIMPLE else decode(item, name=f"{name}[{i}]", tensor=tensor)
        for i, item in enumerate(found)
    ]


def _encoded(value: Any, name: str, tensors: dict[str, Tensor], around: frozenset[int]) -> Any:
    if type(value) in (str, bool, int, type(None)):
        return value
    if type(value) is float:
        return value if math.isfinite(value) else {"$float": repr(value)}
    if isinstance(value, Tensor):
        return {"$tensor": _kept(value, name, tensors)}
    if isinstance(value, numpy.ndarray | numpy.generic):
        return _encoded_array(value, name, tensors)
    if isinstance(value, bytes | bytearray):
        return {"$bytes": bytes(value).hex()}
    if isinstance(value, torch.dtype | torch.device):
        kind = "$dtype" if isinstance(value, torch.dtype) else "$device"
        return {kind: str(value).removeprefix("torch.")}
    if id(value) in around or len(around) >= _DEEPEST:
        raise CheckpointError(
            f"{name} cannot be saved: it contains itself, or is nested over {_DEEPEST} deep."
        )
    return _encoded_container(value, name, tensors, around | {id(value)})


def _encoded_array(value: Any, name: str, tensors: dict[str, Tensor]) -> Any:
    try:
        kept = _kept(torch.from_numpy(numpy.array(value, copy=True, order="C")), name, tensors)
    except (TypeError, ValueError) as error:
        raise CheckpointError(
            f"{name} is an array of {value.dtype}, which cannot be saved. Leave it out of the state, or give "
            "it as numbers or texts in a list."
        ) from error
    return {"$array" if isinstance(value, numpy.ndarray) else "$numpy": kept}


def _kept(tensor: Tensor, name: str, tensors: dict[str, Tensor]) -> str:
    """Keeps a tensor under a name that no other has: ``{"a.b": x, "a": {"b": y}}`` has two of one path."""
    free, number = name, 0
    while free in tensors:
        number += 1
        free = f"{name}#{number}"
    tensors[free] = tensor
    return free


def _encoded_container(value: Any, name: str, tensors: dict[str, Tensor], around: frozenset[int]) -> Any:
    def items(values: Any) -> list[Any]:
        return [_encoded(item, f"{name}[{i}]", tensors, around) for i, item in enumerate(values)]

    kind = type(value)
    if kind is list:
        return items(value)
    if kind in (set, frozenset):  # in an order of its own: that of texts is another in every process
        return {_SEQUENCES[kind]: items(sorted(value, key=repr))}
    if kind in _SEQUENCES:
        return {_SEQUENCES[kind]: items(value)}
    if kind is Counter:
        return {"$counter": items(list(value.items()))}
    if kind is deque:
        return {"$deque": [value.maxlen, items(value)]}
    if kind in (dict, OrderedDict, defaultdict):  # what makes the missing of a defaultdict is code
        if all(type(key) is str for key in value) and not _looks_special(value):
            return {key: _encoded(item, f"{name}.{key}", tensors, around) for key, item in value.items()}
        pairs = enumerate(value.items())
        return {
            "$dict": [
                [_encoded(k, f"{name}.key{i}", tensors, around), _encoded(v, f"{name}.{k}", tensors, around)]
                for i, (k, v) in pairs
            ]
        }
    raise CheckpointError(
        f"{name} is a {kind.__module__}.{kind.__qualname__}, which cannot be saved: checkpoints have "
        "numbers, texts, bytes, tensors and arrays, in lists, tuples, sets and dictionaries. Leave it out of "
        "the state, or give it as these."
    )


def _looks_special(value: Mapping[str, Any]) -> bool:
    return len(value) == 1 and next(iter(value)).startswith("$")


def _special(kind: str, content: Any, name: str, tensor: Callable[[str], Tensor]) -> Any:
    def items(found: Any) -> list[Any]:
        if not isinstance(found, list):
            raise ValueError
        return _decoded_items(found, name, tensor)

    try:
        if kind in _MADE_OF_ITEMS:
            return _MADE_OF_ITEMS[kind](items(content))
        if kind == "$deque":
            most, found = content
            return deque(items(found), maxlen=most)
        if kind == "$dict":
            return dict(map(items, content))
        if kind == "$counter":
            return Counter(dict(items(content)))
        if kind in ("$tensor", "$array", "$numpy"):
            found = tensor(content)
            if kind == "$tensor":
                return found
            return found.numpy() if kind == "$array" else found.numpy()[()]
        if kind in _FROM_TEXT and isinstance(content, str):
            return _FROM_TEXT[kind](content)
    except (TypeError, ValueError, RuntimeError, AttributeError) as error:
        if isinstance(error, CorruptCheckpointError):
            raise
        raise CorruptCheckpointError(f"{name} is no {kind[1:]}: {str(content)[:80]!r}.") from error
    raise CorruptCheckpointError(f"{name} is {kind}, which this version does not know.")


def _float(text: str) -> float:
    if text not in ("inf", "-inf", "nan"):
        raise ValueError
    return float(text)


def _dtype(text: str) -> torch.dtype:
    found = getattr(torch, text)
    if not isinstance(found, torch.dtype):
        raise ValueError
    return found


_SEQUENCES: dict[type, str] = {tuple: "$tuple", set: "$set", frozenset: "$frozenset", torch.Size: "$tuple"}
_MADE_OF_ITEMS: dict[str, Callable[[list[Any]], Any]] = {
    "$tuple": tuple,
    "$set": set,
    "$frozenset": frozenset,
}
_FROM_TEXT: dict[str, Callable[[str], Any]] = {
    "$float": _float,
    "$bytes": bytes.fromhex,
    "$dtype": _dtype,
    "$device": torch.device,
}


class StateObjects:
    def __init__(self, objects: Mapping[str, Any]):
        self.objects = dict(objects)
        for name, each in self.objects.items():
            _check(name, each)
            note_loader(each)

    def taken(self) -> dict[str, Any]:
        """Their states, by name, with whole tensors; collective over ranks that share layers."""
        return {name: all_elements(each.state_dict()) for name, each in self.objects.items()}

    def digest(self, name: str, state: Any) -> str:
        """Equal for states that are the same."""
        tensors: dict[str, Tensor] = {}
        document = encode(state, name=f"state/{name}", tensors=tensors)
        made = sha256(json.dumps(document, sort_keys=True).encode())
        for tensor in tensors.values():
            made.update(stored(tensor).data)
        return made.hexdigest()


def _check(name: str, each: Any) -> None:
    if not isinstance(name, str) or not is_plain_name(name):
        raise UsageError(
            f"state has the name {name!r}: use letters, digits, dots, - and _, beginning with a letter or "
            "digit."
        )
    kind = type(each).__name__
    for method in ("state_dict", "load_state_dict"):
        if not callable(getattr(each, method, None)):
            raise UsageError(
                f"state[{name!r}] is a {kind}, which has no {method}(). Give objects with state_dict() and "
                "load_state_dict()."
            )
    if isinstance(each, Optimizer):
        raise UsageError(
            f"state[{name!r}] is an optimizer. Wrap it in sw.DistributedOptimizer: wrapped ones are saved "
            "without being named."
        )
    if isinstance(each, DistributedModel):
        raise UsageError(f"state[{name!r}] is the model, which is saved without being named. Leave it out.")
