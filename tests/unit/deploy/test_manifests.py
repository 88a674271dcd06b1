"""deploy/kuberay: each manifest against its schema, and against the code and the manifests that it depends on."""

import json
import re
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

from .commands import KUBERAY, check, check_all, commands_in
from .kuberay_schema import POD_MONITOR, RAY_CLUSTER

KUBERNETES = "1.32"
KUSTOMIZATION = "kustomization.yaml"
CONSTRAINTS = Path(__file__).parents[3] / "constraints.txt"
OURS = {"RayCluster": RAY_CLUSTER, "PodMonitor": POD_MONITOR}
REDIS_IMAGE = re.compile(
    r"""(?:image: *|FROM +|docker (?:run|pull) .*?)["']?(?:[\w.-]+/)*\b(redis|valkey)(?![\w/-])(?::([\w.-]+))?"""
)
"""Its product and tag."""


def loaded(path: Path) -> list[Any]:
    return list(yaml.safe_load_all(path.read_text(encoding="utf-8")))


DOCUMENTS: dict[str, Any] = {
    f"{path.parent.name}-{path.stem}-{document['kind']}-{document['metadata']['name']}": document
    for path in sorted(KUBERAY.rglob("*.yaml"))
    if path.name != KUSTOMIZATION
    for document in loaded(path)
}


def named(kind: str, name: str) -> Any:
    kinds = (document for document in DOCUMENTS.values() if document["kind"] == kind)
    (found,) = (document for document in kinds if document["metadata"]["name"] == name)
    return found


def ray_pods(cluster: Any) -> dict[str, Any]:
    """The pod templates of a RayCluster, by group."""
    spec = cluster["spec"]
    groups = {group["groupName"]: group["template"] for group in spec["workerGroupSpecs"]}
    return {"head": spec["headGroupSpec"]["template"], **groups}


def pods() -> dict[str, Any]:
    """All pod templates of all manifests."""
    found = {}
    for name, document in DOCUMENTS.items():
        if document["kind"] == "RayCluster":
            found |= {f"{name}-{group}": pod for group, pod in ray_pods(document).items()}
        elif "template" in document.get("spec", {}):
            found[name] = document["spec"]["template"]
    return found


def validate_pod(pod: Any) -> None:
    template = {"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": "pod"}, "template": pod}
    kubernetes_validate.validate(template, KUBERNETES, strict=True)


CLUSTERS = pytest.mark.parametrize("device", ["cpu", "gpu"])


def cluster_for(device: str) -> Any:
    (cluster,) = loaded(KUBERAY / device / "ray-cluster.yaml")
    return cluster


def group_for(device: str, name: str) -> Any:
    (group,) = (g for g in cluster_for(device)["spec"]["workerGroupSpecs"] if g["groupName"] == name)
    return group


@pytest.mark.parametrize("document", DOCUMENTS.values(), ids=DOCUMENTS)
def test_every_manifest_has_only_fields_that_its_kind_knows(document: Any) -> None:
    if (schema := OURS.get(document["kind"])) is not None:
        jsonschema.validate(document, schema)
    else:
        kubernetes_validate.validate(document, KUBERNETES, strict=True)


@pytest.mark.parametrize("pod", pods().values(), ids=pods())
def test_every_pod_is_valid_confined_and_bounded(pod: Any) -> None:
    validate_pod(pod)
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
        resources = [(file.parent / name).resolve() for name in loaded(file)[0]["resources"]]
        assert all(path.exists() for path in resources), file
        named |= {path / KUSTOMIZATION if path.is_dir() else path for path in resources}
    roots = {KUBERAY / name / KUSTOMIZATION for name in ("cpu", "two-gpus", "ingress")}
    assert named | roots | {KUBERAY / "up-job.yaml"} == set(KUBERAY.rglob("*.yaml"))


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
    with pytest.raises(kubernetes_validate.ValidationError):
        validate_pod(pod)


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
    group, options = group_for(device, "routers"), up_options()
    resources = json.loads(json.loads(group["rayStartParams"]["resources"].strip("'")))
    assert resources == {options["router_resource"]: 1}
    assert group["replicas"] == group["maxReplicas"] == options["num_routers"]
    container = group["template"]["spec"]["containers"][0]
    assert container["readinessProbe"]["tcpSocket"]["port"] == options["router_port"]
    service = named("Service", "blockyard-router")["spec"]
    cluster = cluster_for(device)["metadata"]["name"]
    assert service["selector"] == {"ray.io/cluster": cluster, "ray.io/group": "routers"}
    ports = [options["router_port"], options["http_port"]]
    assert [port["targetPort"] for port in service["ports"]] == ports
    assert {port["containerPort"] for port in container["ports"]} >= {*ports}


