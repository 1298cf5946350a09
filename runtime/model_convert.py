"""Writes a GGUF target as a Hugging Face folder that transformers, SGLang and the reference code load."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from runtime.gguf import CheckpointError, UnsupportedCheckpoint
from runtime.gguf_llama import hf_weights
from runtime.models import Checkpoint, open_checkpoint
from runtime.tokenizer import ChatTokenizer

Dtype = Literal["bfloat16", "float32"]

_FILES = frozenset(
    {
        "README.md",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "special_tokens_map.json",
        "tokenizer.json",
        "tokenizer_config.json",
    }
)


class ConvertError(CheckpointError):
    """The folder cannot be written, or is in use by something else."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


def convert(
    ref: str,
    out_dir: str | Path,
    dtype: Dtype = "bfloat16",
    progress: Callable[[int, int], None] | None = None,
    force: bool = False,
) -> Path:
    """Write the GGUF model `ref` as a Hugging Face folder and return its path.

    The folder appears complete or not at all: it is written beside `out_dir` and renamed.

    Args:
        ref: as for `open_checkpoint`.
        dtype: number format of the weights; bfloat16 halves the size and rounds the dequantised values.
        progress: called with (tensors done, tensors in all).
        force: replace what an earlier conversion wrote to `out_dir`.

    Raises:
        CheckpointError: `ref` cannot be opened, or is a folder already.
        ConvertError: `out_dir` is in use, or cannot be written.
    """
    checkpoint = open_checkpoint(ref, allow_fetch=True)
    if checkpoint.gguf is None:
        raise UnsupportedCheckpoint(
            f"{checkpoint.path}: is a Hugging Face folder already; give a .gguf model"
        )
    out = Path(out_dir).expanduser().absolute()
    if out.is_symlink() or (out.exists() and not out.is_dir()):
        raise ConvertError(f"{out}: is no folder; give another folder", 3)
    if out.is_dir() and any(out.iterdir()):
        _require_replaceable(out, force)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}-") as scratch:
            folder = Path(scratch) / "complete"
            folder.mkdir()
            _write_folder(checkpoint, folder, dtype, progress or (lambda done, total: None))
            if out.exists():
                os.replace(out, Path(scratch) / "replaced")
            os.replace(folder, out)
    except OSError as error:
        raise ConvertError(
            f"{out}: cannot be written ({error.strerror or error}); give another folder", 1
        ) from None
    return out


def _require_replaceable(out: Path, force: bool) -> None:
    """Refuse a folder in use without `force`, and with it one that holds anything a model folder does not."""
    if not force:
        raise ConvertError(f"{out}: is not empty; give another folder, or --force to replace it", 3)
    foreign = sorted(each.name for each in out.iterdir() if each.name not in _FILES or not each.is_file())
    if foreign:
        raise ConvertError(f"{out}: holds {foreign[0]!r}, which no conversion wrote; give another folder", 3)


def _write_folder(
    checkpoint: Checkpoint, folder: Path, dtype: Dtype, progress: Callable[[int, int], None]
) -> None:
    _write_json(folder / "config.json", {**checkpoint.config, "torch_dtype": dtype})
    _write_json(folder / "generation_config.json", checkpoint.generation_config)
    write_tokenizer(checkpoint, folder)
    _write_weights(checkpoint, folder / "model.safetensors", dtype, progress)
    (folder / "README.md").write_text(_model_card(checkpoint, dtype), encoding="utf-8")


def write_tokenizer(checkpoint: Checkpoint, folder: Path) -> None:
    """Write `checkpoint`'s tokenizer files, the chat template among them, into `folder`."""
    tokenizer = checkpoint.load_tokenizer()
    (folder / "tokenizer.json").write_text(tokenizer.to_json(), encoding="utf-8")
    _write_json(folder / "tokenizer_config.json", _tokenizer_config(tokenizer, checkpoint))
    _write_json(folder / "special_tokens_map.json", dict(tokenizer.special_tokens))


def _write_weights(
    checkpoint: Checkpoint, path: Path, dtype: Dtype, progress: Callable[[int, int], None]
) -> None:
    import torch
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    assert checkpoint.gguf is not None
    kind = torch.bfloat16 if dtype == "bfloat16" else torch.float32
    state = {}
    for name, array in hf_weights(checkpoint.gguf, checkpoint.config):
        state[name] = torch.from_numpy(array).to(kind)
        progress(len(state), len(checkpoint.gguf.tensors))
    try:
        save_file(state, path, metadata={"format": "pt", "source_sha256": checkpoint.digest()})
    except SafetensorError as error:
        raise OSError(str(error)) from None
    # The library writes with the permissions of a temporary file.
    path.chmod((path.parent / "config.json").stat().st_mode)


def _tokenizer_config(tokenizer: ChatTokenizer, checkpoint: Checkpoint) -> dict[str, Any]:
    added = tokenizer.tokenizer.get_added_tokens_decoder()
    entries = {
        str(token_id): {
            "content": token.content,
            "lstrip": token.lstrip,
            "normalized": token.normalized,
            "rstrip": token.rstrip,
            "single_word": token.single_word,
            "special": token.special,
        }
        for token_id, token in sorted(added.items())
    }
    named = set(tokenizer.special_tokens.values())
    others = [
        token.content for _, token in sorted(added.items()) if token.special and token.content not in named
    ]
    config: dict[str, Any] = {
        # A model-specific class would rebuild the pre-tokenizer instead of reading tokenizer.json.
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": checkpoint.config["max_position_embeddings"],
        "clean_up_tokenization_spaces": False,
        "added_tokens_decoder": entries,
        "additional_special_tokens": others,
        **tokenizer.special_tokens,
    }
    if tokenizer.chat_template is not None:
        config["chat_template"] = tokenizer.chat_template
    return config


def _model_card(checkpoint: Checkpoint, dtype: Dtype) -> str:
    assert checkpoint.gguf is not None
    licence = str(checkpoint.gguf.metadata.get("general.license", "unknown"))
    return (
        f"---\nlicense: {json.dumps(licence)}\n---\n\n# {checkpoint.name}\n\n"
        f"Dequantised to {dtype} from `{checkpoint.path.name}` (SHA-256 {checkpoint.digest()}).\n"
    )


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
