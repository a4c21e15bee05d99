"""What a folder of DCP has for a run: the model, its optimizers by name of parameter, and other states.

::

    {"model": ..., "optimizer": ...}            of get_state_dict: state -> NAME -> KEY, param_groups -> [...]
    {"app": {"model": ..., "optim": ...}}       the same, one level deeper
    {**model, "optimizer": ..., "train_state"}  torchtitan: keys "state.NAME.KEY", "param_groups.NAME.OPTION"

An optimizer is what has ``param_groups``. Beside it stands the model: under ``model``, by its tensors' own
names, or under the one key that has tensors.
"""

from collections.abc import Mapping
from functools import partial
from math import isfinite, prod
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from shardwright.checkpoint.importing import Beside, ModelFile
from shardwright.checkpoint.tensor_file import TensorSource
from shardwright.errors import CheckpointError
from shardwright.text import shortened
from shardwright.torch.checkpoints.dcp_folder import DcpFolder, Leaf, Refused
from shardwright.torch.checkpoints.encoded import encode
from shardwright.torch.checkpoints.snapshot import optimizer_prefix
from shardwright.torch.checkpoints.state_dict_files import dtype_name, stored

_STATE, _GROUPS, _EXTRA = "state", "param_groups", "_extra_state"
_MEMBERS = ("params", "param_names")

_Node = dict[str, Any]


class _Optimizer(NamedTuple):
    """An optimizer, by names of parameters.

    Attributes:
        state: by parameter and key; tensors are still in the folder.
        groups: their options, and under ``params`` the names of their parameters.
    """

    state: dict[str, _Node]
    groups: list[_Node]

    @property
    def names(self) -> list[str]:
        """Of all parameters."""
        of_groups = (name for group in self.groups for name in group.get("params", ()))
        return list(dict.fromkeys([*self.state, *map(str, of_groups)]))


