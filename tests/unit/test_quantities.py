"""Formatting and parsing of quantities."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwright.errors import ConfigError
from shardwright.quantities import format_bytes, format_count, format_seconds, parse_bytes


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("80GiB", 80 * 2**30),
        (" 1.5 GB ", 1_500_000_000),
        ("512", 512),
        (512, 512),
        (1.5e3, 1500),
        ("2e3 kb", 2_000_000),
        ("0.5KiB", 512),
        (".5 TiB", 2**39),
        ("7b", 7),
    ],
)
def test_parse_bytes(text: str | float, num_bytes: int) -> None:
    assert parse_bytes(text) == num_bytes


@pytest.mark.parametrize(
    "text", ["", "GiB", "-1", "8 G", "8 XiB", "1..5GB", "8GiB or so", "nan", "inf", None]
)
def test_what_is_not_a_size(text: str) -> None:
    with pytest.raises(ConfigError, match=r"is not a size\. Write a number and a unit, for example 80GiB"):
        parse_bytes(text)


@given(st.integers(0, 2**50))
def test_bytes_survive_a_round_trip_within_their_figures(num_bytes: int) -> None:
    assert parse_bytes(format_bytes(num_bytes)) == pytest.approx(num_bytes, rel=0.051)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0.00 us"),
        (4.5e-6, "4.50 us"),
        (0.01234, "12.3 ms"),
        (0.5, "500 ms"),
        (1.0, "1.00 s"),
        (59.0, "59.0 s"),
        (75, "1m15s"),
        (3600 + 120, "1h02m"),
        (-0.002, "-2.00 ms"),
    ],
)
def test_format_seconds(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0"), (999, "999"), (41_234, "41.2k"), (10_000_000, "10.0M"), (3e9, "3.0G")]
)
def test_format_count(count: float, text: str) -> None:
    assert format_count(count) == text
