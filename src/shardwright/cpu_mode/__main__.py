"""``python -m shardwright.cpu_mode script.py arguments`` or ``... -m module arguments``."""

import sys
from collections.abc import Callable

from shardwright.cpu_mode.activation import enable
from shardwright.cpu_mode.script import module, script
from shardwright.errors import UsageError
from shardwright.exit_codes import USAGE

_USAGE = """\
usage: python -m shardwright.cpu_mode SCRIPT [ARGUMENTS]
       python -m shardwright.cpu_mode -m MODULE [ARGUMENTS]

Runs a script that is written for CUDA on the CPU. docs/launch.md says what stands for what.
"""


def main(words: list[str]) -> Callable[[], None]:
    """Activates CPU mode, and returns what the command line says to run."""
    is_module = words[:1] == ["-m"]
    target = words[is_module : is_module + 1]
    if not target or target[0] in ("-h", "--help"):
        sys.stderr.write(_USAGE)
        sys.exit(0 if target else USAGE)
    find = module if is_module else script
    try:
        run = find(target[0], words[is_module + 1 :])
    except UsageError as error:
        sys.stderr.write(f"error: {error}\n")
        sys.exit(USAGE)
    enable()
    return run


if __name__ == "__main__":
    main(sys.argv[1:])()
