"""Measures the SGLang engine and its plugin on a GPU; a call that was cut short goes on where it was.

    python scripts/sglang_gpu.py all --target FOLDER --out FOLDER [--seconds 560] [--site FOLDER] [--earlier FILE ...]

    check       what needs no GPU: the pair, the prompts, every arm's arguments through SGLang's parser, the cells
    speed       plain, stock DFLASH, chains and trees of each width; concurrency, temperature; accept length, ms a step
    same        texts of trees against plain ones, token by token, by the near-tie rule
    captured    graphs against eager, and the negative control: a mask that lets every node see every other one
    soak        thousands of steps with requests that come, go and are aborted; then nothing may be left over
    native      the native engine on the same weights and prompts
    kill        kill -9 of SGLang's scheduler under a stream; what the client sees, and whether the memory comes back
    all         check, then the others, each engine in a process of its own, the most wanted first

The plugin comes by PYTHONPATH; nothing is installed. `--site`: a folder with SGLang and its packages, which only the
processes that need it get, where this Python has none. Every cell is a line of FOLDER/sglang.jsonl once it is known.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
import types
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE)]

from sglang_cells import (  # noqa: E402
    ROOT,
    Results,
    all_prompts,
    bring_sglang,
    compared,
    config_of,
    driven,
    engine_of,
    figures,
    gaps_of,
    gpu_used,
    judged,
    parsed,
    prompt_ids,
    request_of,
    run,
    sampling,
    several,
    tau_of,
)

TREES = "tree32,tree16,tree64"
ARMS = f"plain,dflash,{TREES},chain"
TEMPERATURES = (0.0, 1.0)
NATIVE = (("off", 0), ("chain", 0), ("tree", 15), ("tree", 31), ("tree", 63))


def speed_cells(arm: str, options: argparse.Namespace) -> list[tuple[str, str, float, int]]:
    """(name, set, temperature, concurrency) of an arm's cells, those at concurrency 1 first."""
    return [
        (f"speed/{arm}/{name}/T{temperature:g}/c{at_once}", name, temperature, at_once)
        for at_once in options.concurrency
        for temperature in TEMPERATURES
        for name in ("maths", "code", "chat")
    ]


def check(options: argparse.Namespace, results: Results) -> None:
    from runtime.drafter import read_drafter_config

    config = json.loads((options.target / "config.json").read_text())
    drafter = read_drafter_config(options.drafter)
    layers = int(config["num_hidden_layers"])
    taps = list(drafter.target_layer_ids)
    if max(taps) >= layers - 1 or drafter.num_target_layers != layers:
        raise SystemExit(
            f"{options.drafter} taps {taps}; SGLang gives layers 0 to {layers - 2} of {options.target}"
        )
    prompts = {name: [len(ids) for ids in each] for name, each in prompt_ids(options).items()}
    longest = max(max(each) for each in prompts.values())
    if longest + options.tokens > options.context:
        raise SystemExit(
            f"a prompt of {longest} tokens and {options.tokens} more exceed --context {options.context}"
        )
    for arm in options.arms:
        results.note("arguments", arm=arm, resolved=parsed(arm, options))
    names = [cell[0] for arm in options.arms for cell in speed_cells(arm, options)]
    results.note("check", prompts={name: len(each) for name, each in prompts.items()}, longest=longest,
                 cells=len(names), missing=len(results.missing(names)))  # fmt: skip


def speed(options: argparse.Namespace, results: Results) -> None:
    prompts = prompt_ids(options)
    for arm in options.arms:
        cells = speed_cells(arm, options)
        if not results.missing([cell[0] for cell in cells]):
            continue
        with engine_of(arm, options, results) as engine:
            warm = [ids for each in prompts.values() for ids in each]
            for at_once in options.concurrency:
                run(engine, several(warm[:4], at_once), at_once, 0.0, min(32, options.tokens))
            for name, kind, temperature, at_once in cells:

                def measure(
                    kind: str = kind, temperature: float = temperature, at_once: int = at_once
                ) -> Any:
                    asked = several(prompts[kind], at_once)
                    return figures(*run(engine, asked, at_once, temperature, options.tokens))

                results.cell(name, measure)


