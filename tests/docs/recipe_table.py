"""The tables of docs/recipes.md: public launch commands, and what changes with this package; from tests/releases/recipes*.py.

python tests/docs/recipe_table.py        # prints them, for the page
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "releases"))

import recipes_of_others
import recipes_of_sglang
from recipes import NEW, OLD, RESPELLED, Recipe, Refused, Served, Stopped

BEGIN, END = "<!-- begin: tests/docs/recipe_table.py -->", "<!-- end of recipes -->"
PAGE = Path(__file__).resolve().parents[2] / "docs" / "recipes.md"
HEAD = ["recipe", "GPUs", f"with this package, on {NEW}", "decode / prefill", "N", "a round", f"on {OLD}"]
RECIPES = recipes_of_sglang.RECIPES | recipes_of_others.RECIPES


def spelled(recipe: Recipe) -> str:
    """What SGLang itself wants spelled otherwise; empty where nothing is."""
    changed = [f"`{new}` for `{old}`" if new else f"no `{old}`" for old, new in RESPELLED[NEW].items() if old in recipe.words]
    return f"; SGLang takes {', '.join(changed)}" if changed else ""


def change(outcome: Served | Refused | Stopped) -> str:
    """What a user has to change."""
    if isinstance(outcome, Served):
        return "nothing"
    if isinstance(outcome, Stopped):
        return f"SGLang stops: {outcome.because}"
    left_out = " ".join(option.split()[0] for option in outcome.without)
    return f"refused, served without `{left_out}`"


def graphs(outcome: Served | Refused | Stopped) -> str:
    """Of a round; "-" where there are no rounds."""
    if not isinstance(outcome, Served) or outcome.three is None:
        return "-"
    return f"three graphs; for one, {outcome.three}" if outcome.three else "one graph"


def row(name: str, recipe: Recipe) -> list[str]:
    """A recipe's."""
    new, old = recipe.outcomes[NEW], recipe.outcomes[OLD]
    kinds = f"{new.decode} / {new.prefill}" if isinstance(new, Served) else "-"
    steps = str(new.steps) if isinstance(new, Served) else "-"
    alike = "the same"
    if type(new) is not type(old) or isinstance(old, Refused):
        alike = change(old) if new != old else alike
    elif isinstance(old, Served) and graphs(new) != graphs(old):
        alike = graphs(old)
    return [f"[{name}]({recipe.source})", recipe.gpus, change(new) + spelled(recipe), kinds, steps, graphs(new), alike]


def table() -> str:
    rows = [HEAD, *(row(name, recipe) for name, recipe in RECIPES.items())]
    lines = ["| " + " | ".join(cells) + " |" for cells in rows]
    return "\n".join([lines[0], "|" + "---|" * len(HEAD), *lines[1:]])


if __name__ == "__main__":
    sys.stdout.write(table() + "\n")
