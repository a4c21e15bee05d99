"""How many machines to take; the largest batch that is trained at once.

From the ways of a search to a plan.

Pins as text.
"""

import re
from dataclasses import replace

import pytest
from graphs import convolutional_chain
from planned import planned

from shardwright.catalogue import find_architecture
from shardwright.cluster import parse_inventory
from shardwright.errors import ConfigError, InfeasiblePlanError, PlanError, UsageError
from shardwright.planner.ways import Task, largest_batch, search
from shardwright.planner.ways.answers import best_plan, cheapest, offers, reasons
from shardwright.planner.ways.space import parse_pins

TASK = Task(model=find_architecture("llama3-8b"), machines=parse_inventory("p5.48xlarge*6"), batch=96)


def test_with_a_deadline_numbers_between_powers_of_two_are_looked_at():
    every = {offer.num_nodes: offer for offer in offers(TASK, tokens=100e9)}
    assert list(every) == [1, 2, 4, 6]
    # Four nodes are too slow, six are in time.
    deadline_s = (every[4].seconds + every[6].seconds) / 2
    found = {offer.num_nodes: offer for offer in offers(TASK, tokens=100e9, deadline_s=deadline_s)}
    assert list(found) == [1, 2, 4, 5, 6]
    in_time = [number for number, offer in found.items() if offer.seconds <= deadline_s]
    assert cheapest(list(found.values()), deadline_s=deadline_s).num_nodes in in_time


def test_each_offer_is_what_a_search_finds():
    found = offers(TASK, tokens=1e9)
    assert [offer.num_nodes for offer in found] == [1, 2, 4, 6]
    two = search(replace(TASK, machines=parse_inventory("p5.48xlarge*2"))).best
    assert found[1].way.step_s == two.step_s
    assert found[1].seconds == pytest.approx(1e9 / two.tokens_per_s)
    assert found[1].dollars == pytest.approx(2 * 98.32 * found[1].seconds / 3600)


def test_the_cheapest_in_time():
    found = offers(TASK, tokens=100e9)
    least = min(found, key=lambda offer: offer.dollars)
    assert cheapest(found) is least
    fastest = min(found, key=lambda offer: offer.seconds)
    assert cheapest(found, deadline_s=fastest.seconds) is fastest
    with pytest.raises(InfeasiblePlanError, match=r"within .* the fastest, 6 nodes, takes"):
        cheapest(found, deadline_s=fastest.seconds / 2)


def test_what_cannot_be_asked():
    mixed = replace(TASK, machines=parse_inventory("p5.48xlarge + p5.48xlarge"))
    with pytest.raises(UsageError, match="one kind at a time"):
        offers(mixed, tokens=1e9)
    with pytest.raises(UsageError, match="tokens is -1"):
        offers(TASK, tokens=-1)
    large = Task(model=find_architecture("gpt3-175b"), machines=parse_inventory("rtx4090x4*2"), batch=8)
    with pytest.raises(InfeasiblePlanError, match="nothing fits on any number"):
        cheapest(offers(large, tokens=1e9))


def task_of(model="gpt2-1.5b", machines="p4d.24xlarge", **more):
    found = convolutional_chain() if model == "convolutions" else find_architecture(model)
    return Task(model=found, machines=parse_inventory(machines), **{"batch": 8, **more})


def test_a_model_that_does_not_fit_says_what_would_help():
    with pytest.raises(InfeasiblePlanError, match="Take a smaller --batch"):
        largest_batch(task_of("gpt3-175b", "rtx4090x4", batch=4, pins={"offload": 0}))
    with pytest.raises(ConfigError, match="microbatch is 2, but the largest batch decides"):
        largest_batch(task_of(pins={"microbatch": 2}))


def test_more_memory_allows_no_smaller_batch():
    small, large = (largest_batch(task_of(machines=name)) for name in ("p4d.24xlarge", "p4de.24xlarge"))
    assert small.task.batch <= large.task.batch


def test_what_is_offloaded_has_room_in_the_hosts_memory():
    task = task_of("convolutions", "p4d.24xlarge", batch=8, pins={"recompute": 0})
    found = largest_batch(task)
    assert found.best.options.offload == 2
    # 55 layers keep 400,000 numbers of 16 bits each, in 80 % of an eighth of 1152 GiB; some stay.
    assert found.task.batch < 8 * 0.8 * 1152 / 8 * 2**30 / (2 * 55 * 4e5) * 1.15


def answer_of(**changed):
    given = {
        "model": find_architecture("gpt2-1.5b"),
        "machines": parse_inventory("p4d.24xlarge"),
        "batch": 64,
    }
    return search(Task(**{**given, "only_what_runs": True, **changed}))


