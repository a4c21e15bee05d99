"""What ``shardwright doctor --gpus`` runs: each path of the library that touches a GPU, on the user's own.

No machine that this library is tested on has a GPU. `CHECKS` is thus the list of what has never run there;
the tests run the same functions on CPUs, as far as these can.
"""

from shardwright.testing.gpu_checks.runner import Machine, Result, run_checks
from shardwright.testing.gpu_checks.table import CHECKS, Check

__all__ = ["CHECKS", "Check", "Machine", "Result", "run_checks"]
