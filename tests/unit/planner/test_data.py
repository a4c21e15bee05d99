"""The plain objects that go into the planner survive a file."""

import json

from graphs import chain_graph
from hypothesis import given

from planner.test_tables import graphs
from shardwright.model_graph import ModelGraph


@given(graphs())
def test_graphs(graph: ModelGraph) -> None:
    again = ModelGraph.from_dict(json.loads(json.dumps(graph.to_dict())))
    assert again == graph
    assert again.fingerprint == graph.fingerprint
    assert again.model_fingerprint == graph.model_fingerprint


def test_fingerprints_tell_graphs_apart() -> None:
    prints = {chain_graph(2).fingerprint, chain_graph(3).fingerprint, chain_graph(2, tied=True).fingerprint}
    assert len(prints) == 3
    assert chain_graph(2).fingerprint == chain_graph(2).fingerprint
    # The batch is part of the graph, not of the model.
    wide = chain_graph(2, output_bytes=80)
    assert wide.fingerprint != chain_graph(2).fingerprint
    assert wide.model_fingerprint == chain_graph(2).model_fingerprint
