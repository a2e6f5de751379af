"""Every relative link of the README and of docs leads to a file, and its anchor to a heading of that file."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from quoted import DOCUMENTS, ROOT

LINK = re.compile(r"\]\(([^()\s]+)\)")
NAMED = re.compile(r"\bdocs/[\w/]+\.md\b")
FENCE = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)


def slugs(text: str) -> set[str]:
    """Anchors that GitHub gives the headings of this page: a heading that comes again gets -1, -2 and so on."""
    found: dict[str, int] = {}
    anchors = set()
    for heading in re.findall(r"^#{1,6} +(.+?) *#*$", FENCE.sub("", text), re.MULTILINE):
        slug = slug_of(heading)
        found[slug] = found.get(slug, -1) + 1
        anchors.add(f"{slug}-{found[slug]}" if found[slug] else slug)
    return anchors


def slug_of(heading: str) -> str:
    """Lower case, links as their words, without punctuation but hyphens and underscores; a hyphen for each space."""
    words = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading)
    return re.sub(r"[^\w\- ]", "", words.lower()).replace(" ", "-")


def broken(page: Path) -> Iterator[str]:
    """Relative links of this page that lead nowhere."""
    for link in LINK.findall(FENCE.sub("", page.read_text())):
        if re.match(r"[a-z]+:", link):
            continue
        target, _, anchor = link.partition("#")
        file = page.parent / target if target else page
        if not file.exists() or (anchor and (file.suffix != ".md" or anchor not in slugs(file.read_text()))):
            yield link


@pytest.mark.parametrize("page", DOCUMENTS, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_every_link_leads_to_a_heading(page):
    assert list(broken(page)) == []


def test_there_are_links_with_anchors():
    assert any("#" in link for page in DOCUMENTS for link in LINK.findall(page.read_text()))


def test_every_page_that_the_code_names_exists():
    folders = ("nsa_backend", "kernels", "benchmarks", "tests")
    named = {name for f in folders for file in (ROOT / f).rglob("*.py") for name in NAMED.findall(file.read_text())}
    assert named
    assert [name for name in sorted(named) if not (ROOT / name).exists()] == []


@pytest.mark.parametrize(
    ("heading", "slug"),
    [
        ("A round in one graph", "a-round-in-one-graph"),
        ("SGLang 0.5.23, serving cell by cell", "sglang-0523-serving-cell-by-cell"),
        ("Attention on 0.5.23: a decode kernel", "attention-on-0523-a-decode-kernel"),
        ("`bench serve` and [its numbers](numbers.md)", "bench-serve-and-its-numbers"),
        ("fa3 / built-in", "fa3--built-in"),
        ("max_bs 64", "max_bs-64"),
    ],
)
def test_the_anchor_of_a_heading(heading, slug):
    assert slugs(f"# {heading}\n") == {slug}


def test_a_heading_that_comes_again_and_one_in_a_block_of_code():
    assert slugs("# One\n\n## One\n\n```sh\n# a comment\n```\n\n## Two ##\n") == {"one", "one-1", "two"}


def test_links_that_lead_nowhere_are_found(tmp_path):
    (tmp_path / "other.md").write_text("# There\n")
    page = tmp_path / "page.md"
    page.write_text(
        "# Here\n[a](#here) [b](#not-here) [c](other.md#there) [d](other.md#here)\n"
        "[e](none.md) ![f](none.svg) [g](https://example.org/#x) [h](other.md)\n```\n[i](none)\n```\n"
    )
    assert list(broken(page)) == ["#not-here", "other.md#here", "none.md", "none.svg"]
