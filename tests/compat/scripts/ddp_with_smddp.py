"""Stock data parallel training with the backend smddp, as since its release 1.4."""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import smdistributed.dataparallel.torch.torch_smddp  # noqa: F401  (registers the backend)

dist.init_process_group(backend="smddp")


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3, 1)
        self.norm = nn.BatchNorm2d(4)
        self.fc = nn.Linear(4 * 6 * 6, 10)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.norm(self.conv(x))), 2)
        return F.log_softmax(self.fc(torch.flatten(x, 1)), dim=1)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--model-dir", type=str, default=os.environ.get("SM_MODEL_DIR", "."))
    args = parser.parse_args()
    args.world_size, args.rank = dist.get_world_size(), dist.get_rank()
    args.batch_size //= args.world_size
    args.local_rank = int(os.environ["LOCAL_RANK"])

    if not torch.cuda.is_available():
        raise RuntimeError("Must run smdistributed.dataparallel on CUDA-capable devices.")
    torch.manual_seed(1)
    device = torch.device("cuda")
    torch.cuda.set_device(args.local_rank)
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(512, 1, 14, 14, generator=generator)
    labels = images[:, 0, 1:9, 2:12].sum(1).argmax(1)
    dataset = TensorDataset(images, labels)
    sampler = DistributedSampler(dataset, num_replicas=args.world_size, rank=args.rank)
    loader = DataLoader(dataset, batch_size=args.batch_size, pin_memory=True, num_workers=1, sampler=sampler)

    model = DDP(Net().to(device), device_ids=[args.local_rank])
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
    scheduler = StepLR(optimizer, step_size=1, gamma=0.7)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        total = torch.zeros(1, device=device)
        for data, target in loader:
            data, target = data.to(device), target.to(device)
            optimizer.zero_grad()
            loss = F.nll_loss(model(data), target)
            loss.backward()
            optimizer.step()
            total += loss.detach()
        dist.all_reduce(total)
        if args.rank == 0:
            print(f"epoch {epoch} loss {total.item() / len(loader) / args.world_size:.6f}", flush=True)
        scheduler.step()
    if args.rank == 0:
        torch.save(model.state_dict(), os.path.join(args.model_dir, "model.pt"))


if __name__ == "__main__":
    main()
