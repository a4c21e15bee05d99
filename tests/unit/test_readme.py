"""The README as an index page shows it, what it says of extras, and the files of a public project."""

import re
import tomllib
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
REPOSITORY = "https://github.com/shardwright/shardwright"
RAW = "https://raw.githubusercontent.com/shardwright/shardwright/main/"


@pytest.fixture(scope="module")
def readme() -> str:
    return (ROOT / "README.md").read_text()


@pytest.fixture(scope="module")
def project() -> dict[str, object]:
    found: dict[str, object] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return found


def test_it_is_short(readme: str) -> None:
    assert len(readme.splitlines()) < 150


def test_links_work_on_an_index_page(readme: str) -> None:
    """Relative ones do not. Those to the repository lead to files that are there."""
    prose = re.sub(r"```.*?```", "", readme, flags=re.DOTALL)
    links = re.findall(r"\]\(([^)]+)\)", prose)
    assert len(links) > 10
    for link in links:
        assert link.startswith("https://"), link
        for prefix in (f"{REPOSITORY}/blob/main/", RAW):
            if link.startswith(prefix):
                assert (ROOT / link.removeprefix(prefix)).is_file(), link


def test_extras_are_those_of_the_package(readme: str, project: dict[str, object]) -> None:
    extras = project["optional-dependencies"]
    assert isinstance(extras, dict)
    table = readme.partition("| extra |")[2].partition("\n\n")[0]
    named = set(re.findall(r"`([a-z]+)`", "\n".join(row.split("|")[1] for row in table.splitlines()[2:])))
    # The report needs nothing more than the package; docs and dev are for those who change it.
    assert named == set(extras) - {"report", "docs", "dev"}


def test_workflows_run_targets_that_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    workflow = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())
    runs = [step["run"] for job in workflow["jobs"].values() for step in job["steps"] if "run" in step]
    called = {word for run in runs for word in re.findall(r"make ((?:[a-z-]+ ?)+)", run)}
    names = {name for words in called for name in words.split()}
    assert names >= {"test", "docs", "dist"}
    assert names <= targets


def test_the_citation_has_the_version_of_the_package(project: dict[str, object]) -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == project["version"]
    assert citation["license"] == project["license"]


def test_every_page_is_on_the_site() -> None:
    listed = set(re.findall(r"- (\w+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE))
    assert listed == {path.name for path in (ROOT / "docs").glob("*.md")}


def test_shares_are_written_as_commands_print_them(readme: str) -> None:
    pages = {path.name: path.read_text() for path in (ROOT / "docs").glob("*.md")} | {"README.md": readme}
    apart = {name: re.findall(r".{20}\d\s%(?! ?\d).{10}", page, re.DOTALL) for name, page in pages.items()}
    assert {name: found for name, found in apart.items() if found} == {}, "12%, and not 12 %"
