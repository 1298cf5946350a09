"""A small package in a virtual environment of its own: a wheel made by hand, installed by pip, to be patched."""

from __future__ import annotations

import base64
import hashlib
import os
import shutil
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

NAME = "steps"
VERSION = "1.2.0"
FILES = {
    "steps/__init__.py": "from steps import core\n\n__version__ = '1.2.0'\n",
    "steps/core.py": "def width():\n    return 8\n\n\ndef depth():\n    return 3\n",
    "steps/tree.py": "BUDGET = 16\n",
    "steps/ops/__init__.py": "",
    "steps/ops/mask.py": "def mask(n):\n    return [True] * n\n",
    "steps/data.bin": "\x00\x01binary\x00",
}


def build_wheel(folder: Path, version: str = VERSION) -> Path:
    """A wheel of the package in `folder`."""
    info = f"{NAME}-{version}.dist-info"
    contents = {path: text.encode() for path, text in FILES.items()}
    contents[f"{info}/METADATA"] = f"Metadata-Version: 2.1\nName: {NAME}\nVersion: {version}\n".encode()
    contents[f"{info}/WHEEL"] = (
        b"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    )
    rows = [f"{path},sha256={_record_hash(data)},{len(data)}" for path, data in contents.items()]
    contents[f"{info}/RECORD"] = "\n".join([*rows, f"{info}/RECORD,,", ""]).encode()
    wheel = folder / f"{NAME}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for path, data in contents.items():
            archive.writestr(path, data)
    return wheel


def _record_hash(data: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()


def make_environment(folder: Path, wheel: Path) -> Path:
    """A virtual environment with the wheel installed; returns its site-packages."""
    venv.create(folder, with_pip=False, symlinks=True)
    pip = [sys.executable, "-m", "pip", "--python", str(folder / "bin/python"), "install", "--quiet"]
    options = ["--no-index", "--no-deps", "--no-compile", "--disable-pip-version-check"]
    subprocess.run([*pip, *options, str(wheel)], check=True, timeout=120)
    return site_of(folder)


def site_of(environment: Path) -> Path:
    return next((environment / "lib").glob("python3*")) / "site-packages"


def copy_environment(environment: Path, to: Path) -> Path:
    """A copy to be spoilt; returns its site-packages."""
    shutil.copytree(environment, to, symlinks=True)
    return site_of(to)


def patch(site: Path) -> None:
    """Three files changed, one added, one deleted."""
    (site / "steps/core.py").write_text("def width():\n    return 12\n\n\ndef depth():\n    return 3\n")
    (site / "steps/tree.py").write_text("BUDGET = 64\nFAST = True")
    (site / "steps/data.bin").write_bytes(b"\x00other\x00")
    (site / "steps/ops/extra.py").write_text("EXTRA = 1\n")
    (site / "steps/ops/mask.py").unlink()
    cache = site / "steps/__pycache__"
    cache.mkdir(exist_ok=True)
    (cache / "core.cpython-311.pyc").write_bytes(b"bytecode of another state")


def contents(site: Path) -> dict[str, bytes]:
    """Every file of the package but bytecode, by its path."""
    found = {}
    for root, folders, files in os.walk(site / "steps"):
        folders[:] = [each for each in folders if each != "__pycache__"]
        for name in files:
            path = Path(root, name)
            found[path.relative_to(site).as_posix()] = path.read_bytes()
    return found
