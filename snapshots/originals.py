"""Files as their wheels have them, by hash: kept once read, else from an earlier snapshot, else out of the wheel."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterable
from pathlib import Path

Earlier = Callable[[str], bytes | None]
"""From a SHA-256 in hexadecimal to the content that some earlier snapshot has for it."""

DOWNLOAD_SECONDS = 60.0
RETRY_SECONDS = 3600.0
"""After a wheel could not be had, it is not asked for again for so long."""


class Originals:
    """Original contents of installed files; whatever is found is checked against its hash."""

    def __init__(
        self, folder: Path | None = None, earlier: Earlier | None = None, fetch: bool = True
    ) -> None:
        """`folder`: where contents are kept, the user's cache by default. `fetch`: wheels may be downloaded."""
        self._folder = folder or _default_folder()
        self._earlier = earlier
        self._fetch = fetch

    def find(self, package: str, version: str, digests: Iterable[str]) -> dict[str, bytes]:
        """Hash to content, for those of the `digests` that can be had."""
        wanted = set(digests)
        found = {digest: content for digest in wanted if (content := self._known(digest)) is not None}
        if len(found) < len(wanted) and self._fetch and not self._failed_lately(package, version):
            arrived = _from_wheel(package, version, wanted - set(found))
            for digest, content in arrived.items():
                self._keep(digest, content)
            found |= arrived
            if len(found) < len(wanted):
                self._remember_failure(package, version)
        return found

    def _known(self, digest: str) -> bytes | None:
        with contextlib.suppress(OSError):
            content = (self._folder / digest).read_bytes()
            if hashlib.sha256(content).hexdigest() == digest:
                return content
        old = self._earlier(digest) if self._earlier is not None else None
        return old if old is not None and hashlib.sha256(old).hexdigest() == digest else None

    def _keep(self, digest: str, content: bytes) -> None:
        with contextlib.suppress(OSError):
            self._folder.mkdir(parents=True, exist_ok=True)
            handle, draft = tempfile.mkstemp(dir=self._folder, prefix=".draft.")
            with open(handle, "wb") as file:
                file.write(content)
            os.replace(draft, self._folder / digest)

    def _failure(self, package: str, version: str) -> Path:
        return self._folder / re.sub(r"[^A-Za-z0-9.+_-]", "_", f"unreachable-{package}-{version}")

    def _failed_lately(self, package: str, version: str) -> bool:
        try:
            return time.time() - self._failure(package, version).stat().st_mtime < RETRY_SECONDS
        except OSError:
            return False

    def _remember_failure(self, package: str, version: str) -> None:
        with contextlib.suppress(OSError):
            self._folder.mkdir(parents=True, exist_ok=True)
            self._failure(package, version).touch()


def _default_folder() -> Path:
    import platformdirs

    return platformdirs.user_cache_path("ddtree") / "originals"


def _from_wheel(package: str, version: str, digests: set[str]) -> dict[str, bytes]:
    """Contents with these hashes out of the version's wheel, downloaded as the user's pip would; {} if it cannot be."""
    with tempfile.TemporaryDirectory(prefix="ddtree-wheel-") as scratch:
        arguments = ["download", "--no-deps", "--only-binary=:all:", "--retries", "0", "--timeout", "5"]
        arguments += ["--no-input", "--disable-pip-version-check", "--quiet", "--dest", scratch]
        command = [sys.executable, "-m", "pip", *arguments, f"{package}=={version}"]
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=DOWNLOAD_SECONDS)
        found: dict[str, bytes] = {}
        for wheel in Path(scratch).glob("*.whl"):
            with contextlib.suppress(OSError, zipfile.BadZipFile), zipfile.ZipFile(wheel) as archive:
                for entry in archive.infolist():
                    content = archive.read(entry)
                    digest = hashlib.sha256(content).hexdigest()
                    if digest in digests:
                        found[digest] = content
        return found