def texts_of(
    arm: str, options: argparse.Namespace, results: Results, **changes: Any
) -> dict[str, Any] | None:
    """The texts of one arm at both temperatures, as cells, so that another call can compare with them."""
    extra = "/eager" if changes else ""
    names = [f"texts/{arm}{extra}/T{temperature:g}" for temperature in TEMPERATURES]
    if results.missing(names):
        with engine_of(arm, options, results, **changes) as engine:
            for name, temperature in zip(names, TEMPERATURES, strict=True):

                def measure(temperature: float = temperature) -> dict[str, Any]:
                    answers, _ = run(engine, all_prompts(options), 8, temperature, options.tokens)
                    return {"ids": [each["ids"] for each in answers]}

                results.cell(name, measure)
    rows = [results.done.get(name) for name in names]
    if not all(rows):
        return None
    return dict(zip(TEMPERATURES, (row["ids"] for row in rows if row), strict=True))


def same(options: argparse.Namespace, results: Results) -> None:
    """Judged by teacher forcing: what each arm emitted must be plain decoding's choice, or within tau of it."""
    arms = [arm for arm in options.arms if arm not in ("plain", "dflash")]
    texts = {arm: texts_of(arm, options, results) for arm in ("plain", *arms)}
    plain = texts["plain"]
    if plain is None:
        return
    known = {arm: found for arm, found in texts.items() if found is not None}
    for arm, found in known.items():
        for temperature in TEMPERATURES:
            results.note(
                "same", arm=arm, temperature=temperature, **compared(plain[temperature], found[temperature])
            )
    if not results.missing([f"near_ties/{arm}" for arm in known]):
        return
    prompts = all_prompts(options)
    with engine_of("plain", options, results) as engine:
        tau = results.cell("tau", lambda: {"value": tau_of(engine, prompts, plain[0.0])})
        for arm, found in known.items():
            if tau:
                gaps = gaps_of(engine, prompts, found[0.0])
                results.cell(f"near_ties/{arm}", lambda gaps=gaps: judged(gaps, tau["value"]))


def captured(options: argparse.Namespace, results: Results) -> None:
    """Graphs against eager; then graphs under the control's mask, which must give other texts."""
    arm = next((arm for arm in options.arms if arm.startswith("tree")), "tree32")
    graphs = texts_of(arm, options, results)
    eager = texts_of(arm, options, results, disable_cuda_graph=True)
    if graphs and eager:
        for temperature in TEMPERATURES:
            found = compared(graphs[temperature], eager[temperature])
            results.note("captured", arm=arm, against="eager", temperature=temperature, **found)
    if graphs and results.missing([f"control/{arm}"]):
        with tempfile.TemporaryDirectory() as folder:
            subprocess.run(_command(options, "control", [arm], Path(folder)), check=True)
            found = Results(Path(folder), [], 0.0).done["control"]
        results.cell(f"control/{arm}", lambda: compared(graphs[0.0], found["ids"]))


def control(options: argparse.Namespace, results: Results) -> None:
    with engine_of(options.arms[0], options, results) as engine:
        answers, _ = run(engine, all_prompts(options), 8, 0.0, options.tokens)
    results.cell("control", lambda: {"ids": [each["ids"] for each in answers]})


def soak(options: argparse.Namespace, results: Results) -> None:
    """SGLang checks its slots whenever it is idle and ends with an error where one leaked; memory is read besides."""
    arm = next((arm for arm in options.arms if arm.startswith("tree")), "tree32")
    if results.missing([f"soak/{arm}"]):
        with engine_of(arm, options, results) as engine:
            results.cell(f"soak/{arm}", lambda: _soaked(engine, options, results))


