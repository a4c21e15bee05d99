"""`shardwright run` and torchrun with real processes: results, failures, restarts, signals, logs."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

SHARDWRIGHT = [sys.executable, "-m", "shardwright"]

TRAIN = """
    import os, signal, sys
    import torch, torch.distributed as dist
    from shardwright.comm.launchers import detect
    from shardwright.comm.joining.process_group import init_process_group

    environment = detect(os.environ)
    init_process_group(environment, backend="gloo", timeout_s=60)
    value = torch.tensor([environment.rank + 1.0])
    dist.all_reduce(value)
    # One write a line: ranks, and the two streams of a rank, share a log.
    sys.stdout.write(" ".join(["sum", str(value.item()), environment.source, *sys.argv[1:]]) + "\\n")
    sys.stderr.write("on stderr\\n")
    how, num_times = (sys.argv[1:] + ["0"])[:2] if len(sys.argv) > 2 else ("", "0")
    if environment.rank == 1 and environment.restart_count < int(num_times):
        if how == "raise":
            raise ValueError("boom on one")
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(value)
    sys.stdout.write(f"done, restart {environment.restart_count}\\n")
"""


def without_torch(code):
    """A script that knows its rank but needs no import of 2 s."""
    return f"import os, signal, sys, time\nrank = int(os.environ['RANK'])\n{textwrap.dedent(code)}"


class Folder:
    """A folder with scripts, in which commands run."""

    def __init__(self, path):
        self.path = path
        self.environ = {
            **{name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"},
            # torchelastic asks the name server about 127.0.0.1: if no answer comes, 1 s is lost and not 5.
            "RES_OPTIONS": "timeout:1 attempts:1",
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        }

    def script(self, code, name="train.py"):
        (self.path / name).write_text(textwrap.dedent(code))
        return name

    def run(self, *words, timeout_s=120, **environ):
        return subprocess.run(
            words,
            cwd=self.path,
            env={**self.environ, **environ},
            capture_output=True,
            text=True,
            timeout=timeout_s,
        )

    def shardwright_run(self, *words, **environ):
        return self.run(*SHARDWRIGHT, "run", "--name", "one", *words, **environ)

    def start(self, *words):
        return subprocess.Popen(
            [*SHARDWRIGHT, "run", "--name", "one", *words],
            cwd=self.path,
            env=self.environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def log(self, rank):
        return (self.path / "runs/one/logs" / f"rank{rank}.log").read_text()

    def wait_for(self, name, *, limit_s=60.0):
        limit_s += time.monotonic()
        while not (self.path / name).exists():
            assert time.monotonic() < limit_s, f"no file {name} appeared"
            time.sleep(0.02)
        return (self.path / name).read_text()


@pytest.fixture
def folder(tmp_path):
    return Folder(tmp_path)


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_two_ranks_compute_and_their_output_is_shown_and_kept(folder):
    found = folder.shardwright_run("-n", "2", folder.script(TRAIN), "a", "3")
    assert found.returncode == 0, found.stderr
    for rank in (0, 1):
        assert f"[rank {rank}] sum 3.0 shardwright run a 3\n" in found.stdout
        assert f"[rank {rank}] on stderr\n" in found.stderr
        assert "sum 3.0" in folder.log(rank)
        assert "on stderr" in folder.log(rank)
    assert "shardwright run: 2 ranks, run folder runs/one" in found.stderr


def test_restarts_in_a_row_recover_from_a_killed_rank(folder):
    words = ("-n", "2", "--max-restarts", "2", folder.script(TRAIN), "kill", "2")
    found = folder.shardwright_run(*words)
    assert found.returncode == 0, found.stderr
    assert found.stdout.count("done, restart 2") == 2
    assert found.stderr.count("rank 1 failed first") == 2
    assert found.stderr.count("killed by SIGKILL") == 2
    assert "restarted, attempt 3 of 3" in found.stderr
    assert len(re.findall(r"^--- attempt \d", folder.log(1), flags=re.MULTILINE)) == 2


FAILS_AT_STEP_3 = """
    import torch, shardwright.torch as sw
    sw.init({"profile": "estimated", "microbatches": 2})
    model = sw.DistributedModel(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)))

    @sw.step
    def train(model, x):
        model.backward(model(x).square().mean())

    for step in range(5):
        if step == 3 and sw.rank() == 1:
            raise ValueError("no such column")
        train(model, torch.ones(4, 4))
