"""Reading the files of layouts: those shipped with the package, and the user's own, which take their place."""

from __future__ import annotations

import difflib
import os
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from layouts.presets import Preset
from layouts.shapes import DrafterShape, Experts, Hardware, Latent, ModelShape
from layouts.user_files import user_home
from layouts.values import HOST, LayoutError, model_name

SHIPPED = Path(__file__).parent
KINDS: Mapping[str, type[Any]] = {"models": ModelShape, "hardware": Hardware, "presets": Preset}
MAX_BYTES = 1 << 20
"""A larger file is no preset."""

Item = TypeVar("Item", ModelShape, Hardware, Preset)


@dataclass(frozen=True)
class Origin:
    """Where an item was read."""

    path: Path
    shipped: bool
    overrides: bool = False
    """It took the place of a shipped one."""

    @property
    def words(self) -> str:
        if self.shipped:
            return "shipped"
        return f"user file {self.path}" + (", in place of the shipped one" if self.overrides else "")


@dataclass(frozen=True)
class Library:
    """Everything that can be planned with, by name."""

    models: Mapping[str, ModelShape] = field(default_factory=dict)
    hardware: Mapping[str, Hardware] = field(default_factory=dict)
    presets: Mapping[str, Preset] = field(default_factory=dict)
    origins: Mapping[tuple[str, str], Origin] = field(default_factory=dict)
    """By (kind, name)."""
    problems: tuple[str, ...] = ()
    """User files that were left out, one line each."""

    def preset(self, name: str) -> Preset:
        return _named(self.presets, name, "layout")

    def model(self, name: str) -> ModelShape:
        return _named(self.models, name, "model")

    def device(self, name: str) -> Hardware:
        return _named(self.hardware, name, "hardware")


def _named(items: Mapping[str, Item], name: str, what: str) -> Item:
    if name in items:
        return items[name]
    near = difflib.get_close_matches(name, list(items), n=1)
    known = f"known are {', '.join(sorted(items))}" if len(items) <= 8 else "'ddtree layouts list' names them"
    hint = f"did you mean {near[0]}?" if near else known
    raise LayoutError(f"{what} {name!r} is not known; {hint}")


def user_folder(env: Mapping[str, str] = os.environ) -> Path:
    """Where a user's own files stand: `ddtree/layouts` in the XDG configuration folder."""
    return user_home("config", env) / "layouts"


def load_library(user: Path | None = None, *, strict: bool = False) -> Library:
    """Read the shipped files, then those of `user` (None = `user_folder()`): `*.toml` there are presets.

    Its sub-folders `models` and `hardware` hold further dimensions and devices.

    Raises:
        LayoutError: a shipped file is wrong, or with `strict` a user's; otherwise such a file is left out and named
            in `problems`.
    """
    user = user_folder() if user is None else user
    items: dict[str, dict[str, Any]] = {kind: {} for kind in KINDS}
    origins: dict[tuple[str, str], Origin] = {}
    problems: list[str] = []
    folders = [(kind, SHIPPED / kind, True) for kind in KINDS]
    folders += [
        ("presets", user, False),
        ("models", user / "models", False),
        ("hardware", user / "hardware", False),
    ]
    for kind, folder, shipped in folders:
        for path in sorted(folder.glob("*.toml")):
            try:
                item: Any = read_file(path, KINDS[kind])
                earlier = origins.get((kind, item.name))
                if earlier is not None and earlier.shipped == shipped:
                    raise LayoutError(
                        f"{path}: name = {item.name!r} is taken by {earlier.path}; choose another one"
                    )
            except LayoutError as problem:
                if shipped or strict:
                    raise
                problems.append(str(problem))
                continue
            items[kind][item.name] = item
            origins[kind, item.name] = Origin(path, shipped, overrides=earlier is not None)
    library = Library(items["models"], items["hardware"], items["presets"], origins, tuple(problems))
    return _checked(library, strict)


def _checked(library: Library, strict: bool) -> Library:
    """`library` without presets that name a model or hardware it lacks."""
    presets = dict(library.presets)
    problems = list(library.problems)
    for preset in library.presets.values():
        origin = library.origins["presets", preset.name]
        wrong: tuple[str, str, Iterable[str]] | None = None
        if preset.model is not None and preset.model not in library.models:
            wrong = ("model", preset.model, library.models)
        elif preset.hardware != HOST and preset.hardware not in library.hardware:
            wrong = ("hardware", preset.hardware, [HOST, *library.hardware])
        if wrong is None:
            continue
        key, value, known = wrong
        line = f"{origin.path}: {key} = {value!r}: must be one of {', '.join(sorted(known))}"
        if origin.shipped or strict:
            raise LayoutError(line)
        problems.append(line)
        del presets[preset.name]
    return Library(library.models, library.hardware, presets, library.origins, tuple(problems))


