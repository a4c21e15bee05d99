"""The examples in the docstrings."""

import doctest
import importlib
import pkgutil

import pytest

import shardwright.schedule

MODULES = [module.name for module in pkgutil.iter_modules(shardwright.schedule.__path__)]


@pytest.mark.parametrize("name", MODULES)
def test_examples(name):
    module = importlib.import_module(f"shardwright.schedule.{name}")
    assert doctest.testmod(module).failed == 0
