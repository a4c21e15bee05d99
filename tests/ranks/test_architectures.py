"""Unmodified architectures of Hugging Face transformers train over two stages as they train on one process."""

import pytest

from shardwright.testing import run_ranks
from transparency import Case, differences

pytest.importorskip("transformers")

from architectures import ARCHITECTURES

pytestmark = [pytest.mark.sweep, pytest.mark.filterwarnings("ignore")]  # transformers warns a lot


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_an_architecture_trains_unmodified(name):
    recipe = ARCHITECTURES[name].recipe()
    found = run_ranks(differences, 2, recipe, Case(), timeout_s=60, env={"TRANSFORMERS_VERBOSITY": "error"})
    assert found == [[], []]
