"""Factories for the commands that take one."""

import torch
from torch import nn


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))


class Model(nn.Module):
    """Its head uses the table of the embedding, and the first block feeds the last directly."""

    def __init__(self, num_blocks=4, width=16):
        super().__init__()
        self.embed = nn.Embedding(50, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(num_blocks))
        self.head = nn.Linear(width, 50, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids):
        x = first = self.blocks[0](self.embed(ids))
        for block in self.blocks[1:-1]:
            x = block(x)
        return self.head(self.blocks[-1](x + first))


def build():
    return Model(), torch.zeros(8, 6, dtype=torch.long)


def build_by_name():
    return Model(), {"ids": torch.zeros(8, 6, dtype=torch.long)}


def build_with_loss():
    return Model(), [torch.zeros(8, 6, dtype=torch.long)], lambda scores: scores.square().sum()


def build_large():
    """A model that no test machine could hold: 16 TiB."""
    return nn.Sequential(*(nn.Linear(2**18, 2**18) for _ in range(64))), torch.zeros(8, 2**18)


class Chooser(nn.Module):
    """Looks at its values, so it can only be kept whole."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        y = self.a(x)
        return self.b(y) if bool(y.sum() > 0) else y


def build_reading():
    return nn.Sequential(nn.Linear(4, 4), Chooser(), nn.Linear(4, 4)), torch.zeros(8, 4)


def build_failing():
    raise KeyError("layers")


def build_model_only():
    return Model()


not_callable = 3
