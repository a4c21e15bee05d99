"""Detects ranks that run different versions of what they share."""

import platform
from collections.abc import Callable, Sequence
from typing import Any

import torch

import shardwright
from shardwright.errors import LaunchError

__all__ = ["refuse_mixed_versions"]


def refuse_mixed_versions(tell_all: Callable[[Any], Sequence[Any]]) -> None:
    """Refuses ranks that do not run the same: they would trace, split or talk in different ways."""
    everyone = tell_all(_versions())
    ranks: dict[str, list[int]] = {}
    for rank, versions in enumerate(everyone):
        ranks.setdefault(versions, []).append(rank)
    if len(ranks) > 1:
        found = "; ".join(f"{_ranks(own)} {versions}" for versions, own in ranks.items())
        raise LaunchError(
            f"the ranks run different versions: {found}. Install the same on every host, for example pip "
            f"install shardwright=={shardwright.__version__} torch=={torch.__version__.partition('+')[0]}"
        )


def _versions() -> str:
    python = ".".join(platform.python_version_tuple()[:2])
    return f"shardwright {shardwright.__version__}, torch {torch.__version__}, Python {python}"


def _ranks(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
    return f"rank {shown} has" if len(ranks) == 1 else f"ranks {shown} have"
