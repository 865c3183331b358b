"""Text that a model makes up, token by token.

The plain loop: the whole text goes through the model for every token, without a cache of keys and values, so that any
model will do, and a sharded one like a whole one. The row always has its full length, filled up behind with tokens that
nothing before them can see: one shape, so that compiled blocks are not compiled again for every token.
"""

import torch
from torch import Tensor, nn

from ...base.errors import ConfigurationError
from ...core.engine.guards import find_engine
from ...core.wire.collectives import broadcast_from_first
from ..data.tokenizer import Tokenizer
from .headloss import path_of


@torch.no_grad()
def sample(
    model: nn.Module,
    tokenizer: Tokenizer,
    prompt: str,
    num_tokens: int,
    *,
    temperature: float = 0.8,
    top_k: int = 50,
    seed: int = 0,
    max_seq: int,
    stop_id: int | None = None,
) -> str:
    """What comes after the prompt: at most `num_tokens` tokens, fewer where the model ends the document or `stop_id`
    comes.

    Every rank of a sharded model calls alike and gets the same text. temperature 0 takes the likeliest token; top_k 0
    leaves all of them in the running. An empty prompt is the beginning of a document.
    """
    if temperature < 0 or top_k < 0:
        raise ConfigurationError(f"temperature {temperature:g} and top_k {top_k} must not be negative")
    prompted = tokenizer.encode(prompt) or [tokenizer.end_id]
    generator = torch.Generator().manual_seed(seed)
    window = min(max_seq, len(prompted) + num_tokens)
    made: list[int] = []
    was_training = model.training
    model.eval()
    try:
        for _ in range(num_tokens):
            recent = [*prompted, *made][-window:]
            # Vocabularies of models are padded: only ids that the tokenizer has can be chosen.
            logits = _logits(model, recent, window, tokenizer.end_id)[: tokenizer.vocab_size]
            token = _agreed(model, _choice(logits, temperature, top_k, generator))
            if token in (tokenizer.end_id, stop_id):
                break
            made.append(token)
    finally:
        model.train(was_training)
    return tokenizer.decode(made)


def _logits(model: nn.Module, tokens: list[int], window: int, filler: int) -> Tensor:
    """Of the token after the last, (vocab,), in fp32 on the host."""
    row = torch.tensor([tokens + [filler] * (window - len(tokens))], device=_device_of(model))
    out = model(row) if path_of(model).how == "in-tree" else model(input_ids=row).logits
    return out[0, len(tokens) - 1].float().cpu()


def _choice(logits: Tensor, temperature: float, top_k: int, generator: torch.Generator) -> int:
    if temperature == 0:
        return int(logits.argmax())
    if top_k:
        kept, names = logits.topk(min(top_k, logits.numel()))
    else:
        kept, names = logits, torch.arange(logits.numel())
    chosen = torch.multinomial((kept / temperature).softmax(0), 1, generator=generator)
    return int(names[chosen])


def _agreed(model: nn.Module, token: int) -> int:
    """Rank 0's choice: a rank whose logits differ in the last bit would go on alone, and wait for the others."""
    engine = find_engine(model)
    if engine is None:
        return token
    chosen = torch.tensor([token], device=engine.mesh.device)
    broadcast_from_first(engine.mesh.world, chosen)
    return int(chosen)


def _device_of(model: nn.Module) -> torch.device:
    return next(model.parameters()).device
