"""What the sweeps write into a document: one section each, in place of what it said before."""

from __future__ import annotations

from pathlib import Path

import pytest

from examples import kill_sweep


def test_a_report_is_made_and_one_section_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    report = tmp_path / "sweeps.md"
    for title, said in (("one", "== a"), ("two", "== b"), ("one", "== c")):
        monkeypatch.setattr(kill_sweep, "SAID", [said])
        kill_sweep.write_report(report, title)
    text = report.read_text()
    assert text.startswith("# ")
    assert text.count("## one\n") == text.count("## two\n") == 1
    assert "== a" not in text
    assert text.index("== c") < text.index("## two") < text.index("== b")
