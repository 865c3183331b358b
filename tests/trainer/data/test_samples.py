"""Samples cover the data, and which of them a step reads depends on nothing but the seed and the position."""

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.base.errors import ConfigurationError
from shardwise.trainer.checks import require_targets
from shardwise.trainer.data.prepare import Prepared, prepare
from shardwise.trainer.data.samples import Batch, Samples, open_samples, unigram_entropy
from shardwise.trainer.data.token_store import Writer, open_store
from shardwise.trainer.data.tokenizer import BYTES
from shardwise.trainer.settings import Settings

END = BYTES.end_id
FACTS = {"bad_rows": [], "num_bad_rows": 0, "is_rows": False, "is_pairs": False}


def stored(folder: Path, documents: list[list[int]]) -> Prepared:
    with Writer(folder, "uint16", END) as writer:
        for document in documents:
            writer.add(document, True)
            writer.end_document()
        writer.finish(FACTS)
    return Prepared((open_store(folder),), None)


def opened(prepared: Prepared, seq_length: int, **chosen: Any) -> tuple[Samples, Samples | None]:
    return open_samples(Settings(**chosen), BYTES, prepared, seq_length, lambda _: None)


def trained_on(prepared: Prepared, seq_length: int, **chosen: Any) -> Samples:
    return opened(prepared, seq_length, eval_fraction=0.0, **chosen)[0]


DOCUMENTS = st.lists(st.lists(st.integers(0, 255), min_size=1, max_size=12), min_size=5, max_size=12)


@given(DOCUMENTS, st.integers(1, 8), st.sampled_from([0.0, 0.1, 0.4]), st.booleans())
@settings(max_examples=50, deadline=None)
def test_packing_makes_every_token_a_target_once(
    tmp_path_factory: pytest.TempPathFactory, documents: list[list[int]], seq: int, fraction: float, isolate: bool
) -> None:
    prepared = stored(tmp_path_factory.mktemp("store"), documents)
    parts = opened(prepared, seq, eval_fraction=fraction, isolate_documents=isolate)
    stream = [token for document in documents for token in [*document, END]]
    starts, seen = {0}, Counter[int]()
    for document in documents:
        starts.add(max(starts) + len(document) + 1)
    num_tokens = 0
    for part in parts:
        if part is not None:
            batch = part.batch(range(part.num_samples))
            num_tokens += part.num_tokens
            for tokens, targets in zip(batch.tokens.tolist(), batch.targets.tolist(), strict=True):
                assert all(target in (-100, token) for token, target in zip(tokens[1:], targets, strict=False))
                seen += Counter(target for target in targets if target != -100)
    wanted = Counter(token for at, token in enumerate(stream) if at > 0 and not (isolate and at in starts))
    assert seen == wanted
    assert num_tokens == len(stream) - 1


def test_isolated_documents(tmp_path: Path) -> None:
    prepared = stored(tmp_path, [[1, 2], [3], [4, 5, 6, 7]])
    # 1 2 E 3 | E 4 5 6 | 7 E, where the last window is short.
    batch = in_order_of_the_text(trained_on(prepared, 4, isolate_documents=True))
    assert batch.tokens.tolist() == [[1, 2, END, 3], [END, 4, 5, 6], [7, END, END, END]]
    assert batch.targets.tolist() == [[2, END, -100, END], [-100, 5, 6, 7], [END, -100, -100, -100]]
    assert batch.positions is not None
    assert batch.positions.tolist() == [[0, 1, 2, 0], [0, 0, 1, 2], [0, 1, 0, 1]]


def test_documents_that_are_not_isolated(tmp_path: Path) -> None:
    batch = in_order_of_the_text(trained_on(stored(tmp_path, [[1, 2], [3], [4, 5, 6, 7]]), 4))
    assert batch.targets.tolist() == [[2, END, 3, END], [4, 5, 6, 7], [END, -100, -100, -100]]
    assert batch.positions is None


def in_order_of_the_text(samples: Samples) -> Batch:
    """All of them: the split draws which sample is which window, so the windows are asked one by one."""
    windows = [samples.windows.sample(index) for index in range(samples.num_samples)]
    everything = samples.batch(range(samples.num_samples))
    rows = [everything.tokens.tolist().index(tokens.tolist()) for tokens, _, _ in windows]
    return samples.batch(rows)


def test_loss_is_on_answers_only(tmp_path: Path, write_rows: Callable[..., str]) -> None:
    rows = write_rows(*({"prompt": "ab", "completion": letter} for letter in "xyz"))
    prepared = prepare(Settings(train_file=(rows,)), BYTES, tmp_path / "cache", lambda _: None)
    for packing in ("packed", "padded"):
        samples = trained_on(prepared, 6, packing=packing)
        batch = samples.batch(range(samples.num_samples))
        trained = sorted(batch.targets[batch.targets != -100].tolist())
        assert trained == sorted([*b"xyz", END, END, END])
        assert (batch.positions is None) == (packing == "padded")  # rows are isolated unless told otherwise
    assert trained_on(prepared, 6, isolate_documents=False).batch([0]).positions is None


