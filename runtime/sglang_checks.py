"""What must hold before `DDTREE_CONSOLE` serves; each check raises, so that SGLang does not come up, and says why.

SGLang decides some things by class or algorithm name, and its internals change between releases. A release that is not
in `TESTED` is refused rather than tried.
"""

from __future__ import annotations

import os
from importlib import metadata
from typing import Any

TESTED = ("0.5.17", "0.5.18")
"""Releases of SGLang that the plugin was run with."""
BACKENDS = ("triton",)
"""Attention backends whose tree mask was tested."""
UNTESTED = "DDTREE_SGLANG_UNTESTED"
"""Variable that lets a release run that is not in `TESTED`."""
MODE, SEEDED = "DDTREE_SGLANG_MODE", "DDTREE_SGLANG_SEEDED"
"""Variables: tree or chain; 1 where plain decoding too samples by each request's seed."""


def installed_version() -> str:
    """SGLang's version here; raises RuntimeError where there is none."""
    try:
        return metadata.version("sglang")
    except metadata.PackageNotFoundError:
        raise RuntimeError("DDTREE_CONSOLE: SGLang is not installed in this environment") from None


def check_version(version: str) -> None:
    """Raises RuntimeError for a release that was not tested."""
    if version.partition("+")[0] in TESTED or os.environ.get(UNTESTED) == "1":
        return
    raise RuntimeError(
        f"DDTREE_CONSOLE was not tested with SGLang {version}; tested: {', '.join(TESTED)}. Install one of these, or "
        f"set {UNTESTED}=1 to try"
    )


def check_server_args(server_args: Any) -> None:
    """Raises ValueError for arguments under which trees cannot run, naming the argument."""
    from runtime.sglang_draft import TreeShape

    def refuse(what: str, remedy: str) -> None:
        raise ValueError(f"DDTREE_CONSOLE: {what}; {remedy}")

    if server_args.pp_size != 1:
        refuse(f"pp_size is {server_args.pp_size}", "SGLang has no pipelines with speculation, use 1")
    if server_args.enable_dp_attention:
        refuse("enable_dp_attention is set", "leave it out")
    if server_args.page_size not in (None, 1):
        refuse(f"page_size is {server_args.page_size}", "accepted nodes are moved slot by slot, use 1")
    if server_args.speculative_draft_model_path is None:
        refuse("speculative_draft_model_path is missing", "name the drafter's folder")
    if server_args.speculative_dflash_block_size is None:
        refuse("the drafter's config.json has no block_size", "set speculative_dflash_block_size")
    if server_args.speculative_num_draft_tokens is None:
        refuse("speculative_num_draft_tokens is missing", "set it to the tree budget plus 1")
    if server_args.tokenizer_worker_num != 1:
        refuse(f"tokenizer_worker_num is {server_args.tokenizer_worker_num}", "use 1: others load no plugins")
    try:
        TreeShape.of(
            os.environ.get(MODE, "tree"),
            int(server_args.speculative_dflash_block_size),
            int(server_args.speculative_num_draft_tokens),
        )
    except ValueError as wrong:
        raise ValueError(f"DDTREE_CONSOLE: {wrong}") from None


def check_worker(worker: Any) -> None:
    """Raises RuntimeError where the loaded parts are not what the worker is written for."""
    from sglang.srt.configs.hybrid_arch import mambaish_config

    if mambaish_config(worker.model_runner.model_config) is not None:
        raise RuntimeError(
            "DDTREE_CONSOLE: the target has recurrent layers, whose state cannot follow a tree"
        )
    from sglang.srt.plugins.hook_registry import HookRegistry

    from runtime.sglang_plugin import HOOKED

    missing = [name for name in HOOKED if name not in HookRegistry._patched]
    if missing:
        raise RuntimeError(f"DDTREE_CONSOLE: SGLang did not apply the hook on {missing[0]}; its log says why")
    runner = worker.draft_model_runner
    width = runner.spec_algorithm.get_num_tokens_per_req_for_target_verify(worker.shape.nodes, True)
    if width != worker.shape.block_size or worker.block_size != worker.shape.block_size:
        raise RuntimeError(
            f"DDTREE_CONSOLE: the drafter runs {width} rows, its block has {worker.block_size}"
        )


def check_captured_mask(worker: Any) -> None:
    """Raises RuntimeError where a captured verify graph would run without the trees' mask.

    For the DFlash family SGLang captures no mask, by class name of the attention backend, and replays such graphs in
    silence: every node would see every other one before it.
    """
    runner = worker.model_runner
    backend = runner.attn_backend
    name = type(backend).__name__
    if name != "TritonAttnBackend":
        raise RuntimeError(
            f"DDTREE_CONSOLE: attention backend {name} was not tested with trees; use --attention-backend triton"
        )
    graphs = runner.decode_cuda_graph_runner
    if graphs is None:
        return
    spec_info = graphs.get_spec_info(graphs.captured_req_width)
    if backend.verify_mask is None or getattr(spec_info, "custom_mask", None) is None:
        raise RuntimeError(
            "DDTREE_CONSOLE: the verify graphs were captured without a mask; trees would be wrong"
        )
    if graphs.captured_req_width != worker.shape.nodes:
        raise RuntimeError(
            f"DDTREE_CONSOLE: verify graphs have {graphs.captured_req_width} rows, trees {worker.shape.nodes}"
        )
