"""Small wrong changes of a source file: cosmic-ray's operators, one replacement at a place, and statements left out."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass

import parso
from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import mutate_code
from cosmic_ray.operators.operator import Operator
from cosmic_ray.operators.provider import OperatorProvider

PAIRS = {
    "ReplaceBinaryOperator": (
        "Add_Sub Sub_Add Mul_FloorDiv FloorDiv_Mul Mod_FloorDiv Pow_Mul RShift_LShift LShift_RShift BitAnd_BitOr BitOr_BitAnd"
    ),
    "ReplaceComparisonOperator": "Lt_LtE LtE_Lt Gt_GtE GtE_Gt Eq_NotEq NotEq_Eq Is_IsNot IsNot_Is",
    "ReplaceUnaryOperator": "USub_UAdd Invert_UAdd Delete_Not",
}
OTHERS = (
    "AddNot ReplaceTrueWithFalse ReplaceFalseWithTrue ReplaceAndWithOr ReplaceOrWithAnd ReplaceBreakWithContinue "
    "ReplaceContinueWithBreak ExceptionReplacer NumberReplacer RemoveDecorator ZeroIterationForLoop"
)


class LeaveOut(Operator):
    """Leave a statement of a function out: a call, an assignment, a raise; and return nothing where something is returned."""

    KINDS = ("atom_expr", "expr_stmt", "raise_stmt")

    def mutation_positions(self, node):
        statement = node.type in self.KINDS and node.parent.type == "simple_stmt" and _in_function(node)
        if statement or (node.type == "return_stmt" and node.children[-1].get_code(include_prefix=False) != "None"):
            yield (node.start_pos, node.end_pos)

    def mutate(self, node, index):
        word = "return" if node.type == "return_stmt" else "pass"
        return parso.python.tree.Keyword(word, node.start_pos, prefix=node.get_first_leaf().prefix)

    @classmethod
    def examples(cls):
        return ()


def _in_function(node) -> bool:
    return parso.tree.search_ancestor(node, "funcdef") is not None


@dataclass(frozen=True)
class Mutant:
    """One change of one file."""

    path: str
    line: int
    operator: str
    occurrence: int

    def apply(self, source: str) -> str:
        return mutate_code(source, _operators()[self.operator], self.occurrence)


def mutants(path: str, source: str) -> Iterator[Mutant]:
    """Every mutant of a file, annotations and decorators of compiled kernels aside: they change nothing, or everything."""
    skipped = list(_skipped(ast.parse(source)))
    for name, operator in _operators().items():
        seen = set()
        positions = (position for node in ast_nodes(get_ast(source)) for position in operator.mutation_positions(node))
        for occurrence, (start, _) in enumerate(positions):
            inside = any(first <= start < last for first, last in skipped)
            if inside or start in seen:  # a number has two mutants: the one above it is enough
                continue
            seen.add(start)
            yield Mutant(path, start[0], name, occurrence)


def _skipped(tree: ast.Module) -> Iterator[tuple[tuple[int, int], tuple[int, int]]]:
    for node in ast.walk(tree):
        found = [getattr(node, "annotation", None), getattr(node, "returns", None)]
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            found.append(node)
        if isinstance(node, ast.ClassDef) and any(ast.unparse(base) == "Protocol" for base in node.bases):
            found.append(node)
        found += [d for d in getattr(node, "decorator_list", ()) if ast.unparse(d).startswith("triton.jit")]
        for part in filter(None, found):
            # The operator that removes a decorator stands at its @.
            yield (part.lineno, max(part.col_offset - 1, 0)), (part.end_lineno, part.end_col_offset)


_FOUND: dict[str, Operator] = {}


def _operators() -> dict[str, Operator]:
    if not _FOUND:
        provider = OperatorProvider()
        names = [f"{kind}_{pair}" for kind, pairs in PAIRS.items() for pair in pairs.split()]
        _FOUND.update({name: provider[name]() for name in (*names, *OTHERS.split())}, LeaveOut=LeaveOut())
    return _FOUND
