"""Ranks that share one GPU: NCCL refuses that on one host, so each pretends to be on a host of its own."""

from collections.abc import Callable
from typing import Any

from shardwright.testing import run_ranks

__all__ = ["on_one_gpu"]


def on_one_gpu(function: Callable[..., Any], num_ranks: int = 4, *args: Any, **more: Any) -> list[Any]:
    """Runs a function on ranks that use the first GPU, with NCCL between them."""

    def env(rank: int) -> dict[str, str]:
        return {
            "NCCL_HOSTID": f"rank-{rank}",
            "NCCL_P2P_DISABLE": "1",
            "NCCL_SHM_DISABLE": "1",
            "NCCL_IB_DISABLE": "1",
            "NCCL_SOCKET_IFNAME": "lo",
        }

    return run_ranks(function, num_ranks, *args, env=env, timeout_s=150, **more)
