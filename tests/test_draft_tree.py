"""Trees as rows: every node stands in one, what was accepted is said without colour, foreign text stays text."""

from __future__ import annotations

import pytest
from fake_trees import bushy, tree
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.cells import cell_len

from console.draft_tree import as_text, rounds_strip, row_text, summary, token_label, tree_rows

NASTY = (
    "[red]x[/]",
    "\x1b[31m",
    "\x00",
    "\u202eabc",
    "\u200b",
    "\u0301",
    "\u05d0\u05d1",
    "👩‍👧",
    "\x9b2J",
    "y" * 1000,
)


def drawn(trace, width=80, compact=True) -> list[str]:
    return [row_text(row, width).plain for row in tree_rows(trace, width if compact else None)]


def test_a_tree_is_drawn_with_its_accepted_path_and_where_the_target_left_it():
    trace = tree(
        [
            (" quick", 0, 0.9, True),
            (" slow", 0, 0.05, False),
            (" brown", 1, 0.8, True),
            (" red", 1, 0.1, False),
            (" fox", 3, 0.7, False),
        ],
        " cat",
    )
    assert [line.rstrip() for line in drawn(trace, 70)] == [
        "✓ root  root, the bonus token of the round before",
        "✓ ├ ·quick 90%                                                d1   90%",
        "✓ │ ├ ·brown 80%                                              d2   72%",
        "  │ │ ├ ·fox 70%                                              d3   50%",
        "► │ │ └ ·cat  bonus: the target's own choice",
        "  │ └ ·red 10%                                                d2    9%",
        "  └ ·slow 5%                                                  d1    5%",
    ]
    assert summary(trace) == (
        "5 of budget 11 used, 3 leaves, deepest 3; 2 accepted. The target left the tree after ·brown with ·cat."
    )


def test_a_run_without_a_branch_takes_one_row_and_e_takes_it_apart():
    trace = tree([(f" {word}", number, 0.9, number < 2) for number, word in enumerate("abcdef")], " z")
    lines = drawn(trace)
    assert lines[1].startswith("✓ └ ·a 90% → ·b 90% ")
    assert lines[2].startswith("    ├ ·c 90% → ·d 90% → ·e 90% → ·f 90% ") and "d3-6" in lines[2]
    assert lines[3] == "►   └ ·z  bonus: the target's own choice"
    assert len(drawn(trace, compact=False)) == 8


@pytest.mark.parametrize("compact", [True, False])
def test_a_tree_of_64_fits_80_columns_with_every_node(compact: bool):
    trace = bushy(64)
    lines = drawn(trace, 78, compact)
    assert max(cell_len(line) for line in lines) <= 78
    if not compact:
        assert len(lines) == 66
    for number in range(1, 65):
        assert any(f"·w{number} " in line for line in lines)


@pytest.mark.parametrize(
    ("trace", "words"),
    [
        (tree([], " a", mode="off", budget=0), "No tree: mode off drafts nothing"),
        (
            tree([], " a", mode="off", budget=0, reason="the drafter is for\nanother target"),
            "decoded plainly, the drafter",
        ),
        (
            tree([(" a", 0, 0.9, True), (" b", 1, 0.9, False)], " c", mode="chain"),
            "one path of 2 drafts and no branches",
        ),
        (tree([(" a", 0, 0.9, True)], " c"), "All of a path was accepted; the target went on with ·c"),
        (tree([(" a", 0, 0.9, False)], " c"), "The target left the tree at once with ·c"),
        (tree([(" a", 0, 0.9, True)], None, finish="length"), "ended here at its token limit"),
        (tree([("<end>", 0, 0.9, True)], None, finish="stop"), "ended at <end>, an accepted draft"),
        (tree([(" a", 0, 0.9, True)], "<end>", finish="stop"), "with <end>, which ends the text"),
        (tree([], " a"), "one token away"),
    ],
)
def test_what_a_round_did_is_said_in_words(trace, words: str):
    assert words in summary(trace)
    assert words in as_text(trace)


@pytest.mark.parametrize("text", NASTY)
def test_the_label_of_a_token_cannot_style_hide_or_move_anything(text: str):
    label = token_label(text, 7)
    assert label.isprintable() and 0 < cell_len(label) <= 200
    assert "\x1b" not in label and "\u202e" not in label
    lines = drawn(tree([(text, 0, 0.5, True), (text, 0, 0.5, False)], text))
    assert all(cell_len(line) <= 80 for line in lines[:3]) and not any("\n" in line for line in lines)


def test_an_empty_token_is_named_by_its_id():
    assert token_label("", 49151) == "<49151>"


def test_the_strip_of_rounds_shows_the_chosen_one_at_any_width():
    accepts = list(range(1, 101))
    for at in (0, 50, 99):
        for width in (3, 5, 40, 400):
            shown = rounds_strip(accepts, at, width).plain
            assert f"[{accepts[at]}]" in shown
            assert len(shown) <= max(width, len(f"[{accepts[at]}]"))
    assert rounds_strip([], 0, 10).plain == ""


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.tuples(st.text(max_size=6), st.integers(0, 10**6), st.floats(0.001, 1.0)), max_size=70),
    st.integers(0, 120),
)
def test_any_tree_at_any_width_has_every_node_in_exactly_one_row(nodes, width):
    trace = tree([(text, parent % (i + 1), share, False) for i, (text, parent, share) in enumerate(nodes)])
    for compact in (True, False):
        rows = tree_rows(trace, width if compact else None)
        shown = [node for row in rows for node in row.nodes]
        assert sorted(node.token_id for node in shown) == list(range(len(nodes) + 1))
        assert sum(row.mark == "►" for row in rows) == 1
        for row in rows:
            assert row_text(row, width).plain.isprintable()
