"""Reads environment variables, with checks."""

import re
from collections.abc import Mapping

from shardwright.errors import LaunchError
from shardwright.limits import MOST_RANKS
from shardwright.printable import shown

__all__ = ["Variables"]

_NUMBER = re.compile(r"\s*[-+]?[0-9]{1,18}\s*")  # int() takes more: 1_000, and other scripts' digits


class Variables:
    """Environment variables of which some are numbers and some belong together; an empty one counts as unset.

    >>> Variables({"RANK": "3"}).number("RANK")
    3
    """

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._environ = environ

    def text(self, *names: str) -> str | None:
        """The first of these variables that is set."""
        return next((self._environ[name] for name in names if self._environ.get(name)), None)

    def number(self, *names: str) -> int | None:
        """The first of these variables that is set, as a number."""
        name = next((name for name in names if self._environ.get(name)), None)
        if name is None:
            return None
        value = self._environ[name]
        if _NUMBER.fullmatch(value) is None:
            raise LaunchError(f"{name} is {shown(value)}, which is not a whole number. Correct or unset it.")
        return int(value)

    def required_number(self, name: str, *, because: str) -> int:
        """A variable that must be set, as a number."""
        value = self.number(name)
        if value is None:
            raise LaunchError(
                f"{because} is set but {name} is not. Set both, or neither for a single process."
            )
        return value

    def count(self, name: str, *, because: str) -> int:
        """A number of ranks, or of hosts, that must be set; raises as `required_number`."""
        value = self.required_number(name, because=because)
        if not 1 <= value <= MOST_RANKS:
            raise LaunchError(
                f"{name} is {value}, but it must be from 1 to {MOST_RANKS}. Correct or unset it."
            )
        return value

    def port(self, *names: str) -> int | None:
        """The first of these variables that is set, as a port."""
        value = self.number(*names)
        if value is not None and not 0 < value < 2**16:
            raise LaunchError(f"{names[-1]} is {value}, but a port is from 1 to 65535. Correct or unset it.")
        return value

    def together(self, *names: str) -> bool:
        """Says whether variables that belong together are set."""
        there = [name for name in names if self._environ.get(name)]
        missing = [name for name in names if name not in there]
        if there and missing:
            raise LaunchError(
                f"{_list(there)} set but {_list(missing)} not. "
                "Set all of them, or none to run a single process."
            )
        return bool(there)


def _list(names: list[str]) -> str:
    return f"{names[0]} is" if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]} are"
