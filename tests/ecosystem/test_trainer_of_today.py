"""The Trainer of transformers 5 over ranks: an unedited script trains as in one process."""

import pytest
from scripts_of_others import alone, over_ranks

pytest.importorskip("accelerate")
SCRIPT = "language_modeling.py"
STAGES = {"pipeline_parallel_degree": 2, "microbatches": 2}
LOGGED = ("loss", "grad_norm", "learning_rate", "eval_loss", "eval_accuracy")


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    folder = tmp_path_factory.mktemp("plain")
    return folder, alone(SCRIPT, cwd=folder)


@pytest.fixture(scope="module")
def staged(tmp_path_factory):
    folder = tmp_path_factory.mktemp("staged")
    return folder, over_ranks(SCRIPT, cwd=folder, settings=STAGES)


def logged(report):
    """What was logged; the mean of all losses, which comes last, is that of one call of ``train``."""
    found = [{name: entry[name] for name in LOGGED if name in entry} for entry in report["history"]]
    return [entry for entry in found if entry]


def compare(report, expected):
    assert len(logged(report)) == len(logged(expected)) > 6
    for ours, theirs in zip(logged(report), logged(expected), strict=True):
        assert ours == pytest.approx(theirs, abs=3e-6)
    for ours, theirs in zip(report["predictions"], expected["predictions"], strict=True):
        assert ours == pytest.approx(theirs, abs=1e-4)


def test_two_stages_log_evaluate_and_predict_what_one_process_does(plain, staged):
    """Losses are means over the labels that count in two batches; microbatches have unequal shares."""
    compare(staged[1], plain[1])
    assert staged[1]["train_loss"] == pytest.approx(plain[1]["train_loss"], abs=3e-6)


def test_two_parts_of_each_layer_train_and_predict_as_one_process(plain, tmp_path):
    """They counted as replicas; and the last batch, of one sample, was refused."""
    compare(
        over_ranks(SCRIPT, cwd=tmp_path, settings={"tensor_parallel_degree": 2, "microbatches": 2}), plain[1]
    )


def test_the_saved_model_is_that_of_one_process(plain, staged):
    from safetensors.torch import load_file

    ours, theirs = (load_file(folder / "output/model/model.safetensors") for folder, _ in (staged, plain))
    assert ours.keys() == theirs.keys()
    for name in theirs:
        assert (ours[name] - theirs[name]).abs().max() < 2e-5, name


@pytest.mark.sweep
@pytest.mark.parametrize("shards", [1, 2])
def test_two_replicas_train_like_one_process(plain, tmp_path, shards):
    """Each reads half of every batch."""
    settings = {"pipeline_parallel_degree": 1, "sharded_data_parallel_degree": shards}
    report = over_ranks(SCRIPT, "--batch_size", "2", cwd=tmp_path, settings=settings)
    compare(report, plain[1])
