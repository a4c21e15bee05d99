"""What the package offers, and what it must not need."""

import subprocess
import sys

import shardwright.schedule

PUBLIC = [
    "KINDS",
    "Action",
    "Edge",
    "Event",
    "Kind",
    "Schedule",
    "Simulation",
    "StageCost",
    "build_schedule",
    "chain_edges",
    "lower",
    "place_stages",
    "simulate",
    "splits_backward",
    "unit_costs",
    "validate",
]


def test_public_names():
    assert shardwright.schedule.__all__ == PUBLIC
    assert all(hasattr(shardwright.schedule, name) for name in PUBLIC)


def test_scheduling_needs_no_framework():
    code = "import shardwright.schedule, sys; sys.exit('torch' in sys.modules or 'tensorflow' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
