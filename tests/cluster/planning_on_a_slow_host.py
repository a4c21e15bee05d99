"""Under torchrun: the second host computes at a third of the rate; what is planned is told in a file."""

import json
import sys
from pathlib import Path

import torch
from torch import nn

import shardwright.torch as sw
from shardwright.run import machine
from shardwright.run.context import context


def main() -> None:
    sw.init({"pipeline_parallel_degree": 2, "pipeline": "1f1b", "microbatches": 4, "run_dir": "off"})
    model = sw.DistributedModel(nn.Sequential(*(nn.Linear(512, 512) for _ in range(6))))

    @sw.step
    def train(model, x):
        model.backward(model(x).square().mean())

    run = context()
    if run.rank:
        # As if its cores had something else to do: other tests make both hosts slow at times.
        measured = machine.seconds_of_products
        machine.seconds_of_products = lambda device: 3 * measured(device)
    train(model, torch.randn(64, 512))
    if run.rank == 0:
        units = [len(stage.units) for stage in run.plan.stages]
        found = {"slowness": run.cluster.slowness, "units": units, "why": run.plan.why}
        Path(sys.argv[1]).write_text(json.dumps(found))
    sw.shutdown()


if __name__ == "__main__":
    main()
