"""Classifies torch functions and operators: schemas, reductions, what they change.

Between units every torch function passes through `glue.GlueMode`. Metadata queries are answered at once.
Functions that read values into Python need data that most ranks do not have.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import distributed_c10d

from shardwright.errors import UsageError
from shardwright.torch.pytorch.tree import leaves

_METADATA_PROPERTIES = (
    "shape dtype device layout ndim requires_grad is_leaf grad_fn names is_cuda is_cpu is_xla is_xpu "
    "is_mps is_meta is_sparse is_sparse_csr is_quantized is_nested is_mkldnn is_vulkan is_ipu is_maia "
    "is_mtia itemsize nbytes _version output_nr retains_grad name volatile _grad_fn"
).split()

_METADATA_METHODS = (
    "size dim ndimension numel nelement stride storage_offset element_size is_floating_point is_complex "
    "is_signed is_contiguous get_device is_same_size __len__ __hash__ is_inference is_pinned is_shared "
    "is_conj is_neg is_set_to is_coalesced has_names __repr__ __format__ __dir__ __reduce_ex__ "
    "__deepcopy__ dim_order is_distributed sparse_dim dense_dim type_as_nothing register_hook "
    "register_post_accumulate_grad_hook"
).split()

_METADATA_FUNCTIONS = (
    "is_floating_point is_complex is_signed numel is_tensor is_same_size result_type can_cast "
    "promote_types is_conj is_neg is_inference is_storage get_device is_distributed broadcast_shapes "
    "is_autocast_enabled"
).split()


def _existing(owner: Any, names: list[str]) -> set[Any]:
    return {getattr(owner, name) for name in names if hasattr(owner, name)}


_METADATA: frozenset[Any] = frozenset(
    {
        getattr(Tensor, name).__get__
        for name in _METADATA_PROPERTIES
        if hasattr(getattr(Tensor, name, None), "__get__")
    }
    | _existing(Tensor, _METADATA_METHODS)
    | _existing(torch, _METADATA_FUNCTIONS)
    # Entering and leaving no_grad() is no operation on a tensor.
    | _existing(torch._C, ["_set_grad_enabled"])
    # They meet the process group that stands in for the default one (see `script_collectives`).
    | {item for item in vars(distributed_c10d).values() if type(item) is FunctionType}
)

_SHAPE: frozenset[Any] = frozenset(
    {Tensor.shape.__get__, Tensor.nbytes.__get__, torch.numel}  # type: ignore[attr-defined]
    | _existing(Tensor, ["size", "numel", "nelement", "__len__", "stride", "is_same_size"])
)

# Functions that turn the data of a tensor into Python objects.
READS_DATA: frozenset[Any] = frozenset(
    _existing(
        Tensor,
        (
            "item tolist numpy __bool__ __int__ __float__ __index__ __complex__ __contains__ __array__ "
            "is_nonzero equal allclose __iter_data__ __dlpack__ data_ptr storage untyped_storage"
        ).split(),
    )
    | _existing(torch, ["equal", "allclose", "is_nonzero"])
)

# Functions that need the autograd history of a tensor, of which behind a read only one rank has it.
NEED_HISTORY: frozenset[Any] = frozenset({torch.autograd.grad, Tensor.retain_grad})

# Functions that may run the forward of units again, where it is recomputed: as if inside of a unit.
CALLS_UNITS: frozenset[Any] = frozenset({torch.autograd.grad})

# Functions without a fake kernel whose results have a shape that no values of their arguments change.
KEEP_SHAPE: frozenset[Any] = frozenset({torch.nn.functional.ctc_loss, torch.ctc_loss})

# ``p.grad``: read, set and deleted.
OF_GRADIENT: frozenset[Any] = frozenset(
    accessor
    for name in ("grad", "grad_dtype")
    for kind in ("__get__", "__set__", "__delete__")
    if (accessor := getattr(getattr(Tensor, name, None), kind, None))
)

# Functions that change several tensors: versions of fake tensors do not move.
_MANY = ("_foreach_", "_fused_", "_amp_foreach_")

RELEASED = "_shardwright_released"
"""Attribute of a parameter or buffer that is on another rank: the device on which it would be here."""

_PLACES: dict[Any, Callable[[torch.device], Any]] = {
    Tensor.device.__get__: lambda device: device,
    Tensor.is_meta.__get__: lambda device: False,  # type: ignore[attr-defined]
    Tensor.is_cpu.__get__: lambda device: device.type == "cpu",  # type: ignore[attr-defined]
    Tensor.is_cuda.__get__: lambda device: device.type == "cuda",  # type: ignore[attr-defined]
    Tensor.get_device: lambda device: -1 if device.type == "cpu" else device.index,
}

# ``tensor.data = other``
SET_DATA: Any = Tensor.data.__set__  # type: ignore[attr-defined]

# Functions that change a tensor in place without a change of its data.
_CHANGES_HISTORY: frozenset[Any] = frozenset(_existing(Tensor, ["detach_", "requires_grad_"]))


_STATISTICS = ("running_mean", "running_var", "running_min", "running_max", "scale", "zero_point")
_OF_STATISTICS: Mapping[Any, tuple[str, ...]] = {
    torch.nn.functional.batch_norm: (
        *("input", "running_mean", "running_var", "weight", "bias"),
        *("training", "momentum", "eps"),
    ),
    torch.fused_moving_avg_obs_fake_quant: (
        *("self", "observer_on", "fake_quant_on", "running_min", "running_max", "scale", "zero_point"),
    ),
}
"""Names of the arguments of functions that write to statistics among them."""


def unnoticed_changes(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[Any, ...]:
    """Arguments that a function changes in place although their version counters do not move."""
    if func in _CHANGES_HISTORY or func == SET_DATA:
        return args[:1]
    name = name_of(func)
    if name.endswith("_") and name.startswith(_MANY):
        return tuple(leaves(args[0] if name.startswith("_foreach_") else (args, kwargs)))
    names = _OF_STATISTICS.get(func)
    if names is not None:
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        if given.get("training", "training" not in names):
            return tuple(given.get(name) for name in _STATISTICS)
    return ()


def on_fakes(func: Callable[..., Any]) -> Callable[..., Any]:
    """The replacement of a function on tensors without data, so that its changes are seen."""
    return _copy_data if func == SET_DATA else func


def _copy_data(tensor: Tensor, data: Tensor) -> None:
    if tensor.shape != data.shape:
        raise UsageError(
            f"a tensor of shape {tuple(tensor.shape)} gets data of shape {tuple(data.shape)} (x.data = y) in "
            "a step function, which other ranks cannot follow. Give the result a name of its own."
        )
    with torch.no_grad():
        tensor.copy_(data)


def gradient_of_backward(
    gradient: Any = None, retain_graph: Any = None, create_graph: bool = False, inputs: Any = None
) -> Any:
    """The gradient among the arguments of ``loss.backward(...)``; no other changes what is computed."""
    for name, given in (("create_graph", create_graph), ("inputs", inputs)):
        if given is not None and given is not False:
            raise UsageError(
                f"backward({name}=...) is not supported inside a step function, whose backward runs stage by "
                "stage. To train some parameters alone, freeze the others with requires_grad_(False)."
            )
    return gradient


def is_metadata(func: Callable[..., Any]) -> bool:
    """Whether a function only asks for shape, type or place."""
    return func in _METADATA


def answer_for_released(func: Callable[..., Any], tensor: Any) -> Any:
    """Answers where another rank's parameter is, as every rank must see it; None for any other question."""
    answer = _PLACES.get(func)
    if answer is None or not isinstance(tensor, Tensor):
        return None
    device = vars(tensor).get(RELEASED)
    return None if device is None else answer(device)


