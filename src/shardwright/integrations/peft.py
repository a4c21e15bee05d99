"""Adapters of PEFT on a model that is spread over ranks: saved alone, loaded, merged into the base model.

Every function is called on all ranks, between two steps. What `save_adapter` and `save_merged` write, plain
PEFT and transformers load; nobody gathers the base model to save an adapter.
"""

import copy
from pathlib import Path
from typing import Any

import torch
from peft import PeftConfig, PeftModel, get_peft_model_state_dict
from peft.utils import load_peft_weights
from torch import Tensor, nn

from shardwright.errors import UsageError
from shardwright.run.context import context
from shardwright.run.joint_calls import on_every_rank
from shardwright.torch.model.distributed_model import DistributedModel
from shardwright.torch.parameters.quantized import is_quantized

__all__ = ["adapter_state", "load_adapter", "save_adapter", "save_merged"]

# What an adapter's weights do not show: with another scale they compute something else.
_SCALES = ("peft_type", "lora_alpha", "use_rslora", "alpha_pattern", "alpha")


def save_adapter(model: DistributedModel, folder: str | Path, **options: Any) -> None:
    """Writes the adapters, and nothing of the base model: ``adapter_model.safetensors`` and its settings.

    Args:
        model: a wrapped model of PEFT.
        folder: where the first rank writes; every other adapter than ``default`` gets a folder inside.
        options: for PEFT's ``save_pretrained``.

    Example::

        from shardwright.integrations.peft import save_adapter
        save_adapter(model, "adapter")  # on all ranks
        # elsewhere: PeftModel.from_pretrained(base, "adapter")
    """
    inner = _adapted(model)
    state = adapter_state(model)
    _on_the_first_rank(lambda: inner.save_pretrained(str(folder), state_dict=state, **options))


def load_adapter(model: DistributedModel, folder: str | Path, *, adapter: str = "default") -> None:
    """Gives an adapter of the model the weights that PEFT has saved, here or anywhere else.

    Args:
        model: a wrapped model of PEFT, with the settings that the saved adapter had.
        folder: with ``adapter_config.json``; every rank reads it.
        adapter: the name of the adapter in this model.

    Raises:
        UsageError: it is the adapter of another model, or has other settings.
    """
    inner, folder = _adapted(model), Path(folder)
    if not (folder / "adapter_config.json").is_file():
        raise UsageError(
            f"{folder} has no adapter_config.json. Give the folder that PEFT's save_pretrained has written, "
            "on every rank."
        )
    saved: dict[str, Tensor] = load_peft_weights(str(folder), device="cpu")
    names = _names(model, adapter)
    own = model.described_state()
    _refuse_other(PeftConfig.from_pretrained(str(folder)), inner.peft_config[adapter], folder)
    _refuse_unlike(saved, {short: own[name] for short, name in names.items()}, folder)
    model.load_state_dict({names[short]: tensor for short, tensor in saved.items()}, strict=False)


def save_merged(model: DistributedModel, folder: str | Path, **options: Any) -> None:
    """Writes the base model with the adapters added to it, for ``from_pretrained`` without PEFT.

    The whole model takes memory on every rank meanwhile, as `DistributedModel.state_dict` does. The wrapped
    model stays as it is.

    Args:
        model: a wrapped model of PEFT around one of transformers.
        folder: where the first rank writes.
        options: for the base model's ``save_pretrained``.
    """
    inner = _adapted(model)
    if is_quantized(inner):
        raise UsageError(
            "the base model is quantized, and adapters are merged into numbers of 16 or 32 bits. Save the "
            "adapter (save_adapter), load the base model unquantized, and there call "
            f'PeftModel.from_pretrained(base, "{folder}").merge_and_unload().'
        )
    if not hasattr(inner.base_model, "merge_and_unload"):
        raise UsageError(
            f"{inner.peft_type.value} changes what the base model is given, not its weights: nothing can be "
            "merged. Save the adapter alone: save_adapter."
        )
    state = model.state_dict()
    unsaved = [buffer for name, buffer in inner.named_buffers() if name not in state]

    def write() -> None:
        named = (*inner.named_parameters(), *inner.named_buffers())
        whole = {id(tensor): _like(tensor, state[name]) for name, tensor in named if name in state}
        merged = copy.deepcopy(inner, whole).merge_and_unload(safe_merge=True)  # a layer is copied at a time
        merged.save_pretrained(str(folder), **options)

    with model.gathered(*unsaved):
        _on_the_first_rank(write)


