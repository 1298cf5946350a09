"""The tokenizer: the default model's own, streamed text equal to whole text, chat templates, folders."""

import json
from pathlib import Path

import gguf_files
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from runtime.gguf import CheckpointError, UnsupportedCheckpoint, read_gguf
from runtime.model_fetch import cached_default
from runtime.tokenizer import ChatTokenizer, IncrementalDetokenizer, kept_tokenizer

TEXTS = [
    "Hello 12345 and 3.14159",
    "  two  spaces\n\n\ttabs ",
    "héllo 😀👩‍👩‍👧 漢字 العربية",
    "def f(x):\n    return x ** 2",
    "",
]


@pytest.fixture(scope="module")
def default() -> ChatTokenizer:
    path = cached_default()
    if path is None:
        pytest.skip("the default model is not in the cache; run: ddtree model fetch")
    return ChatTokenizer.from_gguf(read_gguf(path))


@pytest.fixture(scope="module")
def sentencepiece(tmp_path_factory: pytest.TempPathFactory) -> ChatTokenizer:
    """A folder with a Llama-2 style tokenizer: U+2581 for spaces, `<0xNN>` for bytes, one space dropped in front."""
    folder = tmp_path_factory.mktemp("sentencepiece")
    pieces = [
        "<unk>",
        "<s>",
        "</s>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        "▁",
        "a",
        "b",
        "▁a",
        "▁b",
        "é",
    ]
    vocabulary = {piece: at for at, piece in enumerate(pieces)}
    bpe = models.BPE(vocab=vocabulary, merges=[("▁", "a"), ("▁", "b")], unk_token="<unk>", byte_fallback=True)
    tokenizer = Tokenizer(bpe)
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="first", split=False)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken(each, special=True) for each in pieces[:3]])
    tokenizer.save(str(folder / "tokenizer.json"))
    template = "{% for m in messages %}{{ bos_token }}{{ m.content }}{% endfor %}"
    config = {"bos_token": {"content": "<s>"}, "eos_token": "</s>", "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return ChatTokenizer.from_folder(folder)


def streamed(tokenizer: ChatTokenizer, ids: list[int], skip_special: bool = True) -> str:
    detokenizer = IncrementalDetokenizer(tokenizer, skip_special)
    return "".join([detokenizer.push(each) for each in ids]) + detokenizer.flush()


def test_default_tokenizer_has_the_published_ids(default: ChatTokenizer) -> None:
    assert default.vocab_size == 49152
    assert default.special_ids == frozenset(range(17))
    assert default.token_id("<|im_end|>") == 2 and default.token_id("no such token") is None
    ids = default.apply_chat_template([{"role": "user", "content": "Hi"}])
    assert default.decode(ids, skip_special=False) == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )
    assert ids[0] == 1 and ids.count(1) == 3 and ids.count(2) == 2


def test_digits_are_single_tokens_and_round_trip(default: ChatTokenizer) -> None:
    assert [default.decode([each]) for each in default.encode("123456789")] == list("123456789")


@pytest.mark.parametrize("text", TEXTS)
def test_text_round_trips(default: ChatTokenizer, sentencepiece: ChatTokenizer, text: str) -> None:
    ids = default.encode(text)
    assert default.decode(ids) == streamed(default, ids) == text
    # Such a tokenizer puts no space before a text that begins with one, and still drops the first in decoding.
    ids = sentencepiece.encode(text.strip())
    assert sentencepiece.decode(ids) == streamed(sentencepiece, ids) == text.strip()


@settings(deadline=None)
@given(text=st.text(st.characters(exclude_categories=["Cs"]), max_size=40))
def test_any_text_streams_to_itself_without_replacement_characters(default: ChatTokenizer, text: str) -> None:
    # The published vocabulary lacks some bytes that hardly occur; characters with them are lost in encoding.
    known = {default.id_to_bytes(each) for each in range(default.vocab_size)}
    text = "".join(each for each in text if all(bytes([byte]) in known for byte in each.encode()))
    detokenizer = IncrementalDetokenizer(default, skip_special=False)
    pieces = [detokenizer.push(each) for each in default.encode(text)]
    assert "".join(pieces) == text and detokenizer.flush() == ""


