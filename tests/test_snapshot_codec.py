"""A snapshot as files and as a commit message, and back: for any settings, any note and any figures."""

from __future__ import annotations

import math
import re
import tomllib
from typing import Any

import pytest
from git_stores import patched, snapshot
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from runtime.config import RuntimeConfig, validate
from snapshots.annotate import note_of, readme
from snapshots.codec import Unreadable, from_files, stored_name, to_files
from snapshots.content import (
    Environment,
    Figure,
    Gpu,
    Hardware,
    Measurements,
    ModelFile,
    Snapshot,
    Software,
    hardware_class,
)
from snapshots.message import KINDS, compose, parse

words = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)
notes = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=300)
labels = st.text(st.characters(exclude_categories=["Cs", "Cc"]), max_size=40).map(str.strip)
numbers = st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False)
values: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | numbers | words,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(words, inner, max_size=3),
    max_leaves=6,
)
figures = st.builds(
    Figure,
    source=st.sampled_from(["live", "bench", "baseline", "probe"]),
    mode=st.sampled_from(["off", "chain", "tree"]),
    tok_s=st.none() | st.floats(allow_nan=False, allow_infinity=False),
    accept_length=st.none() | st.floats(allow_nan=False, allow_infinity=False),
    conditions=words,
)


@settings(deadline=None, max_examples=60)
@given(
    config=st.dictionaries(words, values, max_size=6),
    note=notes,
    label=labels,
    results=st.lists(figures, max_size=3),
    variables=st.dictionaries(words, words.filter(lambda text: text != "n/a"), max_size=3),
)
def test_files_and_back(
    config: dict[str, Any], note: str, label: str, results: list[Figure], variables: dict[str, str]
) -> None:
    whole = Snapshot(
        config=config,
        note=note,
        label=label,
        measurements=Measurements(state="measured", results=tuple(results)),
        environment=Environment(
            variables=variables, software=Software(packages={"torch": "2.13", "sglang": None})
        ),
    )
    files = to_files(whole)
    assert from_files(files) == whole
    assert to_files(from_files(files)) == files


@pytest.mark.case("D8")
@settings(deadline=None, max_examples=100)
@given(note=notes, label=labels, kind=st.sampled_from(KINDS), extra=words)
def test_message_and_back(note: str, label: str, kind: Any, extra: str) -> None:
    whole = snapshot(label, note, tok_s=12.5)
    message = compose(whole, "20260101-000000-ab12", kind, {"Origin": extra})
    entry = parse("c" * 40, "a b", "someone", 0.0, message)
    assert entry is not None
    assert (entry.note, entry.kind, entry.id, entry.parents) == (
        note,
        kind,
        "20260101-000000-ab12",
        ("a", "b"),
    )
    assert (entry.tok_s, entry.accept_length) == (12.5, 3.1)
    assert entry.label == " ".join("".join(c if c.isprintable() else " " for c in label).split())
    assert abs(entry.time_s - whole.taken_at_s) < 1e-5
    assert note_of(readme(whole)) == note


def test_config_file_is_usable_as_it_is() -> None:
    config = RuntimeConfig(tree_budget=None, drafter=None, temperature=0.7, mode="chain")
    written = to_files(Snapshot(config=config.model_dump()))["config.toml"].decode()
    assert validate(tomllib.loads(written)) == config
    assert list(tomllib.loads(written)) == sorted(RuntimeConfig.model_fields)


def test_unknown_is_never_zero() -> None:
    here = Environment(
        hardware=Hardware(gpus=(Gpu(index=0, name="NVIDIA H200"),)),
        files=(ModelFile(role="target", path="a", size=3),),
    )
    whole = Snapshot(
        config={}, environment=here, measurements=Measurements(results=(Figure(source="live", mode="tree"),))
    )
    files = to_files(whole)
    assert b'driver = "n/a"' in files["environment.toml"] and b'sha256 = "n/a"' in files["environment.toml"]
    assert b"n/a tok/s" in files["README.md"]
    assert from_files(files) == whole
    assert hardware_class(here.hardware) == "1 x NVIDIA H200" and hardware_class(Hardware()) == "n/a"


def test_stored_names_are_safe_for_git() -> None:
    for path in ("a/.git/hooks/x", "..", "a/../b", ".GIT", "git~1", "a:b", "nul\x07", "back\\slash", "ü/%41"):
        parts = stored_name(path).split("/")
        assert all(
            part and not part.lower().startswith((".git", "git~")) and set(part) != {"."} for part in parts
        )
    assert stored_name("a%41") != stored_name("aA")
    assert stored_name("sglang/srt/a.py") == "sglang/srt/a.py"


def test_damaged_files_are_named() -> None:
    files = to_files(snapshot("a").model_copy(update={"patches": (patched(),)}))
    for name, content, words in (
        ("config.toml", b"a = ", "config.toml cannot be read"),
        ("environment.toml", b"hardware = 3", "environment.toml: hardware"),
        ("measurements.json", b"[]", "measurements.json cannot be read"),
        ("patches/index.json", b'{"files": [{"package": "x"}]}', "patches/index.json"),
        ("patches/index.json", b'{"files": [7]}', "no snapshot"),
        ("environment.toml", b"snapshot = 7", "no snapshot"),
        ("config.toml", b"a = " + b"[" * 5000, "config.toml cannot be read"),
        ("measurements.json", b"[" * 5000, "measurements.json cannot be read"),
    ):
        with pytest.raises(Unreadable, match=words):
            from_files({**files, name: content})
    del files["patches/sglang-0.5.17/now/sglang/srt/a.py"]
    with pytest.raises(Unreadable, match="a.py is missing"):
        from_files(files)


def test_a_message_of_a_stranger_never_stops_the_list() -> None:
    good = compose(snapshot("a", "note"), "i")
    for length in (b"9" * 5000, "²".encode(), b"-1", b"", b"1e3"):
        spoilt = re.sub(rb"DDTree-Note-Bytes: \d+", b"DDTree-Note-Bytes: " + length, good)
        entry = parse("c" * 40, "", "someone", 0.0, spoilt)
        assert entry is not None and (entry.label, entry.note) == ("a", "")


def test_values_are_frozen() -> None:
    with pytest.raises(ValidationError):
        snapshot("a").label = "b"  # type: ignore[misc]
    assert not math.isnan(snapshot("a").taken_at_s)
