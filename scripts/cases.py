"""Writes tests/CASES.md: every case of tests/cases.toml with the tests that settle it, as pytest collects them."""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
TESTS = ROOT / "tests"
LIST = TESTS / "CASES.md"


def known() -> dict[str, dict[str, str]]:
    """The cases by id."""
    return tomllib.loads((TESTS / "cases.toml").read_text(encoding="utf-8"))


def settled(items: Iterable[Any]) -> dict[str, list[str]]:
    """By case the tests that are marked with it, as `file::name`, parameters left out."""
    found: dict[str, dict[str, None]] = {}
    for item in items:
        for mark in item.iter_markers("case"):
            name = f"{item.path.name}::{item.originalname}"
            for case in mark.args:
                found.setdefault(case, {})[name] = None
    return {case: sorted(names) for case, names in found.items()}


def rendered(tests: dict[str, list[str]]) -> str:
    """The page."""
    lines = [
        "# Cases",
        "",
        "Inputs that broke other systems, what this product does instead, and the tests that show it. Made by",
        "`scripts/cases.py` from `tests/cases.toml` and the marks of the tests; `tests/test_cases.py` checks that it",
        "is current.",
        "",
        "| case | what holds | shown by | not shown |",
        "|---|---|---|---|",
    ]
    for case, about in known().items():
        names = "<br>".join(f"`{name}`" for name in tests.get(case, [])) or "-"
        lines.append(f"| {case} | {about['holds']} | {names} | {about.get('waits', '')} |")
    return "\n".join(lines) + "\n"


class Collected:
    """A pytest plugin that keeps what was collected."""

    def __init__(self) -> None:
        self.items: list[Any] = []

    def pytest_collection_finish(self, session: Any) -> None:
        self.items = list(session.items)


def main() -> int:
    import pytest

    sys.path.insert(0, str(ROOT))
    collected = Collected()
    status = pytest.main(["--collect-only", "-qq", "-n", "0", str(TESTS)], plugins=[collected])
    if status != 0:
        return int(status)
    LIST.write_text(rendered(settled(collected.items)), encoding="utf-8")
    print(f"wrote {LIST}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
