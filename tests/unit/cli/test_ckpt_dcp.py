"""Folders of `torch.distributed.checkpoint` as `ckpt import` and `ckpt export` take and give them."""

import os
import pickle
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

from cli.calling import call
from shardwright.checkpoint.folder import CheckpointFolder


def trained() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2, bias=False))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
    for _ in range(2):
        model(torch.randn(5, 3)).sum().backward()
        optimizer.step()
    return model, optimizer


def states(*, flat: bool = False) -> tuple[dict[str, Any], dict[str, Any]]:
    model, moments = get_state_dict(*trained(), options=StateDictOptions(flatten_optimizer_state_dict=flat))
    return dict(model), dict(moments)


def save(state: dict[str, Any], folder: Path) -> Path:
    with warnings.catch_warnings(action="ignore"):
        dcp.save(state, checkpoint_id=folder, no_dist=True)
    return folder


def load(state: dict[str, Any], folder: Path) -> dict[str, Any]:
    with warnings.catch_warnings(action="ignore"):
        dcp.load(state, checkpoint_id=folder, no_dist=True)
    return state


def _import(capsys, source: Path, to: Path, *words: object) -> tuple[int, str, str]:
    return call(capsys, "ckpt", "import", source, "-o", to, *words)


def _same(found: Any, expected: Any) -> None:
    if isinstance(expected, dict):
        assert found.keys() == expected.keys()
        for key, value in expected.items():
            _same(found[key], value)
    elif isinstance(expected, list) and isinstance(expected[0], str):
        assert sorted(found) == sorted(expected)  # parameters of a group
    elif isinstance(expected, list):
        for each, value in zip(found, expected, strict=True):
            _same(each, value)
    elif isinstance(expected, torch.Tensor):
        assert torch.equal(found, expected)
    else:
        assert found == expected


def _zeroed(state: Any) -> Any:
    """The same state without its values, which a load puts back."""
    if isinstance(state, dict):
        return {key: _zeroed(value) for key, value in state.items()}
    if isinstance(state, list):
        return [_zeroed(each) for each in state]
    return torch.zeros_like(state) if isinstance(state, torch.Tensor) else None


NESTED = {
    "as FSDP2 recipes save": lambda m, o: {"model": m, "optimizer": o},
    "under one object": lambda m, o: {"app": {"model": m, "optim": o}},
    "other names": lambda m, o: {"net": m, "opt": o},
    "beside the model's own names": lambda m, o: {**m, "opt": o},
}


@pytest.mark.parametrize("layout", NESTED)
def test_a_folder_comes_back_as_it_was(layout, tmp_path, capsys):
    model, optimizer = states()
    scheduler = {"last_epoch": 2, "base_lrs": [0.5], "nested": [{"a": (1, 2)}], "ema": torch.ones(3)}
    source = save({**NESTED[layout](model, optimizer), "scheduler": scheduler}, tmp_path / "there")
    code, out, err = _import(capsys, source, tmp_path / "run")
    assert code == 0, err
    assert "step-00000002" in out  # as the optimizer counts
    assert f"{source} has 1 optimizer\n" in err
    assert "it also has scheduler: a run takes those that its sw.Checkpoints(state=...) names" in err
    assert call(capsys, "ckpt", "verify", tmp_path / "run")[0] == 0
    code, out, err = call(
        capsys, "ckpt", "export", tmp_path / "run", "-o", tmp_path / "back", "--format", "dcp"
    )
    assert code == 0, err
    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    _same(load(_zeroed(state), tmp_path / "back"), state)


def test_the_layout_of_torchtitan(tmp_path, capsys):
    model, optimizer = states(flat=True)
    more = {"train_state": {"step": 70, "ntokens_seen": 9}, "dataloader": {"dp_rank_0": pickle.dumps([1])}}
    source = save({**model, "optimizer": optimizer, **more}, tmp_path / "step-70")
    code, out, err = _import(capsys, source, tmp_path / "run")
    assert code == 0, err
    assert "step-00000070" in out
    args = ("-o", tmp_path / "back", "--format", "torchtitan")
    assert call(capsys, "ckpt", "export", tmp_path / "run", *args)[0] == 0
    state = {**model, "optimizer": optimizer, "train_state": more["train_state"]}
    _same(load(_zeroed(state), tmp_path / "back"), state)


