"""Fingerprints of graphs."""

from graphs import chain_graph


def test_fingerprints_tell_graphs_apart() -> None:
    prints = {chain_graph(2).fingerprint, chain_graph(3).fingerprint, chain_graph(2, tied=True).fingerprint}
    assert len(prints) == 3
    assert chain_graph(2).fingerprint == chain_graph(2).fingerprint
    # The batch is part of the graph, not of the model.
    wide = chain_graph(2, output_bytes=80)
    assert wide.fingerprint != chain_graph(2).fingerprint
    assert wide.model_fingerprint == chain_graph(2).model_fingerprint
