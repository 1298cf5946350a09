"""An engine whose rounds run as device rounds, one ahead, against the same engine with rounds launched step by step.

On a CPU the kernels run through Triton's interpreter, which takes minutes: by hand, DDTREE_LONG=1.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("triton", reason="triton is not installed")

import numpy as np  # noqa: E402
import torch  # noqa: E402
from engine_driver import run  # noqa: E402
from sglang_pair import PROMPTS, write_trained_pair  # noqa: E402
from tiny_models import gang_target, tiny_config  # noqa: E402

from runtime.calibrate import choose_budget  # noqa: E402
from runtime.engine import Engine  # noqa: E402
from runtime.gang import RoundsSpec  # noqa: E402
from runtime.gang_target import GangTarget  # noqa: E402
from runtime.gpu_device import RoundDevice, RoundResults  # noqa: E402
from runtime.gpu_graphs import GraphRounds  # noqa: E402
from runtime.gpu_pass import MOST_ROWS, unsupported  # noqa: E402
from runtime.gpu_round import STAMPS, Shape  # noqa: E402
from runtime.interface import GenerateRequest, RequestFinished, SamplingParams  # noqa: E402
from runtime.kv_cache import Extent, KVCache  # noqa: E402
from runtime.loader import Loaded, load  # noqa: E402
from runtime.sampling import Sampling  # noqa: E402
from runtime.sequence import NodeTable, Sequence, Speculation  # noqa: E402
from runtime.verify import _single_rows, teacher_logits  # noqa: E402

CPU = torch.device("cpu")


def test_nodes_are_made_into_rows_when_somebody_looks() -> None:
    columns = np.array([[5, 7, 9], [0, 0, 1], [0, 1, 2], [0, 0, 0]], dtype=np.int32)
    columns[3] = np.array([0.0, -0.5, -1.25], dtype=np.float32).view(np.int32)
    table = NodeTable(columns)
    assert (len(table), table.deepest) == (3, 2)
    assert list(table) == [(5, 0, 0, 0.0), (7, 0, 1, -0.5), (9, 1, 2, -1.25)]


def test_the_budget_is_chosen_by_whole_captured_rounds(tmp_path: Path) -> None:
    accepts = {"set": {"tree7": 3.0, "tree31": 4.0, "tree63": 4.5}}
    (tmp_path / "config.json").write_text(json.dumps({"ddtree": {"measured": {"accept_length": accepts}}}))
    for last, best, words in ((1.40, 63, "3.2x"), (1.60, 31, "3.1x")):
        rounds = {1: 1.0, 8: 1.2, 16: 1.25, 32: 1.3, 64: last}
        loaded: Any = SimpleNamespace(
            drafter_path=tmp_path,
            limits=SimpleNamespace(max_tree_budget=63),
            graphs=SimpleNamespace(round_seconds=rounds.__getitem__),
            models=SimpleNamespace(target=None, cache=None),
        )
        chosen = choose_budget(loaded, 0.0)
        assert chosen.tree_budget == best and words in chosen.summary


class Numbered:
    """A device whose rounds each give a sequence their number as its token; the first one cannot be read."""

    block, prefills, captured, capture_s = 1, (32,), 0, 0.0

    def __init__(self) -> None:
        self.launched = 0
        self.collected: list[int] = []

    def prepare(self, shape: Any) -> None:
        pass

    def upload(self, batch: Any) -> None:
        pass

    def launch(self, shape: Shape) -> Callable[[], RoundResults]:
        self.launched += 1
        number = self.launched

        def results() -> RoundResults:
            self.collected.append(number)
            if number == 1:
                raise ArithmeticError("made to fail")
            line = [1, 1, 0, 1, number, 0, number - 1, 0, 0, 0]
            return RoundResults(np.array([line], dtype=np.int32), (0,) * STAMPS)

        return results


def test_a_round_that_cannot_be_read_leaves_none_behind_that_later_requests_would_take_for_theirs() -> None:
    device = Numbered()
    models: Any = SimpleNamespace(target=SimpleNamespace(device=CPU), drafter=None, cache=None)
    rounds = GraphRounds(models, device, 1)  # type: ignore[arg-type]

    def request(name: str) -> Sequence:
        sampling = Sampling(temperature=0.0)
        return Sequence(name, [5, 6], 1, sampling, 8, Extent(0, 16), keeps_features=False, committed_len=1)

    with pytest.raises(ArithmeticError):
        rounds.play([request("ended by it")], [Speculation()], False)
    other = request("next")
    played = rounds.play([other], [Speculation()], False)
    assert device.collected == [1, 2, 3], "in the order in which they were launched"
    assert [each.request_id for each in played.sequences] == ["next"]
    assert other.token_ids == [5, 6, 3]


@pytest.fixture
def engines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Engine]]:
    """The same trained pair: rounds from the host, device rounds, and device rounds of two ranks."""
    monkeypatch.setattr("runtime.gang.STEP_S", 1800.0)  # of an interpreter, beside other work
    pair = write_trained_pair(tmp_path)
    config = tiny_config(pair.target, pair.drafter, linear="plain", max_concurrency=2, max_tree_budget=16)
    loaded = load(config)
    models = loaded.models
    assert unsupported(models) is None and models.drafter is not None
    geometry = models.drafter.config.geometry(models.target.dtype)
    made = {}
    for name in ("host", "device"):
        cache = KVCache(models.target.geometry, geometry, models.cache.slots, CPU, scratch=MOST_ROWS)
        for pool in (cache.target, cache.drafter):
            assert pool is not None
            pool.keys.fill_(torch.nan)
            pool.values.fill_(torch.nan)
        own = replace(models, cache=cache)
        graphs = GraphRounds(own, RoundDevice(own, 2, 128, chunk=64), 2) if name == "device" else None
        made[name] = Engine(replace(loaded, models=own, graphs=graphs), config, 7)
    ranks = _ranks(loaded, pair.drafter)
    cache = KVCache(ranks.pool, geometry, models.cache.slots, CPU)
    own = replace(models, target=ranks, cache=cache)
    assert ranks.rounds is not None
    graphs = GraphRounds(own, ranks.rounds, 2)
    made["ranks"] = Engine(replace(loaded, models=own, graphs=graphs), config, 7)
    try:
        yield made
    finally:
        ranks.close()


def _ranks(loaded: Loaded, drafter: Path) -> GangTarget:
    """The target of `loaded` with its MLPs split over two processes that play whole rounds."""
    target, models = loaded.models.target, loaded.models
    assert models.drafter is not None
    rounds = RoundsSpec(
        str(drafter),
        models.block_size,
        models.draft_noise,
        target.vocab_size,
        max_batch=2,
        positions=128,
        scratch=MOST_ROWS,
        chunk=64,
    )
    taps = models.drafter.config.target_layer_ids
    ranks = gang_target(loaded.checkpoint, "tp2", target.dtype, rounds, models.cache.slots, taps)
    ranks.limit_vocabulary(target.vocab_size)
    return ranks


@pytest.mark.skipif(
    "DDTREE_LONG" not in os.environ, reason="minutes in Triton's interpreter; set DDTREE_LONG=1"
)
def test_texts_are_those_of_rounds_from_the_host(engines: dict[str, Engine]) -> None:
    """A batch that changes, modes that flip, a seed, a stop token, filters, logprobs (which no kernel knows)."""
    found: dict[str, dict[str, Any]] = {}
    for name, engine in engines.items():
        graphs = engine.loaded.graphs
        assert graphs is None or graphs.round_seconds(5, repeats=2) > 0
        if name == "device":
            ids = PROMPTS[0][:3]
            torch.testing.assert_close(
                _single_rows(engine, ids), teacher_logits(engine, ids, 32), rtol=1e-3, atol=1e-3
            )
        ends: dict[str, Any] = {}

        def sink(event: object, ends: dict[str, Any] = ends) -> None:
            if isinstance(event, RequestFinished):
                ends[event.request_id] = (event.reason, event.token_ids, event.text)

        asked = (
            ("plain", 0, {"max_tokens": 12}),
            ("seeded", 1, {"max_tokens": 9, "temperature": 0.8, "seed": 4}),
            ("stopped", 2, {"max_tokens": 14, "stop_token_ids": (170,)}),
            ("logprobs", 3, {"max_tokens": 4, "logprobs": 1}),
            ("filtered", 1, {"max_tokens": 9, "temperature": 1.2, "seed": 5, "top_k": 9, "top_p": 0.9}),
        )
        for label, prompt, sampling in asked:
            request = GenerateRequest(
                prompt_token_ids=PROMPTS[prompt], request_id=label, sampling=SamplingParams(**sampling)
            )
            engine.submit(request, sink)
        for mode, budget in (("tree", 7), ("tree", 3), ("chain", None), ("off", None), ("tree", 15)):
            engine.config = engine.config.model_copy(update={"mode": mode, "tree_budget": budget})
            for _ in range(2):
                engine.step()
                engine.check_integrity()
        run(engine)
        engine.check_integrity()
        found[name] = ends
    assert found["device"] == found["host"]
    assert found["ranks"] == found["host"]
    assert len(found["host"]) == 5
