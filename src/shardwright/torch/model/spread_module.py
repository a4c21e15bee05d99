"""The wrapped module: what is accepted, what stands in for parts elsewhere, the state of the whole."""

import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NoReturn, Self

import torch
from torch import Tensor, nn

from shardwright.errors import UsageError
from shardwright.run.context import Context, context
from shardwright.run.joint_calls import call_together, first_cause_named, meet, ranks_with_the_model
from shardwright.torch.counting.compiled_modules import without_compilers
from shardwright.torch.interception.compiled_code import refuse_wrappers
from shardwright.torch.interception.glue import refuse_inside_step
from shardwright.torch.parameters.delayed_initialization import refuse_half_built
from shardwright.torch.parameters.gathering import gather_state, gathered_values, rank_that_runs
from shardwright.torch.parameters.materialise import Materialiser
from shardwright.torch.parameters.parameter_kinds import refuse_unsendable
from shardwright.torch.parameters.quantized import take_apart_quantized, with_parts
from shardwright.torch.parameters.registration import agree_on_registration
from shardwright.torch.parameters.residency import Residency, refuse_released
from shardwright.torch.parameters.sharded_tensor import ShardedTensor
from shardwright.torch.pytorch.modules import ModelTree, user_line
from shardwright.torch.replicas.replicas import Replicas
from shardwright.torch.tensor_parallel.divided_tensor import whole

_REMEDY = "Call it in the training loop, where ranks come to it together."


def accepted(module: nn.Module, current: Context) -> nn.Module:
    """A module of the script, without wrappers of compilers; collective over all ranks."""
    if not isinstance(module, nn.Module):
        raise UsageError(
            f"DistributedModel wraps an nn.Module, not a {type(module).__name__}.{_instead(module)}"
        )
    if current.model is not None:
        raise UsageError(
            "a model is wrapped already, and a run has one. Put both into one nn.Module, and wrap that; or, "
            "for one model after another (folds, trials), call sw.shutdown() and sw.init(...) in between."
        )
    refuse_wrappers(module, alone=not current.mesh.spreads_model and current.mesh.shard == 1)
    module = without_compilers(module)
    _refuse_lazy(module)
    refuse_released(module)
    refuse_half_built(module)
    take_apart_quantized(module, current)
    refuse_unsendable(module, current.groups.data)
    all_ranks = range(current.mesh.world_size)
    with first_cause_named(current), call_together("sw.DistributedModel(...)", all_ranks):
        agree_on_registration(module, current)
    for optimizer in current.optimizers:
        optimizer.check(module.parameters())
    return module


def _refuse_lazy(module: nn.Module) -> None:
    """Refuses parameters that get their shapes in a first forward."""
    for name, parameter in module.named_parameters():
        if isinstance(parameter, nn.parameter.UninitializedParameter):
            raise UsageError(
                f"{name} has no shape yet: it gets one in the first forward. Call the model once on a "
                "sample, under torch.no_grad(), before DistributedModel."
            )


def _instead(given: Any) -> str:
    """What to pass, where it is known."""
    if isinstance(given, type) and issubclass(given, nn.Module):
        return f" Make one of the class: DistributedModel({given.__name__}(...))."
    if isinstance(given, Mapping):
        return " Build the model, wrap it, and give it these values: model.load_state_dict(values)."
    return " Pass the model itself, such as DistributedModel(Net())."


