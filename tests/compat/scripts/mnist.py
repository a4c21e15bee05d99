"""Digits with model parallelism, as a notebook of 2021 would train them; the digits are synthetic."""

import argparse
import os
import random

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
import torch.optim as optim
from torch.cuda.amp import autocast
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, Subset, TensorDataset

import smdistributed.modelparallel.torch as smp


class Features(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 8, 3, 1)
        self.conv2 = nn.Conv2d(8, 16, 3, 2)

    def forward(self, x):
        x = F.relu(self.conv1(x))
        x = F.relu(self.conv2(x))
        return torch.flatten(F.max_pool2d(x, 2), 1)


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1 = nn.Linear(16 * 6 * 6, 64)
        self.fc2 = nn.Linear(64, 10)

    def forward(self, x):
        return F.log_softmax(self.fc2(F.relu(self.fc1(x))), 1)


class GroupedNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = Features()
        self.classifier = Classifier()

    def forward(self, x):
        return self.classifier(self.features(x))


def digits(count, seed):
    """Images of noise with a bright spot whose place is the digit."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, 10, (count,), generator=generator)
    images = 0.1 * torch.randn(count, 1, 28, 28, generator=generator)
    for image, label in zip(images, labels, strict=True):
        row, column = divmod(int(label), 4)
        image[0, 2 + 8 * row : 8 + 8 * row, 2 + 6 * column : 7 + 6 * column] += 1
    return TensorDataset(images, labels)


@smp.step
def train_step(args, model, scaler, data, target):
    with autocast(enabled=bool(args.amp)):
        output = model(data)
    loss = F.nll_loss(output, target, reduction="mean")
    scaled_loss = scaler.scale(loss) if args.amp else loss
    model.backward(scaled_loss)
    return output, loss


def train(args, model, scaler, device, train_loader, optimizer, epoch):
    model.train()
    for batch_idx, (data, target) in enumerate(train_loader):
        data, target = data.to(device, non_blocking=True), target.to(device, non_blocking=True)
        optimizer.zero_grad()
        _, loss_mb = train_step(args, model, scaler, data, target)
        loss = loss_mb.reduce_mean()
        if args.amp:
            scaler.step(optimizer)
            scaler.update()
        elif len(list(model.local_parameters())) > 0:  # some optimizers do not like an empty list
            optimizer.step()
        if smp.rank() == 0 and batch_idx % args.log_interval == 0:
            print(f"Train Epoch: {epoch} [{batch_idx * len(data)}]\tLoss: {loss.item():.6f}", flush=True)


@smp.step
def test_step(model, data, target):
    output = model(data)
    loss = F.nll_loss(output, target, reduction="sum").item()
    pred = output.argmax(dim=1, keepdim=True)
    correct = pred.eq(target.view_as(pred)).sum().item()
    return loss, correct


def test(model, device, test_loader):
    model.eval()
    loss = correct = seen = 0
    with torch.no_grad():
        for data, target in test_loader:
            data, target = data.to(device), target.to(device)
            loss_batch, correct_batch = test_step(model, data, target)
            loss += sum(loss_batch)
            correct += sum(correct_batch)
            seen += len(data)
    if smp.mp_rank() == 0:
        print(f"Test set: average loss {loss / seen:.6f}, accuracy {correct / seen:.4f}", flush=True)
    return loss / seen


def main():
    parser = argparse.ArgumentParser(description="PyTorch MNIST")
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--lr", type=float, default=1.0)
    parser.add_argument("--gamma", type=float, default=0.7)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--log-interval", type=int, default=4)
    parser.add_argument("--amp", type=int, default=0)
    parser.add_argument("--num-microbatches", type=int, default=4)
    parser.add_argument("--pipeline", type=str, default="interleaved")
    parser.add_argument("--partial-checkpoint", type=str, default="", help="where to go on from")
    parser.add_argument("--save-full-model", action="store_true")
    parser.add_argument("--mp_parameters", type=str, default="")
    parser.add_argument("--model-dir", type=str, default=os.environ.get("SM_MODEL_DIR", "/opt/ml/model"))
    args = parser.parse_args()

    if not torch.cuda.is_available():
        raise ValueError("The script requires CUDA support, but CUDA not available")

    cfg = {
        "microbatches": args.num_microbatches,
        "placement_strategy": "spread",
        "pipeline": args.pipeline,
        "optimize": "speed",
        "partitions": 2,
        "ddp": True,
    }
    smp.init(cfg)

    torch.manual_seed(args.seed)
    random.seed(args.seed)
    np.random.seed(args.seed)
    torch.cuda.manual_seed_all(args.seed)
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.benchmark = False

    torch.cuda.set_device(smp.local_rank())
    device = torch.device("cuda")

    train_set, test_set = digits(256, seed=3), digits(64, seed=4)
    if smp.dp_size() > 1:
        train_set = Subset(train_set, range(smp.dp_rank(), len(train_set), smp.dp_size()))
    options = {"num_workers": 0, "pin_memory": True, "drop_last": True}
    train_loader = DataLoader(train_set, batch_size=args.batch_size, shuffle=False, **options)
    test_loader = DataLoader(test_set, batch_size=args.batch_size, shuffle=False, **options)

    model = GroupedNet()
    scaler = smp.amp.GradScaler()
    optimizer = optim.Adadelta(model.parameters(), lr=args.lr)
    model = smp.DistributedModel(model, trace_device="gpu")
    optimizer = smp.DistributedOptimizer(optimizer)
    if args.partial_checkpoint:
        checkpoint = smp.load(args.partial_checkpoint, partial=True)
        model.load_state_dict(checkpoint["model_state_dict"])
        optimizer.load_state_dict(checkpoint["optimizer_state_dict"])
    scheduler = StepLR(optimizer, step_size=1, gamma=args.gamma)

    test_loss = 0.0
    for epoch in range(1, args.epochs + 1):
        train(args, model, scaler, device, train_loader, optimizer, epoch)
        test_loss = test(model, device, test_loader)
        scheduler.step()

    os.makedirs(args.model_dir, exist_ok=True)
    if smp.dp_rank() == 0:
        contents = {
            "model_state_dict": model.local_state_dict(),
            "optimizer_state_dict": optimizer.local_state_dict(),
            "epoch": args.epochs,
            "loss": test_loss,
        }
        smp.save(contents, os.path.join(args.model_dir, "pt_mnist_checkpoint.pt"), partial=True)
        if args.save_full_model:
            contents = {"model_state_dict": model.state_dict()}
            if smp.rank() == 0:
                smp.save(contents, os.path.join(args.model_dir, "pt_mnist.pt"), partial=False)
    # Waiting the save checkpoint to be finished before run another allgather_object
    smp.barrier()
    print("SMP training finished successfully", flush=True)


if __name__ == "__main__":
    main()
