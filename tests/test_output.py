"""Text as it streams: stop strings over token borders, held text, characters split over tokens."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from constructed import ConstructedDrafter, Reference, Request
from engine_driver import MODES, MakeEngine, answer, as_generate, ask, run
from pydantic import ValidationError
from reference_sampler import Rule
from tiny_models import prompt_of

from runtime.engine import Engine
from runtime.interface import RequestRejected, SamplingParams
from runtime.output import StopMatch, TextStream
from runtime.sequence import OutputToken
from runtime.tokenizer import ChatTokenizer


def letters(engine: Engine) -> dict[int, float]:
    """A bias under which the tiny target writes lower-case words."""
    return {engine.loaded.tokenizer.encode(char)[0]: 20.0 for char in "abcdefghijklmnopqrstuvwxyz "}


def spoken(tiny_reference: Reference, engine: Engine, name: str, seed: int = 0) -> tuple[Request, str]:
    """A request that makes the target write letters, and all it writes."""
    request = Request(name, prompt_of(9, seed), 40, Rule(logit_bias=letters(engine)))
    return request, engine.loaded.tokenizer.decode(tiny_reference.scripts([request])[name].outputs)


@pytest.mark.case("E1")
@pytest.mark.parametrize("mode", MODES)
def test_a_stop_string_over_token_borders_ends_the_text_before_it(
    make_engine: MakeEngine, tiny_reference: Reference, mode: Any
) -> None:
    request, text = spoken(tiny_reference, make_engine(), "r")
    engine = make_engine(ConstructedDrafter(tiny_reference.scripts([request])))
    for at in (7, 15, 16):
        stop = text[at : at + 4]
        fields = {"stop": (stop, "NEVER"), "max_tokens": 40, "temperature": 0.0}
        sampling = SamplingParams(**fields, logit_bias=dict(request.rule.logit_bias))
        client = ask(engine, as_generate(request, mode=mode, sampling=sampling))
        run(engine)
        finished = client.finished
        assert finished.reason == "stop"
        assert finished.text == client.streamed == text[: text.index(stop)]
        said = engine.loaded.tokenizer.decode(finished.token_ids)
        assert said == text[: text.index(stop) + 4]
        assert len(client.pieces) == len(finished.token_ids) == finished.stats.output_tokens
        assert finished.stats.num_correct_drafts == sum(piece.drafted for piece in client.pieces)


@pytest.mark.case("E1")
def test_text_held_for_a_stop_that_never_comes_is_released_once(
    make_engine: MakeEngine, tiny_reference: Reference
) -> None:
    request, text = spoken(tiny_reference, make_engine(), "r")
    engine = make_engine(ConstructedDrafter(tiny_reference.scripts([request])))
    bias = dict(request.rule.logit_bias)
    sampling = SamplingParams(stop=(text[-3:] + "Z", text[4:8] + "Z"), max_tokens=40, logit_bias=bias)
    client = ask(engine, as_generate(request, sampling=sampling))
    run(engine)
    assert client.finished.text == client.streamed == text
    assert client.finished.reason == "length"


def push_all(stream: TextStream, tokens: Sequence[int], run_length: int) -> tuple[str, bool]:
    """Streams `tokens` in runs; returns the streamed text and whether a stop string was met."""
    shown = ""
    for at in range(0, len(tokens), run_length):
        pieces, match = stream.push([OutputToken(token, False) for token in tokens[at : at + run_length]])
        shown += "".join(piece.text for piece in pieces)
        if match is not None:
            assert isinstance(match, StopMatch)
            return shown + stream.finish()[1], True
    pieces, tail = stream.finish()
    return shown + "".join(piece.text for piece in pieces) + tail, False


@pytest.mark.case("E1")
@pytest.mark.parametrize("run_length", [1, 4, 100])
@pytest.mark.parametrize(
    ("stops", "expected", "met"),
    [
        (("own fox",), "The quick br", True),
        (("own foxes",), "The quick brown fox", False),
        (("fox", "own fox"), "The quick br", True),
        (("quick brown", "brown fox", "x", "zz"), "The ", True),
        ((), "The quick brown fox", False),
    ],
)
def test_stop_strings_do_not_depend_on_how_the_text_arrives(
    tiny_folder: Path, run_length: int, stops: tuple[str, ...], expected: str, met: bool
) -> None:
    tokenizer = ChatTokenizer.from_folder(tiny_folder / "target")
    stream = TextStream(tokenizer, stops)
    assert push_all(stream, tokenizer.encode("The quick brown fox"), run_length) == (expected, met)
    assert stream.text == expected


@pytest.mark.case("E1")
def test_five_stop_strings_or_an_empty_one_are_refused(make_engine: MakeEngine) -> None:
    with pytest.raises(ValidationError, match="stop"):
        SamplingParams(stop=("a", "b", "c", "d", "e"))
    with pytest.raises(RequestRejected, match="empty stop string") as refused:
        answer(make_engine(), (1, 2), stop=("a", ""))
    assert refused.value.field == "stop"


@pytest.mark.case("E2")
@pytest.mark.parametrize("run_length", [1, 3])
def test_characters_split_over_tokens_stream_whole(tiny_folder: Path, run_length: int) -> None:
    tokenizer = ChatTokenizer.from_folder(tiny_folder / "target")
    text = "a 👩‍🔧 中文 é"
    tokens = tokenizer.encode(text)
    assert len(tokens) > len(text)
    assert push_all(TextStream(tokenizer), tokens, run_length) == (text, False)
    cut = tokenizer.encode("a é")[:-1]
    stream = TextStream(tokenizer)
    assert (
        push_all(stream, cut, run_length)[0]
        == stream.text
        == tokenizer.decode(cut)
        == "a \N{REPLACEMENT CHARACTER}"
    )
