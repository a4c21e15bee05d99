"""The optimizer of a rank: the user's own, over this rank's parameters, and timed."""

import inspect
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from shardwright.config.config import refuse_misplaced
from shardwright.errors import UsageError
from shardwright.run.context import context, is_initialized
from shardwright.torch.interception.glue import refuse_inside_step
from shardwright.torch.loss_scale import LossScaler, scaler_of
from shardwright.torch.model.distributed_model import DistributedModel, wrapped_model
from shardwright.torch.optimizer.clipping import clip_grad_norm_
from shardwright.torch.optimizer.optimizer_state import (
    PARTS,
    as_parts,
    load_state,
    part_of_state,
    place_state,
    placed,
    refuse_other_part,
    state_by_name,
    with_cuts,
)
from shardwright.torch.optimizer.optimizer_trial import ELEMENTWISE, refuse_parts_of_the_world
from shardwright.torch.optimizer.packing import Packing
from shardwright.torch.optimizer.refused_optimizers import (
    ADVICE_FOR_CLOSURES,
    UpdatesOverStages,
    has_stages,
    leaves_update_out,
    needs_closure,
    refuse_foreign_parameters,
    stepping,
)
from shardwright.torch.parameters.registration import in_order
from shardwright.torch.replicas.replica_buffers import UpdatedParts
from shardwright.torch.script_collectives import over_replicas

_MOST_EVENTS = 64


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


class UpdateClock:
    """Adds up the seconds of updates until somebody asks.

    On GPUs nothing waits for them: events are recorded, and read when they are asked for, a step later, or
    when there are many.
    """

    def __init__(self) -> None:
        self._seconds = 0.0
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._any = False

    def run(self, update: Callable[[], Any], device: torch.device) -> None:
        """Makes an update of parameters on a device."""
        self._any = True
        if device.type == "cuda":
            if len(self._events) >= _MOST_EVENTS:
                self._add_up()
            begin, end = (_event(), _event())
            begin.record()
            update()
            end.record()
            self._events.append((begin, end))
            return
        start = time.perf_counter()
        update()
        self._seconds += time.perf_counter() - start

    def taken(self) -> float | None:
        """Seconds of the updates since the last call; None where there were none."""
        if not self._any:
            return None
        self._add_up()
        seconds, self._seconds = self._seconds, 0.0
        self._any = False
        return seconds

    def _add_up(self) -> None:
        for begin, end in self._events:
            end.synchronize()
            self._seconds += begin.elapsed_time(end) / 1e3
        self._events.clear()


_REMEDY = "Call it in the training loop."
_NAMES = "parameter_names"
_PART = "part"
_FUSED = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD)
_LENT = ("grad_scale", "found_inf")


