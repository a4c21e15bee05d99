"""What cannot be done is refused at once, in a few lines, with exit code 2: no traceback, and no wait."""

import os
import time

import pytest
from cli.calling import call

from .bad_arguments import BAD_ARGUMENTS, words_of
from .devices import device
from .good_files import READERS

_MOST_S = 5.0  # that a shared machine may take for what takes a tenth of a second


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    found = tmp_path_factory.mktemp("bad")
    for reader in READERS:
        if reader.name.count("/") == 0:
            reader.write(found)
    (found / "folder").mkdir()
    (found / "train.py").write_text("raise AssertionError('it ran')\n")
    (found / "m.py").write_text("raise AssertionError('it was imported')\n")
    os.mkfifo(found / "fifo")
    os.mkfifo(found / "fifo.yaml")
    device(found / "device")
    return found


@pytest.mark.parametrize(("line", "message"), BAD_ARGUMENTS, ids=[line[:60] for line, _ in BAD_ARGUMENTS])
def test_a_bad_argument_is_refused_at_once(line, message, folder, capsys, monkeypatch):
    monkeypatch.chdir(folder)
    before = sorted(folder.rglob("*"))
    start = time.monotonic()
    code, out, err = call(capsys, *words_of(line))
    assert time.monotonic() - start < _MOST_S
    assert code == 2
    assert message in err
    assert out == ""
    assert "Traceback" not in err
    assert len(err.splitlines()) <= 25
    assert "\x1b" not in err
    assert sorted(folder.rglob("*")) == before
