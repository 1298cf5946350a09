"""Prefixes of finished requests, kept in their slots until the slots are needed; least recently used goes first."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

from runtime.kv_cache import Extent


@dataclass(eq=False)
class Prefix:
    """`len(token_ids)` committed tokens; the first `drafter_len` have drafter keys and values too."""

    token_ids: tuple[int, ...]
    drafter_len: int
    extent: Extent


class PrefixCache:
    """Exact-match store; entries are ordered from least to most recently used."""

    def __init__(self) -> None:
        self._entries: list[Prefix] = []

    @property
    def slots(self) -> int:
        return sum(entry.extent.size for entry in self._entries)

    def extents(self) -> list[Extent]:
        """Slots this cache owns."""
        return [entry.extent for entry in self._entries]

    def add(self, entry: Prefix) -> list[Prefix]:
        """Keeps `entry`; returns the entries it makes useless (their tokens begin it), for their slots to be freed."""
        covered = [old for old in self._entries if entry.token_ids[: len(old.token_ids)] == old.token_ids]
        self._entries = [old for old in self._entries if old not in covered] + [entry]
        return covered

    def match(self, token_ids: Seq[int], with_drafter: bool) -> tuple[Prefix, int] | None:
        """The entry with the longest common beginning, and its length; marks it as used.

        At least one token of `token_ids` is left to compute, since the next token's logits come from it.
        """
        best: tuple[Prefix, int] | None = None
        for entry in self._entries:
            limit = min(len(entry.token_ids), len(token_ids) - 1)
            if with_drafter:
                limit = min(limit, entry.drafter_len)
            length = 0
            while length < limit and entry.token_ids[length] == token_ids[length]:
                length += 1
            if length and (best is None or length > best[1]):
                best = (entry, length)
        if best is not None:
            self._entries.remove(best[0])
            self._entries.append(best[0])
        return best

    def evict(self, keep: Prefix | None = None) -> Prefix | None:
        """Drops the least recently used entry other than `keep`; None if there is none."""
        for entry in self._entries:
            if entry is not keep:
                self._entries.remove(entry)
                return entry
        return None

    def clear(self) -> list[Prefix]:
        """Drops and returns all entries."""
        dropped, self._entries = self._entries, []
        return dropped
