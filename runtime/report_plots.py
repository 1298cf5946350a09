"""Plots of a report as SVG text: bars for settings, lines for loads. Readable in black and white: marks carry names."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise

WIDTH, BAR, GAP, LEFT = 640, 18, 6, 150
HEIGHT, MARGIN = 280, 48
DASHES = ("", "6 3", "2 3", "8 3 2 3")


@dataclass(frozen=True)
class Bar:
    name: str
    value: float
    text: str
    """The figure as it is written at the bar's end."""


@dataclass(frozen=True)
class Line:
    name: str
    points: tuple[tuple[float, float], ...]


def bars(title: str, values: Sequence[Bar]) -> str:
    """Horizontal bars from zero, in the given order."""
    most = max((each.value for each in values), default=0.0) or 1.0
    rows = []
    for number, each in enumerate(values):
        top = 30 + number * (BAR + GAP)
        length = max(0.0, each.value) / most * (WIDTH - LEFT - 90)
        rows.append(
            f'<text x="{LEFT - 8}" y="{top + 13}" text-anchor="end">{escape(each.name)}</text>'
            f'<rect x="{LEFT}" y="{top}" width="{length:.1f}" height="{BAR}" fill="#4477aa"/>'
            f'<text x="{LEFT + length + 6:.1f}" y="{top + 13}">{escape(each.text)}</text>'
        )
    return _svg(title, 36 + len(values) * (BAR + GAP), rows)


def lines(title: str, x_name: str, y_name: str, found: Sequence[Line]) -> str:
    """Lines over a common axis, each with its name at its end."""
    xs = [x for line in found for x, _ in line.points]
    ys = [y for line in found for _, y in line.points]
    if not xs:
        return _svg(title, 60, ["<text x='20' y='50'>no figures</text>"])
    low, high, most = min(xs), max(xs), max(ys) or 1.0
    right = WIDTH - 140

    def place(x: float, y: float) -> tuple[float, float]:
        share = (x - low) / (high - low) if high > low else 0.5
        return MARGIN + share * (right - MARGIN), HEIGHT - MARGIN - y / most * (HEIGHT - 2 * MARGIN)

    rows = [
        f'<path d="M {MARGIN} {MARGIN} V {HEIGHT - MARGIN} H {right}" fill="none" stroke="black"/>',
        f'<text x="{right / 2:.0f}" y="{HEIGHT - 8}">{escape(x_name)}</text>',
        f'<text x="8" y="{MARGIN - 10}">{escape(y_name)}, up to {most:.4g}</text>',
    ]
    for x in sorted(set(xs)):
        rows.append(f'<text x="{place(x, 0)[0] - 6:.1f}" y="{HEIGHT - MARGIN + 16}">{x:g}</text>')
    for number, line in enumerate(found):
        places = [place(*point) for point in sorted(line.points)]
        for (x1, y1), (x2, y2) in pairwise(places):
            rows.append(
                f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="#4477aa" '
                f'stroke-width="2" stroke-dasharray="{DASHES[number % len(DASHES)]}"/>'
            )
        rows += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3"/>' for x, y in places]
        x, y = places[-1]
        rows.append(f'<text x="{x + 8:.1f}" y="{y + 4:.1f}">{escape(line.name)}</text>')
    return _svg(title, HEIGHT, rows)


def _svg(title: str, height: float, rows: Sequence[str]) -> str:
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height:.0f}" '
        f'font-family="sans-serif" font-size="12" role="img"><title>{escape(title)}</title>'
        f'<rect width="100%" height="100%" fill="white"/><text x="8" y="18" font-weight="bold">{escape(title)}</text>'
    )
    return head + "".join(rows) + "</svg>"
