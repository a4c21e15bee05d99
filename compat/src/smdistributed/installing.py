"""What names of other libraries share that are there on request: ``python -m NAME install | uninstall``."""

import sys
import sysconfig
from pathlib import Path
from types import ModuleType


def run_command(module: ModuleType, words: list[str]) -> int:
    """Runs `install` or `uninstall` of a module; gives the exit status."""
    if words not in (["install"], ["uninstall"]):
        sys.stderr.write(f"Usage: python -m {module.__name__} install | uninstall\n")
        return 2
    try:
        said = getattr(module, words[0])()
    except OSError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    sys.stdout.write(f"{said}\n")
    return 0


def path_of(name: str) -> Path:
    """A file that this environment's Python reads when it starts."""
    return Path(sysconfig.get_path("purelib")) / name


def remove(path: Path) -> str:
    """Takes such a file away; gives a sentence that says what was done."""
    if not path.exists():
        return f"{path} is not there: nothing to do."
    path.unlink()
    return f"{path} was removed."
