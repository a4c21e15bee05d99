"""Files of what runs have found out: timings, counted memory."""

from types import SimpleNamespace

import pytest
import torch

from shardwright.run.machine import cost_cache
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
    cost_cache(HERE).write({"one": ONE})
    cost_cache(HERE).write({**cost_cache(HERE).read(), "other": OTHER})
    assert cost_cache(HERE).read() == {"one": ONE, "other": OTHER}


def test_machines_with_more_ranks_have_costs_of_their_own():
    cost_cache(HERE).write({"one": ONE})
    assert cost_cache(SimpleNamespace(device=torch.device("cpu"), local_size=4)).read() == {}


@pytest.mark.parametrize(
    "content",
    [
        *("", "[]", '{"one": 1}', '{"one": {"forward_s": 1}}', "{", "\xff"),
        *(f'{{"one": {{"forward_s": 1, "backward_s": {each}}}}}' for each in ("-1", "true", '"1"', "1e999")),
        '{"one": {"forward_s": 1, "backward_s": 1, "inferred": 1}}',
    ],
)
def test_a_damaged_file_counts_as_none(content, folder):
    cost_cache(HERE).write({"one": ONE})
    file_in(folder).write_bytes(content.encode("latin-1"))
    assert cost_cache(HERE).read() == {}


def test_it_can_be_switched_off(monkeypatch, folder):
    cost_cache(HERE).write({"one": ONE})
    monkeypatch.setenv("SHARDWRIGHT_CACHE", "off")
    cost_cache(HERE).write({"other": OTHER})
    assert cost_cache(HERE).read() == {}
    assert not (folder / "off").exists()


def test_a_folder_that_cannot_be_written_to_is_told(monkeypatch, tmp_path, caplog):
    blocked = tmp_path / "a file"
    blocked.write_text("")
    monkeypatch.setenv("SHARDWRIGHT_CACHE", str(blocked))
    cost_cache(HERE).write({"one": ONE})
    assert "cannot be kept" in caplog.text
