"""Where the ranks of a job meet, for scripts that leave it to their launcher.

`torch.distributed` reads ``RANK``, ``WORLD_SIZE``, ``MASTER_ADDR`` and ``MASTER_PORT``. torchrun sets them;
mpirun, srun and others tell the same under other names, and nobody tells a script that runs alone.
"""

import os
import socket
from collections.abc import MutableMapping

from shardwright.comm.joining.interface import stay_on_this_host, take_interface_towards
from shardwright.comm.launchers import LaunchEnvironment, detect


def tell_torch(environ: MutableMapping[str, str] = os.environ) -> LaunchEnvironment:
    """Sets what `torch.distributed` reads, as far as the launcher has not."""
    server = environ.get("SMDATAPARALLEL_SERVER_ADDR")  # what smddprun says of the first host
    if server and not environ.get("MASTER_ADDR"):
        environ["MASTER_ADDR"] = server
        if server_port := environ.get("SMDATAPARALLEL_SERVER_PORT"):
            environ.setdefault("MASTER_PORT", server_port)
    environment = detect(environ)
    port = _free_port() if environment.world_size == 1 else environment.master_port
    for name, value in (
        ("RANK", environment.rank),
        ("WORLD_SIZE", environment.world_size),
        ("LOCAL_RANK", environment.local_rank),
        ("LOCAL_WORLD_SIZE", environment.local_world_size),
        ("MASTER_ADDR", environment.master_addr),
        ("MASTER_PORT", port),
        ("SMDATAPARALLEL_LOCAL_RANK", environment.local_rank),
    ):
        environ.setdefault(name, str(value))
    if environment.num_nodes == 1:
        stay_on_this_host(environ)
    else:
        take_interface_towards(environment.master_addr, environ)
    return environment


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
