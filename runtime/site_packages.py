"""What is installed beside an engine: versions, torch's CUDA, files altered since installation. Nothing is imported."""

from __future__ import annotations

import base64
import csv
import hashlib
import re
import time
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from runtime.interface import Frozen

WATCHED = (
    "torch",
    "triton",
    "transformers",
    "sglang",
    "sglang-kernel",
    "sgl-kernel",
    "flashinfer-python",
    "xgrammar",
    "nvidia-ml-py",
    "pynvml",
)
"""Packages an engine depends on or that operators patch."""


class AlteredFile(Frozen):
    """An installed file that is not what its package's RECORD says."""

    package: str
    version: str
    path: str
    """Inside site-packages."""
    missing: bool
    """True: it is gone; False: its content differs."""


class Packages(Frozen):
    """The watched packages of one environment."""

    versions: dict[str, str]
    """Name to version of those that are installed."""
    torch_cuda: str | None = None
    """CUDA version torch was built for, as "12.8"; None: built without, or no torch."""
    xgrammar_wanted: str | None = None
    """What the installed sglang asks of xgrammar, as "==0.1.27"; None: no sglang, or it asks for nothing."""
    altered: tuple[AlteredFile, ...] = ()
    unchecked: int = 0
    """Files left out because time was up."""


def read_packages(folder: Path | None, deadline: float) -> Packages:
    """The watched packages in site-packages `folder` (None: of this Python); hashes until `deadline` (monotonic)."""
    found = {
        name: package
        for name in WATCHED
        if (package := next(iter(_distributions(name, folder)), None)) is not None
    }
    altered: list[AlteredFile] = []
    unchecked = 0
    # The large ones last, so that what operators patch is looked at first.
    for name in sorted(found, key=lambda each: (each in ("torch", "transformers"), each)):
        for path, digest in python_files(found[name]):
            if time.monotonic() > deadline:
                unchecked += 1
                continue
            changed = _changed(Path(str(found[name].locate_file(path))), digest)
            if changed is not None:
                altered.append(
                    AlteredFile(
                        package=name, version=found[name].version, path=path, missing=changed == "missing"
                    )
                )
    return Packages(
        versions={name: package.version for name, package in found.items()},
        torch_cuda=_torch_cuda(found.get("torch")),
        xgrammar_wanted=_wanted(found.get("sglang"), "xgrammar"),
        altered=tuple(altered),
        unchecked=unchecked,
    )


def _distributions(name: str, folder: Path | None) -> Iterator[metadata.Distribution]:
    if folder is None:
        yield from metadata.distributions(name=name)
    else:
        yield from metadata.distributions(name=name, path=[str(folder)])


def python_files(package: metadata.Distribution) -> Iterator[tuple[str, str]]:
    """Python files of a package inside site-packages with the SHA-256 its RECORD gives them, in hexadecimal."""
    rows = record_rows(package.read_text("RECORD") or "")
    return ((path, digest) for path, digest in rows if digest and path.endswith(".py"))


def record_rows(record: str) -> Iterator[tuple[str, str]]:
    """(path, SHA-256 in hexadecimal or "") of the files inside site-packages that a RECORD names.

    Source: PyPA specification "Recording installed projects"; paths outside are scripts and the like.
    """
    for row in csv.reader(record.splitlines()):
        if row and is_inside(row[0]):
            algorithm, _, value = (row[1] if len(row) > 1 else "").partition("=")
            yield row[0], _hexadecimal(value) if algorithm == "sha256" else ""


def is_inside(path: str) -> bool:
    """Whether a path of RECORD or of a snapshot stays inside site-packages, by its spelling."""
    if not path or path.startswith("/") or "\0" in path or "\\" in path:
        return False
    return "." not in (parts := path.split("/")) and ".." not in parts and "" not in parts


def _hexadecimal(value: str) -> str:
    try:
        return base64.urlsafe_b64decode(value + "=" * (-len(value) % 4)).hex()
    except ValueError:
        return ""


def _changed(path: Path, digest: str) -> str | None:
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return "missing"
    except OSError:
        return None
    return None if hashlib.sha256(content).hexdigest() == digest else "altered"


def _torch_cuda(torch: metadata.Distribution | None) -> str | None:
    """From torch/version.py, which a build writes its CUDA version into."""
    if torch is None:
        return None
    try:
        text = Path(str(torch.locate_file("torch/version.py"))).read_text(encoding="utf-8")
    except OSError:
        return None
    stated = re.search(r"^cuda\s*(?::[^=]*)?=\s*['\"](\d+\.\d+)", text, re.MULTILINE)
    return stated[1] if stated else None


def _wanted(package: metadata.Distribution | None, name: str) -> str | None:
    """The version a package asks of another one."""
    for line in (package.requires or []) if package is not None else []:
        stated = re.match(rf"{re.escape(name)}\s*\(?([<>=!~][^;)]*)", line)
        if stated and "extra ==" not in line:
            return stated[1].strip()
    return None
