"""Triton kernels of drafter training, each probed against plain torch before use, and the float32 head product.

`Kernels` says which passed; the callers' plain-torch paths serve every device where one did not.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None


@dataclass(frozen=True)
class Kernels:
    """Which Triton kernels may be used."""

    decode: bool = False
    distill: bool = False

    @staticmethod
    def decode_attention(
        rotated: Tensor,
        values: Tensor,
        cos: Tensor,
        sin: Tensor,
        positions: Tensor,
        keys_cache: Tensor,
        values_cache: Tensor,
    ) -> Tensor:
        """Rotary embedding, cache write and attention of one token a row, reading only the row's own prefix.

        `rotated [rows, heads + kv_heads, dim]` unrotated queries and keys, `values [rows, kv_heads, dim]` (a slice of
        the same product is fine), `cos`, `sin [rows, dim]`, caches `[rows, kv_heads, length, dim]`; returns
        `[rows, heads, dim]`.
        """
        rows, kv_heads, length, dim = keys_cache.shape
        group = (rotated.shape[1] - kv_heads) // kv_heads
        out = torch.empty(rows, kv_heads * group, dim, dtype=rotated.dtype, device=rotated.device)
        _decode_kernel[(rows, kv_heads)](
            rotated, values, cos, sin, positions, keys_cache, values_cache, out,
            rotated.stride(0), values.stride(0), keys_cache.stride(0), keys_cache.stride(1), out.stride(0),
            dim**-0.5, kv_heads, GROUP=group, PADDED=16, DIM=dim, BLOCK=64, num_warps=4,
        )  # fmt: skip
        return out

    @staticmethod
    def distill_gradient(
        draft: Tensor,
        target: Tensor,
        rows: Tensor,
        labels: Tensor,
        weights: Tensor,
        share: float,
        gradient: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Cross-entropy and KL of each row; writes d(loss)/d(logits) into `gradient [n, vocab]`.

        `draft [n, vocab]` and `target [u, vocab]` are float32 logits, `rows [n]` the target row of each draft row,
        `weights [n]` multiply the row's loss `share * CE + (1 - share) * KL(target || draft)`.
        """
        count, vocab = draft.shape
        losses = torch.empty(2, count, dtype=torch.float32, device=draft.device)
        _distill_kernel[(count,)](
            draft, target, rows, labels, weights, gradient, losses[0], losses[1],
            share, vocab, BLOCK=4096, num_warps=8,
        )  # fmt: skip
        return losses[0], losses[1]


def head_logits(hidden: Tensor, head: Tensor) -> Tensor:
    """Float32 logits `[n, vocab]`; low-precision inputs are accumulated and returned in float32 where possible."""
    if hidden.dtype == torch.float32:
        return hidden @ head.t()
    if hidden.is_cuda:
        return torch.mm(hidden, head.t(), out_dtype=torch.float32)
    return (hidden @ head.t()).float()


def probe_kernels(device: torch.device, head_dim: int, report: Callable[[str], None]) -> Kernels:
    """Runs each kernel once against plain torch on `device` and reports what is used."""
    if triton is None or device.type != "cuda":
        return Kernels()
    passed: dict[str, bool] = {}
    checks: dict[str, Callable[[], float]] = {
        "decode": lambda: check_decode(device, head_dim, torch.bfloat16),
        "distill": lambda: check_distill(device),
    }
    for name, check in checks.items():
        try:
            worst = check()
            passed[name] = worst < 0.06
            report(f"kernel {name}: difference {worst:.2g}, {'used' if passed[name] else 'refused'}")
        except (
            Exception
        ) as error:  # a compiler or driver fault must not end the run: plain torch does the same
            passed[name] = False
            report(f"kernel {name}: not usable ({type(error).__name__}: {str(error)[:200]})")
    return Kernels(**passed)


