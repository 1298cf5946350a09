"""The speculative worker SGLang runs for `DDTREE_CONSOLE`: SGLang's DFlash worker, drafting and verifying trees.

Loading, memory, prefill and the drafter's graphs are the parent's; one decode step is here:

    draft     the drafter's pass over `[root, mask, ...]`; its tail builds the trees (`runtime.sglang_draft`)
    verify    the target's pass over all nodes under the trees' mask (`runtime.sglang_verify`)
    accept    the path along the target's own choices
    commit    the path's keys and values move to the front of the request's slots, its features to the drafter

Slots are read from the request table once, before the target's pass, and never again: the scheduler may write the table
from then on. Nothing of a step is read back to the host.
"""

from __future__ import annotations

import copy
import logging
import os
from typing import Any

import torch
from sglang.srt.distributed import get_tp_group
from sglang.srt.managers.scheduler import GenerationBatchResult
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardBatch, ForwardMode
from sglang.srt.runtime_context import get_exec
from sglang.srt.speculative.dflash_info_v2 import DFlashDraftInputV2
from sglang.srt.speculative.dflash_utils import apply_dflash_verify_logits_adjustments
from sglang.srt.speculative.dflash_worker_v2 import DFlashWorkerV2
from sglang.srt.speculative.spec_utils import GrammarTree, build_grammar_vocab_mask
from torch import Tensor

from runtime.sglang_checks import MODE, check_captured_mask, check_worker
from runtime.sglang_draft import Drafts, Head, TreeShape
from runtime.sglang_trees import PLACE, TreeSampler
from runtime.sglang_verify import Accepted, DDTreeVerifyInput, MaskBuffer, accept, choose
from runtime.tree import DraftTree, tree_links

logger = logging.getLogger(__name__)


