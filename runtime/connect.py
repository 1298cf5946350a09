"""From a configuration to a runtime that answers at once and loads its engine in its own thread."""

from __future__ import annotations

from runtime.config import RuntimeConfig
from runtime.interface import Runtime


async def open_runtime(config: RuntimeConfig) -> Runtime:
    """An in-process runtime for `config`; returns at once and loads afterwards."""
    from runtime.local import LocalRuntime

    return LocalRuntime(config)
