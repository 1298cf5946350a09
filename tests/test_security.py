"""What must not be possible: code out of model files, ways out of folders, requests inside requests, keys in files."""

from __future__ import annotations

import ast
import contextlib
import io
import json
import os
import pickle
import socket
import stat
import subprocess
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import tiny_models
from api_server import ApiServer
from git_stores import git, snapshot
from tiny_models import tiny_config

from runtime.interface import ConfigRejected
from runtime.loader import load
from snapshots import transfer
from snapshots.codec import to_files
from snapshots.git import StoreFault
from snapshots.store import Store

ROOT = Path(__file__).parent.parent
PACKAGES = ("console", "layouts", "runtime", "snapshots")


# Model files are data


class Trap:
    """What a pickle can do to whoever loads it."""

    def __init__(self, mark: Path) -> None:
        self._mark = mark

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self._mark}",)


def test_no_file_of_a_model_is_ever_run(tmp_path: Path) -> None:
    mark = tmp_path / "it-ran"
    target = tiny_models.write_target(tmp_path / "target")
    drafter = tiny_models.write_drafter(tmp_path / "drafter", target)
    trap = pickle.dumps(Trap(mark))
    code = f"import pathlib; pathlib.Path({str(mark)!r}).touch()\n"
    for folder in (target, drafter):
        for name in ("pytorch_model.bin", "model.pt", "consolidated.00.pth", "training_args.bin"):
            (folder / name).write_bytes(trap)
        for name in ("modeling_own.py", "configuration_own.py", "tokenization_own.py", "__init__.py"):
            (folder / name).write_text(code)
        fields = json.loads((folder / "config.json").read_text())
        own = {"AutoConfig": "configuration_own.Own", "AutoModelForCausalLM": "modeling_own.Own"}
        (folder / "config.json").write_text(json.dumps(fields | {"auto_map": own, "trust_remote_code": True}))
    load(tiny_config(target, drafter)).close()
    (target / "model.safetensors").unlink()
    with pytest.raises(ConfigRejected, match="only pickled weights, which are never loaded"):
        load(tiny_config(target))
    assert not mark.exists()


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ cycler.__init__.__globals__.os.system('touch MARK') }}",
        "{{ messages.append(1) }}",
        "{% include '/etc/passwd' %}",
        "{{ raise_exception.__globals__['__builtins__']['open']('MARK', 'w') }}",
    ],
)
def test_a_chat_template_reaches_nothing_but_its_messages(tmp_path: Path, template: str) -> None:
    mark = tmp_path / "it-ran"
    target = tiny_models.write_target(tmp_path / "target")
    (target / "chat_template.jinja").write_text(template.replace("MARK", str(mark)))
    tokenizer = load(tiny_config(target)).tokenizer
    with pytest.raises(ValueError, match="chat template"):
        tokenizer.render_chat([{"role": "user", "content": "hi"}])
    assert not mark.exists()


def test_our_sources_neither_unpickle_nor_evaluate_nor_start_shells() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{node.lineno}: {words}"
        for package in PACKAGES
        for path in (ROOT / package).rglob("*.py")
        for node, words in _dangers(ast.parse(path.read_text(encoding="utf-8")))
    ]
    assert found == []


def _dangers(tree: ast.AST) -> Iterator[tuple[Any, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [each.name for each in node.names] + [getattr(node, "module", None) or ""]
            for name in {"pickle", "dill", "shelve", "marshal", "yaml"} & {
                each.partition(".")[0] for each in names
            }:
                yield node, f"imports {name}"
        if not isinstance(node, ast.Call):
            continue
        called = ast.unparse(node.func)
        given = {each.arg: ast.unparse(each.value) for each in node.keywords}
        if called in ("eval", "exec", "os.system", "os.popen"):
            yield node, f"calls {called}"
        if called == "torch.load" and given.get("weights_only") != "True":
            yield node, "torch.load without weights_only"
        if called == "np.load" and given.get("allow_pickle") != "False":
            yield node, "np.load that may unpickle"
        if given.get("shell", "False") != "False" or given.get("trust_remote_code", "False") != "False":
            yield node, "shell or remote code"


# Folders and links


def test_an_archive_cannot_write_outside_the_store(tmp_path: Path) -> None:
    files = {**to_files(snapshot("a"), "i"), transfer.ABOUT: json.dumps({"commit": "c" * 40}).encode()}
    path = tmp_path / "in" / "one.tar"
    path.parent.mkdir()
    with tarfile.open(path, "w") as archive:
        for name, content in {
            **files,
            "../../escaped": b"x",
            "/escaped": b"x",
            "a/../../escaped": b"x",
        }.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))
        for kind in (tarfile.SYMTYPE, tarfile.LNKTYPE):
            link = tarfile.TarInfo("README.md")
            link.type, link.linkname = kind, "/etc/passwd"
            archive.addfile(link)
        device = tarfile.TarInfo("measurements.json")
        device.type = tarfile.CHRTYPE
        archive.addfile(device)
    store = Store.at(tmp_path / "deep" / "er" / "store")
    taken = transfer.take_in(store, path)
    assert store.load(taken.id)[0].foreign
    assert set(store.files(taken.commit)) == set(to_files(snapshot("a"), "i"))
    assert not list(tmp_path.rglob("escaped")) and not Path("/escaped").exists()


