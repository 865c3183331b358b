"""Answers of a trained model to one prompt, or to all prompts in a file.

A file of prompts has a JSON object with `prompt` or `messages` per line (.jsonl), or a prompt per line (.txt). The
answers are written in the order of the prompts. Until all of them are there, the finished ones are in OUT.partial, in
the order in which they ended. Its first line describes the request, so that the same command can go on with it.
"""

import dataclasses
import hashlib
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NamedTuple

from ..base.errors import ConfigurationError, SaveError, did_you_mean
from ..core.mesh import everyone, init
from ..core.precision import precision_of
from ..core.wire.collectives import exchange
from .data.rows import ANSWERING
from .models.generation import Answer, Prompt, Sampling, generate, tokens_of
from .models.restore import Restorable, find_model_in
from .offload import check_strategy, offload_of

KEYS = ("prompt", "messages", "id")
SUFFIXES = (".jsonl", ".txt")
PROGRESS_S = 10.0


@dataclass(frozen=True, slots=True)
class Request:
    """Options of `shardwise generate`."""

    path: str
    strategy: str
    sampling: Sampling
    prompt: str = ""
    prompts: str | None = None
    out: str | None = None
    batch_size: int = 8
    chat: bool | None = None  # None: if the tokenizer has a template
    tokenizer: str | None = None
    offload: Sequence[str] = ()
    precision: str | None = None
    quantize: str | None = None

    @classmethod
    def from_json(cls, text: str) -> "Request":
        values = json.loads(text)
        sampling = values.pop("sampling")
        return cls(**values, sampling=Sampling(**{**sampling, "stop": tuple(sampling["stop"])}))

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))


class Row(NamedTuple):
    given: dict[str, Any]
    prompt: Prompt


@dataclass(frozen=True, slots=True)
class Prepared:
    """A request whose options, model and prompts are checked, before any weight is read."""

    request: Request
    model: Restorable
    words: dict[str, Any]  # for `Restorable.load`
    rows: list[Row]
    is_chat: bool

    @property
    def facts(self) -> dict[str, Any]:
        """All that decides the answers."""
        given = hashlib.sha256(json.dumps([row.given for row in self.rows]).encode()).hexdigest()
        options = json.loads(self.request.to_json())
        options = {key: options[key] for key in ("sampling", "chat", "tokenizer", "precision")}
        options["quantize"] = self.model.quantized or self.request.quantize
        return {"model": str(self.model.place.resolve()), **options, "prompts": given}


def prepare(request: Request) -> Prepared:
    offload = offload_of(request.offload)
    wrong = next((move for move in offload.moves if not move.startswith("params=")), None)
    if wrong is not None:
        raise ConfigurationError(f"offload {wrong!r}: generating has nothing but parameters: write params=host")
    # A layout moves parameters only with the optimizer, of which there is none.
    moves = [*request.offload, *(["optimizer=host"] if offload.moves else [])]
    check_strategy(request.strategy, moves, quantize=request.quantize)
    offload.require_folder()
    if request.precision is not None:
        precision_of(request.precision, None)
    strategy = offload_of(moves).applied_to(request.strategy)
    words = {"strategy": strategy, "disk_path": offload.folder}
    words |= {"precision": request.precision, "quantize": request.quantize}
    given = [("the prompt", {"prompt": request.prompt})]
    if request.prompts is not None:
        given = list(_rows_in(Path(request.prompts)))
        if request.out is None:
            raise ConfigurationError("--prompts needs a file for the answers: --out answers.jsonl")
        if Path(request.out).exists():
            raise ConfigurationError(f"{request.out} exists: remove it, or name another file for the answers")
        if not Path(request.out).parent.is_dir():
            raise ConfigurationError(f"{request.out}: its folder is not there: make it, or name another one")
    model = find_model_in(Path(request.path), request.tokenizer)
    if request.quantize and model.quantized not in (None, request.quantize):
        stored = f"the weights of {request.path} are stored as {model.quantized}"
        raise ConfigurationError(f"--quantize {request.quantize}: {stored}: leave it out")
    is_chat = model.tokenizer.template is not None if request.chat is None else request.chat
    is_chat = is_chat and bool(request.prompt or request.prompts)  # without a prompt, a document begins
    rows, most = [], model.facts.max_seq  # with the answer
    for number, (where, row) in enumerate(given):
        if "messages" in row and request.chat is False:
            raise ConfigurationError(f"{where}: messages are a chat: leave --raw out")
        ids, stop_id = tokens_of(model.tokenizer, row.get("messages", row.get("prompt", "")), is_chat)
        if len(ids) >= most:
            raise ConfigurationError(f"{where} has {len(ids)} tokens, and the model takes {most}: make it shorter")
        rows.append(Row(row, Prompt(ids, model.stop_ids | {stop_id}, number)))
    return Prepared(request, model, words, rows, is_chat)


