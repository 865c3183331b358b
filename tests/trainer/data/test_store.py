"""The token store: what went in comes out, wherever it is asked for."""

import os
from array import array
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.base.errors import ConfigurationError, StoreError
from shardwise.trainer.data import token_store as store_module
from shardwise.trainer.data.token_store import Writer, adopt, is_store, open_store

END = 9
FACTS = {"note": "kept"}

Document = list[tuple[list[int], bool]]
DOCUMENTS = st.lists(
    st.lists(st.tuples(st.lists(st.integers(0, END), max_size=4), st.booleans()), max_size=3), max_size=6
)


def write(folder: Path, documents: list[Document], dtype: str = "uint16") -> None:
    with Writer(folder, dtype, END) as writer:
        for document in documents:
            for ids, trained in document:
                writer.add(ids, trained)
            writer.end_document()
        writer.finish(FACTS)


@given(DOCUMENTS.filter(bool), st.sampled_from(["uint16", "uint32"]))
@settings(max_examples=40, deadline=None)
def test_what_went_in_comes_out(
    tmp_path_factory: pytest.TempPathFactory, documents: list[Document], dtype: str
) -> None:
    folder = tmp_path_factory.mktemp("store")
    write(folder, documents, dtype)
    tokens, trained, starts = [], [], [0]
    for document in documents:
        pairs = [(token, flag) for ids, flag in document for token in ids]
        if not pairs or pairs[-1][0] != END:
            pairs.append((END, pairs[-1][1] if pairs else True))
        tokens += [token for token, _ in pairs]
        trained += [flag for _, flag in pairs]
        starts.append(len(tokens))
    store = open_store(folder)
    assert (store.num_tokens, store.num_documents, store.facts) == (len(tokens), len(documents), FACTS)
    assert store.tokens(0, len(tokens)).tolist() == tokens
    assert [store.document(i) for i in range(len(documents))] == [
        (first, after - first) for first, after in pairwise(starts)
    ]
    assert torch.cat(list(store.document_lengths())).tolist() == torch.tensor(starts).diff().tolist()
    mask = store.trained(0, len(tokens))
    assert trained == ([True] * len(tokens) if mask is None else mask.tolist())
    assert (folder / "trained.bin").exists() == (not all(trained))
    for first in range(len(tokens)):
        assert store.starts_within(first, 5) == [at for at in starts if first < at < first + 5]


def test_the_digest_is_of_the_content_alone(tmp_path: Path) -> None:
    def digest(name: str, documents: list[Document]) -> str:
        (tmp_path / name).mkdir()
        write(tmp_path / name, documents)
        return open_store(tmp_path / name).digest

    given: list[Document] = [[([1, 2], True), ([3], False)], [([4, 5], True)]]
    in_pieces: list[Document] = [[([1], True), ([2], True), ([3], False)], [([4], True), ([5], True)]]
    first = digest("a", given)
    assert digest("b", in_pieces) == first
    changes: dict[str, list[Document]] = {
        "a token": [[([1, 2], True), ([4], False)], [([4, 5], True)]],
        "a trained one": [[([1, 2, 3], True)], [([4, 5], True)]],
        "an order": given[::-1],
    }
    assert len({first, *(digest(name, changed) for name, changed in changes.items())}) == 4
    # Where documents end is content, too, also where the same tokens are there.
    assert digest("two", [[([1, END], True)], [([END], True)]]) != digest("one", [[([1, END, END], True)]])


def test_wide_numbers(tmp_path: Path) -> None:
    with Writer(tmp_path, "uint32", END) as writer:
        writer.add([2**16, 2**32 - 1], True)
        writer.end_document()
        writer.finish(FACTS)
    assert open_store(tmp_path).tokens(0, 3).tolist() == [2**16, 2**32 - 1, END]


def test_a_folder_that_is_not_finished_is_no_store(tmp_path: Path) -> None:
    with Writer(tmp_path, "uint16", END) as writer:
        writer.add([1], True)
    assert not is_store(tmp_path)
    with pytest.raises(ConfigurationError, match="a damaged token store"):
        open_store(tmp_path)


