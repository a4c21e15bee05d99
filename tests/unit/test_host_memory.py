"""What a host has, and what a container leaves of it."""

import os

import pytest

from shardwright.cluster.named import host_memory_bytes

WHOLE = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


@pytest.mark.parametrize(
    ("text", "expected"),
    [("max\n", WHOLE), ("1073741824\n", 2**30), (str(2**63), WHOLE), ("damaged", WHOLE), ("", WHOLE)],
)
def test_a_limit_of_the_container_counts(tmp_path, text, expected):
    (tmp_path / "memory.max").write_text(text)
    assert host_memory_bytes((str(tmp_path / "memory.max"), str(tmp_path / "none"))) == expected


def test_of_two_limits_the_smaller_counts(tmp_path):
    for name, size in (("a", 2**31), ("b", 2**30)):
        (tmp_path / name).write_text(str(size))
    assert host_memory_bytes((str(tmp_path / "a"), str(tmp_path / "b"))) == 2**30
