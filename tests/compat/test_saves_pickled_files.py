"""Files of checkpoints: what scripts put into them comes back, and nothing that they name is run."""

import argparse
import collections
import datetime
import os
import pathlib
import pickle
import random
import subprocess
import types
from typing import Any, ClassVar, NamedTuple

import numpy
import pytest
import torch

from shardwright.errors import CheckpointError, CorruptCheckpointError
from shardwright.torch.loss_scale import LossScaler
from smdistributed.modelparallel.torch.pickles.files import load_file


def content() -> dict[str, Any]:
    """In the style of public training scripts."""
    scheduler = torch.optim.lr_scheduler.StepLR(torch.optim.SGD([torch.ones(1)], lr=0.1), 3)
    return {
        "cli_args": {
            "lr": 2e-4,
            "checkpoint_dir": pathlib.Path("/opt/ml/checkpoints"),
            "device": torch.device("cpu"),
            "dtype": torch.bfloat16,
            "nested": argparse.Namespace(seed=3, layers=(1, 2)),
        },
        "num_params": 124_439_808,
        "total_steps": 7,
        "start_train_path_index": 0,
        "start_batch_index": 12,
        "lr_scheduler": scheduler.state_dict(),
        "buffer_names": ["module.buffer"],
        "param_shapes": [collections.OrderedDict({"module.weight": torch.Size([3, 4])})],
        "metrics": {"loss": [1.0, float("inf")]},
        "when": datetime.datetime(2023, 4, 27, tzinfo=datetime.UTC),
        "more": types.SimpleNamespace(a={1, 2}, b=frozenset([3]), c=slice(1, 2), d=b"bytes", e=1 + 2j),
    }


def saved(path: pathlib.Path, what: Any, **options: Any) -> pathlib.Path:
    torch.save(what, path, **options)
    return path


@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize(
    "value",
    [
        numpy.float32(1.5),
        numpy.bool_(True),
        numpy.int64(-3),
        numpy.str_("text"),
        numpy.arange(6.0).reshape(2, 3),
        numpy.asfortranarray(numpy.arange(6).reshape(2, 3)),
        numpy.array(["a", "bcd"]),
        numpy.array([b"a", b"bc"]),
        numpy.arange(3, dtype=">i4"),
        numpy.zeros((0, 4), dtype=numpy.complex64),
    ],
    ids=repr,
)
def test_numbers_and_arrays_of_numpy(tmp_path: pathlib.Path, value: Any, zipped: bool) -> None:
    found = load_file(saved(tmp_path / "f", [value], _use_new_zipfile_serialization=zipped))[0]
    assert numpy.array_equal(found, value)
    assert found.dtype == value.dtype.newbyteorder("=")
    assert found.shape == value.shape
    assert type(found) is type(value)


class Holder(NamedTuple):
    """A class that a script allows."""

    ids: Any


@pytest.mark.parametrize("zipped", [True, False])
def test_what_was_loaded_is_what_was_saved_and_can_be_saved_again(
    tmp_path: pathlib.Path, zipped: bool
) -> None:
    """Arrays came back as instances of a private class, which no later load knew; types as another one."""
    config = pytest.importorskip("transformers").GPT2Config(n_layer=3)
    config.ids = numpy.arange(3)
    array, kind = numpy.arange(4.0), numpy.dtype("float32")
    ordered = collections.OrderedDict(a=array)
    ordered.hidden = (kind,)  # type: ignore[attr-defined]
    itself: list[Any] = [array, range(1, 9, 2)]
    itself.append((itself, array))
    found: Any = {
        "array": array,
        kind: [kind, {kind}, frozenset([kind, 3])],
        "in attributes": argparse.Namespace(a=types.SimpleNamespace(b=array)),
        "ordered": ordered,
        "config": config,
        "itself": itself,
        "named": Holder(array),
        "counted": collections.Counter({kind: 3, "b": 1}),
    }
    for number in range(3):
        path = saved(tmp_path / f"f{number}", found, _use_new_zipfile_serialization=zipped)
        with torch.serialization.safe_globals([Holder]):
            found = load_file(path)
        arrays = [found["array"], found["in attributes"].a.b, found["ordered"]["a"], found["named"].ids]
        arrays += [found["itself"][0], found["itself"][2][1]]
        assert all(type(each) is numpy.ndarray and numpy.array_equal(each, array) for each in arrays)
        assert all(each is arrays[0] for each in arrays)
        assert found[kind] == [kind, {kind}, frozenset([kind, 3])]
        assert list(found) == ["array", kind, *list(found)[2:]]
        assert found["ordered"].hidden == (kind,)
        assert type(found["config"]) is type(config)
        assert found["config"].n_layer == 3
        assert type(found["config"].ids) is numpy.ndarray
        assert found["itself"][1] == range(1, 9, 2)
        assert found["itself"][2][0] is found["itself"]
        assert found["counted"] == collections.Counter({kind: 3, "b": 1})


