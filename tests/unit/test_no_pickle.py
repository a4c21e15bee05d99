"""Nothing that another process wrote is unpickled, but for what is said here."""

import ast
from pathlib import Path

import pytest

import shardwright

SOURCES = Path(shardwright.__file__).parent
COMPAT = SOURCES.parents[1] / "compat" / "src"

# Where a module that unpickles may be imported, and why.
ALLOWED = {
    "checkpoint/pickle_names.py": {
        "pickletools"
    },  # lists what a file of the user's names, and runs none of it
    "comm/authenticated_objects.py": {"pickle"},  # only under the code of the run's secret
    "testing/payload.py": {"cloudpickle"},  # writes for `authenticated_objects`
    "testing/rank.py": {"cloudpickle"},
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
LOADS = {"torch/checkpoints/state_dict_reading.py", "comm/authenticated_objects.py"}


def trees(folder):
    for path in sorted(folder.rglob("*.py")):
        yield str(path.relative_to(folder)), ast.parse(path.read_text())


def imported(tree):
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield (node.module or "").partition(".")[0]


def called(tree):
    return {
        node.func.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
    }


@pytest.mark.parametrize(
    ("folder", "allowed"), [(SOURCES, ALLOWED), (COMPAT, ALLOWED_IN_COMPAT)], ids=["src", "compat"]
)
def test_pickle_is_imported_in_few_places(folder, allowed):
    if not folder.is_dir():
        pytest.skip(f"there is no {folder} beside an installed package")
    found = {name: set(imported(tree)) & PICKLES for name, tree in trees(folder)}
    assert {name: modules for name, modules in found.items() if modules} == allowed


def test_no_collective_of_torch_takes_objects():
    assert [(name, called(tree) & OBJECTS) for name, tree in trees(SOURCES) if called(tree) & OBJECTS] == []


def test_torch_load_is_called_in_few_places():
    found = set()
    for name, tree in trees(SOURCES):
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and ast.unparse(node) == "torch.load":
                found.add(name)
    assert found == LOADS
