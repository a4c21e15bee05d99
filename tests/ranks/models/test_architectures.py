"""Unmodified architectures of Hugging Face transformers train over two stages as in one process."""

import pytest
from transparency import Case, differences

from shardwright.testing import run_ranks

pytest.importorskip("transformers")

from architectures import ARCHITECTURES

pytestmark = [pytest.mark.sweep, pytest.mark.filterwarnings("ignore")]  # transformers warns a lot


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_an_architecture_trains_unmodified(name):
    recipe = ARCHITECTURES[name].recipe()
    found = run_ranks(differences, 2, recipe, Case(), timeout_s=60, env={"TRANSFORMERS_VERBOSITY": "error"})
    assert found == [[], []]