def _rows_in(file: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the rows of a file, each with its place. Blank lines are skipped."""
    if file.suffix.lower() not in SUFFIXES:
        raise ConfigurationError(f"{file}: prompts are in a file that ends in {' or '.join(SUFFIXES)}")
    try:
        lines = file.read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"{file} cannot be read: {getattr(error, 'strerror', None) or error}") from None
    places = [(f"{file}:{number}", line) for number, line in enumerate(lines, 1) if line.strip()]
    if not places:
        raise ConfigurationError(f"{file}: there is no prompt in it")
    for where, line in places:
        if file.suffix.lower() == ".txt":
            yield where, {"prompt": line.rstrip("\r")}
            continue
        try:
            row = json.loads(line)
            problem = _problem(row)
        except (ValueError, RecursionError) as error:
            problem = f"not JSON ({error})"
        if problem:
            raise ConfigurationError(f"{where}: {problem}")
        yield where, row


def _problem(row: Any) -> str:
    """Return why a row cannot be used, or nothing."""
    if not isinstance(row, dict):
        return f"a JSON {type(row).__name__}, but a row is an object with a prompt or messages"
    unknown = [key for key in row if key not in KEYS]
    if unknown:
        return f"unknown key {unknown[0]!r}; {did_you_mean(unknown[0], KEYS)}"
    if ("prompt" in row) == ("messages" in row):
        return "it has a prompt and messages: leave one out" if "prompt" in row else "it has no prompt and no messages"
    messages = row.get("messages", [{"role": "user", "content": row.get("prompt")}])
    messages = [part if isinstance(part, dict) else {} for part in messages] if isinstance(messages, list) else []
    texts = [part.get(key) for part in messages for key in ("role", "content")]
    if not texts or not all(isinstance(text, str) for text in texts):
        what = "a prompt is a text" if "prompt" in row else "each of its messages needs a role and a content, as texts"
        return f"{what}, not {json.dumps(row.get('prompt', row.get('messages')))[:80]}"
    if messages[-1]["role"] == ANSWERING:
        return f"its last message is the {ANSWERING}'s: leave it out, to get another answer"
    if not messages[-1]["content"].strip():
        return "its prompt is empty"
    try:
        json.dumps(messages, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return "half a surrogate pair, which is not a character"
    return ""


def answer_prompt(prepared: Prepared, is_stopped: Callable[[], bool]) -> str | None:
    """Return the answer to the only prompt, or None if it was stopped. All ranks call it."""
    return next((answer.text for answer in _generate(prepared, prepared.rows, is_stopped)), None)


def answer_file(prepared: Prepared, is_stopped: Callable[[], bool]) -> bool:
    """Write the answers to all prompts. Return False if it was stopped before. All ranks call it; rank 0 writes."""
    init()
    world, rows, out = everyone(), prepared.rows, Path(str(prepared.request.out))
    partial = out.with_name(f"{out.name}.partial")
    done = exchange(world, _finished(partial, prepared.facts) if world.index == 0 else set())[0]
    left = [row for number, row in enumerate(rows) if number not in done]
    if world.index:
        return sum(1 for _ in _generate(prepared, left, is_stopped)) == len(left)
    num_done, num_tokens = len(done), 0
    try:
        with partial.open("a", encoding="utf-8") as file:
            if not file.tell():
                _write(file, prepared.facts)
            answers = _generate(prepared, left, is_stopped)
            began = shown = time.monotonic()
            for answer in answers:
                given, (number, text, own_tokens, end) = rows[answer.number].given, answer
                _write(file, {"row": number, **given, "answer": text, "num_tokens": own_tokens, "end": end})
                num_done, num_tokens, now = num_done + 1, num_tokens + own_tokens, time.monotonic()
                if now - shown > PROGRESS_S or num_done == len(rows):
                    shown = now
                    _say(f"{num_done:,} of {len(rows):,} answers, {num_tokens / (now - began):,.1f} tokens/s")
        if num_done < len(rows):
            _say(f"{num_done:,} of {len(rows):,} answers are in {partial}; the same command goes on from there")
            return False
        _complete(partial, out)
    except OSError as error:
        raise SaveError(f"{partial} cannot be written: {error.strerror or error}") from error
    return True


def _generate(prepared: Prepared, rows: Sequence[Row], is_stopped: Callable[[], bool]) -> Iterator[Answer]:
    """Load the model, and return the answers, each when it ends."""
    if not rows:
        return iter(())
    init()
    stored, request = prepared.model, prepared.request
    model, prompts, max_seq = stored.load(**prepared.words), (row.prompt for row in rows), stored.facts.max_seq
    words: dict[str, Any] = {"max_seq": max_seq, "batch_size": request.batch_size, "is_stopped": is_stopped}
    return generate(model, stored.tokenizer, prompts, request.sampling, **words)


def _finished(partial: Path, facts: dict[str, Any]) -> set[int]:
    """Return the rows that an earlier command has finished, and remove a line that it has not."""
    if not partial.exists():
        return set()
    with partial.open("r+b") as file:
        whole = [line for line in file if line.endswith(b"\n")]
        file.truncate(sum(map(len, whole)))
    with suppress(ValueError, KeyError, TypeError):
        first, *answers = [json.loads(line) for line in whole] or [facts]
        if first == facts:
            return {answer["row"] for answer in answers}
    raise ConfigurationError(
        f"{partial} has answers to another request (other prompts, model or sampling): remove it, or name another --out"
    )


def _complete(partial: Path, out: Path) -> None:
    """Write the answers in the order of their rows, and remove what was written until then."""
    lines = map(json.loads, partial.read_text(encoding="utf-8").split("\n")[1:-1])
    answers = {answer.pop("row"): answer for answer in lines}
    draft = out.with_name(f"{out.name}.draft")
    with draft.open("w", encoding="utf-8") as file:
        for _, answer in sorted(answers.items()):
            _write(file, answer)
    draft.replace(out)
    partial.unlink()


def _write(file: IO[str], row: dict[str, Any]) -> None:
    file.write(json.dumps(row, ensure_ascii=False) + "\n")
    file.flush()


def _say(text: str) -> None:
    print(f"shardwise: {text}", file=sys.stderr, flush=True)
