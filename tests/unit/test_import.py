"""What ``import shardwright`` costs and gives; settings that are given to a call in place of `init`.

What CPU mode does to modules that a script imports later.
"""

import importlib
import importlib.util
import inspect
import resource
import subprocess
import sys
import threading
import zipfile

import pytest

import shardwright
import shardwright.torch as sw
from shardwright.after_import import after_import
from shardwright.config.config import refuse_misplaced
from shardwright.errors import UsageError


def seconds_of(code):
    """CPU seconds: others may share the machine."""

    def so_far_s():
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        return used.ru_utime + used.ru_stime

    best_s = float("inf")
    for _ in range(7):
        before_s = so_far_s()
        subprocess.run([sys.executable, "-c", code], check=True)
        best_s = min(best_s, so_far_s() - before_s)
    return best_s


def test_import_takes_less_than_a_tenth_of_a_second():
    seconds = seconds_of("import shardwright") - seconds_of("pass")
    print(f"import shardwright: {seconds:.3f} s")
    assert seconds < 0.1


def test_import_loads_no_framework():
    code = "import sys, shardwright; print({'torch', 'tensorflow', 'numpy', 'pydantic'} & sys.modules.keys())"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout == "set()\n"


def test_the_public_names():
    assert shardwright.__all__ == ["__version__"]
    assert all(hasattr(shardwright, name) for name in shardwright.__all__)


def test_a_name_of_the_front_end_is_sent_there():
    with pytest.raises(AttributeError, match=r"import shardwright\.torch as sw"):
        shardwright.init()
    assert not hasattr(shardwright, "__path_of_nothing__")


def test_importing_the_front_end_loads_the_runtime_with_the_first_name():
    """It took as long as importing torch: 900 modules, and DTensor with sympy."""
    code = (
        "import sys, shardwright.torch as sw\n"
        "loaded = lambda: sum(name.startswith('shardwright.') for name in sys.modules)\n"
        "print(loaded() < 20, callable(sw.init), loaded() > 100)\n"
        "print({'torch.distributed.tensor', 'sympy', 'shardwright.checkpoint.disk'} & sys.modules.keys())"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout == "True True True\nset()\n"


def test_all_names_of_the_front_end_are_there():
    assert set(sw.__all__) <= set(dir(sw))
    assert all(callable(getattr(sw, name)) for name in sw.__all__)
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        sw.nothing  # noqa: B018


SPLITS = ("non_split_inputs", "split_lists")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"microbatches": 4},
            'a setting of the run. Write sw.init({"microbatches": 4}), or shardwright run --set',
        ),
        ({"partitions": 2}, 'Write sw.init({"partitions": 2})'),
        ({"split_list": ["x"]}, "Did you mean split_lists?"),
        ({"microbatchez": 4}, "Did you mean the setting microbatches of sw.init?"),
        ({"colour": 1}, "no option colour: it has non_split_inputs, split_lists."),
    ],
)
def test_the_message_names_the_right_place(given, message):
    with pytest.raises(UsageError) as refused:
        refuse_misplaced("@sw.step", given, takes=SPLITS)
    assert message in str(refused.value)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder from which modules are imported, and that leaves nothing behind."""
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    monkeypatch.syspath_prepend(tmp_path)
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        del sys.modules[name]


@pytest.fixture
def acted():
    """Modules that were acted on."""
    return []


def test_it_acts_when_the_code_of_the_module_has_run(folder, acted):
    (folder / "late.py").write_text("LOADER = type(__loader__).__name__\nVALUE = 1\n")
    (folder / "other.py").write_text("")
    after_import("late", lambda module: acted.append(module.VALUE))
    importlib.import_module("other")
    assert acted == []
    late = importlib.import_module("late")
    assert acted == [1]
    assert late.LOADER == type(late.__loader__).__name__ == type(late.__spec__.loader).__name__
    assert "VALUE = 1" in inspect.getsource(late)
    importlib.import_module("late")
    assert acted == [1]
    after_import("late", acted.append)
    assert acted == [1, late]


def test_it_acts_after_somebody_has_only_asked_where_the_module_is(folder, acted):
    """Bug: `importlib.util.find_spec`, as libraries ask for optional ones, used the action up."""
    (folder / "late.py").write_text("VALUE = 1\n")
    after_import("late", acted.append)
    spec = importlib.util.find_spec("late")
    assert spec.loader.get_source("late") == "VALUE = 1\n"
    assert not hasattr(spec.loader, "get_nothing")
    assert acted == [importlib.import_module("late")]


def test_any_finder_and_loader_will_do(folder, acted):
    """Bug: only files with source in `sys.path` were acted on; others not, and nothing said so."""
    with zipfile.ZipFile(folder / "library.zip", "w") as library:
        library.writestr("zipped.py", "")
        library.writestr("beside.py", "")
    sys.path.insert(0, str(folder / "library.zip"))
    (folder / "elsewhere.py").write_text("")

    class Finder:
        def find_spec(self, fullname, path, target=None):
            if fullname == "hidden":
                return importlib.util.spec_from_file_location("hidden", folder / "elsewhere.py")
            return None

    sys.meta_path.insert(0, Finder())
    for name in ("zipped", "hidden", "missing"):
        after_import(name, acted.append)
    importlib.import_module("beside")
    assert acted == []
    assert [importlib.import_module(name) for name in ("zipped", "hidden")] == acted
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("missing")


def test_a_module_whose_own_code_asks_for_it_is_acted_on_at_its_end(folder, acted):
    """Bug: transformers imports SageMaker's library in the middle of the module that defines its models."""
    (folder / "late.py").write_text("import asks\nimport asks_too\nVALUE = 1\n")
    for name in ("asks", "asks_too"):
        (folder / f"{name}.py").write_text(
            "from shardwright.after_import import after_import\n"
            "acted = []\n"
            "after_import('late', lambda module: acted.append(module.VALUE))\n"
        )
    late = importlib.import_module("late")
    assert late.asks.acted == late.asks_too.acted == [1]
    importlib.reload(late)
    assert late.asks.acted == [1, 1]


def test_a_module_that_another_thread_imports_is_acted_on_when_that_is_done(folder, acted):
    """Bug: it was acted on while its code ran."""
    (folder / "late.py").write_text(
        "import gate\ngate.REACHED.set()\ngate.OPEN.wait(timeout=20)\nVALUE = 1\n"
    )
    (folder / "gate.py").write_text(
        "import threading\nREACHED, OPEN = threading.Event(), threading.Event()\n"
    )
    gate = importlib.import_module("gate")
    imports = threading.Thread(target=importlib.import_module, args=["late"])
    imports.start()
    assert gate.REACHED.wait(timeout=20)
    acts = threading.Thread(target=after_import, args=["late", lambda module: acted.append(module.VALUE)])
    acts.start()
    gate.OPEN.set()
    for thread in (imports, acts):
        thread.join(timeout=20)
    assert acted == [1]
