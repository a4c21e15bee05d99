"""What is to be launched: which values go together, which variables the ranks get, the torchrun line.

Text that a process cannot get: the kernel is asked, too, whether that is so.
"""

import errno
import json
import re
import subprocess

import pytest

from shardwright.errors import ConfigError, UsageError
from shardwright.launch.processes import (
    check_process,
    why_no_text,
    why_no_variable,
)
from shardwright.launch.ranks.request import LaunchRequest, torchrun_command


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "train.py"
    path.touch()
    return path


def request_for(script, **changes):
    return LaunchRequest(**{"target": str(script), "run_folder": script.parent / "runs/one", **changes})


def test_the_ranks_get_what_the_command_line_says(script, tmp_path, monkeypatch):
    (tmp_path / "plan.json").touch()
    (tmp_path / "config.yaml").touch()
    monkeypatch.chdir(tmp_path)
    request = request_for(
        script,
        plan=script.parent.relative_to(tmp_path) / "plan.json",
        config=tmp_path / "config.yaml",
        settings={"microbatches": 4, "pipeline": "1f1b"},
    )
    assert request.worker_environ({"OMP_NUM_THREADS": "3"}) == {
        "SHARDWRIGHT_RUN_DIR": str(tmp_path / "runs/one"),
        "SHARDWRIGHT_PLAN": str(tmp_path / "plan.json"),
        "SHARDWRIGHT_CONFIG": str(tmp_path / "config.yaml"),
        "SHARDWRIGHT_SET": json.dumps({"microbatches": 4, "pipeline": "1f1b"}),
    }


@pytest.mark.parametrize(("num_ranks", "threads"), [(1, "6"), (2, "3"), (4, "1"), (8, "1")])
def test_the_cores_are_divided_among_the_ranks(script, monkeypatch, num_ranks, threads):
    monkeypatch.setattr("shardwright.launch.ranks.request.cores_of_host", lambda: 6)
    assert request_for(script, num_ranks=num_ranks).worker_environ({})["OMP_NUM_THREADS"] == threads


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"target": "missing.py"}, r"There is no script missing\.py .*Check the path"),
        ({"target": "missing"}, "for a module: shardwright run -m missing"),
        ({"target": "{folder}/n.ipynb"}, r"n\.ipynb is a notebook, and no script"),
        ({"target": "{folder}/job.sh"}, r"job\.sh is a shell script, and ranks run Python"),
        (
            {"target": "python3", "arguments": ("a.py", "-v")},
            r"ranks are started with it as it is\. Write shardwright run a\.py -v",
        ),
        ({"target": "{folder}/my", "arguments": ("script.py",)}, r'Put quotes around it: .*my script\.py"'),
        ({"target": "/"}, "/ is a folder. Give the path of a script"),
        ({"num_nodes": 2}, "--nnodes 2 needs --rdzv-endpoint HOST:PORT"),
        ({"min_nodes": 1}, "--min-nodes is for runs of several hosts"),
        (
            {"num_nodes": 2, "endpoint": "a:1", "min_nodes": 3},
            "--min-nodes is 3, but it must be from 1 to the 2 of --nnodes",
        ),
        ({"num_nodes": 2, "endpoint": "a:1", "min_nodes": 1}, "set --max-restarts"),
        (
            {"num_nodes": 2, "endpoint": "a:1", "min_nodes": 1, "max_restarts": 1, "node_rank": 0},
            "leave out --node-rank",
        ),
        (
            {"num_nodes": 2, "endpoint": "a:1", "node_rank": 2},
            "--node-rank 2 is not in 0 to 1, for --nnodes is 2",
        ),
    ],
)
def test_what_does_not_go_together_is_refused(script, changes, message):
    for name in ("n.ipynb", "job.sh", "my script.py"):
        (script.parent / name).touch()
    if "target" in changes:
        changes = changes | {"target": changes["target"].format(folder=script.parent)}
    with pytest.raises(UsageError, match=message):
        request_for(script, **changes)


def test_the_torchrun_line_for_several_hosts(script):
    hosts = {"num_nodes": 2, "endpoint": "first:29400"}
    assert torchrun_command(request_for(script, **hosts))[1:4] == [
        *("--nnodes=2", "--rdzv-backend=c10d", "--rdzv-endpoint=first:29400")
    ]
    assert torchrun_command(request_for(script, **hosts, node_rank=1))[1:5] == [
        *("--nnodes=2", "--node-rank=1", "--master-addr=first", "--master-port=29400")
    ]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["shardwright.integrations", "{script}", "--lr", "1"], "{script}"),
        (["shardwright.cpu_mode", "-m", "shardwright.integrations", "{script}"], "{script}"),
        (["shardwright.integrations", "-m", "my.train"], "my.train"),
        (["my.train", "-m", "x"], "my.train"),
        (["shardwright.integrations"], "shardwright.integrations"),
    ],
)
def test_a_run_is_named_after_the_script_behind_a_module_of_ours(script, words, expected):
    """Each was named ``integrations``, and offered to continue another script's run."""
    target, *arguments = (word.format(script=script) for word in words)
    request = request_for(script, target=target, is_module=True, arguments=tuple(arguments))
    assert request.named_after == expected.format(script=script)


def starts(words=(), variables=None):
    try:
        return subprocess.run(["/bin/true", *words], env=variables or {}).returncode == 0
    except OSError as error:
        return error.errno != errno.E2BIG


@pytest.mark.parametrize("num_bytes", [131_070, 131_071, 131_072, 200_000])
def test_texts_are_as_long_as_the_kernel_takes_them(num_bytes):
    """Bug: any length passed, and the process failed with E2BIG."""
    word, value = "é" * (num_bytes // 2) + "a" * (num_bytes % 2), "b" * (num_bytes - len("A="))
    assert (why_no_text(word) is None) == starts([word]) == (num_bytes <= 131_071)
    assert (why_no_variable("A", value) is None) == starts(variables={"A": value})


def test_a_text_that_is_too_long_is_not_told_in_full():
    with pytest.raises(ConfigError) as caught:
        check_process([], {"SM_HPS": "b" * 200_000})
    said = str(caught.value)
    assert re.match(r"SM_HPS would be 'b+\.\.\.b+', but it takes 200,007 bytes", said)
    assert "at most 131,071 in one word or variable. Put what is long in a file, in a channel" in said
    assert len(said) < 500
