"""What a device reaches by itself: the constants from which seconds of a step are planned.

`measure_raw(device)` times products, attention, loss, elementwise work, updates, copies and launches alone. Rows have
the sizes, the seconds of one call (the smallest of several runs of calls, by events), and a rate where one is usual:
FLOP/s of the operations that are really done (attention: the causal half), or bytes/s of what is read and written once.
"""

import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from shardwise.trainer.loss import chunked_cross_entropy
from shardwise.trainer.model import rotary_at, rotate

Row = dict[str, Any]

SECONDS_OF_A_RUN = 0.004
NUM_RUNS = 3
CYCLES_OF_A_CALL = 100_000  # about 50 us


class Stopwatch:
    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.is_cuda = device.type == "cuda"

    def once(self, call: Callable[[], object], num_calls: int) -> float:
        """Seconds of one of `num_calls` calls in a row."""
        if not self.is_cuda:
            began = time.perf_counter()
            for _ in range(num_calls):
                call()
            return (time.perf_counter() - began) / num_calls
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        # The host gets ahead, so that the device does not wait for it between short calls.
        torch.cuda._sleep(CYCLES_OF_A_CALL * num_calls)
        begin.record()
        for _ in range(num_calls):
            call()
        end.record()
        torch.cuda.synchronize()
        return begin.elapsed_time(end) * 1e-3 / num_calls

    def __call__(self, call: Callable[[], object]) -> float:
        call()
        num_calls = max(1, min(50, round(SECONDS_OF_A_RUN / max(self.once(call, 2), 1e-7))))
        return min(self.once(call, num_calls) for _ in range(NUM_RUNS))


def backward(output: Tensor, inputs: tuple[Tensor, ...], grad: Tensor | None = None) -> None:
    torch.autograd.grad(output, inputs, grad, retain_graph=True)


def products(watch: Stopwatch, small: bool) -> Iterator[Row]:
    """y = x W^T, dx = dy W, dW = dy^T x, as the engine has them: dW in bf16, and in fp32."""
    widths = [  # k, n
        (768, 768), (768, 2048), (2048, 768), (1280, 3456), (2048, 512), (2048, 2048), (2048, 8192), (8192, 2048),
        (3072, 8192), (4096, 1024), (4096, 4096), (4096, 11008), (4096, 14336), (14336, 4096), (5120, 5120),
        (5120, 13824), (13824, 5120), (2048, 128256), (4096, 128256),
    ]  # fmt: skip
    ms = (128, 512, 1024, 2048, 4096, 8192, 16384)
    for k, n in [(64, 64)] if small else widths:
        weight = torch.randn(n, k, device=watch.device, dtype=torch.bfloat16)
        for m in (16,) if small else [m for m in ms if m * n <= 2**30]:
            x, dy = (torch.randn(m, width, device=watch.device, dtype=torch.bfloat16) for width in (k, n))
            calls = {
                "forward": partial(F.linear, x, weight),
                "input": partial(torch.mm, dy, weight),
                "weight": partial(torch.mm, dy.t(), x),
            }
            if watch.is_cuda:
                calls["weight fp32"] = partial(torch.mm, dy.t(), x, out_dtype=torch.float32)
            for what, call in calls.items():
                seconds = watch(call)
                yield {"what": what, "m": m, "n": n, "k": k, "seconds": seconds, "flops": 2 * m * n * k / seconds}


def products_fp32(watch: Stopwatch, small: bool) -> Iterator[Row]:
    for m, n, k in [(16, 64, 64)] if small else [(2048, 2048, 2048), (2048, 8192, 2048), (4096, 4096, 4096)]:
        x, weight = (torch.randn(rows, k, device=watch.device) for rows in (m, n))
        seconds = watch(partial(F.linear, x, weight))
        yield {"what": "fp32", "m": m, "n": n, "k": k, "seconds": seconds, "flops": 2 * m * n * k / seconds}


def attention(watch: Stopwatch, small: bool) -> Iterator[Row]:
    settings = [(32, 32, 64), (32, 8, 64), (24, 8, 128), (32, 32, 128), (32, 8, 128), (40, 40, 128)]
    for heads, kv_heads, dim in [(4, 2, 16)] if small else settings:
        for seq in (32,) if small else (128, 1024, 2048, 4096, 8192, 16384):
            for batch in (1, 4) if seq == 2048 else (1,):
                yield _attention(watch, batch, heads, kv_heads, dim, seq)


