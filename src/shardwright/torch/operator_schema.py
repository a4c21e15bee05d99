"""What the schema of an operator of PyTorch tells about a call of it."""

from typing import Any

__all__ = ["is_written", "one_by_one", "written_arguments"]


def is_written(argument: Any) -> bool:
    """Whether an operator changes an argument, or a result, in place."""
    return argument.alias_info is not None and bool(argument.alias_info.is_write)


def written_arguments(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """The arguments that a call changes in place."""
    named = zip((argument.name for argument in func._schema.arguments), args, strict=False)
    given = {**dict(named), **kwargs}
    return [given.get(argument.name) for argument in func._schema.arguments if is_written(argument)]


def one_by_one(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any] | None:
    """Runs an operator of lists on one tensor of each after the other: they are of several kinds."""
    results: list[Any] = []
    for index in range(len(args[0])):
        own = [item[index : index + 1] if isinstance(item, list | tuple) else item for item in args]
        results += func(*own, **kwargs) or ()
    return results or None
