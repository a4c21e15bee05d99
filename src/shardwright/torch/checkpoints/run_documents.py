"""What a checkpoint tells of its run beside the state: the plan, and the settings of the model."""

import json

from torch import nn

from shardwright.checkpoint.hugging_face import TIES
from shardwright.plan import Plan
from shardwright.torch._private import non_persistent_buffers
from shardwright.torch.checkpoints.writer import CONFIG, PLAN

__all__ = ["documents_of_run"]


def documents_of_run(plan: Plan | None, module: nn.Module) -> dict[str, bytes]:
    """Texts of JSON by the names of their files: the plan, other names, settings of a Hugging Face model."""
    documents = {}
    if plan is not None:
        documents[PLAN] = plan.to_json().encode()
    if ties := _ties(module):
        documents[TIES] = json.dumps(ties).encode()
    to_json = getattr(getattr(module, "config", None), "to_json_string", None)
    if callable(to_json):  # of a Hugging Face model
        try:
            text = to_json(use_diff=False)
        except TypeError:  # not that of transformers
            return documents
        settings = json.loads(text)
        if not settings.get("architectures"):  # save_pretrained adds it, and pipelines look for it
            settings["architectures"] = [type(module).__name__]
        documents[CONFIG] = json.dumps(settings, indent=1).encode()
    return documents


def _ties(module: nn.Module) -> dict[str, str]:
    """The further names of tied parameters and persistent buffers, each with the first."""
    kept = [
        *module.named_parameters(remove_duplicate=False),
        *module.named_buffers(remove_duplicate=False),
    ]
    transient, first = non_persistent_buffers(module), dict[int, str]()
    ties = {}
    for name, tensor in kept:
        if name not in transient and first.setdefault(id(tensor), name) != name:
            ties[name] = first[id(tensor)]
    return ties
