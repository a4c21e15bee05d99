"""What ranks give to collectives, and what reductions make of it."""

import torch


def data_of(rank, count, dtype=torch.float64):
    """Whole numbers of a rank, in any type."""
    generator = torch.Generator().manual_seed(rank)
    return torch.randint(-9, 9, (count,), generator=generator).to(dtype)


def reduced(name, wholes):
    """What a reduction makes of the tensors of all ranks, in float64."""
    stacked = torch.stack(wholes).double()
    return {
        "SUM": stacked.sum(0),
        "AVG": stacked.mean(0),
        "MIN": stacked.amin(0),
        "MAX": stacked.amax(0),
        "PRODUCT": stacked.prod(0),
    }[name]
