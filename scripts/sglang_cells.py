"""What the parts of `sglang_gpu.py` share: an arm's arguments and environment, prompts, figures, results."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
BASE = {
    "skip_tokenizer_init": True,
    "attention_backend": "triton",
    "sampling_backend": "pytorch",
    "grammar_backend": "none",
    "dtype": "bfloat16",
    # Many engines share the GPU and come up at once: the slots are counted, the share only has to be large enough.
    "mem_fraction_static": 0.7,
    "max_total_tokens": 49152,
    "max_running_requests": 32,
    "cuda_graph_max_bs_decode": 32,
    "disable_prefill_cuda_graph": True,
    "disable_radix_cache": True,
    "random_seed": 0,
    "log_level": "info",
}
NATIVE = {
    "dtype": "bfloat16",
    "max_concurrency": 32,
    "max_seq_len": 1024,
    "kv_slots": 40_000,
    "prefill_chunk": 2048,
    "max_queue": 10_000,
    "prefix_reuse": False,
    "max_tree_budget": 63,
}
"""As `gpu_bench.py` runs it."""
CONTROL = """
def register():
    from runtime import sglang_verify
    fill = sglang_verify.MaskBuffer.fill
    sglang_verify.MaskBuffer.fill = lambda self, mask, committed: fill(self, mask | True, committed)
"""
"""A second plugin for the negative control: inside the block, everything is visible."""
BORROWED = ("pydantic", "pydantic_core", "annotated_types", "typing_inspection")
"""What the native engine needs and a machine may have with SGLang's packages only."""
SHOWN = 400
"""Characters of a line that are shown; the file has all."""


class NoTime(RuntimeError):
    """Nothing more may begin."""


class Results:
    """Lines of JSON in `FOLDER/sglang.jsonl` and on stdout, each on disk before the next cell begins.

    A cell that is there already, in that file or in one of `earlier` runs, is not measured again.
    """

    def __init__(self, folder: Path | None, earlier: list[Path], seconds: float) -> None:
        self._file = None
        self._began = time.monotonic()
        self._end = self._began + seconds
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
        line = json.dumps({"kind": kind, "at_s": round(time.monotonic() - self._began, 1), **values})
        print(line if len(line) <= SHOWN else f"{line[:SHOWN]}...", flush=True)
        if self._file:
            self._file.write(line + "\n")
            self._file.flush()
            os.fsync(self._file.fileno())

    def cell(self, name: str, values: dict[str, Any]) -> None:
        self.done[name] = {"cell": name, **values}
        self.note("cell", **self.done[name])

    def missing(self, names: list[str]) -> list[str]:
        return [name for name in names if name not in self.done]

    @property
    def left(self) -> float:
        """Seconds until nothing more may begin."""
        return self._end - time.monotonic()

    def need(self, seconds: float, what: str) -> None:
        """Raises NoTime where fewer are left."""
        if self.left < seconds:
            raise NoTime(f"{what}: {max(0.0, self.left):.0f} s left, about {seconds:.0f} needed")


def borrow(site: Path | None, folder: Path) -> None:
    """Puts what this Python lacks for the native engine on its path and its children's: links into `site`."""
    with contextlib.suppress(ImportError):
        import pydantic  # noqa: F401 - asked for, not used

        return
    if site is None:
        raise SystemExit(
            "pydantic is not installed here; install it, or name a folder that has it with --site"
        )
    borrowed = folder / "borrowed"
    borrowed.mkdir(parents=True, exist_ok=True)
    for source in site.iterdir():
        if source.name.split("-")[0] in BORROWED and not (borrowed / source.name).exists():
            (borrowed / source.name).symlink_to(source.resolve())
    sys.path.insert(0, str(borrowed))
    os.environ["PYTHONPATH"] = os.pathsep.join([str(borrowed), *filter(None, [os.environ.get("PYTHONPATH")])])


def sglang_path(site: Path | None, folder: Path, control: bool = False) -> str:
    """PYTHONPATH of a process with SGLang (`site`, where this Python has none), the plugin and, if so, the control."""
    from runtime.sglang_host import plugin_folder

    paths = [str(plugin_folder(folder))]
    if control:
        information = folder / "control" / "ddtree_negative_control-1.dist-info"
        information.mkdir(parents=True, exist_ok=True)
        (information.parent / "ddtree_negative_control.py").write_text(CONTROL)
        (information / "METADATA").write_text(
            "Metadata-Version: 2.1\nName: ddtree-negative-control\nVersion: 1\n"
        )
        (information / "entry_points.txt").write_text(
            "[sglang.srt.plugins]\ncontrol = ddtree_negative_control:register\n"
        )
        paths.append(str(information.parent))
    return os.pathsep.join(
        [*paths, *([str(site)] if site else []), *filter(None, [os.environ.get("PYTHONPATH")])]
    )


