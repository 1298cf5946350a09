"""Target checkpoints: opening the default model, a GGUF file or a Hugging Face folder, and loading its parts.

Opening reads only headers and JSON; torch is imported when weights are loaded, the tokenizer when asked for.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from runtime.gguf import CheckpointError, GgufFile, UnsupportedCheckpoint, read_gguf
from runtime.gguf_llama import hf_config, hf_generation_config, hf_weights

if TYPE_CHECKING:
    import torch

    from runtime.tokenizer import ChatTokenizer

__all__ = [
    "DEFAULT_MODEL",
    "SUPPORTED_ARCHITECTURES",
    "Checkpoint",
    "CheckpointError",
    "UnsupportedCheckpoint",
    "open_checkpoint",
    "shipped_drafter",
    "unrewindable_layers",
    "weights_backend",
]

DEFAULT_MODEL = "smollm2-135m-instruct"
MAPPED_FROM = 1 << 30
"""Bytes from which a safetensors file is mapped instead of read: the host then need not hold it twice. A map is not for
every file: one that is cut short under it ends the process, and safetensors 0.8 never frees two integers for each
tensor taken out of it."""
LARGEST = 1 << 24
"""No size in a config.json is larger."""
_SIZES = (
    "hidden_size",
    "intermediate_size",
    "moe_intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "num_experts",
    "head_dim",
    "vocab_size",
    "max_position_embeddings",
)
_EXPERT = re.compile(r"(.*\.mlp\.experts\.)(\d+)\.(?:gate|up|down)_proj\.weight$")

SUPPORTED_ARCHITECTURES = (
    "LlamaForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
    "Qwen3MoeForCausalLM",
    "MistralForCausalLM",
)

# Layer types whose only state is a key/value cache, which a rejected draft leaves by forgetting positions.
_REWINDABLE_LAYERS = frozenset(
    {
        "attention",
        "full_attention",
        "sliding_attention",
        "chunked_attention",
        "global_attention",
        "local_attention",
    }
)

# What keeps the state in architectures that do not list their layers one by one.
_STATEFUL_MODELS = {
    "bamba": "mamba2",
    "falcon_h1": "mamba2",
    "falcon_mamba": "mamba",
    "granitemoehybrid": "mamba2",
    "jamba": "mamba",
    "kimi_linear": "linear_attention",
    "lfm2": "conv",
    "lfm2_moe": "conv",
    "mamba": "mamba",
    "mamba2": "mamba2",
    "minimax": "linear_attention",
    "nemotron_h": "mamba2",
    "olmo_hybrid": "linear_attention",
    "plamo2": "mamba2",
    "qwen3_5": "linear_attention",
    "qwen3_5_moe": "linear_attention",
    "qwen3_next": "linear_attention",
    "recurrent_gemma": "recurrent",
    "rwkv": "rwkv",
    "xlstm": "xlstm",
    "zamba": "mamba",
    "zamba2": "mamba2",
}


@dataclass(frozen=True)
class Checkpoint:
    """An opened target: `config` is its `config.json`, `eos_token_ids` every id that ends a generation."""

    name: str
    path: Path
    config: dict[str, Any]
    eos_token_ids: tuple[int, ...]
    generation_config: dict[str, Any] = field(default_factory=dict)
    gguf: GgufFile | None = field(default=None, repr=False)

    def digest(self) -> str:
        """Return the SHA-256 (hex) of the GGUF file, or of the folder's safetensors files in order of name.

        The first call reads every byte of the weights; later ones return the kept value.
        """
        return self._digest

    @cached_property
    def _digest(self) -> str:
        digest = hashlib.sha256()
        for path in self.weight_files():
            with path.open("rb") as file:
                hashlib.file_digest(file, lambda: digest)
        return digest.hexdigest()

    def weight_files(self) -> list[Path]:
        """Return the files that hold the weights, in order of name; raises CheckpointError where one is missing."""
        return [self.path] if self.gguf else _weight_files(self.path)

    def load_state(self, wanted: Callable[[str], bool] = lambda _name: True) -> dict[str, torch.Tensor]:
        """Return the weights by Hugging Face parameter name, on the CPU, without a tied head.

        Those whose name is not `wanted` are left out and not read. Dtypes are those of the folder; a GGUF file is
        dequantised to float32.

        Raises:
            CheckpointError: no safetensors file, a damaged one, or a quantised folder.
        """
        import torch

        if self.gguf is not None:
            return {
                name: torch.from_numpy(array) for name, array in hf_weights(self.gguf, self.config, wanted)
            }
        quantised = self.config.get("quantization_config")
        if quantised:
            method = quantised.get("quant_method", "unknown") if isinstance(quantised, dict) else quantised
            raise UnsupportedCheckpoint(
                f"{self.path}: weights quantised with {method!r} are not supported by the native engine;"
                " give the unquantised model"
            )
        state = _load_safetensors(_weight_files(self.path), wanted)
        if self.config.get("tie_word_embeddings", False):
            state.pop("lm_head.weight", None)
        try:
            return merge_experts(state)
        except (KeyError, RuntimeError) as error:
            raise CheckpointError(
                f"{self.path}: the experts' weights are not complete ({error}); copy the folder again"
            ) from None

    def load_tokenizer(self) -> ChatTokenizer:
        """Return the checkpoint's tokenizer with its chat template.

        Raises:
            CheckpointError: no fast tokenizer in the folder, or one that cannot be read.
        """
        from runtime.tokenizer import ChatTokenizer

        if self.gguf is not None:
            return ChatTokenizer.from_gguf(self.gguf)
        return ChatTokenizer.from_folder(self.path)


def open_checkpoint(
    ref: str = DEFAULT_MODEL,
    *,
    allow_fetch: bool = False,
    progress: Callable[[int, int], None] | None = None,
    any_architecture: bool = False,
) -> Checkpoint:
    """Open the default model by name, a `.gguf` file of llama architecture, or a Hugging Face folder.

    Args:
        ref: `DEFAULT_MODEL`, or a path.
        allow_fetch: fetch the default model if it is not in the cache.
        progress: called with (bytes so far, bytes in all) while it is fetched.
        any_architecture: open a folder for another engine than the native one; of a multi-modal target the text part's
            fields stand beside the others.

    Raises:
        CheckpointError: nothing there, or something this runtime cannot run; one line with the remedy.
    """
    if ref == DEFAULT_MODEL:
        from runtime.model_fetch import cached_default, fetch_default

        path = cached_default()
        if path is None and not allow_fetch:
            raise CheckpointError(f"model {ref!r} is not in the cache; run: ddtree model fetch")
        return _open_gguf(path or fetch_default(progress), DEFAULT_MODEL)
    path = Path(ref)
    what = "does not exist"
    try:
        path = path.expanduser()
        if path.is_dir():
            return _open_folder(path, any_architecture)
        if path.suffix.lower() == ".gguf":
            return _open_gguf(path, path.stem)
        what = "is neither a .gguf file nor a folder" if path.exists() else what
    except OSError as error:
        what = f"cannot be read ({error.strerror})"
    except RuntimeError:
        what = "is of a user without a home folder here"
    raise CheckpointError(
        f"model {ref!r} {what}; give {DEFAULT_MODEL!r}, a .gguf file or a local Hugging Face folder"
    )


def unrewindable_layers(config: dict[str, Any]) -> tuple[str, ...]:
    """Return the layer types of `config` whose state cannot be taken back after a rejected draft, sorted.

    Empty for plain attention models. Looks at `layer_types`, `layers_block_type` and the text part of a
    multi-modal config; a layer type not known to be plain attention counts as unrewindable.
    """
    text = config.get("text_config")
    if isinstance(text, dict):
        config = text
    listed = config.get("layer_types") or config.get("layers_block_type")
    model_type = config.get("model_type")
    if isinstance(listed, list) and listed and model_type != "falcon_h1":
        return tuple(sorted({str(each) for each in listed} - _REWINDABLE_LAYERS))
    stateful = _STATEFUL_MODELS.get(str(model_type))
    return (stateful,) if stateful else ()


def shipped_drafter(name: str) -> Path | None:
    """Return the folder of the drafter that comes with this program for the target `name`, or None."""
    folder = Path(__file__).parent / "drafters" / name
    return folder if (folder / "config.json").is_file() else None


def merge_experts(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Stack the experts of each layer, which folders hold one by one, as the model's class holds them.

    `experts.gate_up_proj [experts, 2 * intermediate, hidden]`, `experts.down_proj [experts, hidden, intermediate]`.
    """
    import torch

    merged = {name: value for name, value in state.items() if not _EXPERT.match(name)}
    for layer in sorted({found[1] for found in map(_EXPERT.match, state) if found}):
        count = len({found[2] for found in map(_EXPERT.match, state) if found and found[1] == layer})

        def part(kind: str, expert: int, layer: str = layer) -> torch.Tensor:
            return state.pop(f"{layer}{expert}.{kind}_proj.weight")

        both = [torch.cat((part("gate", i), part("up", i))) for i in range(count)]
        merged[f"{layer}gate_up_proj"] = torch.stack(both)
        merged[f"{layer}down_proj"] = torch.stack([part("down", i) for i in range(count)])
    return merged


