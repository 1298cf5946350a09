"""Judgements in words: does speculation pay right now, and is almost nothing of what is drafted accepted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from console.figures import Figures
from runtime.interface import Baseline, Mode

ALARM_ROUNDS = 20
"""Rounds before an alarm: fewer say little about a setting."""
ALARM_ACCEPT_LENGTH = 1.15
"""Mean tokens per verify step at which drafting is as good as useless; 1 is plain decoding."""
HOT = 1.0
STEP_OFF = "m steps on to mode off"


def measured(baselines: Sequence[Baseline], mode: Mode) -> Baseline | None:
    """The latest baseline of a mode."""
    found = [baseline for baseline in baselines if baseline.mode == mode]
    return max(found, key=lambda baseline: baseline.measured_at_s, default=None)


def verdict(figures: Figures, baseline: Baseline | None, speculation: str | None) -> str:
    """In words: does speculation pay right now, against plain decoding of this host. `speculation`: `Description`'s."""
    if speculation is not None and speculation.startswith("inactive"):
        return f"speculation {speculation}"
    if figures.idle or figures.tok_s is None or figures.setting is None:
        return "idle: nothing is being decoded"
    if baseline is None or baseline.tok_s <= 0:
        return "speculation against plain: n/a, plain decoding is not measured yet"
    if figures.batch is not None and figures.batch > 1.05:
        return (
            f"speculation against plain: n/a with {figures.batch:.1f} requests together, "
            "the baseline is for one"
        )
    ratio = figures.tok_s / baseline.tok_s
    if figures.setting.plain:
        return f"speculation is off: plain decoding, {ratio:.2f}x its own baseline"
    if ratio >= 1.02:
        return f"speculation pays: {ratio:.2f}x plain, {figures.tok_s - baseline.tok_s:+.1f} tok/s"
    if figures.setting.mode == "auto":
        return f"auto decodes at {ratio:.2f}x the plain baseline"
    if ratio > 0.98:
        return f"speculation makes no difference: {ratio:.2f}x plain"
    lower = ", [ lowers the budget" if figures.setting.mode == "tree" else ""
    return f"speculation loses: {ratio:.2f}x plain; {STEP_OFF}{lower}"


def alarm(figures: Figures, config: Mapping[str, Any]) -> str | None:
    """What is wrong where almost no draft is accepted, its likely cause and the key that helps; None: all is well."""
    setting = figures.setting
    if figures.idle or setting is None or setting.plain or not figures.by_position:
        return None
    if setting.mode == "auto":
        return None  # it falls back by itself, and tries what it left now and then
    accept = figures.accept_mean
    if accept is None or accept >= ALARM_ACCEPT_LENGTH or figures.rounds < ALARM_ROUNDS:
        return None
    said = f"ALARM: almost no draft is accepted ({accept:.2f} tokens per step over {figures.rounds} rounds)"
    temperature = config.get("temperature")
    if isinstance(temperature, int | float) and temperature >= HOT:
        return f"{said}; likely because T is {temperature:g}: t lowers it, {STEP_OFF}"
    return (
        f"{said}; likely the drafter was not trained for this target, or not for text of this kind or length: "
        f"{STEP_OFF}, `ddtree tune` compares all settings"
    )
