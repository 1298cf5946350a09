"""The remote of a store: where it is, push and pull. Nothing is ever forced; two histories are joined by a commit."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from urllib.parse import urlsplit

from snapshots import history
from snapshots.git import Answer, GitRunner, StoreFault, StoreRefused, explained, opened, without_password
from snapshots.message import compose_merge
from snapshots.objects import ABSENT, RefMove, current, move, pack_refs, write_commit, write_tree, writing
from snapshots.place import Place
from snapshots.store import Store, new_id, remote_url

SSH = "ssh -o BatchMode=yes -o ConnectTimeout=15"


@dataclass(frozen=True)
class Pulled:
    """What a pull brought."""

    new: int
    """Commits that were not here."""
    joined: bool
    """True: both sides had snapshots of their own, and a commit joins them."""


def set_remote(store: Store, url: str) -> str:
    """Remember `url` as the store's remote; returns it as it may be shown.

    Raises:
        StoreRefused: it holds a password, or is no address.
    """
    if not url or url.startswith("-") or any(char.isspace() or ord(char) < 32 for char in url):
        raise StoreRefused(f"remote {url!r} is no address of a repository")
    if urlsplit(url).password:
        raise StoreRefused(
            f"remote {without_password(url)} holds a password; leave it out and let git's credential helper give it"
        )
    with writing(store.place, store.wait_s) as runner:
        if store.place.own:
            runner.run("config", "remote.origin.url", url)
            runner.run("config", "remote.origin.fetch", "refs/heads/main:refs/remotes/origin/main")
        else:
            (store.place.state / "remote").write_text(f"{url}\n", encoding="utf-8")
    return url


def get_remote(store: Store) -> str | None:
    """The remote's address as it may be shown, or None."""
    if not store.place.exists:
        return None
    with opened(store.place.git_dir) as runner:
        url = remote_url(runner, store.place)
    return url and without_password(url)


def push(store: Store) -> int:
    """Send what the remote has not; returns how many commits.

    Raises:
        StoreRefused: there is no remote, or it has snapshots that are not here.
        StoreFault: it cannot be reached.
    """
    place = store.place
    if not place.exists:
        raise StoreRefused(f"{place.words} holds no snapshot yet; nothing to push")
    with opened(place.git_dir) as runner:
        url = _address(runner, place)
        tip = current(runner, place.branch)
        if tip is None:
            raise StoreRefused(f"{place.words} holds no snapshot yet; nothing to push")
        known = current(runner, place.remote_branch)
        count = int(runner.run("rev-list", "--count", *([f"{known}..{tip}"] if known else [tip])).line)
        specs = [f"{tip}:{place.branch}", *_tag_specs(place)]
        if current(runner, place.notes):
            specs.append(f"{place.notes}:{place.notes}")
        _network(
            runner,
            "push",
            "--quiet",
            "--atomic",
            "--no-verify",
            "--end-of-options",
            url,
            *dict.fromkeys(specs),
        )
    with writing(place, store.wait_s) as runner:
        runner.run("update-ref", place.remote_branch, tip)
    return count


def pull(store: Store) -> Pulled:
    """Fetch the remote's snapshots; where both sides have new ones, a commit with both parents joins them.

    Raises:
        StoreRefused: there is no remote, or its history was rewritten.
        StoreFault: it cannot be reached.
    """
    place = store.place
    with writing(place, store.wait_s) as runner:
        url = _address(runner, place)
        listed = _network(runner, "ls-remote", "--quiet", "--end-of-options", url).out.decode(
            "utf-8", "replace"
        )
        theirs = {line.split("\t")[1] for line in listed.splitlines() if "\t" in line}
        if place.branch not in theirs:
            raise StoreRefused(f"{without_password(url)} holds no snapshots yet; first: ddtree snapshot push")
        specs = [f"{place.branch}:{place.remote_branch}", *_tag_specs(place)]
        if place.notes in theirs:
            specs.append(f"+{place.notes}:{place.remote_notes}")
        answer = _network(
            runner,
            "fetch",
            "--no-tags",
            "--end-of-options",
            url,
            *dict.fromkeys(specs),
            check=False,
        )
        if answer.status != 0:
            raise _fetch_fault(answer, place, url)
        pulled = _join(runner, place, url)
        _join_notes(runner, place)
        pack_refs(runner, place)
        return pulled