def check_decode(device: torch.device, dim: int, dtype: torch.dtype) -> float:
    """Largest difference between the decode kernel and plain attention over ragged rows."""
    generator = torch.Generator().manual_seed(0)

    def noise(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(device, dtype)

    rows, kv_heads, group, length = 5, 3, 3, 192
    rotated, values = noise(rows, kv_heads * (group + 1), dim), noise(rows, kv_heads, dim)
    keys_cache, values_cache = noise(rows, kv_heads, length, dim), noise(rows, kv_heads, length, dim)
    positions = torch.tensor([0, 1, 63, 64, 150], device=device)
    angles = torch.rand(rows, dim // 2, generator=generator).repeat(1, 2).to(device)
    cos, sin = angles.cos(), angles.sin()
    half = dim // 2
    wide = rotated.float()
    turned = wide * cos[:, None] + torch.cat((-wide[..., half:], wide[..., :half]), -1) * sin[:, None]
    queries, keys = turned.split((kv_heads * group, kv_heads), dim=1)
    expected_keys, expected_values = keys_cache.float(), values_cache.float()
    every = torch.arange(rows, device=device)
    expected_keys[every, :, positions] = keys
    expected_values[every, :, positions] = values.float()
    seen = (torch.arange(length, device=device) <= positions[:, None])[:, None, None]
    expected = torch.nn.functional.scaled_dot_product_attention(
        queries.unflatten(1, (kv_heads, group)), expected_keys, expected_values, attn_mask=seen
    ).flatten(1, 2)
    found = Kernels.decode_attention(rotated, values, cos, sin, positions, keys_cache, values_cache)
    pairs = ((found, expected), (keys_cache, expected_keys), (values_cache, expected_values))
    return max(float((a.float() - b).abs().max()) for a, b in pairs)


def check_distill(device: torch.device) -> float:
    """Largest difference between the distillation kernel and `plain_distill`, relative for the gradient."""
    generator = torch.Generator().manual_seed(0)
    draft = (3 * torch.randn(7, 9001, generator=generator)).to(device)
    target = (3 * torch.randn(4, 9001, generator=generator)).to(device)
    rows, labels = torch.tensor([0, 1, 1, 2, 3, 3, 0], device=device), torch.arange(7, device=device) * 1100
    weights = torch.tensor([1.0, 0.5, 0.0, 2.0, 1.0, 1.0, 1.0], device=device)
    made = [torch.empty(draft.shape, dtype=torch.float32, device=device) for _ in range(2)]
    found = Kernels.distill_gradient(draft, target, rows, labels, weights, 0.5, made[0])
    expected = plain_distill(draft, target, rows, labels, weights, 0.5, made[1])
    losses = max(float((a - b).abs().max()) for a, b in zip(found, expected, strict=True))
    return max(losses, float((made[0] - made[1]).abs().max() / made[1].abs().max()))


def plain_distill(
    draft: Tensor,
    target: Tensor,
    rows: Tensor,
    labels: Tensor,
    weights: Tensor,
    share: float,
    gradient: Tensor,
) -> tuple[Tensor, Tensor]:
    """`Kernels.distill_gradient` in plain torch."""
    log_draft = draft.log_softmax(dim=-1)
    log_target = target[rows].log_softmax(dim=-1)
    target_mass = log_target.exp()
    cross_entropy = -log_draft.gather(1, labels[:, None]).squeeze(1)
    divergence = (target_mass * (log_target - log_draft)).sum(dim=-1)
    slope = log_draft.exp_().sub_(target_mass, alpha=1 - share)
    slope.scatter_add_(1, labels[:, None], torch.full_like(labels, -share, dtype=slope.dtype)[:, None])
    gradient.copy_(slope.mul_(weights[:, None]))
    return cross_entropy, divergence


def _decode_body(
    rotated, values, cos, sin, positions, keys_cache, values_cache, out,
    rotated_stride, values_stride, cache_row, cache_head, out_stride,
    scale, kv_heads,
    GROUP: tl.constexpr, PADDED: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    position = tl.load(positions + row)
    dims = tl.arange(0, DIM)
    partner = (dims + DIM // 2) % DIM
    sign = tl.where(dims < DIM // 2, -1.0, 1.0)
    cosine = tl.load(cos + row * DIM + dims)
    sine = tl.load(sin + row * DIM + dims) * sign

    lanes = tl.arange(0, PADDED)
    real = lanes[:, None] < GROUP
    source = rotated + row * rotated_stride + (head * GROUP + lanes)[:, None] * DIM
    straight = tl.load(source + dims[None, :], mask=real, other=0.0).to(tl.float32)
    crossed = tl.load(source + partner[None, :], mask=real, other=0.0).to(tl.float32)
    query = (straight * cosine[None, :] + crossed * sine[None, :]).to(out.dtype.element_ty)

    source = rotated + row * rotated_stride + (kv_heads * GROUP + head) * DIM
    key = tl.load(source + dims).to(tl.float32) * cosine + tl.load(source + partner).to(tl.float32) * sine
    key = key.to(out.dtype.element_ty)
    value = tl.load(values + row * values_stride + head * DIM + dims)
    base = row * cache_row + head * cache_head
    tl.store(keys_cache + base + position * DIM + dims, key)
    tl.store(values_cache + base + position * DIM + dims, value)

    # The row's own token is in registers: it starts the running softmax, the loop reads only older ones.
    top = tl.sum(query.to(tl.float32) * key.to(tl.float32)[None, :], axis=1) * scale
    mass = tl.full((PADDED,), 1.0, tl.float32)
    gathered = tl.zeros((PADDED, DIM), tl.float32) + value.to(tl.float32)[None, :]
    for start in range(0, position, BLOCK):
        slots = start + tl.arange(0, BLOCK)
        inside = slots < position
        where = base + slots[:, None] * DIM + dims[None, :]
        block_keys = tl.load(keys_cache + where, mask=inside[:, None], other=0.0)
        block_values = tl.load(values_cache + where, mask=inside[:, None], other=0.0)
        scores = tl.dot(query, tl.trans(block_keys), input_precision="ieee") * scale
        scores = tl.where(inside[None, :], scores, float("-inf"))
        highest = tl.maximum(top, tl.max(scores, axis=1))
        shrink = tl.exp(top - highest)
        weights = tl.exp(scores - highest[:, None])
        mass = mass * shrink + tl.sum(weights, axis=1)
        gathered = gathered * shrink[:, None]
        gathered += tl.dot(weights.to(block_values.dtype), block_values, input_precision="ieee")
        top = highest
    place = out + row * out_stride + (head * GROUP + lanes)[:, None] * DIM + dims[None, :]
    tl.store(place, (gathered / mass[:, None]).to(out.dtype.element_ty), mask=real)


def _distill_body(
    draft,
    target,
    rows,
    labels,
    weights,
    gradient,
    cross_entropy,
    divergence,
    share,
    vocab,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    draft_row = draft + row * vocab
    target_row = target + tl.load(rows + row).to(tl.int64) * vocab
    label = tl.load(labels + row)
    weight = tl.load(weights + row)
    lanes = tl.arange(0, BLOCK)
    low = -1.0e30
    draft_top = tl.full((BLOCK,), low, tl.float32)
    target_top = tl.full((BLOCK,), low, tl.float32)
    draft_mass = tl.zeros((BLOCK,), tl.float32)
    target_mass = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, vocab, BLOCK):
        inside = start + lanes < vocab
        d = tl.load(draft_row + start + lanes, mask=inside, other=low)
        t = tl.load(target_row + start + lanes, mask=inside, other=low)
        higher = tl.maximum(draft_top, d)
        draft_mass = draft_mass * tl.exp(draft_top - higher) + tl.where(inside, tl.exp(d - higher), 0.0)
        draft_top = higher
        higher = tl.maximum(target_top, t)
        target_mass = target_mass * tl.exp(target_top - higher) + tl.where(inside, tl.exp(t - higher), 0.0)
        target_top = higher
    top = tl.max(draft_top, axis=0)
    draft_log = top + tl.log(tl.sum(draft_mass * tl.exp(draft_top - top), axis=0))
    top = tl.max(target_top, axis=0)
    target_log = top + tl.log(tl.sum(target_mass * tl.exp(target_top - top), axis=0))

    gap = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, vocab, BLOCK):
        inside = start + lanes < vocab
        d = tl.load(draft_row + start + lanes, mask=inside, other=low) - draft_log
        t = tl.load(target_row + start + lanes, mask=inside, other=low) - target_log
        mass = tl.exp(t)
        gap += tl.where(inside, mass * (t - d), 0.0)
        slope = tl.exp(d) - (1.0 - share) * mass - tl.where(start + lanes == label, share, 0.0)
        place = gradient + row * vocab + start + lanes
        tl.store(place, (slope * weight).to(gradient.dtype.element_ty), mask=inside)
    tl.store(cross_entropy + row, draft_log - tl.load(draft_row + label))
    tl.store(divergence + row, tl.sum(gap, axis=0))


if triton is not None:
    _decode_kernel = triton.jit(_decode_body)
    _distill_kernel = triton.jit(_distill_body)