@settings(deadline=None)
@given(ids=st.lists(st.integers(0, 49151) | st.integers(0, 300), max_size=40), skip_special=st.booleans())
def test_any_ids_stream_to_their_decoding_and_that_is_the_librarys(
    default: ChatTokenizer, ids: list[int], skip_special: bool
) -> None:
    whole = default.decode(ids, skip_special)
    assert streamed(default, ids, skip_special) == whole
    assert default.tokenizer.decode(ids, skip_special_tokens=skip_special) == whole


@settings(deadline=None)
@given(ids=st.lists(st.integers(0, 270), max_size=30), skip_special=st.booleans())
def test_sentencepiece_ids_stream_to_their_decoding(
    sentencepiece: ChatTokenizer, ids: list[int], skip_special: bool
) -> None:
    assert streamed(sentencepiece, ids, skip_special) == sentencepiece.decode(ids, skip_special)


def test_characters_split_over_tokens_appear_once_complete(
    default: ChatTokenizer, sentencepiece: ChatTokenizer
) -> None:
    for tokenizer in (default, sentencepiece):
        ids = tokenizer.encode("😀")
        assert len(ids) > 1
        detokenizer = IncrementalDetokenizer(tokenizer)
        assert "".join(detokenizer.push(each) for each in ids[:-1]) == ""
        assert detokenizer.push(ids[-1]) == "😀"
        assert detokenizer.flush() == ""
        assert "".join(detokenizer.push(each) for each in ids[:-1]) == ""
        assert detokenizer.flush() == "\ufffd"


def test_specials_in_text_become_special_tokens_as_in_the_reference_library(default: ChatTokenizer) -> None:
    assert default.encode("a<|im_end|>") == [*default.encode("a"), 2]
    assert default.decode([2, 0, 16]) == ""


def test_ids_without_a_token_have_no_text(default: ChatTokenizer) -> None:
    assert default.id_to_bytes(49152) == default.id_to_bytes(-1) == b""
    assert default.decode([60000]) == ""


def test_text_that_no_encoding_represents_is_refused(default: ChatTokenizer) -> None:
    with pytest.raises(ValueError, match="lone surrogate at position 1"):
        default.encode("a\ud800")


def test_bad_messages_are_refused_in_one_line(default: ChatTokenizer) -> None:
    for messages, words in (
        ([], "empty"),
        ([{"content": "x"}], r"messages\[0\] has no role"),
        ([{"role": "user"}], "refuses these messages"),
        ([{"role": "user", "content": ["part"]}], "refuses these messages"),
    ):
        with pytest.raises(ValueError, match=words) as refused:
            default.apply_chat_template(messages)
        assert "\n" not in str(refused.value)


def with_template(folder: Path, template: str) -> ChatTokenizer:
    path = folder / "model.gguf"
    path.write_bytes(gguf_files.llama_file(**{"tokenizer.chat_template": template}))
    return ChatTokenizer.from_gguf(read_gguf(path))


def test_template_names_and_filters_work_as_published_templates_need(tmp_path: Path) -> None:
    template = (
        "{% for m in messages %}\n"
        "    {%- if loop.first %}{{ bos_token }}{% endif %}\n"
        "{% generation %}{{ m | tojson }}{% endgeneration %}\n"
        "{% if thinking is defined %}{% break %}{% endif %}\n"
        "{% endfor %}{{ eos_token if add_generation_prompt }}{{ strftime_now('%Y') | length }}"
    )
    tokenizer = with_template(tmp_path, template)
    messages = [{"role": "user", "content": "<é&>"}, {"role": "user", "content": "b"}]
    first = '<s>{"role": "user", "content": "<é&>"}'
    assert tokenizer.render_chat(messages) == first + '{"role": "user", "content": "b"}</s>4'
    assert tokenizer.render_chat(messages, False, {"thinking": True}) == first + "4"


def test_templates_cannot_reach_python_and_their_refusals_are_told(tmp_path: Path) -> None:
    message = [{"role": "user", "content": "a"}]
    for template, words in (
        ("{{ messages.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe|not safely"),
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{% if %}", "template is invalid"),
    ):
        with pytest.raises(ValueError, match=words):
            with_template(tmp_path, template).apply_chat_template(message)


