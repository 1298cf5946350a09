"""`ddtree train-drafter` as typed, over a tiny target: from prompts to a drafter that drafts, Ctrl-C in between."""

from __future__ import annotations

import _thread
import json
import signal
import sys
import threading
from pathlib import Path

import pytest
from engine_driver import MakeEngine, answer, ask, rounds_of

from console.cli import main
from runtime.interface import GenerateRequest, SamplingParams


def command(target: Path, out: Path, *options: str) -> list[str]:
    words = ["train-drafter", "--model", str(target), "--out", str(out), "--device", "cpu", "--rows", "16"]
    sizes = [
        "--layers",
        "1",
        "--block-size",
        "4",
        "--blocks",
        "16",
        "--max-new",
        "24",
        "--mask-token-id",
        "287",
    ]
    return [*words, *sizes, *options]


def interrupt_within(name: str, over: threading.Event) -> None:
    """Sends Ctrl-C to the main thread while it is in a function of this name."""
    main_thread = threading.main_thread().ident
    while not over.wait(0.002):
        frame = sys._current_frames().get(main_thread or 0)
        while frame is not None:
            if frame.f_code.co_qualname == name:
                return _thread.interrupt_main()
            frame = frame.f_back


def interrupted(words: list[str], within: str) -> int:
    over = threading.Event()
    watch = threading.Thread(target=interrupt_within, args=(within, over))
    # A shell starts what is in its background with Ctrl-C ignored.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    watch.start()
    try:
        return main(words)
    finally:
        over.set()
        watch.join()
        signal.signal(signal.SIGINT, before)


def test_the_command_trains_a_drafter_that_drafts_for_its_target_and_continues_after_ctrl_c(
    tmp_path: Path, tiny_folder: Path, make_engine: MakeEngine, capsys: pytest.CaptureFixture[str]
) -> None:
    given, listed, out = tmp_path / "given.jsonl", tmp_path / "list.json", tmp_path / "out"
    given.write_text("\n".join(json.dumps({"prompt": f"question {n} of many"}) for n in range(24)))
    listed.write_text('[{"name": "given", "origin": "made up", "licence": "none"}]')
    words = command(tiny_folder / "target", out, "--prompts", str(given), "--data-list", str(listed))
    assert (
        interrupted([*words, "--minutes-generate", "0.03", "--minutes-train", "30"], "DrafterTraining._step")
        == 130
    )
    assert "the same command continues from it" in capsys.readouterr().err
    kept = (out / "responses.npz").read_bytes()
    assert main([*words, "--minutes-generate", "0.03", "--minutes-train", "0.03"]) == 0
    assert "continuing from step" in capsys.readouterr().err
    assert (out / "responses.npz").read_bytes() == kept

    ours = json.loads((out / "drafter/config.json").read_text())["ddtree"]
    assert ours["training"]["steps"] == json.loads((out / "report.json").read_text())["steps"] > 0
    sources = {each["name"]: (each["prompts"], each["licence"]) for each in ours["data"]}
    assert sources["given"] == (24, "none")
    engine = make_engine(drafter=out / "drafter", mode="tree")
    prompt, sampling = "What is drafted?", SamplingParams(max_tokens=12)
    client = ask(engine, GenerateRequest(prompt=prompt, sampling=sampling))
    rounds = rounds_of(engine)
    assert any(depth > 0 for stats in rounds for depth in stats.draft_depths)
    assert client.finished.text == answer(make_engine(mode="off"), prompt, max_tokens=12).text


def test_what_the_command_cannot_use_is_one_line_before_anything_is_trained(
    tmp_path: Path, tiny_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spoilt = tmp_path / "spoilt.json"
    spoilt.write_text('[{"origin": "nowhere"}]')
    wrong = (
        (["--stage", "test"], 2, "--stage 'test' is none of prompts"),
        (["--prompts", str(tmp_path / "none.jsonl")], 2, "none.jsonl does not exist"),
        (["--taps", "1,x"], 2, "--taps '1,x' is no list"),
        (["--taps", "0,7"], 1, "target_layer_ids"),
        (["--device", "tpu"], 2, "cuda:N"),
        (["--device", "cuda:01"], 2, "cuda:N"),
        (["--device", "cuda:99"], 2, "is not there"),
        (["--data-list", str(spoilt)], 1, f"data list {spoilt} cannot be used"),
        (["--stage", "train"], 1, "responses.npz is missing; run the stage before"),
        (["--stage", "export"], 1, "report.json is missing; run the stage train first"),
        (["--self-prompts", "0"], 1, "there are no prompts; give --prompts FILE"),
    )
    for options, code, line in wrong:
        assert main(command(tiny_folder / "target", tmp_path / "out", *options)) == code, options
        said = capsys.readouterr().err
        assert line in said and "Traceback" not in said, said
