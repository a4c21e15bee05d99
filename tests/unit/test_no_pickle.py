"""Nothing that another process wrote is unpickled, but for what is said here."""

import ast
from functools import cached_property
from pathlib import Path

import pytest

import shardwright

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
    "comm/joining/run_secret.py",
}
LOADS_IN_COMPAT = {"smdistributed/modelparallel/torch/pickles/files.py"}
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