def _open_gguf(path: Path, name: str) -> Checkpoint:
    gguf = read_gguf(path)
    config, generation = hf_config(gguf), hf_generation_config(gguf)
    return Checkpoint(name, path, config, _eos_union(path, generation, config), generation, gguf)


def _open_folder(path: Path, any_architecture: bool = False) -> Checkpoint:
    path = path.resolve()
    config = _read_json(path / "config.json")
    architectures = config.get("architectures") or []
    if not isinstance(architectures, list):
        architectures = [architectures]
    supported = [each for each in architectures if each in SUPPORTED_ARCHITECTURES]
    if any_architecture:
        text = config.get("text_config")
        config = {**(text if isinstance(text, dict) else {}), **config}
        supported = architectures
    elif not supported:
        named = ", ".join(map(str, architectures)) or f"(none named, model_type {config.get('model_type')!r})"
        stateful = unrewindable_layers(config)
        because = f" (its {', '.join(stateful)} layers keep state that cannot be rewound)" if stateful else ""
        raise UnsupportedCheckpoint(
            f"{path}: architecture {named} is not supported{because};"
            f" supported are {', '.join(SUPPORTED_ARCHITECTURES)}"
        )
    _check_sizes(path, config)
    generation_path = path / "generation_config.json"
    generation = _read_json(generation_path) if generation_path.exists() else {}
    config |= {"architectures": supported}
    return Checkpoint(path.name, path, config, _eos_union(path, generation, config), generation)


