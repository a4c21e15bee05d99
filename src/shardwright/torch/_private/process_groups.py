"""The default process group."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed import _functional_collectives

__all__ = ["default_group"]


@contextmanager
def default_group(
    group: Any,
    *,
    on_other: Callable[[Any], None] | None = None,
    on_functional: Callable[[Any], None] | None = None,
) -> Iterator[None]:
    """Has another process group be the default one."""
    c10d: Any = torch.distributed.distributed_c10d
    before, is_none_of = c10d._world.default_pg, c10d._rank_not_in_group
    added = group not in c10d._world.pg_map

    def look(asked: Any) -> bool:
        if asked is not None and asked is not group and on_other is not None:
            on_other(asked)
        return bool(is_none_of(asked))

    c10d._world.default_pg = group
    if added:
        c10d._world.pg_map[group] = c10d._world.pg_map[before]  # the backend, and the store
    if on_other is not None:
        c10d._rank_not_in_group = look
    functional: Any = _functional_collectives
    # torch before 2.13 has the second alone.
    name = "_resolve_group" if hasattr(functional, "_resolve_group") else "_resolve_group_name"
    resolve = getattr(functional, name)

    def resolved(asked: Any, *args: Any) -> Any:
        if on_functional is not None:
            on_functional(asked)
        return resolve(asked, *args)

    setattr(functional, name, resolved)
    try:
        yield
    finally:
        setattr(functional, name, resolve)
        c10d._world.default_pg, c10d._rank_not_in_group = before, is_none_of
        if added:
            del c10d._world.pg_map[group]
