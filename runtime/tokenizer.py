"""Text to token ids and back, with chat templates and incremental detokenisation, over `tokenizers`.

Ids turn into text through one table of raw bytes per token, so that the pieces of a stream always add up to
the text decoded at once. For byte-level BPE that equals the library's own decoding, ill-formed output too.
"""

from __future__ import annotations

import codecs
import contextlib
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

from runtime.chat_template import compile_template, render_chat
from runtime.gguf import CheckpointError, GgufFile, UnsupportedCheckpoint

_METASPACE = "\u2581"
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_TEMPLATE_TOKENS = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)
LARGEST_ID = 1 << 24
_GGUF_CONTROL_TOKEN, _GGUF_USER_TOKEN = 3, 4


@dataclass(frozen=True)
class ChatTokenizer:
    """A tokenizer with its chat template; build it with `from_gguf` or `from_folder`.

    Attributes:
        tokenizer: the library's tokenizer.
        chat_template: Jinja source, or None for a model that has none.
        special_tokens: what templates see as `bos_token`, `eos_token` and so on.
        strips_leading_space: whether decoding drops one space at the start (SentencePiece models do).
    """

    tokenizer: Tokenizer
    chat_template: str | None
    special_tokens: Mapping[str, str]
    strips_leading_space: bool
    special_ids: frozenset[int]
    _bytes: tuple[bytes, ...] = field(repr=False)

    @classmethod
    def from_gguf(cls, gguf: GgufFile) -> ChatTokenizer:
        """Build the GPT-2 byte-level BPE tokenizer that a GGUF file carries.

        Raises:
            CheckpointError: another tokenizer model or pre-tokenizer, or inconsistent tables.
        """
        with _understood(gguf.path):
            template = gguf.metadata.get("tokenizer.chat_template")
            return _assemble(
                _gguf_tokenizer(gguf),
                template if isinstance(template, str) else None,
                _gguf_specials(gguf),
                gguf.path,
            )

    @classmethod
    def from_folder(cls, folder: str | Path) -> ChatTokenizer:
        """Read `tokenizer.json` and the chat template (`chat_template.jinja`, else `tokenizer_config.json`).

        Raises:
            CheckpointError: no or unreadable `tokenizer.json`, or a decoder of an unknown kind.
        """
        folder = Path(folder)
        with _understood(folder):
            config = _optional_json(folder / "tokenizer_config.json")
            specials = _optional_json(folder / "special_tokens_map.json") | config
            named = {
                key: _token_text(specials[key]) for key in _TEMPLATE_TOKENS if _token_text(specials.get(key))
            }
            return _assemble(
                _folder_tokenizer(folder, config), _folder_template(folder, config), named, folder
            )

    @property
    def vocab_size(self) -> int:
        """One more than the highest id that has a token, added ones too; a model's head may be larger."""
        return len(self._bytes)

    def encode(self, text: str, add_special: bool = False) -> list[int]:
        """Return the ids of `text`; strings of special tokens become those tokens, as in transformers.

        Args:
            add_special: also put the tokens around the text that the tokenizer adds by itself (such as BOS).

        Raises:
            ValueError: the text holds lone surrogates, which no encoding can represent.
        """
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise ValueError(
                f"text has a lone surrogate at position {error.start}; send valid Unicode"
            ) from None
        return self.tokenizer.encode(text, add_special_tokens=add_special).ids

    def decode(self, ids: Iterable[int], skip_special: bool = True) -> str:
        """Return the text of `ids`; bytes that are no UTF-8 become U+FFFD, ids without a token nothing."""
        skipped = self.special_ids if skip_special else ()
        raw = b"".join([self.id_to_bytes(each) for each in ids if each not in skipped])
        if self.strips_leading_space:
            raw = raw.removeprefix(b" ")
        return raw.decode("utf-8", "replace")

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Return the ids of a conversation.

        Args:
            messages: `{"role": ..., "content": ...}` each, at least one.
            add_generation_prompt: end with the opening of the assistant's turn.
            variables: further names the template may use, such as `enable_thinking` or `tools`.

        Raises:
            ValueError: no template, no message, or one that the template refuses; one line.
        """
        return self.encode(self.render_chat(messages, add_generation_prompt, variables))

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """Return the text that `apply_chat_template` encodes; arguments and errors are the same."""
        if self.chat_template is None:
            raise ValueError("this model has no chat template; send a raw prompt instead of messages")
        names = {
            **self.special_tokens,
            **(variables or {}),
            "messages": [dict(each) for each in messages],
            "add_generation_prompt": add_generation_prompt,
        }
        return render_chat(self._template, names)

    @cached_property
    def _template(self) -> Any:
        return compile_template(self.chat_template or "")

    def token_id(self, token: str) -> int | None:
        """Return the id of a token given as the vocabulary writes it, or None."""
        return self.tokenizer.token_to_id(token)

    def id_to_bytes(self, token_id: int) -> bytes:
        """Return the bytes of a token, which may begin or end inside a character; none for an unused id."""
        return self._bytes[token_id] if 0 <= token_id < len(self._bytes) else b""

    def to_json(self) -> str:
        """Return the content of a `tokenizer.json` file that rebuilds this tokenizer."""
        return self.tokenizer.to_str(pretty=True)


def kept_tokenizer(path: Path, read: Callable[[], ChatTokenizer]) -> ChatTokenizer:
    """The tokenizer of a GGUF file or a folder at `path`: that of an earlier load while its files are the same.

    The library keeps what a thread has encoded with a tokenizer, some MB of a busy one, for as long as the thread
    lives, even once the tokenizer is gone; so the engines of one model, one after the other, share one.
    """
    parts = [path] if path.is_file() else sorted([*path.glob("*.json"), *path.glob("*.jinja")])
    files = [each for each in parts if each.is_file()]
    stats = [each.stat() for each in files]
    place = _place(tuple(map(str, files)), tuple((s.st_mtime_ns, s.st_size, s.st_ino) for s in stats))
    if not place:
        place.append(read())
    return place[0]


@lru_cache(maxsize=4)
def _place(_files: tuple[str, ...], _stamps: tuple[tuple[int, ...], ...]) -> list[ChatTokenizer]:
    """Where the tokenizer of these files is kept once it is read."""
    return []


class IncrementalDetokenizer:
    """Turns a stream of ids into text piece by piece; the pieces add up to `ChatTokenizer.decode` of all ids.

    A piece never ends inside a character: bytes of an unfinished one wait for the tokens that complete it.
    """

    def __init__(self, tokenizer: ChatTokenizer, skip_special: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_ids if skip_special else frozenset[int]()
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._at_start = tokenizer.strips_leading_space

    def push(self, token_id: int) -> str:
        """Take one id and return the text that is complete with it, often the empty string."""
        if token_id in self._skipped:
            return ""
        raw = self._tokenizer.id_to_bytes(token_id)
        if self._at_start and raw:
            raw = raw.removeprefix(b" ")
            self._at_start = False
        return self._decoder.decode(raw)

    def flush(self) -> str:
        """End the stream: return U+FFFD if it stopped inside a character, else nothing."""
        self._at_start = self._tokenizer.strips_leading_space
        return self._decoder.decode(b"", final=True)


@contextlib.contextmanager
def _understood(path: Path) -> Iterator[None]:
    """What stands in a tokenizer's files in another way than any tokenizer has it, as a CheckpointError."""
    try:
        yield
    except CheckpointError:
        raise
    except (AttributeError, KeyError, OSError, RecursionError, TypeError, ValueError) as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        raise CheckpointError(
            f"{path}: the tokenizer cannot be understood ({reason}); copy the model again"
        ) from None


