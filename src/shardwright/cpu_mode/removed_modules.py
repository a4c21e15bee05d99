"""Modules of PyTorch that scripts of earlier years import, and that it has no longer."""

import collections.abc
import importlib.util
import math
import sys
from types import ModuleType

import torch

__all__ = ["put_in_force"]

_SIX = "torch._six"
"""There until PyTorch 1.13: what differs between Python 2 and 3, and two numbers. Scripts for SMP bring
helpers along that import ``inf`` from it."""


def put_in_force() -> None:
    """Has them imported again, where PyTorch lacks them."""
    if _SIX in sys.modules or importlib.util.find_spec(_SIX) is not None:
        return
    six = ModuleType(_SIX, "What Python 2 and 3 have in common.")
    six.__dict__.update(
        PY2=False,
        PY3=True,
        PY37=True,
        inf=math.inf,
        nan=math.nan,
        string_classes=(str, bytes),
        int_classes=int,
        container_abcs=collections.abc,
        istuple=lambda obj: isinstance(obj, tuple),
    )
    sys.modules[_SIX] = six
    torch._six = six  # type: ignore[attr-defined]
