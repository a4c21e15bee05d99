"""Distributes the marked modules of a model, when it is wrapped.

::

    walk from the outside in:
        a class that is registered             its distributed module takes its place (`tp_register`)
        holds layers of GPT-2, BERT and so on  distributed layers take their place, with their weights
        nn.Linear, nn.Embedding                become DistributedLinear, DistributedEmbedding, as they are
        anything else                          stays; the search divides its parameters
    what is not marked stays whole
"""

import inspect
import warnings
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import fields
from difflib import get_close_matches
from typing import Any

import torch
from torch import Tensor, nn

from shardwright.errors import UsageError
from shardwright.torch.units.tensor_division import Pin, pin, pin_whole
from smdistributed.modelparallel.torch.nn import distributed
from smdistributed.modelparallel.torch.nn.distributed import (
    DistributedEmbedding,
    DistributedLinear,
    DistributedModule,
)
from smdistributed.modelparallel.torch.nn.distributed.options import LayerOptions
from smdistributed.modelparallel.torch.nn.huggingface.distributing import (
    distribute_layers,
    distributed_layer,
    family_of,
    initialise_skipped,
    place_embedding,
)
from smdistributed.modelparallel.torch.nn.huggingface.layer_hooks import LayerInit
from smdistributed.modelparallel.torch.nn.huggingface.layers_as_one import LayerCall
from smdistributed.modelparallel.torch.tensor_parallelism.marks import Wish, wish_of, wishes_in
from smdistributed.modelparallel.torch.tensor_parallelism.registration import (
    Registered,
    arguments_of,
    registered,
)

_OF_MODELS = ("distribute_embedding", "dtype")


def distribute(model: nn.Module, *, dtype: torch.dtype | None = None) -> nn.Module:
    """Distributes what is marked in a model; returns it, or what stands for it."""
    if not wishes_in(model):
        return model
    if any(family_of(module) is not None and _is_wanted(module) for module in model.modules()):
        initialise_skipped(model)
    return _Distribution(model, dtype).whole_model()


def check_options(options: Mapping[str, Any]) -> None:
    """Points out options that no distributed module has."""
    known = {field.name for field in fields(LayerOptions)} | set(_OF_MODELS)
    for name in distributed.__all__:
        known |= set(_parameters(getattr(distributed, name)))
    for name in options:
        if name not in known:
            close = get_close_matches(name, known, n=1, cutoff=0.6)
            hint = f" Did you mean {close[0]}?" if close else ""
            warnings.warn(f"no distributed module has an argument {name}.{hint}", stacklevel=4)


def _is_wanted(module: nn.Module) -> bool:
    wish = wish_of(module)
    return wish is not None and wish.enabled


