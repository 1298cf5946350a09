"""Snapshots and git repositories for tests of the store."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path
from typing import Any

from snapshots.content import Figure, HostIdentity, Measurements, PatchedFile, Snapshot, digest
from snapshots.message import Entry
from snapshots.store import Store

HARDWARE = "2 x NVIDIA H200"


def snapshot(label: str = "", note: str = "", tok_s: float | None = None, **settings: Any) -> Snapshot:
    """A small snapshot; `settings` go over a plausible configuration."""
    config = {
        "model": "m",
        "layout": "single",
        "mode": "tree",
        "tree_budget": 8,
        "temperature": 0.0,
        **settings,
    }
    figures = ()
    if tok_s is not None:
        figures = (
            Figure(
                source="bench",
                mode=config["mode"],
                tree_budget=config["tree_budget"],
                tok_s=tok_s,
                accept_length=3.1,
            ),
        )
    return Snapshot(
        config=config,
        label=label,
        note=note,
        measurements=Measurements(state="measured" if figures else "not measured", results=figures),
        host=HostIdentity(name="elsewhere", hardware=HARDWARE),
        taken_at_s=time.time(),
    )


def patched(content: bytes = b"x = 2\n", package: str = "sglang", version: str = "0.5.17") -> PatchedFile:
    original = b"x = 1\n"
    return PatchedFile(
        package=package,
        version=version,
        path=f"{package}/srt/a.py",
        kind="changed",
        content=content,
        original=original,
        sha256=digest(content),
        original_sha256=digest(original),
    )


def git(folder: Path, *arguments: str, check: bool = True, **variables: str) -> str:
    """What plain git says, run as an operator would."""
    done = subprocess.run(
        ["git", *arguments],
        cwd=folder,
        env={**os.environ, **variables},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="surrogateescape",
        timeout=120,
    )
    assert not check or done.returncode == 0, done.stderr
    return done.stdout + ("" if check else done.stderr)


def repository(folder: Path) -> Path:
    """A repository of an operator with one commit."""
    folder.mkdir(parents=True, exist_ok=True)
    git(folder, "init", "--quiet", "--initial-branch=trunk")
    git(folder, "config", "user.name", "Ann Operator")
    git(folder, "config", "user.email", "ann@example.org")
    (folder / "app.py").write_text("print(1)\n")
    git(folder, "add", "app.py")
    git(folder, "commit", "--quiet", "--message", "begin")
    return folder


def only(store: Store) -> Entry:
    """The single snapshot of a store."""
    (entry,) = store.list().entries
    return entry
