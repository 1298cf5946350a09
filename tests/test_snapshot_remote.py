"""Stores that meet: push, pull, joined histories, a store lost and had back, one snapshot as a file, trust."""

from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import pytest
from git_stores import git, only, patched, repository, snapshot

from snapshots import remote, rollback, transfer
from snapshots.codec import Unreadable
from snapshots.git import StoreFault, StoreRefused
from snapshots.message import compose
from snapshots.store import Store

LONG = bool(os.environ.get("DDTREE_LONG"))


@pytest.fixture
def hub(tmp_path: Path) -> Path:
    git(tmp_path, "init", "--quiet", "--bare", "--initial-branch=main", "hub.git")
    return tmp_path / "hub.git"


def labels(store: Store) -> set[str]:
    return {entry.label for entry in store.list(limit=1000).entries}


@pytest.mark.parametrize("kind", ["own", "inside"])
def test_two_hosts_share_a_remote(tmp_path: Path, hub: Path, kind: str) -> None:
    ours, theirs = (
        Store.at(tmp_path / name if kind == "own" else repository(tmp_path / name)) for name in ("a", "b")
    )
    first = ours.save(snapshot("from a", "#1 best\r\n", 40.0))
    ours.note(first.id, "seen on a")
    ours.tag(first.id, "gold")
    remote.set_remote(ours, str(hub))
    assert ours.list().unpushed == 1
    assert remote.push(ours) == 1 and ours.list().unpushed == 0
    remote.set_remote(theirs, str(hub))
    if kind == "own":
        assert remote.pull(theirs) == remote.Pulled(1, joined=False)
        entry = theirs.entry("gold")
        assert (entry.note, entry.annotation, entry.tok_s) == ("#1 best\r\n", "seen on a", 40.0)
        assert entry.foreign and not ours.entry("gold").foreign
    theirs.save(snapshot("from b"))
    ours.save(snapshot("from a too"))
    remote.push(ours)
    with pytest.raises(StoreRefused, match="first: ddtree snapshot pull"):
        remote.push(theirs)
    theirs.note(theirs.entry("from b").id, "seen on b")
    assert remote.pull(theirs).joined
    assert labels(theirs) == {"from a", "from b", "from a too"}
    assert {each.annotation for each in theirs.list().entries} == {"seen on a", "seen on b", ""}
    remote.push(theirs)
    assert not remote.pull(ours).joined and labels(ours) == labels(theirs)
    assert git(hub, "fsck", "--strict", check=False) in (
        "",
        "notice: HEAD points to an unborn branch (main)\n",
    )
    if kind == "inside":
        for name in ("a", "b"):
            assert git(tmp_path / name, "status", "--porcelain") == ""
            assert "remote" not in git(tmp_path / name, "config", "--local", "--list")


async def test_a_lost_store_comes_back_from_its_remote(tmp_path: Path, hub: Path) -> None:
    store = Store.at(tmp_path / "store")
    whole = snapshot("kept", "note").model_copy(update={"patches": (patched(),)})
    saved = store.save(whole)
    remote.set_remote(store, str(hub))
    remote.push(store)
    shutil.rmtree(tmp_path / "store")
    git(tmp_path, "clone", "--quiet", str(hub), "store")
    again = Store.at(tmp_path / "store")
    entry, loaded = again.load(saved.id)
    assert loaded == whole and entry.foreign  # a clone does not know that it was made here
    plan = await rollback.preview(again, saved.id)
    assert not plan.trusted
    outcome = await rollback.perform(again, plan)
    assert outcome.files == () and [each.kind for each in again.list().entries] == ["rollback", "save"]
    assert remote.push(again) == 1


def test_a_rewritten_remote_is_refused_and_nothing_is_forced(tmp_path: Path, hub: Path) -> None:
    store, other = Store.at(tmp_path / "store"), Store.at(tmp_path / "other")
    store.save(snapshot("one"))
    remote.set_remote(store, str(hub))
    remote.push(store)
    other.save(snapshot("another history"))
    git(other.place.git_dir, "push", "--quiet", "--force", str(hub), "refs/heads/main")
    with pytest.raises(StoreRefused, match="was rewritten"):
        remote.pull(store)
    with pytest.raises(StoreRefused, match="snapshot pull"):
        store.save(snapshot("two"))
        remote.push(store)
    assert labels(store) == {"one", "two"}


def test_addresses_that_are_none(tmp_path: Path) -> None:
    store = Store.at(tmp_path / "store")
    with pytest.raises(StoreRefused, match="no snapshot yet"):
        remote.push(store)
    store.save(snapshot("one"))
    with pytest.raises(StoreRefused, match="has no remote; set one"):
        remote.push(store)
    for url in ("--upload-pack=touch x", "", "a b"):
        with pytest.raises(StoreRefused, match="no address"):
            remote.set_remote(store, url)
    with pytest.raises(StoreRefused, match="holds a password") as refused:
        remote.set_remote(store, "https://me:hunter22@example.org/x.git")
    assert "hunter22" not in str(refused.value)
    for url in (str(tmp_path / "none.git"), "ext::sh -c 'touch x'".replace(" ", "%20")):
        remote.set_remote(store, url)
        with pytest.raises(StoreFault) as failed:
            remote.push(store)
        assert "\n" not in str(failed.value)
    assert store.list().unpushed == 1


