"""`ddtree bench` as a load generator: on a server, on a runtime of its own, and what it refuses."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from api_server import ApiServer
from tiny_models import tiny_config

from console.cli import main
from runtime.load_report import LoadReport
from runtime.nvml_probe import EnergyMeter
from runtime.prompt_sets import read_prompts

SCHEMA_FILE = Path(__file__).parent.parent / "docs" / "bench-result.schema.json"
SMALL = ("--random-words", "2:4", "--max-tokens", "8", "--warm-up", "1", "--ignore-eos")


def bench(capsys: pytest.CaptureFixture[str], *options: str) -> tuple[int, list[str], str]:
    code = main(["bench", *options])
    told = capsys.readouterr()
    return code, told.out.splitlines(), told.err


def test_a_server_is_measured_by_mode_and_load(
    tiny_api: ApiServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "result.json"
    options = ("--mode", "off,tree", "--tree-budget", "4", "--concurrency", "1,2", "--requests", "4")
    code, lines, _ = bench(
        capsys, "--url", tiny_api.url, *options, *SMALL, "--slo", "ttft=1000s", "--output", str(file)
    )
    answer = json.loads(lines[-1])
    assert code == 0 and answer["schema"] == 1 and answer["kind"] == "load"
    assert json.loads(file.read_text()) == answer
    report = LoadReport.model_validate(answer)
    sizes = [(each.mode, each.tree_budget, each.concurrency) for each in report.results]
    assert sizes == [("off", None, 1), ("tree", 4, 1), ("off", None, 2), ("tree", 4, 2)]
    for each in report.results:
        assert each.failed == 0 and each.requests == 4 and each.output_tokens == 32
        assert each.tokens_by == "server" and each.goodput_share == 1.0
        assert each.accept_length is not None and each.accept_length >= 1.0
        assert each.mode == "tree" or each.accept_length == 1.0
    assert report.conditions["url"] == tiny_api.url


def test_without_url_this_runtime_is_measured_in_open_loop(
    tiny_folder: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    config = tiny_config(tiny_folder / "target", tiny_folder / "drafter", max_queue=64)
    file = tmp_path / "config.toml"
    from runtime.config import to_toml

    file.write_text(to_toml(config))
    code, lines, _ = bench(
        capsys, "--config", str(file), "--rate", "50", "--requests", "6", "--mode", "chain", *SMALL, "--json"
    )
    result = json.loads(lines[-1])["results"][0]
    assert code == 0 and len(lines) == 1
    assert (result["loop"], result["rate"], result["failed"], result["output_tokens"]) == (
        "open",
        50.0,
        0,
        48,
    )


def test_a_load_nobody_answers_fails_with_the_reason(
    tiny_api: ApiServer, capsys: pytest.CaptureFixture[str]
) -> None:
    code, lines, err = bench(capsys, "--url", tiny_api.url, "--requests", "2", "--served-model", "other")
    assert code == 1 and "no request got an answer: HTTP 404" in err
    assert json.loads(lines[-1])["results"][0]["ttft_s"] is None, "unknown is null"
    code, _, err = bench(capsys, "--url", "http://127.0.0.1:9", "--requests", "2")
    assert code == 1 and err.startswith("ddtree: http://127.0.0.1:9 does not answer")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--rate", "2", "--concurrency", "3"], "either a rate or a concurrency"),
        (["--url", "http://h", "--threads", "2"], "server's own setting"),
        (["--slo", "ttft=1"], "needs --url"),
        (["--warm-up", "0"], "needs --url"),
        (["--ignore-eos"], "needs --url"),
        (["--rate", "0"], "not above 0"),
        (["--rate", "nan"], "not above 0"),
        (["--rate", "1", "--slo", "itl=5"], "'itl=5' is not one of"),
        (["--rate", "1", "--random-words", "9:3"], "LOW:HIGH"),
        (["--rate", "1", "--repetitions", "3"], "measured once"),
        (["--served-model", "m", "--rate", "1"], "needs --url"),
    ],
)
def test_options_that_would_be_ignored_are_wrong_usage(
    options: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, lines, err = bench(capsys, *options)
    assert code == 2 and words in err and not lines


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, " does not exist"),
        (b"\xff\n", " cannot be read"),
        (b"\n\n", " holds no prompts"),
        (b'{"prompt": "a"}\n{"prompt"', ", line 2: not JSON"),
        (b'{"text": 3}\n', ', line 1: needs {"prompt": ...} or {"messages": [...]}'),
    ],
)
def test_a_file_without_usable_prompts_is_named_with_its_line(
    content: bytes | None, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "prompts.jsonl"
    if content is not None:
        file.write_bytes(content)
    code, lines, err = bench(capsys, "--rate", "1", "--prompts", str(file))
    assert code == 2 and f"prompt file {file}{words}" in err and not lines


def test_prompt_files_of_public_sets_are_read_as_they_are(tmp_path: Path) -> None:
    file = tmp_path / "set.jsonl"
    message = {"role": "user", "content": "c"}
    rows = [{"turns": ["a", "later"]}, {"question": "b", "answer": "x"}, {"messages": [message]}]
    file.write_text("\n\n".join(json.dumps(row) for row in rows))
    assert read_prompts(file) == [{"prompt": "a"}, {"prompt": "b"}, {"messages": (message,)}]
    assert len(read_prompts(file, limit=2)) == 2


def test_the_published_schema_is_that_of_the_results(capsys: pytest.CaptureFixture[str]) -> None:
    code, lines, _ = bench(capsys, "--schema")
    assert code == 0 and json.loads("\n".join(lines)) == json.loads(SCHEMA_FILE.read_text())


class Nvml:
    """Counters of two GPUs that take 50 J between any two readings."""

    def __init__(self, supported: bool = True) -> None:
        self.millijoules = 0
        self.supported = supported

    def nvmlInit(self) -> None:  # noqa: N802
        pass

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        return 2

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:  # noqa: N802
        return index

    def nvmlDeviceGetTotalEnergyConsumption(self, _handle: int) -> int:  # noqa: N802
        if not self.supported:
            raise RuntimeError("Not Supported")
        self.millijoules += 25_000
        return self.millijoules


def test_energy_is_counted_over_all_gpus_or_unknown() -> None:
    def none() -> Any:
        raise ImportError

    assert math.isclose(EnergyMeter(Nvml).joules() or 0.0, 100.0)
    assert EnergyMeter(lambda: Nvml(supported=False)).joules() is None
    assert EnergyMeter(none).joules() is None
