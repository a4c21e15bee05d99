"""Measures pipelines side by side with `torch.distributed.pipelining`.

python benchmarks/pipeline.py                      # everything, about 15 minutes on two cores
python benchmarks/pipeline.py --only A --repeats 9
python benchmarks/pipeline.py --quick              # seconds: does it still run?
"""

import argparse
import os

os.environ["OMP_NUM_THREADS"] = "1"
os.environ.setdefault("SHARDWRIGHT_CACHE", "off")  # profiles are measured in this run

from duel import Times, alternate  # noqa: E402
from models import Task, even_stages, gpt  # noqa: E402
from peer_pipelining import KINDS, Peer  # noqa: E402
from shardwright_side import Ours  # noqa: E402

from shardwright.testing import run_ranks  # noqa: E402

FAMILIES = {
    "1F1B": {"peer": ("1F1B",), "ours": ("1f1b",)},
    "interleaved": {"peer": ("Interleaved1F1B",), "ours": ("interleaved_1f1b",)},
    "zero bubble": {"peer": ("InterleavedZeroBubble", "ZBVZeroBubble"), "ours": ("zb_v", "zb_h1")},
}
_OUR_STAGES = {"1f1b": 1, "gpipe": 1, "zb_h1": 1, "interleaved_1f1b": 2, "zb_v": 2}


def same_stages(task: Task, family: str, microbatches: int, rounds: int) -> dict[str, object]:
    """Runs on every rank: one family of schedules, both sides with the same stages."""
    import torch.distributed as dist

    model, num_ranks = task.build(), dist.get_world_size()
    contestants = {}
    for kind in FAMILIES[family]["peer"]:
        stages = even_stages(model, num_ranks * KINDS[kind])
        contestants[f"peer {kind}"] = Peer(task, model, stages, kind=kind, microbatches=microbatches)
    for kind in FAMILIES[family]["ours"]:
        stages = even_stages(model, num_ranks * _OUR_STAGES[kind])
        settings = {"pipeline": kind, "microbatches": microbatches}
        if kind == "interleaved_1f1b":
            settings["virtual_stages"] = 2
        contestants[f"ours {kind}"] = Ours(task, model, settings, stages=stages)
    times = alternate({name: side.step for name, side in contestants.items()}, rounds=rounds)
    return {
        "times": times,
        "losses": {name: side.loss for name, side in contestants.items()},
        "predicted_s": {
            name: side.plan.prediction.step_s for name, side in contestants.items() if isinstance(side, Ours)
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--ranks", default="2,4")
    parser.add_argument("--families", default=",".join(FAMILIES))
    parser.add_argument("--microbatches", default="4,8")
    options = parser.parse_args()
    for num_ranks in map(int, options.ranks.split(",")):
        for microbatches in map(int, options.microbatches.split(",")):
            for family in options.families.split(","):
                task = gpt(layers=12 if num_ranks == 2 else 16)
                ranks = run_ranks(
                    same_stages, num_ranks, task, family, microbatches, options.repeats, timeout_s=600
                )
                times: dict[str, Times] = ranks[0]["times"]
                losses = {n: [r["losses"][n] for r in ranks] for n in times}
                best = min(t.median_s for n, t in times.items() if n.startswith("peer"))
                for name, t in times.items():
                    predicted = ranks[0]["predicted_s"].get(name)
                    print(
                        f"{num_ranks} ranks {microbatches} mb {name:28} {t.median_s * 1e3:8.1f} ms "
                        f"+-{t.spread:5.1%} best {min(t.seconds) * 1e3:8.1f} ratio {t.median_s / best:.3f} "
                        f"foreign {sum(t.foreign) / len(t.foreign):.2f} cores "
                        + (f"predicted {predicted * 1e3:.1f}" if predicted else "")
                        + f" loss {[x for x in losses[name] if x is not None][-1]:.6f}",
                        flush=True,
                    )


if __name__ == "__main__":
    main()
