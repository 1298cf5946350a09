"""The readers of what comes from outside: HTTP, configuration, layouts, weights, drafters, snapshots."""

from __future__ import annotations

import contextlib
import io
import json
import random
import shutil
import socket
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import gguf_files
import tiny_models
from fuzzing import Target, mutated
from git_stores import patched, snapshot

from layouts import library
from layouts.values import LayoutError
from runtime.config import resolve, to_toml, validate
from runtime.interface import ConfigRejected
from runtime.models import CheckpointError, open_checkpoint
from snapshots.codec import from_files, to_files
from snapshots.content import UnitFile
from snapshots.git import StoreFault
from snapshots.message import compose, parse

ROOT = Path(__file__).parent.parent
CHAT = "/v1/chat/completions"


class Answered(AssertionError):
    """An HTTP answer that must not be."""


def configuration(folder: Path) -> Target:
    """A configuration file on its way to settings."""
    path = folder / "config.toml"

    def feed(content: bytes) -> None:
        path.write_bytes(content)
        resolved = resolve({}, {}, path)
        assert validate({**resolved.config.model_dump()}) == resolved.config
        to_toml(resolved.config)

    good = to_toml(validate({"mode": "chain", "tree_budget": 11, "temperature": 0.7, "threads": 2}))
    return Target("configuration", [good.encode(), b"# nothing\n"], feed, (ConfigRejected,), "toml")


def layouts(folder: Path) -> Target:
    """A user's own presets, models and hardware."""
    kinds = list(library.KINDS)
    corpus, kind_of = [], {}
    for kind in kinds:
        for path in sorted((library.SHIPPED / kind).glob("*.toml"))[:3]:
            corpus.append(path.read_bytes())
            kind_of[corpus[-1]] = kind
    turn = 0

    def feed(content: bytes) -> None:
        nonlocal turn
        turn += 1
        kind = kind_of.get(content, kinds[turn % len(kinds)])
        path = folder / "own.toml"
        path.write_bytes(content)
        library.read_file(path, library.KINDS[kind])

    return Target("layouts", corpus, feed, (LayoutError,), "toml")


def gguf(folder: Path) -> Target:
    """A GGUF file from its header to its weights and tokenizer."""
    path = folder / "model.gguf"
    template = {"tokenizer.chat_template": "{% for m in messages %}{{ m.content }}{% endfor %}"}
    corpus = [gguf_files.llama_file(**template), gguf_files.llama_file(tied=False)]

    def feed(content: bytes) -> None:
        path.unlink(missing_ok=True)  # an earlier one may still be mapped
        path.write_bytes(content)
        checkpoint = open_checkpoint(str(path))
        tokenizer = checkpoint.load_tokenizer()
        tokenizer.decode(tokenizer.encode("abab <s> b"))
        checkpoint.load_state()

    return Target("gguf", corpus, feed, (CheckpointError,))


def safetensors(folder: Path) -> Target:
    """The weights of a folder, of which the header is spoilt first."""
    target = tiny_models.write_target(folder / "target")
    path = target / "model.safetensors"

    def feed(content: bytes) -> None:
        path.unlink(missing_ok=True)
        path.write_bytes(content)
        _load(target, "none")

    return Target("safetensors", [path.read_bytes()], feed, (ConfigRejected,))


def model_files(folder: Path) -> Target:
    """config.json, generation_config.json and the tokenizer's files of a target, each in its turn."""
    target = tiny_models.write_target(folder / "target", "qwen3")
    names = ("config.json", "generation_config.json", "tokenizer_config.json", "tokenizer.json")
    good = {name: (target / name).read_bytes() for name in names}
    owner = {content: name for name, content in good.items()}
    turn = 0

    def feed(content: bytes) -> None:
        nonlocal turn
        turn += 1
        name = owner.get(content, names[turn % len(names)])
        for each in names:
            (target / each).write_bytes(content if each == name else good[each])
        _inspect(target, "none")
        if turn % 4 == 0:
            _load(target, "none")

    return Target("model files", list(good.values()), feed, (ConfigRejected,), "json")


