"""``python -m smdistributed.sagemaker install``, or ``uninstall``."""

import sys

from smdistributed import sagemaker
from smdistributed.installing import run_command

if __name__ == "__main__":
    sys.exit(run_command(sagemaker, sys.argv[1:]))
