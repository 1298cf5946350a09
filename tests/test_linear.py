"""Prepacked linear layers, where they work here, against the plain one; and which kind is chosen."""

from __future__ import annotations

import pytest
import torch
from tiny_models import CPU

from runtime.linear import (
    KINDS,
    LinearFactory,
    OneDnnLinear,
    PlainLinear,
    QuantizedLinear,
    RoundedLinear,
    choose_draft_linear,
    choose_linear,
    probe,
)


@pytest.mark.parametrize("kind", [name for name in KINDS if name != "plain"])
@pytest.mark.parametrize("shape", [(1, 48), (7, 48), (300, 48), (3, 7, 48)])
def test_a_prepacked_layer_equals_the_plain_one(kind: str, shape: tuple[int, ...]) -> None:
    reason = probe(KINDS[kind])
    if reason is not None:
        pytest.skip(f"{kind}: {reason}")
    generator = torch.Generator().manual_seed(0)
    weight, bias = torch.randn(80, 48, generator=generator), torch.randn(80, generator=generator)
    x = torch.randn(shape, generator=generator)
    for given in (bias, None):
        torch.testing.assert_close(
            KINDS[kind](weight, given)(x), PlainLinear(weight, given)(x), atol=1e-4, rtol=1e-4
        )


@pytest.mark.parametrize("kind", [RoundedLinear, QuantizedLinear])
def test_a_coarse_layer_ranks_outputs_as_the_plain_one_but_for_close_ones(kind: LinearFactory) -> None:
    """Also where one input is far larger than all others, and of the largest products there can be."""
    if (reason := probe(kind)) is not None:
        pytest.skip(f"{kind.__name__}: {reason}")
    generator = torch.Generator().manual_seed(0)
    weight, x = torch.randn(512, 576, generator=generator), torch.randn(9, 576, generator=generator)
    weight *= torch.logspace(-3, 1, 512).unsqueeze(1)
    x[3], x[4, 7], x[5], x[6, :] = 0.0, 40.0, x[5] * 1e-6, 1.0
    weight[11] = 2.5
    exact = PlainLinear(weight)(x)
    off = (kind(weight)(x) - exact).abs()
    scale = x.norm(dim=1, keepdim=True) * weight.norm(dim=1)
    assert bool((off <= 0.01 * scale).all())
    bias = torch.randn(512, generator=generator)
    torch.testing.assert_close(kind(weight, bias)(x), kind(weight)(x) + bias, atol=0.05, rtol=0.02)


def test_only_a_drafter_beside_a_prepacked_target_is_coarse() -> None:
    coarse, words = choose_draft_linear(OneDnnLinear, torch.float32, CPU)
    assert (coarse in (RoundedLinear, QuantizedLinear)) == bool(words)
    for target, dtype in ((PlainLinear, torch.float32), (OneDnnLinear, torch.bfloat16)):
        assert choose_draft_linear(target, dtype, CPU) == (target, "")


def test_the_setting_decides_and_the_line_says_why() -> None:
    assert choose_linear("plain", torch.float32, CPU) == (PlainLinear, "plain (as configured)")
    factory, line = choose_linear("auto", torch.float32, CPU)
    assert line.startswith("plain (" if factory is PlainLinear else "prepacked (")


def test_a_kind_that_cannot_run_is_told_by_its_probe() -> None:
    class Missing(PlainLinear):
        def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
            raise AttributeError("no such operator\nwith a long trace")

    class Wrong(PlainLinear):
        def __call__(self, x: torch.Tensor) -> torch.Tensor:
            return 2 * super().__call__(x)

    class Coupled(PlainLinear):
        def __call__(self, x: torch.Tensor) -> torch.Tensor:
            return super().__call__(x) + 1e-3 * x.shape[0]

    assert probe(Missing) == "no such operator"
    assert probe(Wrong) == "it disagrees with the plain layer"
    assert probe(Coupled) == "a row's result depends on the other rows"
