"""Random states that the Trainer of transformers 4.28 saves, and loads again as scripts of its time did.

It calls ``torch.load`` on a file with NumPy's state, an array. Since PyTorch 2.6 that call restores nothing
but tensors and what was allowed before. Later versions of transformers allow the same four names.
"""

from typing import Any

import numpy
import torch


def let_trainer_load() -> None:
    """Has ``torch.load`` restore arrays of whole numbers, as a state of NumPy's random numbers is one."""
    reconstruct: Any = numpy.empty(0).__reduce__()[0]
    torch.serialization.add_safe_globals(
        [reconstruct, numpy.ndarray, numpy.dtype, type(numpy.dtype(numpy.uint32))]
    )
