"""Text generation: many prompts in one batch, with a cache of keys and values.

A row of the batch is one prompt and what was generated after it. When a row ends, the next prompt takes its place: its
tokens go through the model once, together with those of other new rows, and its keys and values are put next to those
of the batch. Shorter rows are padded in front, so that all rows grow at the end.

The caches are those of transformers, and a small one of the in-tree transformer. Windows of attention are left to the
model's masks. Models with another state (recurrent ones) have no cache here: they compute the whole text each time.
"""

import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from types import SimpleNamespace
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...base.errors import ConfigurationError
from ...core.engine.guards import find_engine
from ...core.wire.collectives import broadcast_from_first
from ..data.tokenizer import Message, Tokenizer
from ..model import LayerCache, Transformer
from .headloss import path_of

_CONTEXT = 8  # tokens before a text with which it is decoded: a first space may depend on them


@dataclass(frozen=True, slots=True)
class Sampling:
    """Rule for choosing tokens, and for the end. Temperature 0: the most likely token; top_k 0: all are candidates."""

    temperature: float = 0.8
    top_k: int = 50
    top_p: float = 1.0
    seed: int = 0
    max_new_tokens: int = 200
    stop: tuple[str, ...] = ()  # texts that end an answer, and are not part of it

    def __post_init__(self) -> None:
        if self.temperature < 0 or self.top_k < 0:
            raise ConfigurationError(f"temperature {self.temperature:g} and top_k {self.top_k} must not be negative")
        if not 0 < self.top_p <= 1:
            raise ConfigurationError(f"top_p {self.top_p:g} is a probability: above 0, at most 1")
        if "" in self.stop:
            raise ConfigurationError("stop: an empty text would end every answer at its beginning")

    def choose(self, logits: Tensor, generator: torch.Generator) -> int:
        """Choose one of the tokens with these logits, on the host."""
        num = min(self.top_k or logits.numel(), logits.numel())
        values, tokens = logits.topk(num) if num < logits.numel() else logits.sort(descending=True)
        weights = (values / self.temperature).softmax(0)
        weights[weights.cumsum(0) - weights >= self.top_p] = 0  # those before it have the probability already
        return int(tokens[torch.multinomial(weights, 1, generator=generator)])


@dataclass(frozen=True, slots=True)
class Prompt:
    ids: Sequence[int]
    stop_ids: frozenset[int]  # tokens that end the answer
    number: int = 0  # with the seed, it decides the random numbers, whatever shares the batch


class Answer(NamedTuple):
    number: int
    text: str
    num_tokens: int
    end: Literal["stop", "length"]


@dataclass(slots=True)
class _Row:
    prompt: Prompt
    generator: torch.Generator
    ids: list[int] = field(default_factory=list)
    end: Literal["", "stop", "length"] = ""

    def add(self, token: int, tokenizer: Tokenizer, sampling: Sampling, max_seq: int) -> None:
        if token in self.prompt.stop_ids:
            self.end = "stop"
            return
        self.ids.append(token)
        if sampling.stop:
            # Decoding all of the text for every token would take long. A token has at least one byte of it.
            tail = tokenizer.decode(self.ids[-max(len(word.encode()) for word in sampling.stop) - _CONTEXT :])
            if any(word in tail and word in self.text(tokenizer) for word in sampling.stop):
                self.end = "stop"
                return
        if len(self.ids) == sampling.max_new_tokens or len(self.prompt.ids) + len(self.ids) >= max_seq:
            self.end = "length"

    def text(self, tokenizer: Tokenizer, stop: Sequence[str] = ()) -> str:
        context = list(self.prompt.ids[-_CONTEXT:])
        before, both = tokenizer.decode(context), tokenizer.decode([*context, *self.ids])
        text = both.removeprefix(before) if both.startswith(before) else tokenizer.decode(self.ids)
        return text[: min((text.find(word) for word in stop if word in text), default=len(text))]


