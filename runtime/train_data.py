"""Training data of a drafter: prompts (given and self-written), responses of the target, filters and storage.

Prompts are stored as one flat token array with offsets, responses likewise with the prompt in front. Everything is
drawn from a seed, in an order that leaves any cut by the clock unbiased.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from runtime.tokenizer import ChatTokenizer
from runtime.train_generate import Generated, Job
from runtime.train_seeds import OPENERS

PROMPT_FIELDS = ("prompt", "question", "instruction", "text", "query", "input")
MIN_RESPONSE, MAX_RESPONSE, MAX_PROMPT = 16, 320, 224
MIN_SELF_PROMPT = 5
HELD_OUT_SHARE = 0.02
_LOOP_LIMIT, _LOOP_KEPT = 8, 4
_SENTINEL = "QZXJQZ"


class TrainingDataError(ValueError):
    """Prompt files or stored data that cannot be used; the text names the file and what to do."""


@dataclass(frozen=True)
class Prompts:
    """Chat prompts as token ids: `tokens[offsets[i] : offsets[i + 1]]`; `kinds[i]` indexes `names`."""

    tokens: np.ndarray
    offsets: np.ndarray
    kinds: np.ndarray
    names: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.kinds)

    def __getitem__(self, index: int) -> np.ndarray:
        return self.tokens[self.offsets[index] : self.offsets[index + 1]]


@dataclass(frozen=True)
class Sequences:
    """Training texts (prompt and response): flat `tokens`, `offsets [n + 1]`, and one entry a text of the rest."""

    tokens: np.ndarray
    offsets: np.ndarray
    prompt_lengths: np.ndarray
    kinds: np.ndarray
    greedy: np.ndarray
    held_out: np.ndarray
    names: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.kinds)

    @property
    def lengths(self) -> np.ndarray:
        return np.diff(self.offsets)

    @property
    def response_tokens(self) -> int:
        return int(self.offsets[-1] - self.prompt_lengths.sum())


def normalised(text: str) -> str:
    """First 160 characters in lower case with letters and digits only, as prompts are compared."""
    return re.sub(r"[^a-z0-9]+", " ", text.lower()).strip()[:160]


def read_prompt_file(path: Path) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Yields `(first user text, messages)` for each JSON line of `path`.

    A line holds `messages`, `turns` or one of `PROMPT_FIELDS`; `instruction` is joined with `input`.
    """
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as bad:
        raise TrainingDataError(f"prompt file {path} cannot be read ({bad}); give JSON lines") from None
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as bad:
            raise TrainingDataError(f"prompt file {path}, line {number}: not valid JSON ({bad})") from None
        messages = _messages(row) if isinstance(row, dict) else None
        if messages is None:
            raise TrainingDataError(
                f"prompt file {path}, line {number}: has none of messages, turns, {', '.join(PROMPT_FIELDS)}"
            )
        first = next((str(each["content"]) for each in messages if each.get("role") == "user"), "")
        if first.strip():
            yield first, messages


def _messages(row: dict[str, Any]) -> list[dict[str, Any]] | None:
    if isinstance(row.get("messages"), list) and row["messages"]:
        messages = row["messages"]
        while messages and messages[-1].get("role") == "assistant":
            messages = messages[:-1]
        return messages or None
    if isinstance(row.get("turns"), list) and row["turns"]:
        return [{"role": "user", "content": str(row["turns"][0])}]
    if isinstance(row.get("instruction"), str):
        text = "\n\n".join(each for each in (row["instruction"], row.get("input")) if each)
        return [{"role": "user", "content": text}]
    for name in PROMPT_FIELDS:
        if isinstance(row.get(name), str):
            return [{"role": "user", "content": row[name]}]
    return None


def excluded_prompts(paths: Iterable[Path]) -> frozenset[str]:
    """Normalised first user texts of evaluation files, never to be trained on."""
    return frozenset(normalised(text) for path in paths for text, _ in read_prompt_file(path))


