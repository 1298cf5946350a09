"""What a round costs on this GPU, without any model file: weights are random, of the dimensions asked for.

    python scripts/gpu_steps.py --out FILE.jsonl [--shapes default 8b] [--contexts 1024 16384] [--batches 1 8]
    python scripts/gpu_steps.py --out FILE.jsonl --shapes 8b --gaps 256 512 1024 [--prompt-tokens 8192]

One JSON line a cell, flushed at once: milliseconds of a whole round (median of replays, one by one) for each tree size,
kernels in it, the floor by bytes (target weights without the embedding table, read once, and the keys and values read,
over device copy bandwidth measured here, reads and writes counted) and the ratio to it. With `--filtered` the rounds
sample under top-k, top-p and min-p. `--gaps CHUNK ...` measures instead how long four running requests wait between
rounds while a long prompt is computed, with each `prefill_chunk`.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

import torch
import transformers
import triton
from decoding import gaps
from gpu_random import DIMENSIONS, Dimensions
from tokenizers import Tokenizer, decoders
from tokenizers import models as tokenizer_models

from runtime.admission import Limits
from runtime.config import RuntimeConfig, validate
from runtime.drafter import Drafter, DrafterConfig
from runtime.engine import Engine
from runtime.fused import FusedDrafter
from runtime.gpu_device import RoundDevice
from runtime.gpu_graphs import GraphRounds
from runtime.gpu_pass import MOST_ROWS
from runtime.gpu_round import GpuRound, Shape
from runtime.kv_cache import KVCache
from runtime.loader import Loaded
from runtime.models import Checkpoint
from runtime.round import Models
from runtime.target import TargetModel
from runtime.tokenizer import ChatTokenizer

GPU = torch.device("cuda" if torch.cuda.is_available() else "cpu")
REPLAYS = 40


SHAPES = {
    "default": Dimensions(
        "llama", 576, 1536, 30, 9, 3, 64, 49152, (1, 10, 18, 27), draft_layers=4, block=8, tied=True
    ),
    "8b": DIMENSIONS["qwen3-8b"],
    "tiny": Dimensions("llama", 64, 96, 2, 2, 1, 16, 288, (0, 1), draft_layers=1, block=4, tied=True),
}
"""`tiny` is for a dry run of `--gaps` without a GPU, with rounds launched from the host."""


class RandomCheckpoint(Checkpoint):
    """Random weights on the GPU under the names of a real folder."""

    def load_state(self, wanted: Any = None) -> dict[str, torch.Tensor]:
        with torch.device("meta"):
            config = transformers.AutoConfig.for_model(
                **{k: v for k, v in self.config.items() if k != "architectures"}
            )
            names = getattr(transformers, self.config["architectures"][0])(config).state_dict()
        made = {}
        for name, value in names.items():
            if name == "lm_head.weight" and config.tie_word_embeddings:
                continue
            fill = torch.ones if value.dim() == 1 else torch.randn
            made[name] = fill(value.shape, device=GPU, dtype=torch.bfloat16) * (
                1.0 if value.dim() == 1 else 0.02
            )
        return made


def make_models(size: Dimensions, slots: int, dtype: torch.dtype = torch.bfloat16) -> Models:
    """A random pair with slots."""
    checkpoint = RandomCheckpoint("random", Path("random"), size.config(), (0,))
    target = TargetModel(checkpoint, taps=size.taps, dtype=dtype, device=GPU)
    drafting = DrafterConfig.from_dict(size.drafter_config(), "random")
    with GPU:
        drafter = Drafter(drafting).to(dtype).requires_grad_(False)
    cache = KVCache(target.geometry, drafting.geometry(dtype), slots, GPU, scratch=MOST_ROWS)
    for pool in (cache.target, cache.drafter):
        pool.keys.normal_()
        pool.values.normal_()
    return Models(target, FusedDrafter(drafter, type(target.decoder.head)), cache, size.block)


def make_engine(size: Dimensions, positions: int, running: int) -> Engine:
    """An engine over a random pair with `running` sequences of `positions` tokens at once; its text means nothing."""
    budget = 31 if GPU.type == "cuda" else 7
    reserve = budget + 1
    slots = (running + 1) * (positions + reserve)
    models = make_models(size, slots, torch.bfloat16 if GPU.type == "cuda" else torch.float32)
    words = [f"w{i}" for i in range(size.vocab)]
    tokenizer = Tokenizer(tokenizer_models.WordLevel({word: i for i, word in enumerate(words)}, "w0"))
    tokenizer.decoder = decoders.ByteLevel()
    graphs = None
    if GPU.type == "cuda":
        device = RoundDevice(models, running + 1, positions + reserve + MOST_ROWS)
        graphs = GraphRounds(models, device, running + 1)
        graphs.prepare(lambda _share: None)
    loaded = Loaded(
        models=models, graphs=graphs, rounds="rounds replayed as CUDA graphs" if graphs else "launched from the host",
        checkpoint=Checkpoint("random", Path("random"), {"vocab_size": size.vocab}, (0,)),
        tokenizer=ChatTokenizer(tokenizer, None, {}, False, frozenset(), tuple(word.encode() for word in words)),
        limits=Limits(positions, budget, slots, reserve, size.vocab, frozenset()),
        drafter_path=None, no_drafter_reason=None, linear="plain", threads=1, target_digest=None,
    )  # fmt: skip
    config: RuntimeConfig = validate(
        {"max_concurrency": running + 1, "prefix_reuse": False, "max_seq_len": positions}
    )
    return Engine(loaded, config, budget)


def measure_gaps(
    name: str, chunks: list[int], prompt_tokens: int, passes: int, out: Any, about: dict[str, str]
) -> None:
    """Cells of one pair of dimensions: gaps between rounds of running requests beside a prompt."""
    engine = make_engine(SHAPES[name], max(2 * prompt_tokens, 4096), 4)
    for chunk in chunks:
        engine.config = engine.config.changed({"prefill_chunk": chunk})
        for mode, budget in (("off", 0), ("tree", engine.default_budget)):
            cell = {"shape": name, **gaps(engine, prompt_tokens, mode, budget, passes), **about}
            print(json.dumps(cell), flush=True)
            print(json.dumps(cell), file=out, flush=True)


def copy_bandwidth() -> float:
    """Device-to-device copy, bytes per second, reads and writes counted."""
    source = torch.empty(4 << 30, dtype=torch.uint8, device=GPU)
    target = torch.empty_like(source)
    seconds = [timed(lambda: target.copy_(source)) for _ in range(8)]
    return 2 * source.numel() / statistics.median(seconds)


def timed(call: Any) -> float:
    """Seconds on the device, by events."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3


