"""deploy/kuberay: each manifest against its schema, and against the code and the manifests that it depends on."""

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml
from blockyard.deploy.cli import main
from blockyard.deploy.machine.redis_versions import version_of_reply
from blockyard.proto.index.acl import acl_rules
from blockyard.proto.runtime.settings import parse_bytes
from ray._common.utils import load_class

from .commands import KUBERAY, check, commands_in, parse
from .kuberay_schema import POD_MONITOR, RAY_CLUSTER

KUBERNETES = "1.32"
KUSTOMIZATION = "kustomization.yaml"
CONSTRAINTS = Path(__file__).parents[3] / "constraints.txt"
OURS = {"RayCluster": RAY_CLUSTER, "PodMonitor": POD_MONITOR}
REDIS_IMAGE = re.compile(
    r"""(?:image: *|FROM +|docker (?:run|pull) .*?)["']?(?:[\w.-]+/)*\b(redis|valkey)(?![\w/-])(?::([\w.-]+))?"""
)
"""Its product and tag."""


def documents() -> Iterator[Any]:
    for path in sorted(KUBERAY.rglob("*.yaml")):
        if path.name == KUSTOMIZATION:
            continue
        for document in yaml.safe_load_all(path.read_text(encoding="utf-8")):
            yield pytest.param(
                document,
                id=f"{path.parent.name}-{path.stem}-{document['kind']}-{document['metadata']['name']}",
            )


def of_kind(kind: str) -> list[Any]:
    return [parameter.values[0] for parameter in documents() if parameter.values[0]["kind"] == kind]


def named(kind: str, name: str) -> Any:
    (found,) = (document for document in of_kind(kind) if document["metadata"]["name"] == name)
    return found


def ray_pods(cluster: Any) -> dict[str, Any]:
    """The pod templates of a RayCluster, by group."""
    spec = cluster["spec"]
    groups = {group["groupName"]: group["template"] for group in spec["workerGroupSpecs"]}
    return {"head": spec["headGroupSpec"]["template"], **groups}


def pods() -> dict[str, Any]:
    """All pod templates of all manifests."""
    found = {}
    for parameter in documents():
        document = parameter.values[0]
        if document["kind"] == "RayCluster":
            found |= {f"{parameter.id}-{group}": pod for group, pod in ray_pods(document).items()}
        elif "template" in document.get("spec", {}):
            found[str(parameter.id)] = document["spec"]["template"]
    return found


CLUSTERS = pytest.mark.parametrize("device", ["cpu", "gpu"])


def cluster_for(device: str) -> Any:
    return yaml.safe_load((KUBERAY / device / "ray-cluster.yaml").read_text(encoding="utf-8"))


@pytest.mark.parametrize("document", list(documents()))
def test_every_manifest_has_only_fields_that_its_kind_knows(document: Any) -> None:
    if (schema := OURS.get(document["kind"])) is not None:
        jsonschema.validate(document, schema)
    else:
        kubernetes_validate.validate(document, KUBERNETES, strict=True)


@pytest.mark.parametrize("pod", list(pods().values()), ids=list(pods()))
def test_every_pod_is_valid_confined_and_bounded(pod: Any) -> None:
    template = {"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": "pod"}, "template": pod}
    kubernetes_validate.validate(template, KUBERNETES, strict=True)
    spec = pod["spec"]
    assert spec["securityContext"]["runAsNonRoot"]
    assert spec["automountServiceAccountToken"] is False
    volumes = {volume["name"] for volume in spec.get("volumes", [])}
    claims = {"data"}  # made by the StatefulSet
    for container in spec["containers"] + spec.get("initContainers", []):
        assert container["securityContext"]["allowPrivilegeEscalation"] is False
        assert container["resources"]["limits"]["memory"] == container["resources"]["requests"]["memory"]
        assert {mount["name"] for mount in container.get("volumeMounts", [])} <= volumes | claims
        assert ":" in container["image"]
        assert not container["image"].endswith(":latest")


