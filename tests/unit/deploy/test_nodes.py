"""`doctor --address`: its findings from the nodes' reports, without Ray."""

from dataclasses import replace

import pytest
from blockyard.deploy.lifecycle.cluster import UNLIKE_CPUS, with_one_dtype
from blockyard.deploy.lifecycle.serving import Progress
from blockyard.deploy.machine.check_results import exit_code
from blockyard.deploy.ray import node_probe
from blockyard.deploy.ray.node_probe import RECONNECT_VARIABLE
from blockyard.deploy.ray.nodes import (
    RECONNECT_SECONDS,
    NodeFacts,
    check_code,
    distinct_names,
    findings,
    reconnect_seconds,
    short_reconnect,
)
from blockyard.deploy.settings.wanted_cluster import UpOptions
from blockyard.deploy.views.views import finding_line
from blockyard.proto.naming.code_version import code_version
from blockyard.worker.config import EngineConfig

HERE = {"ray": "2.60.0", "torch": "2.13.0"}
SOUND = NodeFacts(
    address="10.0.0.7",
    host="node-7",
    python="3.11.4",
    packages=HERE,
    code=code_version(),
    has_bfloat16=True,
    niceness=0,
    reconnect_seconds=RECONNECT_SECONDS,
    model="",
    redis="",
    unreachable=(),
)


@pytest.mark.parametrize(
    ("node", "verdict", "words"),
    [
        (SOUND, "ok", ""),
        (replace(SOUND, python="3.12.1"), "fail", "Python 3.12.1 (here 3.11.2)"),
        (replace(SOUND, packages={**HERE, "ray": "2.59.0"}), "fail", "ray 2.59.0 (here 2.60.0)"),
        (replace(SOUND, packages={**HERE, "torch": "2.12.0"}), "warn", "torch 2.12.0 (here 2.13.0)"),
        (replace(SOUND, packages={**HERE, "torch": None}), "fail", "torch missing (here 2.13.0)"),
        (replace(SOUND, code="0.1.0+aaaa"), "warn", "code 0.1.0+aaaa, here"),
        (replace(SOUND, code=None), "warn", "needs --ship-code"),
        (replace(SOUND, model="the folder is not there"), "fail", "model: the folder is not there"),
        (replace(SOUND, redis="ConnectionError"), "fail", "redis: ConnectionError"),
        (replace(SOUND, unreachable=("10.0.0.8",)), "fail", "ports: takes no connection to 10.0.0.8"),
    ],
)
def test_each_thing_that_is_wrong_with_a_node_is_one_finding(
    node: NodeFacts, verdict: str, words: str
) -> None:
    told = list(findings([node], HERE, "3.11.2"))
    unsound = [finding for finding in told if finding.verdict != "ok"]
    assert [(finding.verdict, finding.subject) for finding in unsound] == [(verdict, "10.0.0.7")] * (
        verdict != "ok"
    )
    assert all(words in finding.detail for finding in unsound)
    assert exit_code(told) == (verdict == "fail")


def test_what_was_not_asked_is_not_told() -> None:
    told = findings([replace(SOUND, model=None, redis=None)], HERE, "3.11.2")
    assert [finding.detail.partition(" ")[0] for finding in told] == ["Python", "code", "ports:"]


def test_other_code_is_refused_before_anything_is_placed() -> None:
    check_code([SOUND])
    with pytest.raises(ValueError, match=r"node 10\.0\.0\.7 has blockyard 0\.1\.0\+aaaa, this command is"):
        check_code([SOUND, replace(SOUND, code="0.1.0+aaaa")])
    with pytest.raises(ValueError, match="has no blockyard, or one too old to tell its version"):
        check_code([replace(SOUND, code=None)])


def test_nodes_of_one_machine_are_told_apart_by_the_beginning_of_their_ids() -> None:
    addresses = {"3f2a9c1d77": "10.0.0.7", "b81e04aa52": "10.0.0.7", "77aa01c3d9": "10.0.0.8"}
    names = distinct_names(addresses)
    assert names == {
        "3f2a9c1d77": "10.0.0.7 (3f2a9c1d)",
        "b81e04aa52": "10.0.0.7 (b81e04aa)",
        "77aa01c3d9": "10.0.0.8",
    }
    shown = [
        finding_line(finding).plain
        for finding in findings([replace(SOUND, address=name) for name in names.values()], HERE, "3.11.2")
    ]
    assert any(line.startswith("ok   10.0.0.7 (3f2a9c1d) Python 3.11.4") for line in shown)
    assert len(set(shown)) == len(shown)


def test_cpus_that_would_choose_data_types_that_do_not_go_together_are_told_of() -> None:
    other = replace(SOUND, address="10.0.0.8", has_bfloat16=False)
    assert [found for found in findings([SOUND, SOUND], HERE, "3.11.2") if found.subject == "data type"] == []
    (told,) = (found for found in findings([SOUND, other], HERE, "3.11.2") if found.subject == "data type")
    assert (told.verdict, "no bfloat16 instructions on 10.0.0.8" in told.detail) == ("warn", True)


def test_workers_on_cpus_of_both_kinds_all_compute_in_float32() -> None:
    """A router takes workers of one data type alone."""
    options, said = UpOptions(engine=EngineConfig(model="demo", device="cpu")), list[Progress]()
    other = replace(SOUND, has_bfloat16=False)
    assert with_one_dtype(options, [SOUND, SOUND], said.append) == options
    assert said == []
    assert with_one_dtype(options, [SOUND, other], said.append).engine.dtype == "float32"
    assert [progress.warning for progress in said] == [UNLIKE_CPUS]
    named = replace(options, engine=replace(options.engine, dtype="bfloat16"))
    assert with_one_dtype(named, [SOUND, other], said.append) == named


def test_a_node_whose_ray_lowers_the_priority_of_workers_is_warned_about() -> None:
    told = list(findings([replace(SOUND, niceness=15)], HERE, "3.11.2"))
    slow = [finding for finding in told if "niceness" in finding.detail]
    assert [finding.verdict for finding in slow] == ["warn"]
    assert "RAY_worker_niceness=0" in slow[0].detail


def test_nodes_that_end_soon_after_rays_control_service_are_warned_about() -> None:
    short = replace(SOUND, address="10.0.0.8", reconnect_seconds=60.0)
    assert short_reconnect([SOUND]) is None
    (told,) = (found for found in findings([SOUND, short], HERE, "3.11.2") if found.subject == "ray")
    assert told.verdict == "warn"
    for words in ("on 10.0.0.8 after 60 s", f"{RECONNECT_VARIABLE}={RECONNECT_SECONDS}"):
        assert words in told.detail
    assert reconnect_seconds([SOUND, short]) == 60.0, "the first node to end takes its workers with it"


@pytest.mark.parametrize(
    ("environment", "seconds"),
    [({}, 60.0), ({RECONNECT_VARIABLE: "600"}, 600.0), ({RECONNECT_VARIABLE: "soon"}, 60.0)],
)
def test_a_node_ends_after_what_its_environment_says_or_rays_default(
    environment: dict[str, str], seconds: float
) -> None:
    assert node_probe.reconnect_seconds(environment) == seconds
