"""Brings the plugin by its entry point, as the adapter does, to this process and those it spawns."""

import os
import sys
import tempfile
from pathlib import Path

from runtime.sglang_host import plugin_folder

_PLUGIN = str(plugin_folder(Path(tempfile.mkdtemp(prefix="ddtree-plugin-"))))
sys.path.insert(0, _PLUGIN)
os.environ["PYTHONPATH"] = os.pathsep.join([_PLUGIN, os.environ.get("PYTHONPATH", "")])
