"""What `sw.memory` says is what is really there: every tensor of the process, found by the garbage collector."""

import gc
import time
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import shardwise as sw
from shardwise.api.memory_report import Memory
from shardwise.core.engine.streams import PendingHostCopy
from shardwise.core.layout import Strategy
from shardwise.core.optim.groups import shard_groups
from shardwise.core.schedule.state_bytes import StateBytes
from tests.harness import Pool
from tests.support.strategies import NAMED, STRATEGIES, disk_for

HIDDEN = 32


class Rows(nn.Module):
    """Blocks of one matrix; `odd` ones have a norm that is kept in fp32, a frozen bias and need padding."""

    def __init__(self, odd: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(HIDDEN, HIDDEN, bias=odd) for _ in range(4))
        self.norm = nn.LayerNorm(HIDDEN) if odd else nn.Identity()
        if odd:
            self.register_buffer("table", torch.ones(100), persistent=False)
            self.blocks[1].bias.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return self.norm(x)


def live() -> dict[int, torch.UntypedStorage]:
    gc.collect()
    found = [value.untyped_storage() for value in gc.get_objects() if isinstance(value, Tensor)]
    return {storage._cdata: storage for storage in found}


def bytes_since(before: dict[int, torch.UntypedStorage]) -> int:
    """Of storages that are new. Those before stay alive: what other tests have left might be let go at any time.

    The least of a few looks, because gloo's threads hold what they have sent for a moment.
    """

    def look() -> int:
        time.sleep(0.01)
        return sum(storage.nbytes() for number, storage in live().items() if number not in before)

    return min(look() for _ in range(3))


def backward(model: nn.Module) -> None:
    model(torch.ones(2, HIDDEN)).float().square().mean().backward()


_DTYPES = {
    "fp32": (torch.float32,) * 3,
    "bf16": (torch.bfloat16, torch.float32, torch.float32),
    "pure-bf16": (torch.bfloat16,) * 3,
}


def counted(odd: bool, ways: list[tuple[Strategy, str]]) -> list[tuple[Memory, int]]:
    """For each way to shard it: what is said between the second backward and its step, and what there is."""
    sw.init()
    found = []
    for strategy, precision in ways:
        chosen = replace(sw.Precision(*_DTYPES[precision]), keep_fp32=("norm",) if odd else ())
        before = live()
        model, optimizer = _sharded(Rows(odd), strategy, chosen)
        backward(model)
        optimizer.step()
        optimizer.zero_grad()
        backward(model)
        found.append((sw.memory(model, optimizer), bytes_since(before)))
        del model, optimizer
    return found


def _sharded(model: nn.Module, strategy: Strategy, precision: sw.Precision | str, **options: object) -> tuple:
    given = torch.optim.AdamW(model.parameters())
    return sw.shard(model, given, strategy, precision=precision, **disk_for(strategy), **options)


@pytest.mark.quick("True")
@pytest.mark.parametrize("odd", [False, True])
def test_every_byte_is_accounted_for(run_ranks: Pool, odd: bool) -> None:
    ways = [(STRATEGIES[name], "bf16") for name in [*NAMED, "mapping"]]
    ways += [(name, precision) for name in ("ddp", "zero3") for precision in ("fp32", "pure-bf16")]
    for found in run_ranks(2, counted, odd, ways):
        assert len(found) == len(ways)
        for said, there in found:
            # gloo may still hold the flags that ranks exchanged last: a number for each parameter, and one more.
            besides = there - said.host - sum(said.by_class().values())
            if said.host:
                # Sums of squares of gradients that have left; checksums of what is on disk, and their tables.
                assert 0 <= besides < (8000 if said.disk else 1000)
            else:
                assert besides in (0, 4 * (10 if odd else 5))
            if odd:
                # Padding has no moments; all else of it is planned and held.
                assert (said.seen.params, said.seen.grads) == (said.planned.params, said.planned.grads)
                assert said.seen.optimizer <= said.planned.optimizer
            else:
                assert said.seen == said.planned
            # Counters and flags are not planned.
            assert 0 <= said.peak_buffers - said.planned_buffers < 200
            assert said.peak_grads == said.grads
            assert said.buffers <= said.peak_buffers
            assert (said.activations, said.reserved) == (None, None)
            assert said.peak >= said.now > 50e6


