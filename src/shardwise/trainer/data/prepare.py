"""Tokenise the data of a run into token stores, once: a second start in the same run folder reuses them.

The name of a store's folder is a hash of the data's paths and modification times, and of everything else that affects
the content. So the store is found without reading the data again. Its digest depends on the content only, not on paths.

A store is written under a temporary name and renamed when it is complete. If two processes write the same store, the
later one discards its own. No process group is needed: the launcher prepares the data before ranks exist, and ranks
call the same function to find it.
"""

import hashlib
import json
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from ...base.errors import ConfigurationError
from ..settings import Settings
from .rows import PREFERENCE, Document, Reading
from .sources import TOKENS, find_files, kind_of, load_dataset, manual, read, read_dataset
from .token_store import Store, Writer, adopt, is_store, open_store
from .tokenizer import Segments, Tokenizer

Say = Callable[[str], None]  # prints a line

_FORMAT = 4  # version of the store's format; part of the hash
_NUM_NAMED = 10  # bad rows that are printed; others are only counted
_BATCH_CHARACTERS = 2**22
_SECONDS_BETWEEN_LINES = 10.0


@dataclass(frozen=True, slots=True)
class Prepared:
    train: tuple[Store, ...]  # one, or one of each source if the sources have weights
    eval: Store | None  # None: no eval_file

    @property
    def digest(self) -> str:
        """A hash of the content of the training data."""
        digests = [store.digest for store in self.train]
        return digests[0] if len(digests) == 1 else hashlib.sha256(" ".join(digests).encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class _Input:
    what: str  # for messages
    identity: list[Any]  # for the hash that names the store's folder
    token_files: tuple[Path, ...]  # .bin files, which are used in place; () for text and rows
    documents: Iterable[Document]  # of text and rows, read lazily; not used for token files
    reading: Reading


def prepare(
    settings: Settings, tokenizer: Tokenizer, folder: Path, say: Say, vocab_size: int | None = None
) -> Prepared:
    """Write stores of the training data and of eval_file under `folder`. `say` prints bad rows and progress.

    `vocab_size`: the model's; ids in token files must be below it. None: take the tokenizer's.
    """
    reading = Reading(settings.columns, settings.train_roles)
    inputs = _train_inputs(settings, reading)
    evaluated = _file_input("eval_file", settings.eval_file, settings, reading) if settings.eval_file else None
    limit = tokenizer.vocab_size if vocab_size is None else vocab_size
    train = tuple(_prepare(given, settings, tokenizer, limit, folder, say) for given in inputs)
    prepared = Prepared(train, _prepare(evaluated, settings, tokenizer, limit, folder, say) if evaluated else None)
    kinds = {store.facts["is_pairs"] for store in (*train, *filter(None, [prepared.eval]))}
    if len(kinds) > 1:
        raise ConfigurationError(
            "some of the data are preference rows (chosen, rejected) and some are not: leave one out"
        )
    for name in settings.columns.keys() - {name for store in train for name in store.facts["columns"]}:
        raise ConfigurationError(f"columns.{name}: no row of the training data has {settings.columns[name]!r}")
    return prepared


def _train_inputs(settings: Settings, reading: Reading) -> list[_Input]:
    """The sources of the training data: one by one if they have weights, else as one."""
    names = settings.train_file or settings.dataset
    weights = settings.data_weights
    if weights and len(weights) != len(names):
        raise ConfigurationError(f"data_weights has {len(weights)} numbers for {len(names)} sources: give one for each")
    groups = [(name,) for name in names] if weights else [names]
    if settings.dataset:
        return [_dataset_input(group, settings, reading) for group in groups]
    if settings.train_file:
        return [_file_input("train_file", group, settings, reading) for group in groups]
    topics = manual()
    name = "the embedded text"
    return [_Input(name, [topics], (), [Document(name, ((topic, True),)) for topic in topics], reading)]


def _dataset_input(names: Sequence[str], settings: Settings, reading: Reading) -> _Input:
    opened = [(name, load_dataset(name, settings.dataset_split)) for name in names]
    # The files too, not only the name: a dataset can change under the same name.
    files = [[Path(entry["filename"]) for entry in dataset.cache_files] for _, dataset in opened]
    parts = [[name, len(each), *map(_identity, found)] for (name, each), found in zip(opened, files, strict=True)]
    documents = chain.from_iterable(read_dataset(dataset, name, reading) for name, dataset in opened)
    return _Input(f"dataset {', '.join(names)}", [settings.dataset_split, parts], (), documents, reading)


def _file_input(setting: str, names: Sequence[str], settings: Settings, reading: Reading) -> _Input:
    paths: list[Path] = []
    for name in names:
        try:
            paths += find_files(name)
        except ValueError as error:
            raise ConfigurationError(f"{setting} {name}: {error}") from None
    what = f"{setting} {', '.join(names)}"
    token_files = tuple(path for path in paths if kind_of(path)[0] == TOKENS)
    if token_files not in ((), tuple(paths)):
        raise ConfigurationError(f"{what}: token files cannot be mixed with text or rows")
    identity = [settings.token_dtype if token_files else None, *map(_identity, paths)]
    documents = chain.from_iterable(read(path, reading) for path in paths)
    return _Input(what, identity, token_files, documents, reading)


def _identity(path: Path) -> list[Any]:
    status = path.stat()
    return [str(path.resolve()), status.st_size, status.st_mtime_ns]


def _prepare(given: _Input, settings: Settings, tokenizer: Tokenizer, limit: int, folder: Path, say: Say) -> Store:
    """Write the store of an input, unless it exists, and open it."""
    # The ids of token files were compared with the limit, so their store is valid for this limit only.
    largest = limit if given.token_files else tokenizer.vocab_size
    read_as = None if given.token_files else [given.reading.columns, given.reading.roles]
    decides = [_FORMAT, given.identity, read_as, tokenizer.fingerprint(), largest, tokenizer.end_id]
    target = folder / hashlib.sha256(json.dumps(decides).encode()).hexdigest()[:16]
    try:
        if not is_store(target):
            folder.mkdir(parents=True, exist_ok=True)
            with TemporaryDirectory(".partial", f"{target.name}-", folder, ignore_cleanup_errors=True) as partial:
                _write(Path(partial), given, settings, tokenizer, limit, say)
                Path(partial).chmod(0o755)  # a temporary folder is restricted to one user
                try:
                    Path(partial).rename(target)
                except OSError:
                    if not is_store(target):  # else another process was faster, with the same content
                        raise
    except OSError as error:
        raise ConfigurationError(f"{given.what}: cannot be tokenised into {folder}: {error}") from error
    store = open_store(target)
    # Print bad rows also if an earlier run wrote the store: they are missing from it, too.
    _say_bad(given, store.facts["bad_rows"], store.facts["num_bad_rows"], settings.max_bad_rows, say)
    return store


def _write(folder: Path, given: _Input, settings: Settings, tokenizer: Tokenizer, limit: int, say: Say) -> None:
    if given.token_files:
        say(f"reading through {given.what}: documents end with token {tokenizer.end_id} of tokenizer {tokenizer.name}")
        facts = {"bad_rows": [], "num_bad_rows": 0, "is_rows": False, "is_pairs": False, "formats": {}, "columns": []}
        adopt(folder, given.token_files, settings.token_dtype, limit, tokenizer.end_id, facts)
        return
    bad: list[str] = []
    num_bad = 0
    is_rows = has_chats = False
    forms: Counter[str] = Counter()
    began = said = time.monotonic()
    # The dtype depends on the tokenizer, not on the model, so that the digest does not depend on the model.
    dtype = "uint16" if tokenizer.vocab_size <= 2**16 else "uint32"
    with Writer(folder, dtype, tokenizer.end_id) as writer:
        for document, segments in _tokenised(given.documents, tokenizer):
            if document.problem:
                num_bad += 1
                if num_bad <= _NUM_NAMED:
                    bad.append(f"{document.where}: {document.problem}")
                if num_bad > settings.max_bad_rows:
                    _say_bad(given, bad, num_bad, settings.max_bad_rows, say)
                continue
            if document.messages and tokenizer.template is None and not has_chats:
                has_chats = True
                say(f"tokenizer {tokenizer.name} has no chat template: messages are 'role:' with the content below")
            for part in segments:
                for ids, trained in part:
                    writer.add(ids, trained)
                if document.is_last:
                    writer.end_document()
            is_rows = is_rows or document.is_row
            forms[document.form] += document.is_last
            if len(forms) > 1 and PREFERENCE in forms:
                raise ConfigurationError(
                    f"{document.where}: preference rows cannot be mixed with other data in one run"
                )
            if time.monotonic() - said > _SECONDS_BETWEEN_LINES:
                said = time.monotonic()
                say(f"tokenising {given.what}: {writer.num_tokens:,} tokens so far")
        if writer.num_documents == 0:
            first = f": none of its {num_bad} rows can be read, the first {bad[0]}" if bad else " holds no document"
            raise ConfigurationError(f"{given.what}{first}")
        facts = {"bad_rows": bad, "num_bad_rows": num_bad, "is_rows": is_rows, "is_pairs": PREFERENCE in forms}
        writer.finish({**facts, "formats": forms, "columns": sorted(given.reading.renamed)})
        totals = f"{writer.num_documents:,} documents, {writer.num_tokens:,} tokens"
        say(f"tokenised {given.what}: {totals} in {time.monotonic() - began:.1f} s")


def _tokenised(documents: Iterable[Document], tokenizer: Tokenizer) -> Iterator[tuple[Document, list[Segments]]]:
    """Yield each document with its token segments, in order; a preference row has those of both answers.

    Tokenizers encode the texts of a batch in parallel.
    """
    batch: list[Document] = []
    num_characters = 0
    for document in documents:
        batch.append(document)
        num_characters += sum(len(text) for side in document.sides for text in side.all_texts)
        if num_characters >= _BATCH_CHARACTERS:
            yield from _batch_tokenised(batch, tokenizer)
            batch, num_characters = [], 0
    yield from _batch_tokenised(batch, tokenizer)


def _batch_tokenised(batch: list[Document], tokenizer: Tokenizer) -> Iterator[tuple[Document, list[Segments]]]:
    texts = [text for document in batch for side in document.sides for text, _ in side.texts]
    encoded = iter(tokenizer.encode_batch(texts) if texts else [])
    for document in batch:
        parts = [[(next(encoded), is_trained) for _, is_trained in side.texts] for side in document.sides]
        if document.messages:
            try:
                parts = [tokenizer.render(side.messages, side.tools) for side in document.sides]
            except ConfigurationError as error:
                yield Document(document.where, problem=str(error)), []
                continue
        yield document, parts


def _say_bad(given: _Input, named: list[str], num_bad: int, limit: int, say: Say) -> None:
    for line in named:
        say(line)
    if num_bad > len(named):
        say(f"and {num_bad - len(named)} more bad rows")
    if num_bad > limit:
        why = f"more than {limit} rows cannot be read (max_bad_rows), the first {named[0]}"
        raise ConfigurationError(f"{given.what}: {why}")