def read_file(path: Path, kind: type[Item]) -> Item:
    """Read one file; raises LayoutError with file, key, value and what is allowed."""
    try:
        if path.stat().st_size > MAX_BYTES:
            raise LayoutError(f"{path}: more than {MAX_BYTES} bytes; that is no layout file")
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise LayoutError(f"{path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise LayoutError(f"{path}: not UTF-8 (byte {error.start}); save it as UTF-8") from None
    except RecursionError:
        raise LayoutError(f"{path}: not TOML: brackets are nested too deeply") from None
    except ValueError as error:  # also a number of thousands of digits, which tomllib hands to int()
        raise LayoutError(f"{path}: not TOML: {error}") from None
    return read_values(values, kind, str(path))


def read_values(values: Mapping[str, Any], kind: type[Item], place: str) -> Item:
    """Validate what a file holds; `place` names it in errors."""
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        raise LayoutError(f"{place}: {explained(error, kind)}") from None


def explained(error: ValidationError, kind: type[BaseModel]) -> str:
    """The first problem in one line: the key's path, its value, what is allowed."""
    problem = error.errors(include_url=False)[0]
    key = ".".join(str(part) for part in problem["loc"]) or "the file"
    value, message = problem["input"], str(problem["msg"]).removeprefix("Value error, ")
    if problem["type"] == "missing":
        return f"{key} is missing"
    if problem["type"] == "extra_forbidden":
        known = _fields_at(kind, problem["loc"][:-1])
        near = difflib.get_close_matches(str(problem["loc"][-1]), known, n=1)
        hint = f"did you mean {near[0]}?" if near else f"known are {', '.join(known)}"
        return f"{key}: no such key; {hint}"
    if isinstance(value, (dict, list, tuple)):
        return f"{key}: {message}"
    return f"{key} = {_shown(value)}: {message[:1].lower()}{message[1:]}"


def _fields_at(kind: type[BaseModel], path: Iterable[str | int]) -> list[str]:
    """Names of the keys allowed at `path` inside `kind`; empty where that is no table of ours."""
    current: type[BaseModel] | None = kind
    for part in path:
        if isinstance(part, int) or current is None:
            continue
        found = current.model_fields.get(part)
        current = None if found is None else _model_in(found.annotation)
    return sorted(current.model_fields) if current is not None else []


def _model_in(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    for part in getattr(annotation, "__args__", ()):
        found = _model_in(part)
        if found is not None:
            return found
    return None


def _shown(value: Any) -> str:
    try:
        text = repr(value)
    except ValueError:  # a number of thousands of digits
        return "a number too large to be shown"
    return text if len(text) <= 60 else text[:57] + "..."


def shape_from_config(
    name: str, config: Mapping[str, Any], drafter: Mapping[str, Any] | None = None
) -> ModelShape:
    """Dimensions from a Hugging Face `config.json` and, if given, a DFlash drafter's.

    Raises LayoutError naming the key that is missing or of the wrong kind.
    """
    text = config.get("text_config", config)
    hidden, heads = _int(text, "hidden_size", name), _int(text, "num_attention_heads", name)
    count = text.get("num_experts") or text.get("n_routed_experts") or text.get("num_local_experts")
    experts = None
    if count:
        width = text.get("moe_intermediate_size") or text.get("intermediate_size") or 0
        experts = Experts(
            count=count,
            per_token=text.get("num_experts_per_tok", 1),
            intermediate_size=width,
            shared=text.get("n_shared_experts") or 0,
            dense_layers=text.get("first_k_dense_replace") or 0,
        )
    latent = None
    if text.get("kv_lora_rank"):
        keys = Latent.model_fields
        latent = Latent(**{key: _int(text, key, name) for key in keys})
    values: dict[str, Any] = {
        "name": model_name(name),
        "title": name,
        "layers": _int(text, "num_hidden_layers", name),
        "hidden_size": hidden,
        "vocab_size": _int(text, "vocab_size", name),
        "heads": heads,
        "kv_heads": text.get("num_key_value_heads") or heads,
        "head_dim": text.get("head_dim") or hidden // heads,
        "intermediate_size": text.get("intermediate_size") or 0,
        "tied": bool(text.get("tie_word_embeddings", False)),
        "qk_norm": str(text.get("model_type", "")).startswith("qwen3"),
        "context": text.get("max_position_embeddings") or 4096,
        "latent": latent,
        "experts": experts,
    }
    if drafter is not None:
        values["drafter"] = drafter_from_config(name, drafter)
    return read_values(values, ModelShape, f"model {name}")


def drafter_from_config(name: str, config: Mapping[str, Any]) -> DrafterShape:
    """Dimensions of a DFlash drafter from its `config.json`; raises LayoutError naming what is missing."""
    dflash = config.get("dflash_config") or {}
    what = f"drafter of {name}"
    heads = _int(config, "num_attention_heads", what)
    try:
        return DrafterShape(
            layers=_int(config, "num_hidden_layers", what),
            heads=heads,
            kv_heads=config.get("num_key_value_heads") or heads,
            head_dim=config.get("head_dim") or _int(config, "hidden_size", what) // heads,
            intermediate_size=_int(config, "intermediate_size", what),
            taps=tuple(dflash.get("target_layer_ids") or ()),
            block_size=_int(config, "block_size", what),
            mask_token_id=_int(dflash, "mask_token_id", what),
        )
    except ValidationError as error:
        raise LayoutError(f"{what}: {explained(error, DrafterShape)}") from None


def _int(config: Mapping[str, Any], key: str, what: str) -> int:
    value = config.get(key)
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise LayoutError(f"{what}: {key} = {value!r} in its config.json: must be a whole number")
    return value