"""


def test_what_fails_twice_at_the_same_step_is_not_started_a_third_time(folder):
    """All eight restarts were used up."""
    found = folder.shardwright_run("-n", "2", "--max-restarts", "8", folder.script(FAILS_AT_STEP_3))
    assert found.returncode == 5, found.stderr
    assert found.stderr.count("restarted, attempt") == 1
    assert "not started again: rank 1 has failed in the same way after step 3 twice" in found.stderr


TRAINS_ON = """
    import os, pathlib, sys, time
    import torch
    import shardwright.torch as sw

    is_forked = "shardwright.launch.ranks.standby" in sys.modules
    sw.init({"profile": "estimated", "microbatches": 2})
    torch.manual_seed(0)
    model = sw.DistributedModel(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)))
    checkpoints = sw.Checkpoints(every=2, asynchronous=False)

    @sw.step
    def train(model, x):
        model.backward(model(x).square().mean())

    begun = checkpoints.resume()
    for step in range(begun, 6):
        train(model, torch.ones(4, 4))
        checkpoints.step_done(step + 1)
        if step == 3 and not begun:
            assert is_forked
            pathlib.Path(f"pid{sw.rank()}").write_text(str(os.getpid()))
            time.sleep(120 * sw.rank())
    print(f"from step {begun}, forked: {is_forked}", flush=True)
"""


def test_ranks_that_start_again_have_their_libraries_already(folder):
    folder.environ["TMPDIR"] = str(folder.path)
    process = folder.start("-n", "2", "--max-restarts", "1", folder.script(TRAINS_ON))
    os.kill(int(folder.wait_for("pid1")), signal.SIGKILL)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    assert out.count("from step 4, forked: True") == 2, out + err
    assert not list(folder.path.glob("shardwright-run-*"))


def test_a_rank_that_raises_is_named_with_its_traceback_once(folder):
    found = folder.shardwright_run("-n", "2", folder.script(TRAIN), "raise", "9")
    assert found.returncode == 5
    assert "rank 1 failed first, after " in found.stderr, found.stderr
    report = found.stderr[found.stderr.index("rank 1 failed first") :]
    assert found.stderr.count("ValueError: boom on one") == 1
    assert "logs/rank1.log" in report
    assert len(report.splitlines()[-1]) < 400
    assert report.splitlines()[-1].startswith("rank 0, ")
    assert "ValueError: boom on one" in folder.log(1)


def test_the_line_of_a_dry_run_really_runs(folder):
    words = (folder.script(TRAIN, "train$$.py"), "two words", "0", "pa$$word", "${local_rank}", "$HOME")
    dry = folder.shardwright_run("-n", "2", "--set", "microbatches=4", "--dry-run", *words)
    assert dry.returncode == 0
    assert dry.stderr == ""
    found = folder.run("bash", "-c", dry.stdout)
    assert found.returncode == 0, found.stderr
    assert found.stdout.count("sum 3.0 shardwright run two words 0 pa$$word ${local_rank} $HOME\n") == 2
    assert len(list((folder.path / "runs/one/logs").rglob("stdout.log"))) == 2


def test_the_ranks_get_their_variables(folder):
    folder.script("microbatches: 2", "config.yaml")
    script = folder.script(
        without_torch(
            """
            import json
            names = ("SHARDWRIGHT_RUN_DIR", "SHARDWRIGHT_CONFIG", "SHARDWRIGHT_SET")
            names += ("OMP_NUM_THREADS", "MASTER_ADDR")
            open(f"found{rank}", "w").write(json.dumps([os.environ.get(name) for name in names]))
            """
        )
    )
    words = ("-n", "2", "--config", "config.yaml", "--set", "pipeline=1f1b", script)
    assert folder.shardwright_run(*words, OMP_NUM_THREADS="5").returncode == 0
    run_dir, config, settings, threads, master = json.loads((folder.path / "found1").read_text())
    assert (run_dir, config) == (str(folder.path / "runs/one"), str(folder.path / "config.yaml"))
    assert (json.loads(settings), threads, master) == ({"pipeline": "1f1b"}, "5", "127.0.0.1")


INFEASIBLE = """
    import torch
    import shardwright.torch as sw

    sw.init({"memory_limit": 1000, "microbatches": 2, "profile": "estimated"})
    model = sw.DistributedModel(torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 1)))

    @sw.step
    def step(model, x):
        loss = model(x).mean()
        model.backward(loss)

    step(model, torch.ones(4, 64))