def asks_for_shape(func: Callable[..., Any]) -> bool:
    """Whether a function tells how large a tensor is."""
    return func in _SHAPE


def reader_of(func: Callable[..., Any]) -> str:
    """Names the reader of a value as the script does: ``item()``, or the condition behind ``__bool__``."""
    name = name_of(func)
    return _READERS.get(name, f"{name}()")


_READERS = {
    "__bool__": "a condition (if, while, and, or, not, assert)",
    "__float__": "float()",
    "__int__": "int()",
    "__index__": "an index or range()",
    "__len__": "len()",
    "__array__": "numpy",
    "__contains__": "in",
}


def name_of(func: Callable[..., Any]) -> str:
    """A readable name: ``add``, ``__getitem__``, ``shape``."""
    # Without a name it is an object, such as a module, whose `__repr__` is the script's own code.
    name = getattr(func, "__name__", type(func).__name__)
    if name in ("__get__", "__set__"):
        return getattr(getattr(func, "__self__", None), "__name__", name)
    return str(name)


def name_of_call(func: Any) -> str:
    """The name of a call, for errors: ``add()``, ``module Linear``."""
    return f"module {type(func).__name__}" if isinstance(func, nn.Module) else f"{name_of(func)}()"


aten = torch.ops.aten

_BATCH_NORMS = ("native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm", "_native_batch_norm_legit")


def is_batch_norm_in_training(func: Any, args: Sequence[Any]) -> bool:
    """Whether it is a batch norm that computes statistics; an instance norm is one of a single sample."""
    is_batch_norm = getattr(func, "overloadpacket", func).__name__ in _BATCH_NORMS
    return is_batch_norm and len(args) > 5 and args[5] is True and args[0].shape[0] > 1


def is_written(argument: Any) -> bool:
    """Whether an operator changes an argument, or a result, in place."""
    return argument.alias_info is not None and bool(argument.alias_info.is_write)


def written_arguments(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Any]:
    return [
        args[place] if place < len(args) else kwargs.get(name) for place, name in _written_parameters(func)
    ]


def written_tensors(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Tensor]:
    return tensors_in(written_arguments(func, args, kwargs))


@functools.cache
def _written_parameters(func: Any) -> tuple[tuple[int, str], ...]:
    parameters = enumerate(func._schema.arguments)
    return tuple((place, parameter.name) for place, parameter in parameters if is_written(parameter))


def tensors_in(arguments: Sequence[Any]) -> list[Tensor]:
    """The tensors among arguments of an operator, which are in lists at most."""
    found: list[Tensor] = []
    for argument in arguments:
        if isinstance(argument, Tensor):
            found.append(argument)
        elif isinstance(argument, list | tuple):
            found += tensors_in(argument)
    return found


def map_arguments(
    function: Callable[[Tensor], Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments of an operator with something else in the place of each tensor."""
    mapped = {name: _mapped(function, value) for name, value in kwargs.items()}
    return tuple(_mapped(function, value) for value in args), mapped


def _mapped(function: Callable[[Tensor], Any], value: Any) -> Any:
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, list | tuple):
        return type(value)(_mapped(function, each) for each in value)
    return value


@functools.cache
def takes_several(func: Any) -> bool:
    """Whether an operator does the same with each tensor of lists, and `one_by_one` may run it."""
    return str(func._schema.name).startswith("aten::_foreach_")


def one_by_one(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any] | None:
    """Runs an operator of lists on one tensor of each after the other: they are of several kinds."""
    results: list[Any] = []
    for index in range(len(args[0])):
        own = [item[index : index + 1] if isinstance(item, list | tuple) else item for item in args]
        results += func(*own, **kwargs) or ()
    return results or None
