"""Measures the SGLang engine and its plugin on a GPU, one question a call; every line is written when it is known.

    python scripts/sglang_gpu.py PART --target FOLDER --drafter FOLDER [--out DIR] [...]

    speed       plain, stock DFLASH and trees of each width; concurrency, temperature; accept length, ms a step, tok/s
    same        texts of trees against plain ones, token by token, by the near-tie rule
    captured    graphs against eager, and the negative control: a mask that lets every node see every other one
    soak        thousands of steps with requests that come, go and are aborted; then nothing may be left over
    native      the native engine on the same weights and prompts
    kill        kill -9 of SGLang's scheduler under a stream; what the client sees, and whether the memory comes back

The plugin is brought to SGLang by PYTHONPATH; nothing is installed. SGLang must be importable by this Python.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
SETS = ("maths", "code", "chat")
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


class Out:
    """Lines of JSON, on stdout and in a file, as they come."""

    def __init__(self, folder: str | None, part: str) -> None:
        self._file = None
        if folder:
            Path(folder).mkdir(parents=True, exist_ok=True)
            self._file = (Path(folder) / f"sglang-{part}.jsonl").open("a", encoding="utf-8")

    def __call__(self, kind: str, **values: Any) -> None:
        line = json.dumps({"kind": kind, **values})
        print(line, flush=True)
        if self._file:
            print(line, file=self._file, flush=True)


def bring_plugin(control: bool = False) -> None:
    """Puts the plugin, and the negative control where wanted, on the path of this process and its children."""
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
    sys.path[:0] = paths
    os.environ["PYTHONPATH"] = os.pathsep.join([*paths, *filter(None, [os.environ.get("PYTHONPATH")])])


def arm_arguments(arm: str, options: argparse.Namespace) -> dict[str, Any]:
    """Engine arguments of "plain", "dflash" or "tree16" (rows of a verify pass)."""
    arguments = {**BASE, "model_path": options.target, "context_length": options.context}
    os.environ["DDTREE_SGLANG_SEEDED"] = "1"
    if arm == "plain":
        return arguments
    block = json.loads((Path(options.drafter) / "config.json").read_text())["block_size"]
    arguments |= {"speculative_draft_model_path": options.drafter, "speculative_dflash_block_size": block}
    if arm == "dflash":
        os.environ.pop("DDTREE_SGLANG_SEEDED")  # its sampler brings its own randomness
        return arguments | {"speculative_algorithm": "DFLASH", "speculative_num_draft_tokens": block}
    return arguments | {
        "speculative_algorithm": "DDTREE_CONSOLE",
        "speculative_num_draft_tokens": int(arm.removeprefix("tree")),
    }


def prompt_ids(options: argparse.Namespace) -> dict[str, list[list[int]]]:
    """`--prompts` bundled prompts of each set, chat template applied."""
    from runtime.prompt_sets import bundled_prompts
    from runtime.tokenizer import ChatTokenizer

    tokenizer = ChatTokenizer.from_folder(Path(options.target))
    found = {}
    for name, prompts in bundled_prompts(options.prompts).items():
        turns = [each.get("messages") or [{"role": "user", "content": each["prompt"]}] for each in prompts]
        found[name] = [list(tokenizer.apply_chat_template([dict(turn) for turn in each])) for each in turns]
    return found


@contextlib.contextmanager
def engine_of(arm: str, options: argparse.Namespace, out: Out, **changes: Any) -> Any:
    import sglang

    began = time.time()
    engine = sglang.Engine(**(arm_arguments(arm, options) | changes))
    out("engine", arm=arm, version=sglang.__version__, seconds=round(time.time() - began, 1), **changes)
    try:
        yield engine
    finally:
        engine.shutdown()


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
    rounds = meta.get("spec_verify_ct") or tokens - 1
    return {
        "ids": answer["output_ids"],
        "tokens": tokens,
        "rounds": rounds,
        "decode_s": (last or began) - (first or began),
        "histogram": meta.get("spec_correct_drafts_histogram"),
    }


async def _load(engine: Any, prompts: list[list[int]], at_once: int, temperature: float, tokens: int) -> Any:
    """All prompts, `at_once` at a time; their answers in order and the seconds it took."""
    answers: list[Any] = [None] * len(prompts)
    waiting = iter(range(len(prompts)))

    async def client() -> None:
        for number in waiting:
            answers[number] = await _one(engine, prompts[number], sampling(temperature, tokens, number))

    began = time.perf_counter()
    await asyncio.gather(*(client() for _ in range(at_once)))
    return answers, time.perf_counter() - began


def run(engine: Any, *arguments: Any) -> Any:
    return engine.loop.run_until_complete(_load(engine, *arguments))


def figures(answers: list[dict[str, Any]], seconds: float) -> dict[str, Any]:
    """Of one set at one concurrency: per request and, for the whole load, tails included."""
    decoded = sum(each["tokens"] - 1 for each in answers)
    rounds = sum(each["rounds"] for each in answers)
    rates = [(each["tokens"] - 1) / each["decode_s"] for each in answers if each["decode_s"]]
    steps = [1000 * each["decode_s"] / each["rounds"] for each in answers if each["rounds"]]
    return {
        "n": len(answers),
        "accept_length": round(decoded / rounds, 3),
        "ms_step_median": round(statistics.median(steps), 3),
        "tok_s_median": round(statistics.median(rates), 1),
        "tok_s_total": round(sum(each["tokens"] for each in answers) / seconds, 1),
    }


def speed(options: argparse.Namespace, out: Out) -> None:
    prompts = prompt_ids(options)
    for arm in options.arms.split(","):
        with engine_of(arm, options, out) as engine:
            for name, ids in prompts.items():
                run(engine, ids[:4], 4, 0.0, 16)
                for temperature in (0.0, 1.0):
                    for at_once in map(int, options.concurrency.split(",")):
                        several = (ids * at_once)[: max(len(ids), 2 * at_once)]
                        answers, seconds = run(engine, several, at_once, temperature, options.tokens)
                        out("speed", arm=arm, set=name, temperature=temperature, concurrency=at_once,
                            **figures(answers, seconds))  # fmt: skip


def same(options: argparse.Namespace, out: Out) -> None:
    """Judged by teacher forcing: what each arm emitted must be plain decoding's choice, or within tau of it."""
    prompts = [ids for each in prompt_ids(options).values() for ids in each]
    texts: dict[tuple[str, float], list[list[int]]] = {}
    for arm in ("plain", *options.arms.split(",")):
        if arm == "plain" and ("plain", 0.0) in texts:
            continue
        with engine_of(arm, options, out) as engine:
            for temperature in (0.0, 1.0):
                answers, _ = run(engine, prompts, 8, temperature, options.tokens)
                texts[arm, temperature] = [each["ids"] for each in answers]
    for (arm, temperature), found in texts.items():
        plain = texts["plain", temperature]
        first = [_first_difference(a, b) for a, b in zip(plain, found, strict=True)]
        equal = sum(place is None for place in first)
        out("same", arm=arm, temperature=temperature, equal=equal, of=len(found), first_difference=first)
    with engine_of("plain", options, out) as engine:
        tau = _tau(engine, prompts, texts["plain", 0.0])
        out("tau", value=tau)
        for (arm, temperature), found in texts.items():
            if temperature == 0.0:
                gaps = [
                    gap for ids, text in zip(prompts, found, strict=True) for gap in _gaps(engine, ids, text)
                ]
                over = [gap for gap in gaps if gap > tau]
                ties = sum(0 < gap <= tau for gap in gaps)
                out("near_ties", arm=arm, tokens=len(gaps), ties=ties, per_hundred=round(100 * ties / len(gaps), 3),
                    divergences=len(over), largest=max(gaps))  # fmt: skip


