"""Lists the functions and classes that a pickle names, without running it.

A pickle is a program: it can call whatever it names. Tensor files name very few things.
"""

import io
import pickletools
import zipfile
from collections.abc import Iterable, Iterator
from typing import Any, BinaryIO

__all__ = ["names_in_archive", "names_in_old_file", "names_in_pickle", "pickle_in_archive"]

# These take what they call from elsewhere than from a text beside them.
_INDIRECT = {"STACK_GLOBAL", "INST", "EXT1", "EXT2", "EXT4"}

# A file of torch.save of the format before 1.6 begins with this number, as a pickle; then come its version,
# the system that wrote it, what was saved, and the names of its storages.
_MAGIC_NUMBER = 0x1950A86A20F9469CFC6C
_PICKLES_OF_OLD_FILES = 5


def names_in_pickle(file: BinaryIO) -> Iterator[str]:
    """Names, such as ``collections.OrderedDict``, in the order in which a pickle has them.

    What is named on the stack is guessed by the last two texts before.
    """
    yield from _names(pickletools.genops(file))


def _names(operations: Iterable[tuple[pickletools.OpcodeInfo, Any, int | None]]) -> Iterator[str]:
    texts = ["?", "?"]
    for operation, argument, _ in operations:
        if operation.name == "GLOBAL":
            yield str(argument).replace(" ", ".", 1)
        elif operation.name in _INDIRECT:
            yield str(argument).replace(" ", ".", 1) if operation.name == "INST" else ".".join(texts)
        elif isinstance(argument, str):
            texts = [texts[-1], argument]


def pickle_in_archive(archive: zipfile.ZipFile) -> zipfile.ZipInfo:
    """The one pickle in a file of `torch.save`, which is a zip archive."""
    found = [each for each in archive.infolist() if each.filename.rpartition("/")[2] == "data.pkl"]
    if len(found) != 1 or found[0].compress_type != zipfile.ZIP_STORED:
        raise ValueError("it has not the one pickle that torch.save writes")
    return found[0]


def names_in_archive(archive: zipfile.ZipFile) -> Iterator[str]:
    """Names in a file of `torch.save`, which is a zip archive; see `names_in_pickle`."""
    entry = pickle_in_archive(archive)
    if entry.CRC == 0:  # torch.serialization.set_crc32_options(False): there is nothing to compare with
        del entry.CRC
    yield from names_in_pickle(io.BytesIO(archive.read(entry)))


def names_in_old_file(file: BinaryIO) -> Iterator[str]:
    """Names in a file of `torch.save` that is no zip archive; see `names_in_pickle`."""
    begins_well = False

    def first() -> Iterator[Any]:
        nonlocal begins_well
        for operation in pickletools.genops(file):
            begins_well |= operation[1] == _MAGIC_NUMBER
            yield operation

    yield from _names(first())
    if not begins_well:
        raise ValueError("torch.save has not written it")
    for _ in range(_PICKLES_OF_OLD_FILES - 1):
        yield from names_in_pickle(file)
