"""Code that none of our files may have, according to its syntax tree: unpickling, running a text, giving a shell a
text."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
SOURCES = sorted(
    path
    for folder in ("proto", "kernels", "worker", "router", "deploy")
    for path in (ROOT / folder).rglob("*.py")
    if not path.name.endswith(("_pb2.py", "_pb2_grpc.py"))
)
MODULES = {"pickle", "cPickle", "_pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib", "telnetlib"}
"""Modules whose formats may run anything when they are read, in any package."""
NAMES = {"eval", "exec", "compile", "__import__"}
CALLS = {
    *(f"builtins.{name}" for name in NAMES),
    "torch.load",
    "torch.save",
    "torch.serialization.load",
    "torch.serialization.save",
    "torch.jit.load",
    "numpy.load",
    "yaml.load",
    "yaml.unsafe_load",
    "os.system",
    "os.popen",
    "subprocess.getoutput",
    "tempfile.mktemp",
    "ssl._create_unverified_context",
}
EXCEPTIONS = {
    # Ray carries actors' classes to its nodes in this way. Here it takes one module of ours along, for a node that has
    # no copy of the package. Nothing is read: Ray unpickles the answers, as those of all actors.
    "deploy/ray/nodes.py": ["ray.cloudpickle"],
}


def findings(tree: ast.AST) -> Iterator[tuple[int, str]]:
    origins = _origins(tree)
    for node in ast.walk(tree):
        match node:
            case ast.Import() | ast.ImportFrom():
                yield from ((node.lineno, name) for _, name in _imported(node) if _is_forbidden(name))
            case ast.Call(func=ast.Name(id=name)) if name in NAMES:
                yield node.lineno, name
            case ast.Call(func=ast.Attribute() as func):
                first, _, rest = ast.unparse(func).partition(".")
                if (name := f"{origins.get(first, first)}.{rest}") in CALLS:
                    yield node.lineno, name
        if isinstance(node, ast.keyword) and node.arg == "shell" and not _is(node.value, False):
            yield node.value.lineno, "shell="
        if isinstance(node, ast.keyword) and node.arg == "trust_remote_code" and not _is(node.value, False):
            yield node.value.lineno, "trust_remote_code="


def _origins(tree: ast.AST) -> dict[str, str]:
    """Return the origin of each name that an import binds: `np` is numpy."""
    imports = (node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom))
    bound = (pair for node in imports for pair in _imported(node))
    return {known: origin for known, origin in bound if known}


def _imported(node: ast.Import | ast.ImportFrom) -> Iterator[tuple[str, str]]:
    """Yield each bound name, and the full name of what is imported. `import a.b` binds `a` as itself, so it yields no
    name."""
    for alias in node.names:
        if isinstance(node, ast.Import):
            yield alias.asname or "", alias.name
        else:
            yield alias.asname or alias.name, f"{node.module}.{alias.name}"


def _is_forbidden(name: str) -> bool:
    """Return whether the import is forbidden: an unpickler in any package, a name in CALLS, or all names at once."""
    return not MODULES.isdisjoint(name.split(".")) or name in CALLS or name.endswith(".*")


def _is(node: ast.expr, value: object) -> bool:
    return isinstance(node, ast.Constant) and node.value is value


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_source_runs_what_it_reads(path: Path) -> None:
    name = str(path.relative_to(ROOT))
    found = list(findings(ast.parse(path.read_bytes())))
    assert [what for _, what in found] == EXCEPTIONS.get(name, []), f"{name}: {found}"


@pytest.mark.parametrize(
    "text",
    [
        "import pickle",
        "from pickle import loads",
        "import cloudpickle.compat",
        "from ray import cloudpickle",
        "from ray.cloudpickle import loads",
        "from torch import load",
        "from torch import load as read",
        "import torch as t\nt.load(path)",
        "import torch.serialization as reading\nreading.load(path)",
        "from torch import jit\njit.load(path)",
        "import numpy as np\nnp.load(path)",
        "from os import system",
        "from builtins import eval as run",
        "builtins.exec(text)",
        "from torch import *",
        "x = eval('1')",
        "def f():\n    exec(text)",
        "torch.load(path, weights_only=True)",
        "subprocess.run(command, shell=True)",
        "subprocess.run(command, shell=use_shell)",
        "AutoModel.from_pretrained(folder, trust_remote_code=True)",
        "yaml.load(text)",
    ],
)
def test_each_of_these_would_be_found(text: str) -> None:
    assert len(list(findings(ast.parse(text)))) == 1


@pytest.mark.parametrize(
    "text",
    [
        "model.eval()",
        "re.compile('x')",
        "subprocess.run(command, shell=False)",
        "await client.eval(script)",
        "from safetensors.torch import save_file, load",
        "import safetensors as torch\ntorch.load(path)",
        "from . import system",
    ],
)
def test_and_these_would_not(text: str) -> None:
    assert not list(findings(ast.parse(text)))


REQUEST_CHECKS = (
    "router/request/chats.py",
    "router/request/prompts.py",
    "router/request/validation.py",
    "router/request/sampling_checks.py",
    "router/request/structured_output.py",
    "router/tokenizing/encoder.py",
    "router/tokenizing/prompts.py",
    "router/calls/bounds.py",
    "router/admission/auth.py",
    "proto/naming/identifiers.py",
    *(str(path.relative_to(ROOT)) for path in sorted((ROOT / "router" / "openai").rglob("*.py"))),
)


@pytest.mark.parametrize("module", REQUEST_CHECKS)
def test_what_clients_send_is_checked_by_no_assertion(module: str) -> None:
    """`python -O` removes assertions. The one assertion that may stand there checks a type that the contract fixes."""
    tree = ast.parse((ROOT / module).read_bytes())
    asserted = [ast.unparse(node.test) for node in ast.walk(tree) if isinstance(node, ast.Assert)]
    assert all(condition.startswith(("isinstance(", "not isinstance(")) for condition in asserted), asserted


def test_the_sources_are_there() -> None:
    assert len(SOURCES) > 150
