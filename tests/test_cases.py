"""The list of cases: every one has a test, every mark names one, and the page is current."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "scripts"))

import cases  # noqa: E402


def test_every_case_has_a_test_and_the_page_is_current(request: pytest.FixtureRequest) -> None:
    files = {item.path.name for item in request.session.items}
    if files < {path.name for path in (ROOT / "tests").glob("test_*.py")}:
        pytest.skip("only a run of all tests knows them all; scripts/cases.py collects them by itself")
    tests = cases.settled(request.session.items)
    assert set(tests) == set(cases.known())
    assert cases.LIST.read_text(encoding="utf-8") == cases.rendered(tests), "run scripts/cases.py"


def test_every_mark_is_written_with_a_known_case() -> None:
    """As the sources have it, for a run of some tests."""
    import ast

    marked: set[str] = set()
    for path in (ROOT / "tests").glob("test_*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Attribute)
                and node.func.attr == "case"
            ):
                marked |= {each.value for each in node.args if isinstance(each, ast.Constant)}
    assert marked == set(cases.known())
