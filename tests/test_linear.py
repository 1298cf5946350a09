"""Prepacked linear layers, where they work here, against the plain one; and which kind is chosen."""

from __future__ import annotations

import pytest
import torch
from tiny_models import CPU

from runtime.linear import KINDS, PlainLinear, choose_linear, probe


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