class _Distribution:
    """The distribution of one model."""

    def __init__(self, model: nn.Module, dtype: torch.dtype | None):
        self._model, self._dtype = model, dtype
        self._uses = _uses_of_parameters(model)
        self._done: dict[int, nn.Module] = {}
        self._inside: set[int] = set()  # modules in distributed ones

    def whole_model(self) -> nn.Module:
        model = self._distributed(self._model)
        for module in model.modules():
            wish = wish_of(module)
            # What the script has distributed itself stays so, unless it is excluded.
            is_free = wish is None and not isinstance(module, DistributedModule)
            if id(module) not in self._inside and (is_free or (wish is not None and not wish.enabled)):
                pin_whole(module)
        return model

    def _distributed(self, module: nn.Module) -> nn.Module:
        """What stands for a module."""
        if id(module) in self._done:
            return self._done[id(module)]
        self._done[id(module)] = module
        wish = wish_of(module)
        if wish is not None and wish.enabled:
            made = self._replaced(module, wish)
            if made is not None:
                self._done[id(module)] = made
                self._inside |= {id(each) for each in made.modules()}
                return made
        for name, child in list(module._modules.items()):
            if child is not None and id(child) not in self._inside:
                stand_in = self._distributed(child)
                if stand_in is not child:
                    module._modules[name] = stand_in
        return module

    def _replaced(self, module: Any, wish: Wish) -> nn.Module | None:
        """A distributed module; None for one that stays, with what is inside."""
        if isinstance(module, DistributedModule):
            return module  # it is one already
        what = registered(type(module))
        if what is not None:
            return None if self._is_tied(module) else self._registered(module, what, wish)
        family = family_of(module)
        if family is not None:
            options = _accepted(distributed.DistributedTransformerLayer, wish.options)
            options.pop("flash_attention", None)  # noted on the model's own layers, with its exceptions
            if distribute_layers(module, family, options):
                layers = module.seq_layers
                self._typed(layers, None)
                self._inside |= {id(each) for each in layers.modules()}
        if hasattr(module, "get_input_embeddings"):
            place_embedding(module, distributed=bool(wish.options.get("distribute_embedding", False)))
        if type(module) is nn.Linear:
            module.__class__ = DistributedLinear
        elif type(module) is nn.Embedding and wish.options.get("distribute_embedding", False):
            module.__class__ = DistributedEmbedding
            pin(module, "weight", Pin(0))
        return None

    def _registered(self, module: nn.Module, what: Registered, wish: Wish) -> nn.Module:
        init = what.init_hook
        if isinstance(init, LayerInit):
            return self._layer(module, init, wish)
        args, kwargs = arguments_of(module)
        if what.init_hook is not None:
            args, kwargs = _translated(what.init_hook, args, kwargs, "init_hook", type(module))
        options = {**kwargs, **_accepted(what.dist_module, wish.options)}
        try:
            made = what.dist_module(*args, **options)
        except TypeError as error:
            raise UsageError(
                f"smp.nn.{what.dist_module.__name__} cannot stand for {type(module).__name__}: {error}. Pass "
                "an init_hook that translates the arguments."
            ) from error
        _take_weights(made, module)
        self._typed(made, wish.options.get("dtype"))
        made.train(module.training)
        hooks = _CallHooks(what, inspect.signature(module.forward), type(module).__name__)
        made.register_forward_pre_hook(hooks.before, with_kwargs=True, prepend=True)
        if what.return_hook is not None:
            made.register_forward_hook(hooks.after)
        return made

    def _layer(self, module: nn.Module, init: LayerInit, wish: Wish) -> nn.Module:
        """A distributed layer for one of Hugging Face's."""
        config, index = init.place(module)
        options = _accepted(distributed.DistributedTransformerLayer, wish.options)
        options.pop("flash_attention", None)
        made = distributed_layer(config, module, index, init.family, options)
        call = LayerCall(type(module), made)
        what = Registered(type(made), None, lambda *a, **k: ((call.inputs(*a, **k),), {}), call.result)
        hooks = _CallHooks(what, inspect.signature(module.forward), type(module).__name__)
        made.register_forward_pre_hook(hooks.before, with_kwargs=True, prepend=True)
        made.register_forward_hook(hooks.after)
        self._typed(made, None)
        return made

    def _typed(self, module: nn.Module, wanted: torch.dtype | None) -> None:
        dtype = self._dtype or wanted
        if dtype is not None:
            module.to(dtype=dtype)

    def _is_tied(self, module: nn.Module) -> bool:
        """Whether parameters of a module are those of another, too: such a module is not distributed."""
        inside = _uses_of_parameters(module)
        return any(count < self._uses[key] for key, count in inside.items())


class _CallHooks:
    """Calls a distributed module as the class that it stands for was called."""

    def __init__(self, what: Registered, signature: inspect.Signature, name: str):
        self._what, self._signature, self._name = what, signature, name

    def before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The arguments of the distributed module."""
        if self._what.forward_hook is None:
            return self._signature.bind(*args, **kwargs).args, {}
        return _translated(self._what.forward_hook, args, kwargs, "forward_hook", self._name)

    def after(self, module: nn.Module, args: Any, result: Any) -> Any:
        """What the class returned."""
        assert self._what.return_hook is not None
        return self._what.return_hook(result)


def _translated(
    hook: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], kind: str, owner: Any
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """What a hook makes of arguments."""
    made = hook(*args, **kwargs)
    if not isinstance(made, tuple) or len(made) != 2 or not isinstance(made[1], dict):
        name = owner if isinstance(owner, str) else owner.__name__
        raise UsageError(
            f"the {kind} for {name} returned a {type(made).__name__}, but it returns (args, kwargs): "
            "positional arguments and a dictionary of those by name."
        )
    return tuple(made[0]), made[1]


def _parameters(kind: type[nn.Module]) -> list[str]:
    return list(inspect.signature(kind.__init__).parameters)[1:]


def _accepted(kind: type[DistributedModule], options: Mapping[str, Any]) -> dict[str, Any]:
    names = set(_parameters(kind))
    if "kwargs" in names:
        names |= {field.name for field in fields(LayerOptions)}
    return {name: value for name, value in options.items() if name in names}


def _uses_of_parameters(model: nn.Module) -> Counter[int]:
    """How many modules hold each parameter."""
    return Counter(
        id(parameter)
        for module in model.modules()
        for parameter in module._parameters.values()
        if parameter is not None
    )


def _take_weights(made: nn.Module, module: nn.Module) -> None:
    """Takes over the weights of a module whose names and shapes are the same; else it has fresh ones."""
    theirs, ours = _tensors(module), _tensors(made)
    if {name: t.shape for name, t in theirs.items()} != {name: t.shape for name, t in ours.items()}:
        return
    for name, tensor in theirs.items():
        owner, _, key = name.rpartition(".")
        place = made.get_submodule(owner)
        kind = place._parameters if key in place._parameters else place._buffers
        kind[key] = tensor  # type: ignore[assignment]


def _tensors(module: nn.Module) -> dict[str, Tensor]:
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}
