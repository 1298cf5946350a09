"""Spoilt input of every kind: `make fuzz` runs the same for minutes a target, with other seeds."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
from api_client import idle, settle
from api_server import ApiServer
from fuzz_targets import OFFLINE, http_bodies, http_heads
from fuzzing import Target, run

SEED = 1
INPUTS = {"safetensors": 60, "model files": 60, "drafter": 120, "gguf": 300, "snapshot archive": 150}
OTHERS = 300


@pytest.mark.parametrize("made", OFFLINE, ids=lambda made: made.__name__)
def test_a_spoilt_file_is_read_or_refused_in_our_own_words(
    made: Callable[[Path], Target], tmp_path: Path
) -> None:
    target = made(tmp_path)
    outcome = run(target, SEED, inputs=INPUTS.get(target.name, OTHERS))
    assert not outcome.findings, "\n".join(map(str, outcome.findings))
    assert outcome.refused > outcome.inputs / 10 or target.name == "messages", "the inputs are too tame"


def test_spoilt_bodies_and_heads_are_answered_and_leave_nothing(
    tiny_api: ApiServer, http: httpx.Client
) -> None:
    for target, inputs in ((http_bodies(http, "operator-key"), 250), (http_heads(tiny_api.url), 150)):
        outcome = run(target, SEED, inputs=inputs)
        assert not outcome.findings, "\n".join(map(str, outcome.findings))
    settle(lambda: idle(tiny_api))
    assert http.get("/ready").status_code == 200
