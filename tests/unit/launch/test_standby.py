"""The process of which ranks are forked when they start again: a script finds what a new interpreter has."""

import json
import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from shardwright.launch.ranks.standby import forked, standby

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the launcher asks for it on Linux alone")

TELLS = """
    import json, os, signal, sys, threading
    own = {name: repr(value) for name, value in vars(sys.modules["__main__"]).items() if name[0] == "_"}
    del own["__builtins__"], own["__loader__"]
    signals = {n: str(signal.getsignal(n)) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD)}
    threads = threading.current_thread() is threading.main_thread(), threading.active_count()
    print(json.dumps([own, sys.argv, sys.path, signals, threads, os.getcwd(), dict(os.environ)]))
    print("numpy" in sys.modules, file=sys.stderr)
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "run").mkdir(0o700)
    monkeypatch.chdir(tmp_path)
    return tmp_path / "run"


def written(code, name="train.py"):
    Path(name).write_text(textwrap.dedent(code))
    return name


def wait_for(condition):
    limit_s = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < limit_s
        time.sleep(0.02)


@contextmanager
def ready(folder, libraries=("numpy",)):
    """A standby that waits for scripts."""
    with standby(folder, written("".join(f"import {name}\n" for name in libraries), "first.py")):
        yield


def run(folder, *words, environ=None):
    script = forked(folder, words, os.environ if environ is None else environ)
    assert script is not None
    with closing(script):
        out, err = script.stdout.read().decode(), script.stderr.read().decode()
        wait_for(lambda: script.poll() is not None)
        return script.poll(), out, err


def test_a_script_finds_its_process_as_a_new_one_with_libraries(folder):
    words = (written(TELLS), "--lr", "0.1")
    environ = {**os.environ, "RANK": "1"}
    plain = subprocess.run([sys.executable, *words], env=environ, capture_output=True, text=True, check=True)
    with ready(folder):
        code, out, err = run(folder, *words, environ=environ)
    assert (code, json.loads(out)) == (0, json.loads(plain.stdout))
    assert (plain.stderr, err) == ("False\n", "True\n")


def test_it_ends_as_a_script_of_its_own_interpreter_would(folder):
    ends = {
        "sys.exit(3)": 3,
        "sys.exit('no data')": 1,
        "raise ValueError('boom')": 1,
        "raise KeyboardInterrupt": -signal.SIGINT,
        "os._exit(5)": 5,
        "os.kill(os.getpid(), signal.SIGKILL)": -signal.SIGKILL,
        "import atexit; atexit.register(print, 'end')": 0,
    }
    with ready(folder):
        for end, code in ends.items():
            script = written(f"import os, signal, sys\ndef f():\n    {end}\nf()\n")
            plain = subprocess.run([sys.executable, script], capture_output=True, text=True)
            found, out, err = run(folder, script)
            assert (found, out) == (code, plain.stdout)
            assert found == plain.returncode
            assert err.replace('  File "<string>", line 1, in <module>\n', "") == plain.stderr


def test_a_script_that_is_no_python_is_told_as_python_tells_it(folder):
    script = written("x = (\n")
    plain = subprocess.run([sys.executable, script], capture_output=True, text=True)
    with ready(folder):
        assert run(folder, script) == (plain.returncode, "", plain.stderr)


def test_a_signal_that_comes_as_soon_as_a_script_is_forked_is_not_lost(folder):
    """Ctrl-C while libraries were imported: ranks began all the same, and ran to their end."""
    script = written("import time\ntime.sleep(60)\n")
    with ready(folder):
        for number in (signal.SIGTERM, signal.SIGUSR1) * 10:
            with closing(forked(folder, (script,), os.environ)) as running:
                os.kill(running.pid, number)
                wait_for(lambda: running.poll() is not None)
                assert running.poll() == -number


def test_workers_that_the_script_spawns_find_its_functions(folder):
    script = written("""
        import multiprocessing

        def double(x):
            return 2 * x

        if __name__ == "__main__":
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                print(pool.map(double, [1, 2]))
    """)
    with ready(folder):
        code, out, err = run(folder, script)
    assert (code, out) == (0, "[2, 4]\n"), err


def test_ranks_draw_random_numbers_of_their_own(folder):
    script = written("import random, numpy\nprint(random.random(), numpy.random.random())\n")
    with ready(folder):
        first, second = (run(folder, script)[1].split() for _ in range(2))
    assert first[0] != second[0]
    assert first[1] != second[1]


@pytest.mark.parametrize("who", ["supervisor", "standby"])
def test_a_script_ends_with_its_supervisor_and_with_the_standby(folder, who):
    script = written("import os, time\nprint(os.getppid(), flush=True)\ntime.sleep(60)\n")
    with ready(folder), closing(forked(folder, (script,), os.environ)) as running:
        parent = int(running.stdout.readline())
        if who == "standby":
            os.kill(parent, signal.SIGKILL)
        else:
            running._connection.close()
        assert running.stdout.read() == b""  # the kernel has closed its end
        if who == "standby":
            assert running.poll() == -signal.SIGKILL
            assert forked(folder, (script,), os.environ) is None


def test_signals_to_all_processes_are_for_the_scripts(folder):
    """Slurm sends them to all: the standby died of one, and all ranks with it, unsaved."""
    script = written("""
        import os, signal, sys
        signal.signal(signal.SIGUSR1, lambda *_: sys.exit(75))
        print(os.getppid(), signal.getsignal(signal.SIGTERM) is signal.SIG_DFL, flush=True)
        signal.pause()
    """)
    with ready(folder), closing(forked(folder, (script,), os.environ)) as running:
        standby, has_default = running.stdout.readline().split()
        assert has_default == b"True"
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
            os.kill(int(standby), number)
        time.sleep(0.2)
        os.kill(running.pid, signal.SIGUSR1)
        wait_for(lambda: running.poll() is not None)
        assert running.poll() == 75


def test_who_asks_and_leaves_does_no_harm(folder):
    script = written("print(len(__import__('os').environ['LONG']))")
    with ready(folder):
        for said in (b"", b"\x05\0\0\0", b"\x05\0\0\0xxxxx"):
            with socket.socket(socket.AF_UNIX) as other:
                other.connect(str(folder / "standby"))
                other.sendall(said)
        environ = {**os.environ, "LONG": "x" * 100_000, **{f"MORE{n}": "y" * 100_000 for n in range(8)}}
        assert run(folder, script, environ=environ)[:2] == (0, "100000\n")


def test_threads_that_end_for_a_fork_are_none(folder, monkeypatch):
    """OpenBLAS begins them when NumPy is imported, wherever a rank has two cores."""
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "2")
    script = written("import numpy\nx = numpy.ones((300, 300))\nprint((x @ x)[0, 0])")
    with ready(folder):
        assert run(folder, script)[:2] == (0, "300.0\n")


def test_it_ends_with_the_launcher_when_the_last_script_has(folder):
    launcher = "from pathlib import Path; from shardwright.launch.ranks.standby import standby\n"
    launcher += f"with standby(Path({str(folder)!r}), {written('pass', 'first.py')!r}):\n    input()\n"
    script = written("import os\nprint(os.getppid(), flush=True)\nos.read(0, 1)\nprint('saved')\n")
    with subprocess.Popen([sys.executable, "-c", launcher], stdin=subprocess.PIPE) as process:
        wait_for(lambda: (folder / "standby").exists())
        with closing(forked(folder, (script,), os.environ)) as running:
            standby = int(running.stdout.readline())
            process.kill()
            process.wait()
            time.sleep(1.5)
            assert running.poll() is None
            process.stdin.close()
            assert running.stdout.read() == b"saved\n"
            wait_for(lambda: running.poll() is not None)
            assert running.poll() == 0
        wait_for(lambda: not Path(f"/proc/{standby}").exists())


THREAD = "import threading, time\nthreading.Thread(target=time.sleep, args=(60,), daemon=True).start()\n"


def test_there_is_none_where_a_library_has_threads(folder, monkeypatch):
    Path("libraries").mkdir()
    written(THREAD, "libraries/torchvision.py")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([f"{os.getcwd()}/libraries", *sys.path]))
    with standby(folder, written("import torchvision")) as process:
        assert process.wait(30) == 1
        assert forked(folder, (written("pass"),), os.environ) is None


@pytest.mark.parametrize(
    ("first", "has_numpy"),
    [
        ('"A script."\nfrom __future__ import annotations\nimport os, numpy.linalg\n', True),
        ('import os\nos.environ["OMP_NUM_THREADS"] = "3"\nimport numpy\n', False),
        ("import settings_of_mine\nimport numpy\n", False),
        ("import numpy\nimport\n", False),
        ("from numpy import no_such_name\n", True),
    ],
)
def test_what_is_imported_ahead_is_what_a_script_imports_first(folder, first, has_numpy):
    script = written("import sys\nprint('numpy' in sys.modules)")
    with standby(folder, written(first, "first.py")):
        assert run(folder, script)[:2] == (0, f"{has_numpy}\n")


@pytest.mark.parametrize("imports_us", [True, False])
def test_what_each_run_needs_is_imported_for_a_script_that_imports_us(folder, imports_us):
    first = "import torch\nimport of_my_own\n" + "def train():\n    import shardwright.torch\n" * imports_us
    names = ["torch", "torch._dynamo", "shardwright.torch.startup", "of_my_own"]
    script = written(f"import sys\nprint(*[name in sys.modules for name in {names}])")
    with standby(folder, written(first, "first.py")):
        assert run(folder, script)[1] == f"True {imports_us} {imports_us} False\n"


@pytest.mark.parametrize("name", ["select.py", "tqdm.py", "random/__init__.py"])
def test_there_is_none_beside_a_module_that_is_named_like_another(folder, name):
    """The script got Python's, which the process had for itself."""
    Path("random").mkdir()
    written("raise AssertionError", name)
    with standby(folder, written("import tqdm\nimport numpy")) as process:
        assert process.wait(30) == 1
        assert forked(folder, (written("pass"),), os.environ) is None


def test_what_a_script_writes_arrives_where_the_launcher_has_no_output(folder, monkeypatch):
    """Its own was closed (``>&-``), and the log stayed empty."""
    monkeypatch.setattr(sys, "stdout", None)
    monkeypatch.setattr(sys, "stderr", None)
    script = written("import sys\nprint('out')\nprint('err', file=sys.stderr)")
    with ready(folder):
        assert run(folder, script) == (0, "out\n", "err\n")
