"""``python -m shardwright.integrations script.py``: runs a script written for other libraries."""

import importlib
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

from shardwright.after_import import after_import
from shardwright.cpu_mode.activation import from_command_line

_STANDS_IN = {
    "accelerate": "shardwright.integrations.accelerate",
    "transformers.trainer": "shardwright.integrations.transformers",
    "lightning.pytorch": "shardwright.integrations.lightning",
}
"""A module -> that whose public names stand for its own.

Not ``transformers``: peft imports it while half of peft is there, and the Trainer asks for the other half.
"""

_USAGE = """\
usage: python -m shardwright.integrations SCRIPT [ARGUMENTS]
       python -m shardwright.integrations -m MODULE [ARGUMENTS]

Runs a script with Shardwright in the place of transformers.Trainer, accelerate.Accelerator and, for
Lightning, with the strategy "shardwright" known by that name. docs/ecosystem.md says what works.
"""


def main(words: list[str]) -> Callable[[], None]:
    """Has ours stand for the classes of other libraries, and returns what the command line says to run."""
    run = from_command_line(words, usage=_USAGE)
    for library, ours in _STANDS_IN.items():
        after_import(library, partial(_import_once, ours))
        after_import(ours, partial(_stand_in, library))
    return run


def _import_once(ours: str, _: Any) -> None:
    """Imports our module, unless it is what imports the library right now."""
    if ours not in sys.modules:
        importlib.import_module(ours)


def _stand_in(library: str, ours: Any) -> None:
    """Puts our classes in the place of those of the same names; the strategy registers itself."""
    for name in ours.__all__:
        if hasattr(sys.modules[library], name):
            setattr(sys.modules[library], name, getattr(ours, name))


if __name__ == "__main__":
    main(sys.argv[1:])()
