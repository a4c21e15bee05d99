"""The TCP store at which the ranks of a job meet; on one host, nobody else can reach its port."""

import errno
import socket
from datetime import timedelta

from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]

from shardwright.comm.identity.launch_environment import LaunchEnvironment
from shardwright.errors import LaunchError

__all__ = ["LOOPBACK", "joined_tcp_store", "loopback_tcp_store"]

LOOPBACK = "127.0.0.1"


def loopback_tcp_store(port: int = 0, *, timeout_s: float = 300.0) -> TCPStore:
    """Serves a store on the loopback interface alone, where PyTorch would listen on all of them."""
    timeout = timedelta(seconds=timeout_s)
    try:
        listening = _listening(port)
    except OSError as error:
        # This process may serve one there already, which the next group of the same ranks shares.
        if error.errno != errno.EADDRINUSE or port not in _SERVED:
            raise
        return TCPStore(
            LOOPBACK, port, is_master=True, timeout=timeout, wait_for_workers=False, multi_tenant=True
        )
    port = int(listening.getsockname()[1])
    _SERVED.add(port)
    return TCPStore(
        LOOPBACK,
        port,
        is_master=True,
        timeout=timeout,
        wait_for_workers=False,
        multi_tenant=True,
        master_listen_fd=listening.detach(),  # from here on it is the store's
    )


# Ports at which this process has served a store: PyTorch serves one a port and process.
_SERVED: set[int] = set()


def _listening(port: int) -> socket.socket:
    made = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # after a run that has just ended
        made.bind((LOOPBACK, port))
        made.listen(socket.SOMAXCONN)
    except BaseException:
        made.close()
        raise
    return made


def joined_tcp_store(environment: LaunchEnvironment, *, timeout_s: float) -> Store:
    """Joins the store of a job, or serves it."""
    host, port = environment.master_addr, environment.master_port
    serves = environment.rank == 0 and not environment.launcher_serves_store
    if environment.num_nodes == 1 and not environment.launcher_serves_store:
        host = LOOPBACK  # whatever this host is called
    try:
        if serves and environment.num_nodes == 1:
            return loopback_tcp_store(port, timeout_s=timeout_s)
        socket.getaddrinfo(host, port)
        return TCPStore(
            host,
            port,
            is_master=serves,
            timeout=timedelta(seconds=timeout_s),
            wait_for_workers=False,
            multi_tenant=True,
        )
    except socket.gaierror as error:
        raise LaunchError(
            f"{environment}: the host name {host!r} does not resolve ({error.strerror}). "
            "Set MASTER_ADDR to a name or an address of rank 0 that all hosts know."
        ) from error
    except (RuntimeError, OSError) as error:
        raise LaunchError(_no_store(environment, serves=serves, timeout_s=timeout_s, error=error)) from error


def _no_store(environment: LaunchEnvironment, *, serves: bool, timeout_s: float, error: Exception) -> str:
    address = f"{environment.master_addr}:{environment.master_port}"
    first_line = str(error).splitlines()[0]
    if serves:
        return (
            f"{environment} cannot serve the store at {address}: {first_line}. "
            "If another job has the port, set MASTER_PORT to a free one."
        )
    whose = "the launcher" if environment.launcher_serves_store else "rank 0"
    return (
        f"{environment} did not reach the store of {whose} at {address} within {timeout_s:g} s: {first_line}."
        " Check that it runs, that MASTER_ADDR and MASTER_PORT are right, and that no firewall is between."
    )
