"""Find the small changes that can be made to a module: each is a mutant.

A mutant is a change of a few bytes of the source, so the rest of the file keeps its lines.
"""

import ast
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
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
    file: str
    """Path below the tree."""
    function: str
    """Qualified name, or empty for code of the module or of a class."""
    operator: str
    change: str
    start: int
    """First byte to replace."""
    end: int
    made: str
    nth: int = 0
    """Number of equal changes before it in the same function."""

    @property
    def name(self) -> str:
        """Name it by what it does and not by its line, so that it keeps its name when other code changes."""
        return f"{self.file} {self.function} {self.operator}: {self.change} #{self.nth}"

    def apply(self, source: bytes) -> bytes:
        return source[: self.start] + self.made.encode() + source[self.end :]


def mutants_of(tree: Path, file: Path) -> list[Mutant]:
    """Return every mutant of a module, in order of its source."""
    source = file.read_bytes()
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    found: list[Mutant] = []
    counts: Counter[str] = Counter()
    for function, operator, node, made in _changes(ast.parse(source), ()):
        start = starts[node.lineno - 1] + node.col_offset
        end = starts[(node.end_lineno or 0) - 1] + (node.end_col_offset or 0)
        mutant = Mutant(
            file=str(file.relative_to(tree)),
            function=function,
            operator=operator,
            change=f"{ast.unparse(node)} -> {made}",
            start=start,
            end=end,
            made=made,
        )
        found.append(replace(mutant, nth=counts[mutant.name]))
        counts[mutant.name] += 1
    return found


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
