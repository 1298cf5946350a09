"""Presets and their files: what is shipped, what a user adds, what is refused and in which words, how it is started."""

from __future__ import annotations

import os
import shlex
from pathlib import Path

import pytest

from layouts.arguments import child_environment, launch, shell_line
from layouts.checks import label_of, refusals, split_words
from layouts.evidence import known_evidence
from layouts.host import Device, given_host, host_of, match, shape_of
from layouts.library import load_library, read_file, shape_from_config
from layouts.plan import Question, plan_all, plan_layout, ranked
from layouts.presets import Degrees, Preset
from layouts.values import LayoutError, LayoutRefused, model_name
from runtime.native_layouts import NATIVE_LAYOUTS
from runtime.native_layouts import label as native_label
from runtime.native_layouts import refusal as native_refusal

ROOT = Path(__file__).parent.parent
NOWHERE = Path("/nonexistent")
LIBRARY = load_library(NOWHERE)
SMOL, MOE, KIMI = (LIBRARY.model(n) for n in ("smollm2-135m-instruct", "qwen3-30b-a3b", "kimi-k2.6-int4"))

GOOD = """
name = "mine"
title = "My layout"
engine = "sglang"
degrees = { tp = 2 }
"""


# Shipped presets


def test_the_shipped_presets_cover_this_host_nvlink_and_pcie() -> None:
    names = set(LIBRARY.presets)
    assert {"single", "tp2", "ep2", "pp2", "tp2ep2"} <= names
    assert {f"sglang-tp{n}" for n in (1, 2, 4, 8)} <= names
    assert {f"kimi-{card}x8-tp8" for card in ("h200", "b200", "b300", "rtx6000")} <= names
    assert not LIBRARY.problems
    for preset in LIBRARY.presets.values():
        assert preset.sources and LIBRARY.origins["presets", preset.name].words == "shipped"


def test_the_records_of_the_pcie_table_carry_their_scope_and_source() -> None:
    figures = {
        (record.conditions.layout, record.conditions.mode, record.figure)
        for name, preset in LIBRARY.presets.items()
        if name.startswith("kimi-rtx6000x8")
        for record in preset.evidence
    }
    assert figures == {
        ("TP8", "off", "97.9 tok/s"),
        ("TP8", "off", "~1291 tok/s total, peak"),
        ("TP8+EP8", "off", "65-69 tok/s"),
        ("TP8+EP8", "off", "~1500 tok/s total, peak"),
        ("TP8+EP4", "off", "65-69 tok/s"),
        ("TP8+EP4", "off", "~1500 tok/s total, peak"),
        ("PP8", "off", "37 tok/s"),
        ("TP8", "chain", "3.5-4 tokens/round"),
        ("TP8", "chain", "86 tok/s"),
    }
    words = {record.scope.words for record in LIBRARY.preset("kimi-rtx6000x8-tp8").evidence}
    assert words == {"8 x RTX PRO 6000 Blackwell, PCIe, sglang, cuda 13.0"}
    drafter = KIMI.drafter
    assert drafter is not None
    assert (drafter.block_size, drafter.layers, drafter.mask_token_id) == (8, 6, 163838)
    assert drafter.taps == (1, 12, 24, 35, 47, 58)


@pytest.mark.parametrize("name", sorted(LIBRARY.presets))
def test_every_shipped_preset_can_be_planned_and_started(name: str) -> None:
    preset = LIBRARY.preset(name)
    host = given_host(LIBRARY, "h200" if preset.hardware == "host" else preset.hardware, 8)
    shape = MOE if "ep" in name else LIBRARY.model("qwen3-8b")
    plan = plan_layout(LIBRARY, host, Question(model=shape), known_evidence(LIBRARY, NOWHERE), preset)
    assert plan.possible, plan.refused
    assert plan.fit is not None and plan.fit.verdict == "fits" and plan.forecasts
    made = launch(preset, shape if preset.model is None else None, mode="off")
    assert (made.command is None) == (preset.engine == "native")


def test_evidence_of_pcie_is_no_advice_for_nvlink() -> None:
    known = known_evidence(LIBRARY, NOWHERE)
    host = given_host(LIBRARY, "b300", 8)
    for name in ("kimi-b300x8-tp8", "kimi-b300x8-tp8-ep8"):
        plan = plan_layout(LIBRARY, host, Question(), known, LIBRARY.preset(name))
        assert not plan.compared
        assert [record.figure for record in plan.findings] == [
            "counter-example to PCIe: TP8 wins, the advantage of expert parallelism is gone"
        ]
        assert {record.scope.interconnect for record in plan.elsewhere} == {"PCIe"}


