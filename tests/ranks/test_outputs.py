"""What a step function returns is the same on every rank."""

import torch
from torch import nn

from shardwright.testing import run_ranks


class Complex(nn.Module):
    """Returns what PyTorch conjugates and negates only when it is read."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x):
        y = self.linear(x)
        z = torch.complex(y, y + 1).conj()
        return {"z": z, "imaginary": z.imag, "first": z[0, 0].imag, "mean": z.abs().mean()}


def test_conjugates_and_negated_numbers():
    """They could not be looked at as bytes."""

    def step_and_compare():
        import shardwright.torch as sw

        sw.init({"run_dir": "off", "microbatches": 2, "profile": "estimated"})
        torch.manual_seed(0)
        plain = nn.Sequential(nn.Linear(3, 3), Complex()).double()
        x = torch.rand(4, 3, dtype=torch.float64)
        expected = [plain(part) for part in x.chunk(2)]
        model = sw.DistributedModel(plain)

        @sw.step
        def train(model, x):
            found = model(x)
            model.backward(found["mean"])
            return found

        found = train(model, x)
        for name in ("z", "imaginary", "first", "mean"):
            for index, wanted in enumerate(expected):
                torch.testing.assert_close(found[name][index], wanted[name].detach())

    run_ranks(step_and_compare, 2)
