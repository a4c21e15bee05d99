"""The digest of what optimizers update with changes whenever a number does."""

from types import SimpleNamespace

import torch
from torch import nn

from shardwright.torch.step_end.group_numbers import GroupNumbers


def test_every_change_of_a_number_is_another_digest():
    optimizer = torch.optim.Adam([nn.Parameter(torch.zeros(2))], lr=0.1)
    context = SimpleNamespace(optimizers=[SimpleNamespace(optimizer=optimizer)], device=torch.device("cpu"))
    numbers, group = GroupNumbers(context), optimizer.param_groups[0]  # type: ignore[arg-type]
    moving, listed = torch.tensor(0.9), [0.5, 0.6]
    changes = [
        lambda: None,
        lambda: group.update(lr=0.2),
        lambda: group.update(betas=(moving, 0.99)),
        lambda: moving.fill_(0.8),  # in a tuple that stays the same
        lambda: group.update(further=listed),
        lambda: listed.append(0.7),
        lambda: group.update(weight_decay=0.1),
        lambda: numbers.note(optimizer),
    ]
    found = []
    for change in changes:
        change()
        assert numbers.digests() == numbers.digests()
        found.append(numbers.digests()[:2])
    assert len(set(found)) == len(changes)