def test_padded_samples_are_documents(tmp_path: Path) -> None:
    prepared = stored(tmp_path, [[1, 2], [3, 4, 5, 6, 7], [8, 9, 10, 11]])
    said: list[str] = []
    samples, _ = open_samples(Settings(packing="padded", eval_fraction=0.0), BYTES, prepared, 4, said.append)
    batch = samples.batch(range(3))
    found = sorted(zip(batch.tokens.tolist(), batch.targets.tolist(), strict=True))
    assert found == [
        ([1, 2, END, END], [2, END, -100, -100]),
        ([3, 4, 5, 6], [4, 5, 6, 7]),
        ([8, 9, 10, 11], [9, 10, 11, END]),
    ]
    assert [line.partition(" and ")[0] for line in said] == [
        "training data: 1 of 3 documents are longer than seq_length 4"
    ]
    assert (samples.num_samples, samples.num_tokens) == (3, 2 + 4 + 4)
    assert samples.tokens_per_sample == 10 / 3


@given(st.integers(1, 40), st.floats(0.01, 0.6), st.integers(0, 5), st.sampled_from(["packed", "padded"]))
@settings(max_examples=40, deadline=None)
def test_evaluation_and_training_share_nothing(
    tmp_path_factory: pytest.TempPathFactory, count: int, fraction: float, seed: int, packing: str
) -> None:
    prepared = stored(tmp_path_factory.mktemp("store"), [[number] * 3 for number in range(count + 2)])
    train, evaluated = opened(prepared, 4, eval_fraction=fraction, seed=seed, packing=packing)
    assert evaluated is not None
    parts = [{tuple(row) for row in part.batch(range(part.num_samples)).tokens.tolist()} for part in (train, evaluated)]
    assert not parts[0] & parts[1]
    assert len(parts[0] | parts[1]) == train.num_samples + evaluated.num_samples == train.windows.num_samples
    assert evaluated.num_samples == max(1, round(train.windows.num_full * fraction))
    assert train.num_tokens + evaluated.num_tokens == train.windows.num_tokens


def test_the_seed_chooses_what_is_evaluated(tmp_path: Path) -> None:
    prepared = stored(tmp_path, [[number] * 3 for number in range(100)])
    chosen = []
    for seed in (0, 0, 1):
        _, evaluated = opened(prepared, 4, eval_fraction=0.1, seed=seed)
        assert evaluated is not None
        chosen.append(evaluated.batch(range(10)).tokens.tolist())
    assert chosen[0] == chosen[1] != chosen[2]


@given(st.sampled_from([1, 2, 3, 4, 6, 12]), st.sampled_from([1, 2]), st.integers(0, 30), st.integers(0, 3))
@settings(max_examples=30, deadline=None)
def test_a_global_batch_is_the_same_for_every_world(
    tmp_path_factory: pytest.TempPathFactory, world: int, accumulation: int, step: int, seed: int
) -> None:
    """Ranks open the data on their own, and each takes its micro-batches out of the step's positions."""
    prepared = stored(tmp_path_factory.mktemp("store"), [[number, number + 1] for number in range(50)])
    whole = trained_on(prepared, 5, seed=seed)
    global_batch = 24
    expected = whole.batch(whole.order(step * global_batch, global_batch))
    size = global_batch // world // accumulation
    pieces = []
    for number in range(world * accumulation):
        samples = trained_on(prepared, 5, seed=seed)
        pieces.append(samples.batch(samples.order(step * global_batch + number * size, size)))
    assert torch.equal(torch.cat([piece.tokens for piece in pieces]), expected.tokens)
    assert torch.equal(torch.cat([piece.targets for piece in pieces]), expected.targets)


def test_the_shape_and_kind_of_a_batch(tmp_path: Path) -> None:
    train, _ = opened(stored(tmp_path, [[1, 2, 3]] * 50), 16, isolate_documents=True)
    batch = train.batch(train.order(0, 7))
    for tensor in (batch.tokens, batch.targets, batch.positions):
        assert tensor is not None
        assert (tensor.shape, tensor.dtype) == ((7, 16), torch.int64)
    with pytest.raises(IndexError, match=f"sample {train.num_samples}"):
        train.batch([train.num_samples])