def test_a_model_without_template_says_so(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(gguf_files.llama_file())
    with pytest.raises(ValueError, match="no chat template"):
        ChatTokenizer.from_gguf(read_gguf(path)).apply_chat_template([{"role": "user", "content": "a"}])


def test_an_added_bos_is_put_in_front_only_on_request(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(gguf_files.llama_file(**{"tokenizer.ggml.add_bos_token": True}))
    tokenizer = ChatTokenizer.from_gguf(read_gguf(path))
    assert tokenizer.encode("ab") == [4] and tokenizer.encode("ab", add_special=True) == [0, 4]


def test_inconsistent_or_unknown_gguf_tokenizers_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    for change, error, words in (
        ({"tokenizer.ggml.model": "llama"}, UnsupportedCheckpoint, "'llama'"),
        ({"tokenizer.ggml.pre": "qwen2"}, UnsupportedCheckpoint, "'qwen2'"),
        ({"tokenizer.ggml.merges": ["a z"]}, CheckpointError, "tables do not fit"),
        ({"tokenizer.ggml.token_type": [3]}, CheckpointError, "tables do not fit"),
        ({"tokenizer.ggml.tokens": 5}, CheckpointError, "tables do not fit"),
    ):
        path.write_bytes(gguf_files.llama_file(**change))
        with pytest.raises(error, match=words):
            ChatTokenizer.from_gguf(read_gguf(path))


def test_folder_template_file_wins_over_the_one_in_the_config(
    sentencepiece: ChatTokenizer, tmp_path: Path
) -> None:
    (tmp_path / "tokenizer.json").write_text(sentencepiece.to_json())
    named = [{"name": "tool", "template": "t"}, {"name": "default", "template": "b"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    message = [{"role": "user", "content": "a"}]
    assert sentencepiece.render_chat(message) == "<s>a"
    assert ChatTokenizer.from_folder(tmp_path).render_chat(message) == "b"
    (tmp_path / "chat_template.jinja").write_text("a")
    assert ChatTokenizer.from_folder(tmp_path).render_chat(message) == "a"


def test_engines_share_a_tokenizer_until_its_files_change(
    sentencepiece: ChatTokenizer, tmp_path: Path
) -> None:
    """Each one that has encoded stays in the memory of the thread; a rebuild would leave another one there."""

    def load() -> ChatTokenizer:
        return kept_tokenizer(tmp_path, lambda: ChatTokenizer.from_folder(tmp_path))

    (tmp_path / "tokenizer.json").write_text(sentencepiece.to_json())
    first = load()
    assert load() is first and first.chat_template is None
    (tmp_path / "chat_template.jinja").write_text("{{ messages[0].content }}")
    assert load().chat_template == "{{ messages[0].content }}"


def test_tokens_that_only_the_config_adds_are_added(sentencepiece: ChatTokenizer, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(sentencepiece.to_json())
    size = sentencepiece.vocab_size
    config = {"added_tokens_decoder": {str(size): {"content": "<tool>", "special": True}}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = ChatTokenizer.from_folder(tmp_path)
    assert tokenizer.token_id("<tool>") == size and size in tokenizer.special_ids
    assert tokenizer.vocab_size == size + 1


def test_folders_without_a_usable_tokenizer_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no tokenizer\.json"):
        ChatTokenizer.from_folder(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError, match="cannot be read"):
        ChatTokenizer.from_folder(tmp_path)
    Tokenizer(models.BPE({"a": 0, "b": 1, "ab": 2}, [("a", "b")])).save(str(tmp_path / "tokenizer.json"))
    content = json.loads((tmp_path / "tokenizer.json").read_text())
    content["model"]["continuing_subword_prefix"] = "longer than a token"  # the library panics
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match="cannot be read"):
        ChatTokenizer.from_folder(tmp_path)
    Tokenizer(models.WordLevel({"a": 0}, unk_token="a")).save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(UnsupportedCheckpoint, match="neither byte-level"):
        ChatTokenizer.from_folder(tmp_path)