def generate(
    model: nn.Module,
    tokenizer: Tokenizer,
    prompts: Iterable[Prompt],
    sampling: Sampling,
    *,
    max_seq: int,
    batch_size: int = 8,
    is_stopped: Callable[[], bool] = lambda: False,
) -> Iterator[Answer]:
    """Yield the answers to prompts, each when it ends. A prompt must be shorter than `max_seq`.

    All ranks of a sharded model must iterate over the same prompts; all get the same answers. If `is_stopped` returns
    True on rank 0, the iteration ends, and unfinished answers are lost.
    """
    waiting, rows, batch = iter(prompts), list[_Row](), _Batch(model, tokenizer.end_id)
    was_training = model.training
    model.eval()
    try:
        while True:
            new = []
            for prompt in islice(waiting, batch_size - len(rows)):
                seed = (sampling.seed + prompt.number * 1_000_003) % 2**63
                new.append(_Row(prompt, torch.Generator().manual_seed(seed)))
            if new:
                chosen, logits = new, batch.join([row.prompt.ids for row in new])
                rows += new
            elif rows:
                chosen, logits = rows, batch.step([row.ids[-1] for row in rows])
            else:
                return
            # The model's vocabulary may be padded: choose only among the tokenizer's ids.
            tokens = _choose(model, logits[:, : tokenizer.vocab_size], chosen, sampling, is_stopped)
            if not tokens:
                return
            for row, token in zip(chosen, tokens, strict=True):
                row.add(token, tokenizer, sampling, max_seq)
            for row in rows:
                if row.end:
                    yield Answer(row.prompt.number, row.text(tokenizer, sampling.stop), len(row.ids), row.end)
            if any(row.end for row in rows):
                batch.keep([at for at, row in enumerate(rows) if not row.end])
                rows = [row for row in rows if not row.end]
    finally:
        model.train(was_training)


def samples(
    model: nn.Module,
    tokenizer: Tokenizer,
    prompts: Sequence[str],
    sampling: Sampling,
    max_seq: int,
    is_chat: bool = False,
) -> list[str]:
    """Return the texts that a model generates after prompts, or its answers. Of long prompts it sees the end."""
    given = [tokens_of(tokenizer, prompt, is_chat) for prompt in prompts]
    rows = [Prompt(ids[1 - max_seq :], frozenset([tokenizer.end_id, end]), at) for at, (ids, end) in enumerate(given)]
    return [answer.text for answer in sorted(generate(model, tokenizer, rows, sampling, max_seq=max_seq))]


