"""What `make demo-tensorflow` runs: examples/train_keras.py over two processes, checked against one process.

Every loss must agree within 1e-4. Prints the seconds of a step in both.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

EXAMPLE = str(Path(__file__).with_name("train_keras.py"))
TOLERANCE = 1e-4


def trained(command: list[str]) -> dict[str, Any]:
    """Trains by a command; returns what the example prints."""
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "TF_CPP_MIN_LOG_LEVEL": "3"}
    done = subprocess.run(command, env=environ, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        sys.exit(f"demo failed: {' '.join(command)} ended with {done.returncode}")
    line = next(line for line in done.stdout.splitlines() if '"losses"' in line)
    found: dict[str, Any] = json.loads(line[line.index("{") :])  # the launcher says whose line it is
    return found


def main() -> None:
    """Trains twice, compares, prints."""
    print("training over two processes ...", file=sys.stderr)
    two = trained([sys.executable, *"-m shardwright run -n 2".split(), EXAMPLE, *sys.argv[1:]])
    print("the same in one process, one thread ...", file=sys.stderr)
    one = trained([sys.executable, EXAMPLE, *sys.argv[1:]])
    apart = max(abs(a - b) for a, b in zip(one["losses"], two["losses"], strict=True))
    print(f"  loss {two['losses'][0]:.3f} -> {two['losses'][-1]:.3f} in {len(two['losses'])} steps")
    print(f"  one process and two: losses within {apart:.1e} ({TOLERANCE:g} is allowed)")
    speedup = one["step_s"] / two["step_s"]
    print(
        f"  a step takes {one['step_s'] * 1e3:.0f} ms in one process, {two['step_s'] * 1e3:.0f} ms in two: "
        f"{speedup:.2f} times as fast"
    )
    if not apart <= TOLERANCE:
        sys.exit("demo failed: two processes and one do not train alike")


if __name__ == "__main__":
    main()
