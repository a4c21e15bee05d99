"""The rendezvous of a job's launchers: torchelastic's, without strangers and without pickle.

==================  ==========================================================================================
hosts               store
==================  ==========================================================================================
one                 served on the loopback interface alone, where torchelastic's listen on all of them
several, numbered   at the first of them ("static" in torchelastic)
several             at the endpoint ("c10d"): its state, which torchelastic pickles, is JSON here
==================  ==========================================================================================

With a secret, all values carry its code.
"""

import contextlib
import json
import os
import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from datetime import datetime, timedelta
from typing import Any

from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    dynamic_rendezvous,
    rendezvous_handler_registry,
)
from torch.distributed.elastic.rendezvous.api import RendezvousClosedError
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend, create_backend
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint

from shardwright.comm.joining.run_secret import seal_of_run
from shardwright.comm.joining.store import LOOPBACK, SealedStore, loopback_tcp_store
from shardwright.launch.ranks.meeting_place import is_own, told_if_long, wait_until_answered

BACKEND = "shardwright"
"""The name of these ways in a LaunchConfig of torchelastic."""

_LONGEST_START_S = 600
_CONNECTING_S = 60.0
_BETWEEN_S = 0.2
_NO_PORT = -1  # a request has one


class NotAgainError(RuntimeError):
    """The ranks would fail again."""


def _handler(parameters: RendezvousParameters) -> RendezvousHandler:
    """The way for so many hosts, which refuses to have ranks start again in vain."""
    handler = _way(parameters)
    why_not: Callable[[], str] = parameters.get("why_not_again", str)
    meet = handler.next_rendezvous

    def meeting_unless_in_vain() -> RendezvousInfo:
        if why := why_not():
            close: Any = handler.set_closed
            close()  # so that other hosts do not wait
            raise NotAgainError(why)
        return meet()

    handler.next_rendezvous = meeting_unless_in_vain  # type: ignore[method-assign]
    return handler


def _way(parameters: RendezvousParameters) -> RendezvousHandler:
    if parameters.max_nodes == 1:
        return _OneHost(parameters.run_id)
    say: Callable[[str], None] = parameters.get("say", lambda _: None)

    def waiting() -> AbstractContextManager[None]:
        return told_if_long(parameters.endpoint, parameters.max_nodes, say)

    with waiting():  # for the store, which another host may serve
        numbered = parameters.get("rank") is not None
        handler = _numbered(parameters) if numbered else _numbering_themselves(parameters)
    meet = handler.next_rendezvous

    def told_meeting() -> RendezvousInfo:
        with waiting():
            return meet()

    handler.next_rendezvous = told_meeting  # type: ignore[method-assign]
    return handler


def _sealed(store: Store) -> Store:
    seal = seal_of_run(os.environ)
    return store if seal is None else SealedStore(store, seal)


class _OneHost(RendezvousHandler):
    """One host meets nobody, but ranks want a store."""

    def __init__(self, run_id: str) -> None:
        self._run_id = run_id
        self._server = loopback_tcp_store()
        self._store = _sealed(self._server)
        self._round = 0

    def get_backend(self) -> str:
        return BACKEND

    @property
    def use_agent_store(self) -> bool:
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        self._round += 1
        store = PrefixStore(f"{self._run_id}/{self._round}", self._store)
        return RendezvousInfo(store, 0, 1, RendezvousStoreInfo(LOOPBACK, self._server.port))

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        pass

    def num_nodes_waiting(self) -> int:
        return 0

    def get_run_id(self) -> str:
        return self._run_id

    def shutdown(self) -> bool:
        return True


class _Numbered(StaticTCPRendezvous):
    """Hosts that have numbers, with what they keep in the store sealed.

    They wait for one another here: neither Ctrl-C nor SIGTERM ends the waits of PyTorch's store.
    """

    def get_backend(self) -> str:
        return BACKEND

    def next_rendezvous(self) -> RendezvousInfo:
        if self._store is None:
            self._store = self._met()
        elif self._is_closed():
            raise RendezvousClosedError
        found = super().next_rendezvous()
        meeting: Any = found.bootstrap_store_info
        return RendezvousInfo(_sealed(found.store), found.rank, found.world_size, meeting)

    def set_closed(self) -> None:
        """Tells the other hosts not to start again."""
        if self._store is not None:
            with contextlib.suppress(RuntimeError):
                self._store.set(self._closed, "yes")

    @property
    def _closed(self) -> str:
        return f"{self.run_id}.closed"

    def _is_closed(self) -> bool:
        try:
            return self._store is not None and bool(self._store.check([self._closed]))
        except RuntimeError:  # it has gone with the host that served it
            return True

    def _met(self) -> Store:
        """The store, once all hosts are there."""
        limit_s = self.timeout.total_seconds()
        end_s = time.monotonic() + limit_s
        if self.rank:
            wait_until_answered(self.master_addr, self.master_port, limit_s=limit_s)
        store = TCPStore(
            self.master_addr,
            self.master_port,
            is_master=self.rank == 0,
            timeout=timedelta(seconds=_CONNECTING_S),
            wait_for_workers=False,
            multi_tenant=True,
        )
        # By number, as a host may come twice: its command was stopped, and started again.
        keys = [f"{self.run_id}.host.{rank}" for rank in range(self.world_size)]
        store.set(keys[self.rank], "here")
        while not store.check(keys):
            if time.monotonic() > end_s:
                missing = ", ".join(str(rank) for rank, key in enumerate(keys) if not store.check([key]))
                raise TimeoutError(f"no host with --node-rank {missing} came within {limit_s:g} s")
            time.sleep(_BETWEEN_S)
        store.set_timeout(self.timeout)
        return store


