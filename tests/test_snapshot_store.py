"""The store on real git: verbatim notes, the operator's repository untouched, locks, odd states, kills, a full disk."""

from __future__ import annotations

import fcntl
import hashlib
import os
import subprocess
import sys
import threading
from pathlib import Path

import psutil
import pytest
from git_stores import git, only, patched, repository, snapshot

from snapshots.content import NoteRefused, PackageState, UnitFile
from snapshots.git import StoreFault, StoreRefused, UnknownSnapshot
from snapshots.store import Store

LONG = bool(os.environ.get("DDTREE_LONG"))

NOTES = {
    "hash first": "#1 best\n#2 next",
    "spaces and empty lines": "\n\n  two  \n\n\n end   ",
    "carriage returns": "one\r\ntwo\r\n",
    "emoji": "fast 🚀 and ü",
    "leading dash": "-rf is no option",
    "long line": "x" * 300,
    "key at the end": "why\n\nKey: value\nDDTree-Kind: merge",
    "our own mark": "<!-- ddtree: the note above has 3 bytes -->\n\nDDTree-Schema: 1\n",
    "nothing": "",
}


@pytest.fixture(autouse=True)
def no_global_git(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Git without the settings of who runs the tests."""
    (tmp_path / "gitconfig").touch()
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", str(tmp_path / "gitconfig"))
    monkeypatch.setenv("GIT_CONFIG_NOSYSTEM", "1")
    monkeypatch.setenv("HOME", str(tmp_path))


@pytest.fixture(params=["own", "inside"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    """A store of its own, and one inside an operator's repository."""
    if request.param == "own":
        return Store.at(tmp_path / "store")
    return Store.at(repository(tmp_path / "work") / "deploy" / "snapshots")


@pytest.mark.case("D8")
@pytest.mark.parametrize("note", NOTES.values(), ids=NOTES.keys())
def test_note_comes_back_as_entered(store: Store, note: str) -> None:
    saved = store.save(snapshot("a", note, tok_s=41.5))
    entry, loaded = store.load(saved.id)
    assert entry.note == loaded.note == saved.note == note
    assert store.files(entry.commit)["README.md"].startswith(note.encode())
    assert (entry.tok_s, entry.accept_length, entry.kind) == (41.5, 3.1, "save")
    assert store.note(saved.id, note or "x").annotation == (note or "x")


@pytest.mark.case("D8")
def test_what_git_cannot_keep_is_refused(tmp_path: Path) -> None:
    for note, word in (("a\0b", "NUL"), ("a\udce9b", "UTF-8")):
        with pytest.raises(NoteRefused, match=word):
            snapshot_note = snapshot("a")
            Store.at(tmp_path / "s").note(Store.at(tmp_path / "s").save(snapshot_note).id, note)


def test_everything_comes_back(store: Store) -> None:
    whole = snapshot("full", "note", 12.0, drafter=None, list=[1, "a"]).model_copy(
        update={
            "patches": (patched(), patched(b"\x00\xff", "flashinfer")),
            "packages": (
                PackageState(package="sglang", version="0.5.17", install="editable", diff="-a\n+b\n"),
            ),
            "services": (
                UnitFile(
                    name="ddtree.service", path="/etc/systemd/system/ddtree.service", content="[Unit]\n"
                ),
            ),
        }
    )
    entry = store.save(whole)
    assert store.load("full")[1] == whole
    assert whole.config["drafter"] == "auto"
    assert b"+x = 2" in store.files(entry.commit)["patches/sglang-0.5.17/diff/sglang/srt/a.py.diff"]


def test_plain_git_reads_it(tmp_path: Path) -> None:
    store = Store.at(tmp_path / "store")
    first = store.save(snapshot("TP8 best", "#1 best\n\nwith graphs", 97.9))
    store.save(snapshot("TP8 best", "", 97.9))
    store.tag(first.id, "gold")
    log = git(store.place.git_dir, "log", "--format=%B%n%(trailers:key=DDTree-Tok-S,valueonly)")
    assert "TP8 best\n\n#1 best\n\nwith graphs\n\nDDTree-Schema: 1" in log and "97.9" in log
    assert "config.toml" in git(store.place.git_dir, "show", "--stat", "gold")
    assert git(store.place.git_dir, "fsck", "--strict", check=False) == ""
    git(tmp_path, "clone", "--quiet", str(store.place.git_dir), "copy")
    assert (tmp_path / "copy" / "README.md").exists()
    assert [entry.label for entry in Store.at(tmp_path / "copy").list().entries] == ["TP8 best", "TP8 best"]


def test_same_content_again_is_a_new_snapshot(store: Store) -> None:
    same = snapshot("again")
    first, second = store.save(same), store.save(same)
    assert first.commit != second.commit and first.id != second.id
    with pytest.raises(UnknownSnapshot, match="2 snapshots have the label 'again'"):
        store.load("again")
    assert store.entry("latest").id == second.id and store.entry("latest~1").id == first.id
    assert store.entry(first.commit[:9]).id == first.id


def test_names(store: Store) -> None:
    saved = store.save(snapshot("the good one"))
    with pytest.raises(UnknownSnapshot, match="did you mean the good one"):
        store.load("the good on")
    with pytest.raises(UnknownSnapshot, match="latest"):
        store.tag(saved.id, "latest")
    assert store.tag(saved.id, "gold").tags == ("gold",)
    with pytest.raises(StoreRefused, match="taken"):
        store.tag(saved.id, "gold")
    for name in ("--all", "HEAD", "@", "gold..gold", "refs/heads/main", "a\nb", "", "../../x"):
        with pytest.raises(UnknownSnapshot):
            store.load(name)


def test_an_empty_store_says_so(tmp_path: Path) -> None:
    store = Store.at(tmp_path / "none")
    assert store.list().entries == ()
    with pytest.raises(UnknownSnapshot, match="snapshot save"):
        store.load("latest")
    assert not (tmp_path / "none").exists()
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "letter.txt").touch()
    with pytest.raises(StoreRefused, match="holds other files"):
        Store.at(tmp_path / "full")


