"""Find the small changes that can be made to a module: each is a mutant."""

import ast
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

Function = ast.FunctionDef | ast.AsyncFunctionDef
OTHER_COMPARISON: dict[type[ast.cmpop], str] = {
    ast.Lt: "<=",
    ast.LtE: "<",
    ast.Gt: ">=",
    ast.GtE: ">",
    ast.Eq: "!=",
    ast.NotEq: "==",
    ast.Is: "is not",
    ast.IsNot: "is",
    ast.In: "not in",
    ast.NotIn: "in",
}
OTHER_ARITHMETIC: dict[type[ast.operator], ast.operator] = {
    ast.Add: ast.Sub(),
    ast.Sub: ast.Add(),
    ast.Mult: ast.FloorDiv(),
    ast.FloorDiv: ast.Mult(),
    ast.Div: ast.Mult(),
    ast.Mod: ast.FloorDiv(),
}
NOT_CODE = frozenset({"annotation", "returns", "decorator_list"})
"""Parts of a node in which a change would change nothing that runs."""
ONLY_TALK = frozenset({"debug", "info", "warning", "exception", "print", "echo"})
"""Calls that a test need not miss."""
NOT_RUN = frozenset({"overload", "abstractmethod"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutant:
    name: str
    """File, function and change, without the line: so it keeps its name when other code changes."""
    node: ast.expr | ast.stmt
    made: str
    """Code in the node's place."""

    @property
    def file(self) -> str:
        return self.name.partition(" ")[0]

    @property
    def function(self) -> str:
        """File and qualified name; the name is empty for code of the module or of a class."""
        return " ".join(self.name.split(" ")[:2])


def mutants_of(tree: Path, file: Path) -> list[Mutant]:
    """Return every mutant of a module, in order of its source."""
    found: list[Mutant] = []
    counts: Counter[str] = Counter()
    for function, operator, node, made in _changes(ast.parse(file.read_bytes()), ()):
        change = f"{operator}: {ast.unparse(node)} -> {made}"
        name = f"{file.relative_to(tree)} {function} {change}"
        found.append(Mutant(name=f"{name} #{counts[name]}", node=node, made=made))
        counts[name] += 1
    return found


def replaced(source: bytes, node: ast.expr | ast.stmt, made: str) -> bytes:
    """Return the source with other code in this node's place. All other lines stay as they are."""
    lines = source.splitlines(keepends=True)
    last = (node.end_lineno or 0) - 1
    before = [*lines[: node.lineno - 1], lines[node.lineno - 1][: node.col_offset]]
    after = [lines[last][node.end_col_offset :], *lines[last + 1 :]]
    return b"".join([*before, made.encode(), *after])


def _changes(node: ast.AST, names: tuple[str, ...]) -> Iterator[tuple[str, str, ast.expr | ast.stmt, str]]:
    """Yield function, operator, the node to replace and the text in its place."""
    for field, value in ast.iter_fields(node):
        for child in value if isinstance(value, list) else [value]:
            if not isinstance(child, ast.AST) or field in NOT_CODE:
                continue
            match child:
                case ast.JoinedStr() | ast.Assert() | ast.If(test=ast.Name(id="TYPE_CHECKING")):
                    continue
                case ast.FunctionDef() | ast.AsyncFunctionDef() if decorators(child) & NOT_RUN:
                    continue
                case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                    yield from _changes(child, (*names, child.name))
                    continue
            for operator, replaced, made in _changes_here(child):
                yield ".".join(names), operator, replaced, made
            yield from _changes(child, names)


def _changes_here(node: ast.AST) -> Iterator[tuple[str, ast.expr | ast.stmt, str]]:
    match node:
        case ast.Compare(ops=[op], comparators=[right]):
            made = f"({ast.unparse(node.left)}) {OTHER_COMPARISON[type(op)]} ({ast.unparse(right)})"
            yield "comparison", node, f"({made})"
        case ast.BoolOp():
            other = ast.Or() if isinstance(node.op, ast.And) else ast.And()
            yield "and/or", node, f"({ast.unparse(ast.BoolOp(other, node.values))})"
        case ast.UnaryOp(op=ast.Not()):
            yield "not", node, f"({ast.unparse(node.operand)})"
        case ast.BinOp() if type(node.op) in OTHER_ARITHMETIC and not _is_text(node):
            made = ast.unparse(ast.BinOp(node.left, OTHER_ARITHMETIC[type(node.op)], node.right))
            yield "arithmetic", node, f"({made})"
        case ast.Constant(value=bool()):
            yield "constant", node, str(not node.value)
        case ast.Constant(value=int()):
            yield "constant", node, str(node.value + 1)
        case ast.Expr(value=ast.Call() as call) | ast.Expr(value=ast.Await(value=ast.Call() as call)):
            if ast.unparse(call.func).rpartition(".")[2] not in ONLY_TALK:
                yield "dropped", node, "pass"
        case ast.AugAssign() | ast.Raise():
            yield "dropped", node, "pass"
        case ast.Continue():
            yield "loop", node, "break"
        case ast.Return(value=ast.expr() as value) if ast.unparse(value) != "None":
            yield "return", node, "return None"
    match node:
        case ast.If() | ast.While() | ast.IfExp() if not isinstance(node.test, ast.Compare | ast.UnaryOp):
            yield "condition", node.test, f"(not ({ast.unparse(node.test)}))"
        case ast.comprehension(ifs=[condition, *_]) if not isinstance(condition, ast.Compare | ast.UnaryOp):
            yield "condition", condition, f"(not ({ast.unparse(condition)}))"


def _is_text(node: ast.BinOp) -> bool:
    parts = [part for part in (node.left, node.right) if isinstance(part, ast.Constant | ast.JoinedStr)]
    return any(not isinstance(part, ast.Constant) or isinstance(part.value, str | bytes) for part in parts)


def decorators(function: Function) -> set[str]:
    return {ast.unparse(each).partition("(")[0].rpartition(".")[2] for each in function.decorator_list}


PROBE = '__import__("builtins").__dict__.get("blockyard_reached", str)({name!r})'


def with_probes(source: str, file: str) -> str:
    """Return the module's source, in which each function says that it was reached."""
    module = ast.parse(source)
    for name, function in _functions(module, ()):
        docstring = ast.get_docstring(function, clean=False) is not None
        function.body[docstring:docstring] = ast.parse(PROBE.format(name=f"{file} {name}")).body
    return ast.unparse(module)


def _functions(node: ast.AST, names: tuple[str, ...]) -> Iterator[tuple[str, Function]]:
    for child in ast.iter_child_nodes(node):
        match child:
            case ast.FunctionDef() | ast.AsyncFunctionDef() if "jit" not in decorators(child):
                yield ".".join((*names, child.name)), child
                yield from _functions(child, (*names, child.name))
            case ast.ClassDef():
                yield from _functions(child, (*names, child.name))
            case ast.stmt():
                yield from _functions(child, names)
