"""Edits of the configuration collected into one change, and what is known of each field. No widget."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from runtime.config import EFFECTS, RuntimeConfig, range_of, validate
from runtime.interface import ChangePlan

FIELDS = tuple(RuntimeConfig.model_fields)


@dataclass(frozen=True, slots=True)
class FieldRow:
    """One field as the Controls screen shows it."""

    name: str
    value: str
    edited: str | None
    """The value it would get; None where it is not edited."""
    acts: Literal["live", "rebuild"]
    allowed: str
    origin: str


@dataclass(frozen=True)
class Draft:
    """Field to the value it is to get; fields that already have it are left out."""

    edits: Mapping[str, Any] = field(default_factory=dict)

    def with_edit(self, config: Mapping[str, Any], name: str, value: Any) -> Draft:
        """This draft with one more edit; raises ConfigRejected, naming the field, for a wrong value.

        The value may be its text. A value beside which the other edits cannot stand is refused as well.
        """
        wanted = validate(_known({**config, **self.edits, name: value}))
        return self.on({**config}, {**self.edits, name: getattr(wanted, name)})

    def without(self, name: str) -> Draft:
        return Draft({each: value for each, value in self.edits.items() if each != name})

    def on(self, config: Mapping[str, Any], edits: Mapping[str, Any] | None = None) -> Draft:
        """The edits that still differ from `config`."""
        wanted = self.edits if edits is None else edits
        return Draft({name: value for name, value in wanted.items() if config.get(name) != value})

    @classmethod
    def between(cls, config: Mapping[str, Any], wanted: Mapping[str, Any]) -> Draft:
        """What leads from `config` to `wanted`. A budget left to calibration stays the calibrated one."""
        return cls().on(
            config,
            {
                name: value
                for name, value in wanted.items()
                if name in config and not (name == "tree_budget" and value is None)
            },
        )

    def rows(self, config: Mapping[str, Any], origins: Mapping[str, str]) -> tuple[FieldRow, ...]:
        """Every field, those that act live first."""
        ordered = sorted(FIELDS, key=lambda name: EFFECTS[name] != "live")
        return tuple(
            FieldRow(
                name=name,
                value=shown(config[name]),
                edited=shown(self.edits[name]) if name in self.edits else None,
                acts=EFFECTS[name],
                allowed=range_of(name),
                origin=origins.get(name, "n/a"),
            )
            for name in ordered
            if name in config
        )


def shown(value: object) -> str:
    """A value as it is typed."""
    if value is None:
        return "auto"
    if isinstance(value, bool):
        return "true" if value else "false"
    return f"{value:g}" if isinstance(value, float) else str(value)


def about(name: str) -> str:
    """What a field means, in a line or two."""
    return NOTES.get(name, "")


def plan_lines(plan: ChangePlan) -> tuple[tuple[str, str], ...]:
    """(line, style) of each part of a plan, for people."""
    styles = {"live": "good", "rebuild": "fair", "refused": "bad"}
    lines = [
        (
            f"{each.effect:<8} {each.field} {shown(each.old)} -> {shown(each.new)}"
            + (f"  ({each.note})" if each.note else ""),
            styles[each.effect],
        )
        for each in plan.changes
    ]
    if not plan.allowed:
        return (*lines, (f"refused: {plan.summary}", "bad"))
    if any(each.effect == "rebuild" for each in plan.changes):
        outage = "unknown" if plan.outage_s is None else f"{plan.outage_s:.1f} s"
        lines.append((f"expected outage {outage}; {requests(plan.requests_running)} in flight", "fair"))
        lines.append(("open streams pause and go on; new requests wait up to queue_timeout, then 503", ""))
    elif plan.changes:
        running = plan.requests_running
        lines.append((f"no outage; {requests(running)} in flight go on" if running else "no outage", ""))
    if plan.unreached:
        lines.append((f"not reached: {requests(plan.unreached)} keep the temperature they began with", ""))
    return tuple(lines) or ((plan.summary, ""),)


def disruptive(plan: ChangePlan) -> bool:
    """Whether a plan interrupts service."""
    return any(each.effect != "live" for each in plan.changes)


def requests(number: int) -> str:
    return "1 request" if number == 1 else f"{number} requests"


def _known(values: Mapping[str, Any]) -> dict[str, Any]:
    """What this version knows of a configuration that may be another version's."""
    return {name: value for name, value in values.items() if name in FIELDS}


NOTES: Mapping[str, str] = {
    "engine": "What decodes.",
    "model": "Target: an embedded model, a GGUF file or a Hugging Face folder.",
    "drafter": "Folder in DFlash format; auto: the one shipped for the model; none: no drafter.",
    "layout": "Parallelism mode; p chooses one.",
    "mode": "off: plain decoding; chain: one drafted path; tree: a draft tree; auto: what pays at the moment.",
    "tree_budget": "Most draft nodes in a tree, root excluded; 0 is plain decoding.",
    "block_size": "Tokens in a draft block, root included; auto: as trained; 1: no speculation.",
    "temperature": "For requests that set none, admitted from then on; 0 is greedy.",
    "top_p": "Keep the likeliest tokens that reach this probability.",
    "top_k": "Keep so many likeliest tokens; 0: no limit.",
    "max_tokens": "Output tokens of a request that sets no limit.",
    "max_concurrency": "Requests decoded together.",
    "max_tree_budget": "Largest budget a live change may set; slots for it are reserved with each request.",
    "max_queue": "Requests that may wait beside those that run; more are turned away at once.",
    "queue_timeout": "Seconds a request may wait for its turn before it is turned away.",
    "max_seq_len": "Context limit in tokens, prompt and output; auto: the model's own, at most 4096.",
    "kv_slots": "Token slots of the KV cache; auto: full contexts for half of max_concurrency, two at least.",
    "prefill_chunk": "Prompt tokens computed between two decode rounds.",
    "prefix_reuse": "Keep the prefixes of finished requests for those that begin alike.",
    "draft_noise": "At temperature > 0, add the position-keyed noise to the drafter's scores too.",
    "dtype": "Number format; auto: float32 on a CPU, bfloat16 on a GPU.",
    "device": "auto: the first CUDA GPU if there is one, else the CPU.",
    "attention_backend": "What computes attention.",
    "linear": "CPU linear layers; auto: prepacked where a probe shows they work.",
    "threads": "CPU threads; auto: physical cores.",
    "baseline_interval": "Seconds until plain and chain decoding are measured anew in an idle moment; 0: never.",
    "log_level": "Least level that is logged.",
    "auto_snapshot": "Keep what runs as a snapshot before a rebuild or a rollback replaces it.",
    "sglang_python": "Python of SGLang's own virtual environment; empty: the one made by ddtree engine install.",
    "rebuild_drain": "Seconds running requests get to finish before the engine is rebuilt.",
    "rebuild_ahead": "Build another layout while this one serves, on a CPU with memory for both.",
}
