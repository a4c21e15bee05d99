"""The code blocks of README and docs."""

import os
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

__all__ = ["PAGES", "ROOT", "Block", "blocks", "execute", "typed"]

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


class Block(NamedTuple):
    """One block, ``number`` of its language on its page."""

    page: str
    number: int
    text: str

    def __str__(self) -> str:
        return f"{self.page}-{self.number}"


def blocks(language: str) -> Iterator[Block]:
    """All blocks of a language."""
    pattern = re.compile(rf"^ *```{language}\n(.*?)^ *```", re.DOTALL | re.MULTILINE)
    for page in PAGES:
        for number, text in enumerate(pattern.findall(page.read_text())):
            yield Block(page.name, number, textwrap.dedent(text))


def typed(block: Block) -> Iterator[str]:
    """The lines of a console that somebody types, without the prompt."""
    for line in block.text.replace("\\\n", " ").splitlines():
        if line.startswith("$ "):
            yield line.removeprefix("$ ")


def execute(source: str, folder: Path) -> None:
    """Runs a script as a file of this rank, with the folder as the working directory."""
    os.chdir(folder)
    path = Path(f"rank{os.environ['RANK']}.py")
    path.write_text(source)
    exec(compile(source, str(path), "exec"), {"__name__": "__main__"})
