"""Frozen linear layers: torch's own, or prepacked for the few rows of a tree on a CPU.

A prepacked weight lies in the blocked layout of the matrix library, which saves packing it at each call and gives each
row the same result whatever the other rows are (`F.linear` does neither). The operators are private to torch, so they
are probed before use.
"""

from __future__ import annotations

import contextlib
import platform
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed
import torch.nn.functional as F
from torch import Tensor, nn

ROWS_HINT = 64
"""Row count MKL lays the weight out for; any other count runs from the same layout, none slower for it."""

MOST_OFF = 0.05
"""Error of a layer's results, of their length, from which it is taken for broken; eight bits are off by 0.02."""


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


class QuantizedLinear:
    """FBGEMM's product of eight-bit integers between float32 activations, for a drafter as `RoundedLinear` is.

    Weights are scaled by output channel, activations by row, so that no row depends on another. On AVX2 two products
    are added in 16 bits: weights keep seven of their bits, as 2 * 63 * 255 fits.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        scales = weight.float().abs().amax(1).clamp(min=1e-12) / 63.0
        zeros = torch.zeros(len(scales), dtype=torch.long)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of a move to another package, which packs for other processors
            rounded = torch.quantize_per_channel(weight.float(), scales.double(), zeros, 0, torch.qint8)
        with _fbgemm():
            self._packed = torch.ops.quantized.linear_prepack(rounded, None)
        self._bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        largest = x.abs().amax(-1, keepdim=True).clamp(min=1e-12)
        product = torch.ops.quantized.linear_with_input_q_dq_qweight_dq_output_fp32(
            x / largest, 1 / 127.0, 128, self._packed
        )
        return product * largest if self._bias is None else product * largest + self._bias


@contextlib.contextmanager
def _fbgemm() -> Iterator[None]:
    """Packs for FBGEMM, whatever torch would choose; RuntimeError where it was built without."""
    before = torch.backends.quantized.engine
    torch.backends.quantized.engine = "fbgemm"
    try:
        yield
    finally:
        torch.backends.quantized.engine = before


Linear = PlainLinear | MklLinear | OneDnnLinear | RoundedLinear | QuantizedLinear
LinearFactory = (
    type[PlainLinear] | type[MklLinear] | type[OneDnnLinear] | type[RoundedLinear] | type[QuantizedLinear]
)
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
    exact = F.linear(x.float(), weight.float(), bias.float())
    if not float((several.float() - exact).norm() / exact.norm()) < MOST_OFF:
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

    What a drafter proposes is judged by the target in full precision. Where the processor multiplies bfloat16 in
    hardware, drafting takes half the time that way; elsewhere a third of it in integers of eight bits.
    """
    if device.type != "cpu" or dtype != torch.float32 or target is PlainLinear:
        return target, ""
    if _multiplies_bfloat16() and probe(OneDnnLinear, torch.bfloat16) is None:
        return RoundedLinear, ", drafter in bfloat16"
    if probe(QuantizedLinear) is None:
        return QuantizedLinear, ", drafter in eight-bit integers"
    return target, ""


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