def _attention(watch: Stopwatch, batch: int, heads: int, kv_heads: int, dim: int, seq: int) -> Row:
    q, k, v = (
        torch.randn(batch, seq, num, dim, device=watch.device, dtype=torch.bfloat16, requires_grad=True)
        for num in (heads, kv_heads, kv_heads)
    )

    def forward() -> Tensor:
        return F.scaled_dot_product_attention(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True, enable_gqa=heads != kv_heads
        )

    forward_s = watch(forward)
    out = forward()
    grad = torch.randn_like(out)
    backward_s = watch(partial(backward, out, (q, k, v), grad))
    flops = 2.0 * batch * heads * seq * seq * dim  # two products, the causal half of each
    return {
        "batch": batch, "heads": heads, "kv_heads": kv_heads, "head_dim": dim, "seq": seq, "forward_s": forward_s,
        "backward_s": backward_s, "forward_flops": flops / forward_s, "backward_flops": 2.5 * flops / backward_s,
    }  # fmt: skip


def elementwise(watch: Stopwatch, small: bool) -> Iterator[Row]:
    """`moved_bytes`: what a fused kernel would have to read and write."""
    sizes = [(16, 64)] if small else [(2048, 768), (2048, 2048), (4096, 4096), (8192, 4096), (4096, 14336)]
    for tokens, width in sizes:
        x, y = (torch.randn(tokens, width, device=watch.device, dtype=torch.bfloat16) for _ in range(2))
        x.requires_grad_()
        weight = torch.ones(width, device=watch.device, dtype=torch.bfloat16, requires_grad=True)
        heads = x.detach().view(1, tokens, -1, 64).transpose(1, 2)
        rotary = rotary_at(torch.arange(tokens, device=watch.device), 64)
        normed = F.rms_norm(x, (width,), weight, 1e-5)
        narrow = 2 * tokens * width  # bytes of one bf16 tensor
        wide = torch.empty(tokens, width, device=watch.device)
        calls: dict[str, tuple[Callable[[], object], int]] = {
            "add": (partial(torch.add, x.detach(), y), 3 * narrow),
            "silu": (partial(F.silu, y), 2 * narrow),
            "mul": (partial(torch.mul, x.detach(), y), 3 * narrow),
            "rms_norm": (partial(F.rms_norm, y, (width,), weight.detach(), 1e-5), 2 * narrow),
            "rms_norm backward": (partial(backward, normed, (x, weight), y), 3 * narrow),
            "rotate": (partial(rotate, heads, rotary), 2 * narrow),
            "to fp32": (y.float, 3 * narrow),
            "to bf16": (partial(y.copy_, wide), 3 * narrow),
            "copy": (y.clone, 2 * narrow),
            "zero": (wide.zero_, 2 * narrow),
        }
        for what, (call, moved) in calls.items():
            seconds = watch(call)
            yield {"what": what, "tokens": tokens, "width": width, "seconds": seconds, "bytes_per_s": moved / seconds}


def losses(watch: Stopwatch, small: bool) -> Iterator[Row]:
    settings = [(16, 64, 512)] if small else [
        (tokens, hidden, vocab)
        for hidden, vocab in ((768, 32000), (2048, 128256), (4096, 32000), (4096, 128256))
        for tokens in (2048, 4096, 8192)
    ]  # fmt: skip
    for tokens, hidden, vocab in settings:
        states = torch.randn(tokens, hidden, device=watch.device, dtype=torch.bfloat16, requires_grad=True)
        weight = torch.randn(vocab, hidden, device=watch.device, dtype=torch.bfloat16, requires_grad=True)
        targets = torch.randint(0, vocab, (tokens,), device=watch.device)
        forward_s = watch(partial(chunked_cross_entropy, states, weight, targets))
        loss = chunked_cross_entropy(states, weight, targets)
        backward_s = watch(partial(backward, loss, (states, weight)))
        yield {"tokens": tokens, "hidden": hidden, "vocab": vocab, "forward_s": forward_s, "backward_s": backward_s}


