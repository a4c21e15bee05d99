"""Disks that fail."""

import os
from collections.abc import Callable

import pytest

Unreadable = Callable[[str, int], None]


@pytest.fixture
def unreadable(monkeypatch: pytest.MonkeyPatch) -> Unreadable:
    """Has the system refuse to open files whose path ends so, with an error of that number."""
    refused: dict[str, int] = {}
    plain = os.open

    def open_(path: object, *args: object, **kwargs: object) -> int:
        number = next((each for end, each in refused.items() if str(path).endswith(end)), None)
        if number is not None:
            raise OSError(number, os.strerror(number), str(path))
        return plain(path, *args, **kwargs)  # type: ignore[arg-type, call-overload, no-any-return]

    monkeypatch.setattr(os, "open", open_)
    return refused.__setitem__
