"""The native engine's layouts: what each splits, and why a model or a host cannot have it, from static facts alone.

`single` is one process. The others are two ranks in child processes: `tp2` splits attention heads and MLPs, `ep2` the
experts, `tp2ep2` heads and experts, `pp2` the layers. They are made for correctness and for trees under pipeline
parallelism; production speed on several GPUs is SGLang's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

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
    if layout == "pp2":
        layers = int(config["num_hidden_layers"])
        return (
            None
            if layers >= RANKS
            else f"layout: pp2 needs a layer for each of {RANKS} stages, {name} has {layers}"
        )
    if splits_experts(layout):
        experts = int(config.get("num_experts") or 0)
        if not experts:
            return f"layout: {layout} splits experts and {name} has none (a dense model); use tp2 or pp2"
        if experts % RANKS:
            return (
                f"layout: {layout} cannot split the {experts} experts of {name} over {RANKS} ranks; use pp2"
            )
    if layout == "ep2":
        return None
    if layout == "tp2ep2" and not splits_attention(layout, config):
        heads, kv_heads = _heads(config)
        return (
            f"layout: {layout} cannot split the {heads} query and {kv_heads} KV heads of {name} over {RANKS} ranks; "
            "use ep2"
        )
    widths = ("intermediate_size",) if not config.get("num_experts") else ("moe_intermediate_size",)
    for width in widths:
        if layout == "tp2" and int(config[width]) % RANKS:
            return f"layout: tp2 cannot split {width} = {config[width]} of {name} over {RANKS} ranks; use pp2"
    return None


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
