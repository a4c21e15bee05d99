"""``shardwright ckpt export``: writes a checkpoint's model as Hugging Face or PyTorch files."""

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shardwright.cli.asking.application import AsJson, print_json, say, show_text
from shardwright.cli.asking.run_path import named_checkpoint
from shardwright.errors import CheckpointError, ConfigError
from shardwright.quantities import format_bytes, parse_bytes

if TYPE_CHECKING:
    from shardwright.checkpoint.folder import CheckpointFolder
    from shardwright.checkpoint.hugging_face import Exported, ModelTensors
    from shardwright.checkpoint.saved import SavedCheckpoint


class _Format(StrEnum):
    HF = "hf"
    STATE_DICT = "state_dict"
    DCP = "dcp"
    TORCHTITAN = "torchtitan"


class Dtype(StrEnum):
    BF16 = "bf16"
    FP16 = "fp16"
    FP32 = "fp32"


_STORED = {Dtype.BF16: "BF16", Dtype.FP16: "F16", Dtype.FP32: "F32"}

Source = Annotated[
    Path, typer.Argument(metavar="DIR", help="A run, its folder of checkpoints, or one checkpoint.")
]
To = Annotated[Path, typer.Option("--output", "-o", metavar="DIR", help="A new folder, for the files.")]
Name = Annotated[
    str | None, typer.Option("--name", metavar="NAME", help="Which checkpoint; by default the newest.")
]
Kind = Annotated[
    _Format,
    typer.Option(
        "--format",
        help="Files for from_pretrained; one of torch.save: model.pt; or, with the optimizer, a folder of "
        "torch.distributed.checkpoint, as FSDP2 or torchtitan has it.",
    ),
]
Prefix = Annotated[
    str, typer.Option("--prefix", metavar="P", help="Take this from names of tensors: model. for example.")
]
To16 = Annotated[
    Dtype | None, typer.Option("--dtype", help="Convert floating-point numbers; else they stay as they are.")
]
ShardSize = Annotated[
    str, typer.Option("--max-shard-size", metavar="SIZE", help="Files larger than this are split: hf only.")
]
Config = Annotated[
    Path | None,
    typer.Option("--config", metavar="PATH", help="config.json for the files; else that of the checkpoint."),
]


def export(
    source: Source,
    to: To,
    name: Name = None,
    kind: Kind = _Format.HF,
    prefix: Prefix = "",
    dtype: To16 = None,
    max_shard_size: ShardSize = "5GiB",
    config: Config = None,
    as_json: AsJson = False,
) -> None:
    """Write a checkpoint as files of Hugging Face, a state_dict of PyTorch, or a DCP folder of FSDP2.

    The checkpoint is verified first. For example: shardwright ckpt export runs/NAME -o gpt2-trained
    """
    # Here, because they import numpy: --help answers before.
    from shardwright.checkpoint.disk import refuse_filled
    from shardwright.checkpoint.hugging_face import ModelTensors, read_config

    most_bytes = parse_bytes(max_shard_size)
    if most_bytes < 1:
        raise ConfigError(f"--max-shard-size is {max_shard_size}, and must be more than nothing.")
    of_run = kind in (_Format.DCP, _Format.TORCHTITAN)
    if of_run and (dtype is not None or config is not None):
        raise ConfigError(
            f"--format {kind} writes model and optimizer as they are, and takes neither --dtype nor "
            "--config. Leave these out, or export the model alone: --format hf."
        )
    folder, chosen = named_checkpoint(source, name)
    refuse_filled(to.resolve())  # before all is read, which may take long
    listed = folder.open(chosen, verify=False)
    document = read_config(listed, config) if config is not None else None
    _say(f"verifying {listed.path} ({format_bytes(listed.num_bytes)}) ...")
    saved = _verified(folder, listed.path.name)
    if of_run:
        _tell(
            _written_run(saved, to, prefix=prefix, flat=kind is _Format.TORCHTITAN),
            saved,
            to,
            as_json=as_json,
        )
        return
    if config is None:
        document = read_config(saved, None)
    stored = None if dtype is None else _STORED[dtype]
    # from_pretrained ties by the configuration, and wants each tensor once.
    ties = kind is _Format.STATE_DICT or document is None
    model = ModelTensors(saved, prefix=prefix, dtype=stored, ties=ties)
    if kind is _Format.HF and document is None:
        _say(
            "the checkpoint has no config.json, because its module had no configuration of Hugging Face: "
            "from_pretrained needs one; --config PATH gives it"
        )
    exported = _written(model, to, kind=kind, config=document, most_bytes=most_bytes)
    for tensor, count in model.overflowed.items():
        _say(f"{count} numbers of {tensor} are too large for {dtype}, and have become infinite")
    _tell(exported, saved, to, as_json=as_json)


def _verified(folder: "CheckpointFolder", name: str) -> "SavedCheckpoint":
    try:
        saved = folder.open(name)
        saved.check()
    except CheckpointError as error:
        if folder.lists(name):
            raise
        raise CheckpointError(
            f"{folder.root / name} was removed while it was read, by the run that saves there. Try again: "
            "there is a newer one."
        ) from error
    return saved


def _written(
    model: "ModelTensors", to: Path, *, kind: _Format, config: dict[str, object] | None, most_bytes: int
) -> "Exported":
    from shardwright.checkpoint.hugging_face import export_files

    def say(name: str) -> None:
        _say(f"writing {to / name} ...")

    if kind is _Format.HF:
        return export_files(model, to, config=config, max_shard_bytes=most_bytes, tell=say)
    from shardwright.torch.checkpoints.state_dict_files import export_state_dict

    return export_state_dict(model, to, config=config, tell=say)


def _written_run(saved: "SavedCheckpoint", to: Path, *, prefix: str, flat: bool) -> "Exported":
    from shardwright.torch.checkpoints.dcp_export import export_dcp

    return export_dcp(saved, to, prefix=prefix, flat=flat, tell=lambda name: _say(f"writing {to / name} ..."))


def _tell(exported: "Exported", saved: "SavedCheckpoint", to: Path, *, as_json: bool) -> None:
    if as_json:
        print_json(
            {
                "folder": str(to),
                "checkpoint": saved.path.name,
                "step": saved.step,
                "files": list(exported.files),
                "tensors": exported.num_tensors,
                "bytes": exported.num_bytes,
            }
        )
        return
    show_text(
        f"wrote {exported.num_tensors} tensors ({format_bytes(exported.num_bytes)}) of {saved.path.name} to "
        f"{to}: {', '.join(exported.files[:4])}{', ...' if len(exported.files) > 4 else ''}"
    )


def _say(text: str) -> None:
    say(text)
