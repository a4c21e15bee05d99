"""The rank process of ``shardwright profile`` and ``shardwright plan --verify``."""

import os
import sys
from pathlib import Path

import torch.distributed as dist

from shardwright.cli.asking.application import say
from shardwright.cli.asking.factory import build
from shardwright.cli.asking.on_ranks import Order
from shardwright.config import Config
from shardwright.errors import ShardwrightError
from shardwright.exit_codes import exit_code_of
from shardwright.torch.plan_here import Training, measure_here, plan_here


def _training(order: Order) -> Training:
    """The training that the factory builds."""
    sample = build(order.factory, device=order.build_on)
    return Training(
        build=lambda: build(order.factory, device=order.build_on).model,
        arguments=(sample.args, sample.kwargs),
        loss=sample.loss,
    )


def main() -> None:
    """Does what the argument says; a mistake of the user's is told like those that a command finds itself."""
    try:
        _do(Order.from_json(sys.argv[1]))
    except ShardwrightError as error:
        # What the first rank says is seen; what another one says is in its log, which the launcher names.
        say(" ".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", ())]))
        sys.exit(exit_code_of(error))


def _do(order: Order) -> None:
    config = Config.parse(order.settings)
    if order.most_trials:
        plan = plan_here(_training(order), config=config, most=order.most_trials, steps=order.steps)
        if _is_first():
            plan.write(order.out)
    else:
        measured = measure_here(_training(order), config=config).measured
        if measured is not None and _is_first():
            measured.write(Path(order.out))
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


def _is_first() -> bool:
    return int(os.environ.get("RANK", "0")) == 0


if __name__ == "__main__":
    main()
