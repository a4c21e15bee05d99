"""Where a step's processor time goes, function by function, and how many Python calls it makes.

Each microbatch is a greenlet with a stack of its own, which cProfile does not follow. Here each event of
`sys.setprofile` ends an interval, which counts for the function on top of the running greenlet's stack::

    ── call f ──────── call g ──────── return g ──────── switch ──▶ the other greenlet's top
          │  own time of f │  own time of g  │  own time of f  │

What C++ does counts for the Python function that called it. An event takes time itself; what is left of
that after two readings of the clock is measured, and taken off each interval.
"""

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
        plain_s: processor time of a step that is not watched.
        watched_s: the same, watched, with what events take taken off: how far to trust the parts.
        outside_s: of the watched time, what no function of ours is on the stack for: the script and its model.
    """

    functions: list[Called]
    calls: float
    plain_s: float
    watched_s: float
    outside_s: float

    @property
    def own_calls(self) -> float:
        """Of functions of ours."""
        return sum(each.calls for each in self.functions)

    @property
    def num_files(self) -> int:
        """Files of ours that take part."""
        return len({each.module for each in self.functions})


Frame = tuple[CodeType | None, CodeType | None]
"""A function, and the nearest one of ours at or below it on the stack."""

_NOTHING: Frame = (None, None)


class _Watch:
    """Adds up intervals, from ``with`` to its end."""

    def __init__(self) -> None:
        self.calls: dict[CodeType, int] = defaultdict(int)
        self.own: dict[Frame, list[float]] = defaultdict(lambda: [0.0, 0])
        self._stacks: WeakKeyDictionary[Any, list[Frame]] = WeakKeyDictionary()
        self._is_ours: dict[CodeType, bool] = {}

    def __enter__(self) -> "_Watch":
        self._stack: list[Frame] = [_NOTHING]
        self._stacks[greenlet.getcurrent()] = self._stack
        self._before = greenlet.settrace(self._switched)
        self._last_s = time.thread_time()
        sys.setprofile(self._happened)
        return self

    def __exit__(self, *error: Any) -> None:
        sys.setprofile(None)
        greenlet.settrace(self._before)

    def _happened(self, frame: FrameType, event: str, _: Any) -> None:
        passed_s = time.thread_time() - self._last_s
        stack = self._stack
        top = stack[-1]
        sums = self.own[top]
        sums[0] += passed_s
        sums[1] += 1
        if event == "call":
            code = frame.f_code
            self.calls[code] += 1
            ours = self._is_ours.get(code)
            if ours is None:
                ours = self._is_ours[code] = code.co_filename.startswith(_PACKAGE)
            stack.append((code, code if ours else top[1]))
        elif event == "return" and len(stack) > 1:  # a greenlet may be older than the watch
            stack.pop()
        self._last_s = time.thread_time()

    def _switched(self, event: str, greenlets: tuple[Any, Any]) -> None:
        """Goes on with the stack of the greenlet that runs now."""
        sums = self.own[self._stack[-1]]
        sums[0] += time.thread_time() - self._last_s
        sums[1] += 1
        self._stack = self._stacks.setdefault(greenlets[1], [_NOTHING])
        self._last_s = time.thread_time()

    def functions(self, *, steps: int, event_s: float) -> tuple[list[Called], float, float]:
        """Those of ours, all processor time, and that outside of them; of a step."""
        found: dict[CodeType, Called] = {}
        total_s = outside_s = 0.0
        for (code, ours), (seconds, intervals) in self.own.items():
            net_s = (seconds - intervals * event_s) / steps
            total_s += net_s
            if ours is None:
                outside_s += net_s
                continue
            if ours not in found:
                name = ours.co_qualname if sys.version_info >= (3, 11) else ours.co_name
                module = ours.co_filename.removeprefix(_PACKAGE)
                found[ours] = Called(module=module, name=name, calls=self.calls[ours] / steps)
            found[ours].with_others_s += net_s
            if code is ours:
                found[ours].own_s += net_s
        return list(found.values()), total_s, outside_s


def profile_step(step: Callable[[], Any], num_steps: int) -> list[dict[str, Any]]:
    """Of every rank, as mappings; collective."""
    event_s = _event_s()
    plain_s = _timed(step, num_steps)
    with _Watch() as watch:
        for _ in range(num_steps):
            step()
    functions, watched_s, outside_s = watch.functions(steps=num_steps, event_s=event_s)
    found = StepProfile(
        functions=functions,
        calls=sum(watch.calls.values()) / num_steps,
        plain_s=plain_s,
        watched_s=watched_s,
        outside_s=outside_s,
    )
    gathered: list[dict[str, Any]] = [{}] * dist.get_world_size()
    dist.all_gather_object(gathered, asdict(found))
    return gathered


def _timed(run: Callable[[], Any], times: int) -> float:
    begin_s = time.thread_time()
    for _ in range(times):
        run()
    return (time.thread_time() - begin_s) / times


def _event_s() -> float:
    """What an event adds to the interval that it ends."""

    def nothing() -> None:
        pass

    plain_s = _timed(nothing, _CALIBRATION_CALLS)
    with _Watch() as watch:
        _timed(nothing, _CALIBRATION_CALLS)
    seconds = sum(seconds for seconds, _ in watch.own.values())
    intervals = sum(number for _, number in watch.own.values())
    return (seconds - _CALIBRATION_CALLS * plain_s) / intervals


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
    num = len(profiles)
    outside_s, watched_s, plain_s = (
        sum(getattr(each, name) for each in profiles) / num for name in ("outside_s", "watched_s", "plain_s")
    )
    rows.append(["", f"{outside_s * 1e6:.0f}", "", "outside of the library"])
    rows.append(["", f"{watched_s * 1e6:.0f}", "", f"all; {plain_s * 1e6:.0f} if nobody watches"])
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
