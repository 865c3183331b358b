"""Data is tokenised once, as a whole or not at all, and what is wrong with it is one sentence."""

import os
import threading
import tracemalloc
from array import array
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shardwise.base.errors import ConfigurationError
from shardwise.trainer.data.prepare import Prepared, prepare
from shardwise.trainer.data.token_store import Store
from shardwise.trainer.data.tokenizer import BYTES, tokenizer_for
from shardwise.trainer.settings import Settings
from tests.trainer.data.conftest import CHATML


def quiet(_: str) -> None:
    pass


def prepared(tmp_path: Path, say: Callable[[str], None] = quiet, **settings: Any) -> Prepared:
    return prepare(Settings(**settings), BYTES, tmp_path / "cache", say)


def stores(tmp_path: Path) -> list[Path]:
    return list((tmp_path / "cache").iterdir())


def documents(store: Store) -> list[str]:
    """Each with <> around what is trained on, and | for the end."""
    found = []
    for index in range(store.num_documents):
        first, count = store.document(index)
        mask = store.trained(first, count)
        flags = [True] * count if mask is None else mask.tolist()
        text, was = "", False
        for token, flag in zip(store.tokens(first, count).tolist(), flags, strict=True):
            text += ("<" if flag else ">") if flag != was else ""
            text += "|" if token == BYTES.end_id else chr(token)
            was = flag
        found.append(text + (">" if was else ""))
    return found


def test_the_embedded_text_is_the_default(tmp_path: Path) -> None:
    made = prepared(tmp_path)
    assert made.train[0].num_documents > 50
    assert made.train[0].num_tokens > 400_000
    assert made.eval is None
    assert not made.train[0].facts["is_rows"]
    assert any("statement" in text for text in documents(made.train[0]))


def test_numbers_are_as_wide_as_the_vocabulary_needs(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one")
    for vocab_size, num_bytes in ((2**16, 2), (2**16 + 1, 4)):
        tokenizer = replace(BYTES, vocab_size=vocab_size)
        cache = tmp_path / f"{num_bytes} bytes"
        made = prepare(Settings(train_file=(str(tmp_path / "a.txt"),)), tokenizer, cache, quiet)
        (stored,) = cache.glob("*/tokens.bin")
        assert stored.stat().st_size == made.train[0].num_tokens * num_bytes


def test_files_of_several_kinds(tmp_path: Path, write_rows: Callable[..., str]) -> None:
    (tmp_path / "a.txt").write_text("one\ntwo")
    rows = [
        write_rows({"text": "three"}, name="three.jsonl"),
        write_rows({"prompt": "p", "completion": "c"}, name="pairs.jsonl"),
        write_rows(
            {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]},
            {"messages": [{"role": "assistant", "content": "a"}, {"role": "user", "content": "q"}]},
        ),
    ]
    made = prepared(tmp_path, train_file=(str(tmp_path / "a.txt"), *rows), eval_file=(str(tmp_path / "a.txt"),))
    assert documents(made.train[0]) == [
        "<one\ntwo|>",
        "<three|>",
        "p<c|>",
        "user:\nq\n\nassistant:\n<a|>",
        "assistant:\n<a|>\n\nuser:\nq\n\n|",
    ]
    assert made.train[0].facts["is_rows"]
    assert made.eval is not None
    assert documents(made.eval) == ["<one\ntwo|>"]


def test_a_real_tokenizer(tmp_path: Path, write_rows: Callable[..., str], bpe_folder: Callable[..., Path]) -> None:
    tokenizer = tokenizer_for(str(bpe_folder(CHATML, eos_token="<|im_end|>")))
    texts = [f"row {number} of some text" for number in range(3000)]
    rows = write_rows(*({"text": text} for text in texts))
    made = prepare(Settings(train_file=(rows,)), tokenizer, tmp_path / "cache", quiet)
    store = made.train[0]
    assert store.num_documents == 3000
    for index in (0, 1, 1500, 2999):
        first, count = store.document(index)
        assert store.tokens(first, count).tolist() == [*tokenizer.encode(texts[index]), tokenizer.end_id]