class PromptCollector:
    """Gathers distinct prompts that are not excluded, as chat token ids."""

    def __init__(self, tokenizer: ChatTokenizer, excluded: frozenset[str]) -> None:
        self._tokenizer = tokenizer
        self._before, self._after = user_turn_frame(tokenizer)
        self._seen: set[str] = set()
        self._excluded = excluded
        self.refused = 0
        self._ids: list[np.ndarray] = []
        self._kinds: list[str] = []

    def __len__(self) -> int:
        return len(self._ids)

    def add(self, text: str, kind: str, messages: list[dict[str, Any]] | None = None) -> bool:
        """Adds a user text (or a whole conversation); False if it is excluded, known, empty or too long."""
        key = normalised(text)
        if not key or key in self._excluded:
            self.refused += bool(key)
            return False
        if text in self._seen:
            return False
        self._seen.add(text)
        if (messages is None or len(messages) == 1) and not text[0].isspace():
            ids = self._before + self._tokenizer.encode(text) + self._after
        else:
            ids = self._tokenizer.apply_chat_template(messages or [{"role": "user", "content": text}])
        if len(ids) > MAX_PROMPT:
            return False
        self._ids.append(np.asarray(ids, dtype=np.int32))
        self._kinds.append(kind)
        return True

    def finish(self) -> Prompts:
        names = tuple(sorted(set(self._kinds)))
        kinds = np.array([names.index(each) for each in self._kinds], dtype=np.int32)
        offsets = np.concatenate(([0], np.cumsum([len(each) for each in self._ids]))).astype(np.int64)
        tokens = np.concatenate(self._ids) if self._ids else np.zeros(0, dtype=np.int32)
        return Prompts(tokens, offsets, kinds, names)


def user_turn_frame(tokenizer: ChatTokenizer) -> tuple[list[int], list[int]]:
    """Token ids before and after the user's text in a one-turn chat with the default system prompt."""
    text = tokenizer.render_chat([{"role": "user", "content": _SENTINEL}])
    before, _, after = text.partition(_SENTINEL)
    return tokenizer.encode(before), tokenizer.encode(after)


def self_prompt_jobs(tokenizer: ChatTokenizer, seed: int) -> Iterator[Job]:
    """Endless jobs that let the target write a user turn; keys index `OPENERS`."""
    before = tokenizer.render_chat([{"role": "user", "content": _SENTINEL}]).partition(_SENTINEL)[0]
    weights = np.array([opener.weight for opener in OPENERS])
    prompts = [
        np.array(tokenizer.encode(before + opener.text.rstrip(" ")), dtype=np.int32) for opener in OPENERS
    ]
    draw = np.random.default_rng(seed)
    while True:
        for index in draw.choice(len(OPENERS), size=4096, p=weights / weights.sum()):
            opener = OPENERS[index]
            yield Job(prompts[index], opener.temperature, opener.max_tokens, int(index))


def self_prompt_text(tokenizer: ChatTokenizer, found: Generated, end_id: int) -> str | None:
    """The user text of a finished self-prompt, or None if it is unusable.

    A function signature ends after its docstring, whatever followed; every other turn must have ended by itself.
    """
    opener = OPENERS[found.job.key]
    tokens = found.tokens.tolist()
    ended = bool(tokens) and tokens[-1] == end_id
    text = opener.text.rstrip(" ") + tokenizer.decode(tokens[:-1] if ended else tokens, skip_special=True)
    if opener.kind == "signature":
        pieces = re.split(r'("""|\'\'\')', text, maxsplit=2)
        if len(pieces) == 5:
            return "".join(pieces[:4]) + "\n"
    text = text.strip()
    if not ended or len(tokens) < MIN_SELF_PROMPT or "\ufffd" in text:
        return None
    return text


def response_jobs(prompts: Prompts, seed: int, max_new: int) -> Iterator[Job]:
    """Every prompt's planned responses in random order, then further sampled ones without end.

    Given prompts get one greedy response and four sampled at 0.7 to 1.0 (six for mathematics); self-prompts one,
    greedy for half of them. A job's key is `prompt * 2 + (temperature is 0)`.
    """
    draw = np.random.default_rng(seed)
    own = np.array([name.startswith("self:") for name in prompts.names])[prompts.kinds]
    maths = np.array([any(part in name for part in ("gsm", "svamp", "math")) for name in prompts.names])[
        prompts.kinds
    ]
    sampled = (0.7, 0.8, 1.0, 0.9, 0.7, 1.0)
    plan: list[tuple[int, float]] = []
    for index in range(len(prompts)):
        if own[index]:
            heat = (0.0, 0.0, 0.8, 1.0)[draw.integers(4)]
            plan.append((index, heat))
        else:
            plan.append((index, 0.0))
            plan.extend((index, heat) for heat in sampled[: 6 if maths[index] else 4])
    while plan:
        for at in draw.permutation(len(plan)):
            index, heat = plan[at]
            yield Job(prompts[index], heat, max_new, index * 2 + (heat == 0.0))
        plan = [(index, (0.8, 1.0)[draw.integers(2)]) for index in range(len(prompts))]