def drafter(folder: Path) -> Target:
    """A drafter's config.json beside a target that is good."""
    target = tiny_models.write_target(folder / "target")
    drafter = tiny_models.write_drafter(folder / "drafter", target)
    path = drafter / "config.json"
    measured = {"ddtree": {"measured": {"accept_length": {"a": {"tree8": 2.5}}}, "target_digest": "ab"}}
    plain = json.loads(path.read_text())
    turn = 0

    def feed(content: bytes) -> None:
        nonlocal turn
        turn += 1
        path.write_bytes(content)
        (_load if turn % 8 == 0 else _inspect)(target, drafter)

    corpus = [json.dumps(plain).encode(), json.dumps(plain | measured).encode()]
    return Target("drafter", corpus, feed, (ConfigRejected,), "json")


def snapshot_files(folder: Path) -> Target:
    """The files of a snapshot as one JSON object: path to content."""
    whole = snapshot("a", "note", 12.0).model_copy(
        update={
            "patches": (patched(), patched(b"\x00\xff", "flashinfer")),
            "services": (
                UnitFile(name="a.service", path="/etc/systemd/system/a.service", content="[Unit]\n"),
            ),
        }
    )
    files = {name: content.decode("latin-1") for name, content in to_files(whole, "id").items()}

    def feed(content: bytes) -> None:
        value = None
        with contextlib.suppress(ValueError, RecursionError):
            value = json.loads(content)
        if isinstance(value, dict):
            from_files({str(name): str(text).encode("utf-8", "replace") for name, text in value.items()})

    return Target("snapshot files", [json.dumps(files).encode()], feed, (StoreFault,), "json")


def snapshot_archive(folder: Path) -> Target:
    """An exported snapshot on its way in; nothing of it is ever committed here."""
    from snapshots import transfer

    files = to_files(snapshot("a", "note", 12.0), "id")
    about = {"schema": 1, "id": "i", "commit": "c" * 40, "label": "a", "note": "note", "annotation": ""}
    files = {transfer.ABOUT: json.dumps(about).encode(), **files}
    written = io.BytesIO()
    with tarfile.open(fileobj=written, mode="w") as archive:
        for name, content in files.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))
    path = folder / "one.ddtree"

    class Nowhere:
        def save(self, *_: Any) -> Any:
            return snapshot_entry

        def note(self, *_: Any) -> Any:
            return snapshot_entry

    snapshot_entry = parse("c" * 40, "", "a", 0.0, compose(snapshot("a"), "i"))

    def feed(content: bytes) -> None:
        path.write_bytes(content)
        transfer.take_in(Nowhere(), path)  # type: ignore[arg-type]

    return Target("snapshot archive", [written.getvalue()], feed, (StoreFault,))


def messages(folder: Path) -> Target:
    """Commit messages of a store that somebody else wrote to."""
    corpus = [
        compose(snapshot("a", "#1 best\n\nKey: value", 12.0), "i", kind) for kind in ("save", "rollback")
    ]

    def feed(content: bytes) -> None:
        entry = parse("c" * 40, "d" * 40, "a", 0.0, content)
        if entry is not None:
            assert entry.matches("") and (entry.tok_s is None or isinstance(entry.tok_s, float))

    return Target("messages", corpus, feed)


def http_bodies(client: Any, operator_key: str) -> Target:
    """Bodies for every route that takes one; `client` is an httpx.Client of the server."""
    chat = {
        "messages": [{"role": "user", "content": "hi"}],
        "max_tokens": 4,
        "temperature": 0.5,
        "seed": 1,
        "stop": ["x"],
        "logit_bias": {"3": 1.5},
        "logprobs": True,
        "top_logprobs": 2,
        "ddtree": {"mode": "tree", "tree_budget": 4},
    }
    text = {"prompt": "ab", "max_tokens": 4, "logprobs": 1, "n": 2, "stream": True, "stop_token_ids": [3]}
    preview = {"change": {"mode": "tree", "tree_budget": 4, "model": "other", "threads": 1}}
    generate = {"prompt": "a", "sampling": {"max_tokens": 3, "temperature": 0.5, "seed": 2}, "mode": "chain"}
    job = {"kind": "verify", "parameters": {"max_tokens": 2}, "author": "x"}
    headers = {"content-type": "application/json", "authorization": f"Bearer {operator_key}"}
    places = (
        CHAT,
        "/v1/completions",
        "/runtime/preview",
        "/runtime/generate",
        "/runtime/cancel",
        "/runtime/jobs",
    )
    corpus = [json.dumps(each).encode() for each in (chat, text, preview, generate, {"request_id": "x"}, job)]
    owner = dict(zip(corpus, places, strict=True))
    turn = 0

    def feed(content: bytes) -> None:
        nonlocal turn
        turn += 1
        place = owner.get(content, places[turn % len(places)])
        if place == "/runtime/jobs" and content in owner:
            return  # a good one would be run
        reply = client.post(place, content=content, headers=headers)
        if reply.status_code >= 500 and reply.status_code != 503:
            raise Answered(f"{place} answered {reply.status_code}: {reply.text[:300]}")
        if reply.status_code >= 400 and set(reply.json()["error"]) != {"message", "type", "param", "code"}:
            raise Answered(f"{place}: no error object: {reply.text[:300]}")
        if "internal_error" in reply.text or "stream failed" in reply.text:
            raise Answered(f"{place}: a stream failed: {reply.text[-300:]}")

    return Target("http bodies", corpus, feed, (), "json")


