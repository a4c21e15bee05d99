"""The host at which several hosts meet: its name is checked before ranks start, and a wait for it is told.

A name that does not resolve is mostly a typo, and nobody comes to it. Kubernetes knows the name of a pod some
seconds after the pod, so there it is waited for.
"""

import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from shardwright.errors import LaunchError
from shardwright.quantities import counted

__all__ = ["check_endpoint", "told_if_long"]

_TRIES_S = 2.0
"""A resolver that has just started may need a second question."""
_NEW_POD_S = 300.0
_BETWEEN_S = 1.0
_PATIENCE_S = 5.0


def check_endpoint(
    endpoint: str,
    environ: Mapping[str, str],
    *,
    say: Callable[[str], None],
    resolve: Callable[[str], object] = lambda name: socket.getaddrinfo(name, None),
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Refuses an endpoint whose host has no address here.

    Args:
        endpoint: where the hosts meet, as ``host:port``.
        environ: variables of this process; those of Kubernetes tell that a name may come later.
        say: takes a line for the user.
        resolve: raises `OSError` where a name has no address.
        clock: seconds from any fixed point.
        sleep: waits for so many seconds.

    Raises:
        LaunchError: the name does not resolve.
    """
    name = _host(endpoint)
    is_pod = "KUBERNETES_SERVICE_HOST" in environ
    begun_s, said = clock(), False
    while True:
        try:
            resolve(name)
        except OSError as error:
            if clock() - begun_s >= (_NEW_POD_S if is_pod else _TRIES_S):
                raise LaunchError(
                    f"--rdzv-endpoint {endpoint}: the host name {name} does not resolve here "
                    f"({error.strerror}). Give a name or an address of one of the hosts that all know."
                ) from error
            if is_pod and not said:
                say(f"waiting for the name {name}, which does not resolve yet; at most {_NEW_POD_S:g} s")
                said = True
            sleep(_BETWEEN_S)
        else:
            return


@contextmanager
def told_if_long(endpoint: str, num_hosts: int, say: Callable[[str], None]) -> Iterator[None]:
    """Says once what is waited for, if the hosts have not met after 5 s.

    Args:
        endpoint: where they meet.
        num_hosts: how many they are.
        say: takes a line for the user; called from another thread.
    """
    timer = threading.Timer(_PATIENCE_S, lambda: say(_waiting(endpoint, num_hosts)))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _waiting(endpoint: str, num_hosts: int) -> str:
    """What is true of the endpoint at this moment."""
    try:
        socket.create_connection((_host(endpoint), int(endpoint.rpartition(":")[2])), timeout=3).close()
    except OSError as error:
        return (
            f"waiting: nothing answers at {endpoint} yet ({error.strerror or error}). The same command must "
            f"run on that host, too, and the port be free and open there"
        )
    return (
        f"waiting at {endpoint} until {counted(num_hosts, 'host')} are there: start the same command on each "
        "of them"
    )


def _host(endpoint: str) -> str:
    return endpoint.rpartition(":")[0].strip("[]")
