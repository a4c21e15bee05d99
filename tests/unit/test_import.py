"""What ``import shardwright`` costs and gives."""

import resource
import subprocess
import sys

import pytest

import shardwright
import shardwright.torch as sw


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
