"""The screened head chooses what the full product chooses, ties and hard cases included."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.greedy_head import GreedyHead
from runtime.linear import OneDnnLinear, RoundedLinear, probe

pytestmark = pytest.mark.skipif(
    probe(OneDnnLinear, torch.bfloat16) is not None, reason="torch has no prepacked bfloat16 layer here"
)


def head_of(weight: torch.Tensor) -> GreedyHead:
    return GreedyHead(weight, RoundedLinear(weight))


@settings(deadline=None, max_examples=60)
@given(
    seed=st.integers(0, 2**32 - 1),
    vocab=st.integers(40, 500),
    rows=st.integers(1, 17),
    spread=st.sampled_from([0.0, 1e-6, 1e-3, 1.0]),
    loud=st.booleans(),
)
def test_the_choice_is_the_argmax_of_the_exact_product(
    seed: int, vocab: int, rows: int, spread: float, loud: bool
) -> None:
    """`spread` makes tokens near-copies of a few others, far closer than bfloat16 can tell apart; 0: exact ties."""
    generator = torch.Generator().manual_seed(seed)
    kinds = torch.randn(max(2, vocab // 6), 64, generator=generator)
    weight = kinds[torch.randint(len(kinds), (vocab,), generator=generator)]
    weight = weight + spread * torch.randn(vocab, 64, generator=generator)
    hidden = torch.randn(rows, 64, generator=generator) * (30.0 if loud else 1.0)
    usable = vocab - vocab // 7
    chosen = head_of(weight).likeliest(hidden, usable)
    exact = hidden.double() @ weight[:usable].double().T
    assert chosen is not None
    best = exact.max(1).values
    # Two exact sums may differ in the last bits of float64; any token within them is right, the lowest of equal rows.
    picked = exact.gather(1, chosen.unsqueeze(1)).squeeze(1)
    torch.testing.assert_close(picked, best, rtol=1e-12, atol=1e-12)
    if spread == 0.0:
        for token in chosen.tolist():
            assert not any(torch.equal(weight[token], earlier) for earlier in weight[:token])


def test_a_row_is_chosen_alone_as_among_others() -> None:
    generator = torch.Generator().manual_seed(3)
    weight, hidden = torch.randn(4096, 64, generator=generator), torch.randn(16, 64, generator=generator)
    head = head_of(weight)
    together = head.likeliest(hidden, 4096)
    assert together is not None
    for row in range(16):
        alone = head.likeliest(hidden[row : row + 1], 4096)
        assert alone is not None and int(alone) == int(together[row])


def test_it_gives_up_where_too_many_tokens_come_close_or_a_value_is_not_finite() -> None:
    assert head_of(torch.ones(4096, 64)).likeliest(torch.ones(2, 64), 4096) is None
    hidden = torch.randn(3, 64)
    hidden[1, 5] = torch.nan
    assert head_of(torch.randn(4096, 64)).likeliest(hidden, 4096) is None