def test_a_dataset(tmp_path: Path) -> None:
    import datasets

    datasets.Dataset.from_list([{"text": "one"}, {"text": ""}]).save_to_disk(tmp_path / "set")
    said: list[str] = []
    made = prepared(tmp_path, said.append, dataset=(str(tmp_path / "set"),))
    assert documents(made.train[0]) == ["<one|>"]
    assert made.train[0].facts["num_bad_rows"] == 1
    assert f"{tmp_path / 'set'}:2: text is empty" in said


def test_token_files(tmp_path: Path) -> None:
    path = tmp_path / "a.bin"
    path.write_bytes(array("H", [104, 105, 256, 104]))
    made = prepared(tmp_path, train_file=(str(path),))
    assert documents(made.train[0]) == ["<hi|>", "<h>"]
    path.write_bytes(array("I", [257]))
    with pytest.raises(
        ConfigurationError,
        match=r"token 0 is 257, but the model's ids are below 257: give the --tok.* raise shape\.vocab",
    ):
        prepared(tmp_path, train_file=(str(path),), token_dtype="uint32")
    assert len(list((tmp_path / "cache").iterdir())) == 1


def test_token_files_may_have_all_ids_of_the_model(tmp_path: Path) -> None:
    path = tmp_path / "a.bin"
    path.write_bytes(array("I", [128_000, 104, 256]))
    settings = Settings(train_file=(str(path),), token_dtype="uint32")
    said: list[str] = []
    made = prepare(settings, BYTES, tmp_path / "cache", said.append, vocab_size=128_256)
    assert made.train[0].tokens(0, 3).tolist() == [128_000, 104, 256]
    assert said == [f"reading through train_file {path}: documents end with token 256 of tokenizer bytes"]
    # A store that was made for a larger model says nothing about a smaller one.
    with pytest.raises(ConfigurationError, match="token 0 is 128000, but the model's ids are below 300"):
        prepare(settings, BYTES, tmp_path / "cache", quiet, vocab_size=300)


def test_text_is_stored_as_it_is_for_any_model(tmp_path: Path, write_rows: Callable[..., str]) -> None:
    rows = write_rows({"text": "one"})
    prepared(tmp_path, train_file=(rows,))
    prepare(Settings(train_file=(rows,)), BYTES, tmp_path / "cache", quiet, vocab_size=128_256)
    assert len(stores(tmp_path)) == 1


def test_copies_have_other_folders_and_the_same_digest(tmp_path: Path, write_rows: Callable[..., str]) -> None:
    rows = [
        write_rows({"prompt": "o", "completion": "ne"}, {"prompt": "p", "completion": word}, name=word)
        for word in ("a.jsonl", "b.jsonl")
    ]
    first, other = (prepared(tmp_path, train_file=(row,), eval_file=(rows[1],)) for row in rows)
    assert first.eval is not None
    assert other.eval is not None
    assert first.train[0].digest != other.train[0].digest == other.eval.digest == first.eval.digest
    Path(rows[0]).write_bytes(Path(rows[1]).read_bytes())
    assert len(stores(tmp_path)) == 2
    copied = prepared(tmp_path, train_file=(rows[0],))
    assert len(stores(tmp_path)) == 3
    assert (copied.train[0].digest, copied.eval) == (other.train[0].digest, None)
    elsewhere = prepare(Settings(train_file=(rows[1],)), BYTES, tmp_path / "elsewhere", quiet)
    assert elsewhere.train[0].digest == other.train[0].digest


def test_the_second_time_it_is_found(tmp_path: Path, write_rows: Callable[..., str]) -> None:
    rows = write_rows({"text": "one"}, {"bad": 1})
    said: list[str] = []
    first = prepared(tmp_path, said.append, train_file=(rows,))
    again: list[str] = []
    assert prepared(tmp_path, again.append, train_file=(rows,)).train[0].digest == first.train[0].digest
    assert [line.partition(":")[0] for line in said] == ["tokenised train_file " + rows, rows]
    assert again == said[1:]
    # What does not decide about the tokens does not tokenise again.
    prepared(tmp_path, train_file=(rows,), seed=3, seq_length=7, packing="padded")
    assert len(stores(tmp_path)) == 1
    os.utime(rows, ns=(1, 1))
    prepared(tmp_path, train_file=(rows,))
    assert len(stores(tmp_path)) == 2


