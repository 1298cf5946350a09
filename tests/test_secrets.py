"""Secrets are found by line, marked out, and put back from a live file only."""

from __future__ import annotations

import pytest

from snapshots.content import REDACTED
from snapshots.secrets import SecretMissing, fill, redact, redact_environment, scan

TOKEN = "hf_" + "Ab3" * 12


@pytest.mark.parametrize(
    "line",
    [
        f"log in with {TOKEN}",
        "HF_TOKEN=whatever-it-is",
        "Environment=DDTREE_API_KEY=correct-horse",
        'Environment="OPENAI_API_KEY=correct-horse"',
        "ExecStart=/usr/bin/serve --api-key correct-horse",
        "ExecStart=/usr/bin/serve --api-key=correct-horse --port 1",
        "the password is hunter22",
        "password: hunter22",
        'api_key = "abcd1234"',
        "curl -H 'Authorization: Bearer abcdefghijklmnop1234'",
        "https://me:pa55word@example.org/simple",
        "ghp_" + "a1" * 18,
        "AKIA" + "ABCD1234" * 2,
        "sk-proj-" + "a1B2" * 8,
        'export HF_TOKEN="whatever-it-is"',
        '"secret": "a b c d"',
        "ExecStart=/venv/bin/serve --hf-token correct-horse",
        "key: " + "aB3d" * 6,
    ],
)
def test_a_secret_is_found_on_its_line_and_marked_out(line: str) -> None:
    text = f"first line\n\n{line}\nlast"
    hits = scan(text, "note")
    assert [(hit.name, hit.line) for hit in hits] == [("note", 3)]
    redacted = redact(text)
    assert REDACTED in redacted and not scan(redacted, "note")
    for secret in (TOKEN, "correct-horse", "hunter22", "abcd1234", "pa55word", "abcdefghijklmnop1234"):
        assert secret not in redacted
        assert secret not in str(hits[0])
    assert fill(redacted, text, "note") == text


@pytest.mark.parametrize(
    "text",
    [
        "key = query_states.transpose(1, 2)",
        "key=key_states, value=value_states",
        "self.token_id: int = 128009",
        "password = os.environ['PASSWORD']",
        "def login(token=token): ...",
        "max_tokens=512 and the token is 5",
        "EnvironmentFile=-/etc/ddtree/environment",
        "api_key: str | None = None",
        "DDTREE_API_KEY=${SECRET}",
        "the key is to keep tokens short: 3 at most",
        "key: layer_12.attn.k_proj",
        "#1 best: 97.9 tok/s, accept length 3.5-4.0 (block 8, taps 1,12,24)",
        "commit 0123456789abcdef0123456789abcdef01234567 works",
        "the token 29889 is a full stop",
        'api_key="EMPTY", base_url=url',
        'key = "text_config"',
        'subconfig_key = "vision_config"; position_key: "position_ids"',
        'EOS_TOKEN = "</s>"; PAD_TOKEN = "pad"; BOS_TOKEN = "[BOS]"',
        'key = "model.layers.12.self_attn.q_proj.weight"',
        "hf_quantizer_with_a_very_long_name_indeed = hf_configuration_utilities()",
        "sk-learn-style-names-are-no-keys-at-all",
        "http://localhost:30000/v1/chat@example and https://{user}:{password}@host",
        "def attend(key: float32, token: layer12) -> float32:",
    ],
)
def test_code_and_prose_are_no_secrets(text: str) -> None:
    assert scan(text, "note") == ()
    assert redact(text) == text


def test_a_private_key_is_one_secret() -> None:
    text = "a\n-----BEGIN OPENSSH PRIVATE KEY-----\nAAAA\nBBBB\n-----END OPENSSH PRIVATE KEY-----\nb\n"
    assert redact(text) == "a\n<redacted by ddtree>\nb\n"


def test_environment_variables_keep_what_is_no_secret() -> None:
    variables = {
        "HF_TOKEN": TOKEN,
        "SGLANG_API_KEY": "plainword",
        "CUDA_HOME": "/usr/local/cuda",
        "SGLANG_MAX_TOKEN": "512",
        "PIP_INDEX_URL": "https://me:pa55@host/simple",
    }
    assert redact_environment(variables) == {
        "HF_TOKEN": REDACTED,
        "SGLANG_API_KEY": REDACTED,
        "CUDA_HOME": "/usr/local/cuda",
        "SGLANG_MAX_TOKEN": "512",
        "PIP_INDEX_URL": f"https://me:{REDACTED}@host/simple",
    }


def test_a_mark_takes_the_live_value_of_its_own_field() -> None:
    text = "Environment=A_KEY=first1\nEnvironment=B_TOKEN=second2\n"
    live = "Environment=B_TOKEN=changed2\nEnvironment=A_KEY=changed1\n"
    assert fill(redact(text), live, "unit") == "Environment=A_KEY=changed1\nEnvironment=B_TOKEN=changed2\n"


def test_a_password_of_one_address_never_goes_to_another() -> None:
    text = "A=https://me:first1@one/\nB=https://me:second2@two/\n"
    live = "B=https://me:other2@two/\nA=https://me:other1@one/\n"
    assert fill(redact(text), live, "unit") == "A=https://me:other1@one/\nB=https://me:other2@two/\n"


def test_a_mark_without_a_live_value_is_refused_by_name() -> None:
    with pytest.raises(SecretMissing, match="ddtree.service: the value of 'A_KEY' was redacted") as refused:
        fill(redact("Environment=A_KEY=first1\n"), "Environment=OTHER=1\n", "ddtree.service")
    assert refused.value.field == "A_KEY"
