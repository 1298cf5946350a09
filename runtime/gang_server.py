"""What the process that ranks are forked from does first. It must not initialise CUDA, which no fork could use then."""

from __future__ import annotations

import importlib
import os

os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
importlib.import_module("runtime.gang_rank")
