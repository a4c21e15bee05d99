"""Formats and parses seconds, bytes and counts.

GiB = 2**30 bytes, GB = 10**9 bytes.
"""

import re

from shardwright.errors import ConfigError
from shardwright.printable import shown

__all__ = ["format_bytes", "format_count", "format_seconds", "parse_bytes"]

_LONGEST = 100  # letters of a size
_BYTE_UNITS = {
    "": 1,
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
}


def parse_bytes(text: str | int | float) -> int:
    """Reads a number of bytes.

    Args:
        text: a number of bytes, or a number with a unit such as ``"80GiB"`` or ``"1.5 GB"``.

    Raises:
        ConfigError: the text is not a size, or it is negative or endless.

    >>> parse_bytes("80GiB") == 80 * 2**30
    True
    >>> parse_bytes("1.5 kB")
    1500
    """
    if isinstance(text, int) and text >= 0:
        return text
    match = (
        None
        if isinstance(text, int) or len(str(text)) > _LONGEST
        else re.fullmatch(r"\s*([0-9]*\.?[0-9]+(?:[eE][+-]?[0-9]+)?)\s*([kKmMgGtT]?i?[bB]?)\s*", str(text))
    )
    if match is None or match.group(2).lower() not in _BYTE_UNITS:
        raise ConfigError(_no_size(text))
    num_bytes = float(match.group(1)) * _BYTE_UNITS[match.group(2).lower()]
    if num_bytes == float("inf"):
        raise ConfigError(_no_size(text))
    return round(num_bytes)


def format_bytes(num_bytes: float) -> str:
    """Writes a number of bytes in binary units.

    >>> format_bytes(80 * 2**30), format_bytes(1536), format_bytes(12)
    ('80.0 GiB', '1.5 KiB', '12 B')
    """
    for power, unit in ((40, "TiB"), (30, "GiB"), (20, "MiB"), (10, "KiB")):
        if abs(num_bytes) >= 2**power:
            return f"{num_bytes / 2**power:.1f} {unit}"
    return f"{num_bytes:.0f} B"


def format_seconds(seconds: float) -> str:
    """Writes a duration with three figures.

    >>> format_seconds(0.01234), format_seconds(4.5e-6), format_seconds(75)
    ('12.3 ms', '4.50 us', '1m15s')
    """
    if abs(seconds) >= 3600:
        return f"{seconds // 3600:.0f}h{seconds % 3600 // 60:02.0f}m"
    if abs(seconds) >= 60:
        return f"{seconds // 60:.0f}m{seconds % 60:02.0f}s"
    for scale, unit in ((1.0, "s"), (1e-3, "ms")):
        if abs(seconds) >= scale:
            return f"{_three_figures(seconds / scale)} {unit}"
    return f"{_three_figures(seconds / 1e-6)} us"


def format_count(count: float) -> str:
    """Writes a count with a decimal suffix.

    >>> format_count(41_234), format_count(10_000_000), format_count(12)
    ('41.2k', '10.0M', '12')
    """
    for power, suffix in ((12, "T"), (9, "G"), (6, "M"), (3, "k")):
        if abs(count) >= 10**power:
            return f"{count / 10**power:.1f}{suffix}"
    return f"{count:.0f}"


def _no_size(text: object) -> str:
    return f"{shown(text)} is not a size. Write a number and a unit, for example 80GiB or 500MB."


def _three_figures(value: float) -> str:
    if abs(value) >= 100:
        return f"{value:.0f}"
    if abs(value) >= 10:
        return f"{value:.1f}"
    return f"{value:.2f}"