def test_saving_pushes_in_the_background(tmp_path: Path, hub: Path) -> None:
    store = Store.at(tmp_path / "store")
    remote.set_remote(store, str(hub))
    store.save(snapshot("one"))
    remote.push_in_background(store)
    end = time.monotonic() + 120
    while store.list().unpushed != 0:
        assert time.monotonic() < end, (store.place.state / "push.log").read_text()
        time.sleep(0.1)


def test_a_file_hands_on_one_snapshot(tmp_path: Path) -> None:
    store, other = Store.at(tmp_path / "store"), Store.at(repository(tmp_path / "work"))
    whole = snapshot("best", "#1\r\n  x", 9.5).model_copy(update={"patches": (patched(),)})
    saved = store.save(whole)
    store.note(saved.id, "later")
    path = tmp_path / "best.tar"
    transfer.export(store, "best", path)
    with pytest.raises(StoreRefused, match="exists"):
        transfer.export(store, "best", path)
    taken = transfer.take_in(other, path)
    assert (taken.kind, taken.foreign, taken.note, taken.annotation) == ("import", True, "#1\r\n  x", "later")
    assert other.load(taken.id)[1] == whole
    assert taken.source is not None and taken.source.startswith(saved.commit)
    assert git(tmp_path / "work", "status", "--porcelain") == ""


def test_files_that_are_no_snapshot_are_refused(tmp_path: Path) -> None:
    store = Store.at(tmp_path / "store")
    path = tmp_path / "x.tar"

    def archive(members: dict[str, bytes]) -> Path:
        with tarfile.open(path, "w") as tar:
            for name, content in members.items():
                entry = tarfile.TarInfo(name)
                entry.size = len(content)
                tar.addfile(entry, io.BytesIO(content))
        return path

    for members in (
        {},
        {"snapshot.json": b"3"},
        {"snapshot.json": json.dumps({"commit": "c", "label": "a\nb"}).encode()},
        {"../../etc/x": b"", "snapshot.json": b"{}"},
    ):
        with pytest.raises(Unreadable, match="x.tar|config.toml|environment.toml"):
            transfer.take_in(store, archive(members))
    path.write_bytes(b"no archive at all")
    with pytest.raises(StoreFault):
        transfer.take_in(store, path)
    with pytest.raises(StoreFault, match="No such file"):
        transfer.take_in(store, tmp_path / "none.tar")
    assert store.list().entries == ()


def fill(store: Store, count: int) -> None:
    """Add `count` snapshots the quick way; each is as `Store.save` makes it."""
    store.save(snapshot("seed"))
    tip = only(store).commit
    lines: list[bytes] = []
    for number in range(count):
        at = 1_700_000_000 + number
        made = snapshot(f"run {number}", f"note {number}\n" * 3, number / 7).model_copy(
            update={"taken_at_s": at}
        )
        name = f"20231114-{number:06d}-aaaa"
        message = compose(made, name)
        who = f"x <x@y> {at} +0000".encode()
        lines += [b"commit refs/heads/main\nmark :%d\ncommitter %s\n" % (number + 1, who)]
        lines += [b"data %d\n%s" % (len(message), message)]
        lines += [f"from {tip}\n".encode() if number == 0 else b""]
        lines += [b"M 100644 inline config.toml\ndata 5\na=%03d\n" % (number % 1000)]
        lines += [b"tag snapshot/%s\nfrom :%d\ntagger %s\ndata 1\nx\n" % (name.encode(), number + 1, who)]
    subprocess.run(
        ["git", "fast-import", "--quiet", "--force"],
        cwd=store.place.git_dir,
        input=b"".join(lines),
        check=True,
    )
    store.save(snapshot("last"))


TIMING = """
import sys, time
from pathlib import Path
from snapshots.store import Store
store = Store.at(Path(sys.argv[1]))
begun = time.perf_counter()
page = store.list()
first = time.perf_counter() - begun
begun = time.perf_counter()
found = store.list("20231114-000005 note")  # an old one: all of the history is read
second = time.perf_counter() - begun
peak = [line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM:")][0]
print(first, second, len(page.entries), page.more, len(found.entries), peak)
"""


def test_a_long_history_is_listed_in_pages(tmp_path: Path) -> None:
    count = 10_000 if LONG else 1_000
    store = Store.at(tmp_path / "store")
    fill(store, count)
    short = Store.at(tmp_path / "short")
    fill(short, 300)
    root = str(Path(__file__).parent.parent)

    def timed(which: Store) -> list[str]:
        done = subprocess.run(
            [sys.executable, "-c", TIMING, str(which.place.folder)],
            env={**os.environ, "PYTHONPATH": root},
            capture_output=True,
            text=True,
            check=True,
        )
        return done.stdout.split()

    first, second, rows, more, found, memory = timed(store)
    more_memory = (int(memory) - int(timed(short)[-1])) / 1024
    print(f"{count} snapshots: page {first} s, filter {second} s, {more_memory:+.1f} MiB against 300")
    assert (rows, more, found) == ("50", "True", "1")
    assert more_memory < 2
    second_page = store.list(offset=50, limit=50).entries
    assert len({entry.id for entry in (*store.list().entries, *second_page)}) == 100
    assert [entry.label for entry in store.list("run 77", limit=1).entries]
