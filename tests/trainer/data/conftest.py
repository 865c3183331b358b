"""A real tokenizer, trained on the embedded text, in a folder as Hugging Face writes it."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from shardwise.trainer.data.sources import manual

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content | trim }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="session")
def bpe_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """`bpe_folder(chat_template=None, **settings)` is a folder with the tokenizer."""
    from transformers import PreTrainedTokenizerFast

    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=600, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    made.train_from_iterator(manual()[:20], trainer)

    def write(chat_template: str | None = None, **settings: Any) -> Path:
        folder = tmp_path_factory.mktemp("tokenizer")
        settings = {"eos_token": "<|endoftext|>", **settings}
        fast = PreTrainedTokenizerFast(tokenizer_object=made, **settings)
        if chat_template is not None:
            fast.chat_template = chat_template
        fast.save_pretrained(folder)
        return folder

    return write


@pytest.fixture
def write_rows(tmp_path: Path) -> Callable[..., str]:
    """`write_rows(row, ..., name="rows.jsonl")`: rows that are strings are written as they are."""

    def write(*rows: Any, name: str = "rows.jsonl") -> str:
        path = tmp_path / name
        path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
        return str(path)

    return write