def _assemble(
    tokenizer: Tokenizer, template: str | None, specials: Mapping[str, str], path: Path
) -> ChatTokenizer:
    tokenizer.no_truncation()
    tokenizer.no_padding()
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    if not vocabulary:
        raise CheckpointError(f"{path}: the tokenizer has no vocabulary; copy the model again")
    decoder = tokenizer.decoder.__getstate__().decode() if tokenizer.decoder is not None else ""
    byte_level = '"ByteLevel"' in decoder
    if not byte_level and '"ByteFallback"' not in decoder and '"Metaspace"' not in decoder:
        raise UnsupportedCheckpoint(
            f"{path}: the tokenizer's decoder is neither byte-level BPE nor SentencePiece style;"
            " use a model with one of these tokenizers"
        )
    if max(vocabulary.values()) >= LARGEST_ID:
        raise CheckpointError(
            f"{path}: the tokenizer has a token id of {max(vocabulary.values())}, which cannot be; copy it again"
        )
    table = [b""] * (max(vocabulary.values()) + 1)
    to_bytes = _byte_level_bytes if byte_level else _sentencepiece_bytes
    for token, token_id in vocabulary.items():
        table[token_id] = to_bytes(token)
    added = tokenizer.get_added_tokens_decoder()
    special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
    strips = not byte_level and ('"Strip"' in decoder or '"Metaspace"' in decoder)
    return ChatTokenizer(tokenizer, template, specials, strips, special_ids, tuple(table))


