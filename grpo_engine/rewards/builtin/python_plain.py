"""What the tests of python_tests see of the code's results: plain data.

An object that the code made to be equal to everything is none. Loaded by python_child.py by its
path, before the code.
"""

import ast
import collections
from collections.abc import Callable, Iterator

# Their classes are plain data, and those of what the tests import.
PLAIN_MODULES = "array collections datetime decimal enum fractions functools itertools re".split()
# What is copied from an instance of a derived class, past all that the class defines.
WHOLE = slice(None)
COPIES = {
    int: lambda v: int.__add__(v, 0),
    float: float.__pos__,
    complex: complex.__pos__,
    str: lambda v: str.__getitem__(v, WHOLE),
    bytes: lambda v: bytes.__getitem__(v, WHOLE),
    list: lambda v: list.__getitem__(v, WHOLE),
    tuple: lambda v: tuple.__getitem__(v, WHOLE),
    set: lambda v: set().union(v),
    frozenset: lambda v: frozenset().union(v),
    dict: dict.copy,
}


class Refused(PermissionError, ValueError):
    """What the guard raises. A ValueError too, which the library expects of sys._getframe."""


def all_classes() -> Iterator[type]:
    found = [object]
    for kind in found:
        yield kind
        found += type.__subclasses__(kind)


def seen_plainly(tree: ast.Module) -> ast.Module:
    """Calls, attributes and awaits of a test go through `__plain__`, == and != through `__same__`,
    the classes that it defines through `__known__`."""

    def called(name: str, *args: ast.expr) -> ast.Call:
        return ast.Call(ast.Name(name, ast.Load()), list(args), [])

    class Seeing(ast.NodeTransformer):
        def seen(self, node: ast.expr) -> ast.expr:
            self.generic_visit(node)
            changed = isinstance(getattr(node, "ctx", None), ast.Store | ast.Del)
            return node if changed else called("__plain__", node)

        visit_Call = visit_Attribute = visit_Await = seen

        def visit_Compare(self, node: ast.Compare) -> ast.expr:
            self.generic_visit(node)
            if len(node.ops) > 1 or not isinstance(node.ops[0], ast.Eq | ast.NotEq):
                return node
            same = called("__same__", node.left, node.comparators[0])
            return same if isinstance(node.ops[0], ast.Eq) else ast.UnaryOp(ast.Not(), same)

        def visit_ClassDef(self, node: ast.ClassDef) -> ast.ClassDef:
            self.generic_visit(node)
            node.decorator_list.append(ast.Name("__known__", ast.Load()))
            return node

        def visit_MatchValue(self, node: ast.MatchValue) -> ast.MatchValue:
            return node  # an attribute in it is a pattern

        visit_MatchClass = visit_MatchMapping = visit_MatchValue

    return ast.fix_missing_locations(Seeing().visit(tree))


def helpers(scope: dict, known: set[type], trees: list[ast.Module]) -> dict[str, Callable]:
    """What `seen_plainly` calls. known: the classes that were there before the code."""
    named = {n.id for tree in trees for n in ast.walk(tree) if isinstance(n, ast.Name)}

    def plain(value: object) -> object:
        """Exact builtins instead of classes derived from them; refuses objects of classes that the
        code made and the tests don't name."""
        kind = type(value)
        if kind in known:
            return plain_inside(value, kind)
        if any(scope.get(name) is kind for name in named):
            return value
        for base in kind.__mro__:
            if base in COPIES:
                return plain(COPIES[base](value))
        raise Refused("an object of a class of the code's own, which the tests don't name")

    def plain_inside(value: object, kind: type) -> object:
        if issubclass(kind, dict):
            inside = [(plain(k), plain(v)) for k, v in value.items()]
            old = [x for pair in value.items() for x in pair]
            kept = all(
                a is b for a, b in zip(old, [x for pair in inside for x in pair], strict=True)
            )
            return value if kept else dict(inside)
        if kind in (list, tuple, set, frozenset, collections.deque):
            inside = [plain(v) for v in value]
            kept = all(a is b for a, b in zip(value, inside, strict=True))
            return value if kept else kind(inside)
        if kind.__module__ in ("builtins", "itertools") and hasattr(kind, "__next__"):
            return (plain(v) for v in value)
        return value

    def same(one: object, other: object) -> object:
        """Plain data is never the equal of an object that judges it itself."""
        return one == other if (type(one) in known) == (type(other) in known) else False

    def add(kind: type) -> type:
        known.add(kind)
        return kind

    return {"__plain__": plain, "__same__": same, "__known__": add}
