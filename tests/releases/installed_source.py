"""The installed SGLang read as text: signatures and attribute reads of modules that cannot be imported without a GPU."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import sglang

ROOT = Path(sglang.__file__).parent / "srt"


def signature(module: str, function: str) -> inspect.Signature:
    """Signature of a function of `module` from its source; annotations are left out and every default is None."""
    tree = ast.parse(Path(find_spec(module).origin).read_text())
    (found,) = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == function]
    arguments, kinds = found.args, inspect.Parameter
    positional = [*arguments.posonlyargs, *arguments.args]
    required = len(positional) - len(arguments.defaults)
    parameters = [
        kinds(argument.arg, kinds.POSITIONAL_OR_KEYWORD, default=kinds.empty if index < required else None)
        for index, argument in enumerate(positional)
    ]
    parameters += [
        kinds(argument.arg, kinds.KEYWORD_ONLY, default=kinds.empty if default is None else None)
        for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    ]
    if arguments.kwarg:
        parameters.append(kinds(arguments.kwarg.arg, kinds.VAR_KEYWORD))
    return inspect.Signature(parameters)


def trees(*patterns: str) -> Iterator[tuple[str, ast.Module]]:
    """Path below srt/ and syntax tree of every file that matches one of the patterns."""
    for pattern in patterns:
        for path in sorted(ROOT.glob(pattern)):
            yield str(path.relative_to(ROOT)), ast.parse(path.read_text())


def attributes_read(tree: ast.AST, holders: set[str]) -> set[str]:
    """Attributes read off variables or attributes of these names, or off what functions of these names return.

    Reads that allow for a missing attribute, through `hasattr` or `getattr` with a default, are not among them; nor is a read
    in a function that asks `hasattr` for it.
    """
    found = set()
    for function in [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]:
        reads = {
            node.attr
            for node in ast.walk(function)
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load) and _name(node.value) in holders
        }
        asked = {
            node.args[1].value
            for node in ast.walk(function)
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("hasattr", "getattr")
            if isinstance(node.args[1], ast.Constant)
        }
        found |= reads - asked
    return found


def _name(node: ast.AST) -> Any:
    """`x` of `x`, `a.x`, `x()`, `a.x[i]`."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        return node.attr
    if isinstance(node, ast.Call):
        return _name(node.func)
    if isinstance(node, ast.Subscript):
        return _name(node.value)
    return None


def server_fields() -> set[str]:
    """Names of ServerArgs' attributes, whichever kind of class the release makes of it."""
    from sglang.srt.server_args import ServerArgs

    return set(getattr(ServerArgs, "__struct_fields__", None) or ServerArgs.__dataclass_fields__)
