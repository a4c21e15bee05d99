"""The estimator: what it makes of its arguments, and what it refuses. No job is started here."""

import json

import pytest

from shardwright.errors import ConfigError, UsageError
from shardwright.launch import Estimator, Local, LocalCluster, PyTorch, TensorFlow
from shardwright.launch.job_spec import read_channels
from shardwright.launch.placement import gpus_of


def smp(processes_per_host=2, **parameters):
    return {
        "smdistributed": {"modelparallel": {"enabled": True, "parameters": {"partitions": 2, **parameters}}},
        "mpi": {"enabled": True, "processes_per_host": processes_per_host},
    }


@pytest.fixture
def script(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    (tmp_path / "data").mkdir()
    return "train.py"


def refused(script, **arguments):
    with pytest.raises(ConfigError) as caught:
        Estimator(script, **arguments)
    return str(caught.value)


def spec_of(estimator, inputs=None):
    return estimator._spec(inputs, "one")


def test_a_published_listing(script, tmp_path):
    estimator = PyTorch(
        entry_point=script,
        source_dir=str(tmp_path),
        role="arn:aws:iam::1:role/x",
        instance_type="ml.p3.16xlarge",
        instance_count=1,
        volume_size=200,
        framework_version="1.8.1",
        py_version="py36",
        debugger_hook_config=False,
        disable_profiler=True,
        base_job_name="smp gpt2",
        device="cpu",
        hyperparameters={"epochs": 3, "lr": 0.1},
        distribution=smp(microbatches=4, ddp=True),
    )
    spec = spec_of(estimator, {"train": "data"})
    assert spec.words == (
        *("--epochs", "3", "--lr", "0.1"),
        *("--mp_parameters", "ddp=True,microbatches=4,partitions=2"),
    )
    variables = spec.variables()
    assert json.loads(variables["SM_HP_MP_PARAMETERS"]) == {"partitions": 2, "microbatches": 4, "ddp": True}
    assert variables["SM_CHANNEL_TRAIN"] == str(tmp_path / "data")
    assert json.loads(variables["SM_FRAMEWORK_PARAMS"]) == {
        "sagemaker_mpi_enabled": True,
        "sagemaker_mpi_num_of_processes_per_host": 2,
        "sagemaker_mpi_custom_mpi_options": "",
        "sagemaker_distributed_dataparallel_enabled": False,
        "sagemaker_instance_type": "ml.p3.16xlarge",
    }
    assert estimator.hyperparameters()["mp_parameters"]["microbatches"] == 4
    assert estimator._spec(None, None).name.startswith("smp-gpt2-20")
    assert "--device cpu train.py --epochs 3" in estimator.manifest()
    with pytest.raises(UsageError, match="model_data is known once"):
        _ = estimator.model_data


def test_a_published_listing_for_tensorflow(script, tmp_path):
    listing = {
        "entry_point": script,
        "role": "role",
        "framework_version": "2.3.1",
        "py_version": "py37",
        "instance_type": "local",
        "distribution": smp(4, microbatches=4, pipeline="interleaved", optimize="memory", horovod=True),
    }
    spec = spec_of(TensorFlow(**listing))
    assert spec.processes_per_host == 4
    assert spec.mp_parameters["horovod"] is True
    assert spec.words[:2] == ("--model_dir", str(tmp_path / "runs/one/model"))
    assert "--model_dir" not in spec_of(TensorFlow(**listing, model_dir=False)).words
    assert spec_of(TensorFlow(**listing, model_dir="m")).words[1] == "m"
    with pytest.raises(ConfigError, match="model_dir is True"):
        TensorFlow(**listing, model_dir=True)


@pytest.mark.parametrize(
    ("distribution", "processes", "params"),
    [
        (None, 1, {}),
        ({"torch_distributed": {"enabled": True}}, 8, {}),
        ({"pytorchddp": {"enabled": True}}, 8, {"sagemaker_mpi_enabled": True}),
        ({"mpi": {"enabled": True, "processes_per_host": 4}}, 4, {"sagemaker_mpi_enabled": True}),
        ({"mpi": {"enabled": False}}, 1, {}),
        (
            {"smdistributed": {"dataparallel": {"enabled": True}}},
            8,
            {"sagemaker_distributed_dataparallel_enabled": True},
        ),
        ({"shardwright": {"parameters": {"pipeline_parallel_degree": 2}}}, 8, {}),
        ({"processes_per_host": 2, "partitions": 2, "microbatches": 4}, 2, {}),
    ],
)
def test_forms_of_distribution(script, distribution, processes, params):
    class Elsewhere(Local):
        is_here = False

    spec = spec_of(
        Estimator(script, instance_type="ml.p4d.24xlarge", distribution=distribution, engine=Elsewhere())
    )
    assert spec.processes_per_host == processes
    for name, value in params.items():
        assert spec.framework_params[name] is value


def test_settings_of_shardwright_reach_the_ranks(script, tmp_path):
    (tmp_path / "settings.yaml").write_text("microbatches: 4\n")
    distribution = {"shardwright": {"processes_per_host": 1, "parameters": "settings.yaml"}}
    assert json.loads(
        spec_of(Estimator(script, distribution=distribution)).variables()["SHARDWRIGHT_SET"]
    ) == {"microbatches": 4}
    assert "microbatchs" in refused(script, distribution={"shardwright": {"parameters": {"microbatchs": 4}}})


@pytest.mark.parametrize(
    ("distribution", "message"),
    [
        ({"smdistributed": {"modelparallel": {"enabled": True}}}, "partitions is missing"),
        (
            {"smdistributed": {"modelparallel": {"enabled": True}, "dataparallel": {"enabled": True}}},
            'they cannot be combined.*set "ddp": True',
        ),
        ({"smdistributed": {"modelparallel": {"parameters": {}}}}, "does not say whether it is enabled"),
        ({"smdistributed": {"pipeline": {}}}, "with modelparallel or dataparallel in it"),
        ({"modelparallel": {"enabled": True}}, r'Write \{"smdistributed": \{"modelparallel": \{"enabled"'),
        ({"dataparallel": {"enabled": True}, "mpi": {"enabled": True}}, "is a library of smdistributed"),
        (
            {**smp(), "mpi": {"enabled": False, "processes_per_host": 2}},
            r'mpi has enabled: False.*Write "mpi": \{"enabled": True, "processes_per_host": 2\}',
        ),
        ({"mpi": {"enabled": "yes"}}, "mpi has enabled: 'yes'"),
        ({"mpi": True}, "mpi: True, but it must be a dictionary"),
        (
            {"mpi": {"enabled": True, "processes_per_host": 0}},
            "processes_per_host is 0, but it must be a whole",
        ),
        ({"torch_distribted": {"enabled": True}}, "Did you mean torch_distributed"),
        ({"horovod": {"enabled": True}}, "scripts that import Horovod are started by"),
        (["mpi"], "distribution is a list"),
        ({"mpi": {"enabled": True, "custom_mpi_options": "-x 'A"}}, "which no shell can read"),
        (
            {
                "torch_distributed": {"enabled": True},
                "smdistributed": {
                    "modelparallel": {"enabled": True, "parameters": {"hybrid_shard_degree": 2}}
                },
            },
            "parameters of the second model parallel library",
        ),
    ],
)
def test_a_distribution_that_cannot_be_used(script, distribution, message):
    with pytest.raises(ConfigError, match=message):
        Estimator(script, distribution=distribution)


def test_kinds_of_machines(script):
    counts = {name: gpus_of(name) for name in ("ml.p4d.24xlarge", "ml.p3.8xlarge", "ml.g5.12xlarge", "local")}
    assert counts == {"ml.p4d.24xlarge": 8, "ml.p3.8xlarge": 4, "ml.g5.12xlarge": 4, "local": 0}
    assert "16, but ml.p3.16xlarge has 8 GPUs" in refused(
        script, instance_type="ml.p3.16xlarge", distribution=smp(16), device="cpu"
    )
    text = refused(script, instance_type="ml.q9.huge", distribution={"torch_distributed": {"enabled": True}})
    assert "nothing is known of instance_type 'ml.q9.huge'" in text
    assert "Estimator(..., processes_per_host=8)" in text
    Estimator(script, instance_type="ml.q9.huge", distribution=smp(4))


def test_gpus_that_are_not_here(script, monkeypatch):
    monkeypatch.setattr("shardwright.launch.placement.gpus_here", lambda: 0)
    with pytest.warns(
        UserWarning, match=r"ml\.p3\.16xlarge has 8 GPUs, and this machine has none.*device=.cpu"
    ):
        Estimator(script, instance_type="ml.p3.16xlarge", distribution=smp())
    assert "this machine has no GPU" in refused(script, instance_type="local_gpu")
    monkeypatch.setattr("shardwright.launch.placement.gpus_here", lambda: 2)
    assert "= 4 processes, but this machine has 2 GPUs" in refused(
        script, instance_type="ml.p3.16xlarge", instance_count=2, distribution=smp()
    )
    found = Estimator(
        script, instance_type="ml.p3.16xlarge", distribution={"torch_distributed": {"enabled": True}}
    )
    assert (spec_of(found).processes_per_host, spec_of(found).gpus_per_host) == (2, 2)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"entry_point": "trian.py"},
            r"entry_point is trian\.py, but there is no such file in .* It has train\.py",
        ),
        ({"source_dir": "code"}, "source_dir is code, but there is no such folder"),
        ({"source_dir": "s3://bucket/code.tar.gz"}, "source_dir is s3://.* must be a folder"),
        ({"hyperparameters": {"a": {1}}}, "hyperparameter a is .* which JSON cannot express"),
        ({"hyperparameters": {"a=b": 1}}, "a hyperparameter is called 'a=b', but it has '='"),
        ({"hyperparameters": {"a": "b\0"}}, r"hyperparameter a is 'b\\x00', but it has a NUL"),
        ({"hyperparameters": {"a": {"b": "\ud800"}}}, "hyperparameter a is .*, but it has half a character"),
        ({"environment": {"A=B": 1}}, "environment has a variable 'A=B', but it has '='"),
        ({"environment": {"A": "\udcff"}}, r"A in environment is '\\udcff', but it has half a character"),
        (
            {"hyperparameters": {"a": "b" * 200_000}},
            "hyperparameter a is .{,200}, but it takes 200,000 bytes",
        ),
        (
            {"distribution": {"mpi": {"enabled": True, "custom_mpi_options": "-x =1"}}},
            "custom_mpi_options has a variable '', but it is empty",
        ),
        ({"hyperparmeters": {}}, "no argument hyperparmeters. Did you mean hyperparameters"),
        ({"device": "gpu"}, "device is 'gpu', but it must be cpu, auto or None"),
        ({"engine": "slurm"}, "engine is 'slurm', but it must be an engine"),
        ({"max_run": "1h"}, "max_run is '1h', but it must be a number of seconds"),
        ({"output_path": "s3://bucket/out"}, "output_path is s3://bucket/out, and S3 is not read here"),
        ({"dependencies": ["lib"]}, "dependencies have lib, but there is no such"),
        ({"git_config": {"repo": "x"}}, "git_config cannot be used here: clone the repository"),
        ({"processes_per_host": 3, "distribution": smp()}, "is 3, but in distribution it is 2"),
        (
            {"hyperparameters": {"mp_parameters": "partitions=2"}, "distribution": smp()},
            "mp_parameters is among the hyperparameters, and in distribution",
        ),
    ],
)
def test_arguments_that_cannot_be_used(script, arguments, message):
    with pytest.raises(ConfigError, match=message):
        Estimator(**{"entry_point": script, **arguments})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"distribution": smp(partition_file="a\0b")}, r"a word of the script would be .*, but it has a NUL"),
        ({"output_path": "a\0b"}, r"SM_MODEL_DIR would be .*a\\x00b.*, but it has a NUL"),
    ],
)
def test_text_that_no_process_can_get_is_refused_first(script, tmp_path, arguments, message):
    """These were errors of `subprocess`, with the folder of the job left behind."""
    estimator = Estimator(script, **arguments)
    with pytest.raises(ConfigError, match=message):
        estimator.fit(job_name="one")
    assert not list(tmp_path.rglob("one"))


