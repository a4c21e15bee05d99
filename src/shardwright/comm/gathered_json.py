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
    text = json.dumps(said, separators=(",", ":")).encode()
    lengths = group.gather(torch.tensor(len(text), dtype=torch.int64, device=device), purpose).tolist()
    row = torch.zeros(max(lengths), dtype=torch.uint8)
    row[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    rows = group.gather(row.to(device), purpose).cpu()
    return [
        json.loads(bytes(row[:length].numpy())) for row, length in zip(rows, map(int, lengths), strict=True)
    ]
