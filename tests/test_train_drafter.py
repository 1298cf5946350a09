"""Drafter training: what a block may see, agreement with inference, the loss, generation, data filters, resuming."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from runtime.drafter import Drafter, load_drafter, read_drafter_config
from runtime.train_blocks import BatchMaker, BlockTrainer, distilled_loss, plan_pass
from runtime.train_data import (
    PromptCollector,
    Prompts,
    Sequences,
    TrainingDataError,
    build_sequences,
    cut_loop,
    excluded_prompts,
    load_sequences,
    read_prompt_file,
    response_jobs,
    save_arrays,
)
from runtime.train_drafter import DrafterTraining, TrainOptions, initial_drafter
from runtime.train_export import drafter_config, export_drafter, published_config, spread_taps
from runtime.train_generate import Generated, Job, generate, generate_slowly, prefill_groups
from runtime.train_kernels import Kernels, check_decode, check_distill, probe_kernels
from runtime.train_target import CompactTarget, TransformersTarget, transformers_model

CPU = torch.device("cpu")
NEVER = float("inf")
TARGET = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 6,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 10_000.0,
    "max_position_embeddings": 512,
    "vocab_size": 96,
    "tie_word_embeddings": True,
    "eos_token_id": 2,
    "bos_token_id": 1,
}
FAMILY = {
    "llama": TARGET,
    "qwen2": {**TARGET, "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"},
    "qwen3": {**TARGET, "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"},
}


def random_state(config: dict) -> dict[str, torch.Tensor]:
    import transformers

    torch.manual_seed(3)
    model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**config))
    state = {name: value.clone() for name, value in model.state_dict().items() if name != "lm_head.weight"}
    for name, value in state.items():
        if value.dim() > 1:
            value.normal_(std=0.4 if "embed" in name else 0.15)
        else:
            value.add_(0.1 * torch.randn_like(value))
    return state


@pytest.fixture(scope="module")
def state() -> dict[str, torch.Tensor]:
    return random_state(TARGET)


@pytest.fixture(scope="module")
def target(state: dict[str, torch.Tensor]) -> CompactTarget:
    return CompactTarget(TARGET, state, torch.float32, CPU)


def make_data(target: CompactTarget, texts: int = 40) -> Sequences:
    draw = np.random.default_rng(0)
    prompts = [draw.integers(3, 96, size=int(n)).astype(np.int32) for n in draw.integers(4, 30, size=texts)]
    offsets = np.concatenate(([0], np.cumsum([len(p) for p in prompts])))
    kinds = (np.arange(texts) % 2).astype(np.int32)
    stored = Prompts(np.concatenate(prompts), offsets, kinds, ("self:chat", "tiny"))
    jobs = [Job(stored[i], float(i % 2), 40, i * 2 + (i % 2 == 0)) for i in range(texts)]
    found = generate(target, jobs, rows=8, length=96, max_new=40, stop_ids=(2,), deadline=NEVER, seed=0)
    return build_sequences(stored, found, 0)


@pytest.fixture(scope="module")
def data(target: CompactTarget) -> Sequences:
    return make_data(target)


def tiny_drafter(state: dict[str, torch.Tensor], seed: int = 0) -> Drafter:
    config = drafter_config(TARGET, 2, (1, 3), 4, 95)
    drafter = initial_drafter(config, state, 6, seed)
    with torch.no_grad():
        for name, weight in drafter.named_parameters():
            if weight.dim() > 1:
                weight.mul_(1 if "mlp" in name or "o_proj" in name else 10)
    return drafter


@pytest.mark.parametrize("family", sorted(FAMILY))
def test_compact_target_equals_transformers(family: str) -> None:
    config = FAMILY[family]
    weights = random_state(config)
    ids = torch.randint(3, 96, (3, 33))
    compact, final = CompactTarget(config, weights, torch.float32, CPU).features(ids, (0, 4))
    plain, reference = TransformersTarget(config, weights, torch.float32, CPU).features(ids, (0, 4))
    torch.testing.assert_close(compact, plain, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(final, reference, atol=1e-4, rtol=1e-4)


def test_generation_equals_transformers_greedy(target: CompactTarget, state: dict[str, torch.Tensor]) -> None:
    """Ragged prompts, fewer rows than jobs (so rows are replaced), stops and limits."""
    model = transformers_model(TARGET, state, torch.float32, CPU)
    draw = np.random.default_rng(1)
    jobs = [Job(draw.integers(3, 96, size=n).astype(np.int32), 0.0, 24, n) for n in (1, 2, 5, 9, 17, 30, 40)]
    jobs.append(Job(jobs[2].prompt, 0.0, 3, 99))
    found = {each.job.key: each for each in generate(
        target, jobs, rows=3, length=80, max_new=24, stop_ids=(2, 7), deadline=NEVER, seed=0
    )}  # fmt: skip
    assert len(found) == len(jobs)
    for job in jobs:
        expected = model.generate(
            torch.from_numpy(job.prompt[None].astype(np.int64)),
            max_new_tokens=job.max_new, do_sample=False, eos_token_id=[2, 7], pad_token_id=0,
        )[0, len(job.prompt) :]  # fmt: skip
        assert found[job.key].tokens.tolist() == expected.tolist()


def test_sampling_has_the_targets_distribution(target: CompactTarget) -> None:
    prompt = np.arange(3, 9, dtype=np.int32)
    jobs = [Job(prompt, 0.7, 1, n) for n in range(4000)]
    found = generate(target, jobs, rows=500, length=64, max_new=1, stop_ids=(2,), deadline=NEVER, seed=5)
    seen = np.bincount([int(each.tokens[0]) for each in found], minlength=96) / 4000
    _, final = target.features(torch.from_numpy(prompt[None].astype(np.int64)), (0,))
    expected = ((final[0, -1] @ target.head.t()) / 0.7).softmax(-1).numpy()
    assert np.abs(seen - expected).sum() < 0.2


def test_a_batch_through_transformers_gives_each_job_what_it_gets_alone(state: dict) -> None:
    """Unequal prompts and limits, one of them ended by a stop token; what is sampled keeps within its limit."""
    slow = TransformersTarget(TARGET, state, torch.float32, CPU)
    draw = np.random.default_rng(2)
    jobs = [Job(draw.integers(3, 96, size=n).astype(np.int32), 0.0, 6 + n, n) for n in (2, 5, 9)]
    options = {"rows": 3, "deadline": NEVER}
    alone = [list(generate_slowly(slow, [job], stop_ids=(2,), **options))[0].tokens.tolist() for job in jobs]
    stop = alone[2][4]
    expected = [text[: text.index(stop) + 1] if stop in text else text for text in alone]
    found = list(generate_slowly(slow, jobs, stop_ids=(stop,), **options))
    assert [each.tokens.tolist() for each in found] == expected and len(expected[2]) <= 5
    sampled = [Job(job.prompt, 0.8, 3, job.key) for job in jobs]
    assert {len(each.tokens) for each in generate_slowly(slow, sampled, stop_ids=(2,), **options)} <= {
        1,
        2,
        3,
    }
    assert list(generate_slowly(slow, jobs, rows=3, stop_ids=(2,), deadline=0.0)) == []


def test_generation_ends_at_the_deadline_with_what_it_has(target: CompactTarget) -> None:
    jobs = [Job(np.arange(3, 9, dtype=np.int32), 1.0, 40, 0)]
    assert (
        list(generate(target, jobs, rows=1, length=64, max_new=40, stop_ids=(2,), deadline=0.0, seed=0)) == []
    )


def test_prefill_groups_cover_every_prompt_once() -> None:
    lengths = sorted([0, 0, 1, 31, 32, 33, 200, 2000])
    groups = prefill_groups(lengths)
    covered = [index for start, end, _ in groups for index in range(start, end)]
    assert covered == [index for index, length in enumerate(lengths) if length]
    assert all(lengths[end - 1] <= width for _, end, width in groups)


def block_logits(
    target: CompactTarget, trainer: BlockTrainer, tokens: torch.Tensor, anchors: torch.Tensor
) -> torch.Tensor:
    features, _ = target.features(tokens, trainer.drafter.config.target_layer_ids)
    return trainer(features, target.embedding, tokens, anchors) @ target.head.t()


def test_a_block_sees_nothing_at_or_after_its_anchor_but_the_anchor(
    target: CompactTarget, state: dict
) -> None:
    trainer = BlockTrainer(tiny_drafter(state)).requires_grad_(False)
    tokens = torch.randint(3, 90, (1, 64))
    anchors = torch.tensor([[20, 22, 40, 21] * 8])
    before = block_logits(target, trainer, tokens, anchors)
    for place in (21, 22, 23, 24, 40, 63):
        changed = tokens.clone()
        changed[0, place] = 91
        after = block_logits(target, trainer, changed, anchors)
        assert torch.equal(after[0, 0], before[0, 0]), f"token {place} leaks into the block at 20"
    elsewhere = block_logits(target, trainer, tokens, torch.tensor([[20, 50, 51, 52] * 8]))
    torch.testing.assert_close(elsewhere[0, 0], before[0, 0], atol=1e-5, rtol=1e-5)
    for place in (19, 20):
        changed = tokens.clone()
        changed[0, place] = 91
        assert not torch.allclose(
            block_logits(target, trainer, changed, anchors)[0, 0], before[0, 0], atol=1e-4
        )


def test_training_forward_equals_inference(target: CompactTarget, state: dict) -> None:
    drafter = tiny_drafter(state).requires_grad_(False)
    tokens = torch.randint(3, 90, (2, 64))
    anchors = torch.stack([torch.arange(7, 39), torch.arange(20, 52)])
    found = block_logits(target, BlockTrainer(drafter), tokens, anchors)
    config = drafter.config
    for text, which in ((0, 0), (0, 31), (1, 16)):
        anchor = int(anchors[text, which])
        features, _ = target.features(tokens[text : text + 1, :anchor], config.target_layer_ids)
        context = drafter.context(features[0], torch.arange(anchor))

        def attend(
            layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, context=context
        ) -> torch.Tensor:
            keys, values = (torch.cat(pair, dim=-2) for pair in zip(context[layer], (k, v), strict=True))
            return F.scaled_dot_product_attention(q[None], keys[None], values[None], enable_gqa=True)[0]

        ids = torch.tensor([int(tokens[text, anchor])] + [config.mask_token_id] * (config.block_size - 1))
        positions = torch.arange(anchor, anchor + config.block_size)
        expected = drafter(target.embedding[ids], positions, attend)[1:] @ target.head.t()
        torch.testing.assert_close(found[text, which], expected, atol=1e-5, rtol=1e-4)


def test_batches_supervise_response_tokens_with_the_targets_logits(data: Sequences) -> None:
    maker = BatchMaker(data, 4, 4.0, CPU)
    for plan in plan_pass(data, np.arange(len(data)), 64, 0, 0):
        batch = maker.make(plan, 1)
        labels, rows = batch.labels.view(*batch.valid.shape), batch.source_rows.view(*batch.valid.shape)
        weights = batch.weights.view(*batch.valid.shape)
        assert torch.equal(weights > 0, batch.valid) and abs(float(weights.sum()) - 1) < 1e-5
        for text, anchor, depth in batch.valid.nonzero().tolist():
            at = int(batch.anchors[text, anchor])
            member = plan.members[text]
            own = data.tokens[data.offsets[member] : data.offsets[member + 1]]
            assert at >= data.prompt_lengths[member]
            assert int(labels[text, anchor, depth]) == int(own[at + depth + 1])
            assert int(batch.source[rows[text, anchor, depth]]) == text * plan.length + at + depth


def test_a_pass_visits_every_text_once_and_repeats_from_its_seed(data: Sequences) -> None:
    plans = plan_pass(data, np.arange(len(data)), 64, 7, 2)
    assert sorted(np.concatenate([plan.members for plan in plans]).tolist()) == list(range(len(data)))
    again = plan_pass(data, np.arange(len(data)), 64, 7, 2)
    assert all(np.array_equal(a.members, b.members) for a, b in zip(plans, again, strict=True))


def test_fused_loss_equals_the_plain_one_and_its_gradient(target: CompactTarget, data: Sequences) -> None:
    maker = BatchMaker(data, 4, 4.0, CPU)
    batch = maker.make(plan_pass(data, np.arange(len(data)), 64, 0, 0)[0], 1)
    hidden = torch.randn(len(batch.labels), 48)
    logits = 2 * torch.randn(len(batch.source), 96)
    one, two = hidden.clone().requires_grad_(), hidden.clone().requires_grad_()
    loss, ce, kl = distilled_loss(one, target.head, logits, batch, 0.3, Kernels(), chunk=50)
    loss.backward()
    log_draft = (two @ target.head.t()).log_softmax(-1)
    log_target = logits.log_softmax(-1)[batch.source_rows]
    plain_ce = F.nll_loss(log_draft, batch.labels, reduction="none")
    plain_kl = F.kl_div(log_draft, log_target, log_target=True, reduction="none").sum(-1)
    plain = (batch.weights * (0.3 * plain_ce + 0.7 * plain_kl)).sum()
    plain.backward()
    torch.testing.assert_close(loss, plain, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(ce, (batch.weights * plain_ce).sum(), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(kl, (batch.weights * plain_kl).sum(), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(one.grad, two.grad, atol=1e-7, rtol=1e-4)


def training(folder: Path, data: Sequences, target: CompactTarget, state: dict, **options) -> DrafterTraining:
    folder.mkdir(exist_ok=True)
    drafter = initial_drafter(drafter_config(TARGET, 2, (1, 3), 4, 95), state, 6, 0)
    chosen = TrainOptions(**{"minutes": 100.0, "blocks": 64, "warmup": 0.0, "report_seconds": 1e9, **options})
    return DrafterTraining(folder, data, target, drafter, chosen, CPU, say=lambda _: None)


def test_loss_falls_and_the_report_is_complete(
    tmp_path: Path, data: Sequences, target: CompactTarget, state: dict
) -> None:
    run = training(tmp_path, data, target, state, max_steps=60, learning_rate=3e-3)
    batch = BatchMaker(data, 4, 4.0, CPU).make(run._plans()[0], 5)
    before = float(run.loss(batch)[0].detach())
    report = run.run()
    assert float(run.loss(batch)[0].detach()) < 0.8 * before
    assert json.loads((tmp_path / "report.json").read_text())["steps"] == report["steps"] == 60


def test_resuming_gives_the_state_of_an_unbroken_run(
    tmp_path: Path, data: Sequences, target: CompactTarget, state: dict
) -> None:
    options = {"learning_rate": 1e-3, "minutes": 1e9}
    whole = training(tmp_path / "whole", data, target, state, max_steps=14, **options)
    whole.run()
    training(tmp_path / "parts", data, target, state, max_steps=6, **options).run()
    resumed = training(tmp_path / "parts", data, target, state, max_steps=14, **options)
    assert resumed.step == 6
    resumed.run()
    assert (resumed.step, resumed.passes, resumed.at) == (whole.step, whole.passes, whole.at)
    for name, weight in whole.weights.items():
        torch.testing.assert_close(resumed.weights[name], weight, atol=1e-6, rtol=1e-5)
        torch.testing.assert_close(resumed.average[name], whole.average[name], atol=1e-6, rtol=1e-5)


def test_a_checkpoint_of_another_run_is_refused(
    tmp_path: Path, data: Sequences, target: CompactTarget, state: dict
) -> None:
    training(tmp_path, data, target, state, max_steps=1).run()
    with pytest.raises(ValueError, match="was made with seed 0, this run has 9"):
        training(tmp_path, data, target, state, max_steps=1, seed=9)


def test_export_loads_as_a_drafter(tmp_path: Path, state: dict) -> None:
    drafter = tiny_drafter(state)
    config = published_config(drafter.config, TARGET, {"target": "tiny", "measured": {}})
    written = export_drafter(tmp_path / "drafter", dict(drafter.named_parameters()), config)
    parsed = read_drafter_config(tmp_path / "drafter")
    assert parsed == drafter.config
    loaded = load_drafter(tmp_path / "drafter", parsed, torch.float32, CPU)
    for name, weight in drafter.named_parameters():
        torch.testing.assert_close(loaded.state_dict()[name], weight.detach().bfloat16().float())
    assert written == sum(file.stat().st_size for file in (tmp_path / "drafter").iterdir())


def test_taps_are_spread_like_the_published_ones() -> None:
    assert spread_taps(30, 4) == (1, 10, 18, 27)
    assert spread_taps(30, 5) == (1, 8, 14, 20, 27)
    assert all(0 <= tap < depth for depth in range(1, 9) for tap in spread_taps(depth, 5))


def test_a_looping_response_is_cut_after_the_fourth_repetition() -> None:
    head = np.arange(100, 120, dtype=np.int32)
    loop = np.array([5, 6, 7, 8, 9], dtype=np.int32)
    assert cut_loop(np.concatenate((head, np.tile(loop, 20)))).tolist() == [
        *head,
        *np.tile(loop, 3),
        5,
        6,
        7,
        8,
    ]
    quiet = np.concatenate((head, np.tile(loop, 8)))
    assert cut_loop(quiet).tolist() == quiet.tolist()


def test_responses_are_filtered_and_held_out_by_prompt() -> None:
    prompts = Prompts(
        np.arange(400, dtype=np.int32), np.arange(0, 401, 4), np.zeros(100, dtype=np.int32), ("a",)
    )
    long, short = np.arange(30, dtype=np.int32), np.arange(15, dtype=np.int32)
    found = [
        Generated(Job(prompts[i], 0.0, 40, 2 * i), tokens, True)
        for i in range(100)
        for tokens in (long, long, short, long[::-1])
    ]
    data = build_sequences(prompts, found, 0)
    assert len(data) == 200 and set(data.lengths) == {34}
    by_prompt = data.held_out.reshape(100, 2)
    assert (by_prompt[:, 0] == by_prompt[:, 1]).all() and 0 < data.held_out.sum() < 20
    assert not build_sequences(prompts, found[:1], 0).held_out.any()  # something is left to train on


def chat_tokenizer():
    from runtime.tokenizer import ChatTokenizer

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(letters)}, merges=[]))
    inner.pre_tokenizer, inner.decoder = (
        pre_tokenizers.ByteLevel(add_prefix_space=False),
        decoders.ByteLevel(),
    )
    template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}<bot>"
    return ChatTokenizer(inner, template, {}, False, frozenset(), tuple(bytes([0]) for _ in letters))


def test_prompts_are_read_deduplicated_and_evaluation_prompts_refused(tmp_path: Path) -> None:
    lines = [
        {"question": "How many apples are left?"},
        {"instruction": "Sort", "input": "3 1 2"},
        {"messages": [{"role": "user", "content": "Hello there"}, {"role": "assistant", "content": "Hi"}]},
        {"prompt": "How many apples are left?"},
        {"turns": ["First turn", "second"]},
    ]
    given, secret = tmp_path / "given.jsonl", tmp_path / "secret.jsonl"
    given.write_text("\n".join(map(json.dumps, lines)))
    secret.write_text(json.dumps({"prompt": "FIRST  turn!"}))
    tokenizer = chat_tokenizer()
    collector = PromptCollector(tokenizer, excluded_prompts([secret]))
    for text, messages in read_prompt_file(given):
        collector.add(text, "given", messages)
    prompts = collector.finish()
    assert len(prompts) == 3 and collector.refused == 1
    whole = tokenizer.apply_chat_template([{"role": "user", "content": "Sort\n\n3 1 2"}])
    assert prompts[1].tolist() == whole
    given.write_text('{"other": 1}')
    with pytest.raises(TrainingDataError, match="line 1: has none of messages"):
        list(read_prompt_file(given))


def test_planned_responses_cover_every_prompt_before_repeating() -> None:
    prompts = Prompts(
        np.arange(40, dtype=np.int32), np.arange(0, 41, 4), np.arange(10) % 2, ("gsm", "self:chat")
    )
    jobs = response_jobs(prompts, 0, 20)
    first = [next(jobs) for _ in range(5 * 7 + 5)]
    assert {job.key // 2 for job in first} == set(range(10))
    assert sum(job.temperature == 0 for job in first if (job.key // 2) % 2 == 0) == 5


def test_stored_data_survives_and_a_missing_file_is_named(tmp_path: Path, data: Sequences) -> None:
    save_arrays(tmp_path / "responses.npz", data)
    again = load_sequences(tmp_path / "responses.npz")
    assert again.names == data.names and np.array_equal(again.tokens, data.tokens)
    with pytest.raises(TrainingDataError, match="run the stage before"):
        load_sequences(tmp_path / "nothing.npz")


def test_training_kernels_equal_plain_torch() -> None:
    """Both are probed before they are used; here through Triton's interpreter where there is no GPU."""
    pytest.importorskip("triton", reason="triton is not installed")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    assert check_decode(device, 16, torch.float32) < 1e-5
    assert check_distill(device) < 1e-5
    assert probe_kernels(CPU, 16, print) == Kernels()