def _numbered(parameters: RendezvousParameters) -> RendezvousHandler:
    address, port = parse_rendezvous_endpoint(parameters.endpoint, _NO_PORT)
    return _Numbered(
        address, port, parameters.config["rank"], parameters.max_nodes, parameters.run_id, _LONGEST_START_S
    )


class _State(C10dRendezvousBackend):
    """Keeps the state of a rendezvous of hosts that have no numbers."""

    @property
    def name(self) -> str:
        return BACKEND


def _numbering_themselves(parameters: RendezvousParameters) -> RendezvousHandler:
    """Hosts that get their numbers in the order in which they come."""
    # Its only use of pickle is for its state. Tried on torch 2.13.
    dynamic_rendezvous.pickle = _StatesAsJson()  # type: ignore[assignment, attr-defined]
    host, port = parse_rendezvous_endpoint(parameters.endpoint, _NO_PORT)
    if not is_own(host):  # else this host may serve the store
        wait_until_answered(host, port, limit_s=_LONGEST_START_S)
    _, store = create_backend(parameters)
    sealed = _sealed(store)
    # Under a key of its own: torchelastic's has a value without a code already.
    backend = _State(sealed, f"{parameters.run_id}.{BACKEND}")
    # Each round tells, under a prefix of its own, where the ranks' store is: that is sealed, too.
    handler: Any = dynamic_rendezvous.create_handler(sealed, backend, parameters)
    meet = handler.next_rendezvous

    def meeting_with_newcomers() -> RendezvousInfo:
        # Kept from round to round, it would not be told again, and a host that is new waits for it.
        handler._bootstrap_store_info = None
        found: RendezvousInfo = meet()
        return found

    handler.next_rendezvous = meeting_with_newcomers
    made: RendezvousHandler = handler
    return made


class _StatesAsJson:
    """Stands where torchelastic looks for pickle, and writes and reads the states of a rendezvous alone."""

    class PickleError(ValueError):
        """The text at this place is no state."""

    def dumps(self, state: Any) -> bytes:
        """A state as JSON, the same for equal states."""
        return json.dumps(
            {
                "round": state.round,
                "complete": state.complete,
                "closed": state.closed,
                "deadline": None if state.deadline is None else state.deadline.isoformat(),
                "participants": _rows(state.participants.items(), lambda rank: rank),
                "wait_list": _rows((node, 0) for node in state.wait_list),
                "redundancy_list": _rows((node, 0) for node in state.redundancy_list),
                "last_heartbeats": _rows(state.last_heartbeats.items(), datetime.isoformat),
            }
        ).encode()

    def loads(self, text: bytes) -> Any:
        """The state in JSON, which a stranger may have written."""
        try:
            found = json.loads(text)
            state = dynamic_rendezvous._RendezvousState()
            state.round = int(found["round"])
            state.complete, state.closed = found["complete"] is True, found["closed"] is True
            deadline = found["deadline"]
            state.deadline = None if deadline is None else datetime.fromisoformat(deadline)
            state.participants = {node: int(rank) for node, rank in _nodes(found["participants"])}
            state.wait_list = {node for node, _ in _nodes(found["wait_list"])}
            state.redundancy_list = {node for node, _ in _nodes(found["redundancy_list"])}
            heartbeats = _nodes(found["last_heartbeats"])
            state.last_heartbeats = {node: datetime.fromisoformat(at) for node, at in heartbeats}
        except (ValueError, TypeError, LookupError, OverflowError, RecursionError) as error:
            raise self.PickleError(
                f"the state of the rendezvous is none ({error}): a stranger has written into the store, or a "
                "launcher of another version runs on a host"
            ) from error
        return state


def _rows(entries: Iterable[tuple[Any, Any]], plain: Callable[[Any], Any] = int) -> list[list[Any]]:
    return sorted([node.addr, node.pid, node.local_id, plain(value)] for node, value in entries)


def _nodes(rows: Any) -> list[tuple[Any, Any]]:
    return [
        (dynamic_rendezvous._NodeDesc(str(addr), int(pid), int(local_id)), value)
        for addr, pid, local_id, value in rows
    ]


rendezvous_handler_registry.register(BACKEND, _handler)
