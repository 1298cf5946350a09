"""Two GPUs of one host: links, parity of layouts, speed, flips under a stream, a killed rank; dry-run on a CPU.

    PYTHONPATH=. python scripts/gpu_two.py all --out FILE.jsonl --model GGUF [--seconds 480]
    PYTHONPATH=. python scripts/gpu_two.py links|parity|speed|flip|kill --out FILE.jsonl [--device cpu --tiny]
    PYTHONPATH=. python scripts/gpu_two.py evidence FILE.jsonl [--into FOLDER]

Each finding is a JSON line, flushed at once, so that a run which is cut short keeps what it has, and one line on the
terminal. Random pairs in the sizes of an 8B model and of a mixture of small experts are made where there is room.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import tempfile
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

STEPS = ("links", "speed", "parity", "flip", "kill")
SHARES = {"links": 0.12, "speed": 0.45, "parity": 0.75, "flip": 0.9, "kill": 1.0}
"""Of the time of `all`, when each step has to end; what one leaves the next one has."""
GIB = 1 << 30
SPARE = 256 << 20
SPARE_RESIDENT = 192 << 20
"""Memory a change may leave: of a GPU, and of processes on a CPU."""


@dataclass
class Lines:
    """Where findings go."""

    path: Path
    what: str = ""

    def __call__(self, **fields: Any) -> None:
        line = {"what": self.what, **fields}
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        said = " ".join(f"{name}={_short(value)}" for name, value in fields.items() if value is not None)
        print(f"{self.what}: {said}", flush=True)


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)[:110]


@dataclass(frozen=True)
class Clock:
    """Time that is left to a step."""

    end: float

    def left(self) -> float:
        return self.end - time.monotonic()


def about(device: str, dtype: str) -> dict[str, Any]:
    """Machine and versions."""
    import torch
    import transformers

    found: dict[str, Any] = {
        "kind": "about", "device": device, "dtype": dtype, "gpus": [],
        "measured_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        "commit": os.environ.get("DDTREE_COMMIT"),
    }  # fmt: skip
    if device == "cuda":
        import triton

        found["gpus"] = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
        found["versions"] |= {
            "triton": triton.__version__,
            "nccl": ".".join(map(str, torch.cuda.nccl.version())),
        }
    return found


def run_step(step: str, args: argparse.Namespace, lines: Lines, clock: Clock) -> None:
    lines.what = step
    if step == "links":
        from gpu_links import run_links

        run_links(args.device, args.most, lines)
        return
    import torch
    from gpu_layouts import Engines, config_of, parity, settings_for
    from gpu_random import real_pair
    from gpu_speed import speed, speed_groups

    device = torch.device(args.device)
    settings = settings_for(args.device, args.dtype, args.tiny)
    if step in ("flip", "kill"):
        from gpu_flip import flips, kills, with_runtime

        pair = random_named(args.dense, args) if args.tiny else real_pair(args.model, args.drafter)
        changes = {
            "rebuild_drain": 0.0, "rebuild_ahead": False, "max_seq_len": 8192, "max_concurrency": 2, "kv_slots": None,
            "mode": "tree", "tree_budget": 15,
        }  # fmt: skip
        spare = SPARE if device.type == "cuda" else SPARE_RESIDENT

        async def work(runtime: Any) -> None:
            if step == "flip":
                await flips(runtime, ("tp2", "pp2"), args.stream, spare, lines)
            else:
                await kills(runtime, (("tp2", 1), ("pp2", 0)), args.stream, spare, lines)

        limited = asyncio.wait_for(
            with_runtime(config_of(pair, settings, **changes), work), max(clock.left(), 60)
        )
        asyncio.run(limited)
        return
    engines = Engines(settings, lines)
    try:
        made = {
            "default": lambda: (
                random_named(args.dense, args) if args.tiny else real_pair(args.model, args.drafter)
            )
        }
        made |= {"moe": lambda: random_named(args.moe, args), "dense": lambda: random_named(args.dense, args)}
        if step == "parity":
            for name in args.pairs:
                parity(made[name](), engines, args.tokens, tuple(args.budgets), clock.left, lines)
        else:
            speed(speed_groups(made), engines, args.cell, args.n, clock.left, lines)
    finally:
        engines.close()


def random_named(name: str, args: argparse.Namespace) -> Any:
    """A random pair, in the folder of all of them."""
    import torch
    from gpu_random import random_pair, roomy_folder

    root = args.models or roomy_folder(32 * GIB if args.device == "cuda" else GIB)
    return random_pair(name, root, torch.device(args.device))


def parsed(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("step", choices=("all", *STEPS))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=480.0, help="starts nothing after so many seconds")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default=None)
    parser.add_argument(
        "--model", default="smollm2-135m-instruct", help="the default pair's target, or its GGUF"
    )
    parser.add_argument("--drafter", default=None)
    parser.add_argument("--dense", default=None, help="a name of gpu_random.DIMENSIONS")
    parser.add_argument("--moe", default=None, help="the same, of a mixture of experts")
    parser.add_argument("--models", type=Path, default=None, help="folder for random pairs")
    parser.add_argument(
        "--tiny", action="store_true", help="dry run: random pairs of some kilobytes everywhere"
    )
    parser.add_argument("--most", type=int, default=64 << 20, help="links: largest message, bytes")
    parser.add_argument("--tokens", type=int, default=32, help="parity: tokens of a text")
    parser.add_argument("--budgets", type=int, nargs="+", default=[15, 31, 63], help="parity: trees")
    pairs = ("default", "moe", "dense")
    parser.add_argument("--pairs", nargs="+", choices=pairs, default=pairs, help="parity: which")
    parser.add_argument("--cell", type=float, default=1.8, help="speed: seconds of a cell")
    parser.add_argument(
        "--n", type=int, default=12, help="speed: repetitions of a cell, each of its own prompts"
    )
    parser.add_argument("--stream", type=int, default=7900, help="flip, kill: most tokens of the stream")
    args = parser.parse_args(argv)
    args.dense = args.dense or ("tiny-dense" if args.tiny else "qwen3-8b")
    args.moe = args.moe or ("tiny-moe" if args.tiny else "random-moe-2b")
    args.dtype = args.dtype or ("float32" if args.device == "cpu" else "bfloat16")
    if args.device == "cuda" and os.environ.get("NCCL_NVLS_ENABLE") != "0":
        parser.error("NCCL_NVLS_ENABLE is not 0; set it, as NVLink multicast must stay off on a shared host")
    return args


def main() -> None:
    if sys.argv[1:2] == ["evidence"]:
        from gpu_evidence import main as evidence

        evidence(sys.argv[2:])
        return
    args = parsed()
    for kind in ("CONFIG", "DATA", "STATE"):  # so that nothing of a user's is read or written
        os.environ.setdefault(f"XDG_{kind}_HOME", f"{tempfile.gettempdir()}/ddtree-two-xdg/{kind.lower()}")
    began = time.monotonic()
    lines = Lines(args.out, args.step)
    lines(**about(args.device, args.dtype))
    steps = STEPS if args.step == "all" else (args.step,)
    for step in steps:
        share = SHARES[step] if args.step == "all" else 1.0
        clock = Clock(began + share * args.seconds)
        if began + args.seconds < time.monotonic():
            lines.what = step
            lines(kind="stopped")
            continue
        at = time.monotonic()
        try:
            run_step(step, args, lines, clock)
        except Exception as error:  # the steps after it are still worth their time
            traceback.print_exc()
            lines(kind="failed", error=f"{type(error).__name__}: {error}")
        lines(kind="took", s=round(time.monotonic() - at, 1))


if __name__ == "__main__":
    main()
