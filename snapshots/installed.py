"""Installed distributions as their metadata describes them: files with hashes, folders of their own, how they came.

The one place that reads RECORD and direct_url.json (PyPA specifications "Recording installed projects" and "Recording
the direct URL origin of installed distributions").
"""

from __future__ import annotations

import base64
import csv
import importlib.metadata
import json
import os
import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit
from urllib.request import url2pathname

Install = Literal["wheel", "editable", "source", "absent"]


def default_site_packages() -> Path:
    """Where this interpreter's packages are installed."""
    return Path(sysconfig.get_path("purelib"))


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
            taken |= wanted & {path for path, _ in _rows(_read(record))}
    return taken


def _described(found: importlib.metadata.Distribution, site: Path) -> Installed:
    direct = _direct_url(found)
    editable = bool(direct.get("dir_info", {}).get("editable"))
    url = urlsplit(str(direct.get("url", "")))
    local = Path(url2pathname(url.path)) if url.scheme == "file" else None
    rows = dict(_rows(found.read_text("RECORD") or ""))
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


def _rows(record: str) -> Iterator[tuple[str, str]]:
    """(path, SHA-256 in hexadecimal or "") of a RECORD's files inside site-packages."""
    for row in csv.reader(record.splitlines()):
        if not row or not is_inside(row[0]):
            continue
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
