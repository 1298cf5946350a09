"""The target: a Hugging Face causal language model run over KV slots, with its tapped hidden states.

The model classes are transformers'; attention is ours, registered through `AttentionInterface`, so one forward serves
prefill and tree verification of a ragged batch. The step's data travels as a keyword argument and no mask function is
registered, so transformers builds no mask of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from runtime.attention import Step, attend_slots
from runtime.fused import FusedDecoder, fusable, head_dim_of
from runtime.greedy_head import GreedyHead
from runtime.kv_cache import Geometry
from runtime.linear import Linear, LinearFactory, PlainLinear, RoundedLinear, replace_linears
from runtime.models import Checkpoint, CheckpointError

ATTENTION_NAME = "ddtree_slots"


class Decoder(Protocol):
    """The layers of a target; embedding and head are beside them."""

    @property
    def embedding(self) -> Tensor: ...

    @property
    def head(self) -> Linear: ...

    def forward(self, token_ids: Tensor, positions: Tensor, step: Step) -> tuple[Tensor, Tensor | None]: ...


@dataclass(frozen=True)
class TargetOutput:
    """`hidden [rows, hidden_size]` after the final norm; `features [rows, taps * hidden_size]`, None without taps."""

    hidden: Tensor
    features: Tensor | None


def _slot_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    step: Step,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """transformers' attention signature over `attend_slots`; tensors `[1, heads, rows, head_dim]`."""
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    out = attend_slots(step, module.layer_idx, query[0], key[0], value[0], scale, sliding_window)  # type: ignore[arg-type]
    return out.transpose(0, 1).unsqueeze(0), None


class TargetModel:
    """Target weights on one device, run fused where `fusable` says so and by transformers' class elsewhere.

    `taps` are the layers whose outputs the drafter is fed with, in the drafter's order.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        *,
        taps: tuple[int, ...] = (),
        dtype: torch.dtype = torch.float32,
        device: torch.device | None = None,
        linear: LinearFactory = PlainLinear,
        draft_linear: LinearFactory | None = None,
        fuse: bool = True,
    ) -> None:
        """`draft_linear`: kind of a second head for the drafter's logits; None = it shares the target's."""
        self.device = device or torch.device("cpu")
        self.dtype = dtype
        architecture, self.config = hf_config(checkpoint)
        self.vocab_size = int(self.config.vocab_size)
        state = {name: value.to(self.device, dtype) for name, value in checkpoint.load_state().items()}
        if int(self.config.num_hidden_layers) > len(state):
            raise CheckpointError(
                f"{checkpoint.path}: config.json has {self.config.num_hidden_layers} layers, more than the "
                f"{len(state)} weights there; the folder is incomplete or of another model"
            )
        try:
            model = skeleton(architecture, self.config)
            rotary = type(model.model.rotary_emb)(config=self.config).to(self.device)
        except Exception as error:  # as in `hf_config`
            raise _no_such(checkpoint, architecture, error) from None
        _check_names(model, state, checkpoint, self.config)
        self._add_heads(state, linear, draft_linear)
        self.decoder: Decoder
        if fuse and fusable(architecture, self.config):
            self.decoder = FusedDecoder(state, self.config, rotation_of(rotary), linear, taps)
        else:
            model.load_state_dict(state, strict=False, assign=True)
            model.tie_weights()
            model.model.rotary_emb = rotary
            self.decoder = TransformersDecoder(model.eval().requires_grad_(False), linear, taps)

    def _add_heads(
        self, state: dict[str, Tensor], linear: LinearFactory, draft_linear: LinearFactory | None
    ) -> None:
        """The heads beside the exact one: for the drafter's logits, and for the likeliest token alone."""
        self._draft_head: Linear | None = None
        self._greedy_head: GreedyHead | None = None
        if draft_linear is None or draft_linear is linear:
            return
        embedding = state["model.embed_tokens.weight"]
        self._draft_head = draft_linear(state.get("lm_head.weight", embedding))
        if isinstance(self._draft_head, RoundedLinear) and "lm_head.weight" not in state:
            # A tied head's plain weight stays in memory as the embedding; another one would cost a copy.
            self._greedy_head = GreedyHead(embedding, self._draft_head)

    @property
    def fused(self) -> bool:
        return isinstance(self.decoder, FusedDecoder)

    @property
    def geometry(self) -> Geometry:
        """Shape of this model's KV slots."""
        config = self.config
        layers, kv_heads = int(config.num_hidden_layers), int(config.num_key_value_heads)
        return Geometry(layers, kv_heads, head_dim_of(config), self.dtype)

    def close(self) -> None:
        """Nothing of this model lives elsewhere."""

    def watch(self, on_lost: Callable[[str], object]) -> None:
        """`on_lost` is called, from any thread, when what holds the layers is gone; here that is this process."""

    def limit_vocabulary(self, size: int) -> None:
        """Keeps ids at or above the tokenizer's `size` (padding of the head) out of all logits."""
        self.vocab_size = min(self.vocab_size, size)

    def embed(self, token_ids: Tensor) -> Tensor:
        """Token embeddings `[..., hidden_size]`."""
        return F.embedding(token_ids, self.decoder.embedding)

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits `[..., vocab_size]` in float32, ids beyond the tokenizer left out."""
        return _float32_of(self.decoder.head, hidden)[..., : self.vocab_size]

    def likeliest(self, hidden: Tensor) -> Tensor:
        """Argmax of `logits`, token ids `[rows]`, of `hidden [rows, hidden_size]`."""
        if self._greedy_head is not None:
            chosen = self._greedy_head.likeliest(hidden, self.vocab_size)
            if chosen is not None:
                return chosen
        return self.logits(hidden).argmax(-1)

    def draft_logits(self, hidden: Tensor) -> Tensor:
        """Logits as `logits`, of a drafter's hidden states; may be rounded more coarsely."""
        return _float32_of(self._draft_head or self.decoder.head, hidden)[..., : self.vocab_size]

    def forward(self, token_ids: Tensor, positions: Tensor, step: Step) -> TargetOutput:
        """One pass over the rows `token_ids [rows]` at absolute `positions [rows]`."""
        return TargetOutput(*self.decoder.forward(token_ids, positions, step))


