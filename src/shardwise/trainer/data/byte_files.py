"""The byte-level tokenizer as files that Hugging Face's libraries open, so that exports are complete without ours."""

import json
from pathlib import Path

from .tokenizer import BYTES

END = "<|end|>"


def write_byte_tokenizer(folder: Path, max_seq: int) -> None:
    """A BPE without merges: every byte is a token, numbered as it is."""
    end = {"id": BYTES.end_id, "content": END, "special": True, "normalized": False}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{**end, "single_word": False, "lstrip": False, "rstrip": False}],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {"type": "BPE", "vocab": _letters(), "merges": []},
    }
    about = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END,
        "model_max_length": max_seq,
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    (folder / "tokenizer_config.json").write_text(json.dumps(about, indent=1))


def _letters() -> dict[str, int]:
    """The letter that stands for each byte in byte-level vocabularies: itself if it can be seen, else a later one."""
    seen = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    hidden = [byte for byte in range(256) if byte not in seen]
    return {chr(byte): byte for byte in seen} | {chr(256 + number): byte for number, byte in enumerate(hidden)}
