"""List of all parts in CycloneDX, supply_chain/sbom.cdx.json: deterministic, without time or serial number.

    python -m supply_chain.sbom            # writes it
    python -m supply_chain.sbom --check    # fails if it differs from lock, bundled parts and manifests

Needs no network and no installed package of the product.
"""

import argparse
import json
import sys
import tomllib
from collections.abc import Iterable
from itertools import chain
from pathlib import Path
from typing import Any

from cyclonedx.model import Property
from cyclonedx.model.bom import Bom
from cyclonedx.model.component import Component, ComponentScope, ComponentType
from cyclonedx.output.json import JsonV1Dot6
from packageurl import PackageURL
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from supply_chain.lock import CONSTRAINTS, LOCK, PROJECT
from supply_chain.parts import BUNDLED, Part, all_parts, bundled, locked, wrong_wheels

SBOM = Path(__file__).parent / "sbom.cdx.json"


def component(part: Part) -> Component:
    group, _, name = part.name.rpartition("/")
    return Component(
        type=ComponentType.APPLICATION
        if part.name in ("redis", "valkey", "python")
        else ComponentType.LIBRARY,
        name=name,
        group=group or None,
        version=part.version or None,
        purl=PackageURL(part.ecosystem, group or None, name, part.version or None),
        bom_ref=f"{part.purl}#{part.inside}",
        scope=ComponentScope.REQUIRED if part.is_shipped else ComponentScope.EXCLUDED,
        properties=[Property(name="blockyard:inside", value=part.inside)] if part.inside else None,
    )


def document(parts: Iterable[Part], project: dict[str, Any]) -> str:
    components = {part: component(part) for part in parts}
    ours = Component(
        type=ComponentType.APPLICATION,
        name=project["name"],
        version=project["version"],
        bom_ref=f"{project['name']}@{project['version']}",
    )
    bom = Bom(components=components.values())
    bom.metadata.component = ours
    wheels = {f"{part.name} {part.version}": part for part in components if not part.inside}
    for part, written in components.items():
        holder = wheels.get(part.inside)
        bom.register_dependency(components[holder] if holder else ours, [written])
    output = json.loads(JsonV1Dot6(bom).output_as_string())
    del output["serialNumber"], output["metadata"]["timestamp"]
    return json.dumps(output, indent=1, ensure_ascii=False) + "\n"


UNLOCKED = ("nixl",)
"""Extras that no image and no development environment has. The lock is without them."""


def stale(project: dict[str, Any], lock: Iterable[Part], constraints: str) -> list[str]:
    """Return the requirements and constraints that the lock does not meet."""
    pinned = {part.name: part.version for part in lock}
    extras = [wanted for name, wanted in project["optional-dependencies"].items() if name not in UNLOCKED]
    wanted = [*project["dependencies"], *chain.from_iterable(extras)]
    wanted += [line for line in constraints.splitlines() if line and line[0] != "#"]
    requirements = [Requirement(text) for text in wanted]
    return [
        str(requirement)
        for requirement in requirements
        if not requirement.specifier.contains(pinned.get(canonicalize_name(requirement.name), "0"))
        or canonicalize_name(requirement.name) not in pinned
    ]


def faults(project: dict[str, Any]) -> list[str]:
    """Return the reasons why the lock or the document is out of date."""
    lock = locked(LOCK.read_text(encoding="utf-8"))
    found = [
        f"requirements.lock does not meet {wanted}: run `make lock`"
        for wanted in stale(project, lock, CONSTRAINTS.read_text(encoding="utf-8"))
    ]
    for wheel in wrong_wheels(lock, bundled(BUNDLED.read_text(encoding="utf-8"))):
        found.append(
            f"bundled.json has another version than the lock: {wheel}; run `python -m supply_chain.bundled`"
        )
    if not SBOM.exists() or SBOM.read_text(encoding="utf-8") != document(all_parts(), project):
        found.append("sbom.cdx.json is out of date: run `make sbom`")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m supply_chain.sbom", description=__doc__.partition("\n")[0]
    )
    parser.add_argument("--check", action="store_true", help="compare, write nothing")
    project = tomllib.loads(PROJECT.read_text(encoding="utf-8"))["project"]
    if not parser.parse_args().check:
        SBOM.write_text(document(all_parts(), project), encoding="utf-8")
    elif found := faults(project):
        sys.exit("\n".join(found))


if __name__ == "__main__":
    main()
