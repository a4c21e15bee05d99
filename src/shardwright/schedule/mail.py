"""Messages in transit: each channel carries one after another, and latencies overlap.

::

    action           [  0F0  ][  0F1  ]
    channel                   [ bytes of 0F0 ][ bytes of 0F1 ]
    arrival                                  ' latency '      ' latency '
"""

from collections.abc import Sequence

from shardwright.schedule.action_graph import ActionGraph

__all__ = ["Departure", "Mail", "Price"]

Price = tuple[float, float]
"""Seconds that a message occupies its channel, and the latency that follows."""

Departure = tuple[int, int, float, float]
"""A message: the number of the action that waits for it, its price, when it left and when it arrived."""


class Mail:
    """Sends the messages of a graph and keeps a record of them."""

    __slots__ = ("_free", "_prices", "_sends", "departures")

    def __init__(self, graph: ActionGraph, prices: Sequence[Price]) -> None:
        self._sends = graph.sends
        self._prices = prices or [(0.0, 0.0)] * graph.num_prices
        self._free = [0.0] * len(graph.channels)  # when each channel has sent all it was given
        self.departures: list[Departure] = []

    def occupy(self, channel: int, now: float, seconds: float) -> float:
        """Has a channel busy for so long from now on, or from when it is free; gives the end."""
        end = max(now, self._free[channel]) + seconds
        self._free[channel] = end
        return end

    def send(self, number: int, now: float) -> list[Departure]:
        """The messages of an action that ends now, in order."""
        departures = []
        for consumer, channel, price in self._sends[number]:
            occupied_s, latency_s = self._prices[price]
            leaves = max(now, self._free[channel])
            self._free[channel] = leaves + occupied_s
            departures.append((consumer, price, leaves, leaves + occupied_s + latency_s))
        self.departures += departures
        return departures
