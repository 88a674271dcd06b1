"""Roles of workers as operators set them and see them."""

from dataclasses import replace
from io import StringIO
from typing import Any

import pytest
from blockyard.deploy.lifecycle.serving import ClusterStartError
from blockyard.deploy.lifecycle.shape import shape_of
from blockyard.deploy.settings.wanted_cluster import UpOptions
from blockyard.deploy.supervision.replicas import replicas_of, worker_config
from blockyard.deploy.views.explained import explained_view
from blockyard.deploy.views.top import Look, rows_of, screen
from blockyard.deploy.views.views import workers_table
from blockyard.proto.v1 import cluster_pb2
from blockyard.worker.config import EngineConfig
from rich.console import Console, RenderableType

from .incarnations import SPEC


def options(**changes: Any) -> UpOptions:
    return UpOptions(engine=EngineConfig(model="demo", host_cache_gib=1.0), **changes)


def printed(view: RenderableType) -> str:
    output = StringIO()
    Console(file=output, width=200).print(view)
    return output.getvalue()


@pytest.mark.parametrize("num_workers", [2, 5])
def test_the_first_workers_compute_prompts_whatever_the_scale(num_workers: int) -> None:
    spec = replace(SPEC, num_prefill_workers=2, worker=replace(SPEC.worker, role="decode"))
    workers = [one for one in replicas_of(spec, num_workers) if one.kind == "worker"]
    roles = [worker_config(spec, one).role for one in workers]
    assert roles == ["prefill"] * 2 + ["decode"] * (num_workers - 2)
    assert worker_config(SPEC, workers[0]).role == "both"


def test_a_cluster_whose_workers_all_compute_prompts_is_refused() -> None:
    with pytest.raises(ClusterStartError, match="--prefill-workers 2 leave none of 2 workers to decode"):
        shape_of(options(num_workers=2, num_prefill_workers=2), [4.0], 0.0)
    assert shape_of(options(num_workers=2, num_prefill_workers=1), [4.0], 0.0).num_workers == 2


def test_prefill_workers_need_others_that_can_fetch_blocks() -> None:
    with pytest.raises(ValueError, match="--host-cache-gib"):
        UpOptions(engine=EngineConfig(model="demo"), num_prefill_workers=1)
    with pytest.raises(ValueError, match="--no-pull"):
        options(num_prefill_workers=1, no_pull=True)


def test_roles_are_shown_where_any_worker_has_one() -> None:
    def shown(*roles: str) -> str:
        workers = tuple(cluster_pb2.Worker(worker_id=f"w-{role}", role=role) for role in roles)
        look = Look(at_seconds=1.0, info=cluster_pb2.ClusterInfo(), workers=workers)
        return printed(workers_table(workers)) + printed(screen(look, rows_of(look, None), [], columns=200))

    assert "role" not in shown("both", "")
    assert shown("prefill", "decode").count("role") == 2
    assert shown("prefill", "decode").split().count("decode") == 2


def test_explain_says_what_a_split_would_cost_and_whether_it_is_chosen() -> None:
    explained = cluster_pb2.ExplainPlacementResponse(
        chosen_worker_id="p",
        policy="prefix",
        index_available=True,
        split=cluster_pb2.SplitPlacement(
            is_chosen=True,
            prefill=cluster_pb2.PlacementCandidate(worker_id="p", uncached_tokens=8000, total_ms=900.0),
            decode=cluster_pb2.PlacementCandidate(worker_id="d", pulled_tokens=7984, total_ms=40.0),
            split_ms=940.0,
            local_ms=2700.0,
        ),
    )
    told = printed(explained_view(explained)).splitlines()[-1]
    assert told == (
        "split: p computes 8,000 tokens, d fetches 7,984 and continues: 940.0 ms (900.0 + 40.0), "
        "on one worker 2,700.0; chosen"
    )
    explained.split.is_chosen = False
    assert printed(explained_view(explained)).splitlines()[-1].endswith("not chosen")