def test_an_eval_file(tmp_path: Path, write_rows: Callable[..., str]) -> None:
    rows = write_rows({"text": "train " * 20})
    short = write_rows({"text": "eval"}, name="eval.jsonl")
    chosen = Settings(train_file=(rows,), eval_file=(short,))
    prepared = prepare(chosen, BYTES, tmp_path / "cache", lambda _: None)
    train, evaluated = open_samples(chosen, BYTES, prepared, 8, lambda _: None)
    assert train.num_tokens == 120
    assert evaluated is not None
    assert (evaluated.num_samples, evaluated.num_tokens) == (1, 4)
    assert evaluated.batch([0]).targets.tolist() == [[*b"val", END, -100, -100, -100, -100]]


def test_splits_that_leave_nothing(tmp_path: Path) -> None:
    prepared = stored(tmp_path, [[1, 2, 3, 4]])
    with pytest.raises(ConfigurationError, match="seq_length 5 is longer than the training data of 5 tokens"):
        opened(prepared, 5)
    with pytest.raises(ConfigurationError, match=r"eval_fraction 0\.02 of 1 samples leaves none to train on"):
        opened(prepared, 4)
    with pytest.raises(ConfigurationError, match=r"eval_fraction 0\.9 of 4 samples leaves none"):
        opened(prepared, 1, eval_fraction=0.9)


def test_unigram_entropy(tmp_path: Path) -> None:
    samples = trained_on(stored(tmp_path, [[1, 2, 1, 2, 1, 2, 1]] * 100), 8)
    shares = [4 / 8, 3 / 8, 1 / 8]  # ones, twos, ends
    assert unigram_entropy(samples) == pytest.approx(-sum(share * math.log(share) for share in shares))


def test_unigram_entropy_of_very_much_data_reads_a_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    samples = trained_on(stored(tmp_path, [[1, 2, 3, 4]] * 2000), 10)
    whole = unigram_entropy(samples)
    monkeypatch.setattr("shardwise.trainer.data.samples._STRETCH", 100)
    monkeypatch.setattr("shardwise.trainer.data.samples._ENTROPY_TOKENS", 1000)
    assert unigram_entropy(samples) == pytest.approx(whole, rel=0.01)


LENGTHS = st.lists(st.integers(2, 30), min_size=1, max_size=60)


@given(LENGTHS, st.integers(2, 24))
@settings(max_examples=60, deadline=None)
def test_rows_are_packed_whole_by_best_fit(
    tmp_path_factory: pytest.TempPathFactory, lengths: list[int], seq: int
) -> None:
    """Against best fit as the books write it, one row at a time."""
    folder = tmp_path_factory.mktemp("store")
    prepared = rows_stored(folder, [(f"{number:03}"[:1], "x" * (length - 2)) for number, length in enumerate(lengths)])
    said: list[str] = []
    samples, _ = open_samples(Settings(eval_fraction=0.0), BYTES, prepared, seq, said.append)
    rooms: list[int] = []
    for length in sorted((min(length, seq + 1) for length in lengths), reverse=True):
        room = min((room for room in rooms if room >= length), default=None)
        if room is None:
            room = seq + 1
        else:
            rooms.remove(room)
        rooms.append(room - length)
    windows = samples.windows
    pieces = [windows.pieces(index) for index in range(samples.num_samples)]
    assert sorted(seq + 1 - sum(count for _, count in part) for part in pieces) == sorted(rooms)
    starts = {sum(lengths[:number]): min(length, seq + 1) for number, length in enumerate(lengths)}
    assert dict(piece for part in pieces for piece in part) == starts
    assert sum(len(part) for part in pieces) == len(lengths)
    assert samples.num_tokens == sum(starts.values()) - len(rooms)
    num_cut = sum(length > seq + 1 for length in lengths)
    assert [line.split(" documents")[0] for line in said] == (
        [f"training data: {num_cut} of {len(lengths)}"] if num_cut else []
    )


def rows_stored(folder: Path, rows: list[tuple[str, str]]) -> Prepared:
    with Writer(folder, "uint16", END) as writer:
        for prompt, completion in rows:
            writer.add(list(prompt.encode()), False)
            writer.add(list(completion.encode()), True)
            writer.end_document()
        writer.finish({**FACTS, "is_rows": True})
    return Prepared((open_store(folder),), None)


def test_an_answer_is_never_without_its_question(tmp_path: Path) -> None:
    samples = trained_on(rows_stored(tmp_path, [("ab", "xyz"), ("c", "v"), ("d", "w"), ("efghijkl", "long")]), 8)
    found = sorted(
        (bytes(t for t in tokens if t < END), [t for t in targets if t != -100], positions)
        for tokens, targets, positions in zip(*as_lists(samples), strict=True)
    )
    # A cut row has 9 tokens, with the target behind the last; "abxyz" with its end and one short row have 9 together.
    assert found == [
        (b"abxyzcv", [*b"xyz", END, *b"v", END], [0, 1, 2, 3, 4, 5, 0, 1]),
        (b"dw", [*b"w", END], [0, 1, 2, 0, 1, 2, 3, 4]),
        (b"efghijkl", [*b"l"], [0, 1, 2, 3, 4, 5, 6, 7]),
    ]


