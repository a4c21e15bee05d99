"""The wrapped optimizer: ``smp.DistributedOptimizer``; also around one inside of a script's own.

Scripts for releases before 1.10 have their own helper for fp16, as in
``smp.DistributedOptimizer(FP16_Optimizer(...))``: it makes float32 copies of the parameters when they are
placed, scales the loss, and steps the optimizer inside. Its own ways hold; what belongs to the library
(placing, schedulers) deals with the optimizer inside::

    scheduler, library    ->  HelpedOptimizer  ->  the optimizer inside (param_groups, state)
    step, zero_grad, ...  ->  HelpedOptimizer  ->  the helper  ->  the optimizer inside
"""

from collections.abc import Callable, Mapping
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

import shardwright.torch as sw
from shardwright.errors import UsageError
from shardwright.torch.interception.glue import refuse_inside_step
from shardwright.torch.loss_scale import LossScaler
from smdistributed.modelparallel.torch.ds_parameters import part_of
from smdistributed.modelparallel.torch.state_dicts.optimizer import OptimizerStates
from smdistributed.modelparallel.torch.state_mod import current_run, state
from smdistributed.modelparallel.torch.utils import get_distribution_axis

_FIRST_DYNAMIC_SCALE = 2.0**32
_REMEDY = "Call it in the training loop."


