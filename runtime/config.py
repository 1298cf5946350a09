"""RuntimeConfig: every setting of a runtime, one name each, with where its value came from.

Precedence: command line > `DDTREE_*` variables > configuration file (TOML) > default. A configuration is frozen; a
change is a new value (`RuntimeConfig.changed`). Which fields act live and which need a rebuild stands in `EFFECTS`.
Whatever the source, "auto" means "chosen at start-up" for every field that may be None.
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Self, get_args, get_origin

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from layouts.user_files import user_home
from runtime.interface import ConfigRejected
from runtime.native_layouts import NATIVE_LAYOUTS
from runtime.rejection import allowed, kind_of, nearest, rejection

ENV_PREFIX = "DDTREE_"
DEFAULT_MODEL = "smollm2-135m-instruct"
OTHER_VARIABLES = frozenset(
    {
        "DDTREE_API_KEY",
        "DDTREE_CACHE_DIR",
        "DDTREE_CONFIG",
        "DDTREE_DEBUG",
        "DDTREE_MODEL_WHEEL",
        "DDTREE_OPERATOR_KEY",
        "DDTREE_READ_ONLY",
        "DDTREE_STORE",
    }
)
"""Variables of ours that are not settings of a runtime. Keys are among them, so that they never enter a config."""


def _one_line(text: str) -> str:
    """Refuse what a configuration file or a line of a log cannot carry."""
    if not text or any(
        ord(char) < 0x20 or ord(char) == 0x7F or 0xD800 <= ord(char) <= 0xDFFF for char in text
    ):
        raise PydanticCustomError(
            "explained", "must be text: not empty, valid UTF-8, without control characters"
        )
    return text


Text = Annotated[str, AfterValidator(_one_line)]


class RuntimeConfig(BaseModel):
    """All settings; `None` means "chosen at start-up" and the status says what was chosen."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True)

    engine: Literal["native", "sglang"] = "native"
    """native: in this process; sglang: SGLang in its own environment, for large targets on many GPUs."""
    model: Text = DEFAULT_MODEL
    """Name of an embedded model, a GGUF file or a Hugging Face folder."""
    drafter: Text | None = None
    """Folder in the published DFlash format; None = the one shipped for the model; "none" = no drafter."""
    layout: Text = "single"
    """Parallelism mode: single (one process), or two ranks: tp2, ep2, pp2, tp2ep2. Under sglang also degrees such as
    tp8 or tp8+ep8, or the name of a layout."""
    mode: Literal["off", "chain", "tree", "auto"] = "tree"
    """auto: off, chain or tree and its budget are chosen round by round, from costs and acceptance as measured."""
    tree_budget: int | None = Field(default=None, ge=0, le=1024)
    """Most draft nodes in a tree, root excluded; None = calibrated at start-up; 0 = plain decoding."""
    block_size: int | None = Field(default=None, ge=1)
    """Tokens in a draft block, root included; None = as trained; 1 = no speculation."""
    temperature: float = Field(default=0.0, ge=0.0, le=2.0)
    """Default for requests that set none."""
    top_p: float = Field(default=1.0, gt=0.0, le=1.0)
    top_k: int = Field(default=0, ge=0)
    """0 = no limit."""
    max_tokens: int = Field(default=512, ge=1)
    """Output tokens of a request that sets no limit."""
    max_concurrency: int = Field(default=4, ge=1, le=1024)
    """Requests decoded together."""
    max_tree_budget: int = Field(default=64, ge=0, le=1024)
    """Largest budget a live change may set; slots for it are reserved with each request."""
    max_queue: int = Field(default=256, ge=0)
    """Requests that may wait beside those that run; more are turned away at once."""
    rebuild_drain: float = Field(default=2.0, ge=0.0, le=86400.0)
    """Seconds running requests get to finish before the engine is rebuilt; the rest goes on in the new one."""
    rebuild_ahead: bool = True
    """On a CPU with memory for both, another layout is built while this one serves; else this one goes first."""
    queue_timeout: float = Field(default=30.0, gt=0.0, le=86400.0)
    """Seconds a request may wait for its turn before it is turned away."""
    max_seq_len: int | None = Field(default=None, ge=8)
    """Context limit in tokens, prompt and output; None = the smaller of the model's own limit and 4096."""
    kv_slots: int | None = Field(default=None, ge=64)
    """Token slots of the KV cache; None = full contexts for half of max_concurrency, two at least: most requests are
    far shorter, and one that finds no slots waits."""
    prefill_chunk: int = Field(default=256, ge=16)
    """Prompt tokens computed between two decode rounds."""
    prefix_reuse: bool = True
    draft_noise: bool = True
    """At temperature > 0, add the position-keyed noise to the drafter's scores too."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """auto: float32 on a CPU, bfloat16 on a GPU."""
    device: str = Field(
        default="auto", pattern=r"^(auto|cpu|cuda(:(0|[1-9]\d?))?)$", description="auto, cpu, cuda or cuda:N"
    )
    """auto: the first CUDA GPU if there is one, else the CPU."""
    attention_backend: Literal["auto", "sdpa"] = "auto"
    """auto: on a GPU whole rounds as CUDA graphs of our kernels, where the model allows; sdpa: torch's attention."""
    linear: Literal["auto", "prepacked", "plain"] = "auto"
    """CPU linear layers; auto: prepacked where a probe shows they work."""
    threads: int | None = Field(default=None, ge=1)
    """CPU threads; None = physical cores."""
    baseline_interval: float = Field(default=900.0, ge=0.0, le=604800.0)
    """Seconds until plain and chain decoding are measured anew in an idle moment; 0 = at start-up only."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    auto_snapshot: bool = True
    """Keep what runs as a snapshot of its own before a rebuild or a rollback replaces it."""
    sglang_python: str = ""
    """Python of SGLang's own virtual environment; empty = the one that `ddtree engine install sglang` makes."""

    @field_validator("*", mode="before")
    @classmethod
    def _read_word(cls, value: Any, info: ValidationInfo) -> Any:
        """ "auto" (for numbers also "none") is None where None is allowed; a truth value is no number."""
        kind, optional = kind_of(cls.model_fields[str(info.field_name)])
        if isinstance(value, bool) and kind is not bool:
            raise ValueError("a truth value")
        if isinstance(value, int) and abs(value) >= 1 << 63:
            raise ValueError("more than any file or machine holds")
        if optional and isinstance(value, str):
            words = ("auto",) if kind is str else ("auto", "none")
            return None if value.strip().lower() in words else value
        return value

    @model_validator(mode="after")
    def _budget_within_reserve(self) -> Self:
        if self.tree_budget is not None and self.tree_budget > self.max_tree_budget:
            raise PydanticCustomError(
                "explained",
                "must not exceed max_tree_budget = {reserve}; raise max_tree_budget too",
                {"field": "tree_budget", "value": self.tree_budget, "reserve": self.max_tree_budget},
            )
        return self

    @model_validator(mode="after")
    def _layout_of_engine(self) -> Self:
        if self.engine == "native" and self.layout not in NATIVE_LAYOUTS:
            raise PydanticCustomError(
                "explained",
                "must be one of {names}",
                {"field": "layout", "value": self.layout, "names": ", ".join(NATIVE_LAYOUTS)},
            )
        return self

    def changed(self, change: Mapping[str, Any]) -> RuntimeConfig:
        """This configuration with `change` applied; raises ConfigRejected naming the field."""
        return validate({**self.model_dump(), **change})