class SpreadModule(nn.Module):
    """Tells which ranks hold the parts of a module."""

    def __init__(self, module: nn.Module, replicas: Replicas):
        super().__init__()
        self.module = module
        self.tree = ModelTree(self.get_module)
        self.replicas = replicas
        self._residency: Residency | None = None

    @property
    def partitioned(self) -> bool:
        """Whether every rank has been given its part."""
        return self._residency is not None

    def get_module(self) -> nn.Module:
        """The user's module."""
        return self._modules["module"]  # type: ignore[return-value]  # nn.Module looks in two other places first

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        """Modules by their names in the user's module, itself first.

        Parameters and buffers are named after them. A script that chooses parameters by name (learning rates
        by layer, no weight decay) thus finds the same ones as before the model was wrapped.
        """
        # A module around this one, which gives a memo, has all modules below it, and finds this one too.
        asked = self.get_module().named_modules if memo is None else super().named_modules
        yield from asked(memo, prefix, remove_duplicate)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Casts or moves the module (``cpu()``, ``float()``): once it is spread, it stays where it is."""
        shares = self.replicas.sharding is not None
        if self._residency is None and not shares:
            super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
            return self
        if not fn(torch.empty(2, 2, 2, 2)).is_contiguous():
            raise UsageError(
                f"{user_line()}: the model is spread over ranks, and its parameters stay as they lie in "
                "memory. Set a memory format (channels_last) before the model is wrapped."
            )
        casts = False
        for name, tensor in (*self.local_named_parameters(), *self.local_named_buffers()):
            own = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
            moved = fn(own)
            casts = casts or moved.dtype != own.dtype
            if moved.device != own.device or (casts and shares):
                raise UsageError(
                    f"{user_line()}: {name} would go from {own.dtype} on {own.device} to {moved.dtype} on "
                    f"{moved.device}, but the model is spread over ranks, which train it as it is. Do so "
                    "before the first step; or load model.state_dict(), called on all ranks, into a module "
                    "that is built anew, and change that."
                )
        if casts:
            super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        return self

    def get_submodule(self, target: str) -> nn.Module:
        return self.get_module().get_submodule(target)

    def local_named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Parameters that this rank holds, by their names in the user's module."""
        return ((name, p) for name, p in self.get_module().named_parameters() if self._is_local(p))

    def local_parameters(self) -> Iterator[nn.Parameter]:
        """Parameters that this rank holds."""
        parameters = self.tree.parameters
        return iter(parameters) if self._residency is None else (p for p in parameters if not p.is_meta)

    def local_named_buffers(self) -> Iterator[tuple[str, Tensor]]:
        """Buffers that this rank holds, by their names in the user's module."""
        return ((name, b) for name, b in self.get_module().named_buffers() if self._is_local(b))

    def local_parameter_ids(self) -> set[int]:
        """Identities of the parameters that this rank holds."""
        return {id(parameter) for parameter in self.local_parameters()}

    def gathered(self, *parts: nn.Module | Tensor) -> AbstractContextManager[None]:
        """Gives every rank the values of parameters and buffers, for a computation between steps.

        Collective over the replica, with the same parts on all ranks, which then compute the same. A rank
        that holds a parameter, or a part of one, keeps what it is changed to. They take memory on every rank
        meanwhile: pass few of them at a time. Parameters of which replicas share the rows stay in rows on the
        ranks that hold them, and behave like ordinary tensors (`ShardedTensor`).

        Example, a teacher that follows the model (BYOL, DINO, MoCo), wherever its layers are::

            pairs = zip(net.student.parameters(), net.teacher.parameters(), strict=True)
            with torch.no_grad():
                for student, teacher in pairs:
                    with model.gathered(student, teacher):
                        teacher.lerp_(student, 0.01)

        Methods of a model that fits a rank::

            with torch.no_grad(), model.gathered(model):
                tokens = model.module.generate(prompt, max_new_tokens=20)
        """
        current = context()
        if self._residency is None or current.groups.pipeline is None:
            return nullcontext()
        refuse_inside_step("model.gathered() is called", _REMEDY)
        meet("model.gathered()", ranks_with_the_model())
        return gathered_values(self.get_module(), self._residency, current, parts)

    def counted_elsewhere(self) -> Iterator[nn.Parameter]:
        """Parameters of this rank that another rank of the replica counts: several hold them."""
        if self._residency is None:
            return
        for name, parameter in self.local_named_parameters():
            # The next step refuses parameters that were added meanwhile.
            holders = self._residency.ranks.get(name)
            if holders and holders[0] != context().pipeline_rank:
                yield parameter

    def counts_here(self, name: str) -> bool:
        """Whether this rank of the replica is the one that counts a parameter or buffer, or saves it."""
        residency = self._residency
        if residency is None:
            return context().pipeline_rank == 0
        holders = residency.ranks.get(name)
        # A buffer that a forward has registered is where its module runs.
        holder = holders[0] if holders else rank_that_runs(name, residency) or 0
        return context().pipeline_rank == holder

    def stage_of(self, name: str) -> int:
        """The first stage that uses a parameter."""
        stages = None if self._residency is None else self._residency.stages.get(name)
        return min(stages, default=0) if stages else 0

    def runs_here(self, module_name: str) -> bool:
        """Whether this rank of the replica runs a module, or represents the ranks that do."""
        rank = None if self._residency is None else rank_that_runs(f"{module_name}.", self._residency)
        return context().pipeline_rank == (rank or 0)

    def _is_local(self, tensor: Tensor) -> bool:
        return not self.partitioned or not tensor.is_meta