def test_a_link_in_a_store_is_read_as_its_text_and_never_followed(tmp_path: Path) -> None:
    store = Store.at(tmp_path / "store")
    saved = store.save(snapshot("a"))
    secret = tmp_path / "secret.toml"
    secret.write_text('mode = "off"\n')
    work = tmp_path / "work"
    git(tmp_path, "clone", "--quiet", str(store.place.git_dir), str(work))
    (work / "config.toml").unlink()
    (work / "config.toml").symlink_to(secret)
    git(work, "-c", "user.name=x", "-c", "user.email=x@y", "commit", "--quiet", "--all", "--message=link")
    linked = git(work, "rev-parse", "HEAD").strip()
    git(work, "push", "--quiet", "origin", "HEAD:refs/heads/linked")
    assert store.files(linked)["config.toml"] == str(secret).encode()
    assert store.load(saved.id)[1].config["mode"] == "tree"


def test_the_lock_of_a_store_is_no_way_into_another_file(tmp_path: Path) -> None:
    store = Store.at(tmp_path / "store")
    store.save(snapshot("a"))
    victim = tmp_path / "victim"
    victim.write_text("precious")
    lock = store.place.state / "lock"
    lock.unlink()
    lock.symlink_to(victim)
    with pytest.raises(StoreFault, match="cannot be made"):
        store.save(snapshot("b"))
    assert victim.read_text() == "precious"


# One request is one request


def said(url: str, content: bytes) -> bytes:
    """All that the server answers to `content` until it closes the connection."""
    parts = urlsplit(url)
    with socket.create_connection((parts.hostname, parts.port), 60) as line:
        answer = b""
        with contextlib.suppress(OSError):
            line.sendall(content)
            while piece := line.recv(1 << 16):
                answer += piece
        return answer


SMUGGLED = b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"


@pytest.mark.parametrize(
    "lengths",
    [
        b"Content-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"Transfer-Encoding: chunked\r\nContent-Length: 4\r\n\r\n0\r\n\r\n",
        b"Content-Length: 0\r\nContent-Length: 40\r\n\r\n",
        b"Content-Length: 0, 40\r\n\r\n",
        b"Content-Length: +0\r\n\r\n",
        b"Content-Length: 0x0\r\n\r\n",
        b"Content-Length: -1\r\n\r\n",
        b"Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n",
        b"Transfer-Encoding: chunked, identity\r\n\r\n0\r\n\r\n",
        b"Transfer-Encoding : chunked\r\n\r\n0\r\n\r\n",
        b"Transfer-Encoding:\x0bchunked\r\n\r\n0\r\n\r\n",
        b"Transfer-Encoding: chunked\r\n\r\n0x0\r\n\r\n",
    ],
)
def test_a_request_of_two_lengths_hides_no_other(tiny_api: ApiServer, lengths: bytes) -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
    answer = said(tiny_api.url, head + lengths + SMUGGLED)
    assert answer.count(b"HTTP/1.1 ") == 1, answer
    assert answer.split(b" ", 2)[1] in (b"400", b"501"), answer
    assert b"alive" not in answer


def test_what_follows_a_whole_request_needs_its_own_key(tiny_api: ApiServer) -> None:
    good = b"GET /runtime/status HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer operator-key\r\n\r\n"
    bare = b"GET /runtime/status HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n"
    answer = said(tiny_api.url, good + bare)
    assert [part.split(b" ", 1)[0] for part in answer.split(b"HTTP/1.1 ")[1:]] == [b"200", b"401"]


# Keys and permissions are in test_faults.py, over a whole served day.


def readable_by_others(folder: Path) -> list[Path]:
    """Files below `folder` that others may write, or that hold a key and others may read."""
    wrong = []
    for path in folder.rglob("*"):
        mode = stat.S_IMODE(path.lstat().st_mode)
        if not path.is_symlink() and (mode & 0o022 or (path.name.endswith(".key") and mode & 0o077)):
            wrong.append(path)
    return wrong


def objects_of(store: Path) -> bytes:
    """Every object of a git store, as bytes."""
    done = subprocess.run(
        ["git", "--git-dir", store, "cat-file", "--batch-all-objects", "--batch"],
        capture_output=True,
        check=True,
    )
    return done.stdout