def test_names_of_older_versions(script):
    estimator = Estimator(script, train_instance_type="ml.p3.2xlarge", train_instance_count=2, device="cpu")
    assert (estimator.instance_type, estimator.instance_count) == ("ml.p3.2xlarge", 2)


def test_inputs(script, tmp_path):
    data = str(tmp_path / "data")
    no_s3 = {"s3_to_local": {}}
    assert read_channels("data", **no_s3) == {"training": data}
    assert read_channels({"train": f"file://{data}", "val": tmp_path / "data"}, **no_s3) == {
        "train": data,
        "val": data,
    }

    class TrainingInput:
        config = {"DataSource": {"S3DataSource": {"S3Uri": "s3://bucket/all/data"}}}  # noqa: RUF012

    mapping = {"s3_to_local": {"s3://bucket": "/nowhere", "s3://bucket/all/": str(tmp_path)}}
    assert read_channels({"train": TrainingInput()}, **mapping) == {"train": data}
    for inputs, message in [
        (
            {"train": "s3://bucket/x"},
            r"give the local folder, or .* s3_to_local=\{\"s3://bucket\": \"data\"\}",
        ),
        ({"train": "train.py"}, r"is the file train\.py, but a channel is a folder"),
        ({"train": "missing"}, "input train is missing, but there is no such folder"),
        ({"train": 3}, "input train is a int, but it must be the path"),
        ({"a b": "data"}, "an input is called 'a b'"),
        ("https://x/y", "input training is https://x/y, but only folders can be read"),
    ]:
        with pytest.raises(ConfigError, match=message):
            read_channels(inputs, **no_s3)