def cut_loop(tokens: np.ndarray) -> np.ndarray:
    """Cuts a response after the fourth occurrence of a 4-gram that occurs more than eight times."""
    if len(tokens) < _LOOP_LIMIT + 4:
        return tokens
    wide = tokens.astype(np.uint64)
    grams = ((wide[:-3] * np.uint64(1_000_003) + wide[1:-2]) * np.uint64(1_000_003) + wide[2:-1]) * np.uint64(
        1_000_003
    ) + wide[3:]
    ordered = np.sort(grams)
    looping = ordered[_LOOP_LIMIT:][ordered[_LOOP_LIMIT:] == ordered[:-_LOOP_LIMIT]]
    if not len(looping):
        return tokens
    ends = [int(np.flatnonzero(grams == gram)[_LOOP_KEPT - 1]) + 4 for gram in np.unique(looping)]
    return tokens[: min(ends)]


def build_sequences(prompts: Prompts, found: Iterable[Generated], seed: int) -> Sequences:
    """Filters responses and joins them with their prompts; whole prompts are held out."""
    held = np.random.default_rng(seed + 1).random(len(prompts)) < HELD_OUT_SHARE
    pieces: list[np.ndarray] = []
    rows: list[tuple[int, int, bool]] = []
    seen: set[tuple[int, bytes]] = set()
    for each in found:
        index, greedy = each.job.key // 2, bool(each.job.key % 2)
        response = cut_loop(each.tokens.astype(np.int32))
        mark = (index, response.tobytes())
        if len(response) < MIN_RESPONSE or mark in seen:
            continue
        seen.add(mark)
        pieces += (prompts[index], response)
        rows.append((index, len(prompts[index]), greedy))
    if not rows:
        raise TrainingDataError("no response passed the filter; give more prompts or more minutes")
    lengths = np.array([len(each) for each in pieces]).reshape(-1, 2).sum(axis=1)
    offsets = np.concatenate(([0], np.cumsum(lengths))).astype(np.int64)
    indices = np.array([row[0] for row in rows])
    tokens = np.concatenate(pieces)
    small = np.uint16 if int(tokens.max()) < 1 << 16 else np.int32
    held_rows = held[indices]
    if len(rows) == 1:
        held_rows = np.zeros(1, dtype=bool)  # nothing would be left to train on
    elif held_rows.all() or not held_rows.any():
        held_rows = np.arange(len(rows)) % 50 == 0
    return Sequences(
        tokens=tokens.astype(small),
        offsets=offsets,
        prompt_lengths=np.array([row[1] for row in rows], dtype=np.int32),
        kinds=prompts.kinds[indices],
        greedy=np.array([row[2] for row in rows]),
        held_out=held_rows,
        names=prompts.names,
    )


def save_arrays(path: Path, value: Prompts | Sequences) -> None:
    """Stores either kind of data as one npz file, replacing it at once."""
    scratch = path.with_suffix(".partial")
    with scratch.open("wb") as file:
        arrays = {name: np.asarray(field) for name, field in vars(value).items()}
        np.savez(file, **arrays)  # type: ignore[arg-type]
    os.replace(scratch, path)


def load_prompts(path: Path) -> Prompts:
    return Prompts(**_load(path, Prompts))


def load_sequences(path: Path) -> Sequences:
    return Sequences(**_load(path, Sequences))


def _load(path: Path, kind: Callable[..., Any]) -> dict[str, Any]:
    try:
        with np.load(path, allow_pickle=False) as stored:
            found: dict[str, Any] = {name: stored[name] for name in stored.files}
    except FileNotFoundError:
        raise TrainingDataError(f"{path} is missing; run the stage before this one first") from None
    except (OSError, ValueError) as bad:
        raise TrainingDataError(f"{path} cannot be read ({bad}); delete it and run the stage again") from None
    found["names"] = tuple(str(each) for each in found["names"])
    return found


def kind_counts(value: Prompts | Sequences) -> dict[str, int]:
    """How many entries there are of each kind."""
    counts: Sequence[int] = np.bincount(value.kinds, minlength=len(value.names)).tolist()
    return dict(zip(value.names, counts, strict=True))
