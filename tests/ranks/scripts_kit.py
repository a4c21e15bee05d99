"""Scripts as newcomers have them, in the form for one process and in ours, in one text.

A line that ends with ``#-`` is in the plain form alone, one that ends with ``#+`` in ours alone. A script
calls ``told(loss)`` for each loss that it reports. Ours gets its settings as ``SETTINGS``.
"""

import difflib
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

__all__ = ["Script", "batch_losses", "changed_lines", "losses_of"]


@dataclass(frozen=True)
class Script:
    """A script, in both forms."""

    text: str
    microbatches: int = 4
    spreads: bool = True
    replicates: bool = True
    is_sum: bool = False
    settings: Mapping[str, Any] = field(default_factory=dict)

    def form(self, mark: str) -> str:
        """The lines of one form: without those of the other, and without marks."""
        other = {"+": "#-", "-": "#+"}[mark]
        lines = [line for line in self.text.strip().splitlines() if not line.endswith(other)]
        return "\n".join(line.removesuffix(f"#{mark}").rstrip() for line in lines) + "\n"


def changed_lines(script: Script) -> int:
    """How many lines one changes, adds or takes out."""
    plain, ours = script.form("-").splitlines(), script.form("+").splitlines()
    codes = difflib.SequenceMatcher(None, plain, ours, autojunk=False).get_opcodes()
    return sum(max(b - a, d - c) for kind, a, b, c, d in codes if kind != "equal")


def losses_of(script: Script, name: str, settings: Mapping[str, Any] | None) -> list[float]:
    """Runs a script; the losses that it tells."""
    losses: list[float] = []

    def told(loss: Any) -> None:
        losses.append(float(loss.detach()) if torch.is_tensor(loss) else float(loss))

    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    given = None
    if settings is not None:
        given = {"profile": "estimated", "run_dir": "off", "microbatches": script.microbatches}
        given = {**given, **script.settings, **settings}
    code = compile(script.form("-" if settings is None else "+"), f"{name}.py", "exec")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of the libraries that scripts use, to one another
        exec(code, {"__name__": "__main__", "told": told, "SETTINGS": given})
    return losses


def batch_losses(script: Script, by_rank: list[list[float]]) -> list[float]:
    """The losses of whole batches, from those that ranks of two replicas tell."""
    share = 1.0 if script.is_sum else 1 / len(by_rank)
    return [sum(each) * share for each in zip(*by_rank, strict=True)]
