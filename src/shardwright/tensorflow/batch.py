"""The arguments of a step function: which of them are tensors, and how a batch is cut into microbatches."""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import tensorflow as tf

from shardwright.errors import UsageError
from shardwright.runtime.step_function import StepParameters, microbatch_sizes


@dataclass(frozen=True, slots=True, kw_only=True)
class Arguments:
    """The arguments of one call.

    Attributes:
        names: the parameter that takes each of them.
        key: equal for calls whose other arguments are the same.
        rebuild: makes (args, kwargs) of other tensors in the same places.
    """

    tensors: list[Any]
    names: list[str]
    split: list[bool]
    key: Hashable
    rebuild: Callable[[Sequence[Any]], tuple[tuple[Any, ...], dict[str, Any]]]

    @property
    def num_samples(self) -> int | None:
        """Size of axis 0 of what is cut; None where it is not known yet, or nothing is cut."""
        sizes = {
            name: t.shape[0] for t, name, cut in zip(self.tensors, self.names, self.split, strict=True) if cut
        }
        if len(set(sizes.values())) > 1:
            raise UsageError(
                f"the arguments of the step function have different numbers of samples: {sizes}. Name those "
                "that every microbatch gets whole: @sw.step(non_split_inputs=[...])."
            )
        if 0 in sizes.values():
            raise UsageError(f"the batch is empty: {next(iter(sizes))} has 0 rows along axis 0.")
        return next(iter(sizes.values()), None)

    @property
    def num_tokens(self) -> int | None:
        """Entries of the first tensor that is cut; None if that is not a matrix of whole numbers."""
        first = next((t for t, cut in zip(self.tensors, self.split, strict=True) if cut), None)
        if first is None or first.shape.rank != 2 or first.dtype not in (tf.int32, tf.int64):
            return None
        known: int | None = first.shape.num_elements()
        return known

    def with_tensors(self, tensors: Sequence[Any]) -> "Arguments":
        """The same call with other tensors."""
        return replace(self, tensors=list(tensors))

    def parts(self, num_microbatches: int) -> list[list[Any]]:
        """The tensors of each microbatch; the first ones have a sample more where the batch is uneven."""
        assert self.num_samples is not None
        sizes = microbatch_sizes(self.num_samples, num_microbatches)
        columns = [
            tf.split(tensor, sizes) if cut else [tensor] * len(sizes)
            for tensor, cut in zip(self.tensors, self.split, strict=True)
        ]
        return [list(row) for row in zip(*columns, strict=True)]

    def specs(self, size: int | None) -> list[Any]:
        """Shapes and types of a microbatch with so many samples; None where that is not known."""
        return [
            tf.TensorSpec([size, *tensor.shape[1:]] if cut else tensor.shape, tensor.dtype)
            for tensor, cut in zip(self.tensors, self.split, strict=True)
        ]


@dataclass(frozen=True, slots=True)
class Splitter(StepParameters):
    """Finds the tensors among the arguments of a step function.

    Tensors and NumPy arrays are data, also inside lists, tuples and dictionaries, and are cut along axis 0 if
    they have one. Anything else goes to every microbatch as it is.

    Attributes:
        non_split: names of arguments that every microbatch gets whole.
        signature: shapes and types to which the positional arguments are converted; None: as they are.
    """

    non_split: frozenset[str] = frozenset()
    signature: Sequence[Any] | None = None

    def __call__(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Arguments:
        args = self._converted(args)
        trees = [*((self.name_of(place), arg) for place, arg in enumerate(args)), *kwargs.items()]
        tensors: list[Any] = []
        names: list[str] = []
        split: list[bool] = []
        leaves: list[list[Any]] = []
        for name, tree in trees:
            found = tf.nest.flatten(tree)
            for position, leaf in enumerate(found):
                if not _is_data(leaf):
                    continue
                tensor = _dense(leaf, name)
                found[position] = _Place(len(tensors))
                tensors.append(tensor)
                names.append(name)
                split.append(name not in self.non_split and tensor.shape.rank != 0)
            leaves.append(found)
        num_args = len(args)
        keys = [name for name, _ in trees[num_args:]]
        structures = [tree for _, tree in trees]

        def rebuild(given: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
            packed = [
                tf.nest.pack_sequence_as(
                    tree, [given[x.position] if isinstance(x, _Place) else x for x in found]
                )
                for tree, found in zip(structures, leaves, strict=True)
            ]
            return tuple(packed[:num_args]), dict(zip(keys, packed[num_args:], strict=True))

        key = (
            num_args,
            *keys,
            *((name, tuple(map(_key, found))) for (name, _), found in zip(trees, leaves, strict=True)),
        )
        return Arguments(tensors=tensors, names=names, split=split, key=key, rebuild=rebuild)

    def _converted(self, args: Sequence[Any]) -> list[Any]:
        """The positional arguments in the types of the signature."""
        if self.signature is None:
            return list(args)
        first = len(args) - len(self.signature)  # a method's self is not in the signature
        specs = [None] * first + list(self.signature)
        return [
            arg if spec is None else tf.nest.map_structure(lambda s, a: tf.cast(a, s.dtype), spec, arg)
            for spec, arg in zip(specs, args, strict=True)
        ]


@dataclass(frozen=True, slots=True)
class _Place:
    """Stands for a tensor."""

    position: int


def _is_data(leaf: Any) -> bool:
    """Whether a leaf is numbers of the batch: also a table of pandas, or a tensor of another framework."""
    if isinstance(leaf, (tf.Tensor, np.ndarray, np.generic, tf.RaggedTensor, tf.SparseTensor)):
        return True
    return hasattr(leaf, "__array__") and not hasattr(leaf, "assign_add")  # which variables have


def _dense(leaf: Any, name: str) -> Any:
    """A leaf as a tensor that can be cut and sent."""
    if isinstance(leaf, (tf.RaggedTensor, tf.SparseTensor)):
        remedy = "to_tensor()" if isinstance(leaf, tf.RaggedTensor) else "tf.sparse.to_dense()"
        raise UsageError(
            f"the argument {name} of the step function is a {type(leaf).__name__}, which cannot be cut into "
            f"microbatches. Make it a dense tensor before: {remedy}, or padded_batch in tf.data."
        )
    return tf.convert_to_tensor(leaf)


def _key(leaf: Any) -> Hashable:
    plain = leaf is None or isinstance(leaf, (bool, int, float, str, bytes, _Place))
    return (type(leaf).__name__, leaf) if plain else id(leaf)
