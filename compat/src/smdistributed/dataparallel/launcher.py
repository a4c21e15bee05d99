"""``smddprun`` and ``smddpmprun``: commands that stand between mpirun and Python in SageMaker's containers.

They set up the library's own servers there. Here there are none, so that they become what they are given.
"""

import argparse
import os
import sys
from collections.abc import Sequence


def main(words: Sequence[str] | None = None) -> None:
    """Becomes the command behind the options: ``smddpmprun -i ml.p4d.24xlarge --allow-bypass python ...``."""
    parser = argparse.ArgumentParser(description="Runs a command, as SageMaker's launcher of this name does.")
    parser.add_argument("-i", "--instance-type", help="taken, without a meaning here")
    parser.add_argument("--allow-bypass", action="store_true", help="taken, without a meaning here")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="for example: python train.py")
    command = parser.parse_args(words).command
    if not command:
        parser.error("a command is missing. For example: smddprun python train.py")
    try:
        os.execvp(command[0], command)
    except OSError as error:
        sys.exit(f"{command[0]} cannot be started: {error.strerror}")