# Files


def test_a_users_preset_takes_the_place_of_a_shipped_one_and_that_is_said(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text(GOOD)
    (tmp_path / "b.toml").write_text(GOOD.replace("mine", "tp2"))
    library = load_library(tmp_path)
    assert library.preset("mine").title == library.preset("tp2").title == "My layout"
    assert library.origins["presets", "mine"].words == f"user file {tmp_path / 'a.toml'}"
    assert library.origins["presets", "tp2"].words.endswith("b.toml, in place of the shipped one")


def test_a_users_own_model_and_hardware_are_found(tmp_path: Path) -> None:
    for kind, source in (("models", "qwen3-8b"), ("hardware", "h200")):
        (tmp_path / kind).mkdir()
        text = (ROOT / "layouts" / kind / f"{source}.toml").read_text()
        (tmp_path / kind / "own.toml").write_text(text.replace(f'"{source}"', '"own"'))
    (tmp_path / "own.toml").write_text(GOOD + 'model = "own"\nhardware = "own"\n')
    library = load_library(tmp_path, strict=True)
    plan = plan_layout(
        library,
        given_host(library, "own", 2),
        Question(),
        known_evidence(library, NOWHERE),
        library.preset("mine"),
    )
    assert plan.possible and plan.forecasts


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (("tp = 2", "tp = 0"), "degrees.tp = 0: input should be greater than or equal to 1"),
        (("tp = 2", "tpp = 2"), "degrees.tpp: no such key; did you mean tp?"),
        (('engine = "sglang"', 'engine = "vllm"'), "engine = 'vllm': input should be 'native' or 'sglang'"),
        (('title = "My layout"', ""), "title is missing"),
        (('"mine"', '"My Layout"'), "name = 'My Layout': "),
        (("degrees", "degreez"), "degreez: no such key; did you mean degrees?"),
        (("degrees = { tp = 2 }", "degrees = 3"), "degrees = 3: "),
        (('name = "mine"', "name ="), "not TOML"),
        (("degrees = {", 'model = "gpt-9"\ndegrees = {'), "model = 'gpt-9': must be one of kimi-k2.6-int4"),
        (("degrees = {", 'hardware = "abacus"\ndegrees = {'), "hardware = 'abacus': must be one of b200"),
        (
            ("degrees = {", '[[evidence]]\nunit = "tok/s"\nvalue = 0\n[evidence.x]\ny = {'),
            "evidence.0.",
        ),
    ],
)
def test_a_wrong_file_is_named_with_key_value_and_what_is_allowed(
    tmp_path: Path, change: tuple[str, str], words: str
) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(GOOD.replace(*change))
    with pytest.raises(LayoutError) as refused:
        load_library(tmp_path, strict=True)
    assert str(refused.value).startswith(f"{path}: {words}")
    assert "\n" not in str(refused.value) and refused.value.exit_code == 2
    library = load_library(tmp_path)
    assert "mine" not in library.presets and library.problems == (str(refused.value),)


def test_two_files_of_a_user_with_one_name_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text(GOOD)
    (tmp_path / "b.toml").write_text(GOOD)
    with pytest.raises(LayoutError, match=r"b\.toml: name = 'mine' is taken by .*a\.toml"):
        load_library(tmp_path, strict=True)


def test_a_file_that_is_no_text_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.toml"
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(LayoutError, match="not UTF-8"):
        read_file(path, Preset)
    with pytest.raises(LayoutError, match="cannot be read: No such file"):
        read_file(tmp_path / "absent.toml", Preset)
    path.write_bytes(b"#" * (2 << 20))
    with pytest.raises(LayoutError, match="no layout file"):
        read_file(path, Preset)


def test_a_wrong_name_gets_the_nearest_one() -> None:
    with pytest.raises(LayoutError, match="layout 'tp-2' is not known; did you mean tp2?"):
        LIBRARY.preset("tp-2")
    with pytest.raises(LayoutError, match="'ddtree layouts list' names them"):
        LIBRARY.preset("zzz")
    with pytest.raises(LayoutError, match="known are b200, b300, cpu, h200"):
        LIBRARY.device("zzz")


