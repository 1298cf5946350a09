"""RuntimeConfig: what is accepted, how a wrong value is explained, and where each value comes from."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.config import EFFECTS, RuntimeConfig, resolve, to_toml, validate
from runtime.interface import ConfigRejected

NO_ENV: dict[str, str] = {}

printable = st.text(st.characters(exclude_categories=("Cs", "Cc")), min_size=1)
configs = st.builds(
    RuntimeConfig,
    model=printable,
    drafter=st.none() | printable,
    mode=st.sampled_from(["off", "chain", "tree"]),
    tree_budget=st.none() | st.integers(0, 512),
    block_size=st.none() | st.integers(1, 64),
    temperature=st.floats(0.0, 2.0),
    top_p=st.floats(0.0, 1.0, exclude_min=True),
    top_k=st.integers(0, 10**6),
    max_tree_budget=st.integers(512, 1024),
    max_seq_len=st.none() | st.integers(8, 10**7),
    kv_slots=st.none() | st.integers(64, 10**9),
    prefix_reuse=st.booleans(),
    dtype=st.sampled_from(["auto", "float32", "bfloat16"]),
    device=st.sampled_from(["auto", "cpu", "cuda", "cuda:3"]),
    threads=st.none() | st.integers(1, 512),
)


@given(configs)
def test_a_configuration_survives_its_file(config: RuntimeConfig) -> None:
    text = to_toml(config)
    assert validate(tomllib.loads(text)) == config
    keys = [line.split(" = ")[0] for line in text.splitlines()]
    assert keys == sorted(keys)


@pytest.mark.parametrize(
    ("values", "line"),
    [
        ({"tree_budget": 5000}, "tree_budget = 5000: must be a whole number from 0 to 1024, or auto"),
        ({"tree_budget": "eight"}, "tree_budget = eight: must be a whole number from 0 to 1024, or auto"),
        ({"tree_budget": 2.5}, "tree_budget = 2.5: must be a whole number from 0 to 1024, or auto"),
        ({"tree_budget": True}, "tree_budget = True: must be a whole number from 0 to 1024, or auto"),
        ({"block_size": 0}, "block_size = 0: must be a whole number of at least 1, or auto"),
        ({"temperature": float("nan")}, "temperature = nan: must be a number from 0 to 2"),
        ({"temperature": -0.1}, "temperature = -0.1: must be a number from 0 to 2"),
        ({"top_p": 0}, "top_p = 0: must be a number above 0 and of at most 1"),
        ({"mode": "Tree"}, "mode = Tree: must be one of off, chain, tree, auto"),
        ({"prefix_reuse": "perhaps"}, "prefix_reuse = perhaps: must be true or false"),
        ({"device": "gpu"}, "device = gpu: must be auto, cpu, cuda or cuda:N"),
        ({"tree_bugdet": 8}, "tree_bugdet: no such setting; did you mean tree_budget?"),
        ({"max-tokens": 8}, "max-tokens: no such setting; did you mean max_tokens?"),
        ({"zzz": 8}, "zzz: no such setting"),
        (
            {"tree_budget": 65, "max_tree_budget": 64},
            "tree_budget = 65: must not exceed max_tree_budget = 64; raise max_tree_budget too",
        ),
    ],
)
def test_a_wrong_value_is_explained_in_one_line(values: dict[str, Any], line: str) -> None:
    with pytest.raises(ConfigRejected) as caught:
        validate(values)
    assert str(caught.value) == line
    assert caught.value.field == next(iter(values))


@pytest.mark.parametrize("text", ["", "a\nb", "a\x1b[31mb", "nul\0", "\ud800"])
def test_text_that_could_break_a_file_or_a_screen_is_refused(text: str) -> None:
    with pytest.raises(ConfigRejected) as caught:
        validate({"model": text})
    assert str(caught.value).startswith("model = ")
    assert str(caught.value).isprintable()


def test_auto_means_chosen_at_start_up_and_none_is_a_drafter_of_its_own() -> None:
    config = validate({"tree_budget": "auto", "threads": "none", "drafter": "auto", "device": "auto"})
    assert (config.tree_budget, config.threads, config.drafter, config.device) == (None, None, None, "auto")
    assert validate({"drafter": "none"}).drafter == "none"


def test_a_change_is_a_new_value_and_is_checked_against_the_rest() -> None:
    config = RuntimeConfig(max_tree_budget=16)
    assert config.changed({"tree_budget": "16"}).tree_budget == 16
    assert config.tree_budget is None
    with pytest.raises(ConfigRejected, match="max_tree_budget = 16"):
        config.changed({"tree_budget": 17})


def test_every_field_says_how_it_takes_effect() -> None:
    assert set(EFFECTS) == set(RuntimeConfig.model_fields)
    assert EFFECTS["mode"] == EFFECTS["tree_budget"] == EFFECTS["temperature"] == "live"
    assert EFFECTS["model"] == EFFECTS["drafter"] == EFFECTS["max_seq_len"] == "rebuild"


def test_command_line_over_variable_over_file_over_default(tmp_path: Path) -> None:
    file = tmp_path / "my.toml"
    file.write_text('mode = "chain"\ntree_budget = 4\ntemperature = 0.5\n')
    env = {"DDTREE_TREE_BUDGET": "8", "DDTREE_TEMPERATURE": "0.7", "DDTREE_TOP_K": ""}
    resolved = resolve({"temperature": "0.9", "top_p": None}, env, file)
    config, origins = resolved.config, resolved.origins
    assert (config.mode, config.tree_budget, config.temperature) == ("chain", 8, 0.9)
    assert origins["mode"] == f"file {file}:mode"
    assert origins["tree_budget"] == "env DDTREE_TREE_BUDGET"
    assert origins["temperature"] == "command line"
    assert origins["top_k"] == origins["top_p"] == "default"
    assert set(origins) == set(RuntimeConfig.model_fields)


def test_the_file_is_found_in_the_configuration_home_or_named_by_a_variable(tmp_path: Path) -> None:
    env = {"XDG_CONFIG_HOME": str(tmp_path)}
    assert resolve({}, env).config == RuntimeConfig()
    (tmp_path / "ddtree").mkdir()
    (tmp_path / "ddtree" / "config.toml").write_text("top_k = 5\n")
    assert resolve({}, env).config.top_k == 5
    other = tmp_path / "other.toml"
    other.write_text("top_k = 6\n")
    assert resolve({}, env | {"DDTREE_CONFIG": str(other)}).config.top_k == 6
    assert resolve({}, env | {"DDTREE_CONFIG": str(tmp_path / "absent")}, other).config.top_k == 6


@pytest.mark.parametrize(
    ("content", "parts"),
    [
        (b"mode = tree\n", ["is not TOML", "line 1"]),
        (b"top_k = 1\ntop_k = 2\n", ["is not TOML", "line 2"]),
        (b"top_k = 1\n  tree_budget = 5000\n", ["tree_budget = 5000", "line 2", "from 0 to 1024"]),
        (b'"tree-budget" = 8\n', ["tree-budget", "line 1", "did you mean tree_budget?"]),
        (b"[engine]\nname = 1\n", ["engine = ", "line 1", "must be one of native"]),
        (b"\n[[models]]\n", ["models", "line 2", "did you mean model?"]),
        (b"model = '\xff'\n", ["is not UTF-8", "byte 9"]),
        (b"top_k = " + b"[" * 5000, ["is not TOML", "nested too deeply"]),
        (b"top_k = " + b"9" * 5000, ["is not TOML", "digits"]),
        (b"tree_budget = 0x" + b"f" * 5000, ["tree_budget = a value too large to be shown", "line 1"]),
        (b"max_queue = 0x" + b"f" * 5000, ["max_queue = a value too large to be shown", "line 1"]),
    ],
)
def test_a_wrong_file_is_named_with_line_and_key(tmp_path: Path, content: bytes, parts: list[str]) -> None:
    file = tmp_path / "config.toml"
    file.write_bytes(content)
    with pytest.raises(ConfigRejected) as caught:
        resolve({}, NO_ENV, file)
    line = str(caught.value)
    assert "\n" not in line
    for part in [str(file), *parts]:
        assert part in line


def test_a_named_file_must_exist_and_be_a_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigRejected, match="does not exist"):
        resolve({}, NO_ENV, tmp_path / "absent.toml")
    with pytest.raises(ConfigRejected, match="cannot be read"):
        resolve({}, NO_ENV, tmp_path)


def test_a_wrong_variable_is_named_and_an_unknown_one_only_warned_about() -> None:
    with pytest.raises(ConfigRejected, match=r"top_p = x \(env DDTREE_TOP_P\): must be a number"):
        resolve({}, {"DDTREE_TOP_P": "x"})
    resolved = resolve({}, {"DDTREE_TREE_BUGDET": "8", "DDTREE_READ_ONLY": "1", "DDTREE_API_KEY": "secret"})
    assert resolved.warnings == (
        "DDTREE_TREE_BUGDET is not a setting and is ignored; did you mean DDTREE_TREE_BUDGET?",
    )
    assert "secret" not in to_toml(resolved.config) + repr(resolved)
