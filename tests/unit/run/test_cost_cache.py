"""The file of measured costs."""

from types import SimpleNamespace

import pytest
import torch

from shardwright.run.machine import CostCache
from shardwright.run.timing import Timing

HERE = SimpleNamespace(device=torch.device("cpu"), local_size=2)
ONE, OTHER = (Timing(forward_s=s, backward_s=2 * s, input_s=None, weight_s=0.0, spread=0.1) for s in (1, 2))


@pytest.fixture(autouse=True)
def folder(monkeypatch, tmp_path):
    monkeypatch.setenv("SHARDWRIGHT_CACHE", str(tmp_path))
    return tmp_path


def file_in(folder):
    (file,) = (folder / "profile").iterdir()
    return file


def test_what_is_added_is_read():
    CostCache(HERE).add({"one": ONE}, to={})
    CostCache(HERE).add({"other": OTHER}, to=CostCache(HERE).read())
    assert CostCache(HERE).read() == {"one": ONE, "other": OTHER}


def test_machines_with_more_ranks_have_costs_of_their_own():
    CostCache(HERE).add({"one": ONE}, to={})
    assert CostCache(SimpleNamespace(device=torch.device("cpu"), local_size=4)).read() == {}


@pytest.mark.parametrize("content", ["", "[]", '{"one": 1}', '{"one": {"forward_s": 1}}', "{", "\xff"])
def test_a_damaged_file_counts_as_none(content, folder):
    CostCache(HERE).add({"one": ONE}, to={})
    file_in(folder).write_bytes(content.encode("latin-1"))
    assert CostCache(HERE).read() == {}


def test_it_can_be_switched_off(monkeypatch, folder):
    CostCache(HERE).add({"one": ONE}, to={})
    monkeypatch.setenv("SHARDWRIGHT_CACHE", "off")
    CostCache(HERE).add({"other": OTHER}, to={})
    assert CostCache(HERE).read() == {}
    assert not (folder / "off").exists()


def test_a_folder_that_cannot_be_written_to_is_told(monkeypatch, tmp_path, caplog):
    blocked = tmp_path / "a file"
    blocked.write_text("")
    monkeypatch.setenv("SHARDWRIGHT_CACHE", str(blocked))
    CostCache(HERE).add({"one": ONE}, to={})
    assert "cannot be kept" in caplog.text