def _gpt2_byte_characters() -> dict[int, str]:
    """GPT-2's printable stand-in for each byte (`bytes_to_unicode` in openai/gpt-2's encoder.py)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + at) for at, byte in enumerate(others)}


# Characters that stand for themselves nowhere get U+FFFF, so that encoding as Latin-1 notices them.
_STAND_INS = {byte: "\uffff" for byte in range(256)} | {
    ord(c): chr(b) for b, c in _gpt2_byte_characters().items()
}


def _byte_level_bytes(token: str) -> bytes:
    try:
        return token.translate(_STAND_INS).encode("latin-1")
    except UnicodeEncodeError:
        return token.encode("utf-8")


def _sentencepiece_bytes(token: str) -> bytes:
    byte = _BYTE_TOKEN.fullmatch(token)
    return bytes([int(byte[1], 16)]) if byte else token.replace(_METASPACE, " ").encode("utf-8")


def _gguf_tokenizer(gguf: GgufFile) -> Tokenizer:
    meta: dict[str, Any] = gguf.metadata
    kind, pre = meta.get("tokenizer.ggml.model"), meta.get("tokenizer.ggml.pre", "gpt-2")
    if kind != "gpt2" or pre not in ("smollm", "gpt-2"):
        raise UnsupportedCheckpoint(
            f"{gguf.path}: GGUF tokenizer {kind!r} with pre-tokenizer {pre!r} is not supported (gpt2 with"
            " smollm or gpt-2 is); give the model's Hugging Face folder instead"
        )
    try:
        tokens, merges = meta["tokenizer.ggml.tokens"], meta["tokenizer.ggml.merges"]
        types = meta["tokenizer.ggml.token_type"]
        vocabulary = {token: token_id for token_id, token in enumerate(tokens)}
        pairs = [tuple(merge.split(" ", 1)) for merge in merges]
        tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=pairs, fuse_unk=False, byte_fallback=False))
        marked = [
            AddedToken(token, special=kind == _GGUF_CONTROL_TOKEN, normalized=False)
            for token, kind in zip(tokens, types, strict=True)
            if kind in (_GGUF_CONTROL_TOKEN, _GGUF_USER_TOKEN)
        ]
    except Exception as error:  # the library reports bad tables as plain Exception
        raise CheckpointError(
            f"{gguf.path}: tokenizer tables do not fit ({error}); fetch the file again"
        ) from None
    tokenizer.add_tokens(marked)
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    single_digits = pre_tokenizers.Digits(individual_digits=True)
    tokenizer.pre_tokenizer = (
        pre_tokenizers.Sequence([single_digits, byte_level]) if pre == "smollm" else byte_level
    )
    tokenizer.decoder = decoders.ByteLevel()
    bos = _gguf_specials(gguf).get("bos_token")
    if meta.get("tokenizer.ggml.add_bos_token") and bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, tokenizer.token_to_id(bos))]
        )
    return tokenizer


def _gguf_specials(gguf: GgufFile) -> dict[str, str]:
    tokens = gguf.metadata.get("tokenizer.ggml.tokens") or []
    specials = {}
    for ours, theirs in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        token_id = gguf.metadata.get(f"tokenizer.ggml.{theirs}_token_id")
        if isinstance(token_id, int) and 0 <= token_id < len(tokens):
            specials[f"{ours}_token"] = tokens[token_id]
    return specials


def _folder_tokenizer(folder: Path, config: Mapping[str, Any]) -> Tokenizer:
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise CheckpointError(
            f"{folder}: has no tokenizer.json; save the model's fast tokenizer into the folder"
        )
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except (
        BaseException
    ) as error:  # a parse failure is a plain Exception, a panic of the library is none at all
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise CheckpointError(f"{path}: cannot be read ({error}); copy the file again") from None
    listed = config.get("added_tokens_decoder")
    for token_id, spec in sorted((listed or {}).items(), key=lambda item: int(item[0])):
        if tokenizer.token_to_id(spec["content"]) is not None:
            continue
        names = ("special", "lstrip", "rstrip", "normalized", "single_word")
        tokenizer.add_tokens(
            [AddedToken(spec["content"], **{each: spec[each] for each in names if each in spec})]
        )
        if tokenizer.token_to_id(spec["content"]) != int(token_id):
            raise CheckpointError(
                f"{folder}: tokenizer_config.json gives {spec['content']!r} the id {token_id}, tokenizer.json"
                " another; copy both files of the same model"
            )
    return tokenizer


def _folder_template(folder: Path, config: Mapping[str, Any]) -> str | None:
    path = folder / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    template = config.get("chat_template")
    if isinstance(template, list):
        template = {each.get("name"): each.get("template") for each in template}.get("default")
    return template if isinstance(template, str) else None


def _optional_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: is not valid JSON ({error}); copy the file again") from None
    return content if isinstance(content, dict) else {}


def _token_text(token: Any) -> str:
    """The text of a special token, written as a string or as an object with `content`."""
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else ""
