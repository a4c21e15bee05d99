"""Where a step's processor time goes, function by function, and how many Python calls it makes.

Each microbatch is a greenlet with a stack of its own, which cProfile does not follow. Here each event of
`sys.setprofile` ends an interval, which counts for the function on top of the running greenlet's stack::

    ── call f ──────── call g ──────── return g ──────── switch ──▶ the other greenlet's top
          │  own time of f │  own time of g  │  own time of f  │

What C++ does counts for the Python function that called it. What an event takes itself is taken off each
interval: in proportions that were measured with functions that do nothing, and so much of it that all
functions together take what a step takes that nobody watches.
"""

import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import CodeType, FrameType
from typing import Any
from weakref import WeakKeyDictionary

import greenlet
import torch.distributed as dist

import shardwright

__all__ = ["Called", "StepProfile", "functions_table", "modules_table", "profile_step"]

_PACKAGE = str(Path(shardwright.__file__).parent) + "/"
_CALIBRATION_CALLS = 20_000


@dataclass(slots=True, kw_only=True)
class Called:
    """A function of ours, in a step.

    Attributes:
        module: its file within the package.
        name: its qualified name.
        calls: of it.
        own_s: processor time without the Python functions that it calls.
        with_others_s: with those that are not ours, such as torch's.
    """

    module: str
    name: str
    calls: float = 0.0
    own_s: float = 0.0
    with_others_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StepProfile:
    """Of one rank.

    Attributes:
        functions: of ours.
        calls: of all Python functions, torch's and the model's too.
        step_s: processor time of a step that nobody watches.
        outside_s: of it, that without a function of ours on the stack.
        scale: how much more an event took than with functions that do nothing.
    """

    functions: list[Called]
    calls: float
    step_s: float
    outside_s: float
    scale: float

    @property
    def own_calls(self) -> float:
        """Of functions of ours."""
        return sum(each.calls for each in self.functions)

    @property
    def num_files(self) -> int:
        """Files of ours that take part."""
        return len({each.module for each in self.functions})


@dataclass(slots=True)
class _Sums:
    """A function under one function of ours (or itself), or what is below all functions.

    Attributes:
        code: the function.
        ours: the nearest function of ours, from it downwards.
        seconds: of its intervals.
        intervals: their number.
        locals: of the frames whose events began and ended them.
    """

    code: CodeType | None = None
    ours: CodeType | None = None
    seconds: float = 0.0
    intervals: int = 0
    locals: int = 0


class _Watch:
    """Adds up intervals, from ``with`` to its end."""

    def __init__(self) -> None:
        self.calls: dict[int, int] = defaultdict(int)
        self.sums: dict[tuple[int, int], _Sums] = {}
        self._stacks: WeakKeyDictionary[Any, list[_Sums]] = WeakKeyDictionary()
        self._facts: dict[
            int, tuple[CodeType, bool, int]
        ] = {}  # keeps the code, so that its id stays its own
        self._bottom = self.sums[0, 0] = _Sums()
        self._locals = 0

    def __enter__(self) -> "_Watch":
        self._stack = self._stacks[greenlet.getcurrent()] = [self._bottom]
        self._before = greenlet.settrace(self._switched)
        self._last_s = time.thread_time()
        sys.setprofile(self._happened)
        return self

    def __exit__(self, *error: Any) -> None:
        sys.setprofile(None)
        greenlet.settrace(self._before)

    def _happened(self, frame: FrameType, event: str, _: Any) -> None:
        passed_s = time.thread_time() - self._last_s
        stack, code = self._stack, frame.f_code
        sums, key = stack[-1], id(code)
        facts = self._facts.get(key) or self._note(code)
        sums.seconds += passed_s
        sums.intervals += 1
        sums.locals += self._locals + facts[2]
        self._locals = facts[2]
        if event == "call":
            self.calls[key] += 1
            ours = code if facts[1] else sums.ours
            found = self.sums.get((key, id(ours)))
            if found is None:
                found = self.sums[key, id(ours)] = _Sums(code, ours)
            stack.append(found)
        elif event == "return" and len(stack) > 1:  # a greenlet may be older than the watch
            stack.pop()
        self._last_s = time.thread_time()

    def _note(self, code: CodeType) -> tuple[CodeType, bool, int]:
        num_locals = code.co_nlocals + len(code.co_cellvars) + len(code.co_freevars)
        facts = self._facts[id(code)] = (code, code.co_filename.startswith(_PACKAGE), num_locals)
        return facts

    def _switched(self, event: str, greenlets: tuple[Any, Any]) -> None:
        """Goes on with the stack of the greenlet that runs now."""
        self._stack[-1].seconds += time.thread_time() - self._last_s
        self._stack = self._stacks.setdefault(greenlets[1], [self._bottom])
        self._last_s = time.thread_time()

    def watching_s(self, prices: "_Prices") -> float:
        """What events took, by those prices."""
        return sum(prices.of(each) for each in self.sums.values())

    def functions(self, *, steps: int, prices: "_Prices", scale: float) -> tuple[list[Called], float]:
        """Those of ours, and processor time outside of them; of a step."""
        found: dict[CodeType, Called] = {}
        outside_s = 0.0
        for sums in self.sums.values():
            net_s = (sums.seconds - scale * prices.of(sums)) / steps
            code = sums.ours
            if code is None:
                outside_s += net_s
                continue
            if code not in found:
                module = code.co_filename.removeprefix(_PACKAGE)
                calls = self.calls[id(code)] / steps
                found[code] = Called(module=module, name=code.co_qualname, calls=calls)
            found[code].with_others_s += net_s
            if sums.code is code:
                found[code].own_s += net_s
        return list(found.values()), outside_s