"""


def test_a_model_that_does_not_fit_has_its_own_exit_code(folder):
    found = folder.shardwright_run("-n", "2", folder.script(INFEASIBLE))
    assert found.returncode == 3, found.stderr
    assert "InfeasiblePlanError: nothing fits in 1000 B a rank" in found.stderr


def test_a_rank_that_saved_and_asks_for_a_requeue_is_not_restarted(folder):
    script = folder.script(
        without_torch(
            """
            open(f"started{rank}", "a").write("x")
            time.sleep(0.5 * rank)
            open(f"saved{rank}", "w").close()
            sys.exit(75)
            """
        )
    )
    found = folder.shardwright_run("-n", "2", "--max-restarts", "2", script)
    assert found.returncode == 75, found.stderr
    assert (folder.path / "started0").read_text() == "x"
    assert (folder.path / "saved1").exists()  # rank 0 was quicker, and rank 1 was left in peace


def test_a_segmentation_fault_is_named_with_its_stack(folder):
    script = folder.script(without_torch("os.kill(os.getpid(), signal.SIGSEGV)"))
    found = folder.shardwright_run("-n", "1", script)
    assert found.returncode == 5
    assert "killed by SIGSEGV" in found.stderr
    assert "Fatal Python error: Segmentation fault" in found.stderr


def test_a_killed_rank_ends_the_job_within_seconds_although_another_ignores_sigterm(folder):
    script = folder.script(
        without_torch(
            """
            if rank == 0:
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
                open("ready", "w").close()
                time.sleep(1000)
            while not os.path.exists("ready"): time.sleep(0.01)
            open("killed", "w").write(str(time.time()))
            os.kill(os.getpid(), signal.SIGKILL)
            """
        )
    )
    found = folder.shardwright_run("-n", "2", script)
    assert found.returncode == 5
    assert time.time() - float((folder.path / "killed").read_text()) < 15  # torchelastic alone: more than 30
    assert "rank 1 failed first" in found.stderr
    assert "rank 0, " in found.stderr
    assert "did not end on SIGTERM, so it was killed" in found.stderr


def test_a_rank_that_others_have_found_to_hang_is_not_waited_for(folder):
    """Its step ends never, and so does what it would do at the end of the step."""
    script = folder.script(
        without_torch(
            """
            def told(number, frame):
                time.sleep(4.5)  # less than others have
                open("had its time", "w").close()
                os._exit(0)
            if rank == 0:
                signal.signal(signal.SIGTERM, told)
                open("ready", "w").close()
                time.sleep(1000)
            while not os.path.exists("ready"): time.sleep(0.01)
            print('Traceback (most recent call last):\\n  File "train.py", line 9, in train\\n    step()\\n'
                  'shardwright.errors.PeerTimeoutError: rank 0 hangs: no word for 10 s', file=sys.stderr)
            sys.exit(6)
            """
        )
    )
    found = folder.shardwright_run("-n", "2", script)
    assert found.returncode == 6
    assert "rank 0 hangs: rank 1 waited for it in vain, and ended" in found.stderr
    assert "killed, because rank 1 found that it hangs" in found.stderr
    assert not (folder.path / "had its time").exists()


SAVES = """
    import subprocess
    def save(number, frame):
        open(f"signal{rank}", "a").write(f"{number} ")
        time.sleep(0.3)
        sys.exit(75)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1): signal.signal(number, save)
    child = subprocess.Popen(["sleep", "1000"])
    open(f"partial{rank}", "w").write(f"{os.getpid()} {os.getppid()} {child.pid}")
    os.rename(f"partial{rank}", f"pids{rank}")
    time.sleep(1000)
"""


def test_signals_reach_the_ranks_once_and_they_have_time_to_save(folder):
    process = folder.start("-n", "2", "--max-restarts", "1", folder.script(without_torch(SAVES)))
    pids = [int(word) for rank in (0, 1) for word in folder.wait_for(f"pids{rank}").split()]
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 75, err
    assert [(folder.path / f"signal{rank}").read_text() for rank in (0, 1)] == [f"{signal.SIGTERM:d} "] * 2
    assert not [pid for pid in pids if alive(pid)]


def test_nothing_outlives_a_launcher_that_is_killed(folder):
    (folder.path / "tmp").mkdir()
    folder.environ["TMPDIR"] = str(folder.path / "tmp")
    process = folder.start("-n", "2", folder.script(without_torch(SAVES)))
    pids = [int(word) for rank in (0, 1) for word in folder.wait_for(f"pids{rank}").split()]
    process.kill()
    process.communicate(timeout=60)
    limit_s = time.monotonic() + 15
    while (left := [pid for pid in pids if alive(pid)]) and time.monotonic() < limit_s:
        time.sleep(0.05)
    assert not left
    assert list((folder.path / "tmp").iterdir()) == []


def test_two_agents_agree_on_a_generation_after_one_of_them_lost_a_rank(folder):
    """Two hosts, played by two agents: only one of them counts the restart."""
    script = folder.script(TRAIN)
    port = _free_port()
    words = ["--nnodes", "2", "--rdzv-endpoint", f"127.0.0.1:{port}", "--max-restarts", "2", "-n", "1"]
    agents = [folder.start(*words, script, "kill", "1") for _ in range(2)]
    found = [agent.communicate(timeout=150) for agent in agents]
    assert [agent.returncode for agent in agents] == [0, 0], found
    assert sum(out.count("done, restart") for out, _ in found) == 2


COMES_AND_GOES = """
    import pathlib, time
    import torch
    import shardwright.torch as sw

    sw.init({"profile": "estimated", "microbatches": 1, "pipeline_parallel_degree": 1, "timeout_s": 60})
    torch.manual_seed(0)
    model = sw.DistributedModel(torch.nn.Linear(4, 4))
    optimizer = sw.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    checkpoints = sw.Checkpoints(every=1)

    @sw.step
    def train(model, x):
        model.backward(model(x).square().mean())

    world = sw.size()
    step = checkpoints.resume()

    def is_enough():
        if world == 1:
            return False
        found = torch.tensor(float(pathlib.Path("enough").exists()))
        torch.distributed.broadcast(found, 0)  # the ranks must see the same
        return bool(found)

    while not is_enough():
        optimizer.zero_grad()
        train(model, torch.ones(4, 4))
        optimizer.step()
        step += 1
        checkpoints.step_done(step)
        if sw.rank() == 0:
            pathlib.Path(f"world{world}").write_text(str(step))
        time.sleep(0.05)
    print(f"done at step {step} on {world} ranks", flush=True)
