"""Trains as listings for SageMaker do, on this machine: a model in two parts, over two processes.

    pip install -e compat                      # once: it gives the names of SageMaker's libraries
    python examples/estimator.py
    python examples/estimator.py --dry-run     # what would be run

Other engines take the same job elsewhere: Slurm(partition="gpu"), Kubernetes(image="..."), Ray().
"""

import argparse
from pathlib import Path

import torch

from shardwright.launch import Estimator


def make_digits(folder: Path) -> None:
    """Images of 8 x 8 pixels: noise, with a bright row and column that make up the digit."""
    folder.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(10, (2048,), generator=generator)
    images = 0.3 * torch.randn(2048, 1, 8, 8, generator=generator)
    every = torch.arange(len(labels))
    images[every, 0, labels % 8] += 1
    images[every, 0, :, labels // 5] += 1
    torch.save((images, labels), folder / "digits.pt")


def main() -> None:
    """Makes the data, and trains."""
    parser = argparse.ArgumentParser(description="Trains a small network with an estimator.")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--data", type=Path, default=Path("data/digits"))
    parser.add_argument("--dry-run", action="store_true", help="show what would be run")
    options = parser.parse_args()
    make_digits(options.data)

    estimator = Estimator(
        entry_point="smp_digits.py",
        source_dir=Path(__file__).parent,
        instance_type="local",  # this machine's CPUs; in SageMaker: ml.p3.16xlarge
        instance_count=1,
        distribution={
            "smdistributed": {
                "modelparallel": {
                    "enabled": True,
                    "parameters": {
                        "partitions": 2,
                        "microbatches": 4,
                        "pipeline": "interleaved",
                        "ddp": True,
                    },
                }
            },
            "mpi": {"enabled": True, "processes_per_host": 2},
        },
        hyperparameters={"epochs": options.epochs, "lr": 0.05},
        base_job_name="digits",
    )
    estimator.fit({"train": str(options.data)}, dry_run=options.dry_run)
    if not options.dry_run:
        print(f"the model is in {estimator.model_data}")


if __name__ == "__main__":
    main()
