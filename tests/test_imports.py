"""What loading a part brings along: fresh interpreters, and the module-level imports as they are written."""

from __future__ import annotations

import ast
import importlib.util
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
ENGINES = {"torch", "transformers", "sglang"}
IN_SGLANG = {"sglang_draft", "sglang_verify", "sglang_worker"}
"""Modules that run in SGLang's environment alone, and need what it has."""
ON_TRITON = {"gpu_attention", "gpu_kernels", "gpu_tree", "gpu_pass", "gpu_round", "gpu_graphs"}
"""Modules that are kernels or call them."""
UNLOADABLE = IN_SGLANG | (set() if importlib.util.find_spec("triton") else ON_TRITON)
RUNTIME_MODULES = sorted(
    path.stem for path in (ROOT / "runtime").glob("*.py") if path.stem not in {"__init__"} | UNLOADABLE
)
COMMAND_MODULES = {name for name in RUNTIME_MODULES if name == "command_options" or name.endswith("commands")}
SERVING_MODULES = {name for name in RUNTIME_MODULES if name.startswith("http_") or name == "metrics"}
ENGINE_PACKAGES = {
    "jinja2",
    "layouts",
    "numpy",
    "pydantic",
    "pydantic_core",
    "runtime",
    "safetensors",
    "tokenizers",
    "torch",
    "transformers",
    "triton",
}
"""What a machine that only runs the engine has installed."""


def loaded_by(code: str) -> set[str]:
    """Top-level names of the modules a fresh interpreter has loaded after `code`."""
    report = "import sys; sys.stderr.write('\\n' + ' '.join({name.split('.')[0] for name in sys.modules}))"
    done = subprocess.run(
        [sys.executable, "-c", f"{code}\n{report}"], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return set(done.stderr.splitlines()[-1].split())


@pytest.mark.parametrize(
    "module",
    [
        "console.cli",
        "console.app",
        "runtime.commands",
        "runtime.config",
        "runtime.connect",
        "runtime.interface",
        "runtime.layout_commands",
        "runtime.model_commands",
        "runtime.train_commands",
    ],
)
def test_what_the_console_and_the_command_line_import_loads_no_engine(module: str) -> None:
    assert not loaded_by(f"import {module}") & ENGINES


def test_layouts_load_nothing_of_the_runtime() -> None:
    names = sorted(path.stem for path in (ROOT / "layouts").glob("*.py") if path.stem != "__init__")
    loaded = loaded_by("\n".join(f"import layouts.{name}" for name in names))
    assert not loaded & (ENGINES | {"console", "numpy", "runtime", "snapshots", "textual"})


def test_help_loads_neither_an_engine_nor_the_validation_library_nor_the_screen_library() -> None:
    loaded = loaded_by("from console.cli import main; assert main(['--help']) == 0")
    assert not loaded & (ENGINES | {"pydantic", "textual", "numpy"})


def test_attaching_and_steering_load_neither_an_engine_nor_a_server() -> None:
    modules = ("console.session", "runtime.http_client", "runtime.ctl_commands", "runtime.ctl_text")
    loaded = loaded_by(
        "\n".join(f"import {name}" for name in (*modules, "runtime.instance", "runtime.connect"))
    )
    assert not loaded & (ENGINES | {"fastapi", "numpy", "starlette", "uvicorn"})


def test_the_runtime_loads_no_screen_library() -> None:
    imports = "\n".join(f"import runtime.{name}" for name in RUNTIME_MODULES)
    assert "textual" not in loaded_by(imports)


def test_what_serves_over_http_loads_no_engine_by_itself() -> None:
    imports = "\n".join(f"import runtime.{name}" for name in sorted(SERVING_MODULES))
    assert not loaded_by(imports) & ENGINES


@pytest.mark.parametrize("name", sorted(set(RUNTIME_MODULES) - COMMAND_MODULES - SERVING_MODULES))
def test_engine_modules_need_only_what_an_engine_machine_has(name: str) -> None:
    tree = ast.parse((ROOT / "runtime" / f"{name}.py").read_text(encoding="utf-8"))
    foreign = set(imported(tree.body)) - ENGINE_PACKAGES - set(sys.stdlib_module_names)
    assert not foreign


def imported(body: list[ast.stmt]) -> Iterator[str]:
    """Top-level names of the packages imported when a module is loaded, not those inside its functions."""
    for statement in body:
        match statement:
            case ast.Import(names=names):
                yield from (each.name.split(".")[0] for each in names)
            case ast.ImportFrom(module=str(module), level=0):
                yield module.split(".")[0]
            case ast.If(test=ast.Name(id="TYPE_CHECKING"), orelse=orelse):
                yield from imported(orelse)
            case ast.If(body=inner, orelse=orelse):
                yield from imported(inner + orelse)
            case ast.Try(body=inner, orelse=orelse, finalbody=finalbody):
                yield from imported(inner + orelse + finalbody)
            case ast.With(body=inner) | ast.ClassDef(body=inner):
                yield from imported(inner)
