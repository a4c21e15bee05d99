"""Formatting and parsing of quantities.

Lines longer than a terminal is wide: a terminal would break them anywhere, and continue at its edge.
"""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwright.errors import ConfigError
from shardwright.quantities import format_bytes, format_count, format_seconds, parse_bytes
from shardwright.text import align, folded


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


def test_a_table_continues_in_its_column() -> None:
    table = "model      layers  from\nllama3-8b  32      Llama team 2024, arXiv:2407.21783"
    assert folded(table, 40).splitlines() == [
        "model      layers  from",
        "llama3-8b  32      Llama team 2024,",
        "                   arXiv:2407.21783",
    ]


def test_the_widest_column_is_narrowed() -> None:
    rows = [
        ["stage", "units", "memory"],
        ["0", "layers.0 .. layers.11", "1.5 GiB"],
        ["1", "head", "20.0 MiB"],
    ]
    table = align(rows)
    assert folded(table, 30).splitlines() == [
        "stage  units          memory",
        "0      layers.0 ..    1.5 GiB",
        "       layers.11",
        "1      head           20.0 MiB",
    ]


def test_a_paragraph_hangs() -> None:
    assert folded("  Chosen: zb_v, 4 microbatches", 20).splitlines() == [
        "  Chosen: zb_v, 4",
        "    microbatches",
    ]


def test_a_command_can_be_copied() -> None:
    said = "wrote gpt.json; run it: shardwright run -n 2 --plan gpt.json train.py"
    assert folded(said, 30).splitlines() == [
        "wrote gpt.json; run it:",
        "  shardwright run -n 2 --plan gpt.json train.py",
    ]


@given(st.text("ab \n"), st.integers(10, 40))
def test_no_word_is_lost(text: str, width: int) -> None:
    """In another order where they are in columns."""
    assert sorted(folded(text, width).split()) == sorted(text.split())


@given(st.text("ab \n"))
def test_what_fits_stays(text: str) -> None:
    assert folded(text, 1000) == text
