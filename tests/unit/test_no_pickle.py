"""Nothing that another process wrote is unpickled, but for what is said here.

The README in a checkout and on an index page, what it says of extras, and files of a public project.

Benchmarks that the suite doesn't run still import what the library has.

What is left to the sweep is seen in pairs all the same.

What a session of tests takes is counted, and a budget holds.
"""

import ast
import importlib
import re
import runpy
import subprocess
import sys
from collections.abc import Iterator
from functools import cached_property
from itertools import combinations, product
from pathlib import Path

import pytest
import yaml

import shardwright
from choices import chosen, thorough

SOURCES = Path(shardwright.__file__).parent
COMPAT = SOURCES.parents[1] / "compat" / "src"

# Where a module that unpickles may be imported, and why.
ALLOWED = {
    "checkpoint/importing.py": {"pickletools"},  # lists what a file of the user's names, and runs none of it
    "torch/checkpoints/dcp_folder.py": {"pickle"},  # makes records of names in a list, and calls nothing else
    "comm/joining/run_secret.py": {"pickle"},  # only under the code of the run's secret
    "testing/job.py": {"cloudpickle"},  # writes for `authenticated_objects`
    "testing/rank.py": {"cloudpickle"},
    "torch/execution/replay/recording.py": {"pickle"},  # copies of an object, in its own process
    "torch/execution/replay/flat_program.py": {"pickle"},
}
ALLOWED_IN_COMPAT = {
    # Files of the user's own, whose names are looked through first; as in `torch.save(pickle_module=)`.
    "smdistributed/modelparallel/torch/pickles/files.py": {"pickle", "_compat_pickle"},
    "smdistributed/modelparallel/torch/save_load.py": {"pickle"},
}
PICKLES = {
    "pickle",
    "_pickle",
    "cPickle",
    "cloudpickle",
    "dill",
    "marshal",
    "shelve",
    "pickletools",
    "_compat_pickle",
}
OBJECTS = {"all_gather_object", "broadcast_object_list", "gather_object", "scatter_object_list"}
OBJECTS |= {"send_object_list", "recv_object_list"}
# Files of the user's own, or what a code was checked for.
LOADS = {
    "torch/checkpoints/state_dict_files.py",
    "torch/checkpoints/dcp_folder.py",
}
LOADS_IN_COMPAT = {
    "smdistributed/modelparallel/comm.py",  # what carries the code of the run's secret
    "smdistributed/modelparallel/torch/pickles/files.py",
}
CODE = {"eval", "exec", "os.system", "os.popen", "np.load", "numpy.load", "Listener", "Client"}
CODE |= {f"yaml.{name}" for name in ("load", "load_all", "full_load", "unsafe_load")}
# The script that the user names; and YAML with a loader of plain data, which refuses tags besides.
RUNS_CODE = {("cpu_mode/activation.py", "exec"), ("files/documents.py", "yaml.load")}


class Source:
    """A file's syntax, parsed and walked once for all tests."""

    def __init__(self, path):
        self.nodes = list(ast.walk(ast.parse(path.read_text())))

    @cached_property
    def imported(self):
        found = set()
        for node in self.nodes:
            if isinstance(node, ast.Import):
                found.update(alias.name.partition(".")[0] for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                found.add((node.module or "").partition(".")[0])
        return found

    @cached_property
    def called(self):
        """What the file calls, as it is written there."""
        return {ast.unparse(node.func) for node in self.nodes if isinstance(node, ast.Call)}

    @cached_property
    def flags(self):
        """Keywords that are given as True."""
        calls = (node for node in self.nodes if isinstance(node, ast.Call))
        keywords = (each for call in calls for each in call.keywords if isinstance(each.value, ast.Constant))
        return {each.arg for each in keywords if each.value.value is True}


@pytest.fixture(scope="module", params=["src", "compat"])
def part(request):
    if request.param == "compat" and not COMPAT.is_dir():
        pytest.skip(f"there is no {COMPAT} beside an installed package")
    return request.param


@pytest.fixture(scope="module")
def files(part):
    folder = SOURCES if part == "src" else COMPAT
    return {str(path.relative_to(folder)): Source(path) for path in sorted(folder.rglob("*.py"))}


def test_pickle_is_imported_in_few_places(part, files):
    found = {name: source.imported & PICKLES for name, source in files.items()}
    allowed = ALLOWED if part == "src" else ALLOWED_IN_COMPAT
    assert {name: modules for name, modules in found.items() if modules} == allowed


def test_no_collective_of_torch_takes_objects(files):
    found = {(name, call) for name, source in files.items() for call in source.called}
    assert {(name, call) for name, call in found if call.rpartition(".")[2] in OBJECTS} == set()


def test_torch_load_is_called_in_few_places(part, files):
    found = set()
    for name, source in files.items():
        loads = (node for node in source.nodes if isinstance(node, ast.Attribute) and node.attr == "load")
        if any(ast.unparse(node) == "torch.load" for node in loads):
            found.add(name)
    assert found == (LOADS if part == "src" else LOADS_IN_COMPAT)


def test_no_text_of_others_becomes_code(part, files):
    found = {(name, call) for name, source in files.items() for call in source.called & CODE}
    assert found == (RUNS_CODE if part == "src" else set())
    flags = {(name, flag) for name, source in files.items() for flag in source.flags}
    assert {(name, flag) for name, flag in flags if flag in ("shell", "allow_pickle")} == set()


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


BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def imported(source: str) -> Iterator[tuple[str, str | None]]:
    """Modules of the library that `source` imports, with each name it takes from them."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from ((alias.name, None) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from ((node.module, alias.name) for alias in node.names)


def missing(source: str) -> list[str]:
    found = []
    for module, name in imported(source):
        if module.split(".")[0] != "shardwright" or module.startswith("shardwright.tensorflow"):
            continue  # TensorFlow is in an environment of its own
        there = importlib.import_module(module)
        if name is not None and not hasattr(there, name):
            try:
                importlib.import_module(f"{module}.{name}")
            except ModuleNotFoundError:
                found.append(f"{module}.{name}")
    return found


@pytest.mark.parametrize("path", sorted(BENCHMARKS.rglob("*.py")), ids=lambda path: path.stem)
def test_imports_of_a_benchmark_are_there(path: Path) -> None:
    assert missing(path.read_text()) == []


@pytest.mark.parametrize(
    ("sizes", "together", "most"),
    [((5, 2), 1, 5), ((2, 4, 2), 2, 8), ((2, 2, 2), 2, 4), ((3, 3, 3), 2, 12)],
)
def test_each_choice_of_values_is_seen(sizes, together, most):
    found = chosen(sizes, together)
    for which in combinations(range(len(sizes)), together):
        seen = {tuple(places[i] for i in which) for places in found}
        assert seen == set(product(*(range(sizes[i]) for i in which)))
    assert len(found) == len(set(found)) <= most


@pytest.mark.parametrize(
    ("budget_s", "code", "workers"),
    [("0.001", 1, ()), thorough("1000", 0, ("-n", "1"))],
)
def test_a_session_over_its_budget_fails(budget_s: str, code: int, workers: tuple[str, ...]) -> None:
    tests = Path(__file__).parent / "test_placement.py"
    command = [sys.executable, "-m", "pytest", "-q", str(tests), "--cpu-budget", budget_s, *workers]
    found = subprocess.run(command, capture_output=True, text=True)
    assert found.returncode == code, found.stdout + found.stderr
    assert ("That is over the budget" in found.stdout) == bool(code)
    assert "test_placement.py::" in found.stdout
