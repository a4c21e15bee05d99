"""Looks up a module's unit, and the stage that the script has chosen for it.

It applies where `auto_partition` is false; everything else goes to `default_partition`. The innermost setting
wins.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from shardwright.errors import StalePlanError, TraceError, UsageError
from shardwright.model_graph import ParameterSpec
from shardwright.plan import REMEDY
from shardwright.run.context import context
from shardwright.run.planning import check_partition, point_out_auto_partition
from shardwright.torch.interception.deferred import spec_of
from shardwright.torch.pytorch.modules import CreationWatch


@dataclass(frozen=True, slots=True)
class UnitMap:
    """Units and parameters of a model by identity, with their names.

    Attributes:
        units: id of the module -> name of the unit.
        modules: name of the unit -> module.
        parameters: id of a parameter or buffer -> its first name.
        specs: first name -> what it is.
    """

    model: nn.Module
    units: dict[int, str]
    modules: dict[str, nn.Module]
    parameters: dict[int, str]
    specs: dict[str, ParameterSpec]

    @classmethod
    def of(cls, model: nn.Module, unit_names: Sequence[str]) -> "UnitMap":
        return cls._with(model, {name: model.get_submodule(name) for name in unit_names})

    def with_new_tensors(self) -> "UnitMap":
        """The same units, with the parameters and buffers that the model has now."""
        return self._with(self.model, self.modules)

    @classmethod
    def _with(cls, model: nn.Module, modules: dict[str, nn.Module]) -> "UnitMap":
        parameters: dict[int, str] = {}
        tensors: dict[str, tuple[Tensor, bool]] = {}
        aliases: dict[str, list[str]] = {}
        for is_buffer, source in (
            (False, model.named_parameters(remove_duplicate=False)),
            (True, model.named_buffers(remove_duplicate=False)),
        ):
            for name, tensor in source:
                if tensor.layout is not torch.strided:
                    raise TraceError(
                        f"{name} is a sparse tensor ({tensor.layout}), which a model over several stages "
                        "cannot hold. Register its indices and its values as two buffers, and make the "
                        "sparse tensor of them in the forward of the module that uses it."
                    )
                first = parameters.setdefault(id(tensor), name)
                if first == name:
                    tensors[name] = (tensor, is_buffer)
                else:
                    aliases.setdefault(first, []).append(name)
        specs = {
            name: ParameterSpec(
                name=name, spec=spec_of(tensor), aliases=tuple(aliases.get(name, ())), is_buffer=is_buffer
            )
            for name, (tensor, is_buffer) in tensors.items()
        }
        return cls(
            model=model,
            units={id(module): name for name, module in modules.items()},
            modules=modules,
            parameters=parameters,
            specs=specs,
        )


def refuse_unknown_units(model: nn.Module, names: Sequence[str]) -> None:
    """Refuses a plan with units that are no modules of this model; `Plan.check` compares the others."""
    known = dict(model.named_modules(remove_duplicate=False))
    missing = [name for name in names if name not in known]
    if missing:
        raise StalePlanError(
            f"the plan was made for another model: {len(missing)} of its {len(names)} units are no modules "
            f"of this one, for example {missing[0]}. {REMEDY}"
        )


_PIN = "_shardwright_partition"


@contextmanager
def partition(rank: int) -> Iterator[None]:
    """Places the modules that are created inside on a pipeline rank.

    Args:
        rank: pipeline rank, from 0.

    Raises:
        UsageError: there is no such pipeline rank.

    Example:
        >>> import torch, shardwright.torch as sw
        >>> sw.init({"auto_partition": False, "default_partition": 0})
        >>> with sw.partition(0):
        ...     layer = torch.nn.Linear(2, 2)
        >>> sw.shutdown()
    """
    check_partition(rank)
    point_out_auto_partition(of="modules", stacklevel=4)
    with _CREATIONS.inside(rank):
        yield


def set_partition(module: nn.Module, rank: int) -> None:
    """Places a module and its content on a pipeline rank; call it before the first step.

    Args:
        module: any module of the model.
        rank: pipeline rank, from 0.

    Raises:
        UsageError: there is no such pipeline rank, or the model is placed already.
    """
    check_partition(rank)
    if not isinstance(module, nn.Module):
        raise UsageError(f"set_partition takes an nn.Module, not a {type(module).__name__}.")
    point_out_auto_partition(of="modules", stacklevel=3)
    current = context()
    if current.model is not None and current.model.partitioned and current.mesh.pipeline > 1:
        raise UsageError("the model is placed already. Call set_partition before the first step.")
    _remember(module, rank)


def rank_of(module: nn.Module) -> int | None:
    """The pipeline rank on which the user placed this very module, if so."""
    rank: int | None = vars(module).get(_PIN)
    if rank is not None:
        check_partition(rank)
    return rank


def place_alike(module: nn.Module, other: nn.Module) -> None:
    """Places a module, and what is inside it, where the user has placed another, if so."""
    rank: int | None = vars(other).get(_PIN)
    if rank is not None:
        for each in module.modules():
            _remember(each, rank)


def _remember(module: nn.Module, rank: int) -> None:
    # On the module itself, so that copies of it are placed as well.
    vars(module)[_PIN] = rank


_CREATIONS = CreationWatch(_remember)