def _first_difference(a: list[int], b: list[int]) -> int | None:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), None)


def _forced(engine: Any, prompt: list[int], text: list[int]) -> list[tuple[float, float]]:
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


def _gaps(engine: Any, prompt: list[int], text: list[int]) -> list[float]:
    return [max(0.0, best - own) for own, best in _forced(engine, prompt, text)]


def _tau(engine: Any, prompts: list[list[int]], texts: list[list[int]]) -> float:
    """Twice the 99.9th percentile of how much the same position differs between one row and many rows."""
    differences = []
    for prompt, text in zip(prompts, texts, strict=True):
        alone = engine.generate(
            input_ids=prompt,
            sampling_params={"temperature": 0.0, "max_new_tokens": len(text)},
            return_logprob=True,
        )
        ids, told = alone["output_ids"], alone["meta_info"]["output_token_logprobs"]
        forced = _forced(engine, prompt, ids)
        differences += [abs(one[0] - many[0]) for one, many in zip(told, forced, strict=True)]
    differences.sort()
    return 2 * differences[min(len(differences) - 1, int(0.999 * len(differences)))]


def captured(options: argparse.Namespace, out: Out) -> None:
    """Graphs against eager in two processes' engines; then graphs with the control's mask, which must differ."""
    arm = options.arms.split(",")[0]
    prompts = [ids for each in prompt_ids(options).values() for ids in each][:24]
    found = {}
    for name, changes in (("graphs", {}), ("eager", {"disable_cuda_graph": True})):
        with engine_of(arm, options, out, **changes) as engine:
            answers, _ = run(engine, prompts, 8, 0.0, options.tokens)
            found[name] = [each["ids"] for each in answers]
    control = subprocess.run(
        [sys.executable, __file__, "control", *sys.argv[2:]], stdout=subprocess.PIPE, text=True
    )
    found["control"] = json.loads(control.stdout.splitlines()[-1])["ids"]
    for name in ("eager", "control"):
        first = [_first_difference(a, b) for a, b in zip(found["graphs"], found[name], strict=True)]
        out("captured", arm=arm, against=name, equal=sum(each is None for each in first), of=len(first),
            first_difference=first)  # fmt: skip


