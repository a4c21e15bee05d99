"""The README in a checkout and on an index page, what it says of extras, and files of a public project."""

import re
import runpy
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
REPOSITORY = "https://github.com/shardwright/shardwright"
RAW = "https://raw.githubusercontent.com/shardwright/shardwright/main"


@pytest.fixture(scope="module")
def readme() -> str:
    return (ROOT / "README.md").read_text()


def test_it_is_short(readme: str) -> None:
    assert len(readme.splitlines()) < 150


def links_of(page: str) -> list[str]:
    found = re.findall(r"\]\(([^)]+)\)", re.sub(r"```.*?```", "", page, flags=re.DOTALL))
    assert len(found) > 10
    return found


def test_nothing_depends_on_an_address(readme: str) -> None:
    """In a checkout all links lead to files that are there."""
    for link in links_of(readme):
        if not link.startswith("#"):
            assert (ROOT / link).is_file(), link
    assert "https://" not in readme


def test_links_work_on_an_index_page(readme: str) -> None:
    """Relative ones do not: the package has them written out."""
    page = runpy.run_path(str(ROOT / "setup.py"), run_name="setup")["for_an_index"](readme)
    assert len(links_of(page)) == len(links_of(readme))
    for link in links_of(page):
        kept = f"{RAW}/" if link.endswith(".png") else f"{REPOSITORY}/blob/main/"
        assert link.startswith(("#", kept)), link


def test_the_first_screen_has_the_change_and_the_commands_before_what_never_ran(readme: str) -> None:
    places = [readme.index(each) for each in ("```diff", "make demo", "make test", "never run")]
    assert places == sorted(places)
    assert readme[: places[2]].count("\n") < 45


def test_workflows_run_targets_that_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    workflow = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())
    runs = [step["run"] for job in workflow["jobs"].values() for step in job["steps"] if "run" in step]
    called = {word for run in runs for word in re.findall(r"make ((?:[a-z-]+ ?)+)", run)}
    names = {name for words in called for name in words.split()}
    assert names >= {"test", "docs", "dist"}
    assert names <= targets


def test_every_page_is_on_the_site() -> None:
    listed = set(re.findall(r"- (\w+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE))
    assert listed == {path.name for path in (ROOT / "docs").glob("*.md")}


def test_shares_are_written_as_commands_print_them(readme: str) -> None:
    pages = {path.name: path.read_text() for path in (ROOT / "docs").glob("*.md")} | {"README.md": readme}
    apart = {name: re.findall(r".{20}\d\s%(?! ?\d).{10}", page, re.DOTALL) for name, page in pages.items()}
    assert {name: found for name, found in apart.items() if found} == {}, "12%, and not 12 %"
