"""Parameters of a model on the meta device, made and initialised unit by unit as FSDP shards it."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import nn

from shardwright.errors import UsageError
from smdistributed.sagemaker.settings import get_logger


class DelayedParamIniter:
    """Gives FSDP a ``param_init_fn`` for a model that was built on the meta device.

    Args:
        model: of transformers, whose own initialisation is used, or with ``reset_parameters`` in its layers.
    """

    def __init__(
        self,
        model: nn.Module,
        init_method_using_config: Callable[[nn.Module], Any] | None = None,
        verbose: bool = False,
    ):
        self._model = model
        self._num_params = sum(
            parameter.numel() for parameter in model.parameters()
        )  # FSDP will flatten them
        self._own_way = init_method_using_config or getattr(model, "_init_weights", None)
        self._verbose = verbose
        # The meta parameter is kept beside the new one: tied weights are one object, before and after.
        self._made: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}

    def count_num_params(self) -> int:
        """Elements of all parameters; tied ones count once."""
        return self._num_params

    def get_param_init_fn(self) -> Callable[[nn.Module], None]:
        """What FSDP calls with each module, as ``param_init_fn``."""
        return self._initialise

    def get_post_param_init_fn(self) -> Callable[[nn.Module], None]:
        """What FSDP takes as ``post_param_init_fn``: nothing is left to do, as tied weights stay tied."""
        return lambda module: None

    @contextmanager
    def validate_params_and_buffers_inited(self, enabled: bool = True) -> Iterator[None]:
        """Checks at the end that nothing of the model has stayed on the meta device."""
        yield
        tensors = [*self._model.named_parameters(), *self._model.named_buffers()]
        left = [name for name, tensor in tensors if tensor.is_meta]
        if enabled and left:
            raise UsageError(
                f"{', '.join(left[:5])}{' and others' * (len(left) > 5)}: still on the meta device. Give "
                "FSDP param_init_fn=initer.get_param_init_fn()."
            )

    @torch.no_grad()
    def _initialise(self, module: nn.Module) -> None:
        device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else "cpu"
        new: dict[str, torch.Tensor] = {}
        for name, parameter in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            if not parameter.is_meta:
                continue
            if id(parameter) not in self._made:
                made = nn.Parameter(_nothing(parameter, device), parameter.requires_grad)
                self._made[id(parameter)] = parameter, made
                new[name] = made
            setattr(module, name, self._made[id(parameter)][1])
        for name, buffer in list(module.named_buffers(recurse=False)):
            if buffer.is_meta:
                module._buffers[name] = new[name] = _nothing(buffer, device)
        if new:
            self._fill(module, new)

    def _fill(self, module: nn.Module, new: dict[str, torch.Tensor]) -> None:
        if self._own_way is not None:
            self._own_way(module)
        elif reset := getattr(module, "reset_parameters", None):
            cast("Callable[[], None]", reset)()
        if self._verbose:
            get_logger().info("initialised %s of %s", ", ".join(new), type(module).__name__)
        lost = [name for name, tensor in new.items() if _has_nothing(tensor)]
        if lost:
            raise UsageError(
                f"{', '.join(lost)} of {type(module).__name__}: nothing initialises it. Give "
                "DelayedParamIniter init_method_using_config=, a function of a module; or build "
                "buffers off the meta device: accelerate.init_empty_weights()."
            )


def _nothing(tensor: torch.Tensor, device: Any) -> torch.Tensor:
    """Memory for a tensor, with a value that tells whether something was written."""
    return torch.full_like(tensor, _mark(tensor), device=device)


def _has_nothing(tensor: torch.Tensor) -> bool:
    mark = _mark(tensor)
    return bool((tensor.isnan() if mark != mark else tensor == mark).any())


def _mark(tensor: torch.Tensor) -> float:
    """NaN; the smallest integer; True for truth values, which then must be all False."""
    if tensor.is_floating_point() or tensor.is_complex():
        return math.nan
    return True if tensor.dtype == torch.bool else torch.iinfo(tensor.dtype).min
