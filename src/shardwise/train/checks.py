"""What can be decided and refused before any rank exists: the earlier a mistake is told, the less it costs."""

import dataclasses
import shutil
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from ..errors import ConfigurationError
from ..layout import AUTO, layout_of
from ..mesh import require_nodes
from .batching import Batching, batching_of
from .data.prepare import prepare
from .data.samples import open_samples
from .data.tokenizer import Tokenizer, tokenizer_for
from .folder import DATA, run_folder
from .metrics import check_reporters
from .models.facts import ModelFacts, check, require_vocabulary
from .optimizers import check_optimizer
from .settings import Settings

LONGEST_BY_DEFAULT = 2048


@dataclass(frozen=True, slots=True)
class Checked:
    facts: ModelFacts
    tokenizer: Tokenizer
    seq_length: int
    batching: Batching


def completed(settings: Settings, has_gpu: bool) -> Settings:
    """The settings with what follows from the kind of device."""
    device = settings.device or ("cuda" if has_gpu else "cpu")
    precision = settings.precision or ("bf16" if device == "cuda" else "fp32")
    return dataclasses.replace(settings, device=device, precision=precision)


def look_ahead(settings: Settings, num_ranks: int, say: Callable[[str], None]) -> None:
    """All checks, and the data made ready, so that ranks find nothing to refuse and nothing to wait for."""
    checked = check_all(settings, num_ranks)
    data = run_folder(settings) / DATA
    made = [place for place in (data, data.parent, data.parent.parent) if not place.exists()]
    before = set(data.glob("*"))
    try:
        prepared = prepare(settings, checked.tokenizer, data, say, checked.facts.vocab_size)
        open_samples(settings, checked.tokenizer, prepared, checked.seq_length, say)
    except ConfigurationError:
        # A run that never began leaves nothing behind, and takes away nothing of others.
        for store in set(data.glob("*")) - before:
            shutil.rmtree(store, ignore_errors=True)
        with suppress(OSError):
            for place in made:
                place.rmdir()
        raise


def check_all(settings: Settings, num_ranks: int) -> Checked:
    """Everything about a run of so many ranks that its settings and its files tell."""
    rows = settings.strategy.values() if isinstance(settings.strategy, dict) else [settings.strategy]
    for row in rows:
        if isinstance(settings.strategy, dict) or row.lower() != AUTO:
            layout_of(row)
    if settings.node_size is not None:
        require_nodes(num_ranks, settings.node_size)
    check_reporters(settings.report_to)
    check_optimizer(settings)
    batching = batching_of(settings, num_ranks)
    facts = check(settings)
    tokenizer = tokenizer_for(facts.tokenizer)
    require_vocabulary(facts, tokenizer.vocab_size)
    seq_length = settings.seq_length or min(facts.max_seq, LONGEST_BY_DEFAULT)
    if seq_length > facts.max_seq:
        raise ConfigurationError(
            f"seq_length {seq_length} is more than the {facts.max_seq} tokens that model {settings.model} can take: "
            "make it shorter"
        )
    return Checked(facts, tokenizer, seq_length, batching)
