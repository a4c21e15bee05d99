"""What it takes to note an action on the page of a rank, and the beat of its pulse."""

import sys
import tempfile
import time
from pathlib import Path

from shardwright.comm.pulse import Pulse
from shardwright.flight_record import NEXT, code_of

BEAT_EACH_S = 0.5
_NOTES, _BEATS = 100_000, 500


def cost_of_notes() -> tuple[float, float]:
    """Seconds of processor time for the notes of an action, and for a beat with a stack of usual length."""
    pulse = Pulse(0)
    with tempfile.TemporaryDirectory() as folder:
        pulse.keep_in(Path(folder), world_size=1)
        stack = "\n".join(f"  {__file__}:{line} in cost_of_notes" for line in range(12))

        def beat() -> None:
            pulse.page.beat(waits=True, does="in step 3", stack=stack, waits_for=(1,))
            pulse._keep()

        begun_s = time.thread_time()
        _notes_of_loop(pulse.page.cells)
        note_s = (time.thread_time() - begun_s) / _NOTES
        begun_s = time.thread_time()
        for _ in range(_BEATS):
            beat()
        beat_s = (time.thread_time() - begun_s) / _BEATS
        pulse.rest()
    return note_s, beat_s


def _notes_of_loop(cells: "memoryview[float]") -> None:
    """What `run_actions` does for each action, besides its work."""
    at, code = 0, code_of(1, 0, 3)
    for _ in range(_NOTES):
        at = NEXT[at]
        start_s = time.perf_counter()
        cells[at], cells[at + 1], cells[at + 2] = code, start_s, 0.0
        cells[at + 2] = start_s
        cells[at + 3] = 0.0


if __name__ == "__main__":
    note_s, beat_s = cost_of_notes()
    sys.stdout.write(f"{note_s * 1e6:.2f} us an action, {beat_s * 1e6:.0f} us a beat\n")
