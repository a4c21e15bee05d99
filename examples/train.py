"""A complete training script to copy: the lines with <-- are those of Shardwright.

shardwright run -n 2 examples/train.py                 # stop it with Ctrl-C; the same command goes on
shardwright run -n 2 --set optimize=memory examples/train.py
python examples/train.py                               # in one process
"""

import argparse

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import shardwright.torch as sw


class Classifier(nn.Module):
    """Images of 16 x 16 pixels by blocks of convolutions, with a shortcut around each."""

    def __init__(self, width: int = 32, blocks: int = 6, classes: int = 4):
        super().__init__()
        self.first = nn.Conv2d(1, width, 3, padding=1)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.GroupNorm(4, width), nn.ReLU(), nn.Conv2d(width, width, 3, padding=1))
            for _ in range(blocks)
        )
        self.head = nn.Linear(width, classes)

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x.mean((2, 3)))


def images(num: int, seed: int) -> TensorDataset:
    """Noise with a bright line; its class is the side on which it is."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(num, 1, 16, 16, generator=generator)
    sides = torch.randint(4, (num,), generator=generator)
    for image, side in zip(x[:, 0], sides.tolist(), strict=True):
        (image if side % 2 else image.T)[side // 2 * 15] += 1.5
    return TensorDataset(x, sides)


def main() -> None:
    """Trains for a number of steps, those of earlier runs included."""
    parser = argparse.ArgumentParser(description="Trains a small network on images.")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch", type=int, default=32, help="samples of a step, of all replicas together")
    parser.add_argument("--every", type=int, default=50, help="steps between two checkpoints")
    options = parser.parse_args()

    sw.init({"seed": 0, "steps": options.steps, "trackers": "tensorboard"})  # <-- tensorboard --logdir runs
    model = sw.DistributedModel(Classifier())  # <--
    optimizer = sw.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=2e-3))  # <--
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=options.steps)
    loader = sw.data_loader(images(2048, seed=1), options.batch, seed=0)  # <-- each replica has its part
    held_out = images(256, seed=2).tensors

    @sw.step  # <-- runs once for each microbatch
    def train_step(model, x, y):
        with torch.autocast("cuda" if x.is_cuda else "cpu", dtype=torch.bfloat16):
            loss = F.cross_entropy(model(x), y)
        model.backward(loss)  # <--
        return loss

    @sw.step  # <--
    def evaluate(model, x):
        return model(x)

    @torch.no_grad()
    def average(decay=0.98):  # a moving average of the weights, which the optimizer keeps and saves
        for p in model.local_parameters():  # <--
            optimizer.state[p].setdefault("average", p.clone()).lerp_(p, 1 - decay)

    @torch.no_grad()
    def exchange():  # weights and their averages; on all ranks
        for p in model.local_parameters():  # <--
            own = p.clone()
            p.copy_(optimizer.state[p]["average"])
            optimizer.state[p]["average"].copy_(own)

    def accuracy():
        model.eval()
        with torch.no_grad():
            right = evaluate(model, held_out[0]).concat().argmax(1) == held_out[1]  # <-- on every rank
        model.train()
        return right.float().mean().item()

    checkpoints = sw.Checkpoints(every=options.every, state={"scheduler": scheduler, "data": loader})  # <--
    step = checkpoints.resume()  # <-- 0, or how many steps were done
    while step < options.steps:
        for x, y in loader:
            optimizer.zero_grad(set_to_none=True)
            loss = train_step(model, x, y).reduce_mean()  # <--
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            average()
            step += 1
            checkpoints.step_done(step)  # <-- saves if one is due, or after Ctrl-C
            if step % 50 == 0 and sw.rank() == 0:
                print(f"step {step}: loss {loss.item():.4f}", flush=True)
            if step == options.steps:
                break
    checkpoints.close()  # <--
    trained = accuracy()
    exchange()
    averaged, state = accuracy(), model.state_dict()  # on all ranks
    if sw.rank() == 0:
        torch.save(state, "model.pt")
        print(f"accuracy {trained:.3f}, of averaged weights {averaged:.3f}; saved model.pt")
    sw.shutdown()  # <--


if __name__ == "__main__":
    main()
