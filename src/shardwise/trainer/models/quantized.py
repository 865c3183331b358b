"""Weights in nf4 in Hugging Face folders, as bitsandbytes writes them, read and written without quantising again.

A matrix is stored as several tensors: its payload under its own name, and behind that name `.absmax`,
`.nested_absmax`, the code books `.quant_map` and `.nested_quant_map`, and `.quant_state.bitsandbytes__nf4`, which is
JSON with sizes and the offset of the absmaxes. Here it is one row of bytes (`core/wire/nf4.py`).
"""

import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor

from ...base.errors import ConfigurationError
from ...checkpoint.tensor_files import Source
from ...core.schedule.flat import is_in_block
from ...core.wire.codec import NF4_BLOCK, NF4_SCALED, encoded_bytes, parse
from ...core.wire.nf4 import CODEC, stored_parts, tables
from ...core.wire.reference_codecs import decoder, encoded
from ...planner.shapes.hf_config import NF4

STATE = ".quant_state.bitsandbytes__nf4"
ABOUT_BYTES = 256
PARTS = (".absmax", ".nested_absmax", ".quant_map", ".nested_quant_map", STATE)
QUANTIZATION = {**NF4, "load_in_8bit": False, "bnb_4bit_quant_storage": "uint8", "llm_int8_skip_modules": None}
Makers = dict[str, Callable[[], Tensor]]


def is_quantizable(name: str, num_dims: int) -> bool:
    """True for the matrices of repeated blocks, as `is_quantizable` in `core/schedule/flat.py`."""
    return num_dims == 2 and name.endswith(".weight") and is_in_block(name.split("."))


def packed(stored: Mapping[str, Tensor]) -> tuple[Makers, dict[str, tuple[int, ...]]]:
    """Return the tensors of a folder with one tensor of bytes for each quantised matrix, and the shapes of these."""
    first = [name.removesuffix(STATE) for name in stored if name.endswith(STATE)]
    shapes = {name: _shape(stored, name) for name in first}
    hidden = {name + part for name in shapes for part in PARTS}
    makers: Makers = {name: partial(stored.__getitem__, name) for name in stored if name not in hidden}
    return makers | {name: partial(_row, stored, name, shape) for name, shape in shapes.items()}, shapes


def rounded(value: Tensor, codec: str, shape: Sequence[int]) -> Tensor:
    """Return a matrix, given as values or as bytes of the codec, with the values that these bytes have."""
    row, out = value if value.dtype == torch.uint8 else encoded(parse(codec), value), torch.empty(prod(shape))
    decoder(parse(codec), row[None], out)()
    return out.view(*shape)


def _state(stored: Mapping[str, Tensor], name: str) -> dict[str, Any]:
    state: Any = json.loads(bytes(stored[name + STATE].tolist()))
    if not isinstance(state, dict):
        raise ValueError(f"{name + STATE} is no mapping")
    return state


def _shape(stored: Mapping[str, Tensor], name: str) -> tuple[int, ...]:
    """Return the shape of a quantised matrix. Refuse other code books and blocks."""
    missing = [name + part for part in PARTS if name + part not in stored]
    if missing:
        fix = "quantise it again with bnb_4bit_use_double_quant=True, or use the unquantised weights"
        raise ConfigurationError(f"{name!r} is stored as nf4 without {missing[0]!r}: {fix}")
    try:
        state = _state(stored, name)
        shape = tuple(int(size) for size in state["shape"])
        blocks = state["blocksize"], state["nested_blocksize"]
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigurationError(f"{name + STATE!r} cannot be read ({error!r}): download the folder again") from None
    for part, table in zip((".quant_map", ".nested_quant_map"), tables(torch.device("cpu")), strict=True):
        book = stored[name + part].float()
        if book.shape != table.shape or not torch.allclose(book, table, rtol=0.0, atol=1e-6):
            raise ConfigurationError(f"{name + part!r} is not the code book of nf4: use the unquantised weights")
    row = stored_parts(torch.empty(encoded_bytes(CODEC, prod(shape)), dtype=torch.uint8), prod(shape))
    sizes = {"": row.payload.nbytes, ".absmax": row.absmax.nbytes, ".nested_absmax": row.scales.nbytes}
    if blocks != (NF4_BLOCK, NF4_SCALED) or any(stored[name + part].nbytes != num for part, num in sizes.items()):
        wanted = f"{NF4_BLOCK} and {NF4_SCALED}"
        raise ConfigurationError(
            f"{name!r} has blocks of {blocks[0]} and {blocks[1]}, not of {wanted}: quantise it again"
        )
    return shape


def _row(stored: Mapping[str, Tensor], name: str, shape: tuple[int, ...]) -> Tensor:
    row = torch.zeros(encoded_bytes(CODEC, prod(shape)), dtype=torch.uint8)
    parts = stored_parts(row, prod(shape))
    parts.payload.copy_(stored[name].view(torch.uint8).reshape(-1))
    parts.absmax.copy_(stored[name + ".absmax"])
    parts.scales.copy_(stored[name + ".nested_absmax"])
    parts.offset.fill_(float(_state(stored, name)["nested_offset"]))
    return row


def quantized(source: Source) -> list[Source]:
    """Return the tensors that a folder has for a matrix of a block in nf4. It is encoded when the first of them is
    written, and the bytes are held until the last is. Other tensors stay as they are."""
    if not is_quantizable(source.name, len(source.shape)):
        return [source]
    held: dict[str, Tensor] = {}

    def rows(part: str) -> list[Tensor]:
        if not held:
            held.update(_tensors(source, encoded(CODEC, source.read())))
        return [held.pop(part)]

    like = _tensors(source, torch.zeros(encoded_bytes(CODEC, prod(source.shape)), dtype=torch.uint8))
    return [
        Source(source.name + part, tensor.dtype, tuple(tensor.shape), partial(rows, part))
        for part, tensor in like.items()
    ]


def _tensors(source: Source, row: Tensor) -> dict[str, Tensor]:
    """Return the tensors of a matrix in a file, by their endings. The JSON is filled up to a fixed length: sizes in a
    file are known before the offset is."""
    parts, dtype = stored_parts(row, prod(source.shape)), str(source.dtype).removeprefix("torch.")
    state = {"quant_type": "nf4", "blocksize": NF4_BLOCK, "dtype": dtype, "shape": list(source.shape)}
    state |= {"nested_blocksize": NF4_SCALED, "nested_dtype": "float32", "nested_offset": float(parts.offset)}
    about = torch.tensor(list(json.dumps(state).ljust(ABOUT_BYTES).encode()), dtype=torch.uint8)
    values = (parts.payload[:, None], parts.absmax, parts.scales, *tables(torch.device("cpu")), about)
    return dict(zip(("", *PARTS), values, strict=True))