def _float32_of(head: Linear, hidden: Tensor) -> Tensor:
    """`head(hidden)` in float32: on a GPU as it was summed, as bfloat16 logits near 20 are 0.125 apart and tie."""
    if (
        hidden.is_cuda
        and hidden.dtype == torch.bfloat16
        and isinstance(head, PlainLinear)
        and head.bias is None
    ):
        rows = hidden.reshape(-1, hidden.shape[-1])
        product = torch.mm(rows, head.weight.t(), out_dtype=torch.float32)
        return product.view(*hidden.shape[:-1], -1)
    return head(hidden).float()


class TransformersDecoder:
    """transformers' own modules under our attention function; taps are read by forward hooks."""

    def __init__(self, model: Any, linear: LinearFactory, taps: tuple[int, ...]) -> None:
        self._model = model.model
        self._taps = taps
        self._tapped: dict[int, Tensor] = {}
        self.embedding: Tensor = model.model.embed_tokens.weight
        self.head = linear(model.lm_head.weight)
        for layer in set(taps):
            self._model.layers[layer].register_forward_hook(self._keep(layer))
        replace_linears(self._model, linear)

    def forward(self, token_ids: Tensor, positions: Tensor, step: Step) -> tuple[Tensor, Tensor | None]:
        """As `FusedDecoder.forward`."""
        self._tapped.clear()
        hidden = self._model(
            input_ids=token_ids.unsqueeze(0), position_ids=positions.unsqueeze(0), use_cache=False, step=step
        ).last_hidden_state[0]
        features = torch.cat([self._tapped[tap] for tap in self._taps], dim=-1) if self._taps else None
        return hidden, features

    def _keep(self, layer: int) -> Any:
        def keep(_module: nn.Module, _inputs: Any, output: Any) -> None:
            self._tapped[layer] = (output[0] if isinstance(output, tuple) else output)[0]

        return keep


class _Outline(Checkpoint):
    """A checkpoint whose weights are shapes alone."""

    def load_state(self, wanted: Callable[[str], bool] = lambda _name: True) -> dict[str, Tensor]:
        architecture, config = hf_config(self)
        state: dict[str, Tensor] = skeleton(architecture, config).state_dict()
        if config.tie_word_embeddings:
            state.pop("lm_head.weight", None)
        return {name: value for name, value in state.items() if wanted(name)}


def outline(checkpoint: Checkpoint) -> Checkpoint:
    """`checkpoint` with weights of its shapes and no numbers, for a model on torch's meta device; reads no weight."""
    return _Outline(checkpoint.name, checkpoint.path, checkpoint.config, checkpoint.eos_token_ids)


def hf_config(checkpoint: Checkpoint) -> tuple[str, Any]:
    """The architecture's class name and its transformers configuration, with our attention function."""
    from transformers import AttentionInterface, AutoConfig

    AttentionInterface.register(ATTENTION_NAME, _slot_attention)
    fields = dict(checkpoint.config)
    architecture = str(fields.pop("architectures")[0])
    for unused in ("torch_dtype", "dtype", "transformers_version", "auto_map"):
        fields.pop(unused, None)
    try:
        config = AutoConfig.for_model(**fields)
    except Exception as error:  # each field of each family is checked by a rule of its own
        raise _no_such(checkpoint, architecture, error) from None
    config._attn_implementation = ATTENTION_NAME
    return architecture, config


def _no_such(checkpoint: Checkpoint, architecture: str, error: Exception) -> CheckpointError:
    reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
    return CheckpointError(
        f"{checkpoint.path}: config.json describes no {architecture} ({reason}); copy it again"
    )


def rotation_of(rotary: Any) -> tuple[Tensor, float]:
    """Inverse frequencies `[head_dim / 2]` and the scaling of a transformers rotary embedding."""
    return rotary.inv_freq.float(), float(rotary.attention_scaling)


def skeleton(architecture: str, config: Any) -> Any:
    """The architecture's transformers class without memory."""
    import transformers

    with torch.device("meta"):
        return getattr(transformers, architecture)(config)


def _check_names(model: Any, state: dict[str, Tensor], checkpoint: Checkpoint, config: Any) -> None:
    """Raises CheckpointError unless the weights are exactly those the architecture needs, shapes included."""
    expected = {name: tuple(value.shape) for name, value in model.state_dict().items()}
    if config.tie_word_embeddings:
        expected.pop("lm_head.weight", None)
        state.pop("lm_head.weight", None)
    found = {name: tuple(value.shape) for name, value in state.items()}
    for name in sorted(expected.keys() | found.keys()):
        if expected.get(name) != found.get(name):
            raise CheckpointError(
                f"{checkpoint.path}: weight {name} is {found.get(name, 'missing')}, the architecture needs "
                f"{expected.get(name, 'none of that name')}; the folder is incomplete or of another model"
            )