def _check_sizes(path: Path, config: dict[str, Any]) -> None:
    """Refuse a size that cannot be, before anything is built by it."""
    for key in _SIZES:
        value = config.get(key)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= LARGEST:
            shown = repr(value)[:60] if not isinstance(value, int) else "out of range"
            raise CheckpointError(
                f"{path}: {key} in config.json is {shown}, a whole number from 1 to {LARGEST} is needed;"
                " copy the file again"
            )


def _eos_union(path: Path, *configs: dict[str, Any]) -> tuple[int, ...]:
    """Union of `eos_token_id` (an int, a list or absent) over `configs`, first mention first."""
    ids: dict[int, None] = {}
    for config in configs:
        value = config.get("eos_token_id")
        for each in value if isinstance(value, list) else [] if value is None else [value]:
            if isinstance(each, bool) or not isinstance(each, int) or each < 0:
                raise CheckpointError(
                    f"{path}: eos_token_id {value!r} is not a token id or a list of them; correct it"
                )
            ids[each] = None
    return tuple(ids)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(
            f"{path.parent}: has no {path.name}; give a complete Hugging Face model folder"
        ) from None
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror}); check its permissions") from None
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: is not valid JSON ({error}); copy the file again") from None
    if not isinstance(content, dict):
        raise CheckpointError(f"{path}: holds no JSON object; copy the file again")
    return content


def _weight_files(folder: Path) -> list[Path]:
    """Return the folder's safetensors files in order of name: those of its index, `model.safetensors`, or all."""
    index = folder / "model.safetensors.index.json"
    if index.exists():
        names = _read_json(index).get("weight_map")
        if not isinstance(names, dict) or not names:
            raise CheckpointError(f"{index}: has no weight_map; copy the file again")
        files = [folder / name for name in sorted(set(map(str, names.values())))]
        for file in files:
            if file.parent != folder or file.suffix != ".safetensors":
                raise CheckpointError(
                    f"{index}: names {file.name!r}, not a .safetensors file of this folder; copy it again"
                )
            if not file.is_file():
                raise CheckpointError(f"{folder}: shard {file.name} is missing; copy the folder again")
        return files
    single = folder / "model.safetensors"
    files = [single] if single.is_file() else sorted(folder.glob("*.safetensors"))
    if not files:
        pickled = any(True for pattern in ("*.bin", "*.pt", "*.pth") for _ in folder.glob(pattern))
        why = "only pickled weights, which are never loaded as they can run code" if pickled else "no weights"
        raise UnsupportedCheckpoint(f"{folder}: has {why}; convert the model to safetensors")
    return files


def weights_backend(file: Path) -> str:
    """Return how `safetensors` shall get at the file's bytes; raises OSError where it is not there."""
    return "mmap" if file.stat().st_size >= MAPPED_FROM else "pread"


def _load_safetensors(files: list[Path], wanted: Callable[[str], bool]) -> dict[str, torch.Tensor]:
    from safetensors import SafetensorError, safe_open

    state: dict[str, torch.Tensor] = {}
    for file in files:
        try:
            with safe_open(file, framework="pt", backend=weights_backend(file)) as opened:
                part = {name: opened.get_tensor(name) for name in opened.keys() if wanted(name)}  # noqa: SIM118
        except (SafetensorError, OSError, RuntimeError, TypeError, ValueError) as error:
            raise CheckpointError(
                f"{file}: is not a readable safetensors file ({error}); copy it again"
            ) from None
        repeated = state.keys() & part.keys()
        if repeated:
            raise CheckpointError(
                f"{file}: repeats {sorted(repeated)[0]!r} of another file; remove the stale one"
            )
        state |= part
    return state
