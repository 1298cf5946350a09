"""Seeded mutation of inputs: whatever a reader is given, it answers, refuses in its own words, and comes to an end."""

from __future__ import annotations

import contextlib
import copy
import json
import random
import resource
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import tomli_w

HANG_S = 20.0
"""An input that takes longer is a finding; the machine may be busy."""
GROWTH_BYTES = 400 << 20
"""More memory than before the first input, which no input may take."""

NUMBERS = (0, -1, 1, 2, 7, 255, 2**31 - 1, 2**31, 2**32, 2**63 - 1, 2**63, 2**64, 10**30, -(10**30))
FLOATS = (0.0, -0.0, 0.5, 1e-6, 1e308, 5e-324, float("inf"), float("-inf"), float("nan"))
TEXTS = (
    "",
    "a",
    "x" * 5000,
    "\x00",
    "\x1b[2J",
    "\n",
    "\ud800",
    "🙂" * 50,
    "../../../../etc/passwd",
    "/dev/zero",
    "~nobody-of-that-name/x",
    "auto",
    "none",
    "%s%n{0}",
    "1e400",
)
PIECES = (
    b"",
    b"\x00",
    b"\xff\xfe",
    b"[" * 4000,
    b"{" * 4000,
    b'{"a":' * 3000,
    b"9" * 5000,
    b"0x" + b"f" * 5000,
    b"\xed\xa0\x80",
    b"\\ud800",
    b"NaN",
    b"-Infinity",
    b"null",
    b"\r\n",
    b"\x1b[<0;1;",
    b"\x1b[200~",
    b"/../",
)


class Hang(BaseException):
    """An input that takes too long; no reader catches it by mistake."""


@dataclass(frozen=True)
class Finding:
    """An input that did harm."""

    target: str
    number: int
    what: str
    content: bytes

    def __str__(self) -> str:
        return f"{self.target} input {self.number}: {self.what}\n  {self.content[:300]!r}"


@dataclass(frozen=True)
class Target:
    """One reader: what it is fed with, and the errors that are its own words."""

    name: str
    corpus: Sequence[bytes]
    feed: Callable[[bytes], None]
    own: tuple[type[Exception], ...] = ()
    shape: str = "bytes"
    """"json" and "toml" are changed as values too, "bytes" only as bytes."""


@dataclass
class Outcome:
    """What a run over one target gave."""

    target: str
    inputs: int = 0
    refused: int = 0
    slowest_s: float = 0.0
    grown_bytes: int = 0
    findings: list[Finding] = field(default_factory=list)

    def __str__(self) -> str:
        return (
            f"{self.target}: {self.inputs} inputs, {self.refused} refused, slowest {self.slowest_s:.2f} s, "
            f"memory +{self.grown_bytes / 2**20:.0f} MiB, {len(self.findings)} findings"
        )


def run(target: Target, seed: int, seconds: float = 0.0, inputs: int = 0, most_findings: int = 20) -> Outcome:
    """Feeds `target` for so many seconds, or so many inputs. The same seed gives the same inputs in the same order."""
    rng = random.Random(f"{target.name} {seed}")
    outcome = Outcome(target.name)
    end = time.monotonic() + seconds
    for original in target.corpus:
        target.feed(original)  # what is fed is good before it is spoilt
    before = _memory()
    while (outcome.inputs < inputs if inputs else time.monotonic() < end) and len(
        outcome.findings
    ) < most_findings:
        content = mutated(rng, rng.choice(target.corpus), target)
        began = time.monotonic()
        try:
            with _deadline():
                target.feed(content)
        except target.own:
            outcome.refused += 1
        except Hang:
            outcome.findings.append(Finding(target.name, outcome.inputs, "hangs", content))
        except BaseException as failure:  # also a panic of a native library, which is no Exception
            if isinstance(failure, KeyboardInterrupt):
                raise
            what = f"{type(failure).__name__}: {str(failure)[:300]}"
            outcome.findings.append(Finding(target.name, outcome.inputs, what, content))
        outcome.inputs += 1
        outcome.slowest_s = max(outcome.slowest_s, time.monotonic() - began)
        outcome.grown_bytes = _memory() - before
        if outcome.grown_bytes > GROWTH_BYTES:
            outcome.findings.append(
                Finding(target.name, outcome.inputs - 1, "takes memory without end", content)
            )
            before = _memory()
    return outcome


