"""Position-keyed Gumbel noise: `g(seed, position, token)` from the counter-based generator Philox4x32-10.

The noise a request sees at a position depends on nothing but its seed, so the same tokens are chosen whatever the
speculation mode, the budget or the batch. Source: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as
1, 2, 3" (SC 2011); key = (seed low, seed high), counter = (token // 4, position, 0, 0), output word token % 4.
"""

from __future__ import annotations

import secrets

import torch
from torch import Tensor

_LOW = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)

MAX_GUMBEL = 16.635532
"""Largest value `gumbel_rows` can return: -log(-log(1 - 2^-24))."""


def philox4x32(
    counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[Tensor, Tensor]
) -> tuple[Tensor, ...]:
    """Ten rounds of Philox4x32. Words are int64 tensors holding 32-bit values, broadcast against each other."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        product0, product1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c2 = (product1 >> 32 & _LOW) ^ c1 ^ k0, (product0 >> 32 & _LOW) ^ c3 ^ k1
        c1, c3 = product1 & _LOW, product0 & _LOW
        k0, k1 = (k0 + _WEYL[0]) & _LOW, (k1 + _WEYL[1]) & _LOW
    return c0, c1, c2, c3


def gumbel_rows(seeds: Tensor, positions: Tensor, vocab_size: int) -> Tensor:
    """Standard Gumbel noise `[rows, vocab_size]`, float32.

    `seeds [rows]` are 64-bit seeds as int64 (two's complement), `positions [rows]` the absolute positions that the
    chosen tokens will occupy.
    """
    device = positions.device
    groups = torch.arange((vocab_size + 3) // 4, device=device)
    zero = torch.zeros((), dtype=torch.int64, device=device)
    counter = (groups.unsqueeze(0), positions.to(torch.int64).unsqueeze(1), zero, zero)
    key = ((seeds & _LOW).unsqueeze(1), (seeds >> 32 & _LOW).unsqueeze(1))
    words = torch.stack(philox4x32(counter, key), dim=-1).flatten(1)[:, :vocab_size]
    uniform = ((words >> 9).to(torch.float32) + 0.5) * 2.0**-23
    return uniform.log_().neg_().log_().neg_()


def signed_seed(seed: int) -> int:
    """A seed in 0 .. 2^64 - 1 as the int64 with the same bits."""
    return seed - 2**64 if seed >= 2**63 else seed


def draw_seed() -> int:
    """64 random bits for a request that brought no seed."""
    return secrets.randbits(64)


def derived_seed(seed: int, choice: int) -> int:
    """Seed of choice number `choice` of a request with several choices: Philox(seed, choice); choice 0 keeps it."""
    if choice == 0:
        return seed
    word = torch.tensor
    counter = (word(choice), word(0), word(0), word(1))
    low, high, _, _ = philox4x32(counter, (word(seed & _LOW), word(seed >> 32 & _LOW)))
    return int(high) << 32 | int(low)


def position_noise(
    seed: int, first_position: int, rows: int, vocab_size: int, device: torch.device
) -> Tensor:
    """Noise `[rows, vocab_size]` of one request's `rows` consecutive positions."""
    positions = torch.arange(first_position, first_position + rows, device=device)
    seeds = torch.full((rows,), signed_seed(seed), dtype=torch.int64, device=device)
    return gumbel_rows(seeds, positions, vocab_size)