def _soaked(engine: Any, options: argparse.Namespace, results: Results) -> dict[str, Any]:
    draws, prompts, before = random.Random(0), all_prompts(options), gpu_used()

    async def request(number: int) -> int:
        name, taken = f"soak{number}", 0
        abort_at = draws.randint(1, 60) if draws.random() < 0.3 else None
        settings = sampling(draws.choice(TEMPERATURES), draws.randint(1, 200), number)
        stream = await engine.async_generate(
            input_ids=draws.choice(prompts), sampling_params=settings, stream=True, rid=name
        )
        async for answer in stream:
            taken += 1
            if abort_at is not None and len(answer["output_ids"]) >= abort_at:
                engine.tokenizer_manager.abort_request(rid=name)
                abort_at = None
        return taken

    async def work() -> tuple[int, int]:
        steps, number = 0, 0
        while steps < options.steps and results.left > 0:
            batch = draws.randint(1, 32)
            steps += max(await asyncio.gather(*(request(number + i) for i in range(batch))))
            number += batch
        return steps, number

    steps, requests = engine.loop.run_until_complete(work())
    time.sleep(2)
    state = engine.get_server_info()["internal_states"][0]
    told = {key: value for key, value in state.items() if isinstance(value, int | float)}
    return {"steps": steps, "of": options.steps, "requests": requests, "gpu_before": before, "gpu_after": gpu_used(),
            "state": told}  # fmt: skip


def native(options: argparse.Namespace, results: Results) -> None:
    """The native engine in its own dtype for this device on the same prompts, modes and temperatures."""
    from runtime.rebuild import build

    prompts = prompt_ids(options)
    built = build(config_of(options, mode="tree", max_tree_budget=63), None, lambda _share, _what: None)
    results.note("native", seconds=round(built.seconds, 1), notes=list(built.engine.loaded.notes),
                 dtype=str(built.engine.models.target.dtype))  # fmt: skip
    for at_once in options.concurrency:
        for temperature in TEMPERATURES:
            for kind, rows in prompts.items():
                for mode, budget in NATIVE:

                    def measure(
                        at_once: int = at_once,
                        temperature: float = temperature,
                        rows: list[list[int]] = rows,
                        fields: Any = types.MappingProxyType({"mode": mode, "tree_budget": budget or None}),
                    ) -> dict[str, Any]:
                        asked = [
                            request_of(ids, options.tokens, temperature, seed, **fields)
                            for seed, ids in enumerate(several(rows, at_once))
                        ]
                        return driven(built.engine, asked, at_once)

                    results.cell(f"native/{mode}{budget or ''}/{kind}/T{temperature:g}/c{at_once}", measure)
    built.engine.loaded.close()


def kill(options: argparse.Namespace, results: Results) -> None:
    if results.missing(["kill"]):
        found = asyncio.run(_killed(options))
        results.cell("kill", lambda: found)


async def _killed(options: argparse.Namespace) -> dict[str, Any]:
    import psutil

    from runtime.local import LocalRuntime

    runtime = LocalRuntime(config_of(options, engine="sglang", sglang_python=sys.executable, tree_budget=31))
    await runtime.wait_ready()
    asked = request_of(prompt_ids(options)["maths"][0], options.tokens, 0.0, 0)
    alone = [event async for event in runtime.generate(asked)][-1]
    used, killed, events = gpu_used(), None, []
    async for event in runtime.generate(asked):
        events.append(event)
        if killed is None and len(events) > 3:
            children = psutil.Process().children(recursive=True)
            killed = next(each for each in children if "scheduler" in " ".join(each.cmdline()))
            os.kill(killed.pid, signal.SIGKILL)
    end, status = events[-1], await runtime.status()
    found = {"killed": killed is not None, "reason": end.reason, "same_text": end.token_ids == alone.token_ids,
             "continued": end.stats.continued, "state": status.state.value, "errors": list(status.errors),
             "gpu_before": used, "gpu_after": gpu_used()}  # fmt: skip
    await runtime.aclose()
    time.sleep(2)
    return found | {"gpu_closed": gpu_used()}