def test_a_limit_set_later_is_kept(tmp_path: Path, write_rows: Callable[..., str]) -> None:
    rows = write_rows({"text": "one"}, "{", "[")
    made = prepared(tmp_path, train_file=(rows,), max_bad_rows=2)
    assert made.train[0].facts["num_bad_rows"] == 2
    with pytest.raises(
        ConfigurationError, match=r"more than 1 rows cannot be read \(max_bad_rows\), the first .*:2: not J"
    ):
        prepared(tmp_path, train_file=(rows,), max_bad_rows=1)


def test_ten_bad_rows_are_named_and_the_rest_counted(tmp_path: Path, write_rows: Callable[..., str]) -> None:
    rows = write_rows(*["{"] * 25, {"text": "good"})
    said: list[str] = []
    made = prepared(tmp_path, said.append, train_file=(rows,))
    assert made.train[0].facts["num_bad_rows"] == 25
    assert [line.partition(": ")[0] for line in said[1:11]] == [f"{rows}:{number}" for number in range(1, 11)]
    assert said[11:] == ["and 15 more bad rows"]


def test_too_many_bad_rows_leave_nothing_behind(tmp_path: Path, write_rows: Callable[..., str]) -> None:
    rows = write_rows({"text": "good"}, *["{"] * 25)
    with pytest.raises(ConfigurationError, match="more than 5 rows cannot be read"):
        prepared(tmp_path, train_file=(rows,), max_bad_rows=5)
    assert list((tmp_path / "cache").iterdir()) == []


def test_two_at_once_end_well(tmp_path: Path, write_rows: Callable[..., str]) -> None:
    rows = write_rows(*({"text": f"row {number}"} for number in range(2000)))
    both = threading.Barrier(4)
    found: list[Prepared] = []

    def run() -> None:
        both.wait()
        found.append(prepared(tmp_path, train_file=(rows,)))

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4
    assert len({each.train[0].digest for each in found}) == 1
    assert len(stores(tmp_path)) == 1


def test_memory_does_not_grow_with_the_file(tmp_path: Path) -> None:
    peaks = []
    for num_megabytes in (6, 18):
        path = tmp_path / f"{num_megabytes}.txt"
        path.write_bytes(b"some words and more of them\n" * (num_megabytes * 2**20 // 28))
        tracemalloc.start()
        prepared(tmp_path, train_file=(str(path),))
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < peaks[0] * 1.1


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("missing.txt", None, r"train_file .*missing\.txt: no such file"),
        ("empty.txt", b"", r"empty\.txt: is empty"),
        (
            "table.xlsx",
            b"a,b",
            r"table\.xlsx: an unknown kind; known: \.txt, \.md, \.jsonl, \.json, \.csv, \.tsv, \.parquet, \.bin",
        ),
        ("latin.txt", b"caf\xe9 au lait", r"latin\.txt: not UTF-8 text: byte 3 is 0xe9"),
        ("mark.txt", b"\xef", r"mark\.txt: not UTF-8 text: byte 0 is 0xef"),  # the begin of a byte order mark
        ("blank.jsonl", b"\n\n", r"blank\.jsonl holds no document"),
        ("bad.jsonl", b"{\n[\n", r"bad\.jsonl: none of its 2 rows can be read, the first .*bad\.jsonl:1: not JSON"),
    ],
)
def test_data_that_cannot_be_used(tmp_path: Path, name: str, content: bytes | None, message: str) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigurationError, match=message) as caught:
        prepared(tmp_path, train_file=(str(tmp_path / name),))
    assert "\n" not in str(caught.value)
    cache = tmp_path / "cache"
    assert not cache.exists() or list(cache.iterdir()) == []


def test_folders_and_mixtures_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="no file of a known kind is there"):
        prepared(tmp_path, train_file=(str(tmp_path),))
    (tmp_path / "a.txt").write_text("a")
    (tmp_path / "a.bin").write_bytes(b"aa")
    with pytest.raises(ConfigurationError, match="cannot be mixed with text or rows"):
        prepared(tmp_path, train_file=(str(tmp_path / "a.txt"), str(tmp_path / "a.bin")))
    with pytest.raises(ConfigurationError, match=r"eval_file .*nowhere\.txt: no such file"):
        prepared(tmp_path, train_file=(str(tmp_path / "a.txt"),), eval_file=("nowhere.txt",))


def test_a_place_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file")
    with pytest.raises(ConfigurationError, match=r"the embedded text: cannot be tokenised into .*cache"):
        prepared(tmp_path)
