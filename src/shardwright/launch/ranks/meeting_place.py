"""The host at which several hosts meet: its name is checked before ranks start, and a wait for it is told.

A name that does not resolve is mostly a typo, and nobody comes to it. Kubernetes knows the name of a pod some
seconds after the pod, so there it is waited for.
"""

import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from shardwright.errors import LaunchError
from shardwright.quantities import counted

_TRIES_S = 2.0
"""A resolver that has just started may need a second question."""
_NEW_POD_S = 300.0
_BETWEEN_S = 1.0
_PATIENCE_S = 5.0
_CONNECTING_S = 3.0


def check_endpoint(
    endpoint: str,
    environ: Mapping[str, str],
    *,
    say: Callable[[str], None],
    resolve: Callable[[str], object] = lambda name: socket.getaddrinfo(name, None),
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Refuses an endpoint whose host has no address here."""
    name = _host(endpoint)
    is_pod = "KUBERNETES_SERVICE_HOST" in environ
    begun_s, said = clock(), False
    while True:
        try:
            resolve(name)
        except (OSError, UnicodeError) as error:  # the latter for what is no name, as "a..b"
            if clock() - begun_s >= (_NEW_POD_S if is_pod else _TRIES_S):
                reason = getattr(error, "strerror", None) or error
                raise LaunchError(
                    f"--rdzv-endpoint {endpoint}: the host name {name} does not resolve here "
                    f"({reason}). Give a name or an address of one of the hosts that all know."
                ) from error
            if is_pod and not said:
                say(f"waiting for the name {name}, which does not resolve yet; at most {_NEW_POD_S:g} s")
                said = True
            sleep(_BETWEEN_S)
        else:
            return


def wait_until_answered(
    host: str,
    port: int,
    *,
    limit_s: float,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Waits until something listens at an address."""
    end_s = clock() + limit_s
    while True:
        try:
            socket.create_connection((host, port), timeout=_CONNECTING_S).close()
        except OSError as error:
            if clock() > end_s:
                raise TimeoutError(
                    f"nothing has answered at {host}:{port} in {limit_s:g} s ({error})"
                ) from error
            sleep(_BETWEEN_S)
        else:
            return


def is_own(host: str) -> bool:
    """Whether this host is meant: one of its addresses, for no other can be bound, or its own name."""
    try:
        found = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
    except OSError:
        found = []
    return any(map(_can_be_bound, found)) or host in (socket.gethostname(), socket.getfqdn())


@contextmanager
def told_if_long(endpoint: str, num_hosts: int, say: Callable[[str], None]) -> Iterator[None]:
    """Says once what is waited for, if the hosts have not met after 5 s."""
    timer = threading.Timer(_PATIENCE_S, lambda: say(_waiting(endpoint, num_hosts)))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _can_be_bound(found: tuple[Any, ...]) -> bool:
    """Whether an address, as the resolver has found it, is one of this host."""
    family, kind, _, _, address = found
    try:
        with socket.socket(family, kind) as probe:
            probe.bind(address)
    except OSError:
        return False
    return True


def _waiting(endpoint: str, num_hosts: int) -> str:
    """What is true of the endpoint at this moment."""
    try:
        port = int(endpoint.rpartition(":")[2])
        socket.create_connection((_host(endpoint), port), timeout=_CONNECTING_S).close()
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
