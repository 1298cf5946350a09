"""Loads plugins as SGLang does: one that raises is logged and left out."""

import traceback
from importlib.metadata import entry_points


def load_plugins():
    for found in entry_points(group="sglang.srt.plugins"):
        try:
            found.load()()
        except Exception:
            traceback.print_exc()
