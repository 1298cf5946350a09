"""What the parts of `sglang_gpu.py` share: engines by arm, prompts, load, figures, and results kept cell by cell."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
BASE = {
    "skip_tokenizer_init": True,
    "attention_backend": "triton",
    "sampling_backend": "pytorch",
    "grammar_backend": "none",
    "dtype": "bfloat16",
    "mem_fraction_static": 0.4,
    "max_running_requests": 32,
    "disable_radix_cache": True,
    "random_seed": 0,
    "log_level": "warning",
}
CONTROL = """
def register():
    from runtime import sglang_verify
    fill = sglang_verify.MaskBuffer.fill
    sglang_verify.MaskBuffer.fill = lambda self, mask, committed: fill(self, mask | True, committed)
"""
"""A second plugin for the negative control: inside the block, everything is visible."""
SHOWN = 400
"""Characters of a line that are shown; the file has all."""


class Results:
    """Lines of JSON in `FOLDER/sglang.jsonl` and on stdout, each on disk before the next cell begins.

    A cell that is there already, in that file or in one of `earlier` runs, is not measured again.
    """

    def __init__(self, folder: Path | None, earlier: list[Path], seconds: float) -> None:
        self._file = None
        self._end = time.monotonic() + seconds
        self.done: dict[str, dict[str, Any]] = {}
        kept = folder / "sglang.jsonl" if folder else None
        for path in [*earlier, *([kept] if kept else [])]:
            for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
                with contextlib.suppress(ValueError):  # a line that was cut off
                    row = json.loads(line)
                    if row.get("cell"):
                        self.done[row["cell"]] = row
        if kept:
            kept.parent.mkdir(parents=True, exist_ok=True)
            self._file = kept.open("a", encoding="utf-8")

    def note(self, kind: str, **values: Any) -> None:
        line = json.dumps({"kind": kind, **values})
        print(line if len(line) <= SHOWN else f"{line[:SHOWN]}...", flush=True)
        if self._file:
            self._file.write(line + "\n")
            self._file.flush()
            os.fsync(self._file.fileno())

    def cell(self, name: str, measure: Callable[[], dict[str, Any]]) -> dict[str, Any] | None:
        """The values of cell `name`, measured unless they are known; None where no time is left for it."""
        if name not in self.done:
            if self.left <= 0:
                self.note("no_time", missing=name)
                return None
            began = time.monotonic()
            values = measure()
            row = {"cell": name, "took_s": round(time.monotonic() - began, 2), **values}
            self.done[name] = row
            self.note("cell", **row)
        return self.done[name]

    def missing(self, names: list[str]) -> list[str]:
        return [name for name in names if name not in self.done]

    @property
    def left(self) -> float:
        """Seconds until nothing more may begin."""
        return self._end - time.monotonic()


def bring_sglang(site: Path | None, control: bool = False) -> None:
    """Puts SGLang (`site`), the plugin, and the control where wanted, on the path of this process and its children."""
    sys.path[:0] = _bring(site, control)


def _bring(site: Path | None, control: bool) -> list[str]:
    from runtime.sglang_host import plugin_folder

    folder = Path(tempfile.mkdtemp(prefix="ddtree-plugin-"))
    paths = [str(plugin_folder(folder))]
    if control:
        information = folder / "control" / "ddtree_negative_control-1.dist-info"
        information.mkdir(parents=True)
        (information.parent / "ddtree_negative_control.py").write_text(CONTROL)
        (information / "METADATA").write_text(
            "Metadata-Version: 2.1\nName: ddtree-negative-control\nVersion: 1\n"
        )
        (information / "entry_points.txt").write_text(
            "[sglang.srt.plugins]\ncontrol = ddtree_negative_control:register\n"
        )
        paths.append(str(information.parent))
    paths += [str(site)] if site else []
    os.environ["PYTHONPATH"] = os.pathsep.join([*paths, *filter(None, [os.environ.get("PYTHONPATH")])])
    return paths


def arm_arguments(arm: str, options: argparse.Namespace) -> tuple[dict[str, Any], dict[str, str]]:
    """Engine arguments and variables of an arm: plain, dflash, chain, or treeN with N rows of a verify pass."""
    arguments = {**BASE, "model_path": str(options.target), "context_length": options.context, **options.set}
    if arm == "plain":
        return arguments, {"DDTREE_SGLANG_SEEDED": "1"}
    block = json.loads((options.drafter / "config.json").read_text())["block_size"]
    width = int(arm.removeprefix("tree")) if arm.startswith("tree") else block
    arguments |= {
        "speculative_algorithm": "DFLASH" if arm == "dflash" else "DDTREE_CONSOLE",
        "speculative_draft_model_path": str(options.drafter),
        "speculative_dflash_block_size": block,
        "speculative_num_draft_tokens": width,
    }
    if arm == "dflash":
        return arguments, {}  # its sampler brings its own randomness
    return arguments, {
        "DDTREE_SGLANG_SEEDED": "1",
        "DDTREE_SGLANG_MODE": "chain" if arm == "chain" else "tree",
    }


def parsed(arm: str, options: argparse.Namespace) -> dict[str, Any]:
    """What SGLang's own parser makes of an arm's arguments; raises what it raises. Needs no GPU."""
    from runtime.sglang_child import parse

    arguments, variables = arm_arguments(arm, options)
    with _variables(variables):
        return parse(arguments)


@contextlib.contextmanager
def _variables(wanted: dict[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in ("DDTREE_SGLANG_SEEDED", "DDTREE_SGLANG_MODE")}
    for name in before:
        os.environ.pop(name, None)
    os.environ.update(wanted)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


@contextlib.contextmanager
def engine_of(arm: str, options: argparse.Namespace, results: Results, **changes: Any) -> Iterator[Any]:
    import sglang

    arguments, variables = arm_arguments(arm, options)
    began = time.monotonic()
    with _variables(variables):
        engine = sglang.Engine(**(arguments | changes))
    took = round(time.monotonic() - began, 1)
    results.note("engine", arm=arm, version=sglang.__version__, seconds=took, **changes)
    try:
        yield engine
    finally:
        engine.shutdown()


def prompt_ids(options: argparse.Namespace) -> dict[str, list[list[int]]]:
    """`--prompts` bundled prompts of each set, chat template applied."""
    from runtime.prompt_sets import bundled_prompts
    from runtime.tokenizer import ChatTokenizer

    tokenizer = ChatTokenizer.from_folder(options.target)
    found = {}
    for name, prompts in bundled_prompts(options.prompts).items():
        turns = [each.get("messages") or [{"role": "user", "content": each["prompt"]}] for each in prompts]
        rows = [list(tokenizer.apply_chat_template([dict(turn) for turn in each])) for each in turns]
        found[name] = [row[-options.prompt_tokens :] for row in rows]
    return found


def all_prompts(options: argparse.Namespace) -> list[list[int]]:
    return [ids for each in prompt_ids(options).values() for ids in each]


def sampling(temperature: float, tokens: int, seed: int = 0) -> dict[str, Any]:
    settings = {"temperature": temperature, "max_new_tokens": tokens}
    return settings | ({"sampling_seed": 1000 + seed} if temperature else {})


async def _one(engine: Any, ids: list[int], settings: dict[str, Any]) -> dict[str, Any]:
    """One request with the times at which its tokens came."""
    began, first, last, answer = time.perf_counter(), None, None, {}
    async for chunk in await engine.async_generate(input_ids=ids, sampling_params=settings, stream=True):
        answer = chunk
        last = time.perf_counter()
        first = first or last
    meta = answer["meta_info"]
    tokens = len(answer["output_ids"])
    return {
        "ids": list(answer["output_ids"]),
        "tokens": tokens,
        "rounds": meta.get("spec_verify_ct") or tokens - 1,
        "decode_s": (last or began) - (first or began),
    }


async def _load(engine: Any, prompts: list[list[int]], at_once: int, temperature: float, tokens: int) -> Any:
    answers: list[Any] = [None] * len(prompts)
    waiting = iter(range(len(prompts)))

    async def client() -> None:
        for number in waiting:
            answers[number] = await _one(engine, prompts[number], sampling(temperature, tokens, number))

    began = time.perf_counter()
    await asyncio.gather(*(client() for _ in range(at_once)))
    return answers, time.perf_counter() - began


def run(engine: Any, prompts: list[list[int]], at_once: int, temperature: float, tokens: int) -> Any:
    """All prompts, `at_once` at a time; their answers in order and the seconds it took."""
    return engine.loop.run_until_complete(_load(engine, prompts, at_once, temperature, tokens))


def several(prompts: list[list[int]], at_once: int) -> list[list[int]]:
    """The prompts of a cell: each at least once, and two for every client."""
    return (prompts * at_once)[: max(len(prompts), 2 * at_once)]


def figures(answers: list[dict[str, Any]], seconds: float) -> dict[str, Any]:
    """Of one set at one concurrency: per request and, for the whole load, tails included."""
    decoded = sum(each["tokens"] - 1 for each in answers)
    rounds = sum(each["rounds"] for each in answers)
    rates = [(each["tokens"] - 1) / each["decode_s"] for each in answers if each["decode_s"]]
    steps = [1000 * each["decode_s"] / each["rounds"] for each in answers if each["rounds"]]
    return {
        "n": len(answers),
        "accept_length": round(decoded / rounds, 3) if rounds else None,
        "ms_step_median": round(statistics.median(steps), 3) if steps else None,
        "tok_s_median": round(statistics.median(rates), 1) if rates else None,
        "tok_s_total": round(sum(each["tokens"] for each in answers) / seconds, 1),
    }


def first_difference(a: list[int], b: list[int]) -> int | None:
    """Where two texts part; None where they are the same."""
    if a == b:
        return None
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def compared(texts: list[list[int]], others: list[list[int]]) -> dict[str, Any]:
    places = [first_difference(a, b) for a, b in zip(texts, others, strict=True)]
    return {
        "equal": sum(place is None for place in places),
        "of": len(places),
        "first_difference": places,
    }


def judged(gaps: list[float], tau: float) -> dict[str, Any]:
    ties = sum(0 < gap <= tau for gap in gaps)
    over = sum(gap > tau for gap in gaps)
    return {"tokens": len(gaps), "ties": ties, "ties_per_100": round(100 * ties / len(gaps), 3), "divergences": over,
            "largest": round(max(gaps), 4)}  # fmt: skip


def forced(engine: Any, prompt: list[int], text: list[int]) -> list[tuple[float, float]]:
    """For each token of `text`: its log-probability and the largest one, computed in one pass over all of it."""
    answer = engine.generate(
        input_ids=prompt + text,
        sampling_params={"temperature": 0.0, "max_new_tokens": 1},
        return_logprob=True,
        logprob_start_len=len(prompt) - 1,
        top_logprobs_num=1,
    )["meta_info"]
    chosen = answer["input_token_logprobs"][-len(text) :]
    best = answer["input_top_logprobs"][-len(text) :]
    return [(own[0], top[0][0]) for own, top in zip(chosen, best, strict=True)]


def gaps_of(engine: Any, prompts: list[list[int]], texts: list[list[int]]) -> list[float]:
    """By how much each token of each text falls short of plain decoding's choice, in log-probability."""
    return [
        max(0.0, best - own)
        for prompt, text in zip(prompts, texts, strict=True)
        for own, best in forced(engine, prompt, text)
    ]


