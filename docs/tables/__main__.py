"""Write the generated parts of README.md and docs/*.md anew: `make docs`, which is `python docs/tables`.

A generated part stands between `<!-- NAME -->` and `<!-- end -->`, and NAME is a function of one of the modules imported
here. A part on lines of its own is a table or a list, one within a line is a number.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import code_tables
import context_tables
import rank_tables
import run_tables
import speed_tables

ROOT = Path(__file__).resolve().parents[2]
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
MODULES: tuple[ModuleType, ...] = (code_tables, context_tables, rank_tables, run_tables, speed_tables)
PART = re.compile(r"<!-- (?P<name>\w+) -->(?P<line>\n?)(?P<text>.*?)\n?<!-- end -->", re.DOTALL)


def function(name: str) -> Callable[[], str]:
    """What writes the part of this name; KeyError where nothing does."""
    found = [module.PARTS[name] for module in MODULES if name in module.PARTS]
    if len(found) != 1:
        raise KeyError(f"{len(found)} functions write the part {name!r}, in {', '.join(m.__name__ for m in MODULES)}")
    return found[0]


def filled(page: str) -> str:
    """The text of a page with every part written anew."""

    def written(part: re.Match[str]) -> str:
        name, line = part["name"], part["line"]
        return f"<!-- {name} -->{line}{function(name)()}{line}<!-- end -->"

    return PART.sub(written, page)


def main() -> None:
    """Write the pages that changed and name them."""
    from nsa_backend.testing.process import start_process

    start_process()  # the real SGLang with the plugin, where there is no GPU
    for page in PAGES:
        text = page.read_text()
        new = filled(text)
        if new != text:
            page.write_text(new)
            sys.stdout.write(f"{page.relative_to(ROOT)}\n")


if __name__ == "__main__":
    main()
