"""`shardwright search`, `shardwright plan` and the run itself give one plan, with the same seconds.

Each of them traces the model anew: a run on all ranks, with data; a plan without a run, and without data.
"""

from collections.abc import Iterator
from typing import Any

import pytest
from architectures import ARCHITECTURES

from shardwright.testing import run_ranks

MODELS = ("GPT-NeoX", "Llama", "Mixtral", "BERT", "T5", "ViT", "Wav2Vec2")
SAMPLES, LENGTH = 16, 12
FASTER = {"link_Bps": 40e9, "network_Bps": 5e9, "link_latency_s": 2e-6, "network_latency_s": 1e-5}


def told_by_each(architecture: Any, machines: dict[str, Any]) -> dict[str, str]:
    """Where the plan of a search, made without a run, and that of the run differ: nowhere."""
    found = {kind: _apart(architecture, changes) for kind, changes in machines.items()}
    return {kind: apart for kind, apart in found.items() if apart}


def _apart(architecture: Any, changes: dict[str, Any]) -> str:
    from dataclasses import replace

    import torch
    import torch.distributed as dist

    import shardwright.torch as sw
    from shardwright.cluster import Inventory, find_machines
    from shardwright.config import Config
    from shardwright.costs.run_cluster import cluster_of
    from shardwright.planner.model_chain import chain_of
    from shardwright.planner.ways import Task, search
    from shardwright.planner.ways.answers import best_plan, seconds_of
    from shardwright.torch.measuring import planning
    from shardwright.torch.units.dry_run import trace_model, with_samples
    from shardwright.torch.units.offline_planner import plan_model

    [(cpu, _)] = find_machines("this-cpu").nodes
    kind = replace(cpu, name="node", num_accelerators=1, cores=1, **changes)
    machines = Inventory(name="two nodes", nodes=((kind, 2),))
    cluster = cluster_of(machines, dtype="float32")
    torch.manual_seed(0)
    batch = architecture.feed(SAMPLES, LENGTH)
    with torch.device("meta"):
        described = architecture.build().float()

    def plan(samples: int, settings: Any) -> Any:
        _, kwargs = with_samples(((), batch), samples)
        return plan_model(described, config=Config.parse(settings), world_size=2, cluster=cluster, **kwargs)

    sw.init({"run_dir": "off"})  # the ranks are those of a run; a search has none
    told: list[Any] = [None]
    if dist.get_rank() == 0:
        graph = trace_model(described, **batch)
        task = Task(
            model=chain_of(graph, name="model"),
            machines=machines,
            batch=SAMPLES,
            dtype="float32",
            only_what_runs=True,
            pins={"pipeline": 2},
        )
        answer, of_search = best_plan(search(task), plan)
        settings = dict(of_search.pins) | {"profile": "estimated", "run_dir": "off", "plan": "anew"}
        low, high = answer.best.interval_s
        within = low <= seconds_of(of_search) <= high
        told = [(settings, of_search.to_json(), within, answer.best.title)]
    dist.broadcast_object_list(told)
    sw.shutdown()
    settings, of_search, within, title = told[0]

    made = []

    class Recorded(planning.Planner):
        def __call__(self, *args: Any) -> Any:
            made.append(super().__call__(*args))
            return made[-1]

    kept = planning.Planner, planning.present_cluster, planning.with_host_costs
    planning.Planner = Recorded
    planning.present_cluster = lambda context, update_costs: cluster
    planning.with_host_costs = lambda context, cluster: cluster
    try:
        sw.init(settings)
        model = sw.DistributedModel(architecture.build().float())
        optimizer = sw.DistributedOptimizer(torch.optim.AdamW(model.parameters()))

        @sw.step
        def train(model, batch):
            loss = model(**batch).loss
            model.backward(loss)
            return loss

        train(model, batch)
        optimizer.step()
        [(of_run, _)] = made
    finally:
        planning.Planner, planning.present_cluster, planning.with_host_costs = kept
        sw.shutdown()

    from shardwright.plan import Plan

    def said(plan: Any) -> dict[str, Any]:
        fields = plan.model_dump(mode="json")
        return {key: fields[key] for key in ("mesh", "schedule", "stages", "prediction")}

    searched, run = said(Plan.parse(of_search)), said(of_run)
    lines = list(_differences(searched, run))
    return "\n".join([*lines, *([] if within else [f"{title} is outside of its interval"])])


def _differences(one: Any, other: Any, at: str = "") -> Iterator[str]:
    if isinstance(one, dict) and one.keys() == other.keys():
        for key, value in one.items():
            yield from _differences(value, other[key], f"{at}.{key}")
    elif isinstance(one, list) and len(one) == len(other):
        for number, (left, right) in enumerate(zip(one, other, strict=True)):
            yield from _differences(left, right, f"{at}[{number}]")
    elif one != other:
        yield f"{at}: {one} | {other}"


@pytest.mark.parametrize(
    "name", ["GPT-2", *(pytest.param(name, marks=pytest.mark.thorough) for name in MODELS)]
)
def test_search_plan_and_run_agree(name):
    machines = {"slow links": {}, "fast links": FASTER}
    assert run_ranks(told_by_each, 2, ARCHITECTURES[name], machines, timeout_s=180) == [{}] * 2
