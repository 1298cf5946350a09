"""A scripted day of an operator: start, prompts, changes, snapshots, rollback, attach, detach, stop.

Each step says what was not as it should be, given what was done to it meanwhile: `Hurt` holds the excuses.
"""

from __future__ import annotations

import json
import random
import shutil
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from http.client import HTTPException
from typing import TYPE_CHECKING, Any

from fault_world import Answer, Asked, Console, World, until

if TYPE_CHECKING:
    from snapshots.content import Snapshot

PROMPTS = (
    "the end of it",
    "in another tree",
    "ones and hundreds",
    "a",
    "he said: theirs\nnot here",
    "öä 中 🙂",
)
ASKED = tuple(
    Asked(prompt, 40, temperature)
    for prompt, temperature in zip(PROMPTS, (0.0, 0.7, 0.0, 1.0, 0.0, 0.7), strict=True)
)
MODES = (None, "off", "chain", "tree")
LIVE = (
    {"mode": "off"},
    {"mode": "chain"},
    {"mode": "tree"},
    {"tree_budget": 4},
    {"tree_budget": 11},
    {"temperature": 0.5},
    {"mode": "tree", "tree_budget": 8},
)
REBUILDS = ({"block_size": 4}, {"block_size": 8}, {"max_tree_budget": 32})
LAYOUTS = ({"layout": "tp2"}, {"layout": "pp2"}, {"layout": "single"})
KILLED, RAISED, FULL, BAD_FILES = (
    "the server was killed",
    "a round failed",
    "the disk is full",
    "files were bad",
)
ALL = 10_000
"""More snapshots than any day or soak makes, the automatic ones of its rebuilds included."""
LOST_SCREEN, LOST_RANK = "the console lost its terminal or its life", "a rank was lost"
TRACKED = ("mode", "tree_budget", "temperature", "block_size", "max_tree_budget", "layout", "max_seq_len")
"""Settings whose values are followed through the day."""


