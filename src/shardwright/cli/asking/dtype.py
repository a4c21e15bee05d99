"""The type of a model on the command line, by PyTorch's name or by that of the setting."""

from collections.abc import Mapping
from types import MappingProxyType

__all__ = ["DTYPE_HELP", "SETTINGS_NAMES", "full_name"]

SETTINGS_NAMES: Mapping[str, str] = MappingProxyType(
    {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
)
"""For each type, how settings and exports call it."""

DTYPE_HELP = "Of the model: bfloat16 (bf16), float16 (fp16), both with updates in float32, or float32 (fp32)."


def full_name(dtype: str) -> str:
    """PyTorch's name of a type; a text that is no such name stays.

    >>> full_name("bf16"), full_name("float32"), full_name("int3")
    ('bfloat16', 'float32', 'int3')
    """
    return next((full for full, short in SETTINGS_NAMES.items() if short == dtype), dtype)