def test_names_change_in_optimizers_too(tmp_path, capsys):
    model, optimizer = states()
    save({"model": model, "optimizer": optimizer}, tmp_path / "there")
    code, _, err = _import(capsys, tmp_path / "there", tmp_path / "run", "--prefix", "net.", "--step", 9)
    assert code == 0, err
    saved = CheckpointFolder(tmp_path / "run").open()
    assert saved.step == 9
    assert {"model/net.0.weight", "optimizer/net.0.weight/exp_avg"} <= saved.index.tensors.keys()
    args = ("--format", "dcp", "--prefix", "net.", "-o", tmp_path / "back")
    assert call(capsys, "ckpt", "export", tmp_path / "run", *args)[0] == 0
    state = {"model": model, "optimizer": optimizer}
    _same(load(_zeroed(state), tmp_path / "back"), state)


def test_a_model_alone(tmp_path, capsys):
    model, _ = states()
    save({"model": model}, tmp_path / "there")
    code, _, err = _import(capsys, tmp_path / "there", tmp_path / "run")
    assert code == 0
    assert "has no optimizer: a run makes a new one" in err
    assert call(capsys, "ckpt", "export", tmp_path / "run", "-o", tmp_path / "b", "--format", "dcp")[0] == 0
    _same(load(_zeroed({"model": model}), tmp_path / "b"), {"model": model})


def test_a_state_that_no_checkpoint_can_have_is_left_out(tmp_path, capsys):
    save({"model": states()[0], "mine": {"x": complex(1, 2)}, "code": {"f": os.mkdir}}, tmp_path / "there")
    code, _, err = _import(capsys, tmp_path / "there", tmp_path / "run")
    assert code == 0
    assert "left out: mine: state/mine" in err
    assert "left out: code: state/code.f is a " in err


def _run() -> dict[str, Any]:
    return dict(zip(("model", "optimizer"), states(), strict=True))


def _numbered() -> dict[str, Any]:
    model, optimizer = trained()
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}


def _nested_deep() -> dict[str, Any]:
    model, optimizer = states()
    optimizer["state"]["0.weight"]["factors"] = {"left": {"x": torch.ones(2)}}
    return {"model": model, "optimizer": optimizer}


def _with(name: str, key: str, value: Any) -> dict[str, Any]:
    """One entry of the optimizer is another, or missing."""
    run = _run()
    run["optimizer"]["state"][name][key] = value
    if value is None:
        del run["optimizer"]["state"][name][key]
    return run


def _of_another_model() -> dict[str, Any]:
    model, optimizer = states()
    return {"model": {f"net.{name}": value for name, value in model.items()}, "optimizer": optimizer}


@pytest.mark.parametrize(
    ("state", "words", "says"),
    [
        (
            _numbered,
            (),
            "the parameters of an optimizer by number, as optimizer.state_dict() does: 0, 1, 2 and 2",
        ),
        (
            _nested_deep,
            (),
            "has factors of 0.weight, which is nested deeper than tensors by parameter and key",
        ),
        (_of_another_model, (), "of an optimizer: 0.weight, 0.bias, 1.weight and"),
        (lambda: {"a": states()[0], "b": states()[0]}, (), "It has a, b. Name the one that is: --key KEY"),
        (lambda: {"optimizer": states()[1]}, (), "It has nothing beside optimizers. Name the one"),
        (
            lambda: _with("0.bias", "exp_avg_sq", None),
            (),
            "has exp_avg, step of 0.bias, and no exp_avg_sq: the optimizer's state was not saved whole",
        ),
        (
            lambda: _with("0.bias", "exp_avg", torch.ones(1)),
            (),
            "has exp_avg of 0.bias in the shape (1,), and the parameter has (4,)",
        ),
        (
            lambda: {"gen": _run(), "disc": _run()},
            (),
            "has optimizers in several places, gen, disc, and a run begins with one of them. Name its model: "
            "--key gen.model; and",
        ),
        (lambda: {"model": states()[0]}, ("--key", "ema"), "has no tensors under 'ema'. It has model."),
    ],
)
def test_other_layouts_are_refused_in_one_line(state, words, says, tmp_path, capsys):
    save(state(), tmp_path / "there")
    code, out, err = _import(capsys, tmp_path / "there", tmp_path / "run", *words)
    assert (code, out) == (2, "")
    assert says in err.splitlines()[-1]
    assert CheckpointFolder(tmp_path / "run").commits() == ()