def http_heads(url: str) -> Target:
    """Whole requests as bytes, heads included: what answers must be HTTP, once for a request, and no fault."""
    parts = urlsplit(url)
    host = f"{parts.hostname}:{parts.port}"
    body = b'{"prompt": "a", "max_tokens": 2}'
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\nConnection: close\r\n"
    corpus = [
        f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body,
        f"{head}Transfer-Encoding: chunked\r\n\r\n{len(body):x}\r\n".encode() + body + b"\r\n0\r\n\r\n",
        f"GET /ready HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\nX-Request-Id: abc\r\n\r\n".encode(),
        f"OPTIONS {CHAT} HTTP/1.1\r\nHost: {host}\r\nOrigin: https://example.org\r\nConnection: close\r\n\r\n".encode(),
    ]

    def feed(content: bytes) -> None:
        with socket.create_connection((parts.hostname, parts.port), 30) as line:
            line.settimeout(30)
            said = b""
            try:
                line.sendall(content)
                line.shutdown(socket.SHUT_WR)
                while piece := line.recv(1 << 16):
                    said += piece
            except OSError:
                return  # refused by closing, which is an answer too
        if said and not said.startswith(b"HTTP/1."):
            raise Answered(f"no HTTP: {said[:200]!r}")
        if b"HTTP/1.1 500" in said:
            raise Answered(f"a fault: {said[:300]!r}")

    return Target("http heads", corpus, feed)


KEYS = (
    b"1",
    b"2345678",
    b"i",
    b"hello",
    b"\r",
    b"\x1b",
    b"?",
    b":",
    b"/",
    b"m[]tTpsuxvrhjkldbeyaow ",
    b"\x1b[A\x1b[B\x1b[C\x1b[D",
    b"\x1b[5~\x1b[6~\x1bOP",
    b"\x1b[200~pasted\ntext\x1b[201~",
    b"\x1b[<0;10;10M\x1b[<0;10;10m",
    b"\x1b[<64;1;1M",
    b"\x1b[?2026;2$y\x1b[?1;2c",
    b"\x1b[I\x1b[O",
    b"\xf0\x9f\x99\x82\xe4\xb8\xad",
    b"\t\x1b[Z",
    b"0.7\r",
)


def terminal_inputs(seed: int, count: int) -> Iterator[bytes]:
    """Keys, mouse reports, pastes and answers of a terminal, most of them spoilt."""
    rng = random.Random(f"terminal {seed}")
    target = Target("terminal", KEYS, lambda _content: None)
    for _ in range(count):
        content = b"".join(rng.choices(KEYS, k=rng.randint(1, 4)))
        yield mutated(rng, content, target)[:2000] if rng.random() < 0.7 else content


OFFLINE: tuple[Callable[[Path], Target], ...] = (
    configuration,
    layouts,
    gguf,
    safetensors,
    model_files,
    drafter,
    snapshot_files,
    snapshot_archive,
    messages,
)
"""Targets that need a folder alone."""


def _inspect(target: Path, drafter: Path | str) -> None:
    from runtime.loader import inspect

    inspect(tiny_models.tiny_config(target, drafter))


def _load(target: Path, drafter: Path | str) -> None:
    from runtime.calibrate import measured_accept_lengths
    from runtime.loader import load

    loaded = load(tiny_models.tiny_config(target, drafter))
    measured_accept_lengths(loaded)
    loaded.close()


def fresh(folder: Path) -> Path:
    """`folder`, empty."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder
