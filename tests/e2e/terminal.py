"""A process on a terminal of 80 columns."""

import fcntl
import os
import pty
import re
import signal
import struct
import subprocess
import termios
from collections.abc import Sequence
from pathlib import Path

__all__ = ["OnTerminal"]


class OnTerminal:
    """Starts a command whose output goes to a terminal, and reads what stands there."""

    def __init__(self, command: Sequence[str], folder: Path) -> None:
        self._master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
        own = {name: value for name, value in os.environ.items() if name not in ("CI", "COLUMNS", "NO_COLOR")}
        self.process = subprocess.Popen(
            command,
            stdin=slave,
            stdout=slave,
            stderr=slave,
            cwd=folder,
            env={**own, "TERM": "xterm"},
            preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),  # the tests may run under nohup
        )
        os.close(slave)
        self.text = ""

    def read_until(self, wanted: str) -> None:
        """Reads until the terminal has had a text."""
        while wanted not in self.text:
            assert self._read(), f"it never said {wanted!r}: {self.text}"

    def read_to_end(self, *, timeout_s: float = 60.0) -> int:
        """Reads all; returns the exit code."""
        while self._read():
            pass
        os.close(self._master)
        return self.process.wait(timeout_s)

    def _read(self) -> bool:
        try:
            data = os.read(self._master, 4096)
        except OSError:  # of Linux, once no process has the terminal any more
            return False
        self.text += data.decode(errors="replace")
        return bool(data)

    @property
    def lines(self) -> list[str]:
        """What stays on the terminal: of a line that was rewritten, its last state; without colours."""
        plain = re.sub("\x1b\\[[0-9]*[mK]", "", self.text).replace("\r\n", "\n")
        return [next(filter(None, reversed(line.split("\r"))), "") for line in plain.split("\n")]
