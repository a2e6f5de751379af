"""What README and docs say, what the result files hold, and the rules that tie one to the other.

A rule belongs to result files and yields what the text must say of them: sentences, parts of sentences, rows of tables, on
whatever page. `test_numbers.py` asks that all of it is there, that every file which the text names has a rule, and that every
measured-looking number of the text is part of something a rule yields, or of `SETTINGS`. The rules themselves are in the files
`rules_*.py` beside this one.
"""

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"
DOCUMENTS = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "docs" / "numbers").glob("*.md")))
"""Every page: the README, docs, and the pages of docs/numbers.md."""

PAGES = {page.relative_to(ROOT).as_posix(): " ".join(page.read_text().split()) for page in DOCUMENTS}
"""Text by page, without line breaks."""

README = (ROOT / "README.md").read_text()
DOCS = "\n".join(page.read_text() for page in DOCUMENTS[1:])

SETTINGS = {
    "bytes over 4.3 TB/s": "a constant of the benchmarks",
    "bytes of the page tables over 4.3 TB/s, and 1.3 us for a launch": "constants of the benchmarks",
    "other memory run at 4.3 TB/s": "the same",
    "two steps of a bfloat16 logit (0.0626)": "a bound of the end-to-end runs",
    "two best tokens closer than 0.0626": "the same",
    "--minutes 9.75": "an option of a command",
    "accept lengths that fall from 4.5 to 1.6 after a load-back, and from 3.3 to 1.9 over hours": "what users tell",
    "Apache-2.0": "a licence",
    "Python 3.11": "a version",
    "The aim was 2.5 us to 64 x 65536 and 3.5 to 64 x 131072": "an aim, not a measurement",
    "125 tokens take 32 rounds in place of 31: 3.91 of 4": "computed: tests/e2e/engine_options.py, with_an_empty_round",
    "1.4 was the aim": "an aim, not a measurement",
    "where 1.15 was the aim": "the same",
    "The aims were 0.55 of the best other at 1 to 8 rows of 8 to 32 heads, 0.65 with 64 and 128, and 0.8 at 16 rows": "aims",
    "under the floor of 3.9": "a bound of the end-to-end runs",
    "and 0.3 of the MTP layer's": "a weight of the training loss",
    "is below 0.02 (`--error`)": "an option of a command",
    "top-p 0.95 above temperature 0": "of the requests",
    "--whole-in 9.5 --indexer-minutes 0.7": "options of a command",
    "--whole-in 8.4 --indexer-minutes 0.7 --seed 1": "the same",
    "tile: 52 us": "of a kernel that is no more",
    "│ per-step lengths (ours) │ 0 │ 0 │ 0 │ 48 │ 4.00 of 4 │": "tests/releases/test_whole_demo.py compares it",
    "│ one shared length │ 0 │ 62 │ 19 │ 3 │ 2.30 of 4 │": "the same",
}
"""Where a number is no measurement that a result file holds, and what it is."""


@dataclass(frozen=True)
class Rule:
    """`says(*reports)` yields what the text must say of these result files."""

    files: tuple[str, ...]  # without "_h200.json"
    says: Callable[..., Iterator[str]]

    def sentences(self) -> list[str]:
        return [" ".join(sentence.split()) for sentence in self.says(*map(result, self.files))]


RULES: list[Rule] = []


def rule(*files: str) -> Callable:
    """Register a rule about these result files, given without their "_h200.json"."""

    def register(says: Callable[..., Iterator[str]]) -> Callable[..., Iterator[str]]:
        RULES.append(Rule(files, says))
        return says

    return register


def result(name: str) -> dict:
    return json.loads((RESULTS / f"{name}_h200.json").read_text())


def files(pattern: str) -> list[str]:
    """Result files of this pattern, without "_h200.json"."""
    return sorted(path.name.removesuffix("_h200.json") for path in RESULTS.glob(f"{pattern}_h200.json"))


def named() -> set[str]:
    """Result files that README or docs name, without "_h200.json"."""
    return {name for page in PAGES for name in named_on(page)}


def named_on(page: str) -> set[str]:
    """Those that this page names."""
    found = re.findall(r"benchmarks/results/(\w+)\.json", PAGES[page])
    return {name.removesuffix("_h200") for name in found}


def unexplained(text: str, sentences: list[str]) -> list[str]:
    """Numbers with a decimal point or a unit of what is measured, outside all of these sentences, with what is around them."""
    covered = bytearray(len(text))
    for sentence in (*sentences, *SETTINGS):
        for found in re.finditer(re.escape(sentence), text):
            covered[found.start() : found.end()] = b"\1" * len(sentence)
    numbers = re.finditer(r"(?<!GLM-)(?<!glm-)(?<![\w.])\d+\.\d+(?!\.?\w)|(?<![\w.])\d+ (?:%|MiB|us|ms)(?!\w)", text)
    return [text[max(n.start() - 50, 0) : n.end() + 30] for n in numbers if not all(covered[n.start() : n.end()])]


def one(rows: list[dict], **wanted) -> dict:
    (row,) = [r for r in rows if all(r[k] == v for k, v in wanted.items())]
    return row


def medians(row: dict, sides: tuple[str, ...], key: str, form: str, between: str = " / ") -> str:
    """The median of one quantity on each of these sides."""
    return between.join(form.format(row[side][key]["median"]) for side in sides)


def spread(values: list[float], form: str = "{:.2f}") -> str:
    """ "least to most" of all these values."""
    least, most = form.format(min(values)), form.format(max(values))
    return least if least == most else f"{least} to {most}"
