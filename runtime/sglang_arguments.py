"""From a configuration and its layout to the arguments and variables that SGLang is started with, all checked."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from layouts.arguments import TREE_ALGORITHM, child_environment
from layouts.checks import tree_refusal
from layouts.library import load_library
from layouts.presets import Degrees, Preset
from layouts.values import LayoutError
from runtime.config import RuntimeConfig
from runtime.interface import ConfigRejected
from runtime.loader import Pair, read_pair
from runtime.sglang_checks import MODE, SEEDED
from runtime.sglang_host import Launch, check, environment_folder, find_python

SINGLE = Preset(name="single-gpu", title="One process", engine="sglang")
FALLBACK_BUDGET = 31
"""Tree budget where the configuration names none: a verify pass of 32 rows."""
DTYPES = {"auto": "auto", "float32": "float32", "bfloat16": "bfloat16"}


def preset_of(layout: str) -> Preset:
    """The layout a configuration names under `engine = sglang`: a shipped or user preset, or degrees such as tp8+ep8.

    Raises ConfigRejected where it is neither, or one of the native engine.
    """
    if layout == "single":
        return SINGLE
    degrees = Degrees.parse(layout)
    if degrees is not None:
        return SINGLE.model_copy(update={"name": layout, "title": degrees.label, "degrees": degrees})
    try:
        preset = load_library().preset(layout)
    except LayoutError as unknown:
        raise ConfigRejected(
            f"layout: {unknown}; under engine = sglang give degrees such as tp8+ep8 or the name of a layout",
            "layout",
        ) from None
    if preset.engine != "sglang":
        raise ConfigRejected(
            f"layout: {layout} is a layout of the native engine; set engine = native", "layout"
        )
    return preset


def _context(pair: Pair) -> int:
    """SGLang ends a request two tokens before its context's end; where the target has two more it gets those."""
    own = pair.checkpoint.config.get("max_position_embeddings")
    return min(pair.limits.max_seq_len + 2, int(own)) if own else pair.limits.max_seq_len


def launch_of(config: RuntimeConfig, pair: Pair, budget: int, block: int) -> Launch:
    """The start of SGLang for `config`; `budget`: draft nodes of a verify pass, 0 = plain decoding.

    Raises ConfigRejected: an unknown layout, speculation with a pipeline, no SGLang.
    """
    preset = preset_of(config.layout)
    degrees = preset.degrees
    if degrees.pp > 1 and budget:
        raise ConfigRejected(
            f"layout: SGLang has no speculation with a pipeline (pp = {degrees.pp}); set mode = off, or a layout with "
            "tp or ep",
            "layout",
        )
    arguments: dict[str, Any] = {
        "model_path": str(pair.checkpoint.path),
        "tp_size": degrees.tp,
        "ep_size": degrees.ep,
        "pp_size": degrees.pp,
        "dp_size": degrees.dp,
        "device": pair.device.type,
        "dtype": DTYPES[config.dtype],
        "context_length": _context(pair),
        "max_running_requests": config.max_concurrency,
        "skip_tokenizer_init": True,
        "attention_backend": "triton",
        "sampling_backend": "pytorch",
        "grammar_backend": "none",
        "disable_radix_cache": not config.prefix_reuse,
        "stream_interval": 1,
        "random_seed": 0,
        "log_level": "info",
    }
    if pair.device.type == "cpu":
        arguments |= {"disable_cuda_graph": True, "max_total_tokens": pair.limits.kv_slots}
    elif config.kv_slots is not None:
        arguments["max_total_tokens"] = config.kv_slots
    if pair.device.index:
        arguments["base_gpu_id"] = pair.device.index
    if not preset.graphs:
        arguments["disable_cuda_graph"] = True
    arguments |= {name.replace("-", "_"): value for name, value in preset.arguments.items()}
    environment = dict(child_environment(preset, {}, fresh=True).set)
    environment[SEEDED] = "1"
    if budget:
        environment[MODE] = "chain" if config.mode == "chain" else "tree"
        arguments |= {
            "speculative_algorithm": TREE_ALGORITHM,
            "speculative_draft_model_path": str(pair.drafter_path),
            "speculative_dflash_block_size": block,
            "speculative_num_draft_tokens": budget + 1,
        }
    return Launch(find_python(config.sglang_python), arguments, environment)


@dataclass(frozen=True)
class Prepared:
    """A configuration for SGLang that has passed every check that needs no GPU."""

    pair: Pair
    launch: Launch
    budget: int


def tree_budget_of(config: RuntimeConfig, pair: Pair) -> int:
    """Draft nodes of a verify pass as captured: 0 in mode off, the block's in mode chain."""
    if config.mode == "off" or pair.drafter_config is None or pair.no_drafter_reason is not None:
        return 0
    horizon = pair.block_size - 1
    if config.mode == "chain":
        return horizon
    wanted = FALLBACK_BUDGET if config.tree_budget is None else config.tree_budget
    if config.tree_budget is None:
        wanted = max(min(wanted, config.max_tree_budget), horizon)
    return wanted


def prepare(config: RuntimeConfig) -> Prepared:
    """Checks `config` as far as files and this side tell; raises ConfigRejected naming the field."""
    if config.mode == "auto":
        raise ConfigRejected(
            "mode: auto chooses round by round, SGLang's graphs are captured for one mode; use off, chain or tree",
            "mode",
        )
    pair = read_pair(config)
    if pair.checkpoint.gguf is not None:
        raise ConfigRejected(
            f"model: SGLang runs Hugging Face folders, {pair.checkpoint.name} is a GGUF file; convert it: "
            f"ddtree model convert {config.model} FOLDER",
            "model",
        )
    budget = tree_budget_of(config, pair)
    drafter, block = pair.drafter_config, pair.block_size
    narrow = tree_refusal(budget, block) if budget else None
    if narrow:
        raise ConfigRejected(f"{narrow}, 0, or a smaller block_size", "tree_budget")
    layers = int(pair.checkpoint.config["num_hidden_layers"])
    if budget and drafter is not None and max(drafter.target_layer_ids) >= layers - 1:
        raise ConfigRejected(
            f"drafter: {pair.drafter_path} is fed with the target's last layer (target_layer_ids "
            f"{list(drafter.target_layer_ids)} of {layers} layers), which SGLang keeps; use engine = native",
            "drafter",
        )
    return Prepared(pair, launch_of(config, pair, budget, block), budget)


def inspect_sglang(config: RuntimeConfig) -> None:
    """Everything that can be known before teardown, SGLang's own parser included; raises ConfigRejected."""
    prepared = prepare(config)
    folder = environment_folder()
    folder.parent.mkdir(parents=True, exist_ok=True)
    check(prepared.launch, folder.parent)
