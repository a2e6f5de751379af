"""README and docs: generated parts are what their sources give, links lead somewhere, and pages are short and plain."""

import importlib.util
import json
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TABLES = ROOT / "docs" / "tables"
sys.path.insert(0, str(TABLES))
_spec = importlib.util.spec_from_file_location("make_docs", TABLES / "__main__.py")
make_docs = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(make_docs)

PAGES = make_docs.PAGES
README = ROOT / "README.md"
BUDGETS = {
    "README.md": 520,
    "docs/support.md": 1005,
    "docs/numbers.md": 1240,
    "docs/kernels.md": 805,
    "docs/small_checkpoints.md": 574,
    "docs/contributing.md": 1233,
    "docs/serving.md": 1015,
    "docs/commands.md": 364,
    "docs/reliability.md": 1048,
    "docs/host_defects.md": 701,
    "docs/how_it_works.md": 1578,
    "docs/long_contexts.md": 461,
    "docs/vllm.md": 302,
    "docs/CHANGELOG.md": 180,
}
"""Words that a page may have."""

LINK = re.compile(r"\]\(([^()\s]+)\)")
FENCE = re.compile(r"^```.*?^```|^    .*?$", re.DOTALL | re.MULTILINE)

pages = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


def shown(page: Path) -> str:
    """What a reader sees of a page."""
    return re.sub(r"<!--.*?-->", "", page.read_text(), flags=re.DOTALL)


def words(text: str) -> int:
    return sum(bool(re.search(r"\w", word)) for word in text.split())


def sentences(text: str) -> list[str]:
    """Those of the prose of a page: neither code, headings nor tables."""
    lines = [re.sub(r"^ *(?:- |\d+\. )", "\n", line) for line in FENCE.sub("\n", text).splitlines()]
    prose = "\n".join("\n" if line.startswith(("|", "#", "!")) else line for line in lines)
    blocks = [" ".join(block.split()) for block in re.split(r"\n\s*\n", prose)]
    return [s for block in blocks for s in re.split(r"(?<=[.?!])[*)]*\s+", LINK.sub("]", block)) if s]


def slug(heading: str) -> str:
    """The anchor that GitHub gives a heading."""
    text = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading)
    return re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-")


def anchors(page: Path) -> set[str]:
    return {slug(heading) for heading in re.findall(r"^#{1,6} +(.+?) *$", FENCE.sub("", page.read_text()), re.MULTILINE)}


def broken(page: Path) -> list[str]:
    """Relative links of this page that lead nowhere."""
    found = []
    for link in LINK.findall(FENCE.sub("", page.read_text())):
        target, _, anchor = link.partition("#")
        file = page.parent / target if target else page
        if not re.match(r"[a-z]+:", link) and (not file.exists() or (anchor and anchor not in anchors(file))):
            found.append(link)
    return found


@pages
def test_generated_parts_are_what_their_sources_give(page):
    assert make_docs.filled(page.read_text()) == page.read_text(), "make docs writes them anew"


@pages
def test_links_lead_to_a_file_and_a_heading(page):
    assert broken(page) == []


@pages
def test_paths_in_the_text_exist(page):
    named = re.findall(r"`((?:nsa_backend|kernels|tests|benchmarks|docs)/[\w/.]+?\.(?:py|md|json))`", page.read_text())
    assert [path for path in named if not (ROOT / path).exists()] == []


@pytest.mark.parametrize("name", BUDGETS)
def test_a_page_is_as_short_as_it_was_meant(name):
    assert words(shown(ROOT / name)) <= BUDGETS[name]


def test_every_page_has_a_budget():
    assert set(BUDGETS) == {page.relative_to(ROOT).as_posix() for page in PAGES}


def test_the_readme_is_read_in_a_minute():
    assert len(README.read_text().splitlines()) <= 80


@pytest.mark.parametrize("name", BUDGETS)
def test_a_sentence_has_25_words_at_most(name):
    assert [s for s in sentences(shown(ROOT / name)) if words(s) > 25] == []


def test_a_cell_of_what_is_supported_has_12_words_at_most():
    rows = [line for line in shown(ROOT / "docs" / "support.md").splitlines() if line.startswith("| ")]
    assert [cell for row in rows for cell in LINK.sub("]", row).split(" | ") if words(cell) > 12] == []


def test_every_page_is_linked_from_the_readme():
    assert [page.name for page in PAGES[1:] if f"(docs/{page.name})" not in README.read_text()] == []


def test_pages_that_the_code_names_exist():
    folders = ("nsa_backend", "kernels", "benchmarks", "tests")
    code = "".join(file.read_text() for f in folders for file in (ROOT / f).rglob("*.py") if file != Path(__file__))
    assert sorted(name for name in set(re.findall(r"\bdocs/[\w/]+\.md\b", code)) if not (ROOT / name).exists()) == []


def test_a_result_file_says_where_it_ran():
    for path in sorted((ROOT / "benchmarks" / "results").glob("*.json")):
        report = json.loads(path.read_text())
        for part in report.get("reports", {"": report}).values():
            environment = part["environment"]
            kind = path.stem.rpartition("_")[2].upper()
            assert kind in ("H200", "H100"), path.name
            assert f"NVIDIA {kind}" in environment["gpu"], path.name
            assert environment["packages"]["sglang"] or "Without SGLang" in "".join(part.get("notes", [])), path.name
            assert {"commit", "date"} <= environment.keys(), path.name


def test_every_result_file_is_linked_from_a_page():
    links = {Path(link).name for page in PAGES for link in LINK.findall(page.read_text()) if "benchmarks/results/" in link}
    assert {path.name for path in (ROOT / "benchmarks" / "results").glob("*.json")} == links


def test_the_changelog_ends_at_the_version_of_the_package():
    from nsa_backend import __version__

    newest = re.search(r"^## (\S+)", (ROOT / "docs/CHANGELOG.md").read_text(), re.MULTILINE)
    assert newest.group(1) == __version__


def test_a_part_that_was_edited_by_hand_is_found():
    text = README.read_text()
    edited = re.sub(r"(?<=<!-- eight_first_saved -->).*?(?=<!--)", "99 %", text)
    assert edited != text
    assert make_docs.filled(edited) == text


def test_a_broken_link_and_anchor_are_found(tmp_path):
    (tmp_path / "other.md").write_text("# There\n")
    page = tmp_path / "page.md"
    page.write_text(
        "# Here it is\n[a](#here-it-is) [b](#gone) [c](other.md#there) [d](other.md#x) [e](none.md) [f](https://x.y)\n"
    )
    assert broken(page) == ["#gone", "other.md#x", "none.md"]