def test_each_kustomization_names_what_is_there_and_together_they_name_all() -> None:
    named: set[Path] = set()
    for file in KUBERAY.rglob(KUSTOMIZATION):
        resources = [
            (file.parent / name).resolve()
            for name in yaml.safe_load(file.read_text(encoding="utf-8"))["resources"]
        ]
        assert all(path.exists() for path in resources), file
        named |= {path / KUSTOMIZATION if path.is_dir() else path for path in resources}
    roots = {KUBERAY / name / KUSTOMIZATION for name in ("cpu", "two-gpus", "ingress")}
    assert named | roots | {KUBERAY / "up-job.yaml"} == set(KUBERAY.rglob("*.yaml"))


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="no kubectl on the PATH")
@CLUSTERS
def test_kubectl_renders_each_overlay_as_all_of_base_and_its_own(device: str) -> None:
    rendered = subprocess.run(
        ("kubectl", "kustomize", str(KUBERAY / device)),
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert rendered.returncode == 0, rendered.stderr
    found = list(yaml.safe_load_all(rendered.stdout))
    written = [
        document
        for folder in (KUBERAY / "base", KUBERAY / device)
        for path in folder.glob("*.yaml")
        if path.name != KUSTOMIZATION
        for document in yaml.safe_load_all(path.read_text(encoding="utf-8"))
    ]
    assert sorted(found, key=identity) == sorted(written, key=identity)


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="no kubectl on the PATH")
def test_the_overlay_for_two_gpus_gives_each_worker_pod_two_and_changes_nothing_else() -> None:
    def rendered(overlay: str) -> list[Any]:
        command = ("kubectl", "kustomize", str(KUBERAY / overlay))
        result = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
        return list(yaml.safe_load_all(result.stdout))

    def resources(documents: list[Any]) -> Any:
        (cluster,) = (document for document in documents if document["kind"] == "RayCluster")
        (workers,) = (
            group for group in cluster["spec"]["workerGroupSpecs"] if group["groupName"] == "workers"
        )
        return workers["template"]["spec"]["containers"][0]["resources"]

    one, two = rendered("gpu"), rendered("two-gpus")
    assert {kind["nvidia.com/gpu"] for kind in resources(two).values()} == {"2"}
    assert resources(two)["limits"] == resources(two)["requests"]
    resources(two).update(resources(one))
    assert two == one


def identity(document: Any) -> tuple[str, str]:
    return document["kind"], document["metadata"]["name"]


def test_budgets_and_the_ingress_choose_pods_and_services_that_there_are() -> None:
    for group in ("routers", "workers"):
        chosen = named("PodDisruptionBudget", f"blockyard-{group}")["spec"]["selector"]["matchLabels"]
        assert chosen == {"ray.io/cluster": "blockyard", "ray.io/group": group}
        assert all(group in ray_pods(cluster_for(device)) for device in ("cpu", "gpu"))
    (rule,) = named("Ingress", "blockyard")["spec"]["rules"]
    (path,) = rule["http"]["paths"]
    service = named("Service", path["backend"]["service"]["name"])
    assert path["backend"]["service"]["port"]["name"] in {port["name"] for port in service["spec"]["ports"]}


def test_a_misspelt_field_is_found() -> None:
    wrong = cluster_for("cpu")
    wrong["spec"]["workerGroupSpecs"][0]["maxReplica"] = 3
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(wrong, RAY_CLUSTER)
    pod = ray_pods(cluster_for("cpu"))["head"]
    pod["spec"]["containers"][0]["readinessProb"] = {}
    template = {"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": "pod"}, "template": pod}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(template, KUBERNETES, strict=True)


@CLUSTERS
def test_every_ray_option_is_one_of_ray_start(device: str) -> None:
    spec = cluster_for(device)["spec"]
    assert f"ray=={spec['rayVersion']}" in CONSTRAINTS.read_text(encoding="utf-8").splitlines()
    heads = [(spec["headGroupSpec"], ["--head"])]
    for group, first in [*heads, *((group, ["--address=HEAD:6379"]) for group in spec["workerGroupSpecs"])]:
        options = [f"--{name}={value}" for name, value in group["rayStartParams"].items()]
        # KubeRay's shell takes the outer quotes of a value away.
        check(["ray", "start", *first, *(option.replace("='", "=").rstrip("'") for option in options)])