def control(options: argparse.Namespace, out: Out) -> None:
    prompts = [ids for each in prompt_ids(options).values() for ids in each][:24]
    with engine_of(options.arms.split(",")[0], options, out) as engine:
        answers, _ = run(engine, prompts, 8, 0.0, options.tokens)
    out("control", ids=[each["ids"] for each in answers])


def soak(options: argparse.Namespace, out: Out) -> None:
    """SGLang checks its slots whenever it is idle and ends with an error where one leaked; memory is read besides."""
    draws = random.Random(0)
    prompts = [ids for each in prompt_ids(options).values() for ids in each]
    with engine_of(options.arms.split(",")[0], options, out) as engine:

        async def request(number: int) -> int:
            name, taken = f"soak{number}", 0
            abort_at = draws.randint(1, 60) if draws.random() < 0.3 else None
            settings = sampling(draws.choice((0.0, 1.0)), draws.randint(1, 200), number)
            stream = await engine.async_generate(
                input_ids=draws.choice(prompts), sampling_params=settings, stream=True, rid=name
            )
            async for answer in stream:
                taken += 1
                if abort_at is not None and len(answer["output_ids"]) >= abort_at:
                    engine.tokenizer_manager.abort_request(rid=name)
                    abort_at = None
            return taken

        async def work() -> None:
            steps, number = 0, 0
            while steps < options.steps:
                several = draws.randint(1, 32)
                steps += max(await asyncio.gather(*(request(number + i) for i in range(several))))
                number += several
                out("soak", steps=steps, requests=number, gpu_used=_gpu_used())

        before = _gpu_used()
        engine.loop.run_until_complete(work())
        time.sleep(2)
        state = engine.get_server_info()["internal_states"][0]
        out("soak_end", gpu_before=before, gpu_after=_gpu_used(), alive=True, state={
            key: value for key, value in state.items() if isinstance(value, int | float)})  # fmt: skip


def _gpu_used() -> int | None:
    asked = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    with contextlib.suppress(OSError, ValueError, subprocess.SubprocessError):
        return int(subprocess.run(asked, capture_output=True, text=True, check=True).stdout.split()[0])
    return None


