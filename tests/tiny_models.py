"""Tiny random targets and drafters as real folders, and a drafter constructed to be right often enough to test trees.

A random drafter is never accepted, so nothing behind acceptance would run. The constructed one returns the target's own
logits along the target's own continuation, computed by transformers without a KV cache, plus seeded noise.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import reference_sampler
import torch
from reference_sampler import Array, Rule
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor

from runtime import sequence as request_state
from runtime.config import RuntimeConfig
from runtime.drafter import Drafter, DrafterConfig
from runtime.engine import Engine
from runtime.interface import GenerateEvent, GenerateRequest, RequestFinished, SamplingParams, TokensEmitted
from runtime.kv_cache import Extent, Pool
from runtime.loader import Loaded, load
from runtime.round import Models, SequenceRound, decode_round, extend_drafter, prefill
from runtime.sampling import Sampling
from runtime.sequence import Speculation

CPU = torch.device("cpu")
END, OTHER_END, PAD, MASK = "<|end|>", "<|other_end|>", "<|pad|>", "<|mask|>"
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "mistral": "MistralForCausalLM",
}


def write_tokenizer(folder: Path, vocab_size: int) -> dict[str, int]:
    """A byte-level BPE tokenizer with `vocab_size` tokens, the last four special; returns the special ones' ids.

    Below 260 tokens only the first bytes have one, which is enough for prompts given as ids.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())[: vocab_size - 4]
    vocabulary = {char: token_id for token_id, char in enumerate(alphabet)}
    merges = []
    pairs = ("th", "he", "in", "er", "an", "re", "on", "at", "en", "nd", "ti", "es", "or", "te", "of", "ed", "is")
    for pair in pairs:
        if len(vocabulary) < vocab_size - 4:
            vocabulary[pair] = len(vocabulary)
            merges.append((pair[0], pair[1]))
    while len(vocabulary) < vocab_size - 4:
        vocabulary[f"unused{len(vocabulary)}"] = len(vocabulary)
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens([AddedToken(text, special=True, normalized=False) for text in (END, OTHER_END, PAD, MASK)])
    tokenizer.save(str(folder / "tokenizer.json"))
    content = {"chat_template": TEMPLATE, "eos_token": END, "pad_token": PAD}
    (folder / "tokenizer_config.json").write_text(json.dumps(content))
    return {text: vocab_size - 4 + i for i, text in enumerate((END, OTHER_END, PAD, MASK))}


