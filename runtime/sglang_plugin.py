"""`DDTREE_CONSOLE`, a speculative algorithm for SGLang that comes from outside of it: entry point `sglang.srt.plugins`.

SGLang calls `register` in each of its processes. Nothing of SGLang is edited: an algorithm is registered, and five of
its functions get hooks through its own hook registry:

    capture of verify graphs      would leave the trees' mask out for the DFlash family, which SGLang tells by name
    settings of a batch           give seeds to its sampler only in deterministic mode, which slows everything
    choice under filters          would add a seed's noise by rank, so that a text would depend on its neighbours
    requests that are refused     penalties would not see the drafted ancestors of a node
    changes of internal state     how many draft nodes count can be changed between two steps, on all ranks at once

Settings that SGLang's arguments have no place for come by environment: `DDTREE_SGLANG_MODE` (tree or chain) and
`DDTREE_SGLANG_SEEDED` = 1 (plain decoding too samples by each request's seed).
"""

from __future__ import annotations

import json
import os
import secrets
from pathlib import Path
from typing import Any

from runtime.sglang_checks import BACKENDS, SEEDED, check_server_args, check_version, installed_version

NAME = "DDTREE_CONSOLE"
HOOKED = (
    "sglang.srt.model_executor.runner.decode_cuda_graph_runner.DecodeCudaGraphRunner.get_spec_info",
    "sglang.srt.sampling.sampling_batch_info.SamplingBatchInfo.from_schedule_batch",
    "sglang.srt.speculative.dflash_utils.validate_dflash_request",
    "sglang.srt.layers.sampler.top_k_top_p_min_p_sampling_from_probs_torch",
    "sglang.srt.managers.scheduler.Scheduler.set_internal_state",
)
"""Functions of SGLang that get a hook: the first three after them, the others around them."""
BUDGET = "ddtree_tree_budget"
"""Key of a change of internal state, as of `/set_internal_state`: how many draft nodes count."""
DEFAULT_RUNNING = 16
"""Requests at a time where no argument says so: a batch verifies requests x nodes rows."""


def register() -> None:
    """Registers the algorithm and its hooks; raises RuntimeError for a release of SGLang that was not tested."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    check_version(installed_version())

    @SpeculativeAlgorithm.register(
        NAME, supports_overlap=True, validate_server_args=check_arguments, spec_class=_spec_class()
    )
    def _factory(server_args: Any) -> type:
        from runtime.sglang_worker import worker_class

        return worker_class(server_args)

    for target, hook in zip(HOOKED, (with_tree_mask, with_seeds, refuse_request), strict=False):
        HookRegistry.register(target, hook, HookType.AFTER)
    for target, hook in zip(HOOKED[3:], (choose_by_token, set_budget), strict=True):
        HookRegistry.register(target, hook, HookType.AROUND)


def check_arguments(server_args: Any) -> None:
    """Fills in the block size and refuses what cannot run, before anything is loaded."""
    if server_args.speculative_dflash_block_size is None and server_args.speculative_draft_model_path:
        config = Path(server_args.speculative_draft_model_path) / "config.json"
        try:
            server_args.speculative_dflash_block_size = int(json.loads(config.read_text())["block_size"])
        except (OSError, ValueError, KeyError, TypeError):
            server_args.speculative_dflash_block_size = None
    check_server_args(server_args)


def complete_arguments(server_args: Any) -> None:
    """What the algorithm needs of SGLang's other arguments."""
    from sglang.srt.arg_groups.overrides import resolved_view
    from sglang.srt.arg_groups.speculative_hook import _resolve_dflash_draft_attention_backend

    resolved = resolved_view(server_args)
    if resolved.attention_backend not in BACKENDS:
        raise ValueError(
            f"{NAME}: attention_backend {resolved.attention_backend} was not tested with trees; give "
            f"--attention-backend {' or '.join(BACKENDS)}"
        )
    if resolved.sampling_backend != "pytorch":
        raise ValueError(
            f"{NAME}: sampling_backend {resolved.sampling_backend} knows no seeds; give --sampling-backend pytorch"
        )
    # SGLang sizes buffers by steps x top-k; the width of a verify pass is the larger one here.
    server_args.speculative_num_steps = int(server_args.speculative_dflash_block_size) - 1
    server_args.speculative_eagle_topk = 1
    server_args.enable_mixed_chunk = False
    server_args.max_running_requests = server_args.max_running_requests or DEFAULT_RUNNING
    _resolve_dflash_draft_attention_backend(server_args)


def with_tree_mask(spec_info: Any, runner: Any, num_tokens: int) -> Any:
    """Gives the input that the target's verify graphs are captured with the mask they are to read."""
    if not _is_ours(runner.model_runner) or runner.model_runner.is_draft_worker:
        return spec_info
    from runtime.sglang_verify import DDTreeVerifyInput

    return DDTreeVerifyInput(
        draft_token=None,
        positions=None,
        draft_token_num=runner.captured_req_width,
        custom_mask=runner.buffers.custom_mask,
        capture_hidden_mode=spec_info.capture_hidden_mode,
    )


