"""The stages of drafter training, each bounded by the clock and resumable: prompts, responses, train, export.

All state lies in one output folder: `prompts.npz`, `responses.npz`, `checkpoint.pt`, `report.json`, `log.txt` and
the finished `drafter/`.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Generator, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from runtime.drafter import DrafterConfig
from runtime.models import Checkpoint
from runtime.train_data import (
    MAX_PROMPT,
    MAX_RESPONSE,
    PromptCollector,
    Prompts,
    TrainingDataError,
    build_sequences,
    excluded_prompts,
    kind_counts,
    load_prompts,
    load_sequences,
    read_prompt_file,
    response_jobs,
    save_arrays,
    self_prompt_jobs,
    self_prompt_text,
)
from runtime.train_drafter import DrafterTraining, TrainOptions, initial_drafter
from runtime.train_export import drafter_config, export_drafter, published_config, spread_taps
from runtime.train_generate import Generated, Job, generate, generate_slowly
from runtime.train_kernels import Kernels, probe_kernels
from runtime.train_seeds import OPENERS
from runtime.train_target import CompactTarget, TransformersTarget, build_target

SELF_PROMPT_SHARE = 0.18
_BACKENDS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


@dataclass(frozen=True)
class TrainingRun:
    """What the command was asked to do; `taps` and `mask_token_id` None take the defaults of the target."""

    checkpoint: Checkpoint
    folder: Path
    device: torch.device
    options: TrainOptions
    prompts: tuple[Path, ...] = ()
    exclude: tuple[Path, ...] = ()
    minutes_generate: float = 4.5
    self_prompts: int = 150_000
    rows: int = 6144
    layers: int = 4
    taps: tuple[int, ...] | None = None
    block_size: int = 8
    mask_token_id: int | None = None
    max_new: int = MAX_RESPONSE
    max_bytes: int | None = None
    data_list: Path | None = None


class Stages:
    """Runs stages of one `TrainingRun`, loading the target once."""

    def __init__(self, run: TrainingRun) -> None:
        self.run = run
        self._notes = _data_notes(run.data_list)
        run.folder.mkdir(parents=True, exist_ok=True)
        self._began = time.monotonic()
        self._log = run.folder / "log.txt"

    def say(self, text: str) -> None:
        """One line on standard error and in `log.txt`, with the seconds since the start."""
        line = f"[{time.monotonic() - self._began:6.1f}] {text}"
        print(line, file=sys.stderr, flush=True)
        with self._log.open("a", encoding="utf-8") as file:
            file.write(line + "\n")

    @cached_property
    def _tokenizer(self) -> Any:
        return self.run.checkpoint.load_tokenizer()

    @cached_property
    def _state(self) -> dict[str, torch.Tensor]:
        return self.run.checkpoint.load_state()

    @cached_property
    def _kernels(self) -> Kernels:
        config = self.run.checkpoint.config
        head_dim = int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])
        return probe_kernels(self.run.device, head_dim, self.say)

    @cached_property
    def _target(self) -> CompactTarget | TransformersTarget:
        device = self.run.device
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        self.say(f"loading target {self.run.checkpoint.name} in {dtype} on {device}")
        return build_target(self.run.checkpoint.config, self._state, dtype, device, self._kernels)

    @cached_property
    def drafter_config(self) -> DrafterConfig:
        """The drafter's shape, from the run and the target."""
        target, run = self.run.checkpoint.config, self.run
        taps = run.taps or spread_taps(int(target["num_hidden_layers"]), 5)
        mask = (
            run.mask_token_id if run.mask_token_id is not None else self._tokenizer.token_id("<empty_output>")
        )
        if mask is None:
            raise TrainingDataError("the target has no token <empty_output>; give --mask-token-id")
        config = drafter_config(target, run.layers, taps, run.block_size, mask)
        config.check_target(target, "(to be trained)", run.checkpoint.name)
        return config

    def _generate(
        self, jobs: Iterator[Job], deadline: float, max_new: int, label: str
    ) -> Generator[Generated, None, None]:
        run, began = self.run, time.monotonic()
        stop_ids = run.checkpoint.eos_token_ids
        if isinstance(self._target, TransformersTarget):
            some = [job for job, _ in zip(jobs, range(64 * run.rows), strict=False)]
            yield from generate_slowly(
                self._target, some, rows=run.rows, stop_ids=stop_ids, deadline=deadline
            )
            return
        said = began

        def progress(texts: int, tokens: int) -> None:
            nonlocal said
            now = time.monotonic()
            if now - said >= 10:
                said = now
                self.say(
                    f"{label}: {texts:,} texts, {tokens:,} tokens, {tokens / (now - began) / 1e3:.1f}k tokens/s"
                )

        yield from generate(
            self._target, jobs, rows=run.rows, length=MAX_PROMPT + max(max_new, 64), max_new=max_new,
            stop_ids=stop_ids, deadline=deadline, seed=run.options.seed, progress=progress,
        )  # fmt: skip

    def prompts(self) -> Prompts:
        """Collects given prompts and lets the target write further ones; kept in `prompts.npz`."""
        run, path = self.run, self.run.folder / "prompts.npz"
        if path.exists():
            return load_prompts(path)
        collector = PromptCollector(self._tokenizer, excluded_prompts(run.exclude))
        for file in run.prompts:
            before = len(collector)
            for text, messages in read_prompt_file(file):
                collector.add(text, file.stem, messages)
            self.say(f"prompts: {len(collector) - before:,} from {file.name}")
        self._self_prompts(collector)
        self._memory()
        found = collector.finish()
        if not len(found):
            raise TrainingDataError("there are no prompts; give --prompts FILE or more --minutes-generate")
        save_arrays(path, found)
        self.say(
            f"prompts: {len(found):,}, {collector.refused:,} refused as evaluation prompts; {kind_counts(found)}"
        )
        return found

    def _self_prompts(self, collector: PromptCollector) -> None:
        run, given = self.run, len(collector)
        if run.self_prompts <= 0:
            return
        deadline = time.monotonic() + 60 * run.minutes_generate * SELF_PROMPT_SHARE
        end_id = run.checkpoint.eos_token_ids[0]
        jobs = self_prompt_jobs(self._tokenizer, run.options.seed)
        longest = max(opener.max_tokens for opener in OPENERS)
        found = self._generate(jobs, deadline, longest, "self-prompts")
        for each in found:
            text = self_prompt_text(self._tokenizer, each, end_id)
            if text is not None:
                collector.add(text, f"self:{OPENERS[each.job.key].kind}")
            if len(collector) - given >= run.self_prompts:
                found.close()
                break
        self.say(f"self-prompts: {len(collector) - given:,}")

    def responses(self) -> None:
        """Lets the target answer the prompts until the clock; kept in `responses.npz`."""
        run, path = self.run, self.run.folder / "responses.npz"
        if path.exists():
            return
        prompts = self.prompts()
        deadline = time.monotonic() + 60 * run.minutes_generate * (1 - SELF_PROMPT_SHARE)
        found: list[Generated] = []
        try:
            jobs = response_jobs(prompts, run.options.seed, run.max_new)
            for each in self._generate(jobs, deadline, run.max_new, "responses"):
                found.append(each)
        except KeyboardInterrupt:
            try:
                save_arrays(path, build_sequences(prompts, found, run.options.seed))
                self.say("interrupted: the responses so far are kept, the same command continues with them")
            except TrainingDataError:
                self.say(
                    "interrupted before there were responses to train on; the same command starts them anew"
                )
            raise
        data = build_sequences(prompts, found, run.options.seed)
        save_arrays(path, data)
        whole = sum(len(each.tokens) for each in found)
        self.say(
            f"responses: {len(found):,} texts, {whole:,} tokens; kept {len(data):,} texts, "
            f"{data.response_tokens:,} tokens, "
            f"{int(data.greedy.sum()):,} greedy, {int(data.held_out.sum()):,} held out; {kind_counts(data)}"
        )
        self._memory()

    def train(self) -> dict[str, Any]:
        """Trains, or continues, and returns the report."""
        run = self.run
        data = load_sequences(run.folder / "responses.npz")
        depth = int(run.checkpoint.config["num_hidden_layers"])
        drafter = initial_drafter(self.drafter_config, self._state, depth, run.options.seed)
        target = self._target
        training = DrafterTraining(
            run.folder, data, target, drafter, run.options, run.device, self._kernels, self.say
        )
        with sdpa_kernel(_BACKENDS):
            report = training.run()
        self._memory()
        self.say(
            f"trained {report['steps']:,} steps, {report['passes']} passes; kept the {report['weights']} weights"
        )
        return report

    def export(self) -> Path:
        """Writes `drafter/` from the checkpoint and the report."""
        run, folder = self.run, self.run.folder
        try:
            report = json.loads((folder / "report.json").read_text(encoding="utf-8"))
            state = torch.load(folder / "checkpoint.pt", map_location="cpu", weights_only=True)
        except FileNotFoundError as missing:
            raise TrainingDataError(f"{missing.filename} is missing; run the stage train first") from None
        chosen = state["average" if report["weights"] == "average" else "weights"]
        weights = {name.removeprefix("drafter."): weight for name, weight in chosen.items()}
        saved = {**state["config"], "target_layer_ids": tuple(state["config"]["target_layer_ids"])}
        extra = {
            "target": run.checkpoint.name,
            "target_digest": run.checkpoint.digest(),
            "data": self._data_list(),
            "training": {key: report[key] for key in report if key != "history"},
            "measured": {},
        }
        config = published_config(DrafterConfig(**saved), run.checkpoint.config, extra)
        written = export_drafter(folder / "drafter", weights, config, run.max_bytes)
        self.say(f"export: {folder / 'drafter'}, {written:,} bytes")
        return folder / "drafter"

    def _data_list(self) -> list[dict[str, Any]]:
        counts: dict[str, int] = {}
        for name, count in kind_counts(load_prompts(self.run.folder / "prompts.npz")).items():
            key = "self-prompts" if name.startswith("self:") else name
            counts[key] = counts.get(key, 0) + count
        unknown = {"origin": "n/a", "licence": "n/a"}
        return [
            {**self._notes.get(name, unknown), "name": name, "prompts": count}
            for name, count in sorted(counts.items())
        ]

    def _memory(self) -> None:
        if self.run.device.type == "cuda":
            peak = torch.cuda.max_memory_allocated() / 2**30
            self.say(f"GPU memory peak {peak:.1f} GiB")
            torch.cuda.empty_cache()


