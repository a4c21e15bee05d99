"""Writes the README for an index page, which lacks the other files; pyproject.toml has the rest."""

import re
from pathlib import Path

from setuptools import setup

REPOSITORY = "https://github.com/shardwright/shardwright"
RAW = "https://raw.githubusercontent.com/shardwright/shardwright/main"


def for_an_index(readme: str) -> str:
    """The README with addresses in the place of relative links: pages of the repository, and raw pictures."""

    def absolute(found: re.Match[str]) -> str:
        picture, text, path = found.groups()
        return f"{picture}[{text}]({RAW if picture else f'{REPOSITORY}/blob/main'}/{path})"

    return re.sub(r"(!?)\[([^\]]*)\]\((?!https?://|#)([^)\s]+)\)", absolute, readme)


if __name__ == "__main__":
    readme = (Path(__file__).parent / "README.md").read_text(encoding="utf-8")
    setup(long_description=for_an_index(readme), long_description_content_type="text/markdown")
