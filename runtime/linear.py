"""Frozen linear layers: torch's own, or prepacked for the few rows of a tree on a CPU.

A prepacked weight lies in the blocked layout of the matrix library, which saves packing it at each call and gives each
row the same result whatever the other rows are (`F.linear` does neither). The operators are private to torch, so they
are probed before use.
"""

from __future__ import annotations

import platform
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed
import torch.nn.functional as F
from torch import Tensor, nn

ROWS_HINT = 64
"""Row count MKL lays the weight out for; any other count runs from the same layout, none slower for it."""


class PlainLinear:
    """`F.linear`."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.weight, self.bias = weight, bias

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


class ReducedLinear(PlainLinear):
    """A product whose columns are split over the ranks of a process group: each has a part of the sum, all get it."""

    def __call__(self, x: Tensor) -> Tensor:
        total = self.reduce(F.linear(x, self.weight).float())
        return (total if self.bias is None else total + self.bias).to(x.dtype)

    def reduce(self, part: Tensor) -> Tensor:
        """The sum of all ranks' `part`, in its place; the same bits on each rank."""
        torch.distributed.all_reduce(part)
        return part


class MklLinear:
    """MKL's packed single-precision product."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self._packed = torch.ops.mkl._mkl_reorder_linear_weight(weight.contiguous(), ROWS_HINT)
        # Only the shape of the unpacked weight is read when the row count equals the one given.
        self._shape = torch.zeros(1).expand(weight.shape)
        self._bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        rows = x.numel() // x.shape[-1]
        return torch.ops.mkl._mkl_linear(x.contiguous(), self._packed, self._shape, self._bias, rows)


class OneDnnLinear:
    """oneDNN's product over a reordered weight."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous())
        self._bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        return torch.ops.mkldnn._linear_pointwise(x, self._packed, self._bias, "none", [], "")


class RoundedLinear:
    """oneDNN's bfloat16 product between float32 activations, for a drafter: it moves proposals, never the text."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self._inner = OneDnnLinear(weight.bfloat16(), None if bias is None else bias.bfloat16())

    def __call__(self, x: Tensor) -> Tensor:
        return self.coarse(x.bfloat16()).to(x.dtype)

    def coarse(self, x: Tensor) -> Tensor:
        """The product in bfloat16, of `x` in bfloat16; sums are float32."""
        return self._inner(x)


Linear = PlainLinear | MklLinear | OneDnnLinear | RoundedLinear
LinearFactory = type[PlainLinear] | type[MklLinear] | type[OneDnnLinear] | type[RoundedLinear]
KINDS: dict[str, LinearFactory] = {"plain": PlainLinear, "mkl": MklLinear, "onednn": OneDnnLinear}


def probe(factory: LinearFactory, dtype: torch.dtype = torch.float32) -> str | None:
    """None if `factory` works here, agrees with `F.linear` and treats each row alone; else the reason why not."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(960, 576, generator=generator).to(dtype)
    bias = torch.randn(960, generator=generator).to(dtype)
    x = torch.randn(19, 576, generator=generator).to(dtype)
    try:
        layer = factory(weight, bias)
        several, alone = layer(x), layer(x[:1])
    except (AttributeError, RuntimeError, NotImplementedError, TypeError) as missing:
        return str(missing).splitlines()[0]
    if not torch.allclose(
        several.float(), F.linear(x.float(), weight.float(), bias.float()), rtol=2e-2, atol=0.1
    ):
        return "it disagrees with the plain layer"
    if not torch.equal(several[:1], alone):
        return "a row's result depends on the other rows"
    return None


def choose_linear(setting: str, dtype: torch.dtype, device: torch.device) -> tuple[LinearFactory, str]:
    """The layer kind to run and a line saying which and why.

    MKL goes first on Intel processors and oneDNN elsewhere; MKL packs float32 only. Raises ValueError when `setting`
    asks for prepacked layers that cannot run here.
    """
    if setting == "plain":
        return PlainLinear, "plain (as configured)"
    if device.type != "cpu":
        reasons = [f"the device is {device.type}"]
    else:
        order = ["mkl", "onednn"] if _is_intel() else ["onednn", "mkl"]
        reasons = []
        for name in order if dtype == torch.float32 else ["onednn"]:
            reason = probe(KINDS[name], dtype)
            if reason is None:
                return KINDS[name], f"prepacked ({name})"
            reasons.append(f"{name}: {reason}")
    if setting == "prepacked":
        raise ValueError(
            f"linear = 'prepacked' is not possible here: {'; '.join(reasons)}; use 'auto' or 'plain'"
        )
    return PlainLinear, f"plain ({'; '.join(reasons)})"


def choose_draft_linear(
    target: LinearFactory, dtype: torch.dtype, device: torch.device
) -> tuple[LinearFactory, str]:
    """The layer kind for a drafter beside a target that runs `target`, and what to say of it ("" = the same).

    Where the processor multiplies bfloat16 in hardware, drafting takes half the time that way; its weights are
    published in bfloat16, and what it proposes is judged by the target in full precision.
    """
    if device.type != "cpu" or dtype != torch.float32 or target is PlainLinear or not _multiplies_bfloat16():
        return target, ""
    if probe(OneDnnLinear, torch.bfloat16) is not None:
        return target, ""
    return RoundedLinear, ", drafter in bfloat16"


def _multiplies_bfloat16() -> bool:
    """True with AMX or AVX512-BF16; elsewhere torch only emulates it, several times slower than float32."""
    names = ("_is_amx_tile_supported", "_is_avx512_bf16_supported")
    return any(bool(getattr(torch.cpu, name, bool)()) for name in names)


class LinearModule(nn.Module):
    """A prepacked layer in the place of an `nn.Linear`."""

    def __init__(self, linear: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self._linear = linear

    def forward(self, x: Tensor) -> Tensor:
        return self._linear(x)


def replace_linears(module: nn.Module, factory: LinearFactory) -> None:
    """Replaces every `nn.Linear` below `module`, freeing each plain weight as it goes."""
    if factory is PlainLinear:
        return
    for name, child in list(module.named_children()):
        if isinstance(child, nn.Linear):
            bias: Any = child.bias
            setattr(
                module,
                name,
                LinearModule(factory(child.weight.detach(), None if bias is None else bias.detach())),
            )
        else:
            replace_linears(child, factory)


def _is_intel() -> bool:
    if "Intel" in platform.processor():
        return True
    try:
        return "GenuineIntel" in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
