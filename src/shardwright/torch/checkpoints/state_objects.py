"""The state of schedulers, samplers and other objects that a script saves with the run."""

import json
from collections.abc import Mapping
from hashlib import sha256
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from shardwright.checkpoint.manifest import is_plain_name
from shardwright.errors import UsageError
from shardwright.torch.checkpoints.encoded import encode
from shardwright.torch.checkpoints.stored import stored
from shardwright.torch.model.distributed_model import DistributedModel
from shardwright.torch.tensor_parallel.parts import all_elements

__all__ = ["StateObjects"]


class StateObjects:
    """The objects that a script has named for saving."""

    def __init__(self, objects: Mapping[str, Any]):
        self.objects = dict(objects)
        for name, each in self.objects.items():
            _check(name, each)

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
