"""How many machines to take."""

from dataclasses import replace

import pytest

from shardwright.catalogue import find_architecture
from shardwright.cluster import parse_inventory
from shardwright.errors import InfeasiblePlanError, UsageError
from shardwright.planner.ways import Task, search
from shardwright.planner.ways.answers import cheapest, offers

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