def native(options: argparse.Namespace, out: Out) -> None:
    """The native engine in bfloat16 on the same prompts, modes and temperatures, at each concurrency."""
    from runtime.config import RuntimeConfig
    from runtime.engine import Engine
    from runtime.interface import GenerateRequest, RequestFinished, SamplingParams
    from runtime.loader import load

    config = RuntimeConfig(
        model=options.target,
        drafter=options.drafter,
        device="cuda",
        max_concurrency=32,
        max_seq_len=options.context,
    )
    engine = Engine(load(config), config, default_budget=31)
    for name, prompts in prompt_ids(options).items():
        for mode, budget in (("off", 0), ("chain", 0), ("tree", 15), ("tree", 31), ("tree", 63)):
            for temperature in (0.0, 1.0):
                for at_once in map(int, options.concurrency.split(",")):
                    ends: list[Any] = []

                    def keep(event: Any, ends: list[Any] = ends) -> None:
                        if isinstance(event, RequestFinished):
                            ends.append(event)

                    began = time.perf_counter()
                    for number, ids in enumerate((prompts * at_once)[: max(len(prompts), 2 * at_once)]):
                        wanted = SamplingParams(
                            max_tokens=options.tokens, temperature=temperature, seed=number
                        )
                        asked = GenerateRequest(
                            prompt_token_ids=tuple(ids), sampling=wanted, mode=mode, tree_budget=budget or None,
                            reuse_prefix=False)  # fmt: skip
                        engine.submit(asked, keep)
                        while len(engine.requests()) >= at_once:
                            engine.step()
                    while engine.busy:
                        engine.step()
                    answers = [
                        {
                            "tokens": e.stats.output_tokens,
                            "rounds": e.stats.rounds,
                            "decode_s": e.stats.decode_s or 0,
                        }
                        for e in ends
                    ]
                    out("native", mode=mode, budget=budget, set=name, temperature=temperature, concurrency=at_once,
                        **figures(answers, time.perf_counter() - began))  # fmt: skip


def kill(options: argparse.Namespace, out: Out) -> None:
    import signal

    import psutil

    from runtime.config import RuntimeConfig
    from runtime.interface import GenerateRequest, SamplingParams
    from runtime.local import LocalRuntime

    async def scenario() -> None:
        runtime = LocalRuntime(RuntimeConfig(
            engine="sglang", sglang_python=sys.executable, model=options.target, drafter=options.drafter, device="cuda",
            tree_budget=31, max_seq_len=options.context))  # fmt: skip
        await runtime.wait_ready()
        prompt = tuple(prompt_ids(options)["maths"][0])
        asked = GenerateRequest(
            prompt_token_ids=prompt, sampling=SamplingParams(max_tokens=400, temperature=0.0, ignore_eos=True)
        )
        alone = [event async for event in runtime.generate(asked)][-1]
        used, killed, events = _gpu_used(), None, []
        async for event in runtime.generate(asked):
            events.append(event)
            if killed is None and len(events) > 10:
                children = psutil.Process().children(recursive=True)
                killed = next(each for each in children if "scheduler" in " ".join(each.cmdline()))
                os.kill(killed.pid, signal.SIGKILL)
        end, status = events[-1], await runtime.status()
        out("kill", reason=end.reason, same_text=end.token_ids == alone.token_ids, continued=end.stats.continued,
            state=status.state.value, errors=list(status.errors), gpu_before=used, gpu_after=_gpu_used())  # fmt: skip
        await runtime.aclose()
        time.sleep(2)
        out("kill_closed", gpu_used=_gpu_used())

    asyncio.run(scenario())


PARTS = {each.__name__: each for each in (speed, same, captured, control, soak, native, kill)}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--target", required=True, help="Hugging Face folder (ddtree model convert)")
    parser.add_argument("--drafter", default=str(ROOT / "runtime/drafters/smollm2-135m-instruct"))
    parser.add_argument("--out")
    parser.add_argument("--arms", default="plain,dflash,tree16,tree32,tree64")
    parser.add_argument("--concurrency", default="1,8,32")
    parser.add_argument("--prompts", type=int, default=12, help="of each set")
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--steps", type=int, default=5000)
    options = parser.parse_args()
    out = Out(options.out, options.part)
    if options.part in ("captured", "control", "soak", "same") and options.arms == parser.get_default("arms"):
        options.arms = "tree32" if options.part != "same" else "tree16,tree32,tree64"
    if options.part != "native":
        bring_plugin(control=options.part == "control")
    PARTS[options.part](options, out)
    out("done", part=options.part)


if __name__ == "__main__":
    main()
