"""`shardwise data`: what a training would make of data, with samples in which the trained tokens are marked."""

import json
import os
import sys
from collections.abc import Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..base.errors import ConfigurationError, printable_lines
from .shared import documented, progress, say
from .train import FLAGS

if TYPE_CHECKING:
    from ..trainer.data.summary import DataSummary

OPTIONS = (
    "model", "tokenizer", "seq_length", "columns", "train_roles", "chat_template", "dataset_split", "token_dtype",
    "max_bad_rows",
)  # fmt: skip
BAR = 40
MOST_CHARACTERS = 3000  # of a sample
COLOR, PLAIN = "\033[32m", "\033[0m"


@partial(documented, more=[FLAGS[name] for name in OPTIONS])
def data(files: list[str], dataset: bool = False, as_json: bool = False, **flags: Any) -> None:
    from ..trainer.checks import DEFAULT_SEQ_LENGTH
    from ..trainer.config import resolve
    from ..trainer.data.summary import summarise
    from ..trainer.data.tokenizer import tokenizer_for
    from ..trainer.models.facts import check

    configuration = [name for name in files if Path(name).suffix.lower() in (".yaml", ".yml", ".toml")]
    if not configuration:
        flags["dataset" if dataset else "train_file"] = files
        if flags["model"] is None and flags["seq_length"] is None:
            flags["seq_length"] = str(DEFAULT_SEQ_LENGTH)
    elif len(files) > 1 or dataset:
        raise ConfigurationError(f"{configuration[0]} names the data of a run: give it alone")
    settings = resolve(configuration, flags, os.environ).settings
    facts = check(settings)
    tokenizer = tokenizer_for(facts.tokenizer, facts.chat_template)
    seq_length = settings.seq_length or min(facts.max_seq, DEFAULT_SEQ_LENGTH)
    summary = summarise(settings, tokenizer, seq_length, progress)
    if as_json:
        print(json.dumps(asdict(summary), indent=1))
    else:
        say(*_lines(summary))
        has_colors = sys.stdout.isatty() and "NO_COLOR" not in os.environ
        for title, sample in summary.samples.items():
            print(f"\nsample {title}", _marked(sample, has_colors), sep="\n")


def _lines(summary: "DataSummary") -> Iterator[str]:
    formats = ", ".join(f"{name}: {number:,}" for name, number in summary.formats.items())
    yield f"format     {formats}"
    yield f"bad rows   {summary.num_bad_rows:,}"
    yield from (f"           {line}" for line in summary.bad_rows)
    trained = summary.num_trained / summary.num_tokens
    yield f"tokens     {summary.num_tokens:,} of tokenizer {summary.tokenizer}, {trained:.1%} are trained on"
    yield "lengths    " + ", ".join(f"{name} {length:,}" for name, length in summary.lengths.items())
    most = max(summary.histogram.values())
    for bound, number in summary.histogram.items():
        yield f"  <= {bound:<9,}{'#' * -(-BAR * number // most):<{BAR}} {number:,}"
    yield (
        f"at {summary.seq_length:,}   {summary.num_cut:,} of {summary.num_documents:,} documents are cut; padding "
        + ", ".join(f"{share:.1%} if {packing}" for packing, share in summary.padding.items())
    )


def _marked(sample: list[tuple[str, bool]], has_colors: bool) -> str:
    marks, left = (COLOR, PLAIN) if has_colors else ("[[", "]]"), MOST_CHARACTERS
    parts = []
    for text, is_trained in sample:
        shown = printable_lines(text[:left])
        parts.append(f"{marks[0]}{shown}{marks[1]}" if is_trained and shown else shown)
        left = max(left - len(text), 0)
    return "".join(parts) + ("" if left else " ...")
