"""Which translators belong to a model."""

from collections.abc import Mapping
from types import ModuleType
from typing import Any

from torch import nn

from smdistributed.modelparallel.torch.nn.huggingface import bert, gpt2, gptj, gptneo, gptneox, roberta
from smdistributed.modelparallel.torch.nn.huggingface.names import SEQ_LAYERS, Translators

# Beginning of the class names of a family -> its module. The longest name first: GPTNeoX begins like GPTNeo.
_MODULES: dict[str, ModuleType] = {
    "GPTNeoX": gptneox,
    "GPTNeo": gptneo,
    "Roberta": roberta,
    "GPT2": gpt2,
    "GPTJ": gptj,
    "Bert": bert,
}


def translators_of(model: nn.Module) -> list[Translators]:
    """Translators for a Hugging Face model; none for any other.

    A model that keeps its own layers has Hugging Face's names already.
    """
    for kind in type(model).__mro__:
        if not kind.__module__.startswith("transformers."):
            continue
        for prefix, module in _MODULES.items():
            if kind.__name__.startswith(prefix):
                name = module.__name__.rpartition(".")[2]
                to_hf = getattr(module, f"translate_state_dict_to_hf_{name}")
                to_smp = getattr(module, f"translate_hf_state_dict_to_smdistributed_{name}")
                return [(to_hf, to_smp if _is_distributed(model) else _unchanged)]
    return []


def _is_distributed(model: nn.Module) -> bool:
    return any(SEQ_LAYERS in module._modules for module in model.modules())


def _unchanged(state_dict: Mapping[str, Any], max_seq_len: int | None = None) -> Mapping[str, Any]:
    return state_dict
