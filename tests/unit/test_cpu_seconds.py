"""What a session of tests takes is counted, and a budget holds."""

import subprocess
import sys
from pathlib import Path

import pytest

from choices import thorough
from cpu_seconds import this_session_s

BURN = "import sys, time\nwhile time.process_time() < 0.3: pass\nprint(flush=True)\nsys.stdin.read()"


def test_processes_count_while_they_run_and_when_they_have_ended() -> None:
    """A fork server runs until the end, and its ranks end with each test."""
    before_s = this_session_s()
    with subprocess.Popen(
        [sys.executable, "-c", BURN], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert this_session_s() - before_s > 0.25
        process.communicate()
    assert this_session_s() - before_s > 0.25


@pytest.mark.parametrize(
    ("budget_s", "code", "workers"),
    [("0.001", 1, ()), thorough("1000", 0, ("-n", "1"))],
)
def test_a_session_over_its_budget_fails(budget_s: str, code: int, workers: tuple[str, ...]) -> None:
    tests = Path(__file__).parent / "test_placement.py"
    command = [sys.executable, "-m", "pytest", "-q", str(tests), "--cpu-budget", budget_s, *workers]
    found = subprocess.run(command, capture_output=True, text=True)
    assert found.returncode == code, found.stdout + found.stderr
    assert ("That is over the budget" in found.stdout) == bool(code)
    assert "test_placement.py::" in found.stdout
