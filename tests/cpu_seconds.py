"""Counts the CPU seconds of a session and of each test, those of every process that they start included.

With ``--cpu-budget``, as CI gives it, a session ends with its ten dearest tests and fails where it took more:
a suite grows test by test, and nobody sees it. CPU seconds, since a clock also counts those who share the
machine; and as many more as a fixed loop takes here than where the budgets were taken, since the next machine
may be half as fast.
"""

import math
import os
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

__all__ = ["CpuSeconds", "descendants_s", "this_session_s", "yardsticks"]

NUM_SHOWN = 10

_YARDSTICK_S = 0.020
"""CPU seconds of the fixed loop on the machine on which the budgets were taken."""
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


class CpuSeconds:
    """The plugin: every process notes what its tests take, the first one adds up.

    Args:
        budget_s: CPU seconds that the session may take on a machine like that of the budgets.
    """

    def __init__(self, budget_s: float) -> None:
        self._budget_s = budget_s
        self._at_last_report_s = this_session_s()
        self._of_tests_s: dict[str, float] = defaultdict(float)
        self._speed = yardsticks()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self) -> Iterator[None]:
        """In the process that runs a test; what is added to a report travels with it."""
        report: Any = yield
        now_s = this_session_s()
        report.cpu_s, self._at_last_report_s = now_s - self._at_last_report_s, now_s
        return report

    def pytest_runtest_logreport(self, report: Any) -> None:
        """In the first process."""
        if report.when == "call":  # the setup of the first test of a process starts a fork server
            self._of_tests_s[report.nodeid] += report.cpu_s

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> Iterator[None]:
        """The outermost: workers of xdist have ended, and the summary is written."""
        result = yield
        reporter = session.config.pluginmanager.get_plugin("terminalreporter")
        if reporter is None or hasattr(session.config, "workerinput"):
            return result
        taken_s, allowed_s = this_session_s(), self._budget_s * max(self._speed, yardsticks())
        reporter.section(f"the {NUM_SHOWN} tests with the most CPU seconds")
        dearest = sorted(self._of_tests_s.items(), key=lambda each: -each[1])[:NUM_SHOWN]
        for test, seconds in dearest:
            reporter.line(f"{seconds:7.2f} s  {test}")
        said = f"{taken_s:.0f} CPU seconds of {allowed_s:.0f}"
        if allowed_s != self._budget_s:
            said += f" ({self._budget_s:.0f}, on a machine of {allowed_s / self._budget_s:.2f} yardsticks)"
        reporter.line(said)
        if taken_s > allowed_s:
            reporter.line(
                "That is over the budget. Make the dearest cheaper, mark them thorough or sweep "
                "(tests/choices.py), or raise the budget in the Makefile and say why.",
                red=True,
            )
            session.exitstatus = session.exitstatus or pytest.ExitCode.TESTS_FAILED
        return result


def this_session_s() -> float:
    """CPU seconds of this process, of those that it has waited for, and of those that run."""
    return sum(os.times()[:4]) + descendants_s(os.getpid())


def descendants_s(pid: int) -> float:
    """CPU seconds of the living descendants of a process and of those that they have waited for."""
    total_s = 0.0
    for child in _children(pid):
        total_s += _seconds(child) + descendants_s(child)
    return total_s


def _children(pid: int) -> list[int]:
    found: list[int] = []
    for task in _entries(Path(f"/proc/{pid}/task")):
        found.extend(map(int, _text(task / "children").split()))
    return found


def _entries(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except OSError:  # it has ended while we looked, or there is no /proc
        return []


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def _seconds(pid: int) -> float:
    fields = _text(Path(f"/proc/{pid}/stat")).rpartition(")")[2].split()
    return sum(map(int, fields[11:15])) / _TICKS_PER_S


def yardsticks() -> float:
    """How many times what the fixed loop takes where the budgets were taken, it takes here; never below 1."""
    taken_s = math.inf
    for _ in range(5):
        begun_s = time.process_time()
        _loop()
        taken_s = min(taken_s, time.process_time() - begun_s)
    return max(1.0, taken_s / _YARDSTICK_S)


def _loop() -> None:
    """What tests do most: calls, dictionaries, small lists."""
    table: dict[int, list[int]] = {}
    for number in range(200_000):
        table.setdefault(number % 977, []).append(math.isqrt(number))
    sorted(table.items(), key=lambda each: sum(each[1]))
