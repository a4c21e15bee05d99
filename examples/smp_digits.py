"""A script as it was written for SageMaker's model parallel library; examples/estimator.py trains with it.

It hard-codes CUDA, and is not edited: what runs it is shardwright-smdistributed, in CPU mode.
"""

import argparse
import os

import torch
import torch.nn.functional as F

import smdistributed.modelparallel.torch as smp


@smp.step
def train_step(model, data, target):
    """One batch; `data` and `target` are its microbatches."""
    loss = F.cross_entropy(model(data), target)
    model.backward(loss)
    return loss


def main():
    """Trains, and saves the whole model where SageMaker collects it."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--mp_parameters", type=str, default="")
    parser.add_argument("--model-dir", type=str, default=os.environ["SM_MODEL_DIR"])
    parser.add_argument("--train", type=str, default=os.environ["SM_CHANNEL_TRAIN"])
    args = parser.parse_args()

    smp.init()
    torch.manual_seed(1)
    torch.cuda.set_device(smp.local_rank())
    device = torch.device("cuda")
    images, labels = torch.load(os.path.join(args.train, "digits.pt"))
    layers = [torch.nn.Flatten(), torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10)]
    model = smp.DistributedModel(torch.nn.Sequential(*layers).to(device))
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9))
    for epoch in range(args.epochs):
        for data, target in zip(images.split(args.batch_size), labels.split(args.batch_size), strict=True):
            optimizer.zero_grad()
            loss = train_step(model, data.to(device), target.to(device)).reduce_mean()
            optimizer.step()
        if smp.rank() == 0:
            print(f"epoch {epoch + 1}: loss {loss.item():.4f}", flush=True)
    if smp.dp_rank() == 0:
        state = model.state_dict()
        if smp.local_rank() == 0:
            torch.save(state, os.path.join(args.model_dir, "model.pt"))
    smp.barrier()


if __name__ == "__main__":
    main()