def push_in_background(store: Store) -> None:
    """Start a push that goes on by itself; how it ended stands in `push.log` beside the store's lock."""
    with (store.place.state / "push.log").open("w", encoding="utf-8") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "console", "snapshot", "push", "--store", str(store.place.folder)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    threading.Thread(target=process.wait, daemon=True).start()


def _join(runner: GitRunner, place: Place, url: str) -> Pulled:
    theirs, ours = current(runner, place.remote_branch), current(runner, place.branch)
    assert theirs is not None
    if ours is None:
        move(runner, place, (RefMove(place.branch, theirs),))
        return Pulled(int(runner.run("rev-list", "--count", theirs).line), joined=False)
    new = int(runner.run("rev-list", "--count", f"{ours}..{theirs}").line)
    if new == 0:
        return Pulled(0, joined=False)
    if runner.ask("merge-base", "--is-ancestor", ours, theirs).status == 0:
        move(runner, place, (RefMove(place.branch, theirs, ours),))
        return Pulled(new, joined=False)
    tree = runner.run("rev-parse", "--verify", f"{ours}^{{tree}}").line
    message = compose_merge(new_id(time.time()), without_password(url), time.time())
    joint = write_commit(runner, tree, (ours, theirs), message)
    move(runner, place, (RefMove(place.branch, joint, ours),))
    return Pulled(new, joined=True)


def _join_notes(runner: GitRunner, place: Place) -> None:
    """Take over notes of the remote; where both sides annotated a snapshot, both texts are kept."""
    theirs, ours = current(runner, place.remote_notes), current(runner, place.notes)
    if theirs is None or theirs == ours:
        return
    if ours is None or runner.ask("merge-base", "--is-ancestor", ours, theirs).status == 0:
        move(runner, place, (RefMove(place.notes, theirs, ours or ABSENT),))
        return
    if runner.ask("merge-base", "--is-ancestor", theirs, ours).status == 0:
        return
    mine, other = history.tree_names(runner, ours), history.tree_names(runner, theirs)
    changed = [commit for commit, blob in other.items() if mine.get(commit) != blob]
    here = dict(zip(mine, history.read_blobs(runner, list(mine.values())), strict=True))
    there = dict(zip(changed, history.read_blobs(runner, [other[each] for each in changed]), strict=True))
    texts = {}
    for commit, text in there.items():
        own = here.get(commit, b"")
        texts[commit] = own if text in own else text if own in text else own + b"\n" + text
    tree = write_tree(runner, texts, ours)
    joint = write_commit(runner, tree, (ours, theirs), b"Notes of two stores joined\n")
    move(runner, place, (RefMove(place.notes, joint, ours),))


def _network(runner: GitRunner, command: str, *arguments: str, check: bool = True) -> Answer:
    """A command that talks to the remote; it never asks for a password on a terminal."""
    env = {} if os.environ.get("GIT_SSH_COMMAND") or os.environ.get("GIT_SSH") else {"GIT_SSH_COMMAND": SSH}
    answer = runner.ask(command, *arguments, env=env, network=True)
    if check and answer.status != 0:
        fault = explained(answer.err, runner.git_dir)
        raise type(fault)(f"{command}: {fault}") if not isinstance(fault, StoreRefused) else fault
    return answer


def _fetch_fault(answer: Answer, place: Place, url: str) -> StoreFault:
    if "rejected" in answer.err or "clobber" in answer.err:
        return StoreRefused(
            f"the history at {without_password(url)} was rewritten and no longer continues what was pulled before; "
            "nothing was changed here"
        )
    return explained(answer.err, place.git_dir)


def _tag_specs(place: Place) -> tuple[str, ...]:
    """The annotated tags of snapshots and the operator's own, without force."""
    if place.snapshots.startswith(place.tags):
        return (f"{place.tags}*:{place.tags}*",)
    return f"{place.snapshots}*:{place.snapshots}*", f"{place.tags}*:{place.tags}*"


def _address(runner: GitRunner, place: Place) -> str:
    url = remote_url(runner, place)
    if url is None:
        raise StoreRefused("this store has no remote; set one with: ddtree snapshot remote URL")
    return url