@CLUSTERS
def test_routers_run_on_pods_that_the_service_finds_and_where_up_puts_them(device: str) -> None:
    cluster = cluster_for(device)
    (group,) = (g for g in cluster["spec"]["workerGroupSpecs"] if g["groupName"] == "routers")
    (up,) = up_commands()
    options = up_options(up)
    resources = json.loads(json.loads(group["rayStartParams"]["resources"].strip("'")))
    assert resources == {options["router_resource"]: 1}
    assert group["replicas"] == group["maxReplicas"] == options["num_routers"]
    container = group["template"]["spec"]["containers"][0]
    assert container["readinessProbe"]["tcpSocket"]["port"] == options["router_port"]
    service = named("Service", "blockyard-router")["spec"]
    assert service["selector"] == {
        "ray.io/cluster": cluster["metadata"]["name"],
        "ray.io/group": group["groupName"],
    }
    assert [port["targetPort"] for port in service["ports"]] == [options["router_port"], options["http_port"]]
    assert {port["containerPort"] for port in container["ports"]} >= {
        options["router_port"],
        options["http_port"],
    }


@CLUSTERS
def test_workers_find_their_model_and_there_is_a_pod_for_each(device: str) -> None:
    cluster, options = cluster_for(device), up_options(up_commands()[0])
    (group,) = (g for g in cluster["spec"]["workerGroupSpecs"] if g["groupName"] == "workers")
    assert group["replicas"] >= options["num_workers"]
    for name, pod in ray_pods(cluster).items():
        mounts = {mount["mountPath"] for mount in pod["spec"]["containers"][0]["volumeMounts"]}
        assert any(options["model"].startswith(f"{mount}/") for mount in mounts), name


@CLUSTERS
def test_all_nodes_ask_for_the_token_and_wait_for_their_head(device: str) -> None:
    for name, pod in ray_pods(cluster_for(device)).items():
        settings = {setting["name"]: setting for setting in pod["spec"]["containers"][0]["env"]}
        assert settings["RAY_AUTH_MODE"]["value"] == "token", name
        assert settings["RAY_AUTH_TOKEN"]["valueFrom"]["secretKeyRef"]["name"] == "blockyard-ray"
        assert int(settings["RAY_gcs_rpc_server_reconnect_timeout_s"]["value"]) == 600


@CLUSTERS
def test_the_head_has_the_page_the_state_and_both_users_of_the_index(device: str) -> None:
    container = ray_pods(cluster_for(device))["head"]["spec"]["containers"][0]
    settings = {setting["name"]: setting.get("value") for setting in container["env"]}
    assert callable(load_class(settings["RAY_START_HOOK"]))
    assert settings["BLOCKYARD_HOME"] in {mount["mountPath"] for mount in container["volumeMounts"]}
    assert settings["BLOCKYARD_REDIS_URL"].startswith("redis://blockyard-worker:$(INDEX_WORKER_PASSWORD)@")
    assert settings["BLOCKYARD_ROUTER_REDIS_URL"].startswith(
        "redis://blockyard-router:$(INDEX_ROUTER_PASSWORD)@"
    )
    names = [setting["name"] for setting in container["env"]]
    assert names.index("INDEX_WORKER_PASSWORD") < names.index("BLOCKYARD_REDIS_URL"), (
        "else it is not filled in"
    )


def test_gpu_workers_ask_for_a_gpu_and_cpu_workers_for_none() -> None:
    def gpus(device: str) -> str | None:
        container = ray_pods(cluster_for(device))["workers"]["spec"]["containers"][0]
        asked: str | None = container["resources"]["limits"].get("nvidia.com/gpu")
        return asked

    assert (gpus("gpu"), gpus("cpu")) == ("1", None)