@pytest.mark.case("D1")
def test_hooks_and_signing_are_skipped(tmp_path: Path) -> None:
    work = repository(tmp_path / "work")
    hooks = work / "hooks"
    hooks.mkdir()
    for name in ("pre-commit", "commit-msg", "post-commit", "reference-transaction", "prepare-commit-msg"):
        hook = hooks / name
        hook.write_text('#!/bin/sh\necho edited >> "${1:-/dev/null}"\nread wait < /dev/tty\nexit 1\n')
        hook.chmod(0o755)
    for key, value in (
        ("commit.gpgsign", "true"),
        ("tag.gpgsign", "true"),
        ("gpg.program", "false"),
        ("core.hooksPath", str(hooks)),
        ("core.autocrlf", "true"),
    ):
        git(work, "config", key, value)
    store = Store.at(work)
    entry = store.save(snapshot("with hooks", "kept\r\n"))
    assert only(store).note == "kept\r\n"
    assert "gpgsig" not in git(work, "cat-file", "commit", entry.commit)
    message = git(work, "cat-file", "commit", entry.commit).split("\n\n", 1)[1]
    assert message.startswith("with hooks\n\nkept\r\n\n\nDDTree-Schema") or message.startswith("with hooks")


@pytest.mark.case("D2")
@pytest.mark.parametrize(
    ("settings", "author"),
    [
        ({}, "ddtree <ddtree@localhost>"),
        ({"user.useConfigOnly": "true"}, "ddtree <ddtree@localhost>"),
        ({"user.name": "Zoë Müller"}, "Zoë Müller <ddtree@localhost>"),
        ({"user.name": "Zoë <x>", "user.email": "z@ö.example"}, "Zoë x <z@ö.example>"),
    ],
    ids=["none", "config only", "only a name", "not ASCII"],
)
def test_identity(tmp_path: Path, settings: dict[str, str], author: str) -> None:
    for key, value in settings.items():
        git(tmp_path, "config", "--global", key, value)
    before = (tmp_path / "gitconfig").read_bytes()
    store = Store.at(tmp_path / "store")
    store.save(snapshot())
    shown = git(store.place.git_dir, "log", "-1", "--format=%an <%ae>").strip()
    assert " ".join(shown.split()) == author
    assert (tmp_path / "gitconfig").read_bytes() == before


