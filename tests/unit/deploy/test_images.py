"""deploy/Dockerfile and deploy/cluster-launcher.yaml: their own programs parse them, and they fit the package."""

import io
import re
import shlex
import tomllib
from pathlib import PurePosixPath
from typing import Any

import pytest
import yaml
from dockerfile_parse import DockerfileParser
from ray._common.utils import load_class
from ray.autoscaler._private.util import prepare_config, validate_config

from .commands import ROOT, check, commands_in

DOCKERFILE = ROOT / "deploy" / "Dockerfile"
LAUNCHER = ROOT / "deploy" / "cluster-launcher.yaml"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def instructions() -> list[dict[str, Any]]:
    parser = DockerfileParser(fileobj=io.BytesIO(DOCKERFILE.read_bytes()))
    return [step for step in parser.structure if step["instruction"] != "COMMENT"]


def values(name: str) -> list[str]:
    return [step["value"] for step in instructions() if step["instruction"] == name]


def test_every_stage_comes_from_a_pinned_image_or_a_stage_before() -> None:
    known = {"${PYTHON_IMAGE}", "${DEVICE}"}
    for base, _, stage in (value.partition(" AS ") for value in values("FROM")):
        assert base in known, base
        known.add(stage)
    assert {"cpu", "gpu"} <= known, "what DEVICE may be"
    arguments = dict(value.partition("=")[::2] for value in values("ARG"))
    assert re.fullmatch(r"python:3\.\d+\.\d+-slim-\w+", arguments["PYTHON_IMAGE"])
    assert arguments["DEVICE"] in known


def test_the_image_is_made_of_every_package_and_of_what_the_build_reads() -> None:
    copied = {source for value in values("COPY") if "--from" not in value for source in value.split()[:-1]}
    packages = {
        PurePosixPath(folder).parts[0] for folder in PROJECT["tool"]["setuptools"]["package-dir"].values()
    }
    inner = {
        path.parent.relative_to(ROOT).parts for top in packages for path in (ROOT / top).rglob("__init__.py")
    }
    assert set(PROJECT["tool"]["setuptools"]["packages"]) == {
        ".".join(("blockyard", *parts)) for parts in inner
    }
    needed = packages | {PROJECT["project"]["readme"], *PROJECT["project"]["license-files"], "pyproject.toml"}
    assert copied == needed | {"requirements.lock"}
    assert all((ROOT / source).exists() for source in copied)
    let_in = {
        line[1:]
        for line in (ROOT / "deploy/Dockerfile.dockerignore").read_text().splitlines()
        if line[:1] == "!"
    }
    assert let_in == copied


def test_everything_that_pip_installs_is_pinned() -> None:
    pinned = {
        line.partition("==")[0]
        for line in (ROOT / "requirements.lock").read_text().splitlines()
        if "==" in line
    }
    installs = [command for command in values("RUN") if "pip install" in command]
    assert len(installs) == 2
    for command in installs:
        words = shlex.split(command)
        assert words[words.index("--constraint") + 1] == "/build/requirements.lock"
        what = words[-1]
        assert what in pinned or what == "/build[serve,otel]"


def test_it_does_not_run_as_root_and_starts_with_a_command_of_ours() -> None:
    assert values("USER") == ["10001:10001"]
    (command,) = values("CMD")
    check(yaml.safe_load(command))
    order = [step["instruction"] for step in instructions()]
    assert order.index("USER") > max(i for i, name in enumerate(order) if name == "RUN")


def launcher() -> Any:
    return yaml.safe_load(LAUNCHER.read_text(encoding="utf-8"))


def test_ray_takes_the_launchers_file() -> None:
    prepared = prepare_config(launcher())
    validate_config(prepared)
    wrong = {**prepared, "setup_command": []}
    with pytest.raises(Exception, match="setup_command"):
        validate_config(wrong)


def test_its_commands_are_known_and_none_ends_all_of_ray() -> None:
    config = launcher()
    starts = config["head_start_ray_commands"] + config["worker_start_ray_commands"]
    for line in starts:
        (command,) = commands_in(line)
        assert command[:2] == ["ray", "start"], "`ray stop` would end every Ray on the machine"
        check(command)
        assert "RAY_AUTH_MODE=token" in line
    (hook,) = re.findall(r"RAY_START_HOOK=(\S+)", starts[0])
    assert callable(load_class(hook))


def test_it_installs_this_version() -> None:
    wheel = f"blockyard-{PROJECT['project']['version']}-py3-none-any.whl"
    config = launcher()
    assert [source for source in config["file_mounts"].values() if source.endswith(".whl")] == [
        f"dist/{wheel}"
    ]
    assert any(f'{wheel}[serve]"' in line and "-c " in line for line in config["setup_commands"])
