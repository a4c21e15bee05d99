"""Which functions and classes a pickle names, found without running any of it.

A pickle is a program: it can call whatever it names. Files of tensors name very few things.
"""

import pickletools
from collections.abc import Iterator
from typing import BinaryIO

__all__ = ["names_in_pickle"]

# These take what they call from elsewhere than from a text beside them.
_INDIRECT = {"STACK_GLOBAL", "INST", "EXT1", "EXT2", "EXT4"}


def names_in_pickle(file: BinaryIO) -> Iterator[str]:
    """Names, such as ``collections.OrderedDict``, in the order in which a pickle has them.

    What is named on the stack is guessed by the last two texts before.

    Args:
        file: at the beginning of a pickle; it is read up to its end.

    Raises:
        ValueError: it is no pickle.
    """
    texts = ["?", "?"]
    for operation, argument, _ in pickletools.genops(file):
        if operation.name == "GLOBAL":
            yield str(argument).replace(" ", ".", 1)
        elif operation.name in _INDIRECT:
            yield str(argument).replace(" ", ".", 1) if operation.name == "INST" else ".".join(texts)
        elif isinstance(argument, str):
            texts = [texts[-1], argument]
