"""What ``model.module`` is: the user's module with one more hop.

Scripts of different years reach the user's module by ``model.module`` and by ``model.module.module``, since
in SageMaker's library a DistributedDataParallel layer stood between. Tools unwrap until there is no
``module`` any more. So ``model.module`` stands for the user's module, and its own ``module`` is that module::

    model.module.transformer          the user's module, seen through the proxy
    model.module.module               the user's module itself
    model.get_module()                the same
"""

from collections.abc import Iterator
from typing import Any

from torch import nn


class ModuleProxy:
    """Stands for a module."""

    __slots__ = ("__weakref__", "_target")

    def __init__(self, target: nn.Module):
        object.__setattr__(self, "_target", target)

    # `isinstance` looks here as well.
    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        return type(unproxied(self))

    def __getattr__(self, name: str) -> Any:
        target = object.__getattribute__(self, "_target")
        return target if name == "module" else getattr(target, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(unproxied(self), name, value)

    def __delattr__(self, name: str) -> None:
        delattr(unproxied(self), name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return unproxied(self)(*args, **kwargs)

    def __eq__(self, other: object) -> bool:
        return unproxied(self) is unproxied(other)

    def __hash__(self) -> int:
        return hash(unproxied(self))

    def __repr__(self) -> str:
        return repr(unproxied(self))

    def __dir__(self) -> list[str]:
        return dir(unproxied(self))

    def __len__(self) -> int:
        return len(unproxied(self))

    def __bool__(self) -> bool:
        return True  # an object without a length is true; a container of modules is there all the same

    def __iter__(self) -> Iterator[Any]:
        return iter(unproxied(self))

    def __getitem__(self, index: Any) -> Any:
        return unproxied(self)[index]

    def __setitem__(self, index: Any, value: Any) -> None:
        unproxied(self)[index] = value

    def __contains__(self, item: object) -> bool:
        return item in unproxied(self)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return unproxied(self).__reduce_ex__(protocol)


def unproxied(item: Any) -> Any:
    """The module that a proxy stands for; anything else as it is."""
    return object.__getattribute__(item, "_target") if type(item) is ModuleProxy else item