def tokens_of(tokenizer: Tokenizer, prompt: str | Sequence[Message], is_chat: bool) -> tuple[list[int], int]:
    """Return the tokens of a prompt, or of the messages of a chat, and the token that ends the answer."""
    if isinstance(prompt, str) and not is_chat:
        return tokenizer.encode(prompt) or [tokenizer.end_id], tokenizer.end_id
    return tokenizer.question([{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt)


def _choose(
    model: nn.Module, logits: Tensor, rows: Sequence[_Row], sampling: Sampling, is_stopped: Callable[[], bool]
) -> list[int]:
    """Return the next token of each row, or nothing if the generation is to stop.

    Logits may differ in the last bit between ranks, but all must continue with one text: rank 0's.
    """
    engine = find_engine(model)
    if engine is not None and engine.mesh.rank:
        tokens = [0] * len(rows)
    elif sampling.temperature == 0:
        tokens = logits.argmax(1).tolist()
    else:
        pairs = zip(logits.float().cpu(), rows, strict=True)
        tokens = [sampling.choose(each, row.generator) for each, row in pairs]
    stops = is_stopped()
    if engine is not None and engine.mesh.world_size > 1:
        chosen = torch.tensor([*tokens, stops], device=engine.mesh.device)
        broadcast_from_first(engine.mesh.world, chosen, "tokens")
        *tokens, stops = chosen.tolist()
    return [] if stops else tokens


class _Batch:
    """The rows that go through the model together, and their cache.

    With a cache, row i of it has `lengths[i]` tokens behind padding. Without one, `texts` has the tokens of the rows.
    """

    def __init__(self, model: nn.Module, fill_id: int) -> None:
        self._model: Any = model
        self._fill_id = fill_id
        engine = find_engine(model)
        self._device = next(model.parameters()).device if engine is None else engine.mesh.device
        self._inner: Any = getattr(model, "get_base_model", lambda: model)()  # peft's wrapper passes on all arguments
        self._is_in_tree = path_of(model).how == "in-tree"
        self._accepted = inspect.signature(self._inner.forward).parameters
        self._new_cache = self._find_cache()
        self._cache: Any = None
        self._lengths: list[int] = []
        self._texts: list[list[int]] = []

    def _find_cache(self) -> Callable[[], Any] | None:
        """Return a function that makes an empty cache, or None if the model can have none."""
        if self._is_in_tree:
            inner = self._inner
            if not isinstance(inner, Transformer):
                return None
            return lambda: SimpleNamespace(layers=[LayerCache() for _ in inner.blocks])
        from transformers import cache_utils as caches

        plain = {caches.DynamicLayer, caches.DynamicSlidingWindowLayer}
        kinds = {type(layer) for layer in caches.DynamicCache(config=self._inner.config).layers}
        has_state = getattr(self._inner, "_is_stateful", False) or "past_key_values" not in self._accepted
        # Without a config all layers keep all tokens, so rows can be padded; masks limit the windows.
        return None if has_state or kinds - plain else caches.DynamicCache

    def join(self, texts: Sequence[Sequence[int]]) -> Tensor:
        """Add rows, and return the logits behind each text, (texts, vocabulary)."""
        if self._new_cache is None:
            self._texts += [[*text] for text in texts]
            return self._run_whole(self._texts[-len(texts) :])
        lengths, cache, width = [len(text) for text in texts], self._new_cache(), max(map(len, texts))
        padded = [[self._fill_id] * (width - len(text)) + [*text] for text in texts]
        logits = self._run(torch.tensor(padded, device=self._device), lengths, cache)
        if self._cache is None:
            self._cache, self._lengths = cache, lengths
            return logits
        both = max(width, *self._lengths)
        for layer, new in zip(self._cache.layers, cache.layers, strict=True):
            for name in ("keys", "values"):
                parts = getattr(layer, name), getattr(new, name)
                if parts[0] is not None:  # layers may share the keys and values of an earlier one
                    setattr(layer, name, torch.cat([F.pad(part, (0, 0, both - part.shape[2], 0)) for part in parts]))
        self._lengths += lengths
        return logits

    def step(self, tokens: Sequence[int]) -> Tensor:
        """Add a token to each row, and return the logits behind it, (rows, vocabulary)."""
        if self._new_cache is None:
            for text, token in zip(self._texts, tokens, strict=True):
                text.append(token)
            return self._run_whole(self._texts)
        self._lengths = [length + 1 for length in self._lengths]
        return self._run(torch.tensor(tokens, device=self._device)[:, None], self._lengths, self._cache)

    def keep(self, rows: Sequence[int]) -> None:
        """Remove all other rows, and padding that no row needs any longer."""
        if self._new_cache is None:
            self._texts = [self._texts[row] for row in rows]
            return
        self._lengths = [self._lengths[row] for row in rows]
        width = max(self._lengths, default=0)
        for layer in self._cache.layers if rows else ():
            if layer.keys is not None:
                layer.keys, layer.values = layer.keys[rows, :, -width:], layer.values[rows, :, -width:]
        self._cache = self._cache if rows else None

    def _run(self, tokens: Tensor, lengths: Sequence[int], cache: Any) -> Tensor:
        width, mask = max(lengths), None
        first = width - torch.tensor(lengths, device=self._device)[:, None]  # the column of a row's first token
        columns = torch.arange(width, device=self._device)
        if min(lengths) < width:
            mask = columns >= first
        positions = (columns[-tokens.shape[1] :] - first).clamp(min=0)
        if self._is_in_tree:
            return self._forward(tokens, positions=positions, cache=cache.layers, attention_mask=mask)[:, -1]
        words = {"position_ids": positions, "logits_to_keep": 1}
        words = {name: value for name, value in words.items() if name in self._accepted}
        words |= {"attention_mask": mask, "past_key_values": cache, "use_cache": True}
        return self._forward(input_ids=tokens, **words).logits[:, -1]

    def _run_whole(self, texts: Sequence[Sequence[int]]) -> Tensor:
        """Compute without a cache. Padding is at the end, where causal attention hides it from the text."""
        width = max(map(len, texts))
        padded = [[*text] + [self._fill_id] * (width - len(text)) for text in texts]
        tokens = torch.tensor(padded, device=self._device)
        output = self._forward(tokens) if self._is_in_tree else self._forward(input_ids=tokens).logits
        return output[range(len(texts)), [len(text) - 1 for text in texts]]

    def _forward(self, *args: Any, **words: Any) -> Any:
        # Compiled blocks would be compiled again for new lengths.
        with torch.no_grad(), torch.compiler.set_stance("force_eager"):
            output = self._model(*args, **words)
        if (engine := find_engine(self._model)) is not None:
            engine.gathers.start_first()  # for the next token, while this one is chosen
        return output