class Calls:
    """An object that a pickle makes by calling anything with anything."""

    def __init__(self, function: Any, *arguments: Any, state: Any = None):
        self.parts = (function, arguments) if state is None else (function, arguments, state)

    def __reduce__(self) -> Any:
        return self.parts


def attacks(marker: pathlib.Path) -> dict[str, Any]:
    transformers = pytest.importorskip("transformers")
    touch = f"touch {marker}"
    return {
        "os.system": Calls(os.system, touch),
        "subprocess.Popen": Calls(subprocess.Popen, ["touch", str(marker)]),
        "builtins.eval": Calls(eval, f"__import__('os').system({touch!r})"),
        "builtins.exec": Calls(exec, f"__import__('os').system({touch!r})"),
        "builtins.getattr": Calls(getattr, "text", "upper"),
        "pickle.loads": Calls(pickle.loads, pickle.dumps(Calls(os.system, touch))),
        "torch.load": Calls(torch.load, str(marker)),
        "torch.hub.load": Calls(torch.hub.load, "a/b", "c"),
        "pathlib.Path.touch": Calls(pathlib.Path.touch, marker),
        "numpy.load": Calls(numpy.load, str(marker)),
        "numpy.save": Calls(numpy.save, str(marker), numpy.ones(3)),
        "numpy.fromfile": Calls(numpy.fromfile, str(marker)),
        "numpy array of objects": numpy.array([Calls(os.system, touch)], dtype=object),
        "a configuration that is called": Calls(transformers.GPT2Config, 3),
        "a model": Calls(transformers.GPT2LMHeadModel, transformers.GPT2Config()),
        "a class of the script": Calls(Calls, 3),
        "from_pretrained": Calls(transformers.GPT2Config.from_pretrained, str(marker.parent)),
        "a default factory": Calls(collections.defaultdict, os.getcwd),
        "in attributes": Calls(argparse.Namespace, state={"a": Calls(os.system, touch)}),
    }


@pytest.mark.parametrize("zipped", [True, False])
def test_nothing_is_run(tmp_path: pathlib.Path, zipped: bool) -> None:
    marker = tmp_path / "marker"
    cases = attacks(marker)
    for number, attack in enumerate(cases.values()):
        path = saved(tmp_path / f"f{number}", {"a": 1, "b": attack}, _use_new_zipfile_serialization=zipped)
        with pytest.raises(CheckpointError, match=f"f{number}"):
            load_file(path)
    assert not marker.exists()
    assert len(cases) >= 19


@pytest.mark.parametrize("kind", [frozenset, set, torch.Size, collections.Counter])
def test_a_few_bytes_that_would_fill_the_memory(tmp_path: pathlib.Path, kind: Any) -> None:
    """``frozenset(range(10**11))`` filled it."""
    path = saved(tmp_path / "f", [Calls(kind, range(10**7))])
    with pytest.raises(CorruptCheckpointError, match="cannot be read"):
        load_file(path)


class DynamicLossScaler:
    """In the style of those that scripts bring along, and save as they are."""

    made: ClassVar[list[Any]] = []

    def __init__(self, **settings: Any):
        self.made.append(self)
        self.settings, self.cur_scale, self.cur_iter = settings, 2.0**32, 0


class Slotted(DynamicLossScaler):
    __slots__ = ("history",)


class WithCode(DynamicLossScaler):
    """It runs code when it is loaded."""

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.made.append(state)


class WithoutAttributes:
    pass


@pytest.mark.parametrize("zipped", [True, False])
def test_attributes_of_classes_of_the_script(tmp_path: pathlib.Path, zipped: bool) -> None:
    """`train_gpt_simple.py` could not resume with its own loss scaler."""
    ours = LossScaler(scale=8.0)
    scaler, slotted = DynamicLossScaler(window=numpy.arange(3)), Slotted()
    scaler.cur_iter, slotted.history = 7, [scaler]
    before = {"loss_scaler": scaler, "slotted": slotted, "ours": ours, "empty": WithoutAttributes()}
    num_made = len(DynamicLossScaler.made)
    path = saved(tmp_path / "f", before, _use_new_zipfile_serialization=zipped)
    found = load_file(path)
    assert type(found["loss_scaler"]) is DynamicLossScaler
    assert (found["loss_scaler"].cur_iter, found["loss_scaler"].cur_scale) == (7, 2.0**32)
    assert found["loss_scaler"].settings["window"].tolist() == [0, 1, 2]
    assert found["slotted"].history == [found["loss_scaler"]]
    assert (type(found["ours"]), found["ours"]) == (LossScaler, ours)
    assert type(found["empty"]) is WithoutAttributes
    assert len(DynamicLossScaler.made) == num_made


