"""``seq_layers``: the layers of a transformer under the name that they have in distributed models.

Scripts that ask for distributed modules (``smp.model_creation(tensor_parallelism=True)``) look there for the
layers to place and to recompute. With tensor_parallel_degree 1 the model stays Hugging Face's own, and the
name means its own layers. It is no submodule: names of parameters and states stay as they are.
"""

from torch import nn

__all__ = ["name_layers"]

# Class of a transformer -> attribute with its layers.
_LAYERS = {
    "GPT2Model": "h",
    "GPTJModel": "h",
    "GPTNeoModel": "h",
    "BloomModel": "h",
    "GPTNeoXModel": "layers",
    "BertEncoder": "layer",
    "RobertaEncoder": "layer",
}

_NAME = "seq_layers"


def name_layers(model: nn.Module) -> None:
    """Has the transformers in a model know their layers by the name ``seq_layers``, too."""
    for module in model.modules():
        names = [name for kind in type(module).__mro__ if (name := _LAYERS.get(kind.__name__))]
        if names and not hasattr(module, _NAME):
            layers = getattr(module, names[0], None)
            if isinstance(layers, nn.Module):
                vars(module)[_NAME] = layers