@CLUSTERS
def test_workers_find_their_model_and_their_gpu_and_there_is_a_pod_for_each(device: str) -> None:
    options = up_options()
    assert group_for(device, "workers")["replicas"] >= options["num_workers"]
    for name, pod in ray_pods(cluster_for(device)).items():
        mounts = {mount["mountPath"] for mount in pod["spec"]["containers"][0]["volumeMounts"]}
        assert any(options["model"].startswith(f"{mount}/") for mount in mounts), name
    container = group_for(device, "workers")["template"]["spec"]["containers"][0]
    gpus = container["resources"]["limits"].get("nvidia.com/gpu")
    assert gpus == (None if device == "cpu" else "1")


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


def test_what_redis_lets_each_user_do_is_what_the_code_says() -> None:
    users = named("ConfigMap", "blockyard-redis")["data"]["index-users.sh"]
    assert f"user blockyard-router on #$router {acl_rules('router', 'default')}\n" in users
    assert f"user blockyard-worker on #$worker {acl_rules('worker', 'default')}\n" in users
    assert "user default off" in users


def test_no_image_of_redis_or_valkey_that_we_name_has_known_holes() -> None:
    texts = {str(path): path.read_text(encoding="utf-8") for path in written_for_operators()}
    named = [(file, *image) for file, text in texts.items() for image in REDIS_IMAGE.findall(text)]
    assert [Path(file).name for file, *_ in named].count("redis.yaml") == 4
    assert REDIS_IMAGE.findall("docker run valkey/valkey:8.1.3-alpine") == [("valkey", "8.1.3-alpine")]
    assert REDIS_IMAGE.findall("image: 'redis:latest'\nredis://u:p@index-redis:6379/0") == [
        ("redis", "latest")
    ]
    for file, product, version in named:
        pinned = version_of_reply({"server": product, "version": version})
        assert pinned is not None, f"{file}: {product}:{version} leaves open which release it is"
        assert pinned.warning == "", f"{file}: {pinned.warning}"


def written_for_operators() -> list[Path]:
    """The files of ours that may name an image: manifests, the Dockerfile, examples and documents."""
    root = KUBERAY.parents[1]
    folders = [root / name for name in ("deploy", "docs", "examples", ".ci")]
    files = [path for folder in folders for path in folder.rglob("*") if path.is_file()]
    kinds = {".yaml", ".yml", ".json", ".md", ".sh", ".tpl", ""}
    return [path for path in (*files, *root.glob("*.md")) if path.suffix in kinds]


def up_options() -> dict[str, Any]:
    """Return the options of the `up` that the job runs."""
    (container,) = named("Job", "blockyard-up")["spec"]["template"]["spec"]["containers"]
    (up,) = (command for command in commands_in(container["args"][-1]) if command[1] == "up")
    return main.commands["up"].make_context("up", up[2:]).params


def test_the_job_hands_a_command_to_ray_that_blockyard_takes() -> None:
    (container,) = named("Job", "blockyard-up")["spec"]["template"]["spec"]["containers"]
    command = [*container["command"], *container["args"]]
    assert command[0] == "ray"
    check(command)
    check_all(container["args"][-1])


@pytest.mark.parametrize(("name", "kind"), [("index", "Deployment"), ("gcs", "StatefulSet")])
def test_a_redis_that_is_full_refuses_writes_before_its_pod_is_killed(name: str, kind: str) -> None:
    lines = named("ConfigMap", "blockyard-redis")["data"][f"{name}.conf"].splitlines()
    (most,) = (line.split()[1] for line in lines if line.startswith("maxmemory "))
    (container,) = named(kind, f"blockyard-{name}-redis")["spec"]["template"]["spec"]["containers"]
    limit_bytes = parse_bytes(container["resources"]["limits"]["memory"])
    # Redis' "mb" is 2**20 bytes. The rest is for buffers, fragments and the copy that a rewrite of its log makes.
    assert parse_bytes(most.replace("mb", "MiB")) <= 0.75 * limit_bytes
    assert "maxmemory-policy noeviction" in lines
