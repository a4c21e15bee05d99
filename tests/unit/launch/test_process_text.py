"""Text that a process cannot get: the kernel is asked, too, whether that is so."""

import errno
import re
import subprocess
from pathlib import Path

import pytest

from shardwright.errors import ConfigError
from shardwright.launch.job_spec import JobSpec
from shardwright.launch.process_text import (
    check_process,
    refuse_half_characters,
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


def test_what_ranks_get_of_all_hyperparameters_together_is_checked_before_the_job_starts():
    """Each value fits, and SM_HPS; with the folders beside them in SM_TRAINING_ENV, they do not."""

    def spec(num_bytes):
        return JobSpec(
            name="one",
            entry_point="train.py",
            source_dir=Path("/code"),
            runs_dir=Path("/runs"),
            hyperparameters={"a": "b" * (num_bytes // 2), "c": "d" * (num_bytes // 2)},
        )

    assert spec(129_000).num_ranks == 1
    with pytest.raises(ConfigError, match=r"SM_TRAINING_ENV would be .* SM_TRAINING_ENV have all hyperpara"):
        spec(131_000)


def test_manifests_may_be_longer():
    refuse_half_characters("a" * 200_000)