def _data_notes(path: Path | None) -> dict[str, dict[str, Any]]:
    """Name of each source of prompts to what the list at `path` says of it."""
    try:
        listed = json.loads(path.read_text(encoding="utf-8")) if path is not None else []
        notes = {str(each["name"]): dict(each) for each in listed}
    except (OSError, ValueError, TypeError, KeyError):
        raise TrainingDataError(
            f"data list {path} cannot be used; give a JSON list of {{name, origin, licence}}"
        ) from None
    own = {"origin": "written by the target itself", "licence": "none needed"}
    return {"self-prompts": own} | notes


def with_device_defaults(run: TrainingRun, rows: int | None, blocks: int | None) -> TrainingRun:
    """Fills in the sizes that suit the device: large on a GPU, small on a CPU."""
    large = run.device.type == "cuda"
    options = replace(run.options, blocks=blocks or (5120 if large else 128))
    return replace(run, rows=rows or (6144 if large else 16), options=options)


def run_stages(run: TrainingRun, stage: str) -> None:
    """Runs `stage`, or every stage in order for "all"."""
    torch.manual_seed(run.options.seed)
    np.random.seed(run.options.seed % (1 << 32))
    stages = Stages(run)
    if stage != "export":
        _ = stages.drafter_config  # one that does not fit the target is refused before the minutes are spent
    if stage in ("prompts", "all"):
        stages.prompts()
    if stage in ("responses", "all"):
        stages.responses()
    if stage in ("train", "all"):
        stages.train()
    if stage in ("export", "all"):
        stages.export()
