"""``shardwright doctor``: describes this machine, as one block to paste into an issue; tries out its GPUs."""

import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shardwright.cli.asking.application import AsJson, print_json, say, show_text
from shardwright.errors import LaunchError, UsageError
from shardwright.exit_codes import ENVIRONMENT, FAILED
from shardwright.text import align

if TYPE_CHECKING:
    from shardwright.testing.gpu_checks import Result

Gpus = Annotated[
    bool, typer.Option("--gpus", help="Try out each path that touches a GPU: some five minutes.")
]
# For those who work on the checks: they run on CPUs what needs no GPU.
Device = Annotated[str, typer.Option("--device", hidden=True)]


def doctor(gpus: Gpus = False, device: Device = "cuda", as_json: AsJson = False) -> None:
    """Show what this machine has, and what will be in the way: a block to paste into an issue.

    --gpus trains small models on the GPUs of this host, beside plain loops, and measures rates.

    Exit code 1: a check failed; 4: something is missing without which nothing can be trained here.
    """
    # Here: --help answers before.
    from shardwright.observe.doctor import examine

    found = examine(os.environ, folder=Path("runs"))
    if gpus and not found.faults:
        _try_out(device, found.document, found.problems, as_json=as_json)
        return
    if as_json:
        print_json({"facts": found.document, "problems": found.problems, "faults": found.faults})
    else:
        show_text(align([[name, fact] for name, fact in found.facts.items()]))
        show_text("\n".join(["", *_marked(found.problems)]) if found.problems else "\nno problems")
    if found.faults:
        raise typer.Exit(ENVIRONMENT)


def _marked(problems: Sequence[str]) -> list[str]:
    return [f"! {text}" for text in problems]


def _try_out(device: str, facts: Mapping[str, Any], problems: Sequence[str], *, as_json: bool) -> None:
    """Runs the checks of GPUs, and shows them as they end, and then as a block for an issue."""
    cards = _cards(device)
    if problems and not as_json:
        show_text("\n".join([*_marked(problems), ""]))
    from shardwright.testing.gpu_checks import CHECKS, Machine, run_checks

    width = max(len(check.name) for check in CHECKS)
    results = []
    for result in run_checks(Machine(device, len(cards))):
        results.append(result)
        line = f"{result.check.name:{width}}  {result.state:7}  {result.seconds:5.1f} s  {result.text}"
        (say if as_json else show_text)(line)
    about = {**facts["versions"], **_versions(), "GPUs": ", ".join(cards) or "none: checks on the CPU"}
    if as_json:
        rows = [_row(result) for result in results]
        print_json({"facts": facts, "problems": problems, "gpus": about, "checks": rows})
    else:
        show_text("\n".join(["\nFor an issue:\n", *_block(about, results)]), folds=False)
    if any(result.state == "fail" for result in results):
        raise typer.Exit(FAILED)


def _cards(device: str) -> list[str]:
    import torch

    if device not in ("cuda", "cpu"):
        raise UsageError(f"--device is {device!r}, but checks run on cuda or cpu.")
    if device == "cpu":
        return []
    if not torch.cuda.is_available():
        built = f"for CUDA {torch.version.cuda} finds none. Does nvidia-smi, which asks the driver?"
        if torch.version.cuda is None:
            built = "is built without CUDA. Install a build with it: https://pytorch.org/get-started."
        raise LaunchError(f"--gpus tries out GPUs, but torch {torch.__version__} {built}")
    found = map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
    return [f"{each.name} ({each.total_memory / 2**30:.0f} GiB, {each.major}.{each.minor})" for each in found]


def _versions() -> dict[str, str]:
    import torch

    driver = Path("/proc/driver/nvidia/version")
    lines = driver.read_text(encoding="utf-8").splitlines() if driver.is_file() else []
    found = {"CUDA": torch.version.cuda, "driver": lines[0] if lines else None}
    if torch.version.cuda is not None:
        cudnn: Any = torch.backends.cudnn.version
        version: Any = torch.cuda.nccl.version
        found |= {"cuDNN": str(cudnn()), "NCCL": ".".join(map(str, version()))}
    return {name: version for name, version in found.items() if version is not None}


def _row(result: "Result") -> dict[str, Any]:
    return {
        "name": result.check.name,
        "state": result.state,
        "seconds": round(result.seconds, 3),
        "text": result.text,
        "runs": result.check.runs,
        "files": result.check.files.split(),
    }


def _block(about: Mapping[str, str], results: "Sequence[Result]") -> Iterator[str]:
    """Markdown: versions and cards, and a table."""
    counts = Counter(result.state for result in results)
    yield f"`shardwright doctor --gpus`: {', '.join(f'{number} {state}' for state, number in counts.items())}"
    yield ""
    yield from (f"- {name}: {version}" for name, version in about.items())
    yield from ("", "| check | | s | |", "| --- | --- | --- | --- |")
    for result in results:
        text = result.text.replace("|", "\\|").replace("\n", " ")
        yield f"| {result.check.name} | {result.state} | {result.seconds:.1f} | {text} |"
