"""Restored files as a fresh interpreter of their environment loads them, with the probe and the bench run there.

The interpreter that restored the files may have older ones loaded, and so may a runtime; one that starts afterwards
says for each file the hash of the source it compiled.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from snapshots.content import Figure, digest
from snapshots.git import StoreFault
from snapshots.restore import RestorePlan

LIMIT_S = 1800.0
"""Longest time until an engine has started and was measured."""


@dataclass(frozen=True)
class Loaded:
    """What fresh interpreters found."""

    words: str
    """How it was looked at, for the verdict."""
    wrong: str = ""
    """Files that are not loaded as they were restored; empty if all are."""
    figure: Figure | None = None
    notes: tuple[str, ...] = ()


async def look(
    plan: RestorePlan,
    config: dict[str, Any] | None,
    progress: Callable[[str], None] = lambda _line: None,
) -> Loaded:
    """Load what `plan` restored in an interpreter of its own for each environment.

    Args:
        config: started and measured in the interpreter of ddtree's own environment; None: nothing is measured.

    Raises:
        StoreFault: an interpreter did not start or did not answer.
    """
    figure: Figure | None = None
    wrong: list[str] = []
    notes: list[str] = []
    right = count = 0
    for python, site, files in _by_interpreter(plan):
        own = python == sys.executable
        answer = await _asked(python, site, tuple(files), config if own else None, progress)
        hashes: Mapping[str, str | None] = answer["hashes"]
        faults: Mapping[str, str] = answer["faults"]
        same = {path for path, wanted in files.items() if hashes.get(path) == wanted}
        wrong += [path for path in files if path not in same and hashes.get(path) is not None]
        notes += [f"{path} cannot be imported: {reason}" for path, reason in faults.items()]
        notes += [f"not measured: {answer['fault']}"] if answer.get("fault") else []
        figure = Figure(**answer["figure"]) if answer.get("figure") else figure
        right, count = right + len(same), count + len(files)
    how = "measured in" if figure is not None else "looked at in"
    words = f"{how} a fresh interpreter, which loads {right} of {count} restored files with the right hashes"
    told = f"other content is loaded than was restored: {', '.join(wrong[:5])}" if wrong else ""
    return Loaded(words, told, figure, tuple(notes))


def _by_interpreter(plan: RestorePlan) -> list[tuple[str, Path, dict[str, str | None]]]:
    """(interpreter, site-packages, path to the hash it is to have) for each folder files were restored in."""
    found: dict[Path, tuple[str, dict[str, str | None]]] = {}
    for each in plan.packages:
        if each.writes and each.site_packages is not None:
            python = each.python or sys.executable
            _, files = found.setdefault(each.site_packages, (python, {}))
            files |= {
                write.path: None if write.content is None else digest(write.content) for write in each.writes
            }
    return [(python, site, files) for site, (python, files) in found.items()]


async def _asked(
    python: str,
    site: Path,
    paths: tuple[str, ...],
    config: dict[str, Any] | None,
    progress: Callable[[str], None],
) -> dict[str, Any]:
    """The answers of one interpreter, put together; `fault` says what ended it before its time."""
    script = Path(__file__).with_name("loaded.py").read_text(encoding="utf-8")
    order = {"site_packages": str(site), "paths": paths, "config": config}
    environment = dict(os.environ)
    if python == sys.executable:
        roots = [str(Path(__file__).parent.parent), environment.get("PYTHONPATH", "")]
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, roots))
    try:
        process = await asyncio.create_subprocess_exec(
            os.path.expanduser(python),
            "-c",
            script,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=environment,
            limit=1 << 24,
        )
    except OSError as error:
        raise StoreFault(
            f"{python} cannot be started to look at what was restored: {error.strerror}"
        ) from None
    try:
        async with asyncio.timeout(LIMIT_S):
            return await _heard(process, json.dumps(order).encode(), progress)
    except TimeoutError:
        raise StoreFault(f"{python} did not tell within {LIMIT_S:g} s what it loaded") from None
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def _heard(
    process: asyncio.subprocess.Process, order: bytes, progress: Callable[[str], None]
) -> dict[str, Any]:
    assert process.stdin is not None and process.stdout is not None and process.stderr is not None
    said = asyncio.ensure_future(process.stderr.read())
    process.stdin.write(order)
    process.stdin.close()
    answer: dict[str, Any] = {}
    async for line in process.stdout:
        part = json.loads(line)
        if "progress" in part:
            progress(str(part["progress"]))
        answer |= part
    if await process.wait() != 0:
        last = (await said).decode("utf-8", "replace").strip().splitlines()[-1:] or [
            "it ended without a word"
        ]
        if "hashes" not in answer:
            raise StoreFault(f"a fresh interpreter could not load what was restored: {last[0]}")
        answer["fault"] = last[0]
    await said
    return answer
