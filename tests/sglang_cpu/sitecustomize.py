"""Lets SGLang run on a CPU without its CUDA packages: on PYTHONPATH in front of its environment, for tests alone.

torchvision's C extension is not built for a CPU-only torch, so the operators it registers shapes for are declared here,
before its first import. A CPU has no streams, and a tensor there cannot be told of one. Triton's interpreter does not
compute in bfloat16 by itself.
"""

import os
import sys


class _Before:
    """Finds nothing; acts once when a package is looked for."""

    def __init__(self):
        self._waiting = {"torchvision": self._torchvision, "sglang": self._sglang}

    def find_spec(self, name, path=None, target=None):
        action = self._waiting.pop(name, None)
        if action:
            action()
        return None

    def _torchvision(self):
        import torch

        self._library = torch.library.Library("torchvision", "DEF")
        self._library.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        self._library.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        torch.Tensor.record_stream = lambda _tensor, _stream: None

    def _sglang(self):
        if os.environ.get("TRITON_INTERPRET") == "1":
            import interpreted_bfloat16  # noqa: F401 - it acts by being imported


sys.meta_path.insert(0, _Before())
