"""Patches modules that a script may import; keeps Python's garbage collector away from imports."""

import gc
import importlib
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


def after_import(name: str, action: Callable[[Any], None]) -> None:
    """Calls `action` with a module each time that its code has run."""
    finder = _Finder(name, action)
    sys.meta_path.insert(0, finder)  # before looking whether it is there: another thread may import it now
    if name in sys.modules:
        module = importlib.import_module(name)  # which waits where another thread is about to
        spec = getattr(module, "__spec__", None)
        if getattr(spec, "_initializing", False):  # it imports what calls this: half of it is not there yet
            _act_at_the_end(spec, lambda: finder.act(sys.modules[name]))
        elif not finder.has_acted:
            finder.act(module)


def _act_at_the_end(spec: Any, act: Callable[[], None]) -> None:
    """Calls `act` when a module that is being imported has been: the import says so in its spec."""

    class _WatchedSpec(type(spec)):  # type: ignore[misc]
        @property
        def _initializing(self) -> bool:
            return True

        @_initializing.setter
        def _initializing(self, value: bool) -> None:
            if not value:
                spec.__class__ = _WatchedSpec.__base__
                spec._initializing = False
                if spec.name in sys.modules:  # it is not where its code raised
                    act()

    spec.__class__ = _WatchedSpec


class _Finder(MetaPathFinder):
    """Finds one module as the other finders do, and has its loader call an action at its end.

    It stays for good: somebody may only ask where the module is, import it in vain, or reload it.
    """

    def __init__(self, name: str, action: Callable[[Any], None]):
        self.has_acted = False
        self._name = name
        self._action = action
        self._searching = threading.local()

    def act(self, module: ModuleType) -> None:
        """Calls the action."""
        self.has_acted = True
        self._action(module)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        # A finder that asks all finders in its turn would come back here, and the action be called twice.
        if fullname != self._name or getattr(self._searching, "now", False):
            return None
        self._searching.now = True
        try:
            spec = self._found(path, target)
        finally:
            self._searching.now = False
        if spec is not None and hasattr(spec.loader, "exec_module"):
            spec.loader = _ThenActs(spec.loader, self.act)
        return spec

    def _found(self, path: Sequence[str] | None, target: ModuleType | None) -> ModuleSpec | None:
        finders = [getattr(each, "find_spec", None) for each in sys.meta_path if each is not self]
        specs = (find(self._name, path, target) for find in finders if find is not None)
        return next((spec for spec in specs if spec is not None), None)


class _ThenActs(Loader):
    """Loads a module as another loader does, and acts on it then.

    Loaders may be shared by modules, or be classes, so none is changed. The module has its own one, also
    while its code runs.
    """

    def __init__(self, loader: Any, act: Callable[[ModuleType], None]):
        self._loader = loader
        self._act = act

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        create = getattr(self._loader, "create_module", None)
        return create(spec) if create is not None else None

    def exec_module(self, module: ModuleType) -> None:
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        self._act(module)

    def __getattr__(self, name: str) -> Any:
        """What those ask who want the source, say, of a module that is not imported."""
        if name.startswith("_"):  # also asked of copies that have no `_loader` yet
            raise AttributeError(name)
        return getattr(self._loader, name)


_FROZEN = threading.Event()


def objects_are_frozen() -> bool:
    """Whether somebody called ``gc.freeze()``. Counting a million objects takes 0.1 s, so it is done once."""
    if not _FROZEN.is_set() and gc.get_freeze_count():
        _FROZEN.set()
    return _FROZEN.is_set()


@contextmanager
def collector_paused() -> Iterator[None]:
    """Collects nothing inside, as each pass would look at all modules anew: a quarter of an import.

    What was made inside then counts as old: else the next object would start a pass over all of it.
    """
    was_enabled, frozen = gc.isenabled(), objects_are_frozen()
    gc.disable()
    try:
        yield
    finally:
        if not frozen:  # what somebody else has frozen stays so
            gc.freeze()
            gc.unfreeze()
        if was_enabled:
            gc.enable()
