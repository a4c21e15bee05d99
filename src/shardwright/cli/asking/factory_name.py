"""Checks the name of a factory before anything is imported for it."""

from pathlib import Path

from shardwright.errors import UsageError

__all__ = ["check_factory", "split_factory"]


def check_factory(factory: str) -> str:
    """Refuses what names no function, or a file that is not there; returns the name.

    Raises:
        UsageError: it is one of these.
    """
    where, _ = split_factory(factory)
    if where.endswith(".py") and not Path(where).is_file():
        raise UsageError(
            f"there is no file {where}. Give its path from {Path.cwd()}, for example model.py:build."
        )
    return factory


def split_factory(factory: str) -> tuple[str, str]:
    """The file or module, and the function.

    Raises:
        UsageError: it does not name both.

    >>> split_factory("model.py:build")
    ('model.py', 'build')
    """
    where, colon, name = factory.rpartition(":")
    if not colon or not where or not name:
        raise UsageError(
            f"{factory} names no function. Write model.py:build or package.model:build; build() returns the "
            "model and a batch."
        )
    return where, name