Effect = Literal["live", "rebuild"]
LIVE_FIELDS = frozenset(
    {
        "mode",
        "tree_budget",
        "temperature",
        "top_p",
        "top_k",
        "max_tokens",
        "max_concurrency",
        "max_queue",
        "queue_timeout",
        "rebuild_drain",
        "rebuild_ahead",
        "prefix_reuse",
        "draft_noise",
        "prefill_chunk",
        "baseline_interval",
        "log_level",
        "auto_snapshot",
    }
)
EFFECTS: dict[str, Effect] = {
    name: "live" if name in LIVE_FIELDS else "rebuild" for name in RuntimeConfig.model_fields
}


FIXED_UNDER_SGLANG = frozenset({"mode", "tree_budget", "max_concurrency", "prefix_reuse"})
"""Live fields that SGLang captures its graphs for, or reads once."""


def effect_of(name: str, config: RuntimeConfig) -> Effect:
    """What a change of field `name` to its value in `config` takes."""
    return "rebuild" if config.engine == "sglang" and name in FIXED_UNDER_SGLANG else EFFECTS[name]


def range_of(name: str) -> str:
    """What a field takes, in words, such as "a whole number from 0 to 1024, or auto"."""
    return (allowed(RuntimeConfig.model_fields[name], "auto") or "n/a").removeprefix("must be ")


def choices_of(name: str) -> tuple[str, ...]:
    """The values of a field that has few of them, as text; empty for numbers and free text.

    Of layouts those of the native engine.
    """
    if name == "layout":
        return NATIVE_LAYOUTS
    kind, optional = kind_of(RuntimeConfig.model_fields[name])
    if kind is bool:
        return ("true", "false")
    if get_origin(kind) is Literal:
        return (*map(str, get_args(kind)), *(("auto",) if optional else ()))
    return ()


class ResolvedConfig(BaseModel):
    """A configuration with, for each field, where its value came from."""

    model_config = ConfigDict(frozen=True)

    config: RuntimeConfig
    origins: dict[str, str]
    """Field to "default", "file PATH:key", "env DDTREE_X" or "command line"."""
    warnings: tuple[str, ...] = ()
    """Variables that look like settings and are none."""


