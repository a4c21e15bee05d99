"""Seconds, bytes and FLOPs as text; and upper limits of requests, beyond which is a typo.

GiB = 2**30 bytes, GB = 10**9 bytes.
"""

import os
import re
import sys

from shardwright.errors import ConfigError
from shardwright.text import shown

MOST_RANKS = 1_000_000
MOST_DIMS = 64  # of a tensor
MOST_NODES = 100_000
MOST_RANKS_OF_HOST = 4096
MOST_MICROBATCHES = 100_000
MOST_STAGES_OF_RANK = 10_000
MOST_RESTARTS = 1_000_000
MOST_STEPS = 10**15
MOST_UNITS = 100_000
MOST_ELEMENTS = 10**15  # of parameters
MOST_BYTES = 2**60
MOST_SECONDS = 1e6
"""Of a timeout: eleven days. What waits counts milliseconds in 32 bits, which end soon after."""


_LONGEST = 100  # letters of a size
_DAYS = 3
"""As many and longer durations are written in days."""
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

    >>> format_seconds(0.01234), format_seconds(4.5e-6), format_seconds(75), format_seconds(0.99996)
    ('12.3 ms', '4.50 us', '1m15s', '1.00 s')
    >>> format_seconds(7260), format_seconds(2_592_000)
    ('2h01m', '30.0 days')
    """
    sign, size = "-" if seconds < 0 else "", abs(seconds)
    if size >= _DAYS * 86400:
        return f"{sign}{size / 86400:,.1f} days"
    if size >= 3599.5:
        hours, minutes = divmod(round(size / 60), 60)
        return f"{sign}{hours}h{minutes:02}m"
    if size >= 59.95:
        minutes, rest = divmod(round(size), 60)
        return f"{sign}{minutes}m{rest:02}s"
    for scale, unit in ((1.0, "s"), (1e-3, "ms")):
        if size >= 0.9995 * scale:
            return f"{sign}{_three_figures(size / scale)} {unit}"
    return f"{sign}{_three_figures(size / 1e-6)} us"


def format_count(count: float) -> str:
    """Writes a count with a decimal suffix.

    >>> format_count(41_234), format_count(10_000_000), format_count(12)
    ('41.2k', '10.0M', '12')
    """
    for power, suffix in ((12, "T"), (9, "G"), (6, "M"), (3, "k")):
        if abs(count) >= 10**power:
            return f"{count / 10**power:.1f}{suffix}"
    return f"{count:.0f}"


def format_parameters(number: float) -> str:
    """Writes how many parameters a model has.

    >>> format_parameters(8.03e9), format_parameters(25.6e6), format_parameters(650)
    ('8.0 billion', '25.6 million', '650')
    """
    for power, word in ((9, "billion"), (6, "million")):
        if number >= 10**power:
            return f"{number / 10**power:,.1f} {word}"
    return f"{number:,.0f}"


def format_bandwidth(bytes_per_s: float) -> str:
    """Writes a bandwidth in decimal units.

    >>> format_bandwidth(300e9), format_bandwidth(3.125e9)
    ('300.0 GB/s', '3.1 GB/s')
    """
    return f"{_spaced(format_count(bytes_per_s))}B/s"


def format_flops(flops: float) -> str:
    """Writes a number of operations, at the least one figure of it.

    >>> format_flops(312e12), format_flops(26.1e9), format_flops(148_000)
    ('312.0 TFLOP', '26.1 GFLOP', '148.0 kFLOP')
    """
    return f"{_spaced(format_count(flops))}FLOP"


def counted(number: int, noun: str, plural: str = "s") -> str:
    """Writes a number of things.

    >>> counted(1, "node"), counted(1200, "rank"), counted(2, "microbatch", "es")
    ('1 node', '1,200 ranks', '2 microbatches')
    """
    return f"{number:,} {noun}{'' if number == 1 else plural}"


def beside_prediction(measured_s: float, predicted_s: float) -> str:
    """Writes how measured seconds stand to predicted ones: a share of the prediction, as everywhere.

    >>> beside_prediction(0.5, 0.4), beside_prediction(0.3, 0.4), beside_prediction(0.4, 0.4)
    ('25% slower than predicted (400 ms)', '25% faster than predicted (400 ms)', 'as predicted (400 ms)')
    >>> beside_prediction(12.6, 0.4)
    '31.5 times the predicted 400 ms'
    """
    if measured_s > 2 * predicted_s:
        return f"{measured_s / predicted_s:.1f} times the predicted {format_seconds(predicted_s)}"
    percent = round((measured_s / predicted_s - 1) * 100)
    told = f"{abs(percent)}% {'slower' if percent > 0 else 'faster'} than" if percent else "as"
    return f"{told} predicted ({format_seconds(predicted_s)})"


def _spaced(count: str) -> str:
    return f"{count[:-1]} {count[-1]}" if count[-1].isalpha() else f"{count} "


def _no_size(text: object) -> str:
    return f"{shown(text)} is not a size. Write a number and a unit, for example 80GiB or 500MB."


def _three_figures(value: float) -> str:
    if value >= 99.95:
        return f"{value:.0f}"
    if value >= 9.995:
        return f"{value:.1f}"
    return f"{value:.2f}"


def cores_of_host() -> int:
    """CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def peak_of_process() -> int:
    """The most bytes that this process has had in memory; 0: not known."""
    if sys.platform == "win32":
        return 0
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