class DistributedOptimizer(OptimizerStates):
    """Wraps an optimizer, made before or after the model was wrapped.

    With ``fp16`` it scales losses and updates float32 copies of the parameters; gradients are float32, and
    those of the loss itself, when a step has returned.

    Args:
        optimizer: any `torch.optim.Optimizer`; or an object of the script around one (``FP16_Optimizer``),
            with that as its attribute ``optimizer``, which keeps its own way to step.
        dynamic_loss_args: how: ``init_scale`` (2**32), ``scale_factor`` (2), ``scale_window`` (1000),
            ``min_scale`` (1), ``delayed_shift`` (1), ``consecutive_hysteresis`` (False).
    """

    redefined_params = False

    def __new__(cls, optimizer: Any, *args: Any, **kwargs: Any) -> "DistributedOptimizer":
        """Makes one that leaves the script's own object its ways, if it is around an optimizer."""
        if isinstance(getattr(optimizer, "optimizer", None), Optimizer) and not isinstance(
            optimizer, Optimizer
        ):
            cls = HelpedOptimizer
        return super().__new__(cls)

    def __init__(
        self,
        optimizer: Optimizer,
        static_loss_scale: float | None = 1.0,
        dynamic_loss_scale: bool = False,
        dynamic_loss_args: Mapping[str, Any] | None = None,
    ):
        run = current_run()
        arguments = {"init_scale": _FIRST_DYNAMIC_SCALE, **(dynamic_loss_args or {})}
        super().__init__(
            optimizer,
            static_loss_scale=None if dynamic_loss_scale else static_loss_scale,
            dynamic_loss_scale=bool(dynamic_loss_scale),
            dynamic_loss_args=arguments if dynamic_loss_scale else None,
        )
        self._wants_dynamic_scale = bool(dynamic_loss_scale)
        self._flat_parts: list[Tensor] | None = None
        self._global_grad_norm: float | None = None
        if run.mesh.shard > 1:
            self.ds_param_shard_group = _shard_group()
        if (waits := getattr(run.model, "call_waiting_hooks", None)) is not None:
            waits()

    # ---- updating ----

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Updates the parameters of this rank. A closure is not supported."""
        result = super().step(closure)
        self._refresh_flat_parts()
        return result

    def _clip(self) -> None:
        """Clips where the settings ask for it, and keeps the norm."""
        run = current_run()
        most, model = run.config.sdp_gradient_clipping, run.model
        if most is not None and model is not None and model.replicas.sharding is not None:
            self._global_grad_norm = float(sw.clip_grad_norm_(self._parameters(), most))

    def zero_grad(self, set_to_none: bool = True, **kwargs: Any) -> None:
        """Clears the gradients of this rank.

        Args:
            set_to_none: leave none; else zeros. ``set_grads_to_None`` is another name of it.
        """
        super().zero_grad(set_to_none=bool(kwargs.pop("set_grads_to_None", set_to_none)))
        if kwargs:
            raise TypeError(f"zero_grad() has no argument {', '.join(kwargs)}.")

    def clip_master_grads(self, max_norm: float, norm_type: float = 2.0) -> float:
        """Scales all gradients so that their norm over all stages is at most `max_norm`; collective."""
        if self.overflow:
            return -1.0
        return float(sw.clip_grad_norm_(self._parameters(), max_norm, norm_type))

    # ---- the loss scale ----

    @property
    def dynamic_loss_scale(self) -> bool:
        """Whether the loss scale changes; as it was asked for, without ``fp16``."""
        return self._wants_dynamic_scale if self._scaler is None else self._scaler.dynamic

    @property
    def loss_scaler(self) -> LossScaler:
        """What scales losses: with ``fp16`` what does so now; else one with a scale of 1."""
        return self._scaler or LossScaler(scale=1.0, dynamic=False)

    # ---- the surface of helpers for fp16 that scripts brought along before 1.10 ----

    def backward(self, loss: Tensor, update_master_grads: bool = True, retain_graph: bool = False) -> None:
        """Runs the backward of a microbatch, as ``model.backward(loss)`` does."""
        if retain_graph:
            raise UsageError("retain_graph cannot be pipelined. Add the losses, and call backward once.")
        model = state.model
        if model is None:
            raise UsageError("no model is wrapped. Call smp.DistributedModel(model) before the first step.")
        model.backward(loss)

    def update_master_grads(self) -> None:
        """Does nothing: gradients of a step are float32, without the loss scale, when it returns."""

    def init_master_params(self) -> None:
        """Does nothing: float32 copies are made where the settings ask for them."""

    @torch.no_grad()
    def reload_model_params(self) -> None:
        """Takes over what the script has put into the parameters, of which float32 copies are updated."""
        run = current_run()
        updated = None if run.model is None else run.model.replicas.updated_parts
        if updated is not None:
            updated.forget_masters()

    @property
    def master_params_created(self) -> bool:
        """Whether this rank knows which parameters it updates."""
        model = state.model
        return model is not None and bool(model.partitioned)

    @property
    def master_distribution_axis(self) -> dict[int, int | None]:
        """Id of a parameter -> dimension along which ranks share it; None for a whole one."""
        return {id(parameter): get_distribution_axis(parameter) for parameter in self._parameters()}

    @property
    def master_is_distributed(self) -> dict[nn.Parameter, bool]:
        """Parameter -> whether ranks of a tensor-parallel group have parts of it."""
        return {p: get_distribution_axis(p) is not None for p in self._parameters()}

    def param_name_to_index(self) -> dict[str, int]:
        """Names of the parameters of this optimizer -> their positions in it."""
        names = self._names()
        return {names[id(p)]: index for index, p in enumerate(self._parameters()) if id(p) in names}

    def _param_id_to_index(self) -> dict[int, int]:
        return {id(parameter): index for index, parameter in enumerate(self._parameters())}

    def _param_index_to_param_local(self) -> dict[int, nn.Parameter]:
        return dict(enumerate(self._parameters()))

    def _names(self) -> dict[int, str]:
        model = state.model
        if model is None:
            return {}
        return {id(parameter): name for name, parameter in model.get_module().named_parameters()}

    # ---- what sharded data parallelism has inside ----

    @property
    def fp16_groups(self) -> list[list[nn.Parameter]]:
        """The parameters that are trained, by group."""
        return [[p for p in group["params"] if p.requires_grad] for group in self.param_groups]

    @property
    def fp32_partitioned_groups_flat(self) -> list[Tensor]:
        """This rank's parts of the parameters of each group, one behind the other; kept up to date."""
        if self._flat_parts is None:
            self._flat_parts = self._parts_of_now()
        return self._flat_parts

    def _refresh_flat_parts(self) -> None:
        if self._flat_parts is not None:
            for flat, now in zip(self._flat_parts, self._parts_of_now(), strict=True):
                flat.copy_(now)

    def _parts_of_now(self) -> list[Tensor]:
        model = state.model
        if model is None:
            raise UsageError("no model is wrapped, so that this rank has no parts. Wrap it before.")
        return [
            torch.cat([part_of(p, model, in_float32=True) for p in group])
            if group
            else torch.zeros(0, device=current_run().device)
            for group in self.fp16_groups
        ]