@pytest.mark.parametrize("item", [WithCode(), Calls(DynamicLossScaler)])
def test_classes_of_the_script_that_would_run_code(tmp_path: pathlib.Path, item: Any) -> None:
    num_made = len(DynamicLossScaler.made)
    with pytest.raises(CheckpointError):
        load_file(saved(tmp_path / "f", [item]))
    assert len(DynamicLossScaler.made) == num_made


class AsksItself(WithoutAttributes):
    def __getattribute__(self, name: str) -> Any:
        DynamicLossScaler.made.append(name)
        return super().__getattribute__(name)


class AsksAnother:
    __slots__ = ("inner",)

    def __getattr__(self, name: str) -> Any:
        DynamicLossScaler.made.append(name)
        return getattr(self.inner, name)


class OfAnotherClass(WithoutAttributes):
    __class__ = property(lambda self: DynamicLossScaler.made.append("class"))  # type: ignore[assignment]


class OfAnotherNamespace(WithoutAttributes):
    __dict__ = property(lambda self: DynamicLossScaler.made.append("dict"))  # type: ignore[assignment]


@pytest.mark.parametrize("kind", [AsksItself, AsksAnother, OfAnotherClass, OfAnotherNamespace])
def test_classes_of_the_script_that_are_asked_for_attributes(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, kind: type
) -> None:
    """Their code was run, with the attributes that were in the file."""
    there = type(kind.__name__, (), {"__module__": kind.__module__})
    with monkeypatch.context() as patch:
        patch.setitem(globals(), kind.__name__, there)
        path = saved(tmp_path / "f", [there()])
    num_made = len(DynamicLossScaler.made)
    with pytest.raises(CheckpointError, match=kind.__name__):
        load_file(path)
    assert len(DynamicLossScaler.made) == num_made


def test_a_trusted_file_is_loaded_as_a_pickle(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = saved(tmp_path / "f", {"b": Calls(collections.deque, [1, 2])})
    for value in ("0", "", "yes"):
        monkeypatch.setenv("SHARDWRIGHT_TRUST_PICKLE", value)
        with pytest.raises(CheckpointError, match=r"collections\.deque, which .* SHARDWRIGHT_TRUST_PICKLE=1"):
            load_file(path)
    monkeypatch.setenv("SHARDWRIGHT_TRUST_PICKLE", "1")
    assert load_file(path) == {"b": collections.deque([1, 2])}

    class Own:
        Unpickler = pickle.Unpickler
        used = False

        @classmethod
        def load(cls, *args: Any, **kwargs: Any) -> Any:
            cls.used = True
            return pickle.load(*args, **kwargs)

    load_file(saved(tmp_path / "g", 3, _use_new_zipfile_serialization=False), pickle_module=Own)
    assert Own.used


@pytest.mark.parametrize("zipped", [True, False])
def test_a_file_with_any_damage(tmp_path: pathlib.Path, zipped: bool) -> None:
    """Errors of Python came out of some, and others were blamed on a class that nobody had saved."""
    before = {"tensor": torch.ones(20), "array": numpy.arange(5.0), **content()}
    path = saved(tmp_path / "f", before, _use_new_zipfile_serialization=zipped)
    whole, random_ = path.read_bytes(), random.Random(0)
    refused: list[str] = []
    for number in range(150):
        damaged = bytearray(whole)
        for _ in range(random_.choice([1, 1, 3, 10])):
            damaged[random_.randrange(len(damaged))] = random_.randrange(256)
        path.write_bytes(damaged[: random_.randrange(len(damaged))] if number % 5 == 0 else damaged)
        try:
            load_file(path)
        except CorruptCheckpointError as error:
            refused.append(str(error))
        except CheckpointError as error:
            refused.append(f"blames a class: {error}")
    assert len(refused) > 50
    assert all("/f cannot be read" in text or text.startswith("blames") for text in refused)
    blaming = [text for text in refused if text.startswith("blames")]
    assert bool(blaming) is not zipped  # archives have a checksum of their pickle
    assert all("Or the file is damaged: it has no checksum" in text for text in blaming)
