"""What Accelerate's quickstart and its examples of checkpoints call: LoRA, recomputation, counted labels.

All parameters train in `scripts_of_accelerate`, whose losses are compared, too.
"""

import pytest
import torch
from scripts_of_others import alone, over_ranks
from torch.utils.data import DataLoader

from shardwright.testing import RanksFailedError, run_ranks

pytest.importorskip("accelerate")
pytest.importorskip("peft")
SCRIPT = "whole_accelerate.py"
STAGES = {"pipeline_parallel_degree": 2, "microbatches": 2}
COUNTED = ("accuracy", "evaluated", "rate")


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return alone(SCRIPT, "--lora", cwd=tmp_path_factory.mktemp("plain"))


@pytest.fixture(scope="module")
def staged(tmp_path_factory):
    folder = tmp_path_factory.mktemp("staged")
    return folder, over_ranks(SCRIPT, "--lora", cwd=folder, settings=STAGES)


def compare(report, expected):
    last = len(report["losses"])
    assert report["losses"] == pytest.approx(expected["losses"][-last:], abs=3e-6)
    assert report["norms"] == pytest.approx(expected["norms"][-len(report["norms"]) :], rel=1e-4)
    for name in COUNTED:
        assert report[name] == pytest.approx(expected[name]), name


def test_two_stages_train_and_evaluate_like_one_process(plain, staged):
    """The last batches, of training and of the evaluation, are half of the others."""
    compare(staged[1], plain)


def test_the_saved_files_are_those_of_one_process(plain, staged):
    names = [name for name in plain["files"] if not name.startswith("state/")]
    assert set(names) == {"model/model.safetensors", "pretrained/adapter_model.safetensors"} | set(names)
    assert set(names) <= set(staged[1]["files"])


def test_a_state_of_two_ranks_with_a_scheduler_loads_on_one(plain, staged, tmp_path):
    """`save_state` failed whenever a scheduler was prepared: its name began with an underscore."""
    state = staged[0] / "output/state"
    report = over_ranks(SCRIPT, "--lora", "--resume", state, cwd=tmp_path, settings={}, num_ranks=1)
    assert len(report["losses"]) == len(plain["losses"]) - 2
    compare(report, plain)


def _loaded(folder):
    from shardwright.integrations.accelerate import Accelerator

    accelerator = Accelerator(cpu=True, config={"profile": "estimated", "run_dir": "off", "microbatches": 2})
    accelerator.prepare(torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)))
    accelerator.load_state(folder)


def test_a_state_of_plain_accelerate_is_refused_and_named(tmp_path):
    """`load_state` of its folder, or of an empty one, loaded nothing and said nothing."""
    with pytest.raises(RanksFailedError, match=r"no state of this Accelerator is there\. accelerator\.save"):
        run_ranks(_loaded, 2, str(tmp_path))
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(RanksFailedError, match=r"plain Accelerate.*safetensors\.torch\.load_file\("):
        run_ranks(_loaded, 2, str(tmp_path))


def _told(texts):
    from shardwright.integrations.accelerate import Accelerator

    accelerator = Accelerator(cpu=True, config={"pipeline_parallel_degree": 2, "run_dir": "off"})
    loader = accelerator.prepare(DataLoader(range(len(texts)), batch_size=2))
    found = []
    for batch in loader:
        found += accelerator.gather_for_metrics([texts[number] for number in batch])
    last = accelerator.gather_for_metrics(batch, use_gather_object=True)
    triggers = [accelerator.check_trigger()]
    if accelerator.is_main_process:
        accelerator.set_trigger()
    triggers += [accelerator.check_trigger(), accelerator.check_trigger()]
    return found, list(map(int, last)), triggers, accelerator.is_last_process


@pytest.mark.parametrize(("num_ranks", "last_batch"), [(2, [6]), (4, [4, 5, 6, 0])])
def test_texts_of_each_sample_and_a_flag_of_one_rank(num_ranks, last_batch):
    """Texts came once for each rank of a replica, and a trigger was seen by the stage that had set it.

    Two replicas fill up the last batch with samples that were there before.
    """
    texts = list("abcdefg")
    outcomes = run_ranks(_told, num_ranks, texts)
    for rank, (found, last, triggers, is_last) in enumerate(outcomes):
        assert found == texts
        assert triggers == [False, True, False]
        assert is_last == (rank == num_ranks - 1)
        assert last == last_batch
