"""``python -m smdistributed.horovod install``, or ``uninstall``."""

import sys

from smdistributed import horovod
from smdistributed.installing import run_command

if __name__ == "__main__":
    sys.exit(run_command(horovod, sys.argv[1:]))
