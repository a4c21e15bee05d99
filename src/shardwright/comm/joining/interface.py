"""The network interface over which ranks talk.

Gloo takes the one to which the name of its host resolves: on Debian, and where an image names its host in
/etc/hosts, loopback, over which no other host is reached.
"""

import fcntl
import os
import socket
import struct
from collections.abc import MutableMapping
from contextlib import suppress

_GLOO, _NCCL = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"
_ASK_FOR_ADDRESS = 0x8915  # SIOCGIFADDR of Linux
_NAME_BYTES = 16
_ELSEWHERE = "198.51.100.1"
"""An address that nobody has: the way to it is the way to all that is not near."""


def stay_on_this_host(environ: MutableMapping[str, str] = os.environ) -> None:
    """Has gloo and NCCL use the loopback interface, for ranks that are all on one host.

    Other hosts have nothing to do there, and gloo would look up the host's name, which need not resolve.
    """
    names = [name for _, name in socket.if_nameindex()]
    loopback = next((name for name in ("lo", "lo0") if name in names), None)
    if loopback is not None:
        environ.setdefault(_GLOO, loopback)
        environ.setdefault(_NCCL, loopback)


def take_interface_towards(host: str, environ: MutableMapping[str, str] = os.environ) -> None:
    """Has gloo use the interface from which the host of rank 0 is reached, unless one is named."""
    if host == "localhost" or host.startswith("127."):
        stay_on_this_host(environ)  # "hosts" that reach each other there are one
    elif not environ.get(_GLOO) and (name := _interface_towards(host)):
        environ[_GLOO] = name


def _interface_towards(host: str) -> str | None:
    """The name; None where it cannot be told, as with addresses of IPv6 alone."""
    addresses = _addresses()
    own = own_address_towards(host)
    if own is None or own.startswith("127."):  # the host is this one, and its name leads to loopback
        own = own_address_towards(_ELSEWHERE)
    outer = {name: address for name, address in addresses.items() if not address.startswith("127.")}
    by_route = next((name for name, address in outer.items() if address == own), None)
    return by_route or next(iter(outer), None)


def own_address_towards(host: str) -> str | None:
    """The address that a packet to a host would come from; none is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host, 9))
            return str(probe.getsockname()[0])
        except OSError:
            return None


def _addresses() -> dict[str, str]:
    """The address of each interface that has one, of IPv4."""
    found = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with suppress(OSError):
                asked = struct.pack(f"{_NAME_BYTES}s16x", name.encode()[: _NAME_BYTES - 1])
                answer = fcntl.ioctl(probe.fileno(), _ASK_FOR_ADDRESS, asked)
                found[name] = socket.inet_ntoa(answer[20:24])
    return found
