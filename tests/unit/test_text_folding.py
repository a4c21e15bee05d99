"""Lines longer than a terminal is wide: a terminal would break them anywhere, and continue at its edge."""

from hypothesis import given
from hypothesis import strategies as st

from shardwright.text import align, folded


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