def weight_bytes(models: Models) -> int:
    """Bytes of the target's weights that a step reads: all but the embedding table, a tied head once."""
    decoder = models.target.decoder
    layers = sum(
        linear.weight.numel()
        for layer in decoder.stack.layers
        for linear in (layer.qkv, layer.o, layer.gate_up, layer.down)
    )
    return (layers + decoder.head.weight.numel()) * 2


def set_state(round_: GpuRound, batch: int, context: int, budget: int, stride: int) -> None:
    """`batch` sequences of `context` committed tokens, with room for ever."""
    rows = torch.arange(batch, device=GPU, dtype=torch.int32)
    round_.state.zero_()
    round_.root[:batch] = 7
    round_.committed[:batch] = context
    round_.slot_start[:batch] = rows * stride
    round_.remaining[:batch] = 1_000_000
    round_.budget[:batch] = budget
    round_.active[:batch] = 1
    round_.block_rows[:batch] = round_.block
    round_.top_k[:batch] = 50
    round_.stops.fill_(-1)


def kernels_of(call: Any) -> dict[str, int]:
    """Kernels by name that one call runs."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        call()
        torch.cuda.synchronize()
    counts: dict[str, int] = {}
    times: dict[str, float] = {}
    for event in seen.events():
        counts[event.name] = counts.get(event.name, 0) + 1
        times[event.name] = times.get(event.name, 0.0) + event.device_time
    return {name: [counts[name], round(times[name], 1)] for name in sorted(counts, key=lambda n: -times[n])}


def measure(
    name: str, contexts: list[int], sizes: list[int], out: Any, rows_list: list[int], noisy: bool, filtered: bool,
    about: dict[str, str],
) -> None:  # fmt: skip
    """Cells of one pair of dimensions."""
    size = SHAPES[name]
    bandwidth = copy_bandwidth()
    most_batch, longest = max(sizes), max(contexts)
    stride = longest + 1024
    models = make_models(size, most_batch * stride)
    round_ = GpuRound(models, most_batch, stride + MOST_ROWS, timed=True)
    with torch.inference_mode():
        for batch in sizes:
            for context in contexts:
                for rows in rows_list:
                    for context_kept in (True, False) if rows == 1 else (True,):
                        shape = Shape(batch, rows, noisy, noisy and rows > 1, context_kept, filtered)
                        round_.temperature.fill_(1.0 if noisy else 0.0)
                        round_.top_p.fill_(0.9)
                        round_.min_p.fill_(0.02)
                        set_state(round_, batch, context, rows - 1, stride)
                        round_.enqueue(shape)
                        graph = torch.cuda.CUDAGraph()
                        with torch.cuda.graph(graph):
                            round_.enqueue(shape)
                        set_state(round_, batch, context, rows - 1, stride)
                        for _ in range(5):
                            graph.replay()
                        milliseconds = [timed(graph.replay) * 1e3 for _ in range(REPLAYS)]
                        marks = round_.stamps.tolist()
                        geometry = models.target.geometry
                        floor = (
                            (weight_bytes(models) + batch * context * geometry.bytes_per_slot)
                            / bandwidth
                            * 1e3
                        )
                        cell = {
                            "shape": name, "batch": batch, "context": context, "rows": rows, "noisy": noisy,
                            "filtered": filtered,
                            "context_kept": context_kept, "ms_round": round(statistics.median(milliseconds), 4),
                            "ms_low": round(min(milliseconds), 4), "ms_high": round(max(milliseconds), 4),
                            "stage_us": [round((b - a) / 1e3, 1) for a, b in zip(marks, marks[1:], strict=False)],
                            "floor_ms": round(floor, 4), "ratio": round(statistics.median(milliseconds) / floor, 3),
                            "copy_tb_s": round(bandwidth / 1e12, 3), "n": REPLAYS, **about,
                        }  # fmt: skip
                        if batch == 1 and context == contexts[0] and rows in (1, 32):
                            cell["kernels"] = kernels_of(graph.replay)
                            cell["kernel_count"] = sum(count for count, _ in cell["kernels"].values())
                        print(json.dumps(cell), flush=True)
                        print(json.dumps(cell), file=out, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--shapes", nargs="+", default=["default", "8b"], choices=sorted(SHAPES))
    parser.add_argument("--contexts", nargs="+", type=int, default=[1024])
    parser.add_argument("--batches", nargs="+", type=int, default=[1])
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 8, 16, 32, 64])
    parser.add_argument("--noisy", action="store_true")
    parser.add_argument("--filtered", action="store_true")
    parser.add_argument("--gaps", nargs="*", type=int, default=[], metavar="CHUNK")
    parser.add_argument("--prompt-tokens", type=int, default=8192)
    parser.add_argument("--passes", type=int, default=10)
    args = parser.parse_args()
    noisy = args.noisy or args.filtered
    gpu = torch.cuda.get_device_name() if GPU.type == "cuda" else "none"
    about = {"gpu": gpu, "torch": torch.__version__, "triton": triton.__version__}
    with args.out.open("a") as out:
        for name in args.shapes:
            if args.gaps:
                measure_gaps(name, args.gaps, args.prompt_tokens, args.passes, out, about)
            else:
                measure(name, args.contexts, args.batches, out, args.rows, noisy, args.filtered, about)
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
