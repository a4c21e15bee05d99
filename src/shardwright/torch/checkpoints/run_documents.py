"""What a checkpoint tells of its run beside the state: the plan, and the settings of the model."""

import json

from torch import nn

from shardwright.plan import Plan
from shardwright.torch.checkpoints.writer import CONFIG, PLAN

__all__ = ["documents_of_run"]


def documents_of_run(plan: Plan | None, module: nn.Module) -> dict[str, bytes]:
    """Texts of JSON by the names of their files: the plan, and the settings of a Hugging Face model."""
    documents = {}
    if plan is not None:
        documents[PLAN] = plan.to_json().encode()
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