# Dimensions of models


def test_dimensions_come_from_a_folder(tiny_folder: Path) -> None:
    shape = shape_of(LIBRARY, str(tiny_folder / "target"), str(tiny_folder / "drafter"))
    assert (shape.name, shape.layers, shape.vocab_size) == ("target", 3, 288)
    assert shape.drafter is not None and shape.drafter.block_size == 8
    assert shape_of(LIBRARY, "smollm2-135m-instruct", "none").drafter is None


def test_what_is_no_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(LayoutError, match=r"config\.json: cannot be read"):
        shape_of(LIBRARY, str(tmp_path))
    with pytest.raises(LayoutError, match="ddtree model convert"):
        shape_of(LIBRARY, "/x/y.gguf")
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(LayoutError, match="not JSON"):
        shape_of(LIBRARY, str(tmp_path))
    with pytest.raises(LayoutError, match="hidden_size = None in its config.json"):
        shape_from_config("x", {})
    assert model_name("/models/My Model!/") == "my-model"


# Refusals


@pytest.mark.case("A28")
def test_a_dense_model_refuses_expert_parallelism_with_the_reason() -> None:
    for engine, degrees in (("native", Degrees(ep=2)), ("sglang", Degrees(tp=2, ep=2))):
        (reason,) = refusals(LIBRARY.model("llama-3.1-8b"), degrees, engine)
        assert reason == "ep = 2: Llama-3.1-8B is a dense model, it has no experts to spread"
    assert not refusals(MOE, Degrees(ep=2), "native")


@pytest.mark.case("A27")
def test_a_pipeline_with_speculation_is_refused_on_sglang_and_runs_natively() -> None:
    (reason,) = refusals(SMOL, Degrees(pp=2), "sglang", "tree")
    assert "SGLang refuses pipeline parallelism (pp = 2) with speculation" in reason
    assert not refusals(SMOL, Degrees(pp=2), "native", "tree")
    preset = LIBRARY.preset("sglang-pp2")
    with pytest.raises(LayoutRefused, match="SGLang refuses") as refused:
        launch(preset, None, mode="tree")
    assert refused.value.exit_code == 3
    off = launch(preset, None)
    assert "--pp-size 2" in str(off.command) and "speculative" not in str(off.command)
    assert any("speculation is off" in note for note in off.notes)


@pytest.mark.parametrize(
    ("degrees", "engine", "words"),
    [
        (Degrees(tp=2, pp=2), "native", "does not combine a pipeline"),
        (Degrees(tp=4), "native", "at most 2 ranks"),
        (Degrees(tp=2, ep=4), "sglang", "ep = 4 does not divide tp = 2"),
        (Degrees(pp=31), "sglang", "has only 30 layers"),
        (Degrees(tp=2), "sglang", "tp = 2 does not divide the 9 attention heads"),
        (Degrees(dp=2), "native", "no data parallelism"),
    ],
)
def test_degrees_that_cannot_run_are_refused_from_static_facts(
    degrees: Degrees, engine: str, words: str
) -> None:
    assert any(words in reason for reason in refusals(SMOL, degrees, engine))


@pytest.mark.parametrize("degrees", [Degrees(ep=2), Degrees(tp=2, ep=2), Degrees(tp=2, pp=2)])
def test_a_dense_model_is_never_advised_to_spread_experts(degrees: Degrees) -> None:
    reasons = refusals(SMOL, degrees, "native")
    assert reasons and not any("use ep2" in reason or "or ep2" in reason for reason in reasons)
    assert "use tp2 or ep2 or tp2ep2 or pp2" in refusals(MOE, Degrees(tp=2, pp=2), "native")[0]
    odd = MOE.model_copy(update={"heads": 9, "kv_heads": 3})
    assert refusals(odd, Degrees(tp=2, ep=2), "native")[0].endswith("use tp2 or ep2 or pp2")


def test_experts_that_do_not_divide_are_refused() -> None:
    assert "does not divide the 384 experts" in refusals(KIMI, Degrees(tp=5, ep=5), "sglang")[0]
    odd = KIMI.model_copy(update={"heads": 128, "kv_heads": 128})
    assert "whole groups of 32" in refusals(odd, Degrees(tp=128), "sglang")[0]
    assert (
        "can be neither split nor repeated"
        in refusals(MOE.model_copy(update={"heads": 24, "kv_heads": 4}), Degrees(tp=6), "sglang")[0]
    )


