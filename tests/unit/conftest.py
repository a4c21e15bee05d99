"""Settings of the unit tests."""

import signal
from collections.abc import Iterator

import pytest
from hypothesis import settings

# The machine is shared: how long one example takes says nothing about the code.
settings.register_profile("shared", deadline=None)
settings.load_profile("shared")


@pytest.fixture
def in_time() -> Iterator[None]:
    """Nothing waits, for example for somebody who writes to a pipe."""

    def late(*_: object) -> None:
        raise TimeoutError("it took more than 60 s")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(60)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)
