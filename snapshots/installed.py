"""Installed distributions as their metadata describes them: files with hashes, folders of their own, how they came.

Reads direct_url.json (PyPA specification "Recording the direct URL origin of installed distributions"); RECORD is read
by `runtime.site_packages`.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit
from urllib.request import url2pathname

from runtime.site_packages import record_rows

Install = Literal["wheel", "editable", "source", "absent"]
ASK_SECONDS = 5.0
"""Longest wait for an interpreter to say where its packages are."""


def default_site_packages() -> Path:
    """Where this interpreter's packages are installed."""
    return Path(sysconfig.get_path("purelib"))


@dataclass(frozen=True)
class Elsewhere:
    """Another Python environment on this host."""

    python: str
    """Its interpreter."""
    version: str
    site_packages: Path


def elsewhere(python: str) -> Elsewhere | None:
    """The environment of the interpreter `python`, as it says itself; None where that is no Python that answers."""
    ask = "import json, platform, sysconfig as s; print(json.dumps([platform.python_version(), s.get_path('purelib')]))"
    try:
        done = subprocess.run(
            [os.path.expanduser(python), "-I", "-c", ask],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=ASK_SECONDS,
        )
        version, site = json.loads(done.stdout)
    except (OSError, ValueError, subprocess.SubprocessError):
        return None
    return Elsewhere(python, str(version), Path(site))


@dataclass(frozen=True)
class Installed:
    """One installed distribution."""

    name: str
    version: str
    site_packages: Path
    metadata: str
    """Folder name of its metadata inside site-packages; empty where it is elsewhere."""
    install: Install
    source: Path | None
    """Folder that an editable or source install was made from."""
    commit: str | None
    """Commit of an install from a version control system."""
    hashes: dict[str, str]
    """Path relative to site-packages to the SHA-256 that RECORD gives, in hexadecimal; files without one left out."""
    recorded: frozenset[str]
    """Every path of RECORD that lies inside site-packages."""

    @property
    def compared(self) -> dict[str, str]:
        """`hashes` without the metadata of distributions."""
        return {
            path: digest
            for path, digest in self.hashes.items()
            if not path.partition("/")[0].endswith(".dist-info")
        }

    @property
    def folders(self) -> frozenset[str]:
        """Top-level import folders that it installs into."""
        tops = {path.partition("/")[0] for path in self.recorded if "/" in path}
        return frozenset(top for top in tops if not top.endswith((".dist-info", ".egg-info", ".data")))

    def owns(self, path: str) -> bool:
        """Whether `path` is one of its files, or may become one: inside one of its folders."""
        return path in self.compared or path.partition("/")[0] in self.folders


def find(name: str, site_packages: Path | None = None) -> Installed | None:
    """The distribution as installed in `site_packages`, else where this interpreter imports from; None if it is not."""
    path = [str(site_packages)] if site_packages is not None else [str(default_site_packages()), *sys.path]
    for found in importlib.metadata.distributions(name=name, path=path):
        folder = getattr(found, "_path", None)
        return _described(found, Path(folder).parent if folder is not None else Path(path[0]))
    return None


def paths_of_others(package: Installed, wanted: set[str]) -> set[str]:
    """Those of the `wanted` paths that another distribution in the same site-packages has in its RECORD."""
    taken: set[str] = set()
    for record in package.site_packages.glob("*.dist-info/RECORD"):
        if not taken.issuperset(wanted) and record.parent.name != package.metadata:
            taken |= wanted & {path for path, _ in record_rows(_read(record))}
    return taken


def _described(found: importlib.metadata.Distribution, site: Path) -> Installed:
    direct = _direct_url(found)
    editable = bool(direct.get("dir_info", {}).get("editable"))
    url = urlsplit(str(direct.get("url", "")))
    local = Path(url2pathname(url.path)) if url.scheme == "file" else None
    rows = dict(record_rows(found.read_text("RECORD") or ""))
    folder = getattr(found, "_path", None)
    install: Install = "wheel"
    if editable:
        install = "editable"
    elif not rows or "vcs_info" in direct or (local is not None and local.suffix != ".whl"):
        install = "source"
    return Installed(
        name=str(found.metadata["Name"]),
        version=str(found.version),
        site_packages=site,
        metadata=Path(folder).name if folder is not None else "",
        install=install,
        source=local if local is not None and local.is_dir() else None,
        commit=direct.get("vcs_info", {}).get("commit_id"),
        hashes={path: digest for path, digest in rows.items() if digest},
        recorded=frozenset(rows),
    )


def _direct_url(found: importlib.metadata.Distribution) -> dict[str, dict[str, str]]:
    try:
        told = json.loads(found.read_text("direct_url.json") or "{}")
    except ValueError:
        return {}
    return told if isinstance(told, dict) else {}


def _read(path: Path) -> str:
    try:
        with open(path, encoding="utf-8", errors="replace", newline="") as file:
            return file.read()
    except OSError:
        return ""


def walk(site_packages: Path, folder: str) -> Iterator[str]:
    """The files of an import folder that are somebody's work, relative to site-packages: no bytecode, no links."""
    waiting = [folder]
    while waiting:
        here = waiting.pop()
        try:
            entries = list(os.scandir(site_packages / here))
        except OSError:
            continue
        for entry in entries:
            path = f"{here}/{entry.name}"
            if entry.is_dir(follow_symlinks=False):
                if entry.name != "__pycache__":
                    waiting.append(path)
            elif entry.is_file(follow_symlinks=False) and not entry.name.endswith((".pyc", ".pyo")):
                yield path