class DDTreeWorker(DFlashWorkerV2):
    """One rank's worker; all ranks draft, choose and accept alike."""

    def __init__(self, server_args: Any, gpu_id: int, ps: Any, nccl_port: int, target_worker: Any) -> None:
        """Raises ValueError or RuntimeError, saying why, where this SGLang or these arguments cannot run trees."""
        mode = os.environ.get(MODE, "tree")
        block = int(server_args.speculative_dflash_block_size)
        self.shape = TreeShape.of(mode, block, int(server_args.speculative_num_draft_tokens))
        # The parent takes its block from the width of a verify pass, which is the trees' here.
        drafting = copy.copy(server_args)
        object.__setattr__(drafting, "speculative_num_draft_tokens", block)
        object.__setattr__(drafting, "speculative_eagle_topk", 1)
        super().__init__(drafting, gpu_id, ps, nccl_port, target_worker)
        self.server_args = server_args
        self._drafts: Drafts | None = None
        self._mask: MaskBuffer | None = None
        self._captured_mask: MaskBuffer | None = None
        self._node_offsets = torch.arange(self.shape.nodes, device=self.device)
        place = os.environ.get(PLACE)
        self._trees = TreeSampler(place) if place and get_tp_group().rank_in_group == 0 else None
        self.tree_budget = self.shape.tree_budget
        """Draft nodes that count, at most as many as the graphs were captured for; see `sglang_plugin.set_budget`."""
        check_worker(self)
        logger.info("DDTREE_CONSOLE: %s trees of %d nodes, block %d", mode, self.shape.nodes, block)

    # Set-up

    def init_cuda_graphs(self) -> None:
        config = get_exec().graph.cuda_graph_config
        captured = max(config.decode.bs) if config is not None and config.decode.bs else 0
        self._drafts = Drafts(self.shape, self._head(), max(captured, self._max_batch()))
        super().init_cuda_graphs()
        check_captured_mask(self)

    def _maybe_build_draft_sampler(self) -> Any:
        """In place of the parent's greedy head: what the drafter's captured pass ends with."""
        drafts = self._drafts
        assert drafts is not None

        def tail(_runner: Any, out: Any, forward_batch: ForwardBatch, _tokens: int) -> None:
            drafts.draft(out.hidden_states, forward_batch.input_ids, forward_batch.positions)

        self.draft_model_runner.capture_tail_hooks.append(tail)
        return None

    def _head(self) -> Head:
        lm_head = self._target_worker.model_runner.model.lm_head
        group = get_tp_group()
        shard = getattr(lm_head, "shard_indices", None)
        if shard is None:
            if group.world_size > 1:
                raise RuntimeError("DDTREE_CONSOLE: the target's head does not say which tokens a rank holds")
            return Head(lm_head.weight)
        if int(shard.num_added_elements):
            raise RuntimeError("DDTREE_CONSOLE: a target with added vocabulary is not supported")
        weight = lm_head.weight[: int(shard.num_org_elements)]
        return Head(weight, int(shard.org_vocab_start_index), group if group.world_size > 1 else None)

    def _max_batch(self) -> int:
        return int(self.model_runner.req_to_token_pool.size)

    def _mask_buffer(self, requests: int) -> MaskBuffer:
        """The attention backend's own mask buffer, which captured graphs read; a larger one for a batch beyond them."""
        backend, nodes = self.model_runner.attn_backend, self.shape.nodes
        context, own = int(backend.max_context_len), backend.verify_mask
        if own is not None and own.fits(requests):
            # Of its size the graphs' copy of the mask is; a larger one must never meet them.
            if self._captured_mask is None or self._captured_mask.buffer is not own.buffer:
                self._captured_mask = MaskBuffer(own.buffer, nodes, context)
            return self._captured_mask
        if self._mask is None:
            cells = self._max_batch() * nodes * (context + nodes)
            buffer = torch.zeros(cells, dtype=torch.uint8, device=self.device)
            self._mask = MaskBuffer(buffer, nodes, context)
        return self._mask

    # One step

    def forward_batch_generation(
        self, batch: Any, on_publish: Any = None, grammar_barrier: Any = None
    ) -> GenerationBatchResult:
        prefill = batch.forward_mode.is_extend() or batch.is_extend_in_batch
        if prefill or batch.forward_mode.is_idle():
            return super().forward_batch_generation(batch, on_publish, grammar_barrier)
        given = batch.spec_info
        if not isinstance(given, DFlashDraftInputV2):
            raise RuntimeError(f"DDTREE_CONSOLE: a decode batch came with {type(given).__name__}")
        if batch.seq_lens.is_cuda:
            # It may have been made on the scheduler's stream.
            batch.seq_lens.record_stream(torch.cuda.current_stream())
        with torch.inference_mode():
            committed = batch.seq_lens
            places = self._slots(batch, committed)
            tree = self._draft(batch, given, committed, places[:, : self.shape.block_size])
            grammar = self._grammar_tree(batch, tree)
            positions = (committed.unsqueeze(1) + tree.depths).flatten()
            output, on_graph = self._verify(batch, given, tree, positions, places)
            logits = output.logits_output.next_token_logits
            self._adjust(batch, logits, grammar, grammar_barrier)
            choices = choose(logits, batch.sampling_info, positions, self.shape.nodes)
            choices, block = self._agreed(batch, choices), self.shape.block_size
            accepted = accept(tree, choices, block, self.tree_budget)
            lengths = committed + accepted.lengths.to(committed.dtype)
            if on_publish is not None:
                on_publish(lengths)
            self._commit(output.logits_output, committed, places, accepted)
            if self._trees is not None:
                self._trees.step(batch.reqs, committed, tree, accepted, self.tree_budget + 1)
        output.logits_output.hidden_states = None
        return GenerationBatchResult(
            logits_output=output.logits_output,
            next_token_ids=accepted.token_ids.reshape(-1),
            accept_lens=accepted.lengths,
            can_run_cuda_graph=on_graph,
            next_draft_input=self._make_next_draft_input_decode(
                bonus_tokens=accepted.bonus, new_seq_lens=lengths
            ),
            speculative_num_draft_tokens=self.shape.block_size,
            new_seq_lens=lengths,
            routed_experts_output=output.routed_experts_output,
            indexer_topk_output=output.indexer_topk_output,
        )

    def _slots(self, batch: Any, committed: Tensor) -> Tensor:
        """The requests' slots for the nodes of their trees, `[batch, nodes]`."""
        table = self.model_runner.req_to_token_pool.req_to_token
        columns = committed.unsqueeze(1) + self._node_offsets
        return table[batch.req_pool_indices.unsqueeze(1), columns].to(torch.int64)

    def _draft(self, batch: Any, given: Any, committed: Tensor, places: Tensor) -> DraftTree:
        """The drafter's pass over a block of each request, and the trees that come of it."""
        drafts, block = self._drafts, self.shape.block_size
        assert drafts is not None
        requests = committed.shape[0]
        sampling = batch.sampling_info
        if sampling is not None:
            drafts.set_sampling(sampling.temperatures.view(-1), sampling.sampling_seed, sampling.top_ks)
        block_ids = torch.full((requests, block), self._mask_token_id, device=committed.device)
        block_ids[:, 0] = given.bonus_tokens
        positions = (committed.unsqueeze(1) + self._node_offsets[:block]).flatten()
        embeddings = self._target_worker.model_runner.model.get_input_embeddings()(block_ids)
        scale = getattr(self, "_noise_embed_scale", 1.0)  # not in every tested release
        if scale != 1.0:
            embeddings = embeddings * scale
        host_lengths, host_sum = _host_bounds(batch, given, block)
        forward = ForwardBatch(
            forward_mode=ForwardMode.TARGET_VERIFY,
            batch_size=requests,
            input_ids=block_ids.flatten(),
            req_pool_indices=batch.req_pool_indices,
            seq_lens=committed,
            out_cache_loc=places.reshape(-1),
            seq_lens_sum=host_sum,
            seq_lens_cpu=host_lengths,
            positions=positions,
            input_embeds=embeddings.flatten(0, 1),
            spec_algorithm=batch.spec_algorithm,
            spec_info=self._draft_block_spec_info,
            capture_hidden_mode=CaptureHiddenMode.NULL,
        )
        out = self.draft_model_runner.forward(forward)
        if not out.can_run_graph:
            drafts.draft(out.logits_output.hidden_states, forward.input_ids, positions)
        return drafts.trees(requests)

    def _verify(
        self, batch: Any, given: Any, tree: DraftTree, positions: Tensor, places: Tensor
    ) -> tuple[Any, bool]:
        """The target's pass over all nodes; whether a captured graph ran it."""
        token_ids = tree.token_ids.flatten()
        verify_input = DDTreeVerifyInput(
            draft_token=token_ids,
            positions=positions,
            draft_token_num=self.shape.nodes,
            custom_mask=self._mask_buffer(batch.seq_lens.shape[0]).fill(tree.ancestor_mask, batch.seq_lens),
            capture_hidden_mode=CaptureHiddenMode.FULL,
        )
        batch.out_cache_loc = places.reshape(-1)
        before = batch.seq_lens_cpu, batch.seq_lens_sum
        batch.seq_lens_cpu, batch.seq_lens_sum = _host_bounds(batch, given, self.shape.nodes)
        forward, _ = verify_input.prepare_for_verify(batch, self._target_worker)
        batch.seq_lens_cpu, batch.seq_lens_sum = before
        output = self._target_worker.forward_batch_generation(
            batch=None, forward_batch=forward, is_verify=True, skip_attn_backend_init=True
        )
        return output, output.can_run_cuda_graph

    def _grammar_tree(self, batch: Any, tree: DraftTree) -> GrammarTree | None:
        if not batch.has_grammar:
            return None
        return GrammarTree.from_device(*tree_links(tree.parents), tree.token_ids)

    def _adjust(self, batch: Any, logits: Tensor, grammar: GrammarTree | None, barrier: Any) -> None:
        """Logit bias, custom processors and grammar, at every node."""
        if batch.sampling_info is not None:
            apply_dflash_verify_logits_adjustments(
                next_token_logits=logits,
                sampling_info=batch.sampling_info,
                draft_token_num=self.shape.nodes,
            )
        if grammar is not None:
            allowed = build_grammar_vocab_mask(
                reqs=batch.reqs,
                tree=grammar,
                sampling_info=batch.sampling_info,
                device=logits.device,
                barrier=barrier,
            )
            if allowed is not None:
                allowed.apply(logits)

    def _agreed(self, batch: Any, choices: Tensor) -> Tensor:
        """Rank 0's choices where sampling could round otherwise on another rank."""
        group = get_tp_group()
        if group.world_size > 1 and not batch.sampling_info.is_all_greedy:
            group.broadcast(choices, src=0)
        return choices

    def _commit(self, output: Any, committed: Tensor, places: Tensor, accepted: Accepted) -> None:
        """Moves the accepted path to the front: keys and values of the target, and its features into the drafter."""
        block = self.shape.block_size
        front = places[:, :block]
        sources = places.gather(1, accepted.path)
        self.model_runner.token_to_kv_pool.move_kv_cache(front.reshape(-1), sources.reshape(-1))
        hidden = output.hidden_states
        if hidden is None:
            raise RuntimeError("DDTREE_CONSOLE: the target gave no hidden states to draft from")
        rows = hidden.view(committed.shape[0], self.shape.nodes, -1)
        features = rows.gather(1, accepted.path.unsqueeze(-1).expand(-1, -1, rows.shape[-1]))
        positions = committed.unsqueeze(1) + self._node_offsets[:block]
        self._append_target_hidden_to_draft_kv_by_loc(
            target_hidden=features.flatten(0, 1),
            cache_loc=front.reshape(-1),
            cache_loc_2d=front.contiguous(),
            positions=positions.flatten(),
            commit_lens=accepted.lengths,
        )


def _host_bounds(batch: Any, given: Any, width: int) -> tuple[Tensor, int]:
    """Upper bounds of the lengths on the host, with their sum: all that attention backends plan with."""
    if batch.seq_lens_cpu is not None:
        lengths = batch.seq_lens_cpu + width
        return lengths, int(lengths.sum())
    if given.reserved_seq_lens_cpu is not None:
        return given.reserved_seq_lens_cpu, int(given.reserved_seq_lens_sum)
    lengths = batch.seq_lens.cpu() + width  # no bound came with the batch: this waits for the device
    return lengths, int(lengths.sum())


def worker_class(_server_args: Any) -> type[DDTreeWorker]:
    return DDTreeWorker