def updates(watch: Stopwatch, small: bool) -> Iterator[Row]:
    for num_elems in (2**12,) if small else (2**20, 2**24, 2**26, 2**28):
        for pieces in (1, 16):
            params = [torch.zeros(num_elems // pieces, device=watch.device, requires_grad=True) for _ in range(pieces)]
            for param in params:
                param.grad = torch.ones_like(param)
            optimizer = torch.optim.AdamW(params, fused=True)
            seconds = watch(optimizer.step)
            grads = [param.grad for param in params if param.grad is not None]
            norm_s = watch(partial(torch._foreach_norm, grads))
            yield {
                "elems": num_elems, "pieces": pieces, "adamw_s": seconds, "adamw_bytes_per_s": 28 * num_elems / seconds,
                "norm_s": norm_s, "norm_bytes_per_s": 4 * num_elems / norm_s,
            }  # fmt: skip


def host_copies(watch: Stopwatch, small: bool) -> Iterator[Row]:
    for num_bytes in (2**16,) if small else (2**20, 2**24, 2**28, 2**30):
        host = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=watch.is_cuda)
        device = torch.empty(num_bytes, dtype=torch.uint8, device=watch.device)
        for what, to, source in (("to device", device, host), ("to host", host, device)):
            seconds = watch(partial(to.copy_, source, non_blocking=True))
            yield {"what": what, "bytes": num_bytes, "seconds": seconds, "bytes_per_s": num_bytes / seconds}


def launches(watch: Stopwatch, small: bool) -> Iterator[Row]:
    """Seconds of the host for one call whose kernel takes next to nothing."""
    x = torch.ones(8, 8, device=watch.device, dtype=torch.bfloat16)
    weight = torch.ones(8, 8, device=watch.device, dtype=torch.bfloat16, requires_grad=True)

    def linear() -> Tensor:
        return F.linear(x, weight)

    def back() -> None:
        y = x
        for _ in range(20):
            y = F.linear(y, weight)
        y.sum().backward()

    calls = {"add": lambda: x.add_(0), "linear": linear, "20 linear, forward and backward": back}
    for what, call in calls.items():
        call()
        if watch.is_cuda:
            torch.cuda.synchronize()
        began = time.perf_counter()
        num_calls = 300 if what != "20 linear, forward and backward" else 30
        for _ in range(num_calls):
            call()
        yield {"what": what, "host_s": (time.perf_counter() - began) / num_calls}


def workspaces(watch: Stopwatch, small: bool) -> Iterator[Row]:
    """What the library of products keeps of the allocator's memory, by where it is called."""
    if not watch.is_cuda:
        return
    torch._C._cuda_clearCublasWorkspaces()
    held = [torch.cuda.memory_allocated()]
    x, weight = (torch.ones(64, 64, device=watch.device, dtype=torch.bfloat16, requires_grad=True) for _ in range(2))
    own = 2 * 64 * 64 * 2
    y = F.linear(x, weight)
    held.append(torch.cuda.memory_allocated() - own - 64 * 64 * 2)
    y.sum().backward()
    x.grad = weight.grad = None
    del y
    held.append(torch.cuda.memory_allocated() - own)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        F.linear(x.detach(), weight.detach())
    held.append(torch.cuda.memory_allocated() - own)
    for what, earlier, later in zip(
        ("forward", "backward's thread", "another stream"), held[:-1], held[1:], strict=True
    ):
        yield {"what": what, "bytes": later - earlier}


def measure_raw(device: torch.device) -> dict[str, list[Row]]:
    watch, small = Stopwatch(device), device.type != "cuda"
    parts = (
        workspaces, launches, products, products_fp32, attention, elementwise, losses, updates, host_copies,
    )  # fmt: skip
    found = {}
    for part in parts:
        began = time.perf_counter()
        try:
            found[part.__name__] = list(part(watch, small))
        except RuntimeError as error:  # the rest is worth having
            found[part.__name__] = [{"error": str(error).partition("\n")[0]}]
            print(f"  {part.__name__}: {error}", flush=True)
        if watch.is_cuda:
            torch.cuda.empty_cache()
        print(f"  {part.__name__}: {time.perf_counter() - began:.1f} s", flush=True)
    return found
