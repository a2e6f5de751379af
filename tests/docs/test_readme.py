"""What README and docs name is there, and somebody runs every command."""

import json
import re

from quoted import DOCS, README, ROOT


def test_every_result_file_that_is_named_exists_and_says_where_it_ran():
    named = set(re.findall(r"benchmarks/results/(\w+)\.json", README + DOCS))
    assert named
    for name in named:
        environment = json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text())["environment"]
        assert environment["gpu"] in ("NVIDIA H200", "2 x NVIDIA H200", "4 x NVIDIA H200")
        newer = re.search(r"_(0_5_\d+)_", name)
        release = newer.group(1).replace("_", ".") if newer else "0.5.12.post1"
        assert environment["packages"]["sglang"] == release or name.startswith("tune")
        assert environment["commit"]
        assert environment["date"]


def test_every_link_and_path_in_the_docs_leads_somewhere():
    for page in (ROOT / "README.md", *(ROOT / "docs").glob("*.md")):
        text = page.read_text()
        for target in re.findall(r"\]\(([^)#]+)\)", text):
            if not target.startswith("http"):
                assert (page.parent / target).exists(), f"{page.name}: {target}"
        for path in re.findall(r"`((?:nsa_backend|kernels|tests|benchmarks|docs)/[\w/]+\.\w+)`", text):
            assert (ROOT / path).exists(), f"{page.name}: {path}"
        for script in re.findall(r"python3? ((?:tests|benchmarks)/[\w/]+\.py)", text):
            assert (ROOT / script).exists(), f"{page.name}: {script}"


def test_every_command_of_the_readme_is_run_by_somebody():
    """Each command, as far as its first option, has a row that says who runs it."""
    found = re.findall(r"^    ((?:make|pip|python) [^\n#\\]+)", README, re.MULTILINE)
    found += re.findall(r"`((?:make|pip|python) [^`\n]+)`", README)
    assert len(found) > 10
    rows = re.findall(r"^\| `([^`]+)` \|", (ROOT / "docs/measuring.md").read_text(), re.MULTILINE)
    for command in found:
        assert any(command.strip().startswith(row) for row in rows), command


def test_every_page_of_the_docs_is_linked_from_the_readme():
    for page in (ROOT / "docs").glob("*.md"):
        assert f"(docs/{page.name})" in README, page.name


def test_every_switch_is_documented():
    from nsa_backend.environment import SWITCHES

    for name in SWITCHES:
        assert f"| `{name}` |" in README


def test_the_changelog_ends_at_the_version_of_the_package():
    from nsa_backend import __version__

    newest = re.search(r"^## (\S+)", (ROOT / "docs/CHANGELOG.md").read_text(), re.MULTILINE)
    assert newest.group(1) == __version__
