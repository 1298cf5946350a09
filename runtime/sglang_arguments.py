"""From a configuration and its layout to the arguments and variables that SGLang is started with."""

from __future__ import annotations

from typing import Any

from layouts.arguments import TREE_ALGORITHM, child_environment
from layouts.library import load_library
from layouts.presets import Degrees, Preset
from layouts.values import LayoutError
from runtime.config import RuntimeConfig
from runtime.interface import ConfigRejected
from runtime.loader import Pair
from runtime.sglang_checks import MODE, SEEDED
from runtime.sglang_host import Launch, find_python

SINGLE = Preset(name="single-gpu", title="One process", engine="sglang")
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
    """SGLang keeps the last position of a context free; where the target has one more it gets that."""
    own = pair.checkpoint.config.get("max_position_embeddings")
    return min(pair.limits.max_seq_len + 1, int(own)) if own else pair.limits.max_seq_len


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
