"""The error of codecs on real gradients and trained weights, in one process.

    python -m shardwise.bench.wire_codecs REQUEST ANSWER

REQUEST is JSON: the run whose newest checkpoint is opened, and the codecs. The result goes to the file ANSWER. The
gradient is that of rank 0's first micro-batch of the next step, as this rank would send it. The matrices of a unit are
concatenated to one row, as in communication. Tensors that are never encoded are left out.
"""

import json
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..base.processes import end_with_parent
from ..core.engine.guards import engine_of
from ..core.layout import MOST_SPLIT
from ..core.mesh import init, leave
from ..core.schedule.flat import is_encodable
from ..core.unit.state import FlatState
from ..core.wire.codec import encoded_bytes, parse
from ..core.wire.reference_codecs import decoder, encoder
from ..trainer.checks import check_all
from ..trainer.data.prepare import prepare
from ..trainer.data.samples import open_samples
from ..trainer.models.headloss import loss_sum
from ..trainer.models.restore import find_model_in
from ..trainer.run_folder import CONFIG, DATA
from ..trainer.settings import settings_from_json

ROUNDS = 5
MILLION = 1e6


def lost_by(name: str, values: Sequence[Tensor]) -> dict[str, Any]:
    """Return the error over all matrices, and that of the worst unit. None means that a decoded value is not finite."""
    codec = parse(name)
    sizes = [encoded_bytes(codec, value.numel(), value.dtype) for value in values]
    num_elems = sum(value.numel() for value in values)
    errors, squares, back_squares, dots = [], [], [], []
    encode_s, decode_s = [0.0] * ROUNDS, [0.0] * ROUNDS
    for index, value in enumerate(values):
        row = torch.empty(1, sizes[index], dtype=torch.uint8, device=value.device)
        back = torch.empty_like(value)
        encode, decode = encoder(codec, value, row), decoder(codec, row, back)
        for turn in range(-1, ROUNDS):
            began_s = _now(value.device)
            encode(index)
            between_s = _now(value.device)
            decode()
            if turn >= 0:  # turn -1 is a warm-up: kernels may be compiled
                encode_s[turn] += between_s - began_s
                decode_s[turn] += _now(value.device) - between_s
        wide, back_wide = value.double(), back.double()
        errors.append(float((wide - back_wide).square().sum()))
        squares.append(float(wide.square().sum()))
        back_squares.append(float(back_wide.square().sum()))
        dots.append(float(wide @ back_wide))
    total, lengths = math.fsum(squares), math.sqrt(math.fsum(squares) * math.fsum(back_squares))
    units = [math.sqrt(error / square) for error, square in zip(errors, squares, strict=True) if square]
    return {
        "codec": name,
        "relative_rms": _finite(math.sqrt(math.fsum(errors) / total) if total else 0.0),  # RMS: error / values
        "worst_relative_rms": max(units, default=0.0) if all(map(math.isfinite, units)) else None,
        "cosine": _finite(sum(dots) / lengths if lengths else 1.0),
        "bytes_per_elem": sum(sizes) / num_elems,
        "encode_s": min(encode_s) / num_elems * MILLION,  # per million elements, in the best round
        "decode_s": min(decode_s) / num_elems * MILLION,
    }


def _finite(number: float) -> float | None:
    return number if math.isfinite(number) else None


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def matrices(model: nn.Module, trained: bool, buffer_of: Callable[[FlatState], Tensor]) -> Iterator[Tensor]:
    """Yield one row per unit: the parts of its flats' buffers that codecs encode."""
    for unit in engine_of(model).units:
        rows = []
        for state in unit.states:
            if trained and not state.flat.trainable:
                continue
            buffer = buffer_of(state)
            pairs = zip(state.flat.params, state.flat.intervals, strict=True)
            rows += [buffer[interval.start : interval.stop] for param, interval in pairs if is_encodable(param)]
        if rows:
            yield torch.cat(rows)


def measure(run: Path, num_ranks: int, step: int, gradients: Sequence[str], weights: Sequence[str]) -> dict[str, Any]:
    settings = settings_from_json((run / CONFIG).read_text())
    checked = check_all(settings, num_ranks)
    prepared = prepare(settings, checked.tokenizer, run / DATA, _silent, checked.facts.vocab_size)
    samples, _ = open_samples(settings, checked.tokenizer, prepared, checked.seq_length, _silent)
    global_size = checked.batching.global_size
    batch = samples.batch(checked.batching.share(samples.order(step * global_size, global_size), 0)[0])
    init()
    own = "pure-bf16" if settings.precision == "pure-bf16" else None
    model = find_model_in(run).load(own, is_trained=True, strategy=MOST_SPLIT)
    device = next(model.parameters()).device
    (loss_sum(model, batch.to(device)) / max(batch.num_targets, 1)).backward()
    engine_of(model).finish_gradients()
    sent = list(matrices(model, True, lambda state: state.gradient.final_for_optimizer))
    masters = list(matrices(model, False, lambda state: state.read_master().detach()))
    return {
        "num_gradients": sum(value.numel() for value in sent),
        "num_weights": sum(value.numel() for value in masters),
        "gradient_dtype": str(sent[0].dtype).removeprefix("torch.") if sent else "",
        "gradients": [lost_by(name, sent) for name in gradients if sent],
        "weights": [lost_by(name, masters) for name in weights if masters],
    }


def _silent(_: str) -> None:
    pass


if __name__ == "__main__":
    end_with_parent()
    request = json.loads(sys.argv[1])
    try:
        answer = measure(Path(request.pop("run")), **request)
    finally:
        leave()
    Path(sys.argv[2]).write_text(json.dumps(answer))
