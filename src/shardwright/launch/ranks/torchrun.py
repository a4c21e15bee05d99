"""The torchrun command line equivalent to `shardwright run`."""

import shlex
from collections.abc import Iterable, Mapping

from shardwright.launch.ranks.request import LaunchRequest

__all__ = ["as_it_is", "torchrun_command", "torchrun_line"]


def as_it_is(words: Iterable[str]) -> list[str]:
    """Words that reach scripts unchanged: torchelastic takes each for a template, for `${local_rank}`.

    >>> as_it_is(["pa$$word", "--epochs"])
    ['pa$$$$word', '--epochs']
    """
    return [word.replace("$", "$$") for word in words]


def torchrun_command(request: LaunchRequest) -> list[str]:
    """The words of the command line."""
    words = ["torchrun"]
    if request.num_nodes == 1:
        words += ["--standalone", "--local-addr=127.0.0.1"]
    elif request.node_rank is None:
        words += [
            f"--nnodes={request.num_nodes}",
            "--rdzv-backend=c10d",
            f"--rdzv-endpoint={request.endpoint}",
        ]
    else:
        host, _, port = (request.endpoint or "").rpartition(":")
        words += [f"--nnodes={request.num_nodes}", f"--node-rank={request.node_rank}"]
        words += [f"--master-addr={host}", f"--master-port={port}"]
    words += [f"--nproc-per-node={request.num_ranks}", f"--max-restarts={request.max_restarts}"]
    words += [f"--log-dir={request.logs}", "--redirects=3", "--tee=3"]
    return [*words, *as_it_is(request.script)]


def torchrun_line(request: LaunchRequest, environ: Mapping[str, str]) -> str:
    """The command line for a shell: makes the run folder, sets the variables, starts torchrun."""
    variables = [f"{name}={value}" for name, value in request.worker_environ(environ).items()]
    make_folder = shlex.join(["mkdir", "-p", str(request.logs)])
    return f"{make_folder} && {shlex.join(['env', *variables, *torchrun_command(request)])}"