def adapter_state(model: DistributedModel) -> dict[str, Tensor]:
    """The weights of all adapters by their names in the model, whole, on all ranks."""
    own = model.described_state()
    adapters = (_names(model, adapter) for adapter in _adapted(model).peft_config)
    found = {id(own[name]) for names in adapters for name in names.values()}
    return model.some_of_state([name for name, tensor in own.items() if id(tensor) in found])


def _names(model: DistributedModel, adapter: str) -> dict[str, str]:
    """The names of an adapter's weights in its file, each with that in the model."""
    inner, own = _adapted(model), model.described_state()
    if adapter not in inner.peft_config:
        raise UsageError(f"the model has no adapter {adapter}, but {', '.join(inner.peft_config)}.")
    names = {id(tensor): name for name, tensor in own.items()}
    short = get_peft_model_state_dict(inner, state_dict=own, adapter_name=adapter)
    made = sorted(each for each, tensor in short.items() if each not in own and id(tensor) not in names)
    if made:
        raise UsageError(
            f"PEFT makes {made[0]} of the adapter {adapter} when it saves, and no rank has it. Call "
            "model.state_dict() on all ranks, load it into a model of PEFT's on one of them, and save that "
            "one: plain.load_state_dict(state); plain.save_pretrained(folder)."
        )
    # Of tied weights each has its own name in the file.
    return {each: each if each in own else names[id(tensor)] for each, tensor in short.items()}


def _adapted(model: DistributedModel) -> Any:
    inner = model.get_module() if isinstance(model, DistributedModel) else model
    if not isinstance(model, DistributedModel) or not isinstance(inner, PeftModel):
        raise UsageError(
            f"{type(inner).__name__} is no wrapped model of PEFT. Add adapters before it is wrapped: "
            "sw.DistributedModel(get_peft_model(base, LoraConfig(...)))."
        )
    return inner


def _refuse_other(saved: Any, own: Any, folder: Path) -> None:
    for name in _SCALES:
        theirs, ours = getattr(saved, name, None), getattr(own, name, None)
        if theirs != ours:
            raise UsageError(
                f"the adapter in {folder} has {name} {theirs}, and that of this model {ours}. Make this one "
                f'with the saved settings: get_peft_model(base, PeftConfig.from_pretrained("{folder}")).'
            )


def _refuse_unlike(saved: dict[str, Tensor], own: dict[str, Tensor], folder: Path) -> None:
    wrong = [f"{name}, which this model lacks" for name in saved if name not in own]
    wrong += [f"no {name}" for name in own if name not in saved]
    wrong += [
        f"{name} of shape {tuple(tensor.shape)}, here {tuple(own[name].shape)}"
        for name, tensor in saved.items()
        if name in own and tensor.shape != own[name].shape
    ]
    if wrong:
        more = f" (and {len(wrong) - 1} more differ)" if len(wrong) > 1 else ""
        raise UsageError(
            f"the adapter in {folder} is of another model, or was made with other settings: it has "
            f"{wrong[0]}{more}. Load it into the base model that it was trained on, with its own LoraConfig."
        )


def _like(tensor: Tensor, values: Tensor) -> Tensor:
    with torch.no_grad():
        return nn.Parameter(values, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else values


def _on_the_first_rank(write: Any) -> None:
    current = context()
    on_every_rank(current, lambda: write() if current.rank == 0 else None)