@dataclass(frozen=True)
class _Setting:
    """One value as it was given: `origin` goes into the answer, `place` into an error message."""

    name: str
    value: Any
    origin: str = ""
    place: str = ""


def validate(values: Mapping[str, Any]) -> RuntimeConfig:
    """Return the configuration that `values` (field to value, or to its text) describe; absent fields take defaults.

    Raises:
        ConfigRejected: one line with the field, its value and what is allowed; a wrong name with the nearest one.
    """
    return _build([_Setting(name, value) for name, value in values.items()])


def resolve(
    cli: Mapping[str, Any], env: Mapping[str, str] = os.environ, file: Path | None = None
) -> ResolvedConfig:
    """Put command line, environment, file and defaults together.

    Args:
        cli: options given; None = not given.
        env: an empty variable counts as not set.
        file: from `--config`; None = `$DDTREE_CONFIG`, else `ddtree/config.toml` in the XDG configuration folder,
            which may be absent.

    Raises:
        ConfigRejected: as `validate`, with where the value stands; or the file cannot be read.
    """
    warnings: list[str] = []
    settings = {
        setting.name: setting
        for source in (_from_file(env, file), _from_env(env, warnings), _from_cli(cli))
        for setting in source
    }
    config = _build(list(settings.values()))
    origins = {
        name: settings[name].origin if name in settings else "default" for name in RuntimeConfig.model_fields
    }
    return ResolvedConfig(config=config, origins=origins, warnings=tuple(warnings))


def default_file(env: Mapping[str, str] = os.environ) -> Path:
    """Where the configuration file is looked for when none is named."""
    return user_home("config", env) / "config.toml"


def to_toml(config: RuntimeConfig) -> str:
    """Return the canonical text of a configuration: sorted keys, fields that are None left out."""
    import tomli_w

    return tomli_w.dumps(
        {name: value for name, value in sorted(config.model_dump().items()) if value is not None}
    )


def _build(settings: list[_Setting]) -> RuntimeConfig:
    places = {setting.name: setting.place for setting in settings}
    try:
        return RuntimeConfig(**{setting.name: setting.value for setting in settings})
    except ValidationError as error:
        refused = rejection(error, RuntimeConfig, none_word="auto")
        raise ConfigRejected(refused.line(places.get(refused.field or "", "")), refused.field) from None


def _from_file(env: Mapping[str, str], file: Path | None) -> Iterator[_Setting]:
    named = file or (Path(env["DDTREE_CONFIG"]) if env.get("DDTREE_CONFIG") else None)
    path = named or default_file(env)
    try:
        path = path.expanduser()
        text = path.read_text(encoding="utf-8")
        values = tomllib.loads(text)
    except FileNotFoundError:
        if named is None:
            return
        raise ConfigRejected(
            f"configuration file {path} does not exist; create it or name another one"
        ) from None
    except OSError as error:
        raise ConfigRejected(f"configuration file {path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ConfigRejected(
            f"configuration file {path} is not UTF-8 (byte {error.start}); save it as UTF-8"
        ) from None
    except RecursionError:
        raise ConfigRejected(
            f"configuration file {path} is not TOML: brackets are nested too deeply"
        ) from None
    except RuntimeError:
        raise ConfigRejected(
            f"configuration file {path} is of a user without a home folder here; name another one"
        ) from None
    except ValueError as error:  # also a number of thousands of digits, which tomllib hands to int()
        raise ConfigRejected(f"configuration file {path} is not TOML: {error}") from None
    for name, value in values.items():
        line = _line_of(name, text)
        yield _Setting(
            name, value, f"file {path}:{name}", f"file {path}, line {line}" if line else f"file {path}"
        )


def _from_env(env: Mapping[str, str], warnings: list[str]) -> Iterator[_Setting]:
    for variable in sorted(env):
        if not variable.startswith(ENV_PREFIX) or variable in OTHER_VARIABLES:
            continue
        name = variable.removeprefix(ENV_PREFIX).lower()
        if name not in RuntimeConfig.model_fields or variable != variable.upper():
            known = [*OTHER_VARIABLES, *(ENV_PREFIX + each.upper() for each in RuntimeConfig.model_fields)]
            warnings.append(f"{variable} is not a setting and is ignored{nearest(variable.upper(), known)}")
        elif env[variable]:
            yield _Setting(name, env[variable], f"env {variable}", f"env {variable}")


def _from_cli(cli: Mapping[str, Any]) -> Iterator[_Setting]:
    for name, value in cli.items():
        if value is not None:
            yield _Setting(name, value, "command line", "command line")


def _line_of(name: str, text: str) -> int | None:
    """Number of the line on which a top-level key or table stands, or None where it is written in another way."""
    key = rf"""["']?{re.escape(name)}["']?"""
    found = re.search(rf"^[ \t]*(?:{key}\s*[=.]|\[\[?\s*{key})", text, re.MULTILINE)
    return text.count("\n", 0, found.start()) + 1 if found else None