@dataclass(frozen=True, slots=True)
class _Prices:
    """What watching adds to an interval.

    Attributes:
        event_s: in any case.
        local_s: for each local variable of both frames: Python copies them to and from a dictionary.
    """

    event_s: float
    local_s: float

    def of(self, sums: _Sums) -> float:
        """Of all intervals of a function."""
        return sums.intervals * self.event_s + sums.locals * self.local_s


def profile_step(step: Callable[[], Any], num_steps: int) -> list[dict[str, Any]]:
    """Of every rank, as mappings; collective."""
    prices = _prices()
    watch, plain_s = _Watch(), 0.0
    for _ in range(num_steps):  # in turns, since others may slow the machine for a second
        plain_s += _timed(step, 1) / num_steps
        with watch:
            step()
    all_s = sum(each.seconds for each in watch.sums.values())
    scale = (all_s - plain_s * num_steps) / watch.watching_s(prices)
    functions, outside_s = watch.functions(steps=num_steps, prices=prices, scale=scale)
    found = StepProfile(
        functions=functions,
        calls=sum(watch.calls.values()) / num_steps,
        step_s=plain_s,
        outside_s=outside_s,
        scale=scale,
    )
    gathered: list[dict[str, Any]] = [{}] * dist.get_world_size()
    dist.all_gather_object(gathered, asdict(found))
    return gathered


def _timed(run: Callable[[], Any], times: int) -> float:
    begin_s = time.thread_time()
    for _ in range(times):
        run()
    return (time.thread_time() - begin_s) / times


def _prices() -> _Prices:
    """Measured with functions that do nothing, without locals and with some."""

    def none() -> None:
        pass

    def some(a=0, b=0, c=0, d=0, e=0, f=0, g=0, h=0, i=0, j=0, k=0, l=0) -> None:  # type: ignore[no-untyped-def]  # noqa: E741
        pass

    above_s, num_locals = [], []
    for function in (none, some):
        plain_s = _timed(function, _CALIBRATION_CALLS)
        with _Watch() as watch:
            _timed(function, _CALIBRATION_CALLS)
        sums = watch.sums.values()
        intervals = sum(each.intervals for each in sums)
        above_s.append((sum(each.seconds for each in sums) - _CALIBRATION_CALLS * plain_s) / intervals)
        num_locals.append(sum(each.locals for each in sums) / intervals)
    local_s = (above_s[1] - above_s[0]) / (num_locals[1] - num_locals[0])
    return _Prices(above_s[0] - num_locals[0] * local_s, local_s)


# ---- tables


def functions_table(profiles: Sequence[StepProfile], num: int) -> list[list[str]]:
    """The dearest functions of ours, the means of the ranks."""
    found = sorted(_mean(profiles, lambda each: (each.module, each.name)), key=lambda each: -each.own_s)
    return [["own us", "with torch's", "calls", "module", "function"]] + [
        [*_figures(each), each.module.removesuffix(".py"), each.name] for each in found[:num]
    ]


def modules_table(profiles: Sequence[StepProfile]) -> list[list[str]]:
    """The folders of the library, the means of the ranks."""
    found = _mean(profiles, lambda each: (str(Path(each.module).parent), ""))
    head = ["own us", "with torch's", "calls", "folder"]
    rows = [[*_figures(each), each.module] for each in sorted(found, key=lambda each: -each.own_s)]
    for name, what in (("outside_s", "outside of the library"), ("step_s", "all")):
        mean_s = sum(getattr(each, name) for each in profiles) / len(profiles)
        rows.append(["", f"{mean_s * 1e6:.0f}", "", what])
    scale = statistics.fmean(each.scale for each in profiles)
    rows.append(["", "", "", f"an event took {scale:.1f} times what it takes with functions that do nothing"])
    return [head, *rows]


def _figures(each: Called) -> list[str]:
    return [f"{each.own_s * 1e6:.0f}", f"{each.with_others_s * 1e6:.0f}", f"{each.calls:.1f}"]


def _mean(profiles: Sequence[StepProfile], key: Callable[[Called], tuple[str, str]]) -> list[Called]:
    sums: dict[tuple[str, str], Called] = {}
    for each in (each for profile in profiles for each in profile.functions):
        module, name = key(each)
        total = sums.setdefault((module, name), Called(module=module, name=name))
        total.calls += each.calls / len(profiles)
        total.own_s += each.own_s / len(profiles)
        total.with_others_s += each.with_others_s / len(profiles)
    return list(sums.values())
