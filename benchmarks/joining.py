"""What ranks ask of the store until `init` ends, and their connections, by their number.

    python benchmarks/joining.py [--ranks 16 64 128] [--of-host 8] [--json FILE]

Every rank is a process of this machine, forked from one that has imported the library, and takes itself for
one of a host with so many ranks. The first one serves the store, and has a connection of each other one. The
questions are counted where gloo, NCCL and the library ask them: at the sealed store.
"""

import argparse
import collections
import json
import os
import re
import secrets
import socket
import sys
import time
from pathlib import Path

import torch

import shardwright.torch as sw
from shardwright.comm import local_peers, pulse
from shardwright.comm.collectives import connect
from shardwright.comm.joining.store import SealedStore
from shardwright.testing.nursery import import_always

LAYOUTS = {
    "pipeline": {},
    "4 stages, shards": {"pipeline_parallel_degree": 4, "sharded_data_parallel_degree": 2},
    "replicas": {"pipeline_parallel_degree": 1, "plan_one_stage": True},
}
QUESTIONS = ("set", "get", "check", "wait", "add", "compare_set", "delete_key", "deleteKey")


def counting():
    """Counts the questions of this process from now on, by their kind and key."""
    counts = collections.Counter()
    inside = []

    def wrapped(name, ask):
        def counted(self, key, *rest):
            if not inside:  # a sealed store may stand on another
                first = key[0] if isinstance(key, list) else key
                counts[f"{name} {re.sub('[0-9a-f]{8,}', '#', re.sub('[0-9]+', 'N', first))}"] += 1
            inside.append(name)
            try:
                return ask(self, key, *rest)
            finally:
                inside.pop()

        return counted

    for name in QUESTIONS:
        setattr(SealedStore, name, wrapped(name, getattr(SealedStore, name)))
    return counts


def be_rank(rank, ranks, of_host, port, secret, settings, out):
    """Joins, counts, and waits until all have."""
    os.environ |= {
        "RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_RANK": str(rank % of_host),
        "LOCAL_WORLD_SIZE": str(of_host),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "SHARDWRIGHT_SECRET": secret,
        "SHARDWRIGHT_QUIET": "1",
    }
    host = f"host {rank // of_host}"
    local_peers.this_host = connect.this_host = pulse.space_of_processes = lambda: host
    before = sockets()
    counts = counting()
    begun_s, cpu_s = time.monotonic(), time.process_time()
    sw.init({"run_dir": "off", "profile": "estimated", "timeout_s": 600, **settings})
    found = {
        "seconds": time.monotonic() - begun_s,
        "cpu_s": time.process_time() - cpu_s,
        "sockets": sockets() - before,
        "questions": dict(counts),
    }
    torch.distributed.barrier()
    os.write(out, (json.dumps(found) + "\n").encode())
    sw.shutdown()


def sockets():
    names = [f"/proc/self/fd/{number}" for number in os.listdir("/proc/self/fd")]
    return sum(os.path.lexists(name) and os.readlink(name).startswith("socket:") for name in names)


def joined(ranks, of_host, settings):
    """What each of so many ranks has counted."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    secret = secrets.token_hex(32)
    ours, theirs = os.pipe()
    children = []
    for rank in range(ranks):
        child = os.fork()
        if child == 0:
            code = 1
            try:
                os.close(ours)
                be_rank(rank, ranks, of_host, port, secret, settings, theirs)
                code = 0
            finally:
                os._exit(code)
        children.append(child)
    os.close(theirs)
    with os.fdopen(ours) as lines:
        found = [json.loads(line) for line in lines]
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    if any(codes):
        sys.exit(f"ranks ended with {codes}")
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[16, 64, 128])
    parser.add_argument("--of-host", type=int, default=8)
    parser.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=list(LAYOUTS))
    parser.add_argument("--detail", action="store_true", help="the questions of the rank that asks most")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    import_always()  # a forked rank would import it for itself
    rows = []
    print(f"{'layout':18} ranks  questions: median  most   all  sockets: median  CPU s a rank  seconds")
    for layout in options.layouts:
        for ranks in options.ranks:
            found = joined(ranks, options.of_host, LAYOUTS[layout])
            asked = sorted(sum(each["questions"].values()) for each in found)
            row = {
                "layout": layout,
                "ranks": ranks,
                "median": asked[len(asked) // 2],
                "most": asked[-1],
                "all": sum(asked),
                "sockets": sorted(each["sockets"] for each in found)[len(found) // 2],
                "cpu_s": sum(each["cpu_s"] for each in found) / ranks,
                "seconds": max(each["seconds"] for each in found),
            }
            rows.append(row)
            print(
                f"{layout:18} {ranks:5}  {row['median']:17}  {row['most']:4}  {row['all']:5}  "
                f"{row['sockets']:15}  {row['cpu_s']:12.3f}  {row['seconds']:7.2f}",
                flush=True,
            )
            if options.detail:
                most = max(found, key=lambda each: sum(each["questions"].values()))
                for question, count in sorted(most["questions"].items(), key=lambda each: -each[1]):
                    print(f"    {count:5} {question}")
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
