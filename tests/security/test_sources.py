"""What no file of ours may do, read off its syntax tree: unpickle, run a text, hand a text to a shell."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = sorted(
    path
    for folder in ("proto", "kernels", "worker", "router", "deploy")
    for path in (ROOT / folder).rglob("*.py")
    if not path.name.endswith(("_pb2.py", "_pb2_grpc.py"))
)
MODULES = {"pickle", "cPickle", "_pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib", "telnetlib"}
"""Reading what these have written may run anything."""
NAMES = {"eval", "exec", "compile", "__import__"}
CALLS = {
    "torch.load",
    "torch.save",
    "torch.jit.load",
    "numpy.load",
    "np.load",
    "yaml.load",
    "yaml.unsafe_load",
    "os.system",
    "os.popen",
    "subprocess.getoutput",
    "tempfile.mktemp",
    "ssl._create_unverified_context",
}


def findings(tree: ast.AST) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                yield from (
                    (node.lineno, alias.name) for alias in names if alias.name.split(".")[0] in MODULES
                )
            case ast.ImportFrom(module=module) if module and module.split(".")[0] in MODULES:
                yield node.lineno, module
            case ast.Call(func=ast.Name(id=name)) if name in NAMES:
                yield node.lineno, name
            case ast.Call(func=func) if ast.unparse(func) in CALLS:
                yield node.lineno, ast.unparse(func)
        if isinstance(node, ast.keyword) and node.arg == "shell" and not _is(node.value, False):
            yield node.value.lineno, "shell="
        if isinstance(node, ast.keyword) and node.arg == "trust_remote_code" and not _is(node.value, False):
            yield node.value.lineno, "trust_remote_code="


def _is(node: ast.expr, value: object) -> bool:
    return isinstance(node, ast.Constant) and node.value is value


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_source_runs_what_it_reads(path: Path) -> None:
    found = list(findings(ast.parse(path.read_bytes())))
    assert not found, f"{path.relative_to(ROOT)}: {found}"


@pytest.mark.parametrize(
    "text",
    [
        "import pickle",
        "from pickle import loads",
        "import cloudpickle.compat",
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
    ["model.eval()", "re.compile('x')", "subprocess.run(command, shell=False)", "await client.eval(script)"],
)
def test_and_these_would_not(text: str) -> None:
    assert not list(findings(ast.parse(text)))


REQUEST_CHECKS = (
    "validation",
    "sampling_checks",
    "prompts",
    "call_bounds",
    "auth",
    "names",
    "structured_output",
)


@pytest.mark.parametrize("module", REQUEST_CHECKS)
def test_what_clients_send_is_checked_by_no_assertion(module: str) -> None:
    """`python -O` would let it pass. The one assertion that may stand there is of a type that the contract fixes."""
    tree = ast.parse((ROOT / "router" / f"{module}.py").read_bytes())
    asserted = [ast.unparse(node.test) for node in ast.walk(tree) if isinstance(node, ast.Assert)]
    assert all(condition.startswith(("isinstance(", "not isinstance(")) for condition in asserted), asserted


def test_the_sources_are_there() -> None:
    assert len(SOURCES) > 150
