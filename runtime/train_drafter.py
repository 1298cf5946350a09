"""The training loop of a DFlash drafter: optimiser, wall-clock schedule, averaging, validation, checkpoints.

The schedule follows the clock, not a step count, so a run always anneals within its minutes; a resumed run continues
with the minutes that were left. Recipe: AdamW (0.9, 0.95), warm-up 4 %, cosine to 0, clip 1.0, float32 master
weights with low-precision compute, exponential moving average of the weights.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.func import functional_call

from runtime.drafter import Drafter, DrafterConfig
from runtime.train_blocks import Batch, BatchMaker, BlockTrainer, Plan, chunks, distilled_loss, plan_pass
from runtime.train_data import Sequences
from runtime.train_kernels import Kernels, head_logits
from runtime.train_target import TrainTarget

VALIDATION_TEXTS = 384


@dataclass(frozen=True)
class TrainOptions:
    """Everything the loop depends on besides data and models."""

    minutes: float
    seed: int = 0
    learning_rate: float = 1e-3
    warmup: float = 0.04
    blocks: int = 5120
    gamma: float = 4.0
    cross_entropy_share: float = 0.5
    clip: float = 1.0
    average: float = 0.999
    validate_seconds: float = 60.0
    checkpoint_seconds: float = 120.0
    report_seconds: float = 10.0
    max_steps: int | None = None


@dataclass(frozen=True)
class Validation:
    """Held-out greedy texts: share matched by draft position 1 .., and mean accept length of a chain."""

    accept_length: float
    match_by_position: tuple[float, ...]
    accept_length_by_kind: dict[str, float]
    blocks: int


def initial_drafter(config: DrafterConfig, state: Mapping[str, Tensor], depth: int, seed: int) -> Drafter:
    """A float32 drafter: o, v, MLP and norms from evenly spaced target layers, the rest normal 0.02."""
    drafter = Drafter(config)
    generator = torch.Generator().manual_seed(seed)
    for name, weight in drafter.named_parameters():
        if weight.dim() > 1:
            torch.nn.init.normal_(weight, std=0.02, generator=generator)
        elif name.endswith("bias"):
            torch.nn.init.zeros_(weight)
    sources = (
        np.linspace(1, max(1, depth - 3), config.num_hidden_layers).round().astype(int).clip(0, depth - 1)
    )
    copied = {"norm.weight": "model.norm.weight"}
    parts = ("self_attn.o_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
    for layer, source in enumerate(sources):
        for part in (*parts, "input_layernorm", "post_attention_layernorm"):
            copied[f"layers.{layer}.{part}.weight"] = f"model.layers.{source}.{part}.weight"
    own = dict(drafter.named_parameters())
    with torch.no_grad():
        for mine, theirs in copied.items():
            if theirs in state and own[mine].shape == state[theirs].shape:
                own[mine].copy_(state[theirs])
    return drafter


class DrafterTraining:
    """A run over fixed data: `run` trains until the clock, Ctrl-C or `max_steps`, leaving a checkpoint."""

    def __init__(
        self,
        folder: Path,
        data: Sequences,
        target: TrainTarget,
        drafter: Drafter,
        options: TrainOptions,
        device: torch.device,
        kernels: Kernels | None = None,
        say: Callable[[str], None] = print,
    ) -> None:
        self.folder, self.data, self.target, self.options = folder, data, target, options
        self.device, self.kernels, self.say = device, kernels or Kernels(), say
        self.config = drafter.config
        self._dtype = target.embedding.dtype
        self._model = BlockTrainer(drafter.to(device))
        own = dict(self._model.named_parameters())
        self.weights = {name: weight.detach().clone().requires_grad_() for name, weight in own.items()}
        self.average = {name: weight.detach().clone() for name, weight in self.weights.items()}
        fused = device.type == "cuda"
        self._optimiser = torch.optim.AdamW(
            self.weights.values(), lr=options.learning_rate, betas=(0.9, 0.95), weight_decay=0.0, fused=fused
        )
        self._batches = BatchMaker(data, self.config.block_size, options.gamma, device)
        self._training = np.flatnonzero(~data.held_out)
        self._validating = self._validation_plans()
        self.step, self.passes, self.at, self.seconds = 0, 0, 0, 0.0
        self.history: list[dict[str, Any]] = []
        self._batches_in_pass = 1
        self._load_checkpoint()

    def _validation_plans(self) -> list[Plan]:
        """Batches of held-out greedy texts, grouped by kind so that each kind gets its own figure."""
        data = self.data
        long = data.lengths - data.prompt_lengths > 2 * self.config.block_size
        held = np.flatnonzero(data.held_out & data.greedy & long)
        picked = np.random.default_rng(self.options.seed).permutation(held)[:VALIDATION_TEXTS]
        plans: list[Plan] = []
        for kind in np.unique(data.kinds[picked]):
            plans += plan_pass(data, picked[data.kinds[picked] == kind], self.options.blocks, 0, 0)
        return plans

    def _cast(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: weight.to(self._dtype) for name, weight in weights.items()}

    def hidden(self, weights: Mapping[str, Tensor], batch: Batch) -> tuple[Tensor, Tensor]:
        """Drafted hidden states `[rows, width]` and target hidden states of the source positions `[u, width]`."""
        features, final = self.target.features(batch.tokens, self.config.target_layer_ids)
        inputs = (features, self.target.embedding, batch.tokens, batch.anchors)
        drafted = functional_call(self._model, self._cast(weights), inputs)
        return drafted.flatten(0, 2), final.flatten(0, 1)[batch.source]

    def loss(self, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        """Loss, cross-entropy and KL of the present weights."""
        drafted, source = self.hidden(self.weights, batch)
        with torch.no_grad():
            logits = head_logits(source, self.target.head)
        share = self.options.cross_entropy_share
        return distilled_loss(drafted, self.target.head, logits, batch, share, self.kernels)

    def _rate(self, progress: float) -> float:
        warmup = self.options.warmup
        if progress < warmup:
            return self.options.learning_rate * max(progress / warmup, 0.01)
        return (
            0.5
            * self.options.learning_rate
            * (1 + math.cos(math.pi * min(1.0, (progress - warmup) / (1 - warmup))))
        )

    def _step(self, plan: Plan, progress: float) -> Tensor:
        batch = self._batches.make(plan, self.options.seed * 1_000_003 + self.step)
        for group in self._optimiser.param_groups:
            group["lr"] = self._rate(progress)
        losses = self.loss(batch)
        self._optimiser.zero_grad(set_to_none=True)
        losses[0].backward()
        torch.nn.utils.clip_grad_norm_(list(self.weights.values()), self.options.clip)
        self._optimiser.step()
        kept = min(self.options.average, (1 + self.step) / (10 + self.step))
        with torch.no_grad():
            mine, theirs = list(self.average.values()), list(self.weights.values())
            torch._foreach_lerp_(mine, theirs, 1 - kept)
        return torch.stack([each.detach() for each in losses])

    @torch.no_grad()
    def validate(self, weights: Mapping[str, Tensor]) -> Validation | None:
        """Compares drafted tokens with the target's own choices; None without held-out greedy texts."""
        horizon = self.config.draft_horizon
        matched = torch.zeros(horizon, dtype=torch.float64, device=self.device)
        by_kind: dict[str, tuple[Tensor, Tensor]] = {}
        zero = torch.zeros((), dtype=torch.float64, device=self.device)
        for number, plan in enumerate(self._validating):
            batch = self._batches.make(plan, number)
            drafted, source = self.hidden(weights, batch)
            wanted = self._choices(source)[batch.source_rows]
            hits = (self._choices(drafted) == wanted).view(-1, horizon)
            complete = batch.valid.flatten(0, 1).all(dim=1)
            hits = hits[complete].double()
            matched += hits.sum(dim=0)
            runs = 1 + hits.cumprod(dim=1).sum(dim=1)
            kind = self.data.names[int(self.data.kinds[plan.members[0]])]
            total, count = by_kind.get(kind, (zero, zero))
            by_kind[kind] = (total + runs.sum(), count + complete.sum())
        blocks = sum(float(count) for _, count in by_kind.values())
        if not blocks:
            return None
        return Validation(
            accept_length=sum(float(total) for total, _ in by_kind.values()) / blocks,
            match_by_position=tuple((matched / blocks).tolist()),
            accept_length_by_kind={k: float(total / count) for k, (total, count) in by_kind.items() if count},
            blocks=int(blocks),
        )

    def _choices(self, hidden: Tensor) -> Tensor:
        parts = [
            head_logits(hidden[part], self.target.head).argmax(dim=-1) for part in chunks(len(hidden), 4096)
        ]
        return torch.cat(parts)

    def _better(self) -> tuple[str, Validation | None]:
        """Validates both sets of weights, records the result and returns the better set's name and figures."""
        found = {"average": self.validate(self.average), "last": self.validate(self.weights)}
        known = {name: each for name, each in found.items() if each is not None}
        best = max(known, key=lambda name: known[name].accept_length, default="average")
        entry: dict[str, Any] = {
            "step": self.step,
            "seconds": round(self.seconds, 1),
            "passes": round(self._pass_position(), 3),
        }
        entry |= {name: asdict(each) for name, each in known.items()}
        self.history.append(entry)
        for name, each in known.items():
            kinds = " ".join(
                f"{kind} {value:.2f}" for kind, value in sorted(each.accept_length_by_kind.items())
            )
            positions = " ".join(f"{value:.3f}" for value in each.match_by_position)
            self.say(
                f"validation step {self.step} {name}: accept {each.accept_length:.3f} | {positions} | {kinds}"
            )
        if not known:
            self.say("validation: n/a, no greedy text is held out")
        return best, known.get(best)

    def _pass_position(self) -> float:
        return self.passes + self.at / max(1, self._batches_in_pass)

    def run(self) -> dict[str, Any]:
        """Trains until the minutes are used; returns the report, also written to `report.json`."""
        options, total = self.options, self.options.minutes * 60
        plans = self._plans()
        began, before = time.monotonic(), self.seconds
        saved = validated = reported = began
        steps_reported, losses = self.step, torch.zeros(3, device=self.device)
        best: tuple[str, Validation | None] | None = None
        try:
            while self.seconds < total and (options.max_steps is None or self.step < options.max_steps):
                if self.at >= len(plans):
                    self.passes, self.at = self.passes + 1, 0
                    plans = self._plans()
                losses += self._step(plans[self.at], self.seconds / total)
                self.step, self.at = self.step + 1, self.at + 1
                now = time.monotonic()
                self.seconds = before + now - began
                if now - reported >= options.report_seconds:
                    steps = self.step - steps_reported
                    self._report_progress(losses / steps, steps / (now - reported))
                    losses.zero_()
                    reported, steps_reported = now, self.step
                if now - validated >= options.validate_seconds:
                    self._better()
                    validated = time.monotonic()
                if now - saved >= options.checkpoint_seconds:
                    self.save_checkpoint()
                    saved = time.monotonic()
        except KeyboardInterrupt:
            self.say("interrupted: the checkpoint is kept, the same command continues from it")
            self.save_checkpoint()
            raise
        best = self._better()
        self.save_checkpoint()
        return self._write_report(best)

    def _plans(self) -> list[Plan]:
        plans = plan_pass(self.data, self._training, self.options.blocks, self.options.seed, self.passes)
        self._batches_in_pass = len(plans)
        return plans

    def _report_progress(self, losses: Tensor, rate: float) -> None:
        loss, cross_entropy, divergence = losses.tolist()
        memory = torch.cuda.max_memory_allocated() / 2**30 if self.device.type == "cuda" else None
        peak = "n/a" if memory is None else f"{memory:.1f} GiB"
        self.say(
            f"step {self.step} ({self.seconds:.0f} of {self.options.minutes * 60:.0f} s, "
            f"pass {self._pass_position():.2f}): "
            f"loss {loss:.4f} ce {cross_entropy:.4f} kl {divergence:.4f}, {rate:.2f} steps/s, "
            f"{rate * self.options.blocks * self.config.draft_horizon / 1e3:.0f}k positions/s, GPU peak {peak}"
        )

    def _write_report(self, best: tuple[str, Validation | None]) -> dict[str, Any]:
        name, figures = best
        report = {
            "steps": self.step,
            "seconds": round(self.seconds, 1),
            "passes": round(self._pass_position(), 3),
            "texts": len(self._training),
            "response_tokens": self.data.response_tokens,
            "weights": name,
            "validation": asdict(figures) if figures else None,
            "options": asdict(self.options),
            "history": self.history,
        }
        (self.folder / "report.json").write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
        return report

    def save_checkpoint(self) -> None:
        """Writes the whole state to `checkpoint.pt`, replacing the file at once."""
        path = self.folder / "checkpoint.pt"
        state = {
            "weights": self.weights,
            "average": self.average,
            "optimiser": self._optimiser.state_dict(),
            "progress": {"step": self.step, "passes": self.passes, "at": self.at, "seconds": self.seconds},
            "history": self.history,
            "config": asdict(self.config),
            "seed": self.options.seed,
            "texts": len(self.data),
        }
        torch.save(state, path.with_suffix(".partial"))
        os.replace(path.with_suffix(".partial"), path)

    def _load_checkpoint(self) -> None:
        path = self.folder / "checkpoint.pt"
        if not path.exists():
            return
        state = torch.load(path, map_location=self.device, weights_only=True)
        expected = {"config": asdict(self.config), "seed": self.options.seed, "texts": len(self.data)}
        for key, value in expected.items():
            if state.get(key) != value:
                raise ValueError(
                    f"{path} was made with {key} {state.get(key)}, this run has {value}; use another --out or delete it"
                )
        with torch.no_grad():
            for name, weight in self.weights.items():
                weight.copy_(state["weights"][name])
                self.average[name].copy_(state["average"][name])
        self._optimiser.load_state_dict(state["optimiser"])
        progress = state["progress"]
        self.step, self.passes, self.at, self.seconds = (
            progress[key] for key in ("step", "passes", "at", "seconds")
        )
        self.history = state["history"]
        self.say(f"continuing from step {self.step} after {self.seconds:.0f} s")
