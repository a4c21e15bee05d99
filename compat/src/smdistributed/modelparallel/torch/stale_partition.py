"""Says of a partition that does not fit the model where it is from."""

from collections.abc import Iterator
from contextlib import contextmanager

from shardwright.errors import StalePlanError
from shardwright.plan import REMEDY
from smdistributed.modelparallel.torch.state_mod import state


@contextmanager
def naming_the_file() -> Iterator[None]:
    """Says of a decision that does not fit the model where it is from."""
    try:
        yield
    except StalePlanError as error:
        if state.resumed_from:
            reason = str(error).removesuffix(f" {REMEDY}")
            raise StalePlanError(
                f"{state.resumed_from} cannot be loaded, because its partition does not fit: {reason} Resume "
                "with the model that was saved, in the same dtype; or save a full one "
                "(smp.save_checkpoint(..., partial=False))."
            ) from error
        values = {} if state.configuration is None else state.configuration.values
        if not values.get("load_partition"):
            raise
        raise StalePlanError(
            f"partition_file {values['partition_file']} cannot be used: {error} Remove load_partition for "
            "that."
        ) from error