@pytest.mark.case("D3")
def test_locks_of_others_stay(store: Store) -> None:
    first = store.save(snapshot("one"))
    index = store.place.git_dir / "index.lock"
    index.touch()
    os.utime(index, (1, 1))
    store.save(snapshot("two"))  # the index is not ours, its lock is no obstacle
    assert index.exists()
    lock = store.place.git_dir / f"{store.place.branch}.lock"
    lock.touch()
    os.utime(lock, (1, 1))
    with pytest.raises(StoreRefused, match=rf"{lock.name}.*s old.*remove that file"):
        store.save(snapshot("three"))
    assert lock.exists()
    assert [entry.label for entry in store.list().entries] == ["two", "one"]
    timer = threading.Timer(0.5, lock.unlink)
    timer.start()
    assert store.save(snapshot("four")).parents != (first.commit,)
    timer.join()


@pytest.mark.case("D3")
def test_a_busy_store_is_waited_for_and_named(tmp_path: Path) -> None:
    store = Store.at(tmp_path / "store", wait_s=0.2)
    store.save(snapshot("one"))
    with (store.place.state / "lock").open("r+") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        held.write("4711\n")
        held.flush()
        with pytest.raises(StoreRefused, match=r"another process \(pid 4711\) has used the snapshot store"):
            store.save(snapshot("two"))
        assert only(store).label == "one"


