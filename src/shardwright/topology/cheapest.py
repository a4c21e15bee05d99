"""Chooses the number of machines, by the cost and the duration of training."""

from dataclasses import dataclass, replace

from shardwright.errors import ConfigError, InfeasiblePlanError, UsageError
from shardwright.quantities import counted, format_seconds
from shardwright.topology.search import search
from shardwright.topology.task import Task
from shardwright.topology.way import Way

__all__ = ["Offer", "cheapest", "offers"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """Training on some of the machines.

    Attributes:
        dollars: of the whole training; None where a price is not known.
    """

    num_nodes: int
    num_ranks: int
    way: Way
    seconds: float
    dollars: float | None


def offers(task: Task, *, tokens: float, deadline_s: float | None = None) -> list[Offer]:
    """Offers of training on 1, 2, 4, ... nodes of one kind, up to all of them; none where nothing fits.

    With a deadline, also on the fewest nodes that meet it, found by halving what lies between two of these.
    """
    if len(task.machines.nodes) != 1:
        raise UsageError("how many machines to take can be asked of one kind at a time. Name one kind.")
    if not 0 < tokens < float("inf"):
        raise UsageError(f"tokens is {tokens:g}, but it must be more than 0.")
    _, most = task.machines.nodes[0]
    found: dict[int, Offer] = {}
    refused: ConfigError | None = None
    for number in sorted({2**n for n in range(most.bit_length())} | {most}):
        try:
            found[number] = _offer(task, number, tokens)
        except InfeasiblePlanError:
            continue  # too little memory
        except ConfigError as error:
            refused = error  # for example, more replicas than the batch has samples
    if not found and refused is not None:
        raise refused
    if deadline_s is not None:
        found |= _between(task, found, tokens, deadline_s)
    return [found[number] for number in sorted(found)]


def _between(task: Task, known: dict[int, Offer], tokens: float, deadline_s: float) -> dict[int, Offer]:
    """Numbers of nodes between the last that is too slow and the first that is in time."""
    in_time = [number for number, offer in sorted(known.items()) if offer.seconds <= deadline_s]
    if not in_time:
        return {}
    high = in_time[0]
    low = max((number for number in known if number < high), default=high // 2)
    found: dict[int, Offer] = {}
    while high - low > 1:
        middle = (low + high) // 2
        try:
            found[middle] = _offer(task, middle, tokens)
        except (InfeasiblePlanError, ConfigError):
            low = middle
            continue
        if found[middle].seconds <= deadline_s:
            high = middle
        else:
            low = middle
    return found


def _offer(task: Task, number: int, tokens: float) -> Offer:
    """Training on so many nodes."""
    kind, _ = task.machines.nodes[0]
    machines = replace(task.machines, name=f"{kind.name} x {number}", nodes=((kind, number),))
    way = search(replace(task, machines=machines)).best
    seconds = tokens / way.tokens_per_s
    price = machines.price_per_hour
    return Offer(
        num_nodes=number,
        num_ranks=machines.num_ranks,
        way=way,
        seconds=seconds,
        dollars=None if price is None else price * seconds / 3600,
    )


def cheapest(found: list[Offer], *, deadline_s: float | None = None) -> Offer:
    """The offer to take: of those in time, the one that costs least."""
    if not found:
        raise InfeasiblePlanError(
            "nothing fits on any number of these machines. See what would help: shardwright search, with all."
        )
    in_time = [offer for offer in found if deadline_s is None or offer.seconds <= deadline_s]
    if not in_time:
        best = min(found, key=lambda offer: offer.seconds)
        assert deadline_s is not None
        raise InfeasiblePlanError(
            f"no number of these machines trains within {format_seconds(deadline_s)}: the fastest, "
            f"{counted(best.num_nodes, 'node')}, takes {format_seconds(best.seconds)}. Take more or faster "
            "machines, or fewer tokens."
        )
    return min(in_time, key=lambda offer: (offer.dollars or 0.0, offer.num_nodes))