class DistributedOptimizer(Optimizer):
    """Wraps an optimizer, made before or after the model was wrapped.

    It may be given all parameters of the model: once the model is placed, it keeps those of this rank, so
    only they have state. Learning-rate schedulers take it as they take any optimizer.

    With ``fp16``, losses are scaled, and gradients are those of the loss itself again when a step function
    has returned. Where some overflow, on any rank, `step` changes nothing but the scale.

    Args:
        optimizer: any `torch.optim.Optimizer`.
        static_loss_scale: with ``fp16``, a scale that does not change.
        dynamic_loss_scale: with ``fp16``, whether the scale changes; by default it does, unless a static
            one is given.
        dynamic_loss_args: how: ``init_scale`` and the attributes of `LossScaler`.

    Example:
        >>> import torch, shardwright.torch as sw
        >>> weights = [torch.nn.Parameter(torch.zeros(2))]
        >>> optimizer = sw.DistributedOptimizer(torch.optim.SGD(weights, lr=0.1))
        >>> optimizer.param_groups[0]["lr"]
        0.1
    """

    def __init__(
        self,
        optimizer: Optimizer,
        static_loss_scale: float | None = None,
        dynamic_loss_scale: bool | None = None,
        dynamic_loss_args: Mapping[str, Any] | None = None,
        **others: Any,
    ):
        if isinstance(optimizer, DistributedOptimizer):
            raise UsageError("this optimizer is wrapped already. Call DistributedOptimizer once.")
        if not isinstance(optimizer, Optimizer):
            given = (
                f"the class {optimizer.__name__}" if isinstance(optimizer, type) else type(optimizer).__name__
            )
            raise UsageError(
                f"DistributedOptimizer wraps a torch.optim.Optimizer, not {given}. "
                "Pass for example torch.optim.AdamW(model.parameters(), lr=3e-4)."
            )
        refuse_misplaced(
            "sw.DistributedOptimizer",
            others,
            takes=("static_loss_scale", "dynamic_loss_scale", "dynamic_loss_args"),
        )
        self.optimizer = optimizer
        self._to_load: dict[str, Any] | None = None
        self._over_stages = UpdatesOverStages(optimizer)
        self.clock = UpdateClock()
        self.scaler_wanted = scaler_of(static_loss_scale, dynamic_loss_scale, dynamic_loss_args)
        self._packing: Packing | None = None
        if is_initialized():
            self._packing = Packing.of(optimizer, context().config)
            context().optimizers.append(self)
            if (model := wrapped_model()) is not None:
                model.takes(self)

    # What schedulers, scalers and scripts read or change is the wrapped optimizer's own.
    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The parameter groups of the wrapped optimizer."""
        return self.optimizer.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        """The state of the wrapped optimizer."""
        return self.optimizer.state

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        """The defaults of the wrapped optimizer."""
        return self.optimizer.defaults

    def __getattr__(self, name: str) -> Any:
        if name == "optimizer":
            raise AttributeError(name)
        found = getattr(self.optimizer, name)
        if inspect.ismethod(found) and not hasattr(Optimizer, name) and has_stages():
            return self._over_stages.method(name, found)
        return found

    def __repr__(self) -> str:
        return f"DistributedOptimizer({self.optimizer!r})"

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Updates the parameters of this rank. A closure is not supported: run the step function before."""
        if needs_closure(self.optimizer):
            raise UsageError(
                f"{type(self.optimizer).__name__} computes the loss several times for one update, by a "
                f"closure, and DistributedOptimizer takes none. {ADVICE_FOR_CLOSURES}"
            )
        if closure is not None:
            raise UsageError("a closure cannot be pipelined. Run the step function, then optimizer.step().")
        refuse_inside_step("optimizer.step() is called", _REMEDY)
        model = wrapped_model()
        if leaves_update_out(model):
            return None
        if not self.sees_rows:
            refuse_parts_of_the_world(self.optimizer, wrapped=True)
            self._over_stages.refuse_coupled_step()
        if model is not None:
            if model.scaling is not None and not model.scaling.scaler.begin_update():
                return None
            model.step_end.note(self.optimizer)
            self._clip()
        around = self._around(model)
        update = partial(self._update_in, around) if around else self.optimizer.step
        with stepping():
            self.clock.run(update, self._device())
        return None

    def _update_in(self, around: Sequence[AbstractContextManager[Any]]) -> None:
        with ExitStack() as entered:
            for each in around:
                entered.enter_context(each)
            self.optimizer.step()

    def _clip(self) -> None:
        """Clips gradients by the norm of all of this optimizer's, where the settings ask for it."""
        most, model = context().config.sdp_gradient_clipping, wrapped_model()
        if most is not None and model is not None and model.replicas.sharding is not None:
            clip_grad_norm_(self._parameters(), most)

    def _around(self, model: DistributedModel | None) -> list[AbstractContextManager[Any]]:
        """What an update is made in; most need nothing."""
        around: list[AbstractContextManager[Any]] = []
        home = self._home
        lent = {name: value for name, value in vars(self).items() if name in _LENT}
        if home is not None:
            lent = {name: value.to(home) for name, value in lent.items() if value is not None}
            around.append(_fused(self.optimizer))
        if lent:
            around.append(self._lent_to_scaler(lent))
        if model is not None and model.replicas.sharding is not None:
            around.append(self._own_rows())
        if model is not None and model.replicas.updated_parts is not None:
            around.append(self._own_parts(model, model.replicas.updated_parts))
        if not self.sees_rows:
            around.append(over_replicas(sends=True, axes="dp_replicate"))
        if self._packing is not None:
            around.append(self._packing.in_pieces())
        return around

    @property
    def _home(self) -> torch.device | None:
        """Where updates are made, if not where parameters are (`offload_optimizer`)."""
        model = wrapped_model()
        parts = None if model is None else model.replicas.updated_parts
        return None if parts is None else parts.home

    @property
    def _scaler(self) -> LossScaler | None:
        model = wrapped_model()
        return None if model is None or model.scaling is None else model.scaling.scaler

    @property
    def overflow(self) -> bool:
        """Whether gradients of the last step have overflowed on any rank, so that the update is left out."""
        return self._scaler is not None and self._scaler.overflow

    @property
    def loss_scale(self) -> float:
        """The factor on losses; 1 without ``fp16``."""
        return 1.0 if self._scaler is None else self._scaler.scale

    @property
    def dynamic_loss_scale(self) -> bool:
        """Whether the loss scale changes."""
        return self._scaler is not None and self._scaler.dynamic

    @property
    def sees_rows(self) -> bool:
        """Whether the wrapped optimizer is shown the rows of this rank, where ranks share parameters."""
        return type(self.optimizer) in ELEMENTWISE

    @contextmanager
    def _own_rows(self) -> Iterator[None]:
        """Shows the wrapped optimizer what this rank keeps of shared parameters, if that is all it needs."""
        model = wrapped_model()
        if model is None or not self.sees_rows or model.replicas.sharding is None:
            yield
            return
        with model.replicas.sharding.for_optimizer(self._parameters(), self.optimizer.state):
            yield

    def _own_parts(self, model: DistributedModel, parts: UpdatedParts) -> AbstractContextManager[None]:
        """Shows the wrapped optimizer the parts that it updates on this rank."""
        if (parts.num_parts > 1 or parts.home is not None) and not self.sees_rows:
            names = ", ".join(sorted(kind.__name__ for kind in ELEMENTWISE))
            setting = "offload_optimizer" if parts.num_parts == 1 else "shard_optimizer_state"
            raise UsageError(
                f"{setting} shows parts of parameters, and "
                f"{type(self.optimizer).__name__} may look at whole ones. Use one of "
                f"{names}; or set {setting} false."
            )
        # Replicas send each other their parts in this order.
        return parts.shown(in_order(self._parameters(), model.get_module()), self.optimizer.state)

    def _parameters(self) -> list[nn.Parameter]:
        return [parameter for group in self.param_groups for parameter in group["params"]]

    def _device(self) -> torch.device:
        """The device of the parameters; the CPU for a rank that has none."""
        for group in self.param_groups:
            for parameter in group["params"]:
                device: torch.device = parameter.device
                return device
        return torch.device("cpu")

    @contextmanager
    def _lent_to_scaler(self, lent: Mapping[str, Any]) -> Iterator[None]:
        """Gives the wrapped optimizer what a `GradScaler` has left here: a fused one unscales by itself."""
        vars(self.optimizer).update(lent)
        try:
            yield
        finally:
            for name in lent:
                del vars(self.optimizer)[name]

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears the gradients of this rank."""
        if set_to_none:
            self.optimizer.zero_grad(set_to_none=True)
            return
        with self._own_rows():
            self.optimizer.zero_grad(set_to_none=False)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group; this rank keeps its own parameters of it."""
        self.optimizer.add_param_group(param_group)
        if (model := wrapped_model()) is not None:
            model.takes(self)

    def state_dict(self) -> dict[str, Any]:
        """State of the parameters of this rank, with their names once the model is wrapped.

        Of a tensor that ranks share (``tensor_parallel_degree``) it has this rank's part; ``tensor_parts``
        tells how it is cut.
        """
        return as_parts(self.live_state_dict())

    def live_state_dict(self) -> dict[str, Any]:
        """The same with the tensors of the state themselves, also those that ranks share."""
        if self._to_load is not None:
            groups = zip(self._to_load["param_groups"], _options_of(self.param_groups), strict=True)
            return {**self._to_load, "param_groups": [{**saved, **now} for saved, now in groups]}
        names, part = self._parameter_names(), part_of_state()
        return {
            **self.optimizer.state_dict(),
            **({_NAMES: names} if names and all(names) else {}),
            **({_PART: part} if part else {}),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads what `state_dict` gave on a rank with the same parameters.

        Before the first step, what needs the parameters of this rank waits for them; options of the groups
        (learning rates) hold at once.

        Raises:
            UsageError: it is of other parameters, as that of another rank is.
        """
        state = dict(state_dict)
        refuse_other_part(state.pop(_PART, None))
        parts = state.pop(PARTS, None)
        state = with_cuts(state, parts)
        theirs, mine = state.pop(_NAMES, None), self._parameter_names()
        fitting = state_by_name(state, theirs, self._by_group(mine)) if theirs and mine else state
        self._to_load = None
        if self._waits_for_placement(named=bool(theirs), fits=fitting is not None and not parts):
            self._load_options(state["param_groups"])
            self._to_load = dict(state_dict)
            return
        if fitting is None:
            assert theirs
            raise UsageError(
                f"rank {context().rank} loads a state of the optimizer that is of other parameters "
                f"({_brief(theirs)}) than it has here ({_brief(mine)}): each rank has the state of its own "
                "stages. Save it on every rank, for example in a file with sw.rank() in its name, and load "
                "on each rank its own."
            )
        fitting = placed(fitting, self._parameters())
        load_state(self.optimizer, fitting, self._parameters(), home=self._home)
        if self._packing is not None:
            self._packing.pack(self._parameters())

    def kept(self, key: str, value: Any) -> Any:
        """A value of the state of a parameter as it is kept (`optimizer_state`)."""
        return value if self._packing is None else self._packing.packed(key, value)

    def _by_group(self, names: Sequence[str]) -> list[list[str]]:
        rest = iter(names)
        return [list(islice(rest, len(group["params"]))) for group in self.param_groups]

    def match_names(self) -> None:
        """Loads a state with names that came before the model was wrapped, unless that must wait longer."""
        if self._to_load is not None:
            DistributedOptimizer.load_state_dict(self, DistributedOptimizer.state_dict(self))

    def _load_options(self, saved: Sequence[Mapping[str, Any]]) -> None:
        """Sets what groups have beside their parameters."""
        if len(saved) != len(self.param_groups):
            raise ValueError(
                f"the state of an optimizer with {len(saved)} parameter groups does not fit one with "
                f"{len(self.param_groups)}. Make the groups as they were when it was saved."
            )
        for group, options in zip(self.param_groups, _options_of(saved), strict=True):
            group.update(options)

    def _waits_for_placement(self, *, named: bool, fits: bool) -> bool:
        model = wrapped_model()
        if model is None:
            return named and is_initialized()
        if model.partitioned:
            return False
        no_memory = any(p.is_meta for group in self.param_groups for p in group["params"])
        return no_memory or not fits

    def _parameter_names(self) -> list[str]:
        """Names of the parameters, in their order; empty as long as no model is wrapped."""
        model = wrapped_model()
        if model is None:
            return []
        names = {id(parameter): name for name, parameter in model.local_named_parameters()}
        return [names.get(id(parameter), "") for group in self.param_groups for parameter in group["params"]]

    def check(self, parameters: Iterable[nn.Parameter]) -> None:
        """Refuses an optimizer of another model, or of a copy; on several ranks, of more than the model.

        Args:
            parameters: those of the model that was wrapped, before any rank has given up its part.

        Raises:
            UsageError: none of these is in the optimizer, or others are, which no rank could train alone.
        """
        refuse_foreign_parameters(self._parameters(), parameters)

    def keep(self, identifiers: set[int]) -> None:
        """Drops every parameter, and its state, whose id is not among these; loads a state that waited."""
        waited = None if self._to_load is None else self.state_dict()  # with the options of now
        if waited is not None and _NAMES not in waited:  # of the whole model, by position
            self.load_state_dict(waited)
        self._over_stages.note_new_groups()
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                if id(parameter) not in identifiers:
                    self.optimizer.state.pop(parameter, None)
            group["params"] = [p for p in group["params"] if id(p) in identifiers]
            for parameter in group["params"]:
                place_state(self.optimizer.state, parameter)
        if waited is not None and _NAMES in waited:
            self.load_state_dict(waited)


@contextmanager
def _fused(optimizer: Optimizer) -> Iterator[None]:
    """PyTorch's fused update on CPUs, where the script has not chosen another."""
    chosen = [
        group
        for group in optimizer.param_groups
        if type(optimizer) in _FUSED
        and group["fused"] is None
        and not (group["foreach"] or group["differentiable"])
    ]
    for group in chosen:
        group["fused"] = True
    try:
        yield
    finally:
        for group in chosen:
            group["fused"] = None


def _options_of(groups: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    return [{key: value for key, value in group.items() if key != "params"} for group in groups]


def _brief(names: list[str]) -> str:
    return f"{names[0]} to {names[-1]}" if len(names) > 1 else names[0]
