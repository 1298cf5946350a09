"""The plugin's parts inside SGLang's own environment, on a CPU under the Triton interpreter.

Run by `make test-sglang` with SGLang's Python; the project's other tests do not collect this folder.
"""

from __future__ import annotations

import itertools
import multiprocessing
import types

import pytest
import torch

from runtime import sglang_checks
from runtime.tree import build_tree, tree_links


def registered_here(answers: multiprocessing.Queue) -> None:
    """What a scheduler process does first."""
    from sglang.srt.plugins import load_plugins
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    load_plugins()
    algorithm = SpeculativeAlgorithm.from_string("ddtree_console")
    answers.put((algorithm.name, algorithm.is_dflash_family(), algorithm.is_eagle(), algorithm.need_topk()))


def test_a_spawned_process_has_the_algorithm_with_its_answers() -> None:
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    process = context.Process(target=registered_here, args=(answers,))
    process.start()
    assert answers.get(timeout=120) == ("DDTREE_CONSOLE", True, False, False)
    process.join()


def test_a_release_that_was_not_tested_is_refused_with_the_tested_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(RuntimeError, match="not tested with SGLang 0.9.1; tested: 0.5.17, 0.5.18"):
        sglang_checks.check_version("0.9.1")
    sglang_checks.check_version("0.5.18+cu130")
    monkeypatch.setenv(sglang_checks.UNTESTED, "1")
    sglang_checks.check_version("0.9.1")