@pytest.mark.parametrize(
    ("name", "what"), [("tokens.bin", "tokens"), ("documents.bin", "documents"), ("trained.bin", "trained")]
)
def test_a_damaged_store_is_refused(tmp_path: Path, name: str, what: str) -> None:
    write(tmp_path, [[([1, 2, 3], False)], [([4], True)]])
    content = (tmp_path / name).read_bytes()
    (tmp_path / name).write_bytes(content[: len(content) // 8 * 8 - 8] if name == "documents.bin" else content[:-2])
    with pytest.raises(
        ConfigurationError, match=rf"damaged token store: \d {what}, but \d were written; delete the folder"
    ):
        open_store(tmp_path)


def test_token_files_are_used_in_place(tmp_path: Path) -> None:
    parts = [[1, 2, END, 3], [4, END], [END, 5, 6]]
    files = [tmp_path / f"{number}.bin" for number in range(len(parts))]
    for file, part in zip(files, parts, strict=True):
        file.write_bytes(array("H", part))
    folder = tmp_path / "store"
    folder.mkdir()
    adopt(folder, files, "uint16", END + 1, END, FACTS)
    store = open_store(folder)
    whole = [token for part in parts for token in part]
    for first in range(len(whole)):
        for count in range(1, len(whole) - first + 1):
            assert store.tokens(first, count).tolist() == whole[first : first + count]
    assert [store.document(index) for index in range(store.num_documents)] == [(0, 3), (3, 1), (4, 2), (6, 1), (7, 2)]
    assert not (folder / "tokens.bin").exists()


def test_copies_of_token_files_have_one_digest(tmp_path: Path) -> None:
    digests = []
    for number, parts in enumerate([[[1, 2, END], [3, END]], [[1, 2, END, 3, END]], [[1, 2, END, 4, END]]]):
        folder = tmp_path / str(number)
        folder.mkdir()
        files = [folder / f"{index}.bin" for index in range(len(parts))]
        for file, part in zip(files, parts, strict=True):
            file.write_bytes(array("H", part))
        adopt(folder, files, "uint16", END + 1, END, FACTS)
        digests.append(open_store(folder).digest)
    assert digests[0] == digests[1] != digests[2]
    (tmp_path / "written").mkdir()
    write(tmp_path / "written", [[([1, 2], True)], [([3], True)]])
    assert open_store(tmp_path / "written").digest == digests[0]


@pytest.mark.parametrize(
    ("content", "dtype", "message"),
    [
        (b"", "uint16", "is empty"),
        (b"123", "uint16", "3 bytes are not a whole number of 2-byte numbers"),
        (array("H", [1, 2]).tobytes() + b"12", "uint32", "6 bytes are not a whole number of 4-byte numbers"),
        (array("H", [1, 2, 10]).tobytes(), "uint16", "token 2 is 10, but the model's ids are below 10: "),
    ],
)
def test_token_files_that_cannot_be_right(tmp_path: Path, content: bytes, dtype: str, message: str) -> None:
    (tmp_path / "a.bin").write_bytes(content)
    with pytest.raises(ConfigurationError, match=f"a.bin: {message}"):
        adopt(tmp_path, [tmp_path / "a.bin"], dtype, END + 1, END, FACTS)


@pytest.mark.parametrize("is_open", [True, False], ids=["open", "opened each time"])
def test_a_file_that_is_changed_under_a_reader_is_told_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_open: bool
) -> None:
    monkeypatch.setattr(store_module, "_MAX_OPEN", 256 if is_open else 0)
    write(tmp_path, [[([1, 2, 3], False)], [([4, 5], True)]])
    opened = open_store(tmp_path)
    tokens, documents = tmp_path / "tokens.bin", tmp_path / "documents.bin"
    assert opened.tokens(0, 7).tolist() == [1, 2, 3, END, 4, 5, END]
    with tokens.open("r+b") as file:
        file.seek(10)
        file.write(array("H", [60_000]))
    with pytest.raises(StoreError, match=r"tokens\.bin is .* token 5 is 60000, but the largest was 9 when"):
        opened.tokens(4, 3)
    os.truncate(tokens, 4)
    with pytest.raises(StoreError, match=r"tokens\.bin is .* has 4 bytes, but had 14 when"):
        opened.tokens(0, 7)
    documents.write_bytes(array("q", [0, 2**40, -3]))
    with pytest.raises(StoreError, match=r"documents\.bin has documents at the tokens \[0, 1099511627776\]"):
        opened.document(0)
    with pytest.raises(StoreError, match=r"documents\.bin"):
        opened.document(1)
    documents.write_bytes(b"")
    with pytest.raises(StoreError, match=r"documents\.bin is .* has 0 bytes, but had 24 when"):
        opened.starts_within(0, 7)
