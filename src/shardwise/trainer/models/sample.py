"""Text generation, token by token.

For every new token the model runs on the whole text, without a cache of keys and values. So any model works, sharded
or not. The input always has the same length, so that compiled blocks are compiled once: it is padded at the end, and
causal attention hides the padding from the text.
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
    """Rule for choosing the next token. Temperature 0: the most likely token; top_k 0: all tokens are candidates."""

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
    """Generate at most `num_tokens` tokens after the prompt. The end token and `stop_id` end the text earlier.

    All ranks of a sharded model must call this; all get the same text. With an empty prompt, a new document begins.
    """
    prompt_ids = tokenizer.encode(prompt) or [tokenizer.end_id]
    generator = torch.Generator().manual_seed(sampling.seed)
    window = min(max_seq, len(prompt_ids) + num_tokens)
    engine, device = find_engine(model), next(model.parameters()).device
    generated: list[int] = []
    was_training = model.training
    model.eval()
    try:
        for _ in range(num_tokens):
            context = [*prompt_ids, *generated][-window:]
            row = torch.tensor([context + [tokenizer.end_id] * (window - len(context))], device=device)
            output = model(row) if path_of(model).how == "in-tree" else model(input_ids=row).logits
            # The model's vocabulary may be padded: choose only among the tokenizer's ids.
            logits = output[0, len(context) - 1].float().cpu()[: tokenizer.vocab_size]
            token = sampling.choose(logits, generator)
            if engine is not None:
                # Logits may differ in the last bit between ranks, but all must continue with one text: rank 0's.
                chosen = torch.tensor([token], device=engine.mesh.device)
                broadcast_from_first(engine.mesh.world, chosen)
                token = int(chosen)
            if token in (tokenizer.end_id, stop_id):
                break
            generated.append(token)
    finally:
        model.train(was_training)
    return tokenizer.decode(generated)