def arguments(**changes: object) -> types.SimpleNamespace:
    plain = {
        "pp_size": 1,
        "enable_dp_attention": False,
        "page_size": 1,
        "speculative_draft_model_path": "/d",
        "speculative_dflash_block_size": 8,
        "speculative_num_draft_tokens": 32,
        "tokenizer_worker_num": 1,
    }
    return types.SimpleNamespace(**plain | changes)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"pp_size": 2}, "pp_size is 2"),
        ({"page_size": 16}, "page_size is 16"),
        ({"speculative_num_draft_tokens": 7}, "7 is below the draft block of 8"),
        ({"speculative_num_draft_tokens": None}, "budget plus 1"),
        ({"speculative_draft_model_path": None}, "speculative_draft_model_path is missing"),
        ({"tokenizer_worker_num": 2}, "tokenizer_worker_num is 2"),
        ({"enable_dp_attention": True}, "enable_dp_attention"),
    ],
)
def test_arguments_under_which_trees_cannot_run_are_refused_by_name(change: dict, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        sglang_checks.check_server_args(arguments(**change))
    sglang_checks.check_server_args(arguments())


def drafts(batch: int, block: int, budget: int, vocab: int, mode: str = "tree"):
    from runtime.sglang_draft import Drafts, Head, TreeShape

    torch.manual_seed(0)
    return Drafts(TreeShape.of(mode, block, budget + 1), Head(torch.eye(vocab)), batch)


def block_rows(logits: torch.Tensor) -> torch.Tensor:
    """Hidden states of a drafter whose head is the identity, the root's row first."""
    return torch.cat((torch.zeros_like(logits[:, :1]), logits), 1).flatten(0, 1)


@pytest.mark.parametrize("mode", ["tree", "chain"])
def test_the_drafters_tail_builds_the_trees_of_the_round(mode: str) -> None:
    made = drafts(3, 6, 20 if mode == "tree" else 5, 40, mode)
    logits = torch.randn(3, 5, 40) * 3
    ids = torch.arange(18)
    made.set_sampling(torch.ones(3), None, torch.full((3,), 40))
    made.draft(block_rows(logits), ids, torch.arange(18))
    expected = build_tree(
        logits.log_softmax(-1), made.shape.tree_budget, ids.view(3, 6)[:, 0], 1 if mode == "chain" else None
    )
    tree = made.trees(3)
    for name in ("token_ids", "parents", "depths", "ancestor_mask"):
        assert torch.equal(getattr(tree, name), getattr(expected, name)), name
    torch.testing.assert_close(tree.log_probs, expected.log_probs, atol=1e-5, rtol=0)


def test_over_two_ranks_the_same_tokens_come_out_as_from_one_head() -> None:
    from runtime.sglang_draft import Head, top_log_probs

    torch.manual_seed(1)
    scores = torch.randint(-4, 4, (2, 3, 64)).float()  # many ties
    whole = top_log_probs(scores, Head(torch.empty(64, 1)), 9)
    halves = [scores[..., :32].contiguous(), scores[..., 32:].contiguous()]

    class Group:
        """Both ranks' parts of each gathered tensor, in the order in which they are asked for."""

        world_size = 2

        def __init__(self) -> None:
            alone = [top_parts(half) for half in halves]
            self.parts = [torch.stack([alone[0][i], alone[1][i] + (32 if i == 2 else 0)]) for i in range(3)]
            self.asked = itertools.count()

        def all_gather_into_tensor(self, whole: torch.Tensor, _part: torch.Tensor) -> None:
            whole.copy_(self.parts[next(self.asked)].flatten(0, 1))

    def top_parts(half: torch.Tensor) -> list[torch.Tensor]:
        from runtime.sampling import ordered_top

        values, ids = ordered_top(half, 9)
        return [half.logsumexp(-1, keepdim=True), values, ids]

    split = top_log_probs(halves[0], Head(torch.empty(32, 1), 0, Group()), 9)
    assert torch.equal(split[1], whole[1])
    torch.testing.assert_close(split[0], whole[0], atol=1e-5, rtol=0)


def test_the_drafter_gets_the_noise_that_the_seeded_sampler_adds() -> None:
    from sglang.srt.layers.sampler import multinomial_with_seed

    from runtime.sglang_draft import tempered

    made = drafts(4, 5, 8, 300)
    logits, positions = torch.randn(16, 300) * 2, torch.randint(0, 4000, (16,))
    seeds = torch.tensor([1, 2**40 + 7, 2**62, 42])
    made.set_sampling(torch.full((4,), 0.8), seeds, torch.tensor([300, 300, 7, 300]))
    scores = tempered(logits, made, positions, 4)
    rows = seeds.repeat_interleave(4)
    chosen = multinomial_with_seed((logits / 0.8).log_softmax(-1), rows, positions).view(-1)
    assert torch.equal(scores.argmax(-1), chosen)
    made.set_sampling(torch.full((4,), 0.8), seeds, torch.ones(4))
    torch.testing.assert_close(tempered(logits, made, positions, 4), logits / 0.8)


def test_the_mask_lies_where_the_attention_kernel_reads_it() -> None:
    from runtime.sglang_verify import MaskBuffer

    nodes, lengths = 5, torch.tensor([3, 0, 7])
    buffer = torch.zeros(3 * nodes * (10 + nodes), dtype=torch.uint8)
    masks = torch.rand(3, nodes, nodes) > 0.5
    filled = MaskBuffer(buffer, nodes, 10).fill(masks, lengths)
    parts = []
    for mask, length in zip(masks, lengths.tolist(), strict=True):
        parts.append(torch.cat((torch.zeros(nodes, length, dtype=torch.bool), mask), 1).flatten())
    expected = torch.cat(parts)
    assert torch.equal(filled[: expected.numel()].bool(), expected)
    assert not filled[expected.numel() :].any()
    # A larger prefix afterwards leaves nothing of the first one among the tree's cells.
    MaskBuffer(buffer, nodes, 10).fill(masks, lengths + 2)


@pytest.mark.parametrize(("dtype", "apart"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
def test_the_attention_kernel_sees_the_tree_and_not_its_neighbours(dtype: torch.dtype, apart: float) -> None:
    from sglang.kernels.ops.attention.extend_attention import extend_attention_fwd

    from runtime.sglang_verify import MaskBuffer

    torch.manual_seed(0)
    nodes, prefix, heads, kv_heads, dim = 8, 20, 4, 2, 16
    parents = torch.tensor([[0, 0, 0, 1, 1, 2, 5, 3]])
    from runtime.tree import ancestor_mask

    mask = ancestor_mask(parents, 5)
    q = torch.randn(nodes, heads, dim).to(dtype)
    k, v = torch.randn(2, nodes, kv_heads, dim).to(dtype)
    kept_k, kept_v = torch.randn(2, 64, kv_heads, dim).to(dtype)
    buffer = MaskBuffer(torch.zeros(nodes * (64 + nodes), dtype=torch.uint8), nodes, 64)

    def attended(tree_mask: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(q)
        extend_attention_fwd(
            q, k, v, out, kept_k, kept_v,
            torch.tensor([0, nodes]), torch.tensor([0, prefix], dtype=torch.int32), torch.arange(prefix),
            buffer.fill(tree_mask, torch.tensor([prefix])), True, torch.tensor([0, nodes * (prefix + nodes)]),
            nodes, 1.0, 1.0, sm_scale=dim**-0.5,
        )  # fmt: skip
        return out

    def reference(tree_mask: torch.Tensor) -> torch.Tensor:
        keys = torch.cat((kept_k[:prefix], k)).float().repeat_interleave(heads // kv_heads, 1)
        values = torch.cat((kept_v[:prefix], v)).float().repeat_interleave(heads // kv_heads, 1)
        seen = torch.cat((torch.ones(nodes, prefix, dtype=torch.bool), tree_mask[0]), 1)
        scores = torch.einsum("thd,khd->htk", q.float(), keys) * dim**-0.5
        return torch.einsum("htk,khd->thd", scores.masked_fill(~seen, -torch.inf).softmax(-1), values)

    torch.testing.assert_close(attended(mask).float(), reference(mask), atol=apart, rtol=10 * apart)
    # The negative control: one ancestor bit dropped inside the block is seen in the result.
    broken = mask.clone()
    broken[0, 6, 5] = False
    assert (attended(broken) - attended(mask)).abs().max() > 5 * apart


def test_links_of_a_tree_are_what_sglangs_grammar_walk_reads() -> None:
    parents = torch.tensor([[0, 0, 0, 1, 1, 2, 5, 3]])
    children, siblings = tree_links(parents)
    assert children.tolist() == [[1, 3, 5, 7, -1, 6, -1, -1]]
    assert siblings.tolist() == [[-1, 2, -1, 4, -1, -1, -1, -1]]


def sampling(temperature: float, **changes: object) -> types.SimpleNamespace:
    plain = {
        "is_all_greedy": temperature == 0,
        "temperatures": torch.full((2, 1), temperature or 1.0),
        "top_ks": torch.tensor([1 << 30, 1 << 30], dtype=torch.int32),
        "top_ps": torch.ones(2),
        "min_ps": torch.zeros(2),
        "need_top_k_sampling": False,
        "need_top_p_sampling": False,
        "need_min_p_sampling": False,
        "sampling_seed": torch.tensor([5, 9]),
    }
    return types.SimpleNamespace(**plain | changes)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"need_top_p_sampling": True, "top_ps": torch.tensor([0.8, 1.0])},
        {"need_top_k_sampling": True, "top_ks": torch.tensor([1, 50], dtype=torch.int32)},
        {"need_min_p_sampling": True, "min_ps": torch.tensor([0.1, 0.0])},
    ],
)
def test_every_node_chooses_what_plain_decoding_would_at_its_position(
    changes: dict, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sglang.srt.layers import sampler
    from sglang.srt.plugins import load_plugins

    from runtime.sglang_verify import choose

    monkeypatch.setenv("DDTREE_SGLANG_SEEDED", "1")
    load_plugins()
    logits, positions = torch.randn(8, 50) * 2, torch.randint(0, 900, (8,))
    settings = sampling(0.7, **changes)
    chosen = choose(logits.clone(), settings, positions, 4).flatten()
    for row in range(8):
        one = slice(row // 4, row // 4 + 1)
        probs = torch.softmax(logits[row : row + 1] / 0.7, -1)
        seed, place = settings.sampling_seed[one], positions[row : row + 1]
        alone = sampler.top_k_top_p_min_p_sampling_from_probs_torch(
            probs.clone(), settings.top_ks[one], settings.top_ps[one], settings.min_ps[one],
            settings.need_min_p_sampling, seed, place,
        )  # fmt: skip
        assert int(alone) == int(chosen[row])
        if row >= 4:
            # The second request filters nothing: its neighbour's filters do not change its text.
            assert int(alone) == int(sampler.sampling_from_probs_torch(probs, seed, place))
    if "top_ks" in changes:
        assert torch.equal(chosen[:4], logits[:4].argmax(-1))
    assert torch.equal(choose(logits.clone(), sampling(0), positions, 4).flatten(), logits.argmax(-1))


def test_filters_leave_what_sglangs_own_leave() -> None:
    from runtime.sglang_verify import kept

    probs = torch.softmax(torch.randn(6, 40) * 2, -1)
    top_ks, top_ps = torch.tensor([1, 3, 40, 40, 8, 40]), torch.tensor([1.0, 1.0, 0.5, 0.9, 0.6, 1.0])
    left = kept(probs.clone(), top_ks, top_ps, torch.tensor([0.0, 0.0, 0.0, 0.0, 0.0, 0.2])) > 0
    for row, (k, p) in enumerate(zip(top_ks.tolist(), top_ps.tolist(), strict=True)):
        order, mass = probs[row].argsort(descending=True).tolist(), 0.0
        for rank, token in enumerate(order):
            enough = probs[row, token] >= 0.2 * probs[row].max() or row != 5
            assert bool(left[row, token]) == (rank < k and mass <= p and bool(enough))
            mass += float(probs[row, token])


def test_the_accepted_path_is_that_of_the_walk() -> None:
    from runtime.sglang_verify import accept
    from runtime.tree import accept_path

    torch.manual_seed(3)
    tree = build_tree((torch.randn(16, 4, 6) * 2).log_softmax(-1), 12, torch.zeros(16, dtype=torch.int64))
    choices = torch.randint(0, 6, (16, 13))
    made = accept(tree, choices, 5)
    for row, path in enumerate(accept_path(tree, choices)):
        length = int(made.lengths[row])
        assert made.path[row, :length].tolist() == path
        assert made.path[row, length:].tolist() == list(range(length, 5))
        assert made.token_ids[row, :length].tolist() == choices[row, path].tolist()
        assert int(made.bonus[row]) == int(choices[row, path[-1]])