def as_lists(samples: Samples) -> tuple[list[Any], list[Any], list[Any]]:
    batch = samples.batch(range(samples.num_samples))
    assert batch.positions is not None
    return batch.tokens.tolist(), batch.targets.tolist(), batch.positions.tolist()


def test_long_text_among_rows_goes_on_in_another_sample(tmp_path: Path, write_rows: Callable[..., str]) -> None:
    rows = write_rows({"text": "abcdefghijklmnopq"}), write_rows({"prompt": "1", "completion": "2"}, name="b.jsonl")
    prepared = prepare(Settings(train_file=rows), BYTES, tmp_path / "cache", lambda _: None)
    said: list[str] = []
    samples, _ = open_samples(Settings(eval_fraction=0.0), BYTES, prepared, 8, said.append)
    _, targets, _ = as_lists(samples)
    assert sorted(t for row in targets for t in row if t != -100) == sorted([*b"bcdefghijklmnopq", END, *b"2", END])
    assert said == []


def test_preference_rows_stay_together(tmp_path: Path, write_rows: Callable[..., str]) -> None:
    """A sample has two rows: the chosen answer and the rejected one, after the same prompt."""
    rows = write_rows(*({"prompt": f"{n}?", "chosen": "good" * n, "rejected": "bad"} for n in range(1, 9)))
    prepared = prepare(Settings(train_file=(rows,)), BYTES, tmp_path / "cache", lambda _: None)
    train, evaluated = opened(prepared, 12, eval_fraction=0.25)
    assert evaluated is not None
    assert (train.num_samples, evaluated.num_samples) == (6, 2)
    seen = set()
    for samples in (train, evaluated):
        batch = samples.batch(range(samples.num_samples))
        assert (batch.rows_per_sample, batch.positions) == (2, None)
        for chosen, rejected, targets in zip(batch.tokens[::2], batch.tokens[1::2], batch.targets[::2], strict=True):
            prompt = bytes(chosen[:2].tolist())
            assert prompt == bytes(rejected[:2].tolist())
            assert targets[0] == -100
            seen.add(prompt)
            number = int(prompt[:1])
            answer = [*(b"good" * number), END][:11]
            assert [target for target in targets.tolist() if target != -100] == answer
            assert rejected[2:6].tolist() == [*b"bad", END]
        only = batch.with_first_targets(1).targets
        assert torch.equal(only[:2], batch.targets[:2])
        assert (only[2:] == -100).all()
    assert len(seen) == 8
    assert train.padding == pytest.approx(1 - train.num_tokens / (6 * 2 * 12))
    with pytest.raises(ConfigurationError, match="preference rows"):
        require_targets(train, None, lambda _: None)


def test_preference_rows_among_others_are_refused(tmp_path: Path, write_rows: Callable[..., str]) -> None:
    pairs = write_rows({"prompt": "p", "chosen": "c", "rejected": "r"})
    other = write_rows({"text": "t"}, name="other.jsonl")
    for mixed in (
        Settings(train_file=(pairs, other)),
        Settings(train_file=(pairs, other), data_weights=(1.0, 1.0)),
        Settings(train_file=(other,), eval_file=(pairs,)),
    ):
        with pytest.raises(ConfigurationError, match="preference rows"):
            prepare(mixed, BYTES, tmp_path / "cache", lambda _: None)


def test_sources_with_weights(tmp_path: Path, write_rows: Callable[..., str]) -> None:
    names = [write_rows(*({"text": letter * 3} for _ in range(30)), name=f"{letter}.jsonl") for letter in "ab"]
    chosen = Settings(train_file=tuple(names), data_weights=(3.0, 1.0), packing="padded", eval_fraction=0.1)
    prepared = prepare(chosen, BYTES, tmp_path / "cache", lambda _: None)
    train, evaluated = open_samples(chosen, BYTES, prepared, 4, lambda _: None)
    assert evaluated is not None
    assert (train.num_samples, train.draws, train.passes) == (54, (41, 13), [41 / 27, 13 / 27])
    assert evaluated.num_samples == 6
    letters = [int(row[0]) for row in evaluated.batch(evaluated.spread(2)).tokens]
    assert letters == [*b"ab"]
    epoch = train.batch(train.order(54, 54)).tokens[:, 0].tolist()
    assert (epoch.count(ord("a")), epoch.count(ord("b"))) == (41, 13)
    assert unigram_entropy(train) == pytest.approx(
        -sum(share * math.log(share) for share in (41 * 3 / 216, 13 * 3 / 216, 0.25))
    )
    with pytest.raises(ConfigurationError, match="data_weights has 2 numbers for 1 sources"):
        prepare(replace(chosen, train_file=(names[0],)), BYTES, tmp_path / "cache", lambda _: None)