def numbers_by_phase(strategy: Strategy) -> list[Memory]:
    sw.init()
    model, optimizer = _sharded(Rows(odd=False), strategy, "bf16")
    found = [sw.memory(model, optimizer)]
    backward(model)
    found.append(sw.memory(model, optimizer))
    optimizer.step()
    return [*found, sw.memory(model, optimizer), sw.memory(model)]


def test_classes_fill_as_a_step_goes_on(run_ranks: Pool) -> None:
    elems = 4 * HIDDEN * HIDDEN // 2  # of a rank
    for first, before_step, after_step, alone in run_ranks(2, numbers_by_phase, "zero3"):
        assert first.seen == StateBytes(params=0, grads=0, optimizer=4 * elems)
        assert before_step.seen == StateBytes(params=0, grads=4 * elems, optimizer=4 * elems)
        assert after_step.seen == after_step.planned == StateBytes(params=0, grads=4 * elems, optimizer=12 * elems)
        assert alone.optimizer == alone.planned.optimizer == 4 * elems
        assert first.buffers < before_step.buffers <= after_step.buffers
        highest = first.highest(after_step)
        assert highest.seen == after_step.seen
        assert highest.peak >= first.peak
        assert first.highest(first) == first


def sums_of_optimizers() -> list[tuple[StateBytes, StateBytes]]:
    sw.init()
    found = []
    for make in (
        lambda params: torch.optim.SGD(params, lr=0.1),
        lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
        lambda params: torch.optim.AdamW(params, amsgrad=True),
    ):
        model = Rows(odd=False)
        model, optimizer = sw.shard(model, make(model.parameters()), "zero2", precision="bf16")
        backward(model)
        optimizer.step()
        seen = sw.memory(model, optimizer)
        found.append((seen.seen, seen.planned))
    return found


def test_the_plan_knows_the_optimizer(run_ranks: Pool) -> None:
    elems = 4 * HIDDEN * HIDDEN
    for found in run_ranks(2, sums_of_optimizers):
        assert all(seen == planned for seen, planned in found)
        assert [planned.optimizer for _, planned in found] == [elems * bytes_each // 2 for bytes_each in (4, 8, 16)]


def moments_in_8_bits() -> tuple[StateBytes, StateBytes]:
    from torchao.optim import AdamW8bit
    from torchao.optim.subclass_8bit import OptimState8bit

    sw.init()
    model = nn.Sequential(nn.Linear(128, 128, bias=False), nn.Linear(128, 128, bias=False))
    model, optimizer = sw.shard(model, AdamW8bit(model.parameters()), "zero2", precision="bf16")
    # What its first step would make; the step itself is compiled, which takes minutes.
    for param in shard_groups(optimizer.inner)[0]:
        optimizer.inner.state[param] = {
            "step": torch.tensor(0.0),
            "exp_avg": OptimState8bit.zeros(param.shape),
            "exp_avg_sq": OptimState8bit.zeros(param.shape, signed=False),
        }
    found = sw.memory(model, optimizer)
    return found.seen, found.planned


def test_tensors_inside_tensors_are_counted(run_ranks: Pool) -> None:
    for seen, planned in run_ranks(2, moments_in_8_bits):
        tables = 2 * 2 * 256 * 4  # a table for each moment, to translate codes with; not planned
        assert seen.optimizer - tables == planned.optimizer == 128 * 128 * (4 + 2 + 2 * 4 / 256)


def test_what_is_not_sharded_is_refused() -> None:
    with pytest.raises(sw.StateError, match="not sharded"):
        sw.memory(nn.Linear(2, 2))


def test_the_optimizer_from_before_is_refused(run_ranks: Pool) -> None:
    assert run_ranks(1, message_for_inner_optimizer) == ["the AdamW"]


def message_for_inner_optimizer() -> str:
    sw.init()
    model = Rows(odd=False)
    given = torch.optim.AdamW(model.parameters())
    sw.shard(model, given, "ddp", precision="fp32")
    with pytest.raises(sw.StateError, match="give it the optimizer that") as caught:
        sw.memory(model, given)
    return str(caught.value)[len("sw.memory was given ") :][:9]


def test_numbers_read_later_are_those_of_then() -> None:
    tensor = torch.tensor([[1.5, 2.0]], dtype=torch.bfloat16, requires_grad=True)
    later = PendingHostCopy(tensor)
    with torch.no_grad():
        tensor.zero_()
    assert later.read() == later.read() == [1.5, 2.0]
    assert PendingHostCopy(torch.tensor(3)).read() == [3.0]