class ModelState:
    """Gathers the state of a model over stages and shards, and loads it."""

    def __init__(self, module: nn.Module, replicas: Replicas, materialiser: Materialiser):
        self._module = module
        self._replicas = replicas
        self._materialiser = materialiser
        self._residency: Residency | None = None
        self._waiting: Mapping[str, Any] | None = None
        self._gathers = False

    def placed(self, residency: Residency) -> None:
        """Records which rank holds each parameter and buffer."""
        self._residency = residency
        self._module.register_state_dict_post_hook(_OwnPart(self))  # type: ignore[no-untyped-call]

    def whole(self, destination: dict[str, Any] | None, prefix: str, *, keep_vars: bool) -> dict[str, Any]:
        """The state under the names of the user's module; collective over the replica."""
        if self._residency is not None or self._replicas.sharding is not None:
            refuse_inside_step("model.state_dict() is called", _REMEDY)
            meet("model.state_dict()", ranks_with_the_model())
        with self._replicas.all_rows():
            if self._residency is None or context().groups.pipeline is None:
                given = {} if destination is None else {"destination": destination}
                state = self._module.state_dict(**given, prefix=prefix, keep_vars=keep_vars)
                if self._replicas.sharding is not None:
                    state.update({key: _copy(value) for key, value in state.items()})
                return state
            full = self._gathered(self._residency, keep_vars=keep_vars)
        if destination is None and not prefix:
            return full
        target = OrderedDict() if destination is None else destination
        target.update((f"{prefix}{key}", value) for key, value in full.items())
        return target

    def described(self, *, keep_vars: bool = False) -> dict[str, Any]:
        """The module's own state; what other ranks hold of it has shapes and no values."""
        with self._of_this_rank():
            state: dict[str, Any] = self._module.state_dict(keep_vars=keep_vars)
        return state

    def some(self, names: Sequence[str]) -> dict[str, Tensor]:
        """Some tensors of the state, whole; collective over the ranks with the model, alike on all."""
        meet("a part of model.state_dict()", ranks_with_the_model())
        described = self.described(keep_vars=True)
        with torch.no_grad(), first_cause_named(context()):
            state = {name: described[name] for name in names}
            state = {n: t.full() if isinstance(t, ShardedTensor) else t for n, t in state.items()}
            if self._residency is None or context().groups.pipeline is None:
                return {name: whole(tensor).clone() for name, tensor in state.items()}
            return gather_state(state, self._module, self._residency, context())

    def _gathered(self, residency: Residency, *, keep_vars: bool) -> dict[str, Any]:
        with self._of_this_rank(), first_cause_named(context()):
            state = self._module.state_dict(keep_vars=keep_vars)
            return gather_state(state, self._module, residency, context())

    @contextmanager
    def _of_this_rank(self) -> Iterator[None]:
        """Says that states without the values of other ranks are meant to be."""
        before, self._gathers = self._gathers, True
        try:
            yield
        finally:
            self._gathers = before

    def load(self, state: Any, *, strict: bool, assign: bool = False) -> Any:
        """Loads the state of the whole model; each rank takes its share.

        Before the first step of a model on the meta device, it is kept until then.
        """
        state = with_parts(self._module, state)
        if self._replicas.sharding is not None:
            meet("model.load_state_dict()", context().mesh.group("dp_shard", context().rank))
        if self._residency is None and self._materialiser.waits and not assign:
            # There is nowhere to put it yet: each rank takes its part when it knows which that is.
            self._waiting = state
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message=".*no-op.*")
                return self._module.load_state_dict(state, strict=strict)
        with self._replicas.all_rows(written=True):
            if self._residency is not None:
                return self._module.load_state_dict(self._own_of(state), strict=strict)
            # Wrappers of scripts, whose load_state_dict is their own, may not know `assign`.
            options = {"assign": True} if assign else {}
            return self._module.load_state_dict(state, strict=strict, **options)

    @property
    def waits(self) -> bool:
        """Whether a state waits for this rank to have its part."""
        return self._waiting is not None

    def load_waiting(self) -> bool:
        """Loads a state that has waited for this rank to have its part; says whether one has."""
        if self._waiting is None:
            return False
        state, self._waiting = self._waiting, None
        self.load(state, strict=False)
        return True

    def _own_of(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """A state with what other ranks hold left as it is here: without values."""
        own = self.described()
        return {name: own[name] if _is_meta(own.get(name)) else value for name, value in state.items()}

    def refuse_part(self, state: Mapping[str, Any]) -> None:
        """Keeps a script from saving the part of a rank as if it were the model."""
        if not self._gathers and any(_is_meta(value) for value in state.values()):
            raise UsageError(
                f"{user_line()}: the module's own state_dict() has the weights of this rank only: the model "
                "is spread over stages. Call model.state_dict() of the DistributedModel, on all ranks, and "
                "save it on one."
            )


class _OwnPart:
    """Refuses that the part of a rank is saved as if it were the model: its state, or the module itself."""

    def __init__(self, state: ModelState):
        self._state = state

    def __call__(self, module: nn.Module, state: Mapping[str, Any], *_: Any) -> None:
        self._state.refuse_part(state)

    def __deepcopy__(self, memo: Any) -> "_OwnPart":
        return self

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise UsageError(
            f"{user_line()}: the module inside of DistributedModel has the weights of this rank only: the "
            "model is spread over stages. Save model.state_dict(), called on all ranks, and load it into a "
            "module that is built anew."
        )


def _copy(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else value


def _is_meta(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_meta
