"""Lets SGLang run on a CPU without its CUDA packages: on PYTHONPATH in front of its environment, for tests alone.

torchvision's C extension is not built for a CPU-only torch, so the operators it registers shapes for are declared here,
before its first import. A CPU has no streams, and a tensor there cannot be told of one.
"""

import sys


class _BeforeTorchvision:
    """Finds nothing; acts once when torchvision is looked for."""

    _library = None

    def find_spec(self, name, path=None, target=None):
        if name == "torchvision" and self._library is None:
            import torch

            library = torch.library.Library("torchvision", "DEF")
            library.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
            library.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
            type(self)._library = library
            torch.Tensor.record_stream = lambda _tensor, _stream: None
        return None


sys.meta_path.insert(0, _BeforeTorchvision())
