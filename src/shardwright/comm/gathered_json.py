"""What each rank has to say, on all of them: numbers, texts, lists, and dictionaries of these."""

import json
from typing import Any

import torch

from shardwright.comm.purpose import Purpose
from shardwright.comm.small_collectives import SmallCollectives

__all__ = ["gather_json"]


def gather_json(said: Any, group: SmallCollectives, purpose: Purpose, *, device: torch.device) -> list[Any]:
    """What all ranks say, in their order; collective over the group.

    Args:
        said: by this rank; JSON can express it.
        group: the ranks.
        purpose: what for.
        device: where collectives of the group work.
    """
    texts = group.gather_texts(json.dumps(said, separators=(",", ":")), purpose, device=device)
    return [json.loads(text) for text in texts]
