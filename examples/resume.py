"""Trains, saves in the background, and goes on where it was: after Ctrl-C, a crash, or with other ranks.

shardwright run -n 2 examples/resume.py                         # stop it with Ctrl-C ...
shardwright run -n 2 examples/resume.py                         # ... and go on with the same command,
shardwright run -n 1 --resume examples/resume.py --steps 400    # or with one rank, and more steps
shardwright ckpt ls runs/resume
"""

import argparse

import torch
from torch.utils.data import TensorDataset
from transformers import GPT2Config, GPT2LMHeadModel

import shardwright.torch as sw

VOCABULARY, LENGTH = 64, 32


def sequences(num: int = 2048) -> TensorDataset:
    """Arithmetic sequences: the next token follows from the two before it."""
    generator = torch.Generator().manual_seed(0)
    start, stride = torch.randint(VOCABULARY, (2, num, 1), generator=generator)
    return TensorDataset((start + stride * torch.arange(LENGTH)) % VOCABULARY)


def main() -> None:
    """Trains for a number of steps, those of earlier runs included."""
    parser = argparse.ArgumentParser(description="Trains a small GPT-2, and resumes.")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--every", type=int, default=50, help="steps between two checkpoints")
    options = parser.parse_args()

    sw.init({"seed": 0, "log_interval": 10, "steps": options.steps})
    sizes = {"n_layer": 4, "n_embd": 64, "n_head": 4, "vocab_size": VOCABULARY, "n_positions": LENGTH}
    config = GPT2Config(**sizes, bos_token_id=0, eos_token_id=0)
    model = sw.DistributedModel(GPT2LMHeadModel(config))
    optimizer = sw.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=3e-3))
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.1, total_iters=50)
    loader = sw.data_loader(sequences(), 32, seed=0)  # 32 samples a step, of all replicas together

    @sw.step
    def train_step(model, ids):
        loss = model(input_ids=ids, labels=ids).loss
        model.backward(loss)
        return loss

    checkpoints = sw.Checkpoints(every=options.every, state={"scheduler": scheduler, "data": loader})
    step = checkpoints.resume()
    while step < options.steps:
        for (ids,) in loader:
            optimizer.zero_grad(set_to_none=True)
            loss = train_step(model, ids).reduce_mean()
            optimizer.step()
            scheduler.step()
            step += 1
            checkpoints.step_done(step)
            if step == options.steps:
                break
        if sw.rank() == 0:
            print(f"step {step}, epoch {loader.epoch}: loss {loss:.4f}", flush=True)
    checkpoints.close()
    sw.shutdown()


if __name__ == "__main__":
    main()