def read_run(path: Path, *, key: str | None = None) -> "DcpRun":
    """The run in a folder.

    Args:
        key: where the model is, where that is not said.
    """
    try:
        return DcpRun(path, key)
    except (AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(
            f"{path} is laid out as nothing that is known ({type(error).__name__}: {error}). Save what "
            "get_state_dict(model, optimizer) gives, under 'model' and 'optimizer'."
        ) from error


class DcpRun:
    """The parts of a run in a folder.

    Attributes:
        states: everything else, by name.
        left_out: names of those that are not taken over, and why.
    """

    def __init__(self, path: Path, key: str | None):
        self._folder = DcpFolder(path)
        tree = self._folder.tree
        runs = _above_optimizers(tree)
        place, above = self._above(runs, key) or ("", tree)
        found = [node for node in above.values() if _is_optimizer(node)]
        self.optimizers = [self._optimizer(node) for node in found]
        others = {name: node for name, node in above.items() if not _is_optimizer(node)}
        self._model = self._model_in(others) if key is None else self._model_at(tree, key)
        first = key and key.partition(".")[0]
        outside = {} if above is tree else {n: v for n, v in tree.items() if not _above_optimizers({n: v})}
        beside = {**outside, **others}
        self.states = {
            name: node
            for name, node in beside.items()
            if node is not self._model and name not in self._model and name != first
        }
        self.left_out = {
            name: "it is no tensor"
            for name, value in self._model.items()
            if not isinstance(value, Leaf) and _EXTRA not in name
        }
        for taken in {place, key if first in beside else None} - {"", None}:
            self.left_out |= dict.fromkeys(_places_beside(tree, str(taken)), f"only {taken} was asked for")
        for other in runs.keys() - {place}:
            self.left_out[other] = "it has an optimizer of its own, which is a run of its own"
        for each in self.optimizers:
            self._check(each)

    @property
    def step(self) -> int:
        """How many steps were done: torchtitan's number, one under ``step``, or the optimizer's; or 0."""
        for name in ("train_state", "step"):
            found = self.states.get(name)
            value = self._number(found.get("step") if isinstance(found, dict) else found)
            if value is not None:
                return value
        states = [state for each in self.optimizers for state in each.state.values() if "step" in state]
        counts = map(self._number, self._folder.read([state["step"] for state in states]))
        return max((count for count in counts if count is not None), default=0)

    def model_file(self) -> ModelFile:
        found = {name: leaf for name, leaf in self._model.items() if isinstance(leaf, Leaf)}
        sources = {name: self._folder.source(leaf) for name, leaf in found.items()}
        return ModelFile(path=self._folder.path, tensors=sources)

    def beside(self, names: Mapping[str, str]) -> Beside:
        """Everything but the model's tensors; by the new names of parameters."""
        tensors: dict[str, TensorSource] = {}
        small: dict[str, Tensor] = {}
        optimizers = []
        for number, (state, groups) in enumerate(self.optimizers):
            prefix, others = optimizer_prefix(number), {}
            for name, values in state.items():
                own = f"{prefix}{names[name]}/"
                leaves = {key: value for key, value in values.items() if isinstance(value, Leaf)}
                tensors |= {f"{own}{key}": self._folder.source(leaf) for key, leaf in leaves.items()}
                if plain := {key: value for key, value in values.items() if key not in leaves}:
                    others[names[name]] = encode(plain, name=f"{own}other", tensors=small)
            options = [{key: group[key] for key in group if key not in _MEMBERS} for group in groups]
            document = encode(options, name=f"{prefix}groups", tensors=small)
            members = [sorted(names[name] for name in group.get("params", ())) for group in groups]
            optimizers.append({"groups": document, "members": members, "others": others})
        extra = {name.removesuffix(f".{_EXTRA}"): self._model[name] for name in self._model if _EXTRA in name}
        document = {
            "optimizers": optimizers,
            "extra_states": self._encoded("extra_state", extra, small),
            "states": self._encoded("state", self.states, small),
        }
        for name, tensor in small.items():
            content = partial(_content, tensor)
            tensors[name] = TensorSource(dtype_name(tensor.dtype), tuple(tensor.shape), content)
        return Beside(tensors=tensors, document=document)

    # ---- inside ----

    def _above(self, runs: dict[str, _Node], key: str | None) -> tuple[str, _Node] | None:
        """Where the run is: the model, and its optimizers; None without those."""
        if len(runs) > 1 and key is not None:
            runs = {name: node for name, node in runs.items() if f"{key}.".startswith(f"{name}.")}
        if len(runs) > 1:
            raise CheckpointError(
                f"{self._folder.path} has optimizers in several places, {shortened(list(runs))}, and a run "
                f"begins with one of them. Name its model: --key {next(iter(runs))}.model; and import the "
                "others into folders of their own."
            )
        return next(iter(runs.items()), None)

    def _number(self, value: Any) -> int | None:
        """A count that may be a tensor of one number."""
        if isinstance(value, Leaf) and prod(self._folder.source(value).shape) == 1:
            value = self._folder.read(value)
        if isinstance(value, Tensor) and value.numel() == 1:
            value = value.item()
        if isinstance(value, bool) or not isinstance(value, int | float) or not isfinite(value) or value < 0:
            return None
        return int(value) if value == int(value) else None

    def _optimizer(self, node: _Node) -> _Optimizer:
        if _GROUPS in node:
            groups = self._folder.read(node[_GROUPS])
            if refused := [each for group in groups for each in group.values() if isinstance(each, Refused)]:
                raise CheckpointError(
                    f"{self._folder.path} has options of an optimizer that are no plain values, or damaged: "
                    f"{refused[0].why}. Nothing in it was executed."
                )
            return _Optimizer(node.get(_STATE, {}), groups)
        state: dict[str, _Node] = {}
        options: dict[str, _Node] = {}
        for flat, value in node.items():
            kind, _, rest = flat.partition(".")
            name, _, key = rest.rpartition(".")
            (options if kind == _GROUPS else state).setdefault(name, {})[key] = value
        alike: dict[str, _Node] = {}  # it is not said which there were: those of equal options are one
        for name, own in self._folder.read(options).items():
            equal = repr(sorted((k, v.tolist() if isinstance(v, Tensor) else v) for k, v in own.items()))
            alike.setdefault(equal, {**own, "params": []})["params"].append(name)
        return _Optimizer(state, list(alike.values()))

    def _model_at(self, tree: _Node, key: str) -> _Node:
        found: Any = tree
        for part in key.split("."):
            found = found.get(part) if isinstance(found, dict) else None
        if not _has_tensors(found):
            raise CheckpointError(f"{self._folder.path} has no tensors under {key!r}. {_told(tree)}")
        model: _Node = found
        return model

    def _model_in(self, others: _Node) -> _Node:
        bare = {name: node for name, node in others.items() if isinstance(node, Leaf) or _EXTRA in name}
        groups = {name: node for name, node in others.items() if _has_tensors(node)}
        named = {name for each in self.optimizers for name in each.names}
        fitting = [node for node in (bare, *groups.values()) if node and named <= node.keys()]
        if "model" not in groups and len(fitting) != 1:
            raise CheckpointError(
                f"{self._folder.path} does not say what in it is the model. {_told(others)} Name the one "
                "that is: --key KEY; or save it under 'model'."
            )
        model: _Node = groups.get("model") or fitting[0]
        return model

    def _check(self, optimizer: _Optimizer) -> None:
        remedy = (
            "Save what get_state_dict(model, optimizer) of torch.distributed.checkpoint.state_dict gives; or "
            "the model alone."
        )
        unknown = [name for name in optimizer.names if not isinstance(self._model.get(name), Leaf)]
        if unknown:
            number = " by number, as optimizer.state_dict() does" if unknown[0].isdigit() else ""
            raise CheckpointError(
                f"{self._folder.path} names the parameters of an optimizer{number}: {shortened(unknown)}, "
                f"and the model in it has no such names. {remedy}"
            )
        for name, values in optimizer.state.items():
            if deep := [key for key, value in values.items() if isinstance(value, dict | list)]:
                raise CheckpointError(
                    f"{self._folder.path} has {deep[0]} of {name}, which is nested deeper than tensors by "
                    f"parameter and key. {remedy}"
                )
        for group in optimizer.groups:
            if "fused" in group:  # PyTorch's own: others may have anything
                self._check_moments(optimizer.state, group)

    def _check_moments(self, state: Mapping[str, _Node], group: _Node) -> None:
        """Refuses what would end in a KeyError, or in sizes that differ, within the optimizer's step."""
        needed = {"step", "exp_avg", "exp_avg_sq"} if "amsgrad" in group else set()  # Adam, AdamW
        needed |= {"max_exp_avg_sq"} if group.get("amsgrad") else set()
        for name in group.get("params", ()):
            values = state.get(name, {})
            if values and (missing := sorted(needed - values.keys())):
                raise CheckpointError(
                    f"{self._folder.path} has {', '.join(sorted(values))} of {name}, and no {missing[0]}: "
                    "the optimizer's state was not saved whole. Save it anew; or the model alone."
                )
            shape = self._folder.source(self._model[name]).shape
            for key, leaf in values.items():
                own = self._folder.source(leaf).shape if isinstance(leaf, Leaf) and key != "step" else ()
                if own not in ((), shape):
                    raise CheckpointError(
                        f"{self._folder.path} has {key} of {name} in the shape {own}, and the parameter has "
                        f"{shape}. Save model and optimizer at the same moment; or the model alone."
                    )

    def _encoded(self, kind: str, states: _Node, small: dict[str, Tensor]) -> _Node:
        """States by name; those that a checkpoint cannot have are left out, and it is noted why."""
        found = {}
        for name, state in states.items():
            try:
                found[name] = encode(self._folder.read(state), name=f"{kind}/{name}", tensors=small)
            except CheckpointError as error:
                self.left_out[name] = str(error)
        return found


def _is_optimizer(node: Any) -> bool:
    return isinstance(node, dict) and any(name.partition(".")[0] == _GROUPS for name in node)


def _above_optimizers(node: _Node, place: str = "") -> dict[str, _Node]:
    """Where optimizers are, and with them the model; by place."""
    if any(map(_is_optimizer, node.values())):
        return {place: node}
    found: dict[str, _Node] = {}
    for name, each in node.items():
        if isinstance(each, dict):
            found |= _above_optimizers(each, f"{place}.{name}" if place else name)
    return found


def _places_beside(tree: _Node, key: str) -> list[str]:
    """What is beside a place, on the way to it."""
    found, above, node = [], "", tree
    for part in key.split("."):
        if above:
            found += [f"{above}{name}" for name in node if name != part]
        above, node = f"{above}{part}.", node[part]
    return found


def _has_tensors(node: Any) -> bool:
    return isinstance(node, dict) and any(isinstance(each, Leaf) for each in node.values())


def _told(node: _Node) -> str:
    names = [
        *(
            f"{name}.{inner}"
            for name, each in node.items()
            if isinstance(each, dict)
            for inner in each
            if _has_tensors(each[inner])
        ),
        *node,
    ]
    return f"It has {shortened(names, most=5) or 'nothing beside optimizers'}."


def _content(tensor: Tensor) -> list[memoryview]:
    return [stored(tensor).data] if tensor.numel() else []