def test_a_key_names_the_model(tmp_path, capsys):
    save({"a": states()[0], "b": {"ema": states()[0]}}, tmp_path / "there")
    code, _, err = _import(capsys, tmp_path / "there", tmp_path / "run", "--key", "b.ema")
    assert code == 0, err
    assert "model/0.weight" in CheckpointFolder(tmp_path / "run").open().index.tensors


def test_what_is_beside_a_key_is_named(tmp_path, capsys):
    """``{"gen": ..., "disc": ...}`` lost the second; ``--key state.model`` lost ``state.ema``."""
    state = {"gen": _run(), "disc": _run(), "epoch": 3}
    save(state, tmp_path / "two")
    code, _, err = _import(capsys, tmp_path / "two", tmp_path / "run", "--key", "disc.model")
    assert code == 0, err
    assert "has 1 optimizer\n" in err
    assert "left out: gen: it has an optimizer of its own, which is a run of its own" in err
    assert "it also has epoch:" in err
    save({"state": {"model": states()[0], "ema": states()[0]}}, tmp_path / "there")
    code, _, err = _import(capsys, tmp_path / "there", tmp_path / "b", "--key", "state.model")
    assert code == 0, err
    assert "left out: state.ema: only state.model was asked for" in err
    save({"app": {**_run(), "ema": states()[0]}}, tmp_path / "app")
    code, _, err = _import(capsys, tmp_path / "app", tmp_path / "c", "--key", "app.ema")
    assert code == 0, err
    assert "left out" not in err
    assert "it also has model:" in err


@pytest.mark.parametrize(
    ("more", "step"),
    [
        ({"step": torch.tensor(17)}, 17),
        ({"step": torch.tensor([17.0])}, 17),
        ({"train_state": {"step": torch.tensor(17)}}, 17),
        ({"step": torch.tensor(float("nan"))}, 2),  # the optimizer's
        ({"step": torch.ones(3)}, 2),
        ({"step": -1}, 2),
    ],
)
def test_a_count_of_steps_may_be_a_tensor(more, step, tmp_path, capsys):
    save({**_run(), **more}, tmp_path / "there")
    code, _, err = _import(capsys, tmp_path / "there", tmp_path / "run")
    assert code == 0, err
    assert CheckpointFolder(tmp_path / "run").open().step == step


def test_other_optimizers_have_any_shapes(tmp_path, capsys):
    """Adafactor keeps a row and a column of each matrix, and all of a vector."""
    model, _ = trained()
    optimizer = torch.optim.Adafactor(model.parameters())
    model(torch.randn(5, 3)).sum().backward()
    optimizer.step()
    weights, moments = get_state_dict(model, optimizer)
    save({"model": weights, "optimizer": moments}, tmp_path / "there")
    code, _, err = _import(capsys, tmp_path / "there", tmp_path / "run")
    assert code == 0, err


def test_a_count_that_is_no_number_is_none(tmp_path, capsys):
    """A moment's count of NaN ended in Python's "cannot convert float NaN to integer"."""
    run = _run()
    for each in run["optimizer"]["state"].values():
        each["step"] = torch.tensor(float("nan"))
    save(run, tmp_path / "there")
    code, _, err = _import(capsys, tmp_path / "there", tmp_path / "run")
    assert code == 0, err
    assert CheckpointFolder(tmp_path / "run").open().step == 0


class Runs:
    def __init__(self, marker: Path):
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.marker),)


def _changed(folder: Path, **fields: Any) -> None:
    path = folder / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    for name, change in fields.items():
        setattr(metadata, name, change(getattr(metadata, name)))
    path.write_bytes(pickle.dumps(metadata))


def _elsewhere(storage: dict[Any, Any]) -> dict[Any, Any]:
    for info in storage.values():
        info.relative_path = "../other"
    return storage


def _larger(entries: dict[str, Any]) -> dict[str, Any]:
    for each in entries.values():
        if hasattr(each, "size"):
            each.size = torch.Size([2**40])
    return entries


