"""What README and docs name is there, and somebody runs every command."""

import json
import re

from quoted import DOCS, DOCUMENTS, README, ROOT

RELEASES = {"trained_h200": "0.5.23"}
"""Release of a file whose name has none and that is not of the first release measured."""


def test_every_result_file_that_is_named_exists_and_says_where_it_ran():
    named = set(re.findall(r"benchmarks/results/(\w+)\.json", README + DOCS))
    assert named
    for name in named:
        environment = json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text())["environment"]
        assert environment["gpu"] in ("NVIDIA H200", "2 x NVIDIA H200", "4 x NVIDIA H200")
        newer = re.search(r"_(0_5_\d+)_", name)
        release = newer.group(1).replace("_", ".") if newer else RELEASES.get(name, "0.5.12.post1")
        assert environment["packages"]["sglang"] == release or name.startswith("tune")
        assert environment["commit"]
        assert environment["date"]


def test_every_link_and_path_in_the_docs_leads_somewhere():
    for page in DOCUMENTS:
        text = page.read_text()
        for target in re.findall(r"\]\(([^)#]+)\)", text):
            if not target.startswith("http"):
                assert (page.parent / target).exists(), f"{page.name}: {target}"
        for path in re.findall(r"`((?:nsa_backend|kernels|tests|benchmarks|docs)/[\w/]+\.\w+)`", text):
            assert (ROOT / path).exists(), f"{page.name}: {path}"
        for script in re.findall(r"python3? ((?:tests|benchmarks)/[\w/]+\.py)", text):
            assert (ROOT / script).exists(), f"{page.name}: {script}"


def test_every_command_for_users_is_run_by_somebody():
    """Each command of README, support and serving, as far as its first option, has a row that says who runs it."""
    text = README + "".join((ROOT / "docs" / page).read_text() for page in ("support.md", "serving.md"))
    found = re.findall(r"^    ((?:make|pip|python) [^\n#\\]+)", text, re.MULTILINE)
    found += re.findall(r"`((?:make|pip|python) [^`\n]+)`", text)
    assert len(found) > 10
    rows = re.findall(r"^\| `([^`]+)` \|", (ROOT / "docs/measuring.md").read_text(), re.MULTILINE)
    for command in found:
        assert any(command.strip().startswith(row) for row in rows), command


def test_every_page_of_the_docs_is_linked_from_the_readme():
    for page in (ROOT / "docs").glob("*.md"):
        assert f"(docs/{page.name})" in README, page.name


def test_every_page_of_numbers_is_linked_from_their_front_page():
    front = (ROOT / "docs/numbers.md").read_text()
    pages = list((ROOT / "docs" / "numbers").glob("*.md"))
    assert pages
    for page in pages:
        assert re.search(rf"\(numbers/{page.stem}\.md[#)]", front), page.name


def test_every_switch_is_documented():
    from nsa_backend.environment import SWITCHES

    for name in SWITCHES:
        assert f"| `{name}` |" in (ROOT / "docs/serving.md").read_text()


def test_the_readme_is_read_in_a_minute():
    assert len(README.splitlines()) <= 110


def test_the_changelog_ends_at_the_version_of_the_package():
    from nsa_backend import __version__

    newest = re.search(r"^## (\S+)", (ROOT / "docs/CHANGELOG.md").read_text(), re.MULTILINE)
    assert newest.group(1) == __version__
