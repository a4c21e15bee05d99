"""The known architectures, by name."""

import difflib
from collections.abc import Mapping
from dataclasses import replace
from importlib.resources import files
from types import MappingProxyType

from shardwright.catalogue.hugging_face import from_hugging_face
from shardwright.catalogue.transformer import Transformer
from shardwright.errors import UsageError
from shardwright.files.documents import parse_yaml


def _known() -> dict[str, Transformer]:
    text = files("shardwright.catalogue").joinpath("architectures.yaml").read_text(encoding="utf-8")
    return {
        name: replace(from_hugging_face(entry["config"], name=name), source=entry["source"])
        for name, entry in parse_yaml(text).items()
    }


ARCHITECTURES: Mapping[str, Transformer] = MappingProxyType(_known())
"""Language models that are known by name."""

_REMOVED = ("resnet", "unet", "vit", "whisper", "dit", "sd3")
"""What the names of models began with that were known here, layer by layer."""


def find_architecture(name: str) -> Transformer:
    """The architecture of a name; case, ``_`` and blanks do not matter.

    >>> find_architecture("GPT-NeoX 20B").name
    'gpt-neox-20b'
    """
    wanted = _plain(name)
    for known, architecture in ARCHITECTURES.items():
        if _plain(known) == wanted:
            return architecture
    if wanted.startswith(_REMOVED):
        raise UsageError(
            f"there is no architecture {name!r}: the names are of language models. Give the model itself, by "
            "a function that builds it with a batch: package.module:build"
        )
    plain = {_plain(known): known for known in ARCHITECTURES}
    near = [plain[text] for text in difflib.get_close_matches(wanted, plain, n=3, cutoff=0.5)]
    hint = f"did you mean {' or '.join(near)}?" if near else f"known are {', '.join(ARCHITECTURES)}."
    raise UsageError(f"there is no architecture {name!r}; {hint}")


def _plain(name: str) -> str:
    return "".join(letter for letter in name.lower() if letter.isalnum() or letter == ".")