def _odd(places: dict[str, Any]) -> dict[str, Any]:
    return {**places, "model.0.weight": ("model",), "model.0.bias": ("model", "0.bias")}


DAMAGE = {
    "places in each other": lambda f: _changed(f, planner_data=_odd),
    "groups that are none": lambda f: _changed(
        f, planner_data=lambda p: {**p, "optimizer.param_groups.0.lr": ("optimizer", "param_groups", "x")}
    ),
    "not finished": lambda f: (f / ".metadata").unlink(),
    "a list that runs code": lambda f: _changed(f, planner_data=lambda _: Runs(f / "executed")),
    "a list of no kind": lambda f: (f / ".metadata").write_bytes(pickle.dumps({"a": 1})),
    "no list": lambda f: (f / ".metadata").write_bytes(b"{}"),
    "a file that is elsewhere": lambda f: _changed(f, storage_data=_elsewhere),
    "a file that is cut": lambda f: os.truncate(f / "__0_0.distcp", 900),
    "a file that is missing": lambda f: (f / "__0_0.distcp").unlink(),
    "a file of other bytes": lambda f: (f / "__0_0.distcp").write_bytes(
        bytes((f / "__0_0.distcp").stat().st_size)
    ),
    "tensors larger than files": lambda f: _changed(f, state_dict_metadata=_larger),
}
SAYS = {
    "places in each other": "is laid out as nothing that is known",
    "groups that are none": "is laid out as nothing that is known",
    "not finished": "that was not finished: it has tensors, and no .metadata, which comes last.",
    "a list that runs code": "names posix.mkdir, and the list of a checkpoint needs no such thing. Nothing",
    "a list of no kind": "is no list of torch.distributed.checkpoint",
    "no list": "is damaged, or not of torch.distributed.checkpoint",
    "a file that is elsewhere": "leads to '../other'. Nothing was read",
    "a file that is cut": "it was not copied whole. Get it anew",
    "a file that is missing": "__0_0.distcp is missing",
    "a file of other bytes": "has options of an optimizer that are no plain values, or damaged: ",
    "tensors larger than files": "do not make up (1099511627776,)",
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_refused_and_nothing_runs(damage, tmp_path, capsys):
    folder = save({"model": states()[0], "optimizer": states()[1]}, tmp_path / "there")
    DAMAGE[damage](folder)
    code, out, err = _import(capsys, folder, tmp_path / "run")
    assert code in (2, 8)
    assert out == ""
    assert SAYS[damage] in err
    assert not (folder / "executed").exists()
    assert CheckpointFolder(tmp_path / "run").commits() == ()


@pytest.mark.parametrize("name", ["planted", "__doc__"])
def test_a_list_that_changes_a_class_is_refused(name, tmp_path, capsys):
    """A pickle may set attributes of all that it names, also of classes, which later folders are read by."""
    folder = save({"model": states()[0]}, tmp_path / "there")
    kind, before = dcp.metadata.Metadata, dict(vars(dcp.metadata.Metadata))
    text = pickle.dumps((None, {name: 1}), protocol=0)[:-1]  # without its end
    (folder / ".metadata").write_bytes(f"c{kind.__module__}\n{kind.__name__}\n".encode() + text + b"b.")
    code, out, err = _import(capsys, folder, tmp_path / "run")
    assert (code, out) == (2, "")
    assert f"is refused: it changes {name} of <class" in err
    assert dict(vars(kind)) == before


def test_a_folder_of_several_is_told(tmp_path, capsys):
    for step in (1, 2):
        save({"model": states()[0]}, tmp_path / "there" / f"step-{step}")
    code, _, err = _import(capsys, tmp_path / "there", tmp_path / "run")
    assert code == 2
    assert "has 2 folders of torch.distributed.checkpoint: step-1, step-2. Give one of them: " in err


def test_options_that_convert_are_for_models_alone(tmp_path, capsys):
    save({"model": states()[0]}, tmp_path / "there")
    assert _import(capsys, tmp_path / "there", tmp_path / "run")[0] == 0
    args = ("-o", tmp_path / "b", "--format", "dcp", "--dtype", "bf16")
    code, _, err = call(capsys, "ckpt", "export", tmp_path / "run", *args)
    assert code == 2
    assert "--format dcp writes model and optimizer as they are" in err
