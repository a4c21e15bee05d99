"""Models of other libraries train over two stages as in one process, where the libraries are installed.

python -m pip install timm torchvision segmentation-models-pytorch monai vit-pytorch x-transformers
"""

import importlib.util

import pytest
from libraries import LIBRARY_MODELS
from transparency import Case, differences

from shardwright.testing import run_ranks

LIBRARIES = {"segmentation_models": "segmentation_models_pytorch"}

pytestmark = [pytest.mark.sweep, pytest.mark.filterwarnings("ignore")]


@pytest.mark.parametrize("name", LIBRARY_MODELS)
def test_a_model_of_a_library_trains_unmodified(name):
    library = name.partition(" ")[0]
    if importlib.util.find_spec(LIBRARIES.get(library, library)) is None:
        pytest.skip(f"{library} is not installed")
    case = Case(config={"microbatches": 4, "profile": "estimated"})
    recipe = LIBRARY_MODELS[name].recipe()
    assert run_ranks(differences, 2, recipe, case, timeout_s=240) == [[], []]
