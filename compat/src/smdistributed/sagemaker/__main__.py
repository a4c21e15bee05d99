"""``python -m smdistributed.sagemaker install``, or ``uninstall``."""

import sys

from smdistributed import sagemaker


def main(words: list[str]) -> int:
    """Runs a command; gives the exit status."""
    commands = {"install": sagemaker.install, "uninstall": sagemaker.uninstall}
    if len(words) != 1 or words[0] not in commands:
        sys.stderr.write("Usage: python -m smdistributed.sagemaker install | uninstall\n")
        return 2
    try:
        said = commands[words[0]]()
    except OSError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    sys.stdout.write(f"{said}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
