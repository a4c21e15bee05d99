"""The launcher for notebooks, and the quickstart notebook in a real kernel."""

from pathlib import Path

import pytest
import torch

import shardwright.torch as sw
from shardwright.errors import ConfigError, UsageError

NOTEBOOK = Path(__file__).parents[2] / "examples/quickstart.ipynb"


@pytest.mark.filterwarnings("ignore")
def test_the_quickstart_runs(tmp_path):
    """Its last cells compare losses with those of one process, and list the files of the run."""
    nbformat = pytest.importorskip("nbformat")
    nbclient = pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(notebook)
    assert all(not cell.get("outputs") for cell in notebook.cells), "it is kept without outputs"
    nbclient.NotebookClient(notebook, timeout=120, resources={"metadata": {"path": str(tmp_path)}}).execute()
    printed = "".join(
        output.text for cell in notebook.cells for output in cell.get("outputs", []) if "text" in output
    )
    assert "largest difference of a loss" in printed
    assert "shardwright: 2 ranks" in printed, "what ranks print appears in the cell"
    assert (tmp_path / "runs/quickstart/report.html").exists()


def test_what_a_rank_raises_ends_the_others_and_is_shown():
    def fail():
        sw.init({"run_dir": "off"})
        if sw.rank() == 1:
            raise ValueError("an odd rank")
        sw.barrier()

    with pytest.raises(torch.multiprocessing.ProcessRaisedException, match="an odd rank"):
        sw.notebook_launcher(fail, 2)


@pytest.mark.parametrize("ranks", [0, True, "2"])
def test_ranks_are_a_number(ranks):
    with pytest.raises(ConfigError, match="Give a whole number from 1"):
        sw.notebook_launcher(print, ranks)


def test_a_notebook_that_trains_itself_is_refused():
    sw.init({"run_dir": "off"})
    try:
        with pytest.raises(UsageError, match="Call it inside the function"):
            sw.notebook_launcher(print, 2)
    finally:
        sw.shutdown()