def mutated(rng: random.Random, content: bytes, target: Target) -> bytes:
    """`content` with one to four changes, as a value or as bytes."""
    if target.shape != "bytes" and rng.random() < 0.6:
        with contextlib.suppress(
            AttributeError, ValueError, TypeError, RecursionError
        ):  # no file of that shape
            return _changed_value(rng, content, target.shape)
    for _ in range(rng.randint(1, 4)):
        content = _changed_bytes(rng, content, target)
    return content


def _changed_bytes(rng: random.Random, content: bytes, target: Target) -> bytes:
    # Heads are small and matter more than what follows.
    near = min(len(content), rng.choice((64, 512, 1 << 20)))
    at = rng.randint(0, near)
    length = min(len(content) - at, rng.choice((1, 1, 2, 4, 8, 64, 1000)))
    match rng.randrange(8):
        case 0 if content:
            flipped = bytearray(content)
            flipped[min(at, len(content) - 1)] ^= 1 << rng.randrange(8)
            return bytes(flipped)
        case 1:
            return content[:at] + rng.randbytes(length) + content[at + length :]
        case 2:
            return content[:at] + content[at + length :]
        case 3:
            return content[:at]
        case 4:
            return content[:at] + content[at : at + length] * rng.choice((2, 3, 50)) + content[at:]
        case 5:
            return content[:at] + rng.choice(PIECES) + content[at:]
        case 6:
            number = rng.choice(NUMBERS) & (2**64 - 1)
            raw = number.to_bytes(8, "little")[: rng.choice((1, 2, 4, 8))]
            return content[:at] + raw + content[at + len(raw) :]
        case _:
            other = rng.choice(target.corpus)
            return content[:at] + other[rng.randint(0, len(other)) :]


def _changed_value(rng: random.Random, content: bytes, shape: str) -> bytes:
    """The same file with values replaced, removed, renamed or doubled."""
    import tomllib

    value = json.loads(content) if shape == "json" else tomllib.loads(content.decode())
    for _ in range(rng.randint(1, 3)):
        value = _changed_tree(rng, copy.deepcopy(value), shape)
    return (
        json.dumps(value).encode()
        if shape == "json"
        else tomli_w.dumps(value).encode("utf-8", "surrogatepass")
    )


def _changed_tree(rng: random.Random, value: Any, shape: str) -> Any:
    """Walks down some way and changes what is there."""
    if isinstance(value, dict) and value and rng.random() < 0.9:
        key = rng.choice(list(value))
        match rng.randrange(8):
            case 0:
                del value[key]
            case 1:
                value[_some_text(rng)] = value.pop(key)
            case _:
                value[key] = _changed_tree(rng, value[key], shape)
        return value
    if isinstance(value, list) and value and rng.random() < 0.8:
        at = rng.randrange(len(value))
        match rng.randrange(6):
            case 0:
                del value[at]
            case 1:
                value[at:at] = [value[at]] * rng.choice((1, 100))
            case _:
                value[at] = _changed_tree(rng, value[at], shape)
        return value
    return _some_value(rng, shape)


def _some_value(rng: random.Random, shape: str) -> Any:
    kinds: list[Callable[[], Any]] = [
        lambda: rng.choice(NUMBERS),
        lambda: rng.choice(FLOATS),
        lambda: _some_text(rng),
        lambda: rng.random() < 0.5,
        lambda: [],
        lambda: {},
        lambda: [_some_text(rng)] * rng.choice((1, 3, 200)),
        lambda: {"a": [1, {"b": _some_text(rng)}]},
    ]
    if shape == "json":
        kinds.append(lambda: None)
    return rng.choice(kinds)()


def _some_text(rng: random.Random) -> str:
    return rng.choice(TEXTS) if rng.random() < 0.8 else rng.randbytes(rng.randint(1, 12)).decode("latin-1")


def _memory() -> int:
    """The most this process ever held, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


@contextlib.contextmanager
def _deadline() -> Iterator[None]:
    """Raises Hang in the block after `HANG_S`; only the main thread can."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def late(_number: int, _frame: FrameType | None) -> None:
        raise Hang

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, HANG_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