"""


def test_a_run_goes_on_with_fewer_hosts_and_takes_them_back(folder):
    """Two hosts, played by two agents; the second one dies, and comes again."""
    script = folder.script(COMES_AND_GOES)
    words = ["--nnodes", "2", "--min-nodes", "1", "--rdzv-endpoint", f"127.0.0.1:{_free_port()}"]
    words += ["--max-restarts", "3", "-n", "1", script]
    first = folder.start(*words)
    time.sleep(2)  # it serves the store
    second = folder.start(*words)
    both = int(folder.wait_for("world2"))
    second.kill()
    second.communicate(timeout=30)
    alone = int(folder.wait_for("world1"))
    (folder.path / "world2").unlink()
    second = folder.start(*words)
    again = int(folder.wait_for("world2"))
    assert both <= alone <= again
    (folder.path / "enough").touch()
    found = [each.communicate(timeout=90) for each in (first, second)]
    assert [first.returncode, second.returncode] == [0, 0], found
    assert "".join(out for out, _ in found).count("on 2 ranks") == 2, found


def _free_port():
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def test_the_ranks_get_the_variables_of_sagemaker(folder):
    script = folder.script(
        without_torch(
            """
            import json
            assert os.path.isdir(os.environ["SM_OUTPUT_DATA_DIR"])
            path = os.path.join(os.environ["SM_MODEL_DIR"], f"rank{rank}.json")
            open(path, "w").write(json.dumps(dict(os.environ)))
            """
        )
    )
    words = ("-n", "2", "--mp-parameters", "partitions=2,ddp=True", script, "--lr", "0.1")
    found = folder.shardwright_run(*words)
    assert found.returncode == 0, found.stderr
    environ = json.loads((folder.path / "runs/one/model/rank1.json").read_text())
    assert json.loads(environ["SM_HP_MP_PARAMETERS"]) == {"partitions": 2, "ddp": True}
    assert (environ["OMPI_COMM_WORLD_RANK"], environ["OMPI_COMM_WORLD_LOCAL_SIZE"]) == ("1", "2")
    assert (environ["SM_CURRENT_HOST"], environ["SM_HP_LR"]) == ("algo-1", "0.1")
    assert not (folder.path / "runs/one/output").exists()  # the script left nothing in it
    refused = folder.shardwright_run("--mp-parameters", "pipeline=fast", script)
    assert refused.returncode == 2
    assert "pipeline is 'fast', but it must be simple" in refused.stderr


FAILS_ONCE = """
from pathlib import Path

root = Path(os.environ["SHARDWRIGHT_RUN_DIR"], "checkpoints")
if root.exists():
    sys.exit(0)
Path(root, "step-00000030").mkdir(parents=True)
sys.exit("the machine is on fire")
"""


def test_the_same_command_goes_on_with_a_run_that_failed_and_leaves_one_that_finished(folder):
    command = ("run", "-n", "1", folder.script(without_torch(FAILS_ONCE)), "--lr", "1")
    failed = folder.run(*SHARDWRIGHT, *command)
    assert failed.returncode == 5
    last = failed.stderr.splitlines()[-1]
    assert last == f"saved step 30 in runs/train/checkpoints; go on: shardwright {shlex.join(command)}"
    again = folder.run(*SHARDWRIGHT, *command)
    assert again.returncode == 0, again.stderr
    assert "run folder runs/train, goes on from step 30 (a new run: --fresh)" in again.stderr
    third = folder.run(*SHARDWRIGHT, "run", "--dry-run", "--json", *command[1:])
    assert json.loads(third.stdout)["run_folder"] == "runs/train-2"