def test_a_dry_run_prints_each_command_and_starts_nothing(script, tmp_path, capsys):
    estimator = Estimator(script, instance_count=2, distribution=smp())
    estimator.fit({"train": "data"}, dry_run=True, job_name="one")
    of_secret, first, second = capsys.readouterr().out.splitlines()
    assert of_secret == "# export SHARDWRIGHT_SECRET=...: made at the start, the same for all hosts"
    assert "SM_CURRENT_HOST=algo-1" in first
    assert "--nproc-per-node 2 --nnodes 2 --node-rank 1 --rdzv-endpoint 127.0.0.1:29500" in second
    assert not (tmp_path / "runs").exists()
    cluster = Estimator(script, instance_count=2, engine=LocalCluster(bandwidth="1 Gbit/s")).manifest()
    begin = f"# 2 network namespaces with a link of 1 Gbit/s each\n{of_secret}\nip netns exec host0 "
    assert cluster.startswith(begin)


@pytest.mark.parametrize(
    ("bandwidth", "rate"), [(1e9, 1e9), ("800Mbit", 8e8), ("2.5 Gbit/s", 2.5e9), ("100 kbps", 1e5)]
)
def test_bandwidths(bandwidth, rate):
    assert LocalCluster(bandwidth=bandwidth).rate_bit_per_s == rate


@pytest.mark.parametrize("bandwidth", [0, -1, "fast", "1.2.3G"])
def test_bandwidths_that_are_none(bandwidth):
    with pytest.raises(ConfigError, match=r"bandwidth is .* must be a rate"):
        LocalCluster(bandwidth=bandwidth)
