"""The native engine's layouts: what each splits, and why a model or a host cannot have it, from static facts alone.

`single` is one process. The others are two ranks in child processes: `tp2` splits attention heads and MLPs, `ep2` the
experts, `tp2ep2` heads and experts, `pp2` the layers. On GPUs `tp2` of a dense model plays captured rounds; the others
are made for correctness and for trees under pipeline parallelism. Production speed on more GPUs is SGLang's.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from layouts.arguments import ChildEnvironment

NATIVE_LAYOUTS = ("single", "tp2", "ep2", "pp2", "tp2ep2")
RANKS = 2


def world_size(layout: str) -> int:
    """How many ranks run `layout`."""
    return 1 if layout == "single" else RANKS


def splits_attention(layout: str, config: Mapping[str, Any]) -> bool:
    """True if each rank has its share of the heads (`config`: the target's `config.json`)."""
    heads, kv_heads = _heads(config)
    return layout in ("tp2", "tp2ep2") and heads % RANKS == 0 and kv_heads % RANKS == 0


def splits_experts(layout: str) -> bool:
    return layout in ("ep2", "tp2ep2")


def label(layout: str, config: Mapping[str, Any]) -> str:
    """The layout as it is shown; a target whose heads cannot be split has its MLPs split alone."""
    if layout == "tp2" and not splits_attention(layout, config):
        return "TP2 (MLP only)"
    return {"single": "1 process", "tp2": "TP2", "ep2": "EP2", "pp2": "PP2", "tp2ep2": "TP2+EP2"}[layout]


def refusal(layout: str, config: Mapping[str, Any], name: str, gpus: int | None) -> str | None:
    """Why the target `name` cannot run in `layout`, in one line; None if it can.

    `gpus`: CUDA devices there are; None where it runs on the CPU, which holds any number of ranks.
    """
    if layout == "single":
        return None
    if gpus is not None and gpus < RANKS:
        return f"layout: {layout} needs {RANKS} GPUs, torch sees {gpus}; use single, or device = 'cpu'"
    reason = _obstacle(layout, config, name)
    if reason is None:
        return None
    fitting = [each for each in NATIVE_LAYOUTS[1:] if _obstacle(each, config, name) is None]
    return f"layout: {layout} {reason}; use {' or '.join(fitting or ['single'])}"


def _obstacle(layout: str, config: Mapping[str, Any], name: str) -> str | None:
    """What keeps the target `name` from being split as `layout` says."""
    if layout == "pp2":
        layers = int(config["num_hidden_layers"])
        return f"needs a layer for each of {RANKS} stages, {name} has {layers}" if layers < RANKS else None
    if splits_experts(layout):
        experts = int(config.get("num_experts") or 0)
        if not experts:
            return f"splits experts and {name} has none (a dense model)"
        if experts % RANKS:
            return f"cannot split the {experts} experts of {name} over {RANKS} ranks"
    if layout == "tp2ep2" and not splits_attention(layout, config):
        heads, kv_heads = _heads(config)
        return f"cannot split the {heads} query and {kv_heads} KV heads of {name} over {RANKS} ranks"
    width = "moe_intermediate_size" if config.get("num_experts") else "intermediate_size"
    if layout == "tp2" and int(config.get(width) or 0) % RANKS:
        return f"cannot split {width} = {config[width]} of {name} over {RANKS} ranks"
    return None


def rank_variables(layout: str) -> ChildEnvironment:
    """The environment variables that the preset named `layout` sets in its ranks, and which of them come too late.

    Ranks are forked from a process that has imported everything, with the variables of this one.
    """
    from layouts.arguments import ChildEnvironment, child_environment
    from layouts.library import load_library

    preset = load_library().presets.get(layout)
    if preset is None or preset.engine != "native":
        return ChildEnvironment({}, ())
    return child_environment(preset, dict(os.environ), fresh=False)


def late_variables(layout: str) -> str:
    """What is to be said of variables that ranks or this process would need before they import anything."""
    variables = rank_variables(layout)
    if world_size(layout) > 1:
        return f"{variables.note}, so each rank starts anew, which takes longer" if variables.note else ""
    differing = [name for name, value in variables.set.items() if os.environ.get(name) != value]
    if not differing:
        return ""
    return (
        f"needs a new process: {', '.join(differing)} is for engine processes, and {layout} runs in this one"
    )


def stage_layers(rank: int, layers: int) -> range:
    """Layers of pipeline stage `rank`; an uneven rest goes to the last stage, as in transformers 5.17."""
    each = layers // RANKS
    return range(rank * each, layers if rank == RANKS - 1 else (rank + 1) * each)


def split_plan(
    layout: str, config: Mapping[str, Any], tensor: Mapping[str, str], expert: Mapping[str, str]
) -> dict[str, str]:
    """Rules of the layers that `layout` splits, for transformers' `tp_plan`.

    `tensor` and `expert` are the architecture's own plans, names below the base model. Embedding and head stay whole.
    """
    rules = {name: rule for name, rule in tensor.items() if name.startswith("layers.")}
    if layout == "ep2":
        rules = {}
    elif layout == "tp2ep2":
        rules = {name: rule for name, rule in rules.items() if ".experts" not in name}
    elif not splits_attention(layout, config):
        rules = {name: rule for name, rule in rules.items() if ".self_attn." not in name}
    if splits_experts(layout):
        rules |= expert
    return {f"model.{name}": rule for name, rule in rules.items()}


def _heads(config: Mapping[str, Any]) -> tuple[int, int]:
    heads = int(config["num_attention_heads"])
    return heads, int(config.get("num_key_value_heads") or heads)
