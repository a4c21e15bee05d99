"""A run goes on from a model that was imported, in any layout."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from sharded import QUIET, VOCABULARY
from torch import Tensor, nn

from choices import in_sweep
from shardwright.cli import main
from shardwright.testing import RanksFailedError, run_ranks


class Language(nn.Module):
    """A head that may have the weights of the embedding, and a buffer."""

    scale: Tensor

    def __init__(self, *, tied: bool):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 8)
        self.blocks = nn.Sequential(*(nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 8)) for _ in range(4)))
        self.head = nn.Linear(8, VOCABULARY, bias=False)
        self.register_buffer("scale", torch.ones(8))
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.embedding(x)) * self.scale)


def _trained_elsewhere(*, tied: bool) -> Language:
    torch.manual_seed(7)
    model = Language(tied=tied)
    model.scale.uniform_()
    return model


def _resumed(settings: dict[str, Any], folder: Path, *, tied: bool) -> tuple[int, dict[str, Tensor], float]:
    """Step, state and the loss of a step, of a run that resumes."""
    import shardwright.torch as sw

    sw.init({**QUIET, **settings})
    torch.manual_seed(1)
    model = sw.DistributedModel(Language(tied=tied))
    optimizer = sw.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-3))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10)
    step = sw.Checkpoints(folder, state={"scheduler": scheduler}).resume()
    state = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}

    @sw.step
    def train(model: Any, x: Tensor) -> Tensor:
        loss = F.cross_entropy(model(x).flatten(0, 1), x.flatten())
        model.backward(loss)
        return loss

    loss = train(model, torch.arange(8)[:, None]).reduce_mean().item()
    optimizer.step()
    return step, state, loss


def _import(*words: object) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["ckpt", "import", *map(str, words)])
    assert not ended.value.code


LAYOUTS: dict[str, tuple[dict[str, Any], int]] = {
    "one rank": ({}, 1),
    "pipeline": ({"pipeline_parallel_degree": 2, "microbatches": 2}, 2),
    "shards": ({"sharded_data_parallel_degree": 2}, 2),
    "tensor": ({"tensor_parallel_degree": 2}, 2),
}


@pytest.mark.parametrize(
    ("layout", "saved_tied", "tied"),
    [
        *(("one rank", True, True), ("pipeline", True, False), ("shards", False, False)),
        *(in_sweep("shards", True, True), in_sweep("shards", True, False)),
        *(in_sweep("one rank", True, False), in_sweep("one rank", False, False)),
        *(("tensor", True, False), in_sweep("tensor", True, True)),
        *(in_sweep("pipeline", True, True), in_sweep("pipeline", False, False)),
    ],
)
def test_a_run_begins_with_an_imported_model(
    layout: str, tied: bool, saved_tied: bool, tmp_path: Path
) -> None:
    """Models that share a weight and those that do not take what those that do have saved."""
    theirs = _trained_elsewhere(tied=saved_tied)
    torch.save({"state_dict": theirs.state_dict()}, tmp_path / "x.pt")
    _import(tmp_path / "x.pt", "--to", tmp_path / "run", "--key", "state_dict", "--step", 30)
    settings, ranks = LAYOUTS[layout]
    x = torch.arange(8)[:, None]
    expected = F.cross_entropy(theirs(x).flatten(0, 1), x.flatten()).item()
    results = run_ranks(_resumed, ranks, settings, tmp_path / "run", tied=tied)
    for step, state, _ in results:
        assert step == 30
        assert state.keys() == theirs.state_dict().keys()
        for name, tensor in theirs.state_dict().items():
            assert torch.equal(state[name], tensor), name
    assert sum(loss for _, _, loss in results) / ranks == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("dropped", ["head.weight", in_sweep("embedding.weight")])
def test_a_tied_tensor_may_have_either_name(dropped: str, tmp_path: Path) -> None:
    """Files of Hugging Face have one name of a tied tensor, and not always the first."""
    theirs = _trained_elsewhere(tied=True)
    state = {name: tensor for name, tensor in theirs.state_dict().items() if name != dropped}
    save_file(state, tmp_path / "x.safetensors")
    _import(tmp_path / "x.safetensors", "--to", tmp_path / "run")
    _, loaded, _ = run_ranks(_resumed, 2, LAYOUTS["pipeline"][0], tmp_path / "run", tied=True)[1]
    for name, tensor in theirs.state_dict().items():
        assert torch.equal(loaded[name], tensor), name


def test_a_model_of_other_names_is_refused(tmp_path: Path) -> None:
    torch.save(_trained_elsewhere(tied=False).state_dict(), tmp_path / "x.pt")
    _import(tmp_path / "x.pt", "--to", tmp_path / "run", "--prefix", "model.")
    with pytest.raises(RanksFailedError, match=r"only in the checkpoint: model\.blocks\.0\.0\.bias"):
        run_ranks(_resumed, 1, {}, tmp_path / "run", tied=False)
