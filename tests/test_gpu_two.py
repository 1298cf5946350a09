"""What is measured on two GPUs becomes evidence: records that a plan shows, link figures, predictions beside it."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from console.cli import main
from layouts.library import load_library

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "scripts"))

import gpu_evidence  # noqa: E402

ABOUT = {
    "what": "all",
    "kind": "about",
    "dtype": "bfloat16",
    "gpus": ["NVIDIA H200", "NVIDIA H200"],
    "measured_at": "2000-01-01T00:00:00Z",
    "versions": {"torch": "0.0.1"},
    "commit": "made-up",
}
CELL = {
    "what": "speed", "kind": "cell", "model": "qwen3-8b", "layout": "tp2", "mode": "off", "tree_budget": 0,
    "concurrency": 1, "drafter": "none", "tok_s": 321.0, "accept_length": 1.0, "context": 120, "graphs": True,
    "temperature": 0.0, "n": 12,
}  # fmt: skip
LINES: list[dict[str, Any]] = [
    ABOUT,
    {"what": "links", "kind": "topology", "interconnect": "NVLink"},
    {"what": "links", "kind": "profile", "interconnect": "NVLink", "link_gb_s": 123.4, "link_latency_us": 5.6},
    CELL,
    {**CELL, "layout": "single", "tok_s": 200.0},
    {**CELL, "mode": "tree", "tree_budget": 31, "drafter": "random", "accept_length": 1.4, "tok_s": 300.0},
    {
        "what": "kill", "kind": "kill", "layout": "tp2", "rank": 1, "seen_s": 0.5, "serving_s": 7.0,
        "memory_back": True,
    },
]  # fmt: skip


def test_lines_of_a_run_become_records_that_a_plan_shows_with_their_scope(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    into, lines, kept = tmp_path / "ddtree" / "layouts", tmp_path / "run.jsonl", tmp_path / "two.json"
    lines.write_text("".join(json.dumps(line) + "\n" for line in LINES))
    arguments = [str(lines), "--into", str(into), "--json", str(kept)]
    gpu_evidence.main(arguments)
    first = {path.name: path.read_text() for path in into.rglob("*.toml")}
    gpu_evidence.main(arguments)
    assert {path.name: path.read_text() for path in into.rglob("*.toml")} == first
    assert set(first) == {"single.toml", "tp2.toml", "h200.toml"}

    library = load_library(strict=True)
    hardware = library.device("h200")
    assert (hardware.link_gb_s, hardware.link_latency_us) == (123.4, 5.6)
    assert sum("2 x H200" in source for source in hardware.sources) == 1
    predicted = [line for line in json.loads(kept.read_text()) if line["what"] == "predicted"]
    assert sorted(line["layout"] for line in predicted) == ["single", "tp2"]
    assert all(line["by_figures_alone"] > 0 and line["error"] is not None for line in predicted)

    capsys.readouterr()
    plan = [
        "layouts",
        "plan",
        "tp2",
        "--hardware",
        "h200",
        "--gpus",
        "2",
        "--model",
        "qwen3-8b",
        "--mode",
        "off",
    ]
    assert main(plan) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "measured: 321 tok/s (TP2, mode off, concurrency 1, " in text and "predicted" in text
    assert "scope: 2 x H200, NVLink, native, dtype bfloat16, torch 0.0.1" in text
    assert (
        "SIGKILL of rank 1 under a stream: seen after 0.500 s, single served after 7.0 s, memory back" in text
    )
    modes = {record.conditions.mode for record in library.preset("tp2").evidence}
    assert "tree" not in modes, "what a random drafter reaches is advice to nobody"
