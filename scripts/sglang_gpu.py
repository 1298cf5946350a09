"""Measures the SGLang engine and its plugin on a GPU, beside our native engine on the same weights and prompts.

    python scripts/sglang_gpu.py all --target FOLDER --out FOLDER [--seconds 420] [--site FOLDER] [--sets FILE ...]
    python scripts/sglang_gpu.py soak --target FOLDER --out FOLDER     the soak alone; so does kill
    python scripts/sglang_gpu.py check --target FOLDER         the arguments through SGLang's parser; needs no GPU

`all`: engines come up side by side, each in a process of its own, and are measured one at a time, in turn:

    speed      concurrency 1, T=0: plain, stock DFLASH, trees of 32 and 16 rows, native; then chain and 64 rows
    same       texts against plain ones: judged by teacher forcing under the near-tie rule
    captured   graphs against eager, and the negative control: a mask that lets every node see every other one
    load       concurrency 8 and 32
    sampled    T=1
    soak       thousands of steps with requests that come, go and are aborted
    kill       kill -9 of SGLang's scheduler under a stream, and whether the memory comes back

Every cell is a line of FOLDER/sglang.jsonl once it is known; one that is there, or in `--earlier` results, is not
measured again. A part that fails is noted and ends no other; the ends of all logs are in FOLDER/logs.txt. `--site`: a
folder with SGLang and its packages, which only the processes that need it get, where this Python has none.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE)]

from sglang_arms import MODES, Fleet  # noqa: E402
from sglang_cells import (  # noqa: E402
    ROOT,
    Results,
    arm_arguments,
    borrow,
    compared,
    figures,
    gpu_used,
    guarded,
    judged,
    prompt_ids,
    sglang_path,
    tau_of,
    variables,
)

FIRST, THEN = "plain,dflash,tree32,tree16,native", "chain,tree64,tree32-eager,tree32-control"
WARM_S = 150.0


class Session:
    """One call of `all`: prompts, the fleet, the texts that were decoded meanwhile."""

    def __init__(self, options: argparse.Namespace, results: Results, fleet: Fleet) -> None:
        self.options, self.results, self.fleet = options, results, fleet
        self.prompts = prompt_ids(options)
        self.texts: dict[tuple[str, float], dict[str, list[list[int]]]] = {}

    def arms(self, names: list[str]) -> list[str]:
        """Arms that run, the native engine in all its modes."""
        wide = [each for name in names for each in (MODES if name == "native" else [name])]
        return [name for name in wide if self.fleet.has(name)]

    def warm(self, names: list[str], temperature: float, at_once: int) -> None:
        """First runs, in which kernels are compiled; all arms side by side."""
        rows = next(iter(self.prompts.values()))[: max(3, at_once)]
        self.fleet.warm(self.arms(names), WARM_S, do="load", prompts=rows, at_once=at_once,
                        temperature=temperature, tokens=min(32, self.options.tokens))  # fmt: skip

    def speed(self, names: list[str], temperature: float, at_once: int, passes: int) -> None:
        """Cells of each set, the arms in turn; at concurrency 1 their texts are kept."""
        tokens = self.options.tokens
        count = self.options.alone if at_once == 1 else self.options.prompts
        rows = {kind: each[:count] for kind, each in self.prompts.items()}
        load = {"do": "load", "at_once": at_once, "temperature": temperature}
        self.warm(names, temperature, at_once)
        for kind, some in rows.items():
            kept: dict[str, list[dict[str, Any]]] = {}
            prefill: dict[str, float] = {}
            for turn in range(passes):
                arms = self.arms(names)
                for arm in arms[turn % max(1, len(arms)) :] + arms[: turn % max(1, len(arms))]:
                    found = None
                    if self.results.missing([_cell(arm, kind, temperature, at_once)]):
                        found = self.measured(arm, prompts=some, tokens=tokens, **load)
                    if found:
                        kept.setdefault(arm, []).append(found)
            for arm in kept:
                if at_once == 1 and arm not in MODES:
                    found = self.measured(arm, prompts=some, tokens=1, **load)
                    prefill |= {arm: found["seconds"]} if found else {}
            for arm, taken in kept.items():
                values = figures(taken, at_once, prefill.get(arm))
                self.results.cell(_cell(arm, kind, temperature, at_once), values | {"tokens": tokens})
                if at_once == 1:
                    self.texts.setdefault((arm, temperature), {})[kind] = taken[-1]["ids"]
                    self.results.note(
                        "texts", arm=arm, set=kind, temperature=temperature, ids=taken[-1]["ids"]
                    )

    def measured(self, arm: str, **order: Any) -> dict[str, Any] | None:
        """None where no time is left or the arm fails; that is noted."""
        found: list[dict[str, Any]] = []
        if self.results.left > 0 and self.fleet.has(arm):
            guarded(self.results, f"load/{arm}", lambda: found.append(self.fleet.ask(arm, **order)))
        return found[0] if found else None

    def same(self, temperature: float) -> None:
        """What each arm emitted against plain decoding; at T=0 judged token by token by teacher forcing."""
        plain = self.texts.get(("plain", temperature), {})
        prompts = [row for kind in plain for row in self.prompts[kind][: self.options.alone]]
        flat = {
            arm: [row for kind in plain for row in found[kind]]
            for (arm, at), found in self.texts.items()
            if at == temperature and found.keys() == plain.keys()
        }
        for arm in flat:
            if arm != "plain":
                self.results.note(
                    "same", arm=arm, temperature=temperature, **compared(flat["plain"], flat[arm])
                )
        if temperature or not plain:
            return
        self.results.need(20, "near-ties")
        some = [row for kind in plain for row in self.prompts[kind][: max(1, self.options.alone // 4)]]
        found = self.fleet.ask("plain", do="differences", prompts=some, tokens=self.options.tokens)[
            "differences"
        ]
        tau = tau_of(found)
        self.results.cell("tau", {"value": tau, "tokens": len(found)})
        for arm, texts in flat.items():
            pairs = [pair for pair in zip(prompts, texts, strict=True) if pair[1]]
            gaps = self.fleet.ask(
                "plain", do="gaps", prompts=[p for p, _ in pairs], texts=[t for _, t in pairs]
            )
            self.results.cell(f"near_ties/{arm}", judged(gaps["gaps"], tau))

    def captured(self) -> None:
        """Graphs, eager and the control on the same prompts, alone and four at a time."""
        some = [row for each in self.prompts.values() for row in each[:4]]
        base = next(arm for arm in self.options.first if arm.startswith("tree"))
        for at_once in (1, 4):
            load = {
                "do": "load",
                "prompts": some,
                "at_once": at_once,
                "temperature": 0.0,
                "tokens": min(64, self.options.tokens),
            }
            graphs = self.fleet.ask(base, **load)["ids"]
            for variant in ("eager", "control"):
                if self.fleet.has(f"{base}-{variant}"):
                    found = self.fleet.ask(f"{base}-{variant}", **load)
                    rounds = sum(found["rounds"])
                    accept = round(sum(len(ids) - 1 for ids in found["ids"]) / rounds, 3) if rounds else None
                    self.results.cell(f"captured/{base}/{variant}/c{at_once}",
                                      compared(graphs, found["ids"]) | {"accept_length": accept})  # fmt: skip

    def soak(self) -> None:
        base = next(arm for arm in self.options.first if arm.startswith("tree"))
        rows = [row for each in self.prompts.values() for row in each[:16]]
        self.results.need(40, "soak")
        order = {"do": "soak", "prompts": rows}
        # First use of each batch size takes memory once: only what comes after it can be a leak.
        warm = self.fleet.ask(
            base, 120, seconds=self.results.left / 4, steps=self.options.steps // 10, **order
        )
        before, seconds = gpu_used(), self.results.left - 15
        found = self.fleet.ask(base, seconds + 60, seconds=seconds, steps=self.options.steps, **order)
        found |= {"of": self.options.steps, "warm_steps": warm["steps"]}
        found |= {"gpu_before": before, "gpu_after": gpu_used()}
        self.results.cell(f"soak/{base}", found)

    def kill(self) -> None:
        """In a process of its own, the fleet having ended."""
        self.results.need(75, "kill")
        words = [
            sys.executable,
            __file__,
            "kill",
            *_given(self.options),
            "--seconds",
            f"{self.results.left:.0f}",
        ]
        with (self.fleet.folder / "kill.log").open("ab") as log:
            subprocess.run(
                words, stdout=log, stderr=subprocess.STDOUT, timeout=self.results.left + 60, check=True
            )


def _cell(arm: str, kind: str, temperature: float, at_once: int) -> str:
    return f"speed/{arm}/{kind}/T{temperature:g}/c{at_once}"


def everything(options: argparse.Namespace, results: Results) -> None:
    """The most wanted first; each engine and part by itself."""
    with tempfile.TemporaryDirectory(prefix="ddtree-arms-") as scratch:
        fleet = Fleet(options, results, Path(scratch))
        try:
            fleet.start(options.first)
            session = Session(options, results, fleet)
            fleet.await_ready()
            one = options.first
            parts = [
                ("speed", lambda: session.speed(one, 0.0, 1, 3)),
                ("start", lambda: fleet.start(options.then)),
                ("warm sampled", lambda: session.warm(one, 1.0, 1)),
                ("same", lambda: session.same(0.0)),
                ("ready", fleet.await_ready),
                ("captured", session.captured),
                ("end", lambda: fleet.end([name for name in options.then if "-" in name])),
                ("more", lambda: session.speed([n for n in options.then if "-" not in n], 0.0, 1, 2)),
                ("load 8", lambda: session.speed([*one, "chain"], 0.0, 8, 2)),
                ("load 32", lambda: session.speed([*one, "chain"], 0.0, 32, 2)),
                ("sampled", lambda: session.speed([*one, "chain"], 1.0, 1, 2)),
                ("same sampled", lambda: session.same(1.0)),
                ("soak", session.soak),
                ("end all", fleet.end),
                ("kill", session.kill),
            ]
            for name, part in parts:
                began = time.monotonic()
                guarded(results, name, part)
                results.note("part", part=name, took_s=round(time.monotonic() - began, 1))
                fleet.keep_logs()
        finally:
            fleet.end()
            fleet.keep_logs()


def soak(options: argparse.Namespace, results: Results) -> None:
    """The first engine with trees alone on the GPU."""
    with tempfile.TemporaryDirectory(prefix="ddtree-arms-") as scratch:
        fleet = Fleet(options, results, Path(scratch))
        try:
            fleet.start([next(arm for arm in options.first if arm.startswith("tree"))])
            session = Session(options, results, fleet)
            fleet.await_ready()
            guarded(results, "soak", session.soak)
        finally:
            fleet.end()
            fleet.keep_logs()


def check(options: argparse.Namespace, results: Results) -> None:
    """What needs no GPU: the pair, the prompts, every arm's arguments through SGLang's own parser."""
    from runtime.drafter import read_drafter_config

    layers = int(json.loads((options.target / "config.json").read_text())["num_hidden_layers"])
    drafter = read_drafter_config(options.drafter)
    if max(drafter.target_layer_ids) >= layers - 1 or drafter.num_target_layers != layers:
        raise SystemExit(f"{options.drafter} taps {list(drafter.target_layer_ids)}; SGLang gives layers 0 to "
                         f"{layers - 2} of {options.target}")  # fmt: skip
    longest = max(len(row) for rows in prompt_ids(options).values() for row in rows)
    if longest + options.tokens > options.context:
        raise SystemExit(
            f"a prompt of {longest} tokens and {options.tokens} more exceed --context {options.context}"
        )
    with tempfile.TemporaryDirectory(prefix="ddtree-arms-") as scratch:
        for arm in (name for name in (*options.first, *options.then) if name != "native"):
            arguments, wanted = arm_arguments(arm, options)
            environment = variables(wanted, sglang_path(options.site, Path(scratch)))
            words = [options.python or sys.executable, "-m", "runtime.sglang_child", "check"]
            done = subprocess.run(
                words,
                input=json.dumps(arguments),
                capture_output=True,
                text=True,
                env=environment,
                cwd=scratch,
            )
            results.note("arguments", arm=arm, told=done.stdout or done.stderr[-600:])


def kill(options: argparse.Namespace, results: Results) -> None:
    if results.missing(["kill"]):
        results.cell("kill", asyncio.run(_killed(options)))


async def _killed(options: argparse.Namespace) -> dict[str, Any]:
    """This process is the product's: SGLang's processes are children of it."""
    import psutil

    from runtime.config import RuntimeConfig
    from runtime.interface import GenerateRequest, SamplingParams
    from runtime.local import LocalRuntime

    layouts = Path(os.environ["XDG_CONFIG_HOME"]) / "ddtree" / "layouts"
    layouts.mkdir(parents=True)
    arguments = "\n".join(
        f"{name.replace('_', '-')} = {json.dumps(value)}" for name, value in options.set.items()
    )
    (layouts / "measured.toml").write_text(
        'name = "measured"\ntitle = "few graphs"\nengine = "sglang"\n[arguments]\nmem-fraction-static = 0.4\n'
        f"cuda-graph-max-bs-decode = 4\ndisable-prefill-cuda-graph = true\n{arguments}\n"
    )
    used = [gpu_used()]
    runtime = LocalRuntime(RuntimeConfig(
        model=str(options.target), drafter=str(options.drafter), engine="sglang", layout="measured", mode="tree",
        sglang_python=str(options.python or sys.executable), tree_budget=31, max_seq_len=options.context - 1,
        max_concurrency=4, device=options.device, dtype="bfloat16", prefix_reuse=False,
    ))  # fmt: skip
    await runtime.wait_ready()
    prompt = next(iter(prompt_ids(options).values()))[0]
    sampled = SamplingParams(max_tokens=min(400, options.context // 2), temperature=0.0, ignore_eos=True)
    asked = GenerateRequest(prompt_token_ids=tuple(prompt), sampling=sampled)
    alone = [event async for event in runtime.generate(asked)][-1]
    used.append(gpu_used())
    events: list[Any] = []
    async for event in runtime.generate(asked):
        events.append(event)
        if len(events) == 4:
            children = psutil.Process().children(recursive=True)
            os.kill(next(c for c in children if "scheduler" in " ".join(c.cmdline())).pid, signal.SIGKILL)
    end, status = events[-1], await runtime.status()
    used.append(gpu_used())
    await runtime.aclose()
    time.sleep(2)
    return {"reason": end.reason, "same_text": end.token_ids == alone.token_ids, "tokens": len(end.token_ids),
            "continued": end.stats.continued, "state": status.state.value, "errors": list(status.errors),
            "gpu_mib_before_serving_after_closed": [*used, gpu_used()]}  # fmt: skip


def _given(options: argparse.Namespace) -> list[str]:
    """The options of this call for another one of this script."""
    given = {"target": options.target, "drafter": options.drafter, "out": options.out, "site": options.site,
             "device": options.device, "python": options.python, "context": options.context, "prompts": 1}  # fmt: skip
    words = [f"--{name}={value}" for name, value in given.items() if value not in (None, "")]
    words += [f"--set={name}={json.dumps(value)}" for name, value in options.set.items()]
    return [*words, *(["--sets", *map(str, options.sets)] if options.sets else [])]


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

    def listed(words: str) -> list[str]:
        return [word for word in words.split(",") if word]

    option = parser.add_argument
    option("part", choices=("all", "check", "soak", "kill"))
    option("--target", type=Path, required=True, help="Hugging Face folder (ddtree model convert)")
    option("--drafter", type=Path, default=ROOT / "runtime/drafters/smollm2-135m-instruct")
    option("--out", type=Path, help="folder of the results")
    option("--earlier", type=Path, nargs="*", default=[], help="results of calls before this one")
    option("--seconds", type=float, default=420.0, help="nothing begins after these")
    option("--start-seconds", type=float, default=120.0, help="an engine that takes longer is given up")
    option("--site", type=Path, help="folder with SGLang, for the processes that need it")
    option("--python", help="Python of an environment with SGLang, where this one has none")
    option("--sets", type=Path, nargs="*", default=[], help="prompt files, instead of the bundled prompts")
    option("--first", type=listed, default=listed(FIRST), help="arms that are measured in every part")
    option("--then", type=listed, default=listed(THEN), help="arms that come up after the first ones' speed")
    option("--alone", type=int, default=16, help="prompts of each set at concurrency 1")
    option("--prompts", type=int, default=64, help="at most so many of each set")
    option("--prompt-tokens", type=int, default=768, help="longer prompts keep their end")
    option("--tokens", type=int, default=128)
    option("--context", type=int, default=1024)
    option("--steps", type=int, default=5000)
    option("--device", default="cuda", help="of the native engine, and of the product in kill")
    option("--set", type=_pair_of, action="append", default=[], metavar="ARGUMENT=VALUE",
           help="another engine argument of SGLang")  # fmt: skip
    options = parser.parse_args(words)
    options.set = dict(options.set)
    return options


def main() -> None:
    options = options_of()
    with tempfile.TemporaryDirectory(prefix="ddtree-home-") as home:
        os.environ |= {f"XDG_{kind}_HOME": home for kind in ("CONFIG", "DATA", "STATE", "CACHE")}
        borrow(options.site, Path(home))
        if options.part == "kill":
            # Of SGLang's processes; this one has its own path already.
            paths = [str(options.site or ""), os.environ.get("PYTHONPATH", "")]
            os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
        results = Results(options.out, options.earlier, options.seconds)
        {"all": everything, "check": check, "soak": soak, "kill": kill}[options.part](options, results)


if __name__ == "__main__":
    main()