@dataclass
class Day:
    """A world with what is known of it: what was answered, kept and set."""

    world: World
    texts: Mapping[tuple[Any, ...], str]
    """What each request gets when nothing disturbs it."""
    rng: random.Random
    step: str = ""
    """The step at hand."""
    hurt: set[str] = field(default_factory=set)
    """What was done to it."""
    config: dict[str, Any] = field(default_factory=dict)
    """Settings that were confirmed, by name."""
    wanted: dict[str, Any] = field(default_factory=dict)
    """A change under way, which a kill leaves undone or done."""
    kept: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Snapshots that were confirmed: id to settings."""
    good: list[dict[str, Any]] = field(default_factory=list)
    """Settings that served."""
    layouts: bool = False
    answered: int = 0

    def excused(self, *reasons: str) -> bool:
        return bool(self.hurt.intersection(reasons))

    def begins(self) -> None:
        """Notes the settings of a server that has just come up."""
        self.config = {
            name: value for name, value in self.world.status()["config"].items() if name in TRACKED
        }
        self.wanted = {}
        self.served()

    def served(self) -> None:
        """Notes the settings in force as ones that served."""
        if self.config not in self.good:
            self.good.append(dict(self.config))


Step = Callable[[Day], list[str]]


def start(day: Day) -> list[str]:
    """The server comes up with its configuration file."""
    said = day.world.write_config()
    day.world.start_server()
    day.begins()
    wrong = {name: day.config[name] for name in TRACKED if name in said and said[name] != day.config[name]}
    return [f"not what the configuration file says: {wrong}"] if wrong else []


def prompts(day: Day) -> list[str]:
    """Several streams at once."""
    return _judged(day, day.world.ask_all(_some(day)))


def leavers(day: Day) -> list[str]:
    """Clients whose connections are reset midway, beside one that stays."""
    for each in _some(day)[:2]:
        day.world.ask(each, leave_after=day.rng.randint(1, 3))
    return prompts(day)


def flip(day: Day) -> list[str]:
    """A live change."""
    return _applied(day, day.rng.choice(LIVE))


def rebuild(day: Day) -> list[str]:
    """A change that needs another engine, made while text streams."""
    choice = LAYOUTS if day.layouts else REBUILDS
    return _beside(day, lambda: _applied(day, day.rng.choice(choice)))


def save(day: Day) -> list[str]:
    """A snapshot of what runs."""
    before = dict(day.config)
    label = f"s{len(day.kept)}-{day.rng.randrange(1 << 30)}"
    arguments = ["snapshot", "save", "--label", label, "--no-fetch-originals", "--json"]
    status, said = day.world.run(*arguments, "--note", f"note of {label}\n#1")
    if status == 0:
        name = json.loads(said.splitlines()[-1])["snapshot"]["id"]
        day.kept[name] = (_kept_alone(day, name) if day.excused(KILLED) else None) or before
        return []
    return _failed(day, "snapshot save", status, said, KILLED, FULL, BAD_FILES)


def _kept_alone(day: Day, name: str) -> dict[str, Any] | None:
    """What a snapshot holds that was saved when the server was gone: what it would start with, and marked so."""
    from snapshots.content import Measurements
    from snapshots.store import Store

    snapshot = Store.at(day.world.store).load(name)[1]
    settings = tracked(snapshot)
    return settings if snapshot.measurements == Measurements() and settings in day.good else None


def tracked(snapshot: Snapshot) -> dict[str, Any]:
    """The settings that are followed, as a server says them."""
    values = {each: snapshot.config.get(each) for each in TRACKED}
    return {each: None if value in ("n/a", "auto") else value for each, value in values.items()}


def browse(day: Day) -> list[str]:
    """The list and one of it."""
    status, said = day.world.run("snapshot", "list", "--json", "--limit", str(ALL))
    if status != 0:
        return _failed(day, "snapshot list", status, said, FULL, BAD_FILES)
    listed = {each["id"] for each in json.loads(said.splitlines()[-1])["snapshots"]}
    missing = [each for each in day.kept if each not in listed]
    return [f"snapshots are gone: {missing}"] if missing else []


def rollback(day: Day) -> list[str]:
    """Back to a snapshot that was confirmed."""
    if not day.kept:
        return []
    name, settings = day.rng.choice(sorted(day.kept.items()))
    day.wanted = {key: value for key, value in settings.items() if day.config.get(key) != value}
    arguments = ["snapshot", "rollback", name, "--yes", "--no-measure", "--no-patches", "--json"]
    status, said = day.world.run(*arguments)
    if status == 0:
        day.config |= day.wanted
        day.wanted = {}
        day.served()
        return []
    return _undone(day) + _failed(
        day, "snapshot rollback", status, said, KILLED, FULL, RAISED, BAD_FILES, LOST_RANK
    )


def attach(day: Day) -> list[str]:
    """A console on a terminal, until it shows the server."""
    detach(day)
    console = day.world.console = Console(day.world)
    try:
        until(
            lambda: console.shows(b"[1 Live]", b"ready", b"degraded") or console.child.status() is not None,
            "the console shows the server",
            20.0 if day.hurt else 90.0,
        )
    except AssertionError as never:
        return [] if day.hurt else [f"{never}: {console.seen[-400:]!r}"]
    if console.child.status() is not None:
        if not day.excused(KILLED, LOST_SCREEN, FULL):
            return [f"the console ended: {console.seen[-400:]!r}"]
        # It found no server to attach to; how it ended is no matter of the step that leaves it.
        console.close()
        day.world.console = None
    return []


def detach(day: Day) -> list[str]:
    """`q`, after which the terminal is as before and the server goes on."""
    console, day.world.console = day.world.console, None
    if console is None:
        return []
    problems = []
    try:
        if console.child.status() is None and console.master >= 0:
            console.press(b"q")
        status = console.child.wait(10.0)
        if status is None:
            console.press(b"y")
            status = console.child.wait(20.0)
        if status != 0 and not day.excused(LOST_SCREEN, KILLED):
            problems.append(f"the console ended with {status}: {console.seen[-400:]!r}")
        if status == 0 and not console.sane:
            problems.append("the terminal is not as it was")
        if b"Traceback" in console.seen:
            problems.append(f"a traceback on the screen: {console.seen[-2000:]!r}")
    finally:
        console.close()
    return problems


def stop(day: Day) -> list[str]:
    """SIGTERM while text streams: what was accepted is finished."""
    status: list[int | None] = []
    problems = _beside(day, lambda: status.append(day.world.end_server()) or [])
    if status != [0] and not day.excused(KILLED):
        problems.append(f"serve ended with {status} after SIGTERM")
    return problems


STEPS: tuple[tuple[Step, float], ...] = (
    (start, 1.0),
    (prompts, 1.0),
    (flip, 0.8),
    (save, 0.7),
    (attach, 0.35),
    (leavers, 0.5),
    (rebuild, 0.6),
    (flip, 0.5),
    (save, 0.3),
    (rollback, 0.5),
    (browse, 0.3),
    (prompts, 0.7),
    (detach, 1.0),
    (stop, 1.0),
)
"""The day in order, with how likely each step is part of it."""


def undisturbed(world: World) -> dict[tuple[Any, ...], str]:
    """The text of every request of a day, asked alone and decoded plainly."""
    world.start_server()
    texts = {}
    for each in ASKED:
        answer = world.ask(Asked(each.prompt, each.max_tokens, each.temperature, "off"))
        assert answer.complete, answer
        texts[each.key] = answer.text
    status, said = world.run("snapshot", "save", "--no-fetch-originals")
    assert status == 0, said
    shutil.copy(world.cached_digests, world.digests)
    assert world.end_server() == 0
    return texts


def _some(day: Day) -> list[Asked]:
    chosen = day.rng.sample(ASKED, day.rng.randint(2, 4))
    return [Asked(each.prompt, each.max_tokens, each.temperature, day.rng.choice(MODES)) for each in chosen]


def _beside(day: Day, act: Callable[[], list[str]]) -> list[str]:
    """`act` while streams run; all are judged."""
    answers: list[Answer] = []
    asked = _some(day)
    streams = threading.Thread(target=lambda: answers.extend(day.world.ask_all(asked)))
    streams.start()
    if day.world.server is not None and not day.hurt:
        until(
            lambda: not streams.is_alive() or day.world.status()["running"] or day.hurt, "streams run", 20.0
        )
    problems = act()
    streams.join()
    return problems + _judged(day, answers)


def _judged(day: Day, answers: list[Answer]) -> list[str]:
    """No accepted request is lost or altered: all of its text, or a visible end where there is an excuse."""
    problems = []
    for answer in answers:
        solo = day.texts[answer.asked.key]
        if answer.complete:
            day.answered += 1
            if answer.text != solo:
                problems.append(f"altered: {answer.asked}: {answer.text!r} instead of {solo!r}")
        elif not solo.startswith(answer.text):
            problems.append(f"altered before its end: {answer.asked}: {answer.text!r}, alone {solo!r}")
        elif answer.refused not in (None, 0, 503, 429):
            problems.append(f"refused with {answer.refused}: {answer.asked}")
        elif answer.refused is not None:
            if not day.hurt and day.step != "stop":
                problems.append(f"refused with {answer.refused} without a reason: {answer.asked}")
        elif answer.broken and not day.excused(KILLED, RAISED, BAD_FILES):
            problems.append(f"lost: {answer.asked}: {answer.broken}")
    return problems


def _applied(day: Day, change: Mapping[str, Any]) -> list[str]:
    """Makes a change over HTTP and notes it where it was confirmed."""
    day.wanted = dict(change)
    try:
        code, report = day.world.apply(change)
    except (OSError, ValueError, HTTPException) as error:
        code, report = 0, repr(error)
    if code == 200 and report.get("failure") is None:
        day.config |= day.wanted
        day.wanted = {}
        day.served()
        return []
    _undone(day)
    if code == 200:
        day.wanted = {}
    if day.excused(KILLED, RAISED, FULL, BAD_FILES, LOST_RANK):
        return []
    return [f"{dict(change)} was not applied: {code} {report}"]


def _undone(day: Day) -> list[str]:
    """Of a change that was not confirmed: it may have been in force until the server was killed."""
    if day.excused(KILLED):
        day.good.append(day.config | day.wanted)
    return []


def _failed(day: Day, what: str, status: int | None, said: str, *excuses: str) -> list[str]:
    """A command may fail for a reason, and says it in a line."""
    problems = []
    if "Traceback" in said or "unexpected" in said or len(said.strip().splitlines()) > 3:
        problems.append(f"{what} does not fail in one line: {said[-1500:]}")
    if status is None or not day.excused(*excuses):
        problems.append(f"{what} ended with {status}: {said[-600:]}")
    return problems
