"""Says what an interpreter of its own loads of restored files, and measures there; run as text by `snapshots.fresh`.

Only the standard library is imported until a bench is asked for, so that the interpreter of any environment can run
it. Bytecode of the restored files is passed over: what counts is the source that was compiled here.
"""

from __future__ import annotations

import asyncio
import hashlib
import importlib
import importlib.machinery
import json
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any


def main() -> None:
    """Reads an order from stdin (`site_packages`, `paths`, `config`) and answers with lines of JSON on stdout."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print must not be taken for an answer

    def tell(**answer: Any) -> None:
        print(json.dumps(answer), file=answers, flush=True)

    order = json.load(sys.stdin)
    site = order["site_packages"]
    sys.path[:] = [each for each in sys.path if each]
    if site not in sys.path:
        sys.path.insert(0, site)
    hashes, faults = load(site, order["paths"])
    tell(hashes=hashes, faults=faults)
    if order["config"] is not None:
        tell(figure=asyncio.run(measure(order["config"], lambda line: tell(progress=line))))


def load(site: str, paths: Sequence[str]) -> tuple[dict[str, str | None], dict[str, str]]:
    """SHA-256 of each path as it is loaded, None where it is not; and what cannot be imported, with the reason."""
    loader = importlib.machinery.SourceFileLoader
    files = {os.path.realpath(os.path.join(site, path)) for path in paths}
    compiled: dict[str, str] = {}
    compile_source, path_stats = loader.source_to_code, loader.path_stats

    def noted(self: Any, data: Any, path: Any, **options: Any) -> Any:
        if isinstance(data, bytes):
            compiled[os.path.realpath(os.fspath(path))] = hashlib.sha256(data).hexdigest()
        return compile_source(self, data, path, **options)

    def without_bytecode(self: Any, path: Any) -> Any:
        if os.path.realpath(path) in files:
            raise OSError("its bytecode is not asked for")
        return path_stats(self, path)

    loader.source_to_code, loader.path_stats = noted, without_bytecode  # type: ignore[method-assign]
    hashes: dict[str, str | None] = {}
    faults: dict[str, str] = {}
    for path in paths:
        file = os.path.realpath(os.path.join(site, path))
        is_module = path.endswith(".py") and not path.endswith("__main__.py") and os.path.exists(file)
        if is_module:
            try:
                importlib.import_module(path[: -len(".py")].replace("/", ".").removesuffix(".__init__"))
            except BaseException as fault:  # whatever a patched module does, it is told
                faults[path] = f"{type(fault).__name__}: {' '.join(str(fault).split())}"[:300]
        hashes[path] = compiled.get(file) if is_module else _read(file)
    loader.source_to_code, loader.path_stats = compile_source, path_stats  # type: ignore[method-assign]
    return hashes, faults


def _read(file: str) -> str | None:
    try:
        with open(file, "rb") as content:
            return hashlib.sha256(content.read()).hexdigest()
    except OSError:
        return None


async def measure(config: dict[str, Any], progress: Callable[[str], None]) -> dict[str, Any]:
    """The standard bench of `config` with an engine of this interpreter, as plain values."""
    from snapshots.checks import measured

    return (await measured(config, None, False, progress)).model_dump()


if __name__ == "__main__":
    main()
