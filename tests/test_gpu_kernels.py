"""The kernels of the GPU round against the plain code, on a GPU or through Triton's interpreter on a CPU."""

from __future__ import annotations

import os

import pytest

triton = pytest.importorskip("triton", reason="triton is not installed")

import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from torch import Tensor  # noqa: E402

from runtime import gpu_attention as ga  # noqa: E402
from runtime import gpu_heads as gh  # noqa: E402
from runtime import gpu_kernels as gk  # noqa: E402
from runtime import gpu_tree as gt  # noqa: E402
from runtime.attention import packed_attention  # noqa: E402
from runtime.gpu_round import _candidate_pairs  # noqa: E402
from runtime.noise import gumbel_rows, signed_seed  # noqa: E402
from runtime.sampling import RowContext, Sampling, choose_tokens, ordered_top  # noqa: E402
from runtime.tree import DraftTree, accept_path, ancestor_mask, build_tree  # noqa: E402

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
PLAIN = {"PDL": False}


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def ints(values: object, dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.as_tensor(values, dtype=dtype, device=DEVICE)


def randn(*shape: int) -> Tensor:
    return torch.randn(shape, device=DEVICE)


def bits_of(mask: Tensor) -> Tensor:
    """Ancestor bits of a mask `[batch, nodes, nodes]`."""
    return (mask.long() << torch.arange(mask.shape[-1], device=DEVICE)).sum(-1).flatten()


def test_products_with_the_norms_around_them() -> None:
    rows, n, k = 5, 40, 48
    x, w, residual, bias = randn(9, k), randn(n, k), randn(rows, n), randn(n)
    gain, gain_next = randn(k), randn(n)
    picked = ints([8, 0, 3, 3, 5])
    squares, made = torch.zeros(9, 4, device=DEVICE), torch.zeros(9, 4, device=DEVICE)
    halves = (x**2).unflatten(1, (2, -1)).sum(-1)
    squares[:, :2] = halves
    out, scaled = torch.zeros(rows, n, device=DEVICE), torch.zeros(rows, n, device=DEVICE)
    tap = torch.zeros(rows, 3 * n, device=DEVICE)
    gk.linear_kernel[(3, 1)](
        x * gain, w, out, squares, bias, residual, picked, gain_next, scaled, made, tap[:, n:], rows, n, k, 2,
        3 * n, 1e-5, NORM=False, BIAS=True, RESIDUAL=True, GATHER=True, NEXT=True, TAP=True, TILES=4,
        BLOCK_M=16, BLOCK_N=16, BLOCK_K=32, EVEN=False, **PLAIN,
    )  # fmt: skip
    expected = F.linear((x * gain)[picked.long()], w, bias) + residual
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(scaled, expected * gain_next, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(made[:rows, :3].sum(1), (expected**2).sum(1), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(tap, F.pad(expected, (n, n)), rtol=1e-4, atol=1e-4)

    normed = torch.zeros(9, n, device=DEVICE)
    gk.linear_kernel[(3, 1)](
        x * gain, w, normed, squares, x, x, picked, x, x, x, x, 9, n, k, 2, 0, 1e-5,
        NORM=True, BIAS=False, RESIDUAL=False, GATHER=False, NEXT=False, TAP=False, TILES=4,
        BLOCK_M=16, BLOCK_N=16, BLOCK_K=16, EVEN=True, **PLAIN,
    )  # fmt: skip
    torch.testing.assert_close(normed, F.linear(F.rms_norm(x, (k,), gain, 1e-5), w), rtol=1e-4, atol=1e-4)

    both, gated = randn(2 * n, k), torch.zeros(9, n, device=DEVICE)
    gk.gated_kernel[(3, 1)](
        x * gain, both, gated, squares, 9, n, k, 2, 1e-5, TILES=4, BLOCK_M=16, BLOCK_N=16, BLOCK_K=16, EVEN=True,
        **PLAIN,
    )  # fmt: skip
    gate, up = F.linear(F.rms_norm(x, (k,), gain, 1e-5), both).chunk(2, 1)
    torch.testing.assert_close(gated, F.silu(gate) * up, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("k", [48, 64])
def test_products_of_one_row_in_registers(k: int) -> None:
    n = 40
    x, w, residual, gain, gain_next = randn(1, k), randn(n, k), randn(1, n), randn(k), randn(n)
    squares, made = torch.zeros(1, 8, device=DEVICE), torch.zeros(1, 8, device=DEVICE)
    squares[:, :2] = (x**2).unflatten(1, (2, -1)).sum(-1)
    out, scaled = torch.zeros(1, n, device=DEVICE), torch.zeros(1, n, device=DEVICE)
    tile = {"BLOCK_M": 1, "BLOCK_N": 8, "BLOCK_K": 32, "EVEN": k % 32 == 0, **PLAIN}
    gk.linear_kernel[(5, 1)](
        x * gain, w, out, squares, x, residual, x, gain_next, scaled, made, x, 1, n, k, 2, 0, 1e-5, NORM=False,
        BIAS=False, RESIDUAL=True, GATHER=False, NEXT=True, TAP=False, TILES=8, **tile,
    )  # fmt: skip
    expected = F.linear(x * gain, w) + residual
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(scaled, expected * gain_next, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(made[:, :5].sum(1), (expected**2).sum(1), rtol=1e-4, atol=1e-4)

    both, gated = randn(2 * n, k), torch.zeros(1, n, device=DEVICE)
    gk.gated_kernel[(5, 1)](x * gain, both, gated, squares, 1, n, k, 2, 1e-5, TILES=8, **tile)
    gate, up = F.linear(F.rms_norm(x, (k,), gain, 1e-5), both).chunk(2, 1)
    torch.testing.assert_close(gated, F.silu(gate) * up, rtol=1e-4, atol=1e-4)

    best, ids = torch.zeros(5, device=DEVICE), torch.zeros(5, dtype=torch.int32, device=DEVICE)
    gh.choose_kernel[(5, 1)](
        x * gain, w, squares, x, x, ids, ids, best, ids, 1, 1, 1, n, k, 2, 1e-5,
        NOISY=False, GATHER=False, STORED=False, TILES=8, **tile,
    )  # fmt: skip
    logits = F.linear(F.rms_norm(x, (k,), gain, 1e-5), w)[0]
    torch.testing.assert_close(best, logits.unflatten(0, (5, 8)).amax(1), rtol=1e-4, atol=1e-4)
    assert ids.tolist() == (logits.unflatten(0, (5, 8)).argmax(1) + 8 * torch.arange(5)).tolist()


@pytest.mark.parametrize("norm", [False, True])
def test_rotation_and_slots(norm: bool) -> None:
    """Rows that do not count leave every slot of the allocator alone."""
    heads, kv_heads, dim, rows, width = 4, 2, 16, 3, 100 + 64
    qkv = randn(2 * rows, heads + 2 * kv_heads, dim)
    gains = randn(heads + kv_heads, dim)
    committed, slot_start, size = ints([7, 3]), ints([10, 50]), ints([3, 1])
    depths = ints([0, 1, 1, 0, 1, 2])
    angles = torch.arange(40, device=DEVICE)[:, None] * torch.rand(dim // 2, device=DEVICE)
    keys, values = (
        torch.zeros(kv_heads, width, dim, device=DEVICE),
        torch.zeros(kv_heads, width, dim, device=DEVICE),
    )
    before = qkv.clone()
    ga.rotate_store_kernel[(2 * rows, 2)](
        qkv, gains, angles.cos().contiguous(), angles.sin().contiguous(), keys, values, committed, slot_start,
        depths, size, rows, width, 1e-5, HEADS=heads, KV_HEADS=kv_heads, D=dim, NORM=norm, BLOCK=4, **PLAIN,
    )  # fmt: skip
    x = before[:, : heads + kv_heads]
    if norm:
        x = F.rms_norm(x, (dim,), None, 1e-5) * gains
    positions = committed.repeat_interleave(rows) + depths
    turns = torch.polar(torch.ones_like(angles), angles)[positions.long()][:, None]
    turned = torch.view_as_real(torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous()) * turns).flatten(
        -2
    )
    torch.testing.assert_close(qkv[:, :heads], turned[:, :heads], rtol=1e-4, atol=1e-5)
    for row, slot in ((0, 17), (1, 18), (2, 19), (3, 53)):
        torch.testing.assert_close(keys[:, slot], turned[row, heads:], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(values[:, slot], before[row, heads + kv_heads :])
    written = keys.abs().sum((0, 2)).nonzero().flatten().tolist()
    assert [slot for slot in written if slot < 100] == [17, 18, 19, 53]


@pytest.mark.parametrize("splits", [1, 4])
@pytest.mark.parametrize("causal", [False, True])
def test_attention_over_prefix_and_tree(splits: int, causal: bool) -> None:
    """Lengths around a block's edge; slots that nothing has written hold NaN."""
    heads, kv_heads, dim, rows, width = 4, 2, 16, 5, 400
    lengths, starts, sizes = [0, 65, 127], [10, 60, 230], [5, 5, 2]
    parents = ints([[0, 0, 0, 1, 3]] * 3, torch.int64)
    mask = (
        torch.ones(3, rows, rows, dtype=torch.bool, device=DEVICE).tril()
        if causal
        else ancestor_mask(parents, 3)
    )
    keys = torch.full((kv_heads, width, dim), torch.nan, device=DEVICE)
    values = keys.clone()
    qkv = randn(3 * rows, heads + 2 * kv_heads, dim)
    for length, start, size in zip(lengths, starts, sizes, strict=True):
        keys[:, start : start + length + size] = randn(kv_heads, length + size, dim)
        values[:, start : start + length + size] = randn(kv_heads, length + size, dim)
    out = torch.zeros(3 * rows, heads * dim, device=DEVICE)
    partial, lse = (
        torch.zeros(splits, 3 * rows, heads, dim, device=DEVICE),
        torch.zeros(splits, 3 * rows, heads, device=DEVICE),
    )
    scale = dim**-0.5
    ga.tree_attention_kernel[(3 * kv_heads, 1, splits)](
        qkv, keys, values, bits_of(mask), ints(lengths), ints(sizes), ints(starts), out, partial, lse,
        rows, width, 3 * rows, scale,
        HEADS=heads, KV_HEADS=kv_heads, D=dim, BLOCK_Q=16, BLOCK_KV=64, SPLITS=splits, CAUSAL=causal, **PLAIN,
    )  # fmt: skip
    if splits > 1:
        ga.combine_kernel[(3 * rows, 2)](
            partial, lse, out, 3 * rows, HEADS=heads, D=dim, SPLITS=splits, BLOCK=2, **PLAIN
        )
    for b, (length, start, size) in enumerate(zip(lengths, starts, sizes, strict=True)):
        allowed = torch.ones(size, length + size, dtype=torch.bool, device=DEVICE)
        allowed[:, length:] = mask[b, :size, :size]
        bias = (
            torch.zeros(allowed.shape, device=DEVICE)
            .masked_fill_(~allowed, -torch.inf)
            .repeat(heads // kv_heads, 1)
        )
        here = slice(start, start + length + size)
        query = qkv[b * rows : b * rows + size, :heads].transpose(0, 1)
        expected = (
            packed_attention(query, keys[:, here], values[:, here], bias, scale).transpose(0, 1).flatten(1)
        )
        torch.testing.assert_close(out[b * rows : b * rows + size], expected, rtol=1e-3, atol=1e-4)


def test_noise_is_that_of_every_other_path() -> None:
    seeds, committed, vocab = [5, 2**64 - 3], [17, 4000], 67
    noise = torch.zeros(2, 3, vocab, device=DEVICE)
    temperature = torch.tensor([0.7, 1.0], device=DEVICE)
    gh.noise_kernel[(6, 2)](
        noise, ints([signed_seed(seed) for seed in seeds], torch.int64), ints(committed), temperature, 3, vocab,
        BLOCK=16, **PLAIN,
    )  # fmt: skip
    rows = ints([signed_seed(seed) for seed in seeds for _ in range(3)], torch.int64)
    positions = ints([length + 1 + depth for length in committed for depth in range(3)], torch.int64)
    torch.testing.assert_close(noise.flatten(0, 1), gumbel_rows(rows, positions, vocab), rtol=1e-5, atol=2e-6)


def test_choice_and_draft_scores() -> None:
    """Greedy and sampled rows beside each other; equal scores go to the lowest token id."""
    batch, rows, k, vocab, block = 2, 3, 16, 50, 4
    x, w = randn(batch * block, k), randn(vocab, k)
    w[31], w[44] = w[7], w[7]
    squares = torch.zeros(batch * block, 1, device=DEVICE)
    squares[:, 0] = (x**2).sum(1)
    temperature, noise = torch.tensor([0.0, 0.8], device=DEVICE), randn(batch, block, vocab)
    depths = ints([0, 1, 2, 0, 1, 1])
    best, ids = torch.zeros(4, 6, device=DEVICE), ints([[0] * 6] * 4)
    chosen = ints([0] * 6)
    gather = ints([0, 1, 2, 4, 5, 6])
    tile = {"TILES": 1, "BLOCK_M": 16, "BLOCK_N": 16, "BLOCK_K": 16, "EVEN": True}
    gh.choose_kernel[(4, 1)](
        x, w, squares, noise, temperature, depths, gather, best, ids, 6, rows, block, vocab, k, 1, 1e-5,
        NOISY=True, GATHER=True, STORED=False, **tile, **PLAIN,
    )  # fmt: skip
    gh.chosen_kernel[(6,)](best, ids, chosen, 6, 4, TILES_P2=4, **PLAIN)
    logits = F.linear(F.rms_norm(x, (k,), None, 1e-5), w)
    wanted = torch.cat((logits[:3], logits[4:7] / 0.8 + noise[1][depths[3:].long()])).argmax(-1)
    assert chosen.tolist() == wanted.tolist()
    assert chosen[0] != 31 and chosen[0] != 44
    stored = torch.zeros(6, vocab, device=DEVICE)
    gh.choose_kernel[(4, 1)](
        x, w, squares, noise, temperature, depths, gather, stored, ids, 6, rows, block, vocab, k, 1, 1e-5,
        NOISY=True, GATHER=True, STORED=True, **tile, **PLAIN,
    )  # fmt: skip
    torch.testing.assert_close(stored, torch.cat((logits[:3], logits[4:7] / 0.8)), rtol=1e-4, atol=1e-4)

    scores = torch.zeros(batch * 3, vocab, device=DEVICE)
    most, total = torch.zeros(4, 6, device=DEVICE), torch.zeros(4, 6, device=DEVICE)
    gh.draft_kernel[(4, 1)](
        x, w, squares, noise, temperature, scores, most, total, 6, 3, vocab, k, 1, 1e-5,
        NOISY=True, SHARED=True, **tile, **PLAIN,
    )  # fmt: skip
    expected = torch.cat((logits[1:4], logits[5:8] / 0.8 + noise[1, :3]))
    torch.testing.assert_close(scores, expected, rtol=1e-4, atol=1e-4)
    found = (total * most.exp()).sum(0).log()
    torch.testing.assert_close(found, expected.logsumexp(-1), rtol=1e-4, atol=1e-4)


def filter_rows(vocab: int) -> Tensor:
    """Scores that a filter may stumble over, one kind a row."""
    ids = torch.arange(vocab, device=DEVICE)
    plain = 3 * randn(vocab)
    one = torch.where(ids == 211, 90.0, -10.0 + randn(vocab))
    return torch.stack((
        plain,
        plain.round(),  # several equal scores at every boundary
        torch.zeros(vocab, device=DEVICE),
        torch.where(ids % 2 == 0, 0.0, -0.0),
        one,  # all probability in one token
        torch.where(ids < 7, 5.0, -5.0),
        1e6 * randn(vocab),
        1e-3 * randn(vocab) - 40,
    ))  # fmt: skip


FILTERS: tuple[dict[str, float], ...] = (
    {"top_k": 1}, {"top_k": 2}, {"top_k": 40}, {"top_k": 299}, {"top_k": 300}, {"top_k": 5000},
    {"top_p": 1e-9}, {"top_p": 0.3717}, {"top_p": 0.9013}, {"top_p": 0.9991}, {"min_p": 0.05}, {"min_p": 1.0},
    {"top_k": 40, "top_p": 0.8013}, {"top_k": 5, "top_p": 0.5017, "min_p": 0.013}, {"top_p": 0.9513, "min_p": 0.2},
    {},
)  # fmt: skip
LONG = "DDTREE_LONG" in os.environ


@pytest.mark.parametrize("seed", range(6 if LONG else 1))
def test_filters_keep_what_the_plain_choice_keeps(seed: int) -> None:
    """Filters over kinds of rows, ties included; every second noise makes the last token that is kept win.

    A sequence has one row that counts and one that does not. By hand, DDTREE_LONG=1, all pairs.
    """
    torch.manual_seed(seed)
    vocab, kinds = 300, filter_rows(300)
    pairs = [(each, kind) for each in FILTERS for kind in range(len(kinds))]
    pairs = pairs if LONG else pairs[::11]
    batch = len(pairs)
    scores = kinds[[kind for _, kind in pairs]]
    ranks = torch.arange(vocab, device=DEVICE).float().expand(batch, -1) * 1e7
    noise = torch.zeros_like(scores).scatter_(1, ordered_top(scores, vocab)[1], ranks)
    noise[::2] = -(-torch.rand(noise[::2].shape, device=DEVICE).log()).log()
    hot = torch.ones(batch, device=DEVICE)
    hot[3::7] = 0.0
    chosen = ints([-1] * (2 * batch))

    def floats(name: str, none: float) -> Tensor:
        return torch.tensor([each.get(name, none) for each, _ in pairs], device=DEVICE)

    gh.filter_kernel[(2 * batch,)](
        scores.repeat_interleave(2, 0), noise, hot, ints(floats("top_k", 0)), floats("top_p", 1.0),
        floats("min_p", 0.0), ints([1] * batch), ints([0] * (2 * batch)), chosen, 2, 1, vocab, BLOCK=256, **PLAIN,
    )  # fmt: skip
    assert (chosen[1::2] == -1).all()
    for i, (each, kind) in enumerate(pairs):
        sampling = Sampling(temperature=float(hot[i]), **each)  # type: ignore[arg-type]
        wanted = choose_tokens(scores[i : i + 1], sampling, RowContext(torch.zeros(1)), noise[i : i + 1])
        assert int(chosen[2 * i]) == int(wanted[0]), (each, kind, i)


def device_tree(
    log_probs: Tensor, rows: int, budgets: list[int], remaining: list[int], chain: list[int]
) -> DraftTree:
    """`tree_kernel` with its top-K, over scores that are log-probabilities already."""
    batch, levels, vocab = log_probs.shape
    keep, chunk = max(2, 1 << (rows - 2).bit_length()), 32
    chunks = -(-vocab // chunk)
    keys = torch.zeros(batch * levels * chunks * keep, dtype=torch.int64, device=DEVICE)
    gt.top_scores_kernel[(batch * levels, chunks)](
        log_probs, keys, vocab, chunks, CHUNK=chunk, KEEP=keep, **PLAIN
    )
    if chunks > 1:
        again, length = torch.zeros_like(keys), chunks * keep
        size = 1 << (length - 1).bit_length()
        gt.top_keys_kernel[(batch * levels, 1)](keys, again, length, 1, CHUNK=size, KEEP=keep, **PLAIN)
        keys = again
    ranks, places, pairs = _candidate_pairs(rows, DEVICE)
    whole = 1 << (levels * keep - 1).bit_length()
    made = {name: ints([[0] * rows] * batch) for name in ("tokens", "parents", "depths")}
    scores, bits = torch.zeros(batch, rows, device=DEVICE), ints([[0] * rows] * batch, torch.int64)
    size = ints([0] * batch)
    gt.tree_kernel[(batch,)](
        keys, torch.zeros(1, batch * levels, device=DEVICE), torch.ones(1, batch * levels, device=DEVICE), 1,
        ranks, places, ints([9] * batch), ints(remaining), ints(budgets), ints(chain), ints([1] * batch),
        torch.zeros(batch * (levels + 1) * keep, device=DEVICE), ints([0] * (batch * levels * keep)),
        ints([0] * (batch * whole)),
        made["tokens"], made["parents"], made["depths"], scores, bits, size, size, rows, batch,
        LEVELS=levels, KEEP=keep, WIDTH=keep, PAIRS=pairs, ALL=whole, ROWS_P2=rows, TILES_P2=1, TIMED=False, **PLAIN,
    )  # fmt: skip
    mask = (bits.unsqueeze(-1) >> torch.arange(rows, device=DEVICE) & 1).bool()
    return DraftTree(
        made["tokens"].long(), made["parents"].long(), made["depths"].long(), scores, mask, size.long()
    )


@pytest.mark.parametrize(("rows", "ties"), [(8, False), (8, True), (16, True)])
def test_tree_is_the_exact_one(rows: int, ties: bool) -> None:
    """Budgets below the captured size, a text about to end, a chain beside trees; scores that tie in every way."""
    scores = randn(4, 3, 40)
    log_probs = -(scores.abs() * 2).round() / 2 if ties else scores.log_softmax(-1)
    budgets, remaining = [rows - 1, 5, rows - 1, 3], [99, 99, 2, 99]
    tree = device_tree(log_probs.contiguous(), rows, budgets, remaining, [0, 0, 0, 1])
    limited = log_probs.clone()
    limited[2, 1:] = -torch.inf
    for b, budget in enumerate(budgets):
        plain = build_tree(limited[b : b + 1], budget, ints([9], torch.int64), 1 if b == 3 else None)
        valid = int(min(plain.sizes[0], budget + 1))
        assert int(tree.sizes[b]) == valid
        for name in ("token_ids", "parents", "depths"):
            assert getattr(tree, name)[b, :valid].tolist() == getattr(plain, name)[0, :valid].tolist(), (
                b,
                name,
            )
        assert torch.equal(tree.ancestor_mask[b, :valid, :valid], plain.ancestor_mask[0, :valid, :valid])
        torch.testing.assert_close(tree.log_probs[b, :valid], plain.log_probs[0, :valid])
        rest = tree.ancestor_mask[b, valid:]
        assert torch.equal(rest, torch.eye(rows, dtype=torch.bool, device=DEVICE)[valid:])


def test_walk_stops_and_caps() -> None:
    """The accepted path equals the plain walk; it is cut at a stop token and at the cap, and the sequence advances."""
    rows, block, batch = 8, 4, 4
    tree = build_tree((4 * randn(1, 3, 12)).log_softmax(-1), rows - 1, ints([3], torch.int64))
    one = [int(i) for i in (tree.depths[0] == tree.depths[0].max()).nonzero()[0]]
    deepest = one[0]
    path = [i for i in range(rows) if tree.ancestor_mask[0, deepest, i]]
    chosen = torch.full((batch, rows), 11, device=DEVICE)
    for at, following in zip(path, path[1:], strict=False):
        chosen[:, at] = tree.token_ids[0, following]
    walked = accept_path(tree, chosen[:1])[0]
    assert walked == path and len(path) > 2
    emitted = [int(chosen[0, node]) for node in path]
    stops = torch.full((batch, 2), -1, dtype=torch.int32, device=DEVICE)
    stops[1, 1] = emitted[1]
    names = ("token_ids", "parents", "depths")
    tokens, parents, depths = (getattr(tree, name).repeat(batch, 1).int().contiguous() for name in names)
    size, remaining, active = ints([rows, rows, rows, 0]), ints([50, 50, 2, 50]), ints([1, 1, 1, 0])
    root, committed, drafted = ints([3] * batch), ints([20, 30, 40, 50]), ints([block] * batch)
    kept, out = ints([0] * batch), ints([[0] * (4 + 2 * block + 4 * rows)] * batch)
    paths, feature_rows = ints([0] * (batch * block)), ints([0] * (batch * block))
    gt.accept_kernel[(batch,)](
        tokens, parents, depths, tree.log_probs.repeat(batch, 1).contiguous(),
        bits_of(tree.ancestor_mask.repeat(batch, 1, 1)),
        size, chosen.int().contiguous(), root, committed, remaining, active, drafted, stops,
        paths, feature_rows, kept, out, kept, rows, block, out.shape[1],
        STOPS=2, ROWS_P2=rows, BLOCK_P2=block, TIMED=False, **PLAIN,
    )  # fmt: skip
    whole = len(path)
    assert kept.tolist() == [whole, 2, 2, 0]
    assert committed.tolist() == [20 + whole, 32, 42, 50]
    assert remaining.tolist() == [50 - whole, 48, 0, 50]
    assert root.tolist() == [emitted[-1], emitted[1], emitted[1], 3]
    assert active.tolist() == [1, 0, 0, 0] and drafted.tolist() == [block, 0, 0, block]
    assert out[:, :4].tolist() == [
        [whole, whole, 0, rows],
        [whole, 2, 1, rows],
        [whole, 2, 2, rows],
        [0, 0, 0, 0],
    ]
    assert out[0, 4 : 4 + whole].tolist() == emitted
    assert out[0, 4 + block : 4 + block + whole].tolist() == path
    assert feature_rows[block : block + 2].tolist() == [rows + path[0], rows + path[1]]


def test_compaction_moves_accepted_rows_down() -> None:
    layers_heads, dim, width = 3, 16, 90
    keys, values = randn(layers_heads, width, dim), randn(layers_heads, width, dim)
    expected = keys.clone(), values.clone()
    path = ints([0, 1, 4, 5, 0, 0, 0, 0])
    committed, kept, start = ints([20 + 4, 30]), ints([4, 0]), ints([5, 40])
    for plain in expected:
        plain[:, 25:29] = plain[:, [25, 26, 29, 30]].clone()
    gt.compact_kernel[(2, layers_heads)](
        keys, values, committed, kept, start, path, 4, width, KV_HEADS=3, D=dim, BLOCK_P2=4, **PLAIN
    )
    assert torch.equal(keys, expected[0]) and torch.equal(values, expected[1])


def test_order_of_equal_scores() -> None:
    scores = torch.tensor([[0.0, -0.0, 1.0, 1.0, -torch.inf, 0.5, 1.0, 0.5]], device=DEVICE)
    keys = torch.zeros(8, dtype=torch.int64, device=DEVICE)
    gt.top_scores_kernel[(1, 1)](scores, keys, 8, 1, CHUNK=8, KEEP=8, **PLAIN)
    found = [(-int(key)) & 0xFFFFFFFF for key in keys[:7].tolist()]
    assert found == ordered_top(scores, 7)[1][0].tolist()
