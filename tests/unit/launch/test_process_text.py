"""Text that a process cannot get: the kernel is asked, too, whether that is so."""

import errno
import re
import subprocess

import pytest

from shardwright.errors import ConfigError
from shardwright.launch.processes import (
    check_process,
    why_no_text,
    why_no_variable,
)


def starts(words=(), variables=None):
    try:
        return subprocess.run(["/bin/true", *words], env=variables or {}).returncode == 0
    except OSError as error:
        return error.errno != errno.E2BIG


@pytest.mark.parametrize("num_bytes", [131_070, 131_071, 131_072, 200_000])
def test_texts_are_as_long_as_the_kernel_takes_them(num_bytes):
    """Bug: any length passed, and the process failed with E2BIG."""
    word, value = "é" * (num_bytes // 2) + "a" * (num_bytes % 2), "b" * (num_bytes - len("A="))
    assert (why_no_text(word) is None) == starts([word]) == (num_bytes <= 131_071)
    assert (why_no_variable("A", value) is None) == starts(variables={"A": value})


def test_a_text_that_is_too_long_is_not_told_in_full():
    with pytest.raises(ConfigError) as caught:
        check_process([], {"SM_HPS": "b" * 200_000})
    said = str(caught.value)
    assert re.match(r"SM_HPS would be 'b+\.\.\.b+', but it takes 200,007 bytes", said)
    assert "at most 131,071 in one word or variable. Put what is long in a file, in a channel" in said
    assert len(said) < 500
