"""The likeliest token of each row, exactly, without the whole vocabulary in float32.

On a CPU the head's weight is a fifth of what a round reads. A bfloat16 copy of it, which the drafter has anyway, rules
out all tokens but a few; those are scored in float64. The bound is rigorous, so the choice is the argmax of
`weight @ hidden` itself: rounding can never drop the winner, and it does not depend on which other rows are asked.
"""

from __future__ import annotations

import torch
from torch import Tensor

from runtime.linear import RoundedLinear

BLOCK = 32
"""Neighbouring tokens that are ruled out together by the largest score among them."""
ROUNDOFF = 2.0**-8
"""Unit roundoff of bfloat16."""
MOST_A_ROW = 64
"""Candidates a row, on average, above which the plain head is cheaper."""


class GreedyHead:
    """Screens with `coarse`, the rounded layer of `weight [vocab, hidden_size]` (float32)."""

    def __init__(self, weight: Tensor, coarse: RoundedLinear) -> None:
        self._weight, self._coarse = weight, coarse
        rows = weight.split(4096)
        self._longest = max(float(part.norm(dim=1).max()) for part in rows)
        self._moved = max(float((part - part.bfloat16().float()).norm(dim=1).max()) for part in rows)

    def likeliest(self, hidden: Tensor, vocab_size: int) -> Tensor | None:
        """Token ids `[rows]` after `hidden [rows, hidden_size]` (float32), ties to the lowest id.

        Only ids below `vocab_size` are chosen. None where too many tokens come close, or a value is not finite.
        """
        rounded = hidden.bfloat16()
        usable = vocab_size - vocab_size % BLOCK
        scores = self._coarse.coarse(rounded)[:, :vocab_size]
        blocks = scores[:, :usable].unflatten(1, (-1, BLOCK))
        best_of = blocks.amax(-1).float()
        rest = scores[:, usable:].float()
        top = torch.cat((best_of, rest), 1).amax(1)
        least = (top - self._margin(hidden, rounded.float(), top)).unsqueeze(1)

        rows, places = (best_of >= least).nonzero(as_tuple=True)
        row, offset = (blocks[rows, places].float() >= least[rows]).nonzero(as_tuple=True)
        late_rows, late = (rest >= least).nonzero(as_tuple=True)
        of_row = torch.cat((rows[row], late_rows))
        tokens = torch.cat((places[row] * BLOCK + offset, late + usable))
        if len(tokens) > MOST_A_ROW * len(hidden):
            return None
        exact = (self._weight[tokens].double() * hidden[of_row].double()).sum(-1)
        chosen: dict[int, tuple[float, int]] = {}
        for index, value, token in zip(of_row.tolist(), exact.tolist(), tokens.tolist(), strict=True):
            if index not in chosen or (value, -token) > (chosen[index][0], -chosen[index][1]):
                chosen[index] = (value, token)
        if len(chosen) < len(hidden):
            return None
        return torch.tensor([chosen[index][1] for index in range(len(hidden))])

    def _margin(self, hidden: Tensor, rounded: Tensor, top: Tensor) -> Tensor:
        """How far below the best coarse score `top [rows]` a token's may lie and still be the true best, `[rows]`.

        By Cauchy-Schwarz a coarse product is off by at most |h - h'| |w| + |h'| |w - w'|, and by the float32 sums; then
        it is rounded itself. Twice that, as the best may be too high and the other too low.
        """
        length = rounded.norm(dim=1)
        sums = rounded.shape[1] * 2.0**-23
        off = (hidden - rounded).norm(dim=1) * self._longest + length * (self._moved + sums * self._longest)
        return 1.01 * (2 * off + 2 * ROUNDOFF * top.abs())