def write_target(
    folder: Path,
    family: str = "llama",
    *,
    vocab_size: int = 288,
    head_rows: int | None = None,
    seed: int = 0,
    **config: Any,
) -> Path:
    """A random target whose logits have a standard deviation of about 3, as a Hugging Face folder.

    `head_rows` pads embedding and head beyond the tokenizer's `vocab_size`.
    """
    folder.mkdir(parents=True)
    special = write_tokenizer(folder, vocab_size)
    fields: dict[str, Any] = {
        "architectures": [ARCHITECTURES[family]],
        "model_type": family,
        "vocab_size": head_rows or vocab_size,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 10_000.0,
        "max_position_embeddings": 1024,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": special[END],
        "pad_token_id": special[PAD],
    } | config
    (folder / "config.json").write_text(json.dumps(fields))
    (folder / "generation_config.json").write_text(
        json.dumps({"eos_token_id": [special[END], special[OTHER_END]]})
    )
    save_file(_target_state(fields, seed), folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def _target_state(fields: Mapping[str, Any], seed: int) -> dict[str, Tensor]:
    model = _transformers_model(fields)
    generator = torch.Generator().manual_seed(seed)
    state: dict[str, Tensor] = {}
    for name, value in model.state_dict().items():
        drawn = torch.randn(value.shape, generator=generator)
        if "norm" in name:
            state[name] = 1 + 0.2 * drawn
        elif value.dim() == 1 or "embed" in name:
            state[name] = 0.5 * drawn
        else:
            state[name] = 1.5 * drawn * value.shape[1] ** -0.5
    model.load_state_dict(state)
    if fields["tie_word_embeddings"]:
        del state["lm_head.weight"]
        return state
    with torch.inference_mode():
        tokens = torch.randint(0, int(fields["vocab_size"]), (1, 256), generator=generator)
        spread = model(tokens).logits.std()
    state["lm_head.weight"] = state["lm_head.weight"] * (3.0 / float(spread))
    return state


def _transformers_model(fields: Mapping[str, Any]) -> Any:
    import transformers

    named = {key: value for key, value in fields.items() if key != "architectures"}
    config = transformers.AutoConfig.for_model(**named)
    config._attn_implementation = "eager"
    return getattr(transformers, fields["architectures"][0])(config).eval().requires_grad_(False)


def transformers_model(folder: Path) -> Any:
    """The target in `folder` as transformers' own class with its own attention, float32."""
    from safetensors.torch import load_file

    model = _transformers_model(json.loads((folder / "config.json").read_text()))
    model.load_state_dict(load_file(folder / "model.safetensors"), strict=False)
    model.tie_weights()
    return model


def write_drafter(
    folder: Path, target: Path, *, block_size: int = 8, taps: Sequence[int] = (0, 1), **config: Any
) -> Path:
    """A random drafter for the target in `target`, in the published DFlash format; None removes a config key."""
    folder.mkdir(parents=True)
    theirs = json.loads((target / "config.json").read_text())
    fields: dict[str, Any] = {
        "hidden_size": theirs["hidden_size"],
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10_000.0,
        "vocab_size": theirs["vocab_size"],
        "block_size": block_size,
        "num_target_layers": theirs["num_hidden_layers"],
        "dflash_config": {"target_layer_ids": list(taps), "mask_token_id": theirs["pad_token_id"] + 1},
    } | config
    fields = {key: value for key, value in fields.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(fields))
    dflash = {"target_layer_ids": [0], "mask_token_id": 0} | fields["dflash_config"]
    model = Drafter(DrafterConfig.from_dict(fields | {"dflash_config": dflash}, "shape"))
    generator = torch.Generator().manual_seed(7)
    state = {}
    for name, value in model.state_dict().items():
        drawn = torch.randn(value.shape, generator=generator)
        state[name] = 1 + 0.2 * drawn if value.dim() == 1 else drawn * value.shape[1] ** -0.5
    save_file(state, folder / "model.safetensors")
    return folder


def tiny_config(target: Path, drafter: Path | str = "none", **changes: Any) -> RuntimeConfig:
    """A configuration of one thread on the CPU in float32."""
    fields: dict[str, Any] = {
        "model": str(target),
        "drafter": str(drafter),
        "device": "cpu",
        "dtype": "float32",
        "threads": 1,
        "linear": "plain",
        "tree_budget": 8,
        "max_tokens": 24,
    }
    return RuntimeConfig(**(fields | changes))


@dataclass(frozen=True)
class Request:
    """One request of a test below the engine."""

    name: str
    prompt: tuple[int, ...]
    new_tokens: int = 24
    rule: Rule = Rule()
    logprobs: int | None = None
    chunk: int = 64


@dataclass(frozen=True)
class Script:
    """What the target says to one request: all token ids, and logits `[positions, vocab]` of each position's token.

    `drafts` are the logits with the tokens that the request's filters drop made unlikely.
    """

    prompt_len: int
    token_ids: tuple[int, ...]
    logits: Tensor
    drafts: Tensor

    @property
    def outputs(self) -> tuple[int, ...]:
        return self.token_ids[self.prompt_len :]


class Reference:
    """The target in transformers' classes, run over whole texts without a KV cache."""

    def __init__(self, folder: Path, vocab_size: int) -> None:
        self.model = transformers_model(folder)
        self.vocab_size = vocab_size

    @torch.inference_mode()
    def logits(self, texts: Sequence[Sequence[int]]) -> Tensor:
        """Logits `[texts, longest, vocab]` after each token; texts are padded at the end, where nothing looks."""
        longest = max(map(len, texts))
        padded = torch.tensor([[*text, *([0] * (longest - len(text)))] for text in texts])
        return self.model(padded, use_cache=False).logits[..., : self.vocab_size]

    def scripts(self, requests: Sequence[Request]) -> dict[str, Script]:
        """The continuation of each request, token by token, chosen by the second sampling implementation."""
        texts = [list(request.prompt) for request in requests]
        dropped: list[list[Array]] = [[] for _ in requests]
        for _ in range(max(request.new_tokens for request in requests)):
            logits = self.logits(texts)
            for row, (request, text) in enumerate(zip(requests, texts, strict=True)):
                prompt, outputs = text[: len(request.prompt)], text[len(request.prompt) :]
                table = logits[row, len(text) - 1].numpy()
                scores = reference_sampler.scores(table, request.rule, prompt, outputs)
                text.append(int(np.argmax(scores)))
                dropped[row].append(np.isneginf(scores))
        after = self.logits(texts)
        before = torch.cat((after.new_zeros(len(texts), 1, self.vocab_size), after), 1)
        scripts = {}
        for row, (request, text) in enumerate(zip(requests, texts, strict=True)):
            start, end = len(request.prompt), len(request.prompt) + request.new_tokens
            drafts = before[row, :end].clone()
            drafts[start:] -= 10.0 * torch.from_numpy(np.stack(dropped[row][: request.new_tokens]))
            scripts[request.name] = Script(start, tuple(text[:end]), before[row], drafts)
        return scripts


@dataclass(frozen=True)
class ConstructedDrafter:
    """`Models.propose`: the scripts' own logits plus noise of standard deviation `spread`, now and then noise alone."""

    scripts: Mapping[str, Script]
    spread: float = 1.2
    blind_share: float = 0.05

    def __call__(self, models: Models, batch: Sequence[request_state.Sequence]) -> Tensor:
        extend_drafter(models, batch)
        return torch.stack([self._draft(sequence, models.draft_horizon) for sequence in batch])

    def _draft(self, sequence: request_state.Sequence, horizon: int) -> Tensor:
        script, first = self.scripts[sequence.request_id], sequence.committed_len + 1
        generator = torch.Generator().manual_seed(zlib.crc32(repr((script.token_ids, first)).encode()))
        blind = float(torch.rand((), generator=generator)) < self.blind_share
        noise = torch.randn(horizon, script.drafts.shape[1], generator=generator)
        own = script.drafts[first : first + horizon]
        if blind:
            return 4.0 * noise
        drafted = self.spread * noise
        drafted[: len(own)] += own
        return drafted


@dataclass
class Decoded:
    """What one request got, and its rounds."""

    token_ids: tuple[int, ...] = ()
    finish: str | None = None
    rounds: list[SequenceRound] = field(default_factory=list)
    logprobs: list[Any] = field(default_factory=list)


def start(models: Models, request: Request) -> request_state.Sequence:
    """A sequence for `request` with slots of its own; nothing is prefilled."""
    rule = request.rule
    extent = models.cache.allocate(len(request.prompt) + request.new_tokens + 72)
    assert extent is not None
    return request_state.Sequence(
        request_id=request.name,
        token_ids=list(request.prompt),
        prompt_len=len(request.prompt),
        sampling=Sampling(
            temperature=rule.temperature,
            top_p=rule.top_p,
            top_k=rule.top_k,
            min_p=rule.min_p,
            seed=rule.seed,
            presence_penalty=rule.presence_penalty,
            frequency_penalty=rule.frequency_penalty,
            repetition_penalty=rule.repetition_penalty,
            logit_bias=tuple(sorted(rule.logit_bias.items())),
            min_tokens=rule.min_tokens,
            stop_token_ids=rule.stop_token_ids,
        ),
        max_new_tokens=request.new_tokens,
        extent=extent,
        logprobs=request.logprobs,
    )


def run_prefill(models: Models, sequence: request_state.Sequence, chunk: int = 64) -> Decoded:
    """Prefills `sequence`; its first token is in the result."""
    while True:
        first = prefill(models, sequence, chunk)
        if first is not None:
            token, finish = first
            return Decoded((token.token_id,), finish, logprobs=[token.logprob])


def decode(models: Models, requests: Sequence[Request], how: Sequence[Speculation]) -> list[Decoded]:
    """Decodes `requests` as one batch, which shrinks as they finish; all slots are given back."""
    sequences = [start(models, request) for request in requests]
    results = [run_prefill(models, seq, req.chunk) for seq, req in zip(sequences, requests, strict=True)]
    while active := [i for i, result in enumerate(results) if result.finish is None]:
        outcome = decode_round(models, [sequences[i] for i in active], [how[i] for i in active])
        for i, one in zip(active, outcome.sequences, strict=True):
            results[i].token_ids += tuple(token.token_id for token in one.tokens)
            results[i].logprobs += [token.logprob for token in one.tokens]
            results[i].finish = one.finish
            results[i].rounds.append(one)
    for sequence in sequences:
        models.cache.free(sequence.extent)
    models.cache.check_integrity([])
    return results


@dataclass
class Slots:
    """Starts sequences and gives their slots back at the end of the test."""

    models: Models
    taken: list[Extent] = field(default_factory=list)

    def begin(self, request: Request) -> request_state.Sequence:
        """A prefilled sequence."""
        sequence = start(self.models, request)
        self.taken.append(sequence.extent)
        run_prefill(self.models, sequence, request.chunk)
        return sequence

    def fresh(self, like: request_state.Sequence) -> request_state.Sequence:
        """A sequence with the committed text of `like`, prefilled at once, and the same root."""
        text = tuple(like.token_ids[: like.committed_len])
        sequence = self.begin(Request(like.request_id, text, 64, chunk=1024))
        sequence.token_ids[-1] = like.token_ids[-1]
        return sequence

    def assert_same_state(self, sequence: request_state.Sequence) -> None:
        """Target and drafter slots of `sequence` equal those of a fresh prefill of its text."""
        with torch.inference_mode():
            extend_drafter(self.models, [sequence])
        other = self.fresh(sequence)
        length = sequence.committed_len
        assert sequence.drafter_len == other.committed_len == other.drafter_len == length
        assert self.models.cache.drafter is not None
        for pool in (self.models.cache.target, self.models.cache.drafter):
            mine, theirs = contents(pool, sequence.extent, length), contents(pool, other.extent, length)
            torch.testing.assert_close(mine, theirs, atol=1e-4, rtol=1e-4)

    def close(self) -> None:
        """Gives all slots back."""
        for extent in self.taken:
            self.models.cache.free(extent)
        self.models.cache.check_integrity([])


def contents(pool: Pool, extent: Extent, length: int) -> Tensor:
    """Keys and values `[2, layers, kv_heads, length, head_dim]`."""
    here = slice(extent.start, extent.start + length)
    return torch.stack((pool.keys[:, :, here], pool.values[:, :, here]))


def with_draft(models: Models, drafter: ConstructedDrafter | None, block_size: int = 8) -> Models:
    """`models` with the constructed drafter in the place of its own."""
    return replace(models, propose=drafter, block_size=block_size)


def with_scripts(loaded: Loaded, drafter: ConstructedDrafter) -> Loaded:
    """`loaded` with the constructed drafter in the place of its own."""
    return replace(loaded, models=replace(loaded.models, propose=drafter))


@dataclass
class Tally:
    """Counts over tree rounds the shares that say whether a suite tests what it means to test."""

    rounds: int = 0
    tokens: int = 0
    sideways: int = 0
    empty: int = 0

    def add(self, rounds: Sequence[SequenceRound]) -> None:
        for one in rounds:
            if len(one.nodes) == 1:
                continue
            parents = [node[1] for node in one.nodes]
            self.rounds += 1
            self.tokens += len(one.tokens)
            self.empty += len(one.path) == 1
            self.sideways += any(parents.index(parents[node], 1) != node for node in one.path[1:])

    @property
    def accept_length(self) -> float:
        return self.tokens / self.rounds

    def __str__(self) -> str:
        return (
            f"{self.rounds} rounds, accept length {self.accept_length:.2f}, "
            f"sideways {self.sideways / self.rounds:.1%}, nothing {self.empty / self.rounds:.1%}"
        )


class Client:
    """Collects the events of one request."""

    def __init__(self) -> None:
        self.events: list[GenerateEvent] = []

    def __call__(self, event: GenerateEvent) -> None:
        self.events.append(event)

    @property
    def finished(self) -> RequestFinished:
        last = self.events[-1]
        assert isinstance(last, RequestFinished)
        return last

    @property
    def pieces(self) -> list[Any]:
        return [piece for event in self.events if isinstance(event, TokensEmitted) for piece in event.pieces]

    @property
    def streamed(self) -> str:
        return "".join(piece.text for piece in self.pieces) + self.finished.tail


def tiny_engine(config: RuntimeConfig, loaded: Loaded | None = None) -> Engine:
    """An engine over `loaded`, or over what `config` names."""
    return Engine(loaded or load(config), config, default_budget=8)


def ask(engine: Engine, request: GenerateRequest) -> Client:
    """Queues `request` and returns where its events go."""
    client = Client()
    engine.submit(request, client)
    return client


def run(engine: Engine) -> None:
    """Steps until nothing waits or runs."""
    while engine.busy:
        engine.step()


def answer(engine: Engine, prompt: Sequence[int] | str, **sampling: Any) -> RequestFinished:
    """The finished answer to one prompt."""
    given: dict[str, Any] = {"prompt": prompt} if isinstance(prompt, str) else {"prompt_token_ids": tuple(prompt)}
    client = ask(engine, GenerateRequest(**given, sampling=SamplingParams(**sampling)))
    run(engine)
    return client.finished

