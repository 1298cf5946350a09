"""The choice of one token written a second time, plainly, in numpy: what the runtime's sampling is compared with.

Shares no code with `runtime`: Philox on Python integers and on numpy words, filters as loops over sorted tokens.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float32]
MASK = 0xFFFFFFFF


@dataclass(frozen=True)
class Rule:
    """How a request is sampled; field meanings as in the API."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    min_tokens: int = 0
    stop_token_ids: frozenset[int] = frozenset()


def philox_words(counter: Sequence[int], key: Sequence[int]) -> list[int]:
    """Philox4x32-10 on Python integers (Salmon et al. 2011, section 3)."""
    c, k = list(counter), list(key)
    for _ in range(10):
        left, right = c[0] * 0xD2511F53, c[2] * 0xCD9E8D57
        c = [(right >> 32) ^ c[1] ^ k[0], right & MASK, (left >> 32) ^ c[3] ^ k[1], left & MASK]
        k = [(k[0] + 0x9E3779B9) & MASK, (k[1] + 0xBB67AE85) & MASK]
    return c


def gumbel(seed: int, position: int, vocab_size: int) -> Array:
    """Noise `[vocab_size]` of one position: the words of Philox over numpy's unsigned integers."""
    groups = np.arange((vocab_size + 3) // 4, dtype=np.uint64)
    c = [groups, np.full_like(groups, position), np.zeros_like(groups), np.zeros_like(groups)]
    k = [seed & MASK, seed >> 32]
    low = np.uint64(MASK)
    for _ in range(10):
        left, right = c[0] * np.uint64(0xD2511F53), c[2] * np.uint64(0xCD9E8D57)
        c = [
            (right >> np.uint64(32)) ^ c[1] ^ np.uint64(k[0]),
            right & low,
            (left >> np.uint64(32)) ^ c[3] ^ np.uint64(k[1]),
            left & low,
        ]
        k = [(k[0] + 0x9E3779B9) & MASK, (k[1] + 0xBB67AE85) & MASK]
    words = np.stack(c, 1).reshape(-1)[:vocab_size]
    uniform = ((words >> np.uint64(9)).astype(np.float32) + np.float32(0.5)) * np.float32(2.0**-23)
    return -np.log(-np.log(uniform))


def scores(logits: Array, rule: Rule, prompt: Sequence[int], outputs: Sequence[int]) -> Array:
    """Scores `[vocab]` whose first maximum is the token after `prompt` and `outputs`; -inf where filtered out."""
    adjusted = _adjust(logits.astype(np.float32), rule, Counter(prompt) + Counter(outputs), len(outputs))
    if rule.temperature < 1e-4:
        return adjusted
    scaled = adjusted / np.float32(rule.temperature)
    passed = kept(scaled, rule)
    position = len(prompt) + len(outputs)
    noisy = scaled + gumbel(rule.seed, position, len(logits))
    return np.where(passed, noisy, -np.inf).astype(np.float32)


def _adjust(logits: Array, rule: Rule, counts: Mapping[int, int], outputs_before: int) -> Array:
    adjusted = logits.copy()
    for token, count in counts.items():
        if adjusted[token] > 0:
            adjusted[token] /= np.float32(rule.repetition_penalty)
        else:
            adjusted[token] *= np.float32(rule.repetition_penalty)
        adjusted[token] -= np.float32(rule.frequency_penalty * count + rule.presence_penalty)
    for token, bias in rule.logit_bias.items():
        adjusted[token] += np.float32(bias)
    if outputs_before < rule.min_tokens:
        adjusted[list(rule.stop_token_ids)] = -np.inf
    return adjusted


def kept(scaled: Array, rule: Rule) -> NDArray[np.bool_]:
    """Which tokens pass top-k, then top-p, then min-p."""
    order = sorted(range(len(scaled)), key=lambda token: (-scaled[token], token))
    if rule.top_k:
        order = order[: rule.top_k]
    values = scaled[order].astype(np.float64)
    probs = np.exp(values - values.max())
    probs /= probs.sum()
    passed = np.zeros(len(scaled), dtype=bool)
    mass = 0.0
    for token, prob in zip(order, probs, strict=True):
        reached = rule.top_p < 1 and mass >= rule.top_p
        if passed.any() and (reached or prob < rule.min_p * probs[0]):
            break
        passed[token] = True
        mass += prob
    return passed
