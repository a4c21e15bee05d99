"""``python -m shardwright.cpu_mode script.py arguments`` or ``... -m module arguments``."""

import sys
from collections.abc import Callable

from shardwright.cpu_mode.activation import enable, from_command_line

_USAGE = """\
usage: python -m shardwright.cpu_mode SCRIPT [ARGUMENTS]
       python -m shardwright.cpu_mode -m MODULE [ARGUMENTS]

Runs a script that is written for CUDA on the CPU. docs/launch.md says what stands for what.
"""


def main(words: list[str]) -> Callable[[], None]:
    run = from_command_line(words, usage=_USAGE)
    enable()
    return run


if __name__ == "__main__":
    main(sys.argv[1:])()
