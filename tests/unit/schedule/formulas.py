"""The cost of schedules by formula, for equal stages and free transfers.

For p ranks, m microbatches (p or more), v stages a rank, and the seconds tF, tI, tW of one microbatch on all
stages of a rank (tB = tI + tW):

=================  ==========================  ==================================================
schedule           bubble, seconds             activations of stages kept by rank r
=================  ==========================  ==================================================
gpipe              (p - 1)(tF + tB)            m v, for p > 1
1f1b               (p - 1)(tF + tB)            min(m, p - r)
interleaved_1f1b   (p - 1)(tF + tB) / v        min(m v, 2 (p - r - 1) + (v - 1) g + 1), p <= g < 2p
zb_h1              (p - 1)(tF + tI - tW)       min(m, p), for tW <= tI
zb_v               (p - 1) tF / 2              min(2 m, 2 p), for tF = tI = tW and m >= 2p - 1
=================  ==========================  ==================================================

The bubble is the time of a step beyond m (tF + tB). For ``zb_v`` papers write zero, since every rank is busy
from its first action to its last; (p - 1) tF / 2 is the wait of the last rank before its first action. g is
the size of the largest group of microbatches: p, if p divides m. One rank alone takes them one by one, in
GPipe, too.

Sources: the papers named in the files of the families.
"""


def bubble_seconds(
    kind: str,
    *,
    num_ranks: int,
    forward_s: float,
    backward_s: float,
    weight_s: float = 0.0,
    stages_per_rank: int = 1,
) -> float:
    """Seconds of a step in which a rank is idle."""
    hops = num_ranks - 1
    if kind == "zb_v":
        return hops * forward_s / 2
    if kind == "zb_h1":
        input_s = backward_s - weight_s
        return hops * (forward_s + input_s - min(weight_s, input_s))
    chunks = stages_per_rank if kind == "interleaved_1f1b" else 1
    return hops * (forward_s + backward_s) / chunks


def peak_activations(
    kind: str,
    *,
    num_ranks: int,
    rank: int,
    num_microbatches: int,
    stages_per_rank: int = 1,
) -> int:
    """Activations of stages that a rank keeps at most, from ``F`` to ``B`` or ``W``."""
    p, m, v = num_ranks, num_microbatches, stages_per_rank
    if kind == "gpipe":
        return m * v if p > 1 else v
    if kind == "zb_h1":
        return min(m, p)
    if kind == "zb_v":
        return min(2 * m, 2 * p)
    if kind == "1f1b" or v == 1:
        return min(m, p - rank)
    group = -(-m // max(1, m // p))
    return min(m * v, 2 * (p - rank - 1) + (v - 1) * group + 1)