def arm_arguments(arm: str, options: argparse.Namespace) -> tuple[dict[str, Any], dict[str, str]]:
    """Engine arguments and variables of an arm: plain, dflash, chain, or treeN with N rows of a verify pass.

    After a dash: `eager`, without graphs; `control`, with the mask of the negative control.
    """
    arm, _, variant = arm.partition("-")
    arguments = {**BASE, "model_path": str(options.target), "context_length": options.context, **options.set}
    if variant:
        arguments["max_running_requests"] = arguments["cuda_graph_max_bs_decode"] = 8
    if variant == "eager":
        arguments["disable_cuda_graph"] = True
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


def variables(wanted: dict[str, str], path: str | None) -> dict[str, str]:
    """The environment of an arm's processes."""
    mine = ("DDTREE_SGLANG_SEEDED", "DDTREE_SGLANG_MODE")
    kept = {name: value for name, value in os.environ.items() if name not in mine}
    return kept | wanted | {"PYTHONUNBUFFERED": "1"} | ({"PYTHONPATH": path} if path else {})


def prompt_ids(options: argparse.Namespace) -> dict[str, list[list[int]]]:
    """The first prompts of each set, chat template applied: `--sets` files, else the bundled ones."""
    from runtime.prompt_sets import bundled_prompts, read_prompts
    from runtime.tokenizer import ChatTokenizer

    tokenizer = ChatTokenizer.from_folder(options.target)
    if options.sets:
        sets = {path.stem: read_prompts(path, options.prompts) for path in options.sets}
    else:
        sets = bundled_prompts(options.prompts)
    found = {}
    for name, prompts in sets.items():
        turns = [each.get("messages") or [{"role": "user", "content": each["prompt"]}] for each in prompts]
        rows = [list(tokenizer.apply_chat_template([dict(turn) for turn in each])) for each in turns]
        found[name] = [row[-options.prompt_tokens :] for row in rows]
    return found


def figures(passes: list[dict[str, Any]], at_once: int, prefill_s: float | None) -> dict[str, Any]:
    """Of one arm on one set: medians over its passes, accept length over all of them.

    tok/s: all tokens over the time from the first submission to the last token. ms a round: without prefill, and for
    one request at a time; the native engine measures its own rounds.
    """
    speeds = [sum(map(len, each["ids"])) / each["seconds"] for each in passes]
    rounds = sum(sum(each["rounds"]) for each in passes)
    decoded = sum(len(ids) - 1 for each in passes for ids in each["ids"])
    told = [each["ms_round"] for each in passes if "ms_round" in each]
    if not told and at_once == 1 and prefill_s is not None and rounds:
        told = [1000 * (each["seconds"] - prefill_s) / sum(each["rounds"]) for each in passes]
    return {
        "tok_s_median": round(statistics.median(speeds), 1),
        "tok_s_spread": [round(min(speeds), 1), round(max(speeds), 1)],
        "accept_length": round(decoded / rounds, 3) if rounds else None,
        "ms_round": round(statistics.median(told), 3) if told else None,
        "prompts": len(passes[0]["ids"]),
        "repeats": len(passes),
        "n": sum(len(each["ids"]) for each in passes),
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
    return {"tokens": len(gaps), "tau": round(tau, 4), "ties": ties, "ties_per_100": round(100 * ties / len(gaps), 3),
            "divergences": over, "largest": round(max(gaps), 4)}  # fmt: skip


def tau_of(differences: list[float]) -> float:
    """Twice the 99.9th percentile of how far the same position is apart between one row and many rows."""
    ordered = sorted(differences)
    return 2 * ordered[min(len(ordered) - 1, int(0.999 * len(ordered)))]


def gpu_used() -> int | None:
    """MiB in use on the first GPU; None where nothing tells."""
    asked = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    with contextlib.suppress(OSError, ValueError, IndexError, subprocess.SubprocessError):
        return int(subprocess.run(asked, capture_output=True, text=True, check=True).stdout.split()[0])
    return None


def guarded(results: Results, name: str, part: Callable[[], object]) -> None:
    """Runs a part; what it fails of is noted and ends no other part."""
    try:
        part()
    except NoTime as late:
        results.note("no_time", part=name, why=str(late))
    except Exception as failure:
        words = f"{type(failure).__name__}: {failure}"
        results.note("failed", part=name, why=words[-1500:], where=traceback.format_exc().splitlines()[-4:])
