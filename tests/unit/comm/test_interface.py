"""Which interface gloo takes: the one that leads to rank 0, and not the one of the host's name."""

import pytest

from shardwright.comm.joining import interface
from shardwright.comm.joining.interface import take_interface_towards

ADDRESSES = {"lo": "127.0.0.1", "eth0": "10.0.0.5", "ib0": "10.9.0.5"}


@pytest.fixture
def routes(monkeypatch):
    """From which address each host is reached; another host: by the default route."""
    found = {"head": "10.9.0.5", interface._ELSEWHERE: "10.0.0.5"}
    monkeypatch.setattr(interface, "_addresses", lambda: ADDRESSES)
    monkeypatch.setattr(interface, "own_address_towards", found.get)
    return found


def taken(host, **environ):
    take_interface_towards(host, environ)
    return environ.get("GLOO_SOCKET_IFNAME")


def test_the_interface_of_the_route(routes):
    assert taken("head") == "ib0"


def test_a_name_that_leads_to_loopback_is_this_host(routes):
    """As Debian names a host in its own /etc/hosts: rank 0 waited there, where nobody else comes."""
    routes["head"] = "127.0.1.1"
    assert taken("head") == "eth0"


def test_without_a_route_the_first_that_leads_out(routes):
    routes.clear()
    assert taken("head") == "eth0"


def test_hosts_that_meet_on_loopback_are_one(routes):
    assert taken("127.0.0.1") in ("lo", "lo0")
    assert taken("localhost") in ("lo", "lo0")


def test_what_is_named_stays(routes):
    assert taken("head", GLOO_SOCKET_IFNAME="eth7") == "eth7"


def test_a_machine_with_loopback_alone_is_left_to_gloo(monkeypatch):
    monkeypatch.setattr(interface, "_addresses", lambda: {"lo": "127.0.0.1"})
    monkeypatch.setattr(interface, "own_address_towards", lambda host: None)
    assert taken("head") is None


def test_this_machine_s_own_interfaces_have_addresses():
    assert set(interface._addresses().values()) >= {"127.0.0.1"}
    assert interface.own_address_towards("127.0.0.1") == "127.0.0.1"
    assert interface.own_address_towards("no.such.name.invalid") is None
