"""A replay in fractions, written apart from the simulator: slow, plain, exact.

It keeps no virtual clock and no counters: at each event it looks at everything anew.
"""

from fractions import Fraction

from shardwright.schedule import Kind

ZERO, ONE = Fraction(0), Fraction(1)


class SlowReplay:
    """Times of all actions of a schedule without transfers."""

    def __init__(self, schedule, costs, edges, link, cores, ranks_per_node):
        self.schedule = schedule
        self.costs = costs
        self.edges = sorted(edges, key=lambda edge: (edge.source, edge.target))
        self.link = link
        self.cores = cores
        self.node = [rank // (ranks_per_node or schedule.num_ranks) for rank in range(schedule.num_ranks)]
        self.now = ZERO
        self.position = [0] * schedule.num_ranks
        self.left = {}  # rank -> seconds of its action still to do, on a core of its own
        self.under_way = []  # (arrival, message)
        self.arrived = set()
        self.free = {}  # channel -> when it is
        self.found = {}

    def run(self):
        """action -> (start, end)."""
        while True:
            self.receive()
            self.start()
            rates = {rank: self.rate(rank) for rank in self.left}
            events = [self.now + left / rates[rank] for rank, left in self.left.items()]
            events += [arrival for arrival, _ in self.under_way]
            if not events:
                return {action: (float(start), float(end)) for action, (start, end) in self.found.items()}
            step = min(events) - self.now
            self.now += step
            for rank in list(self.left):
                self.left[rank] -= step * rates[rank]
                if not self.left[rank]:
                    self.finish(rank)

    def messages(self, action, *, sent):
        """(kind, sending stage, receiving stage, bytes) of what an action sends, or waits for."""
        if action.kind is Kind.FORWARD:
            found = [("F", e.source, e.target, e.num_bytes) for e in self.edges]
        elif action.kind is Kind.BACKWARD_WEIGHT:
            found = []
        else:
            found = [("B", e.target, e.source, e.backward_bytes) for e in self.edges if e.has_gradient]
        ranks = self.schedule.stage_ranks
        return [m for m in found if m[1 if sent else 2] == action.stage and ranks[m[1]] != ranks[m[2]]]

    def receive(self):
        for arrival, message in list(self.under_way):
            if arrival <= self.now:
                self.under_way.remove((arrival, message))
                self.arrived.add(message)

    def start(self):
        for rank, row in enumerate(self.schedule.actions):
            if rank in self.left or self.position[rank] == len(row):
                continue
            action = row[self.position[rank]]
            needs = self.messages(action, sent=False)
            if all((*need[:3], action.microbatch) in self.arrived for need in needs):
                self.left[rank] = Fraction(self.costs[action.stage].seconds(action.kind))
                self.found[str(action)] = [self.now]

    def rate(self, rank):
        rivals = sum(self.node[other] == self.node[rank] for other in self.left)
        return min(ONE, Fraction(self.cores, rivals)) if self.cores else ONE

    def finish(self, rank):
        del self.left[rank]
        action = self.schedule.actions[rank][self.position[rank]]
        self.position[rank] += 1
        self.found[str(action)].append(self.now)
        for kind, sender, receiver, num_bytes in self.messages(action, sent=True):
            channel = (self.schedule.stage_ranks[sender], self.schedule.stage_ranks[receiver])
            leaves = max(self.now, self.free.get(channel, ZERO))
            occupied = latency = ZERO
            if self.link:
                occupied = Fraction(num_bytes) / Fraction(self.link(*channel).bandwidth_Bps)
                latency = Fraction(self.link(*channel).latency_s)
            self.free[channel] = leaves + occupied
            message = (kind, sender, receiver, action.microbatch)
            self.under_way.append((leaves + occupied + latency, message))
