"""The decoders of target and drafter, fused, unfused and prepacked, against transformers' classes and plain modules."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from pathlib import Path

import pytest
import tiny_models
import torch
import torch.nn.functional as F
from constructed import ConstructedDrafter, Reference, Request
from reference_sampler import Rule
from round_driver import Slots, decode, with_draft
from tiny_models import CPU, prompt_of, tiny_config
from torch import Tensor

from runtime.attention import Segment, Step, causal_mask, full_mask
from runtime.drafter import load_drafter, read_drafter_config
from runtime.fused import FusedDrafter
from runtime.kv_cache import Geometry, Pool
from runtime.linear import PlainLinear, QuantizedLinear, RoundedLinear, choose_draft_linear, choose_linear
from runtime.loader import load
from runtime.models import open_checkpoint
from runtime.round import ancestor_mask, drafter_logits
from runtime.sequence import Speculation
from runtime.target import TargetModel

VOCAB = 288


@dataclass(frozen=True)
class Tree:
    """Nodes of a draft tree; `mask [nodes, nodes]`, `depths [nodes]`."""

    tokens: Seq[int]
    mask: Tensor
    depths: Tensor


@torch.inference_mode()
def run_target(target: TargetModel, text: Seq[int], tree: Tree | None = None) -> tuple[Tensor | None, Tensor]:
    """Features and logits of all rows of `text`, prefilled in two chunks, and then of the nodes of `tree`.

    Slots that nothing has written hold NaN.
    """
    pool = Pool(target.geometry, 256, CPU)
    pool.keys.fill_(torch.nan)
    pool.values.fill_(torch.nan)
    outputs = []

    def feed(tokens: Seq[int], prefix: int, mask: Tensor, positions: Tensor) -> None:
        segment = Segment(3, prefix, len(tokens), mask, positions)
        outputs.append(target.forward(torch.tensor(tokens), positions, Step.of(pool, (segment,))))

    for first, last in ((0, 7), (7, len(text))):
        feed(text[first:last], first, causal_mask(last - first, CPU), torch.arange(first, last))
    if tree is not None:
        feed(tree.tokens, len(text), tree.mask, len(text) + tree.depths)
    features = [output.features for output in outputs if output.features is not None]
    logits = torch.cat([target.logits(output.hidden) for output in outputs])
    return torch.cat(features) if features else None, logits


FAMILIES = {
    "llama": ("llama", {}),
    "llama tied": ("llama", {"tie_word_embeddings": True}),
    "llama biased": ("llama", {"attention_bias": True}),
    "llama3 rope": (
        "llama",
        {
            "rope_scaling": {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            }
        },
    ),
    "qwen2": ("qwen2", {}),
    "qwen2 sliding": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1, "num_hidden_layers": 3},
    ),
    "qwen3": ("qwen3", {}),
    "mistral sliding": ("mistral", {"sliding_window": 9}),
    "mistral": ("mistral", {"sliding_window": None}),
}


@pytest.mark.parametrize("name", FAMILIES)
def test_both_decoders_equal_transformers_in_prefill_and_in_a_tree(tmp_path: Path, name: str) -> None:
    family, config = FAMILIES[name]
    folder = tiny_models.write_target(tmp_path / "target", family, vocab_size=VOCAB, **config)
    text, tokens = prompt_of(25), prompt_of(6, 2)
    parents, depths = torch.tensor([[0, 0, 0, 1, 3, 2]]), torch.tensor([[0, 1, 1, 2, 3, 2]])
    tree = Tree(tokens, ancestor_mask(parents, int(depths.max()))[0], depths[0])
    reference = Reference(folder, VOCAB)
    paths = ([0], [0, 1], [0, 2], [0, 1, 3], [0, 1, 3, 4], [0, 2, 5])
    branches = [reference.logits([[*text, *(tokens[i] for i in path)]])[0, -1:] for path in paths]
    expected = torch.cat([reference.logits([text])[0], *branches])
    for fuse in (True, False):
        target = TargetModel(open_checkpoint(str(folder)), taps=(0, 2), fuse=fuse)
        assert target.fused == fuse
        torch.testing.assert_close(run_target(target, text, tree)[1], expected, atol=2e-4, rtol=1e-4)


@pytest.mark.case("A10")
def test_features_are_the_outputs_of_the_tapped_layers_in_the_given_order(
    tiny_folder: Path, tiny_reference: Reference
) -> None:
    text = prompt_of(20)
    with torch.inference_mode():
        states = tiny_reference.model(torch.tensor([text]), output_hidden_states=True).hidden_states
    expected = torch.cat((states[1 + 1][0], states[0 + 1][0]), -1)
    for fuse in (True, False):
        target = TargetModel(open_checkpoint(str(tiny_folder / "target")), taps=(1, 0), fuse=fuse)
        features, _ = run_target(target, text)
        torch.testing.assert_close(features, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("attention_bias", [False, True])
def test_the_fused_drafter_equals_the_plain_module(
    tiny_folder: Path, tmp_path: Path, attention_bias: bool
) -> None:
    """Context keys and values per layer, and a block that attends to all of the context and to itself."""
    where = tiny_models.write_drafter(
        tmp_path / "drafter", tiny_folder / "target", block_size=6, attention_bias=attention_bias
    )
    plain = load_drafter(where, read_drafter_config(where), torch.float32, CPU)
    fused = FusedDrafter(plain, PlainLinear)
    generator = torch.Generator().manual_seed(0)
    features, block = torch.randn(11, 64, generator=generator), torch.randn(6, 32, generator=generator)
    before, here = torch.arange(11), torch.arange(11, 17)
    pool = Pool(Geometry(2, 2, 8, torch.float32), 40, CPU)
    with torch.inference_mode():
        context = plain.context(features, before)
        for layer, (keys, values) in enumerate(fused.context(features, before)):
            pool.write(layer, 5, keys, values)
        step = Step.of(pool, [Segment(5, 11, 6, full_mask(6, CPU), here)])
        mine = fused.forward(block, here, step)

        def attend(layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
            seen_keys = torch.cat((context[layer][0], keys), -2).repeat_interleave(2, 0)
            seen_values = torch.cat((context[layer][1], values), -2).repeat_interleave(2, 0)
            return F.scaled_dot_product_attention(queries, seen_keys, seen_values)

        theirs = plain(block, here, attend)
    torch.testing.assert_close(mine, theirs, atol=1e-4, rtol=1e-4)


def test_prepacked_models_say_what_plain_ones_say(tiny_folder: Path, tiny_reference: Reference) -> None:
    factory, line = choose_linear("auto", torch.float32, CPU)
    if factory is PlainLinear:
        pytest.skip(line)
    packed = load(tiny_config(tiny_folder / "target", tiny_folder / "drafter", linear="auto"))
    plain = load(tiny_config(tiny_folder / "target", tiny_folder / "drafter", linear="plain"))
    request = Request("packed", prompt_of(20), 40, Rule(0.8, seed=4))
    scripts = tiny_reference.scripts([request])
    models = with_draft(packed.models, ConstructedDrafter(scripts))
    assert decode(models, [request], [Speculation("tree", 12)])[0].token_ids == scripts["packed"].outputs
    unfused = TargetModel(open_checkpoint(str(tiny_folder / "target")), linear=factory, fuse=False)
    torch.testing.assert_close(
        run_target(unfused, prompt_of(20))[1], tiny_reference.logits([prompt_of(20)])[0], atol=1e-4, rtol=1e-4
    )
    drafted = []
    for loaded in (packed, plain):
        slots = Slots(loaded.models)
        sequence = slots.begin(Request("drafted", prompt_of(20), 8))
        with torch.inference_mode():
            drafted.append(drafter_logits(loaded.models, [sequence]))
        slots.close()
    kind = choose_draft_linear(factory, torch.float32, CPU)[0]
    within = {RoundedLinear: 0.2, QuantizedLinear: 1.0}.get(kind, 1e-4)  # logits here span several units
    torch.testing.assert_close(drafted[0], drafted[1], atol=within, rtol=1e-4)
