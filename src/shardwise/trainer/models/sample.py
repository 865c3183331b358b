"""Text generation, token by token.

The whole text goes through the model for every token, without a cache of keys and values, so that any model works,
sharded or not. The row always has its full length, padded with tokens that causal attention hides from the text before
them: with one shape, compiled blocks are compiled once.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ...base.errors import ConfigurationError
from ...core.engine.guards import find_engine
from ...core.wire.collectives import broadcast_from_first
from ..data.tokenizer import Tokenizer
from .headloss import path_of


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the next token is chosen. Temperature 0 takes the most likely one; top_k 0 considers all of them."""

    temperature: float = 0.8
    top_k: int = 50
    seed: int = 0

    def __post_init__(self) -> None:
        if self.temperature < 0 or self.top_k < 0:
            raise ConfigurationError(f"temperature {self.temperature:g} and top_k {self.top_k} must not be negative")

    def choose(self, logits: Tensor, generator: torch.Generator) -> int:
        if self.temperature == 0:
            return int(logits.argmax())
        if self.top_k:
            values, tokens = logits.topk(min(self.top_k, logits.numel()))
        else:
            values, tokens = logits, torch.arange(logits.numel())
        chosen = torch.multinomial((values / self.temperature).softmax(0), 1, generator=generator)
        return int(tokens[chosen])


@torch.no_grad()
def sample(
    model: nn.Module,
    tokenizer: Tokenizer,
    prompt: str,
    num_tokens: int,
    sampling: Sampling,
    *,
    max_seq: int,
    stop_id: int | None = None,
) -> str:
    """Generate text after the prompt: at most `num_tokens` tokens, fewer if the model ends the document or `stop_id`.

    All ranks of a sharded model must call it, and get the same text. An empty prompt is the beginning of a document.
    """
    prompted = tokenizer.encode(prompt) or [tokenizer.end_id]
    generator = torch.Generator().manual_seed(sampling.seed)
    window = min(max_seq, len(prompted) + num_tokens)
    generated: list[int] = []
    was_training = model.training
    model.eval()
    try:
        for _ in range(num_tokens):
            recent = [*prompted, *generated][-window:]
            # Vocabularies of models are padded: only ids of the tokenizer can be chosen.
            logits = _logits(model, recent, window, tokenizer.end_id)[: tokenizer.vocab_size]
            token = _from_first_rank(model, sampling.choose(logits, generator))
            if token in (tokenizer.end_id, stop_id):
                break
            generated.append(token)
    finally:
        model.train(was_training)
    return tokenizer.decode(generated)


def _logits(model: nn.Module, tokens: list[int], window: int, filler: int) -> Tensor:
    """Logits of the next token, (vocab,), in fp32 on the host."""
    row = torch.tensor([tokens + [filler] * (window - len(tokens))], device=next(model.parameters()).device)
    out = model(row) if path_of(model).how == "in-tree" else model(input_ids=row).logits
    return out[0, len(tokens) - 1].float().cpu()


def _from_first_rank(model: nn.Module, token: int) -> int:
    """Rank 0's choice: logits may differ in the last bit, and ranks must not diverge."""
    engine = find_engine(model)
    if engine is None:
        return token
    chosen = torch.tensor([token], device=engine.mesh.device)
    broadcast_from_first(engine.mesh.world, chosen)
    return int(chosen)
