"""A store that seals each value with a message authentication code.

Whoever reaches the port of a store can read, write and delete in it. A stranger's value has no valid code and
is refused, with the key's name; so is a value moved from another key or another run. This covers the values
of gloo and NCCL as well, which are given this store.

Three things have no code. `check` and `wait` tell that a value is there, not whose it is: a caller that
relies on it also reads it. `add` counts in the store itself, in plain digits: a counter may only say when to
go on. And a key that a stranger deletes is waited for until the timeout: five minutes where launchers meet at
a run's end.
"""

from datetime import timedelta
from typing import Any

from torch.distributed import Store  # type: ignore[attr-defined]

from shardwright.comm.trust.seal import Seal
from shardwright.errors import LaunchError

__all__ = ["SealedStore"]


class SealedStore(Store):
    """Seals each value on `set`, and opens it on `get`.

    C++ calls these methods as well, and holds on to the part of the object that is its own alone: somebody
    must hold on to the object as long as a `PrefixStore` or a process group uses it (`session.Session` does).
    """

    def __init__(self, inner: Store, seal: Seal):
        super().__init__()
        self._inner: Any = inner
        self._seal = seal
        self._clones: list[SealedStore] = []

    def set(self, key: str, value: str | bytes) -> None:
        self._inner.set(key, self._seal.sealed(key, _bytes(value)))

    def get(self, key: str) -> bytes:
        return self._seal.opened(key, self._inner.get(key))

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        # Nothing is expected where there is no value yet. The code of a value is always the same.
        sealed = self._seal.sealed(key, _bytes(expected)) if expected else b""
        there = self._inner.compare_set(key, sealed, self._seal.sealed(key, _bytes(desired)))
        return self._seal.opened(key, there)

    def add(self, key: str, amount: int) -> int:
        try:
            return int(self._inner.add(key, amount))
        except RuntimeError as error:
            first_line = str(error).partition("\n")[0]
            raise LaunchError(
                f"the counter {key[:200]!r} of the run's store cannot be used: {first_line}. The process "
                "that "
                "serves the store has ended, or a stranger has written something else than a number there."
            ) from error

    def check(self, keys: list[str]) -> bool:
        return bool(self._inner.check(keys))

    def wait(self, keys: list[str], *timeout: timedelta) -> None:
        self._inner.wait(keys, *timeout)

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return [self.get(key) for key in keys]

    def multi_set(self, keys: list[str], values: list[str | bytes]) -> None:
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    def delete_key(self, key: str) -> bool:
        return bool(self._inner.delete_key(key))

    def num_keys(self) -> int:
        return int(self._inner.num_keys())

    def set_timeout(self, timeout: timedelta) -> None:
        super().set_timeout(timeout)
        self._inner.set_timeout(timeout)

    def has_extended_api(self) -> bool:
        return False  # append, multi_get and multi_set: their callers have other ways

    def clone(self) -> "SealedStore":
        made = SealedStore(self._inner.clone(), self._seal)
        self._clones.append(made)
        return made

    # By these names C++ asks for them. Tried on torch 2.13.
    deleteKey = delete_key
    getNumKeys = num_keys


def _bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)
