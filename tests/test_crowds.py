"""Many requests at once and long ones: the same texts as alone, and memory that is counted."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import tiny_models
import torch
from engine_driver import MakeEngine, answer, ask, run
from tiny_models import prompt_of, tiny_config

from runtime.config import validate
from runtime.interface import ConfigRejected, GenerateRequest, SamplingParams
from runtime.loader import load

LENGTHS = (3000, 11000, 16000) if os.environ.get("DDTREE_LONG") else (3000, 7000)


@pytest.mark.case("A18")
def test_up_to_32_at_once_have_their_solo_texts_and_one_that_ends_leaves_the_others_alone(
    make_engine: MakeEngine,
) -> None:
    engine = make_engine(
        max_concurrency=32, kv_slots=32 * 200, prefix_reuse=False, mode="tree", tree_budget=8
    )
    prompts = [prompt_of(5 + 2 * number, number) for number in range(32)]
    alone = [answer(engine, prompt, max_tokens=10, ignore_eos=True).token_ids for prompt in prompts]
    for count in (1, 2, 3, 4, 5, 16, 32):
        clients = [
            ask(
                engine,
                GenerateRequest(
                    prompt_token_ids=prompt,
                    sampling=SamplingParams(max_tokens=3 if at == 0 else 10, ignore_eos=True),
                ),
            )
            for at, prompt in enumerate(prompts[:count])
        ]
        most = 0
        while engine.busy:
            engine.step()
            most = max(most, len(engine.scheduler.running))
        assert most == count
        assert clients[0].finished.token_ids == alone[0][:3]
        assert [client.finished.token_ids for client in clients[1:]] == alone[1:count]
        engine.check_integrity()


@pytest.mark.case("A24")
def test_long_contexts_have_the_plain_text_and_drafter_slots_are_those_of_the_target(
    make_engine: MakeEngine, tmp_path: Path
) -> None:
    target = tiny_models.write_target(tmp_path / "long", max_position_embeddings=32768)
    drafter = tiny_models.write_drafter(tmp_path / "drafter", target)
    engine = make_engine(
        target=target,
        drafter=drafter,
        max_seq_len=max(LENGTHS) + 256,
        max_concurrency=1,
        prefill_chunk=1024,
        tree_budget=4,
    )
    cache = engine.models.cache
    assert cache.drafter is not None
    assert cache.drafter.keys.shape[2] == cache.target.keys.shape[2] == cache.slots
    for length in LENGTHS:
        prompt, texts = prompt_of(length), []
        for mode in ("tree", "off"):
            client = ask(
                engine,
                GenerateRequest(
                    prompt_token_ids=prompt,
                    sampling=SamplingParams(max_tokens=32, ignore_eos=True),
                    mode=mode,  # type: ignore[arg-type]
                ),
            )
            run(engine)
            texts.append(client.finished.token_ids)
            stats = client.finished.stats
            assert stats.accept_length is not None and stats.accept_length >= 1.0
            assert stats.prompt_tokens == length
        assert texts[0] == texts[1] and len(texts[0]) == 32


@pytest.mark.case("A23")
def test_caches_have_the_dtype_of_the_model_and_no_other_is_taken(tiny_folder: Path) -> None:
    loaded = load(tiny_config(tiny_folder / "target", tiny_folder / "drafter", dtype="bfloat16"))
    cache = loaded.models.cache
    assert cache.drafter is not None
    assert {pool.keys.dtype for pool in (cache.target, cache.drafter)} == {torch.bfloat16}
    for wrong, words in (
        ({"dtype": "int8"}, "one of auto, float32, bfloat16"),
        ({"kv_dtype": "fp8"}, "no such"),
    ):
        with pytest.raises(ConfigRejected, match=words):
            validate(wrong)