def _command(options: argparse.Namespace, part: str, arms: list[str], out: Path | None) -> list[str]:
    """This script over one part, with the options of this call."""
    given = {"target": options.target, "drafter": options.drafter, "out": out, "prompts": options.prompts,
             "prompt-tokens": options.prompt_tokens, "tokens": options.tokens, "context": options.context,
             "steps": options.steps, "site": options.site, "arms": ",".join(arms),
             "concurrency": ",".join(map(str, options.concurrency))}  # fmt: skip
    words = [f"--{name}={value}" for name, value in given.items() if value not in (None, "")]
    words += [f"--set={name}={json.dumps(value)}" for name, value in options.set.items()]
    words += [f"--runtime={name}={json.dumps(value)}" for name, value in options.runtime.items()]
    earlier = ["--earlier", *map(str, options.earlier)] if options.earlier else []
    return [sys.executable, __file__, part, *words, *earlier]


def everything(options: argparse.Namespace, results: Results) -> None:
    """Each engine in a process of its own: one that fails is told of and takes no other with it."""
    trees = [arm for arm in options.arms if arm.startswith("tree")]
    jobs = [("check", options.arms), *(("speed", [arm]) for arm in options.arms)]
    jobs += [("captured", trees[:1]), ("same", trees), ("native", []), ("kill", []), ("soak", trees[:1])]
    for part, arms in jobs:
        left = results.left
        if left <= 5:
            results.note("no_time", missing=part, arms=arms)
            continue
        command = [*_command(options, part, arms, options.out), "--seconds", f"{left:.0f}"]
        done = subprocess.run(command, stderr=subprocess.PIPE, text=True)
        if done.returncode:
            results.note(
                "failed", part=part, arms=arms, code=done.returncode, told=done.stderr.splitlines()[-30:]
            )
            if part == "check":
                raise SystemExit(1)


PARTS = {each.__name__: each for each in (check, speed, same, captured, control, soak, native, kill)}
PARTS["all"] = everything


def _pair_of(words: str) -> tuple[str, Any]:
    name, _, value = words.partition("=")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value


def options_of(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("part", choices=PARTS)
    parser.add_argument(
        "--target", type=Path, required=True, help="Hugging Face folder (ddtree model convert)"
    )
    parser.add_argument("--drafter", type=Path, default=ROOT / "runtime/drafters/smollm2-135m-instruct")
    parser.add_argument("--out", type=Path, help="folder of the results")
    parser.add_argument(
        "--earlier", type=Path, nargs="*", default=[], help="results of calls before this one"
    )
    parser.add_argument("--seconds", type=float, default=560.0, help="nothing begins after these")
    parser.add_argument("--site", type=Path, help="folder with SGLang, for the processes that need it")
    parser.add_argument(
        "--arms", type=lambda words: [w for w in words.split(",") if w], default=ARMS.split(",")
    )
    parser.add_argument(
        "--concurrency", type=lambda words: [int(w) for w in words.split(",")], default=[1, 8, 32]
    )
    parser.add_argument("--prompts", type=int, default=12, help="of each set")
    parser.add_argument("--prompt-tokens", type=int, default=1024, help="longer prompts keep their end")
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--steps", type=int, default=5000)
    parser.add_argument("--set", type=_pair_of, action="append", default=[], metavar="ARGUMENT=VALUE",
                        help="another engine argument of SGLang")  # fmt: skip
    parser.add_argument("--runtime", type=_pair_of, action="append", default=[], metavar="FIELD=VALUE",
                        help="another configuration field of ddtree")  # fmt: skip
    options = parser.parse_args(words)
    options.set, options.runtime = dict(options.set), dict(options.runtime)
    return options


def main() -> None:
    options = options_of()
    results = Results(options.out, options.earlier, options.seconds)
    if options.part == "kill":
        # This process runs in the native environment; SGLang's are children of it.
        home = tempfile.mkdtemp(prefix="ddtree-home-")
        os.environ |= {f"XDG_{kind}_HOME": home for kind in ("CONFIG", "DATA", "STATE", "CACHE")}
        os.environ["PYTHONPATH"] = os.pathsep.join(
            filter(None, [str(options.site or ""), os.environ.get("PYTHONPATH")])
        )
    elif options.part not in ("native", "all"):
        bring_sglang(options.site, control=options.part == "control")
    PARTS[options.part](options, results)


if __name__ == "__main__":
    main()