@pytest.mark.case("D3")
def test_two_at_once_are_both_there(store: Store) -> None:
    threads = [threading.Thread(target=store.save, args=(snapshot(f"n{number}"),)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(entry.label for entry in store.list().entries) == ["n0", "n1", "n2", "n3"]


def state_of(work: Path) -> tuple[str, str, str, str]:
    """What must not change in the operator's repository."""
    index = hashlib.sha256((work / ".git" / "index").read_bytes()).hexdigest()
    listing = git(
        work, "--no-optional-locks", "status", "--porcelain", "--ignored", "--untracked-files=all", "-z"
    )
    return index, listing, git(work, "rev-parse", "HEAD"), (work / ".git" / "HEAD").read_text()


@pytest.mark.case("D4")
def test_the_operators_work_is_not_touched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    work = repository(tmp_path / "work")
    module = repository(tmp_path / "module")
    git(work, "-c", "protocol.file.allow=always", "submodule", "--quiet", "add", str(module), "module")
    git(work, "commit", "--quiet", "--message", "module")
    for number in range(3):
        (work / f"staged{number}.py").write_text("staged\n")
    git(work, "add", ".")
    (work / "app.py").write_text("dirty\n")
    (work / "module" / "app.py").write_text("dirty\n")
    (work / ".gitignore").write_text("*.log\n")
    (work / "a.log").write_text("ignored\n")
    (work / ".env").write_text("API_KEY=sk-live-0123456789abcdef0123456789abcdef\n")
    with (work / "weights.bin").open("wb") as file:
        file.truncate(300_000_000)
    git(work, "status")
    before = state_of(work)
    other = repository(tmp_path / "other")
    other_before = state_of(other)
    monkeypatch.setenv("GIT_DIR", str(other / ".git"))
    monkeypatch.setenv("GIT_INDEX_FILE", str(other / ".git" / "index"))
    monkeypatch.setenv("GIT_WORK_TREE", str(other))
    monkeypatch.setenv("GIT_AUTHOR_NAME", "Somebody Else")
    store = Store.at(work / "deploy")
    first = store.save(snapshot("one", "n", 1.0))
    steps = (
        lambda: store.save(snapshot("two")),
        lambda: store.save(snapshot("one"), "rollback", {"Restores": first.commit}, first.commit),
        lambda: store.note(first.id, "later"),
        lambda: store.tag(first.id, "gold"),
        lambda: (store.list("one"), store.load(first.id)),
    )
    for step in steps:
        step()
        with monkeypatch.context() as plain:
            for name in ("GIT_DIR", "GIT_INDEX_FILE", "GIT_WORK_TREE"):
                plain.delenv(name)
            assert state_of(work) == before
            assert state_of(other) == other_before
    with monkeypatch.context() as plain:
        for name in ("GIT_DIR", "GIT_INDEX_FILE", "GIT_WORK_TREE"):
            plain.delenv(name)
        names = git(work, "ls-tree", "-r", "--name-only", first.commit).split()
        refs = git(work, "for-each-ref", "--format=%(refname)").split()
        assert git(work, "log", "-1", "--format=%an", first.commit).strip() == "Ann Operator"
    assert names == ["README.md", "config.toml", "environment.toml", "measurements.json"]
    assert all(ref.startswith(("refs/ddtree/in-deploy/", "refs/heads/trunk")) for ref in refs)


@pytest.mark.case("D7")
@pytest.mark.parametrize("state", ["detached", "unborn", "worktree of bare"])
def test_odd_states_of_the_operators_repository(tmp_path: Path, state: str) -> None:
    if state == "unborn":
        work = tmp_path / "work"
        work.mkdir()
        git(work, "init", "--quiet")
    else:
        work = repository(tmp_path / "work")
    if state == "detached":
        git(work, "checkout", "--quiet", "--detach")
    if state == "worktree of bare":
        git(tmp_path, "clone", "--quiet", "--bare", str(work), "bare.git")
        git(tmp_path / "bare.git", "worktree", "add", "--quiet", str(tmp_path / "tree"), "trunk")
        work = tmp_path / "tree"
    store = Store.at(work)
    store.save(snapshot("one"))
    assert only(Store.at(work)).label == "one"
    assert git(work, "status", "--porcelain") == ""


@pytest.mark.case("D7")
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder to another user")
def test_a_repository_of_another_user_names_the_setting(tmp_path: Path) -> None:
    work = repository(tmp_path / "work")
    own = Store.at(tmp_path / "own")
    own.save(snapshot())
    for folder in (work, tmp_path / "own"):
        subprocess.run(["chown", "-R", "12345:12345", folder], check=True)
        with pytest.raises(StoreRefused, match=r"git config --global --add safe\.directory"):
            Store.at(folder)
    assert (tmp_path / "gitconfig").read_bytes() == b""


@pytest.mark.case("D7")
def test_foreign_bytes_do_not_stop_browsing(tmp_path: Path) -> None:
    store = Store.at(tmp_path / "store")
    first = store.save(snapshot("one"))
    folder = store.place.git_dir
    blob = git(folder, "hash-object", "-w", "--stdin").strip()
    tree = subprocess.run(
        ["git", "mktree"],
        cwd=folder,
        input=f"100644 blob {blob}\tna".encode() + b"\xefve\n",
        capture_output=True,
        check=True,
    ).stdout.decode()
    message = b"caf\xe9\n\nDDTree-Schema: 1\nDDTree-Note-Bytes: x\nDDTree-Kind: save\nDDTree-Label: caf\xe9\n"
    commit = subprocess.run(
        ["git", "-c", "user.name=x", "-c", "user.email=x", "commit-tree", tree.strip(), "-p", first.commit],
        cwd=folder,
        input=message,
        capture_output=True,
        check=True,
    ).stdout.decode()
    plain = git(
        folder,
        "-c",
        "user.name=x",
        "-c",
        "user.email=x",
        "commit-tree",
        tree.strip(),
        "-p",
        commit.strip(),
        "-m",
        "hi",
    )
    git(folder, "update-ref", "refs/heads/main", plain.strip())
    assert [entry.label for entry in store.list().entries] in (["café", "one"], ["caf\ufffd", "one"])
    assert store.files(commit.strip()).keys() == {"na\ufffdve"}
    with pytest.raises(StoreFault, match="environment.toml is missing"):
        store.load(commit.strip())


@pytest.mark.case("D7")
def test_browsing_leaks_nothing(tmp_path: Path) -> None:
    store = Store.at(tmp_path / "store")
    count, turns = (500, 20) if LONG else (6, 4)
    for number in range(count):
        store.save(snapshot(f"n{number}"))
    me = psutil.Process()
    before = me.num_fds()
    for _ in range(turns):
        for entry in store.list(limit=count).entries[:: max(count // 25, 1)]:
            store.load(entry.commit)
        list(store.list("n1", limit=3).entries)
        assert me.num_fds() <= before
        assert not [child for child in me.children() if child.name() == "git"]


KILLING = """
import contextlib, os, random, signal, sys, time, asyncio
from pathlib import Path
from git_stores import snapshot
from snapshots import rollback
from snapshots.store import Store

folder, points, seed = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
random.seed(seed)
begun = time.monotonic()
Store.at(folder).save(snapshot("base"))
span = time.monotonic() - begun
for point in range(points):
    child = os.fork()
    if child == 0:
        os.setpgid(0, 0)
        store = Store.at(folder)
        if point % 3:
            store.save(snapshot(f"k{point}", "n" * 5000))
        else:
            plan = asyncio.run(rollback.preview(store, "base"))
            asyncio.run(rollback.perform(store, plan))
        os._exit(0)
    with contextlib.suppress(OSError):
        os.setpgid(child, child)  # whichever of the two is first: the group is there to be killed
    time.sleep(random.uniform(0, span if point % 3 else 6 * span))
    # Half of the time only we die and git goes on, half of the time all do.
    (os.kill if point % 2 else os.killpg)(child, signal.SIGKILL)
    os.waitpid(child, 0)
    before = len(Store.at(folder).list(limit=1000).entries)
    saved = Store.at(folder).save(snapshot(f"after{point}"))
    locks = [str(path) for path in Store.at(folder).place.git_dir.rglob("*.lock")]
    assert not locks, locks
    rows = Store.at(folder).list(limit=1000).entries
    assert len(rows) == before + 1 and rows[0].commit == saved.commit
    for entry in rows[:2]:
        assert Store.at(folder).load(entry.id)[0].commit == entry.commit
print("done")
"""


@pytest.mark.case("D3")
def test_a_kill_leaves_no_half_snapshot_and_no_lock(store: Store) -> None:
    points = "30" if LONG else "6"
    here = Path(__file__).parent
    done = subprocess.run(
        [sys.executable, "-c", KILLING, str(store.place.folder), points, "7"],
        env={**os.environ, "PYTHONPATH": f"{here}:{here.parent}"},
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0 and "done" in done.stdout, done.stderr
    said = git(store.place.git_dir, "fsck", check=False).splitlines()
    assert [line for line in said if not line.startswith(("dangling", "notice"))] == []
    if not store.place.own:
        assert git(store.place.git_dir.parent, "status", "--porcelain") == ""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount a small disk")
def test_a_full_disk_loses_nothing(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", disk], capture_output=True)
    if mounted.returncode != 0:
        pytest.skip("no file system can be mounted here")
    try:
        store = Store.at(disk / "store")
        store.save(snapshot("kept", "note"))
        big = snapshot("big").model_copy(update={"patches": (patched(os.urandom(3 << 20)),)})
        with pytest.raises(
            StoreFault, match="no space left on the volume of .*: nothing was saved"
        ) as refused:
            store.save(big)
        assert "\n" not in str(refused.value)
        assert only(store).note == "note"
        store.save(snapshot("small"))
        with (disk / "filler").open("wb", buffering=0) as file, pytest.raises(OSError):
            while True:
                file.write(bytes(4096))
        with pytest.raises(StoreFault, match="no space left"):
            store.save(snapshot("smaller"))
        (disk / "filler").unlink()
        store.save(snapshot("after"))
        assert [entry.label for entry in store.list().entries] == ["after", "small", "kept"]
        said = git(store.place.git_dir, "fsck", check=False).splitlines()
        assert [line for line in said if not line.startswith("dangling")] == []
    finally:
        subprocess.run(["umount", disk], check=False)