def test_what_redis_lets_each_user_do_is_what_the_code_says() -> None:
    users = named("ConfigMap", "blockyard-redis")["data"]["index-users.sh"]
    assert f"user blockyard-router on #$router {acl_rules('router', 'default')}\n" in users
    assert f"user blockyard-worker on #$worker {acl_rules('worker', 'default')}\n" in users
    assert "user default off" in users


def test_no_image_of_redis_or_valkey_that_we_name_has_known_holes() -> None:
    texts = {str(path): path.read_text(encoding="utf-8") for path in written_for_operators()}
    named = [(file, *image) for file, text in texts.items() for image in REDIS_IMAGE.findall(text)]
    assert [Path(file).name for file, *_ in named].count("redis.yaml") == 4
    for file, product, version in named:
        pinned = version_of_reply({"server": product, "version": version})
        assert pinned is not None, f"{file}: {product}:{version} leaves open which release it is"
        assert pinned.warning == "", f"{file}: {pinned.warning}"


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("image: redis:7.4.2", [("redis", "7.4.2")]),
        ("docker run valkey/valkey:8.1.3-alpine", [("valkey", "8.1.3-alpine")]),
        ("FROM docker.io/library/redis:8", [("redis", "8")]),
        ("image: redis", [("redis", "")]),
        ("image: 'redis:latest'", [("redis", "latest")]),
        ("redis://u:p@blockyard-index-redis:6379/0", []),
        ("redisAddress: blockyard-gcs-redis:6379", []),
    ],
)
def test_every_way_to_name_such_an_image_is_found(text: str, found: list[tuple[str, str]]) -> None:
    assert REDIS_IMAGE.findall(text) == found


def written_for_operators() -> list[Path]:
    """The files of ours that may name an image: manifests, the Dockerfile, examples and documents."""
    root = KUBERAY.parents[1]
    folders = [root / name for name in ("deploy", "docs", "examples", ".ci")]
    files = [path for folder in folders for path in folder.rglob("*") if path.is_file()]
    kinds = {".yaml", ".yml", ".json", ".md", ".sh", ".tpl", ""}
    return [path for path in (*files, *root.glob("*.md")) if path.suffix in kinds]


def up_commands() -> list[list[str]]:
    (container,) = named("Job", "blockyard-up")["spec"]["template"]["spec"]["containers"]
    return [command for command in commands_in(container["args"][-1]) if command[1] == "up"]


def up_options(command: list[str]) -> dict[str, Any]:
    return main.commands["up"].make_context("up", command[2:]).params


def test_the_job_hands_a_command_to_ray_that_blockyard_takes() -> None:
    (container,) = named("Job", "blockyard-up")["spec"]["template"]["spec"]["containers"]
    program, *arguments = [*container["command"], *container["args"]]
    assert program == "ray"
    check(["ray", *arguments])
    for command in commands_in(container["args"][-1]):
        parse(main, *command[:1], command[1:])


@pytest.mark.parametrize(
    ("config", "kind", "name"),
    [
        ("index.conf", "Deployment", "blockyard-index-redis"),
        ("gcs.conf", "StatefulSet", "blockyard-gcs-redis"),
    ],
)
def test_a_redis_that_is_full_refuses_writes_before_its_pod_is_killed(
    config: str, kind: str, name: str
) -> None:
    lines = named("ConfigMap", "blockyard-redis")["data"][config].splitlines()
    (most,) = (line.split()[1] for line in lines if line.startswith("maxmemory "))
    (container,) = named(kind, name)["spec"]["template"]["spec"]["containers"]
    limit_bytes = parse_bytes(container["resources"]["limits"]["memory"])
    # Redis' "mb" is 2**20 bytes. The rest is for buffers, fragments and the copy that a rewrite of its log makes.
    assert parse_bytes(most.replace("mb", "MiB")) <= 0.75 * limit_bytes
    assert "maxmemory-policy noeviction" in lines