def test_too_few_devices_are_counted() -> None:
    assert refusals(None, Degrees(tp=8), "sglang", devices=1) == ("TP8 needs 8 GPUs, there are 1 GPU",)


def test_partial_tensor_parallelism_is_called_so() -> None:
    assert label_of(SMOL, Degrees(tp=2), "native") == "TP2 (MLP only)"
    assert split_words(SMOL, Degrees(tp=2), "native") == "59 % of the weights are split over ranks"
    assert label_of(MOE, Degrees(tp=2), "native") == "TP2"
    assert not refusals(SMOL, Degrees(tp=2), "native")


def test_a_model_too_large_is_refused_with_the_numbers() -> None:
    plan = plan_layout(
        LIBRARY,
        given_host(LIBRARY, "h200", 1),
        Question(model=KIMI),
        known_evidence(LIBRARY, NOWHERE),
        LIBRARY.preset("sglang-tp1"),
    )
    assert not plan.possible
    assert plan.refused[0].startswith("needs 5") and "GiB on a rank that has 139.0 GiB" in plan.refused[0]
    assert "not one sequence of this length fits" in plan.refused[0]


@pytest.mark.parametrize("layout", NATIVE_LAYOUTS)
@pytest.mark.parametrize(
    "dimensions",
    [
        {},
        {"num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 64},
        {"num_hidden_layers": 1},
        {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
        {"num_experts": 7, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
        {"num_attention_heads": 9, "num_key_value_heads": 3, "num_experts": 8, "moe_intermediate_size": 32},
        {"num_attention_heads": 9, "num_key_value_heads": 3, "num_experts": 8, "moe_intermediate_size": 33},
    ],
    ids=["dense", "odd heads", "one layer", "experts", "odd experts", "odd heads, experts", "odd widths"],
)
def test_a_native_preset_is_refused_where_the_engine_refuses_its_layout(
    layout: str, dimensions: dict[str, int]
) -> None:
    config = {
        "hidden_size": 64,
        "vocab_size": 288,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "intermediate_size": 96,
        **dimensions,
    }
    shape, preset = shape_from_config("tiny", config), LIBRARY.preset(layout)
    assert preset.field_value == layout
    refused = bool(native_refusal(layout, config, "tiny", None))
    assert bool(refusals(shape, preset.degrees, "native")) == refused
    if layout != "single" and not refused:
        assert label_of(shape, preset.degrees, "native") == native_label(layout, config)


# Hosts


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("NVIDIA H200", "h200"),
        ("NVIDIA H200 NVL", None),
        ("NVIDIA B300 SXM6 AC", "b300"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "rtx-pro-6000-blackwell"),
        ("NVIDIA GeForce RTX 4090", None),
    ],
)
def test_devices_are_known_by_what_they_call_themselves(name: str, found: str | None) -> None:
    hardware = match(LIBRARY, name)
    assert (hardware.name if hardware else None) == found


def test_this_hosts_layouts_come_first() -> None:
    known = known_evidence(LIBRARY, NOWHERE)
    cards = [Device(name="NVIDIA H200", memory=140 * 2**30)] * 8
    host = host_of(LIBRARY, cards)
    assert host.words == "8 x H200, NVLink" and host.hardware.memory_gib == 140
    plans = plan_all(LIBRARY, host, Question(model=KIMI), known)
    here = [plan.preset.name for plan in plans if plan.here]
    assert [plan.preset.name for plan in plans][: len(here)] == here
    assert {"kimi-h200x8-tp8", "sglang-tp8", "single"} <= set(here)
    assert "kimi-b200x8-tp8" not in here
    on_cpu = host_of(LIBRARY, [], cpu="A CPU", threads=2, memory=8 * 2**30)
    assert on_cpu.words == "A CPU, 2 threads, no GPU"
    plans = plan_all(LIBRARY, on_cpu, Question(model=SMOL), known)
    assert {plan.preset.name for plan in plans if plan.here} == {"single", "tp2", "ep2", "pp2", "tp2ep2"}


def test_an_unknown_device_predicts_nothing_but_is_checked_for_memory() -> None:
    host = host_of(LIBRARY, [Device(name="Strange GPU", memory=24 * 2**30), Device(name="Other")])
    assert not host.known and host.note == "planned for the 1 devices named Strange GPU alone"
    plan = plan_layout(
        LIBRARY, host, Question(model=SMOL), known_evidence(LIBRARY, NOWHERE), LIBRARY.preset("single")
    )
    assert plan.fit is not None and plan.fit.verdict == "fits" and not plan.forecasts
    assert plan.no_forecast == "Strange GPU: memory_gb_s, tflops not known"


def test_ranking_follows_the_chosen_load() -> None:
    known = known_evidence(LIBRARY, NOWHERE)
    chosen = [LIBRARY.preset(f"kimi-rtx6000x8-{d}") for d in ("tp8", "tp8-ep8", "pp8")]
    host = given_host(LIBRARY, "rtx-pro-6000-blackwell", 8)
    plans = plan_all(LIBRARY, host, Question(concurrency=(1, 256)), known, chosen)
    assert [plan.label for plan in plans] == ["TP8", "TP8+EP8", "PP8"]
    assert [plan.label for plan in ranked(plans, 256)] == ["TP8+EP8", "TP8", "PP8"]


# Starting


def test_sglangs_line_is_exact() -> None:
    made = launch(
        LIBRARY.preset("kimi-rtx6000x8-tp8-tree"), KIMI, model="/m/kimi k2", drafter="/m/d", port=30000
    )
    assert shell_line(made) == (
        'env CUDA_HOME=/usr/local/cuda-13.0 PATH=/usr/local/cuda-13.0/bin:"$PATH" '
        "python -m sglang.launch_server --model-path '/m/kimi k2' --tp-size 8 --port 30000 --trust-remote-code "
        "--attention-backend triton --grammar-backend none --sampling-backend pytorch "
        "--speculative-algorithm DDTREE_CONSOLE "
        "--speculative-draft-model-path /m/d --speculative-dflash-block-size 8 --speculative-num-draft-tokens 17"
    )
    chain = launch(LIBRARY.preset("kimi-rtx6000x8-tp8-chain"), KIMI)
    assert "--disable-cuda-graph" in str(chain.command)
    assert "--speculative-algorithm DFLASH" in str(chain.command)
    assert "--speculative-num-draft-tokens 8" in str(chain.command)
    assert any("set MODEL" in note for note in chain.notes)


def test_a_tree_narrower_than_the_block_is_refused() -> None:
    with pytest.raises(LayoutRefused, match="use tree_budget >= 7"):
        launch(LIBRARY.preset("kimi-rtx6000x8-tp8-tree"), KIMI, tree_budget=3)
    with pytest.raises(LayoutRefused, match="block_size"):
        launch(LIBRARY.preset("sglang-tp2"), None)


def test_paths_never_become_shell_words(tmp_path: Path) -> None:
    evil = "/m/a; rm -rf ~ $(x)"
    made = launch(LIBRARY.preset("llama-3.1-8b-h200-tp1"), None, model=evil)
    words = shlex.split(shell_line(made))
    assert words[words.index("--model-path") + 1] == evil


def test_native_settings_select_the_layout() -> None:
    made = launch(LIBRARY.preset("tp2"), SMOL, mode="tree", tree_budget=16)
    assert made.command is None
    assert made.settings == {"engine": "native", "layout": "tp2", "mode": "tree", "tree_budget": 16}


def test_variables_are_for_engine_processes_and_late_ones_need_a_new_process() -> None:
    before = dict(os.environ)
    preset = LIBRARY.preset("kimi-rtx6000x8-tp8")
    inherited = {"PATH": "/usr/bin", "CUDA_HOME": "/usr/local/cuda-12.4"}
    fresh = child_environment(preset, inherited, fresh=True)
    assert fresh.set == {"CUDA_HOME": "/usr/local/cuda-13.0", "PATH": "/usr/local/cuda-13.0/bin:/usr/bin"}
    assert not fresh.note
    here = child_environment(preset, inherited, fresh=False)
    assert here.note == "needs a new process: CUDA_HOME must be set before anything is imported"
    same = child_environment(preset, {**inherited, "CUDA_HOME": "/usr/local/cuda-13.0"}, fresh=False)
    assert not same.note
    assert dict(os.environ) == before and inherited["CUDA_HOME"] == "/usr/local/cuda-12.4"
