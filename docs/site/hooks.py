"""Links from pages to files of the repository lead to the forge, and must lead somewhere."""

import re
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).parents[2]
_LINK = re.compile(r"(\]\()\.\./([^)#]+)(#[^)]*)?(\))")


def on_page_markdown(markdown: str, config: Any, **_: Any) -> str:
    """Has ``](../examples/x.py)`` lead to the file on the forge.

    Raises:
        FileNotFoundError: there is no such file.
    """

    def link(found: re.Match[str]) -> str:
        path = _ROOT / found[2]
        if not path.exists():
            raise FileNotFoundError(f"a page links to {found[2]}, which is not there")
        kind = "tree" if path.is_dir() else "blob"
        return f"{found[1]}{config.repo_url}/{kind}/main/{found[2]}{found[3] or ''}{found[4]}"

    return _LINK.sub(link, markdown)
