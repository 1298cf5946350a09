"""`ddtree bench --url` against a public benchmark client (guidellm) on the same server: `docs/bench-compare.md`.

Both clients send the same prompts in closed loop, in turn, several times. Without --url the server is a scripted one
whose token times are fixed. Prints rates and medians of times of both with their ratio; exits 1 where one differs by
more than 5 %.

    python scripts/client_check.py --guidellm VENV/bin/guidellm --tokenizer FOLDER [--url URL] [--users N]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

from runtime.prompt_sets import mixed_prompts

ROOT = Path(__file__).parent.parent
TOLERANCE = 0.05
REPETITIONS = 3
FIGURES = ("requests/s", "tokens/s", "TTFT ms", "ms/token", "end to end ms")


def ours(url: str, prompts: Path, users: int, requests: int, tokens: int) -> dict[str, float]:
    """The figures of `ddtree bench`."""
    options = [
        "--url",
        url,
        "--prompts",
        str(prompts),
        "--concurrency",
        str(users),
        "--requests",
        str(requests),
    ]
    options += ["--max-tokens", str(tokens), "--ignore-eos", "--warm-up", "2", "--json"]
    done = subprocess.run(
        [sys.executable, "-m", "console", "bench", *options], cwd=ROOT, capture_output=True, text=True
    )
    if done.returncode:
        sys.exit(f"ddtree bench failed: {done.stderr.strip()}")
    found = json.loads(done.stdout)["results"][0]
    return {
        "requests/s": found["request_rate"],
        "tokens/s": found["total_tok_s"],
        "TTFT ms": 1e3 * found["ttft_s"]["p50"],
        "ms/token": 1e3 * found["tpot_s"]["p50"],
        "end to end ms": 1e3 * found["e2e_s"]["p50"],
    }


def theirs(given: argparse.Namespace, url: str, prompts: Path, requests: int) -> dict[str, float]:
    """The figures of guidellm's report for the same load."""
    report = prompts.with_name("guidellm.json")
    command = [str(given.guidellm), "benchmark", "run", "--target", url, "--rate-type", "concurrent"]
    command += ["--rate", str(given.users), "--max-requests", str(requests), "--data", str(prompts)]
    command += [
        "--data-args",
        json.dumps({"prompt_column": "prompt", "output_tokens_count_column": "tokens"}),
    ]
    command += ["--processor", str(given.tokenizer), "--output-path", str(report)]
    command += ["--disable-progress", "--disable-console-outputs"]
    env = {**os.environ, "GUIDELLM__PREFERRED_ROUTE": "chat_completions", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"guidellm failed: {done.stderr.strip()[-2000:]}")
    (found,) = json.loads(report.read_text(encoding="utf-8"))["benchmarks"]
    metrics: dict[str, Any] = found["metrics"]

    def told(name: str, what: str = "median") -> float:
        return float(metrics[name]["successful"][what])

    return {
        "requests/s": told("requests_per_second", "mean"),
        "tokens/s": told("output_tokens_per_second", "mean"),
        "TTFT ms": told("time_to_first_token_ms"),
        "ms/token": told("inter_token_latency_ms"),
        "end to end ms": 1e3 * told("request_latency"),
    }


def scripted(tokens: int) -> str:
    """The address of a server in this process whose tokens come at fixed times; it ends with the process."""
    sys.path.insert(0, str(ROOT / "tests"))
    from scripted_server import Script, serve_script

    started = threading.Event()
    address: list[int] = []

    async def serve() -> None:
        server = await serve_script(Script(first_s=0.2, next_s=0.02, tokens=tokens))
        address.append(server.sockets[0].getsockname()[1])
        started.set()
        await server.serve_forever()

    threading.Thread(target=lambda: asyncio.run(serve()), daemon=True).start()
    started.wait()
    return f"http://127.0.0.1:{address[0]}"


def main() -> int:
    parser = argparse.ArgumentParser(description="Compare ddtree bench with guidellm.")
    parser.add_argument(
        "--guidellm", type=Path, required=True, help="its command, in an environment of its own"
    )
    parser.add_argument("--tokenizer", type=Path, required=True, help="a Hugging Face tokenizer folder")
    parser.add_argument("--url", help="the server; default: a scripted one")
    parser.add_argument("--users", type=int, default=1)
    parser.add_argument("--requests", type=int, default=24)
    parser.add_argument("--tokens", type=int, default=48)
    given = parser.parse_args()
    url = given.url or scripted(given.tokens)
    rows: list[tuple[dict[str, float], dict[str, float]]] = []
    with tempfile.TemporaryDirectory() as folder:
        prompts = Path(folder) / "prompts.jsonl"
        drawn = mixed_prompts(32)[: given.requests]
        lines = [
            json.dumps({"prompt": each["prompt"], "tokens": given.tokens})
            for each in drawn
            if "prompt" in each
        ]
        prompts.write_text("\n".join(lines) + "\n", encoding="utf-8")
        for number in range(REPETITIONS):
            mine = ours(url, prompts, given.users, len(lines), given.tokens)
            other = theirs(given, url, prompts, len(lines))
            rows.append((mine, other))
            print(f"      repetition {number + 1} of {REPETITIONS}", file=sys.stderr, flush=True)
    print(f"{'figure':<16}{'ddtree bench':>14}{'guidellm':>12}{'ratio':>8}   {given.users} users, {url}")
    worst = 0.0
    result = {}
    for name in FIGURES:
        mine_s, other_s = (statistics.median(row[side][name] for row in rows) for side in (0, 1))
        ratio = statistics.median(row[0][name] / row[1][name] for row in rows)
        worst = max(worst, abs(ratio - 1))
        result[name] = {"ddtree": mine_s, "guidellm": other_s, "ratio": ratio}
        print(f"{name:<16}{mine_s:>14.2f}{other_s:>12.2f}{ratio:>8.3f}")
    passed = worst <= TOLERANCE
    print(f"{'ok  ' if passed else 'FAIL'}  largest difference {worst:.1%}, allowed {TOLERANCE:.0%}")
    print(
        json.dumps(
            {"schema": 1, "check": "client", "passed": passed, "figures": result, "users": given.users}
        )
    )
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