def with_seeds(sampling: Any, *args: Any, **_kwargs: Any) -> Any:
    """Gives every request of a batch a seed for SGLang's seeded sampler; one without draws it, once."""
    batch = next((each for each in args if hasattr(each, "reqs")), None)
    if batch is None or sampling.sampling_seed is not None:
        return sampling
    if not _seeded():
        return sampling
    import torch

    for request in batch.reqs:
        parameters = request.sampling_params
        if parameters.sampling_seed is None:
            parameters.sampling_seed = secrets.randbits(63)
    seeds = torch.tensor([_signed(each.sampling_params.sampling_seed) for each in batch.reqs])
    sampling.sampling_seed = seeds.to(sampling.device, non_blocking=True)
    return sampling


def choose_by_token(
    chosen: Any,
    probs: Any,
    top_ks: Any,
    top_ps: Any,
    min_ps: Any,
    need_min_p: bool,
    seeds: Any,
    positions: Any,
) -> Any:
    """In place of SGLang's choice under top-k, top-p and min-p (`chosen`): noise of a seed belongs to the token id."""
    if seeds is None or not _seeded():
        return chosen(probs, top_ks, top_ps, min_ps, need_min_p, seeds, positions)
    from sglang.srt.layers.sampler import sampling_from_probs_torch

    from runtime.sglang_verify import kept

    left = kept(probs, top_ks, top_ps, min_ps if need_min_p else None)
    return sampling_from_probs_torch(left, sampling_seed=seeds, positions=positions)


def set_budget(others: Any, scheduler: Any, asked: Any) -> Any:
    """Takes `BUDGET` out of a change of internal state, which all ranks get between the same two steps.

    Refused, as SGLang refuses, where no trees are served or the graphs hold fewer nodes.
    """
    wanted = dict(asked.server_args)
    budget = wanted.pop(BUDGET, None)
    if budget is None:
        return others(scheduler, asked)
    from sglang.srt.managers.io_struct import SetInternalStateReqOutput

    worker = scheduler.draft_worker
    shape = getattr(worker, "shape", None)
    if wanted or shape is None or not shape.horizon <= budget <= shape.tree_budget:
        return SetInternalStateReqOutput(updated=False)
    worker.tree_budget = int(budget)
    return SetInternalStateReqOutput(updated=True)


def refuse_request(refusal: str | None, request: Any, *_args: Any) -> str | None:
    """Why SGLang must not take a request, in one line; None: it may."""
    if refusal is not None:
        return refusal
    parameters = request.sampling_params
    penalties = {
        "frequency_penalty": parameters.frequency_penalty != 0,
        "presence_penalty": parameters.presence_penalty != 0,
        "repetition_penalty": parameters.repetition_penalty != 1,
        "min_new_tokens": parameters.min_new_tokens > 0,
    }
    if not _serves_trees():
        return None
    asked = [name for name, wanted in penalties.items() if wanted]
    if asked:
        return f"{asked[0]} is not supported by {NAME}: a node's drafted ancestors would not be counted"
    if request.return_logprob:
        return f"log-probabilities are not supported by {NAME}"
    return None


def _seeded() -> bool:
    """Whether the process samples by each request's seed."""
    return os.environ.get(SEEDED) == "1" or _serves_trees()


def _serves_trees() -> bool:
    from sglang.srt.runtime_context import get_spec

    return str(get_spec().speculative_algorithm).upper() == NAME


def _is_ours(model_runner: Any) -> bool:
    return getattr(model_runner.spec_algorithm, "name", None) == NAME


def _signed(seed: int) -> int:
    return seed - 2**64 if seed >= 2**63 else seed


def _spec_class() -> type:
    """The algorithm's answers to what SGLang asks of algorithms; made here because SGLang is imported late."""
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
    from sglang.srt.speculative.spec_registry import CustomSpecAlgo

    class DDTreeConsole(CustomSpecAlgo):
        """Of the DFlash family (features, draft pool, draft graphs), with its own widths of draft and verify."""

        create_future_map = SpeculativeAlgorithm.create_future_map

        def is_dflash_family(self) -> bool:
            return True

        def is_dflash(self) -> bool:
            return True

        def supports_target_verify_for_draft(self) -> bool:
            return True

        def supports_grammar_overlap(self) -> bool:
            return True

        def has_draft_kv(self) -> bool:
            return False

        def need_topk(self) -> bool:
            return False

        def carries_draft_hidden_states(self) -> bool:
            return False

        def handle_server_args(self, server_args: Any) -> None:
            complete_arguments(server_args)

        def get_num_tokens_per_req_for_target_verify(
            self, num_draft_tokens: int, is_draft_worker: bool
        ) -> int:
            """Rows a request: the drafter runs its block, the target the whole tree."""
            from sglang.srt.runtime_context import get_spec

            return int(get_spec().speculative_dflash_block_size) if is_draft_worker else num_draft_tokens

    return DDTreeConsole
