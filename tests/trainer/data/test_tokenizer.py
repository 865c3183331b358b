"""Tokenizers: bytes without any library, and real Hugging Face ones from a folder."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.base.errors import ConfigurationError
from shardwise.trainer.data.tokenizer import tokenizer_for

WORDS = "A class statement binds a name.\n\n  Naïve façade: 日本語 🙂\n"


@given(st.text())
def test_bytes_come_back(text: str) -> None:
    tokenizer = tokenizer_for("bytes")
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert all(0 <= token < 256 for token in tokenizer.encode(text))
    assert (tokenizer.vocab_size, tokenizer.end_id) == (257, 256)


def test_bytes_that_are_no_text_and_ends_can_be_decoded() -> None:
    assert tokenizer_for("bytes").decode([0xE6, 104, 256, 105]) == "\ufffdhi"


def test_bytes_need_no_library() -> None:
    code = (
        "import sys; from shardwise.trainer.data.tokenizer import tokenizer_for; tokenizer_for('bytes').encode('a');"
        "assert not {'transformers', 'tokenizers', 'datasets', 'jinja2'} & {*sys.modules}"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_folder(bpe_folder: Callable[..., Path]) -> None:
    folder = bpe_folder()
    tokenizer = tokenizer_for(str(folder))
    ids = tokenizer.encode(WORDS)
    assert tokenizer.decode(ids) == WORDS
    assert len(ids) < len(WORDS.encode())
    assert max(ids) < tokenizer.vocab_size == 600
    assert tokenizer.end_id == 0
    assert tokenizer.encode_batch(["one", "two three"]) == [tokenizer.encode("one"), tokenizer.encode("two three")]
    assert tokenizer.decode([*tokenizer.encode("a"), tokenizer.end_id]) == "a"


def test_no_special_tokens_are_added(bpe_folder: Callable[..., Path]) -> None:
    tokenizer = tokenizer_for(str(bpe_folder(bos_token="<|im_start|>", add_bos_token=True)))
    assert not {0, 1, 2} & set(tokenizer.encode("hello"))


def test_the_fingerprint_tells_tokenizers_apart_but_not_folders(bpe_folder: Callable[..., Path]) -> None:
    same = {tokenizer_for(str(bpe_folder())).fingerprint() for _ in range(2)}
    other_end = tokenizer_for(str(bpe_folder(eos_token="<|im_end|>"))).fingerprint()
    other_template = tokenizer_for(str(bpe_folder("{{ messages }}"))).fingerprint()
    assert len(same) == 1
    assert len({*same, other_end, other_template, tokenizer_for("bytes").fingerprint()}) == 4


def test_what_is_no_tokenizer_is_refused(
    tmp_path: Path, bpe_folder: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigurationError, match=r"/nowhere: no such folder"):
        tokenizer_for("/nowhere")
    with pytest.raises(ConfigurationError, match="neither a tokenizer's folder nor a known id"):
        tokenizer_for(str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ConfigurationError, match="tokenizer nobody/nothing: neither"):
        tokenizer_for("nobody/nothing")
    with pytest.raises(ConfigurationError, match="no end-of-text token"):
        tokenizer_for(str(bpe_folder(eos_token=None)))


def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ConfigurationError, match=r"install shardwise\[hf\]"):
        tokenizer_for(str(tmp_path))