def _shard_group() -> dist.ProcessGroup:
    run = current_run()
    assert run.groups.shard is not None
    return run.groups.shard


class HelpedOptimizer(DistributedOptimizer):
    """Wraps a helper around an optimizer."""

    def __init__(self, optimizer: Any, *args: Any, **kwargs: Any):
        self.helper = optimizer
        super().__init__(optimizer.optimizer, *args, **kwargs)

    def __getattribute__(self, name: str) -> Any:
        if name in _OF_HELPER:
            found = getattr(object.__getattribute__(self, "helper"), name, None)
            if found is not None:
                return found
        return super().__getattribute__(name)

    def __setattr__(self, name: str, value: Any) -> None:
        """What the script puts back after loading, such as the loss scale, is the helper's."""
        if name in _OF_HELPER and hasattr(self.helper, name):
            setattr(self.helper, name, value)
        else:
            super().__setattr__(name, value)

    def __getattr__(self, name: str) -> Any:
        if name == "helper":
            raise AttributeError(name)
        return getattr(self.helper if hasattr(self.helper, name) else self.optimizer, name)

    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """Has the helper step."""
        refuse_inside_step("optimizer.step() is called", _REMEDY)
        super()._load_waiting()
        return self.helper.step() if closure is None else self.helper.step(closure)

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """Has the helper clear gradients."""
        refuse_inside_step("optimizer.zero_grad() is called", _REMEDY)
        self.helper.zero_grad(*args, **kwargs)

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """Has the helper run the backward of a microbatch."""
        self.helper.backward(loss, *args, **kwargs)

    def init_master_params(self) -> None:
        """Has the helper make its copies in float32; a state that was loaded before is theirs."""
        make = getattr(self.helper, "init_master_params", None)
        if make is not None:
            make()
            super()._load_waiting()

    def _load_waiting(self) -> None:
        # In 16 bits, as parameters are without the copies, what AdamW keeps would go to 0.
        if getattr(self.helper, "master_params_created", True):
            super()._load_waiting()

    # ---- names ----

    def _names_of_model(self) -> dict[int, str]:
        """With those of the copies: a copy has the name of its parameter."""
        names = super()._names_of_model()
        own, copies = (getattr(self.helper, name, ()) for name in ("fp16_groups", "fp32_from_fp16_groups"))
        pairs = zip(chain.from_iterable(own), chain.from_iterable(copies), strict=True) if copies else ()
        return names | {id(copy): names[id(parameter)] for parameter, copy in pairs if id(parameter) in names}

    def _parameter_names(self) -> list[str]:
        return super()._parameter_names() and self._names_here(current_run())

    def __repr__(self) -> str:
        return f"DistributedOptimizer({self.helper!r})"


# The helper's word counts in these, if it has them.
_OF_HELPER = frozenset(
    (
        "clip_master_grads dynamic_loss_scale first_closure_call_this_step fp16_groups loss_scale "
        "loss_scaler master_distribution_axis master_is_distributed master_params_created overflow "
        "reload_model_params update_master_grads"
    ).split()
)
