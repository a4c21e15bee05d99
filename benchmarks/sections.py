"""The command line of a benchmark with sections: which run, what is shown, what is written.

A section gives tables, by title, and targets.
"""

import argparse
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from check import Check, lines
from machine import circumstances

__all__ = ["Figures", "Section", "parser_for", "run_sections"]

Figures = dict[str, Any]
"""Tables that were measured, by title."""

Section = tuple[Figures, list[Check]]


def parser_for(description: str | None, *, quick: str) -> argparse.ArgumentParser:
    """A parser with ``--quick``, ``--check`` and ``--json``.

    Args:
        description: of the benchmark, its docstring.
        quick: what ``--quick`` leaves.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--quick", action="store_true", help=quick)
    parser.add_argument("--check", action="store_true", help="only the targets; exit 1 where one is missed")
    parser.add_argument("--json", type=Path, help="write what was found there")
    return parser


def run_sections(
    options: argparse.Namespace,
    sections: Mapping[str, Callable[[argparse.Namespace], Section]],
    *,
    shown: Callable[[Any], str],
    more: Callable[[], Mapping[str, Any]] = dict,
) -> int:
    """Runs the sections that are asked for; the exit status.

    Args:
        options: from a parser of `parser_for`, with ``only`` beside: a section, or None for all.
        sections: by name.
        shown: writes a table.
        more: what else goes to the file of ``--json``, when all have run.
    """
    where = circumstances()
    print("\n".join(f"{key}: {value}" for key, value in where.items()))
    found: Figures = {}
    checks: list[Check] = []
    for name in sections if options.only is None else [options.only]:
        figures, of_section = sections[name](options)
        found |= figures
        checks += of_section
    if not options.check:
        for title, table in found.items():
            print(f"\n{title}\n{shown(table)}")
        print()
    print("\n".join(lines(checks)))
    if options.json is not None:
        verdicts = [asdict(check) | {"passes": check.passes} for check in checks]
        document = {"circumstances": where, "figures": found, **more(), "checks": verdicts}
        options.json.write_text(json.dumps(document, indent=1) + "\n")
    return 1 if options.check and not all(check.passes for check in checks) else 0
