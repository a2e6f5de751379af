"""What a tool printed for a recorded run: texts of tests/tools/printed."""

from __future__ import annotations

from pathlib import Path

RECORDED = Path(__file__).resolve().parents[1] / "tools" / "printed"


def assert_printed(name: str, text: str, folder: Path) -> None:
    """`text` is what RECORDED has under this name, but for spaces at ends of lines; `folder` gets it for a look or a copy."""
    printed, recorded = folder / "printed", RECORDED / f"{name.replace(' ', '_')}.txt"
    printed.write_text("\n".join(line.rstrip() for line in text.splitlines()).rstrip() + "\n")
    assert printed.read_text() == (recorded.read_text() if recorded.exists() else None), (
        f"if this is meant: cp {printed} {recorded}"
    )