def tau_of(engine: Any, prompts: list[list[int]], texts: list[list[int]]) -> float:
    """Twice the 99.9th percentile of how much the same position differs between one row and many rows."""
    differences = []
    for prompt, text in zip(prompts, texts, strict=True):
        settings = {"temperature": 0.0, "max_new_tokens": len(text), "ignore_eos": True}
        alone = engine.generate(input_ids=prompt, sampling_params=settings, return_logprob=True)
        told = alone["meta_info"]["output_token_logprobs"]
        together = forced(engine, prompt, alone["output_ids"])
        differences += [abs(one[0] - many[0]) for one, many in zip(told, together, strict=True)]
    differences.sort()
    return 2 * differences[min(len(differences) - 1, int(0.999 * len(differences)))]


def gpu_used() -> int | None:
    """MiB in use on the first GPU; None where nothing tells."""
    asked = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    with contextlib.suppress(OSError, ValueError, subprocess.SubprocessError):
        return int(subprocess.run(asked, capture_output=True, text=True, check=True).stdout.split()[0])
    return None


def config_of(options: argparse.Namespace, **fields: Any) -> Any:
    from runtime.config import RuntimeConfig

    device = options.set.get("device", "cuda")
    shared = {"model": str(options.target), "drafter": str(options.drafter), "max_seq_len": options.context}
    shared |= {"device": device, "max_concurrency": 32, "prefix_reuse": False}
    return RuntimeConfig(**(shared | fields | options.runtime))


def request_of(ids: list[int], tokens: int, temperature: float, seed: int, **fields: Any) -> Any:
    from runtime.interface import GenerateRequest, SamplingParams

    wanted = SamplingParams(max_tokens=tokens, temperature=temperature, seed=1000 + seed)
    return GenerateRequest(prompt_token_ids=tuple(ids), sampling=wanted, reuse_prefix=False, **fields)


def driven(engine: Any, asked: list[Any], at_once: int) -> dict[str, Any]:
    """Figures of requests of which `at_once` run at a time."""
    ends: list[Any] = []

    def keep(event: Any) -> None:
        if type(event).__name__ == "RequestFinished":
            ends.append(event.stats)

    began = time.perf_counter()
    for request in asked:
        engine.submit(request, keep)
        while len(engine.requests()) >= at_once:
            engine.step()
    while engine.busy:
        engine.step()
    told = [{"tokens": s.output_tokens, "rounds": s.rounds, "decode_s": s.decode_s or 0.0} for s in ends]
    return figures(told, time.perf_counter() - began)
