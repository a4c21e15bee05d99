"""Each row of the README's table of what works, with the tests that hold it."""

import ast
import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parent

PROMISES = {
    "one process, replicas, shards (ZeRO 1 to 3)": [
        "ranks/models/test_transparency.py::test_one_process_runs_the_same_script",
        "ranks/models/test_transparency.py::test_replicas_average_their_gradients",
        "ranks/models/test_losses_of_batches.py::test_gradients_are_those_of_the_whole_batch",
        "ranks/sharding/test_sharding.py::test_a_degree_on_hosts",
        "ranks/sharding/test_sharding.py::test_replicas_share_the_optimizers_state",
        "ranks/sharding/test_live_parameters.py::test_few_at_once",
    ],
    "pipeline stages; tensor, sequence, context and expert parallelism": [
        "ranks/models/test_transparency.py::test_every_model_trains_over_two_stages",
        "ranks/models/test_plans_at_random.py::test_plans_of_two_ranks",
        "ranks/execution/test_replay.py::test_a_replayed_step_computes_the_same_bits",
        "ranks/tensor_parallel/test_shared_layers.py::test_ranks_share_every_layer",
        "ranks/tensor_parallel/test_shared_layers.py::test_stages_of_shared_layers",
        "ranks/tensor_parallel/test_shared_sequences.py::test_ranks_share_sequences",
        "ranks/tensor_parallel/test_shared_sequences.py::test_ranks_share_layers_and_sequences",
        "ranks/tensor_parallel/test_shared_experts.py::test_ranks_share_experts",
    ],
    "activation offload": [
        "ranks/offload/test_offload_is_exact.py::test_models_over_two_stages",
        "ranks/offload/test_offload_frees_memory.py::test_one_microbatch_keeps_a_few_units",
    ],
    "moments in 16 or 8 bits; optimizer offload": [
        "ranks/optimizer/test_packed_state.py::test_stages_give_the_bits_of_one_rank",
        "ranks/optimizer/test_packed_state.py::test_values_are_rounded_alike_on_all_layouts",
        "ranks/optimizer/test_packed_state.py::test_updates_in_the_hosts_memory_are_the_same",
    ],
    "own collectives (`shardwright` backend)": [
        "ranks/comm/test_communicator.py::test_every_collective_gives_every_rank_the_right_elements",
        "ranks/comm/test_backend.py::test_collectives_of_torch_distributed",
        "ranks/comm/test_backend.py::test_fsdp2",
    ],
    "attention without a table of scores": [
        "unit/torch/attention/test_model_creation.py::test_results_are_those_of_eager_attention",
        "unit/torch/attention/test_model_creation.py::test_kept_bytes_grow_linearly",
        "ranks/attention/test_routed_over_ranks.py::test_over_two_stages",
    ],
    "Trainer, Accelerate, Lightning": [
        "ecosystem/test_trainer_of_today.py::test_two_stages_log_evaluate_and_predict_what_one_process_does",
        "ecosystem/test_accelerator.py::test_two_stages_train_and_evaluate_like_one_process",
        "ecosystem/test_lightning.py::test_two_stages_train_and_evaluate_like_one_process",
    ],
    "Keras models over stages and replicas, `model.fit`": [
        "on_tensorflow/test_exact.py::test_two_ranks_give_what_a_plain_script_gives",
        "on_tensorflow/test_replicas.py::test_replicas_train_what_one_process_trains",
        "on_tensorflow/test_fit.py::test_fit_over_two_ranks_is_fit",
    ],
    "checkpoints": [
        "ranks/checkpoints/test_checkpoints.py::test_a_resumed_run_is_the_uninterrupted_one",
        "ranks/checkpoints/test_checkpoints.py::test_any_layout_resumes_what_any_other_has_saved",
        "unit/checkpoint/test_torn.py::test_every_operation_of_a_save_is_a_place_to_die",
    ],
    "plans": [
        "unit/planner/ways/test_agreement.py::test_search_and_plan_make_agree",
        "unit/planner/test_search.py::test_the_best_of_all_partitions_of_a_small_model",
        "ranks/execution/test_memory_of_a_rank.py::test_the_predicted_peak_is_the_measured_one",
    ],
    "scripts for SageMaker's SMP or SMDDP": [
        "compat/test_scripts.py::test_gpt2_saves_and_resumes",
        "compat/test_smddp.py::test_stock_training_is_that_of_one_process",
    ],
}
BESIDE_THE_TABLE = {"checkpoints", "plans", "scripts for SageMaker's SMP or SMDDP"}


def test_each_row_of_the_readme_has_tests() -> None:
    table = re.search(r"\| \| on CPUs .*\n\|[ -|]*\n((?:\|.*\n)+)", (TESTS.parent / "README.md").read_text())
    assert table is not None
    rows = {line.split("|")[1].strip() for line in table[1].splitlines()}
    assert rows == PROMISES.keys() - BESIDE_THE_TABLE


@pytest.mark.parametrize("promise", PROMISES)
def test_the_tests_of_a_promise_are_there(promise: str) -> None:
    for test in PROMISES[promise]:
        file, _, name = test.partition("::")
        functions = ast.walk(ast.parse((TESTS / file).read_text()))
        assert name in {each.name for each in functions if isinstance(each, ast.FunctionDef)}, test