def test_the_plan_with_the_shortest_step_is_taken():
    answer, seconds = answer_of(), iter((0.3, 0.1, 0.2))
    asked = []

    def make(samples, settings):
        asked.append((samples, settings["data_parallel_degree"]))
        return planned(forward_s=next(seconds))

    first, plan = best_plan(answer, make)
    ways = [answer.best, *answer.alternatives]
    second = sorted(ways[:3], key=lambda way: way.step_s)[1]  # they are planned in this order
    assert [first.best, *first.alternatives] == [second, *(way for way in ways if way is not second)]
    assert plan.prediction.step_s == planned(forward_s=0.1).prediction.step_s
    assert len(asked) == 3
    assert all(samples * data == 64 for samples, data in asked)
    assert f"Searched: of {answer.num_ways} ways" in plan.why[-1]


def test_what_this_version_does_not_run_is_said():
    machines, pins = parse_inventory("p4d.24xlarge*8"), {"tensor": 4, "sharded": 2}
    model = find_architecture("gpt-neox-13b")
    answer = answer_of(model=model, machines=machines, only_what_runs=False, pins=pins)
    missing = r"needs ZeRO-2 over \d+ of \d+ ranks, which this version does not run yet"
    with pytest.raises(PlanError, match=missing):
        best_plan(answer, lambda samples, settings: planned())
    runs = answer_of()
    mixed = replace(runs, best=answer.best, alternatives=(runs.best,))
    _, plan = best_plan(mixed, lambda samples, settings: planned())
    assert re.search(rf"{missing}\. Searched:", plan.why[-1])


@pytest.mark.parametrize(
    ("machines", "pins", "said"),
    [
        ("p4d.24xlarge", {}, None),
        ("p4d.24xlarge*4", {"pipeline": 32}, "24 ranks do not fit these degrees"),
        (
            "p4d.24xlarge*4",
            {"pipeline": 8, "data": 4, "sharded": 0},
            "at 75% of the rate, with 3 of 4 replicas",
        ),
        ("p4d.24xlarge*4", {"pipeline": 16, "data": 2, "sharded": 0}, "24 ranks do not fit these degrees"),
        ("p4d.24xlarge*4", {"pipeline": 1, "data": 32, "sharded": 3, "shard": 8}, "24 of 32 replicas"),
        ("p4d.24xlarge*4", {"pipeline": 1, "data": 32, "sharded": 3, "shard": 32}, "24 ranks do not fit"),
    ],
)
def test_what_a_lost_node_leaves(machines, pins, said):
    pins = {"tensor": 1, "context": 1, **pins}
    found = answer_of(machines=parse_inventory(machines), pins=pins)
    lines = [line for line in reasons(found) if "node lost" in line or "lost node" in line]
    assert [said in line for line in lines] == ([] if said is None else [True])


def test_names_of_others_and_values_by_name():
    text = [
        "tensor_parallel_degree=8",
        "PP=4,schedule=1F1B",
        "recompute=full, offload=optimizer",
        "sharded=3",
    ]
    assert parse_pins(text) == {
        "tensor": 8,
        "pipeline": 4,
        "schedule": 1,
        "recompute": 2,
        "offload": 1,
        "sharded": 3,
    }


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("tensor", "'tensor' is no option and value"),
        ("tensro=2", "'tensro' is no option of a topology; did you mean tensor"),
        ("zzz=2", "they are tensor, pipeline"),
        ("tensor=two", "tensor is 'two', but it must be a whole number"),
        ("tensor=-2", "tensor is '-2'"),
        ("recompute=some", "must be one of none, selective, full"),
        ("sharded=7", "sharded is 7, but it must be from 0 to 3"),
        ("tensor=2,tp=4", "tensor is given as 2 and as 4"),
        ("expert_parallel_degree=4", "is a setting, which does not count the ranks of a sequence"),
        ("expert_parallel_degree=4,context=2,ep=4", "is expert=8 with context=2, but expert is given as 4"),
        ("expert_parallel_degree=4,expert_parallel_degree=2", "is given as 4 and as 2. Give it once"),
    ],
)
def test_what_is_no_pin(text, message):
    with pytest.raises(ConfigError, match=message):
        parse_pins([text])


@pytest.mark.parametrize(("text", "experts"), [("context=1", 4), ("context=2", 8), ("context=2,expert=8", 8)])
def test_experts_as_a_setting_counts_them(text, experts):
    """Bug: taken for the pin, which counts the ranks of a sequence as well: the way had another setting."""
    for pins in ([f"expert_parallel_degree=4,{text}"], [text, "expert-parallel-degree=4"]):
        assert parse_pins(pins)["expert"] == experts
    assert parse_pins(["expert_parallel_degree=1"]) == {"expert": 1}


def test_numbers_of_thousands_of_digits_are_refused_shortly():
    many = "9" * 5000
    with pytest.raises(ConfigError, match="at most 12 digits") as refused:
        parse_pins([f"tensor={many}"])
    assert len(str(refused.value)) < 200
    with pytest.raises(ConfigError, match="is not a number of nodes") as refused:
        parse_inventory(f"p4d.24xlarge*{many}")
    assert len(str(refused.value)) < 400
