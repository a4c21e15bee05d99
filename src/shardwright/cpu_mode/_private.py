"""The private parts of PyTorch that CPU mode needs.

Tried with torch 2.13 and CPython 3.11.

- The type of the classes `torch.device`, `torch.Generator`, `torch.Stream` and `torch.Event`: classes of
  PyTorch's core take no attributes, but have a type, which says what a call of them does. (PyTorch itself
  gives `torch.Generator` one of its own.) `torch.compile` would not know other classes in their place.
- `torch.utils._device._device_constructors`: what ``with torch.device(...)`` acts on. PyTorch makes the list
  once; made after functions have been replaced it would have what is never handed to modes.
- `torch.utils._device.DeviceContext`: what ``with torch.device("cuda"):`` enters.
- `torch.cuda._lazy_init`, `torch.cuda._lazy_call`: initialise CUDA, or fail.
- `torch.jit._builtins`: how TorchScript knows a function for an operation of its own. What it compiles is not
  translated.
- `DistributedDataParallel._passing_sync_batchnorm_handle`: refuses `SyncBatchNorm` on the CPU.
- `torch.nn.modules.batchnorm._BatchNorm`: what `SyncBatchNorm` comes to where there is nothing to sum.
- `torch.cuda.memory._record_memory_history`: has the allocator of CUDA keep a record; public scripts call it.
- `torch._utils._get_available_device_type`: what `DataParallel` asks for the device to spread over.
- `torch.distributed.checkpoint.filesystem._get_available_device_type`: whose streams copy a checkpoint to the
  host; what writes one looks for them where `torch.cuda.is_available()`.
- `torch.distributed.fsdp._init_utils._check_module_states_for_sync_module_states`: refuses to broadcast the
  weights of a module on the CPU.
- `torch.distributed.fsdp._flat_param.FlatParamHandle.flat_param_to`: moves weights from a GPU to the host;
  those on the GPU are freed then.
- `torch.optim.optimizer._get_capturable_supported_devices`: where optimizers with ``capturable=True`` may be.
- `torch._C`: functions of mixed precision are there, too, and `torch.compile` looks for them there.
"""

import ctypes
import functools
import importlib
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch._utils
from torch.jit import _builtins
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils import _device

CORE: Any = torch._C
PlainBatchNorm: Any = _BatchNorm


def device_constructors() -> set[Any]:
    """The functions that PyTorch knows to make tensors; it makes the list with the first call."""
    return set(_device._device_constructors())


def let_ddp_take_synchronised_norms() -> None:
    """Has `DistributedDataParallel` take modules that synchronise their statistics themselves."""
    wrapper: Any = torch.nn.parallel.DistributedDataParallel
    wrapper._passing_sync_batchnorm_handle = lambda self, module: None


def let_fsdp_broadcast_weights(init_utils: Any) -> None:
    """Has FSDP take modules on the CPU with ``sync_module_states=True``."""
    init_utils._check_module_states_for_sync_module_states = lambda module_states: None


def let_fsdp_move_weights(flat_param: Any) -> None:
    """Has weights that FSDP moves be copies: it frees what it has moved, which would be the same memory."""
    move = flat_param.FlatParamHandle.flat_param_to

    @functools.wraps(move)
    def flat_param_to(self: Any, *args: Any, **kwargs: Any) -> None:
        move(self, *args, **{"copy": True, **kwargs})

    flat_param.FlatParamHandle.flat_param_to = flat_param_to


def let_checkpoints_be_written(filesystem: Any) -> None:
    """Has `torch.distributed.checkpoint` copy to the host by streams of `torch.cuda`, as for a GPU."""
    filesystem._get_available_device_type = lambda: "cuda"


def let_torchscript_take(replacement: Any, original: Any) -> None:
    """Has TorchScript compile a call of `replacement` to the operation that `original` stands for."""
    operation = _builtins._find_builtin(original)  # type: ignore[no-untyped-call]
    if operation is not None:
        _builtins._register_builtin(replacement, operation)


def translate_device_contexts(translate: Callable[[Any], Any]) -> None:
    """Has ``with torch.device("cuda"):`` make tensors where `translate` says."""
    original = _device.DeviceContext.__init__

    @functools.wraps(original)
    def translated(self: Any, device: Any) -> None:
        original(self, translate(device))

    _device.DeviceContext.__init__ = translated  # type: ignore[method-assign]


def intercept_calls(cls: Any, call: Callable[..., Any]) -> None:
    """Has a class of PyTorch's core be called through a function; it stays the same class."""
    kind: Any = type(cls)

    class _Intercepting(kind):  # type: ignore[misc]
        __slots__ = ()
        # Otherwise the class would be said to come from here: it has no entry of its own.
        __module__ = type.__dict__["__module__"]

        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            plain = super().__call__
            return call(plain, *args, **kwargs) if self is cls else plain(*args, **kwargs)

    # The type is the last entry of the head that every object has.
    entry = ctypes.c_void_p.from_address(id(cls) + object.__basicsize__ - ctypes.sizeof(ctypes.c_void_p))
    if entry.value != id(kind):
        raise RuntimeError(f"this Python keeps the type of {cls.__name__} at an unknown place")
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(_Intercepting))
    entry.value = id(_Intercepting)


def let_optimizers_be_capturable() -> None:
    """Has optimizers that could be captured in a CUDA graph work on the CPU."""
    name = "_get_capturable_supported_devices"
    # Each module has taken the function over; the package has deleted their names.
    modules = [module for path, module in sys.modules.items() if path.startswith("torch.optim.")]
    for module in [module for module in modules if hasattr(module, name)]:
        setattr(module, name, _with_cpu(getattr(module, name)))


def _with_cpu(devices: Callable[..., list[str]]) -> Callable[..., list[str]]:
    return lambda *args, **kwargs: [*devices(*args, **kwargs), "cpu"]


def leave_cuda_uninitialised() -> None:
    """Has nothing happen where PyTorch would initialise CUDA."""
    cuda: Any = torch.cuda
    cuda._lazy_init = lambda: None
    cuda._lazy_call = lambda callable, **kwargs: None
    memory: Any = torch.cuda.memory
    memory._record_memory_history = lambda *args, **kwargs: None
    # The package has a function of the module's name.
    of_data_parallel = importlib.import_module("torch.nn.parallel.data_parallel")
    for module in (torch._utils, of_data_parallel):
        module._get_available_device_type = lambda: None  # type: ignore[attr-defined]
