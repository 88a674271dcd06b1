"""`kubectl kustomize` renders each overlay as all of base and its own."""

import shutil
import subprocess
from typing import Any

import pytest
import yaml

from tests.unit.deploy.commands import KUBERAY

pytestmark = pytest.mark.skipif(shutil.which("kubectl") is None, reason="no kubectl on the PATH")


def rendered(overlay: str) -> list[Any]:
    command = ("kubectl", "kustomize", str(KUBERAY / overlay))
    result = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    return list(yaml.safe_load_all(result.stdout))


def identity(document: Any) -> tuple[str, str]:
    return document["kind"], document["metadata"]["name"]


@pytest.mark.parametrize("device", ["cpu", "gpu"])
def test_an_overlay_is_all_of_base_and_its_own(device: str) -> None:
    written = [
        document
        for folder in (KUBERAY / "base", KUBERAY / device)
        for path in folder.glob("*.yaml")
        if path.name != "kustomization.yaml"
        for document in yaml.safe_load_all(path.read_text(encoding="utf-8"))
    ]
    assert sorted(rendered(device), key=identity) == sorted(written, key=identity)


def test_the_overlay_for_two_gpus_gives_each_worker_pod_two_and_changes_nothing_else() -> None:
    def resources(documents: list[Any]) -> Any:
        (cluster,) = (document for document in documents if document["kind"] == "RayCluster")
        groups = {group["groupName"]: group for group in cluster["spec"]["workerGroupSpecs"]}
        return groups["workers"]["template"]["spec"]["containers"][0]["resources"]

    one, two = rendered("gpu"), rendered("two-gpus")
    assert {kind["nvidia.com/gpu"] for kind in resources(two).values()} == {"2"}
    assert resources(two)["limits"] == resources(two)["requests"]
    resources(two).update(resources(one))
    assert two == one
