"""``seq_layers``: the layers of a transformer under the name that they have in distributed models.

A model that is not distributed, such as Bloom, keeps its layers, and the name means these; in each of them,
``attention`` and ``output`` are its two halves. They are no submodules: names of parameters and states stay
as they are.
"""

from torch import nn

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

# The same of the halves of a layer, which scripts recompute one by one.
_ATTENTION = {"GPT2Block": "attn", "GPTJBlock": "attn", "GPTNeoBlock": "attn", "BloomBlock": "self_attention"}
_OUTPUT = dict.fromkeys((*_ATTENTION, "GPTNeoXLayer"), "mlp")


def name_layers(model: nn.Module) -> None:
    """Has the transformers in a model know their layers by ``seq_layers``, and halves of these, too."""
    for module in model.modules():
        for name, known in ((_NAME, _LAYERS), ("attention", _ATTENTION), ("output", _OUTPUT)):
            own = [own for kind in type(module).__mro__ if (own := known.get(kind.__name__))]
            part = getattr(module, own[0], None) if own and not hasattr(module, name) else None
            if isinstance(part, nn.Module):
                vars(module)[name] = part
