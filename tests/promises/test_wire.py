"""What travels in fewer bits trains nearly the same, and keeps every promise that is not about the last bit.

How near is measured over hundreds of steps elsewhere (`shardwise bench wire`); here a dozen must not go astray. What
does not depend on rounding is exact: ranks agree with each other on every bit, a run repeated is the same run, a world
of one encodes nothing, masters and checkpoints are as exact as ever.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import shardwise as sw
from shardwise.base.errors import ConfigurationError
from shardwise.core.engine.guards import engine_of
from shardwise.core.layout import layout_of
from shardwise.core.wire.codec import parse
from tests.core.engine.test_models import OddStack
from tests.core.engine.test_models import train as train_odd
from tests.harness import Pool
from tests.support.models import IN_TREE
from tests.support.strategies import ENCODED, disk_for, slow_but
from tests.support.trainee import tell_sharded
from tests.support.training import Outcome, assert_same, relative, train_alone, train_sharded

EXACT = "zero3"
# Of the losses of a dozen steps, at most; and of their mean.
FARTHEST, APART = 2e-2, 1e-2


def sharded(pool: Pool, strategy: Any, world: int = 4, node_size: int = 2, **options: Any) -> Outcome:
    """The outcome of rank 0, once all ranks are known to agree on every bit of it."""
    outcomes = pool(world, train_sharded, IN_TREE, strategy, node_size=node_size, **{"precision": "fp32", **options})
    for outcome in outcomes[1:]:
        assert_same(outcome, outcomes[0])
    return outcomes[0]


@pytest.fixture(scope="module")
def exact(run_ranks: Pool) -> Outcome:
    return sharded(run_ranks, EXACT)


@pytest.mark.parametrize("strategy", slow_but(("zeropp", "ddp, gradients as int8"), ENCODED))
def test_training_is_nearly_the_same(run_ranks: Pool, exact: Outcome, strategy: str) -> None:
    outcome = sharded(run_ranks, ENCODED[strategy])
    apart = [relative(seen, expected) for seen, expected in zip(outcome.losses, exact.losses, strict=True)]
    assert 0 < max(apart) < FARTHEST
    assert sum(apart) / len(apart) < APART


@pytest.mark.slow
@pytest.mark.parametrize(
    "strategy",
    ["zeropp", "zero3, both", "zero3, forwards as int8", "ddp, gradients as int4 with feedback", "hsdp, both"],
)
def test_micro_batches_and_a_second_time(run_ranks: Pool, exact: Outcome, strategy: str) -> None:
    """Accumulated as it should be, and as a user may have forgotten; a run repeated is the same run."""
    for accumulate in ("all but the last", "all", "none"):
        options = {"num_micro": 3, "accumulate": accumulate, "num_steps": 4}
        outcome = sharded(run_ranks, ENCODED[strategy], **options)
        assert all(relative(*pair) < FARTHEST for pair in zip(outcome.losses, exact.losses, strict=False))
        if accumulate == "none":
            assert_same(sharded(run_ranks, ENCODED[strategy], **options), outcome)


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["bf16", "fp16", "pure-bf16"])
def test_sixteen_bits(run_ranks: Pool, precision: str) -> None:
    exactly = sharded(run_ranks, EXACT, precision=precision)
    for strategy in ("zeropp", "zero3+params_as=int8+grads_as=int8", "zero3+params_as=int8:forward"):
        outcome = sharded(run_ranks, strategy, precision=precision)
        assert outcome.num_skipped == exactly.num_skipped
        # In fp16 a scale that overflows a step later is another training on the way.
        assert relative(outcome.losses[-1], exactly.losses[-1]) < FARTHEST


@pytest.mark.parametrize("strategy", ["zeropp", "zero3, forwards as int8", "ddp, gradients as int8"])
def test_one_rank_encodes_nothing(run_ranks: Pool, strategy: str) -> None:
    assert_same(sharded(run_ranks, ENCODED[strategy], world=1, node_size=1), train_alone(IN_TREE))


@pytest.mark.parametrize("node_size", slow_but((1,), [1, 3]))
def test_three_ranks(run_ranks: Pool, exact: Outcome, node_size: int) -> None:
    """Nothing here is a power of two."""
    for strategy in ("zeropp", "ddp, gradients as int8"):
        outcome = sharded(run_ranks, ENCODED[strategy], world=3, node_size=node_size)
        assert all(relative(*pair) < FARTHEST for pair in zip(outcome.losses, exact.losses, strict=True))


# ---------------------------------------------------------------------------------------------------------
# what is encoded, and what it is made from


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(50, 48)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(48, 96), nn.LayerNorm(96), nn.Linear(96, 48)) for _ in "ab")
        self.head = nn.Linear(48, 50)

    def forward(self, x: Tensor) -> Tensor:
        x = self.table(x)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


def small(strategy: Any, **options: Any) -> tuple[nn.Module, Any]:
    sw.init()
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return sw.shard(model, optimizer, strategy, precision="fp32", **disk_for(strategy), **options)


def backward(model: nn.Module, step: int) -> Tensor:
    some = torch.Generator().manual_seed(100 * step + dist.get_rank())
    x = torch.randint(50, (4, 8), generator=some)
    loss: Tensor = nn.functional.cross_entropy(model(x).flatten(0, 1), x.flatten())
    loss.backward()
    return loss.detach()


def encoded_names() -> tuple[set[str], set[str]]:
    model, _ = small("zeropp", node_size=2)
    flats = [state.flat for unit in engine_of(model).units for state in unit.states]
    named = [{param.name for flat in flats if bool(flat.grads_codec) == is_encoded for param in flat.params}
             for is_encoded in (True, False)]  # fmt: skip
    return named[0], named[1]


def test_matrices_are_encoded_and_the_rest_is_not(run_ranks: Pool) -> None:
    for encoded, exactly in run_ranks(4, encoded_names):
        assert encoded == {"head.weight", *(f"blocks.{i}.{j}.weight" for i in (0, 1) for j in (0, 2))}
        assert {"table.weight", "head.bias", "blocks.0.0.bias", "blocks.0.1.weight"} <= exactly


def errors_of_weights(strategy: str) -> dict[str, tuple[float, float]]:
    """How far what a forward computes with is from the masters, and may be, by parameter."""
    model, _ = small(strategy, node_size=2)
    masters = sw.full_state_dict(model)
    seen: dict[str, Tensor] = {}
    for name, module in model.named_modules():
        for attribute in module._parameters:
            module.register_forward_hook(
                lambda module, args, out, key=f"{name}.{attribute}", attribute=attribute: seen.__setitem__(
                    key, getattr(module, attribute).detach().clone()
                )
            )
    backward(model, 0)
    after = sw.full_state_dict(model)
    assert all(torch.equal(after[name], weight) for name, weight in masters.items())
    return {
        name: (
            float((seen[name] - weight).abs().max()),
            float(weight.abs().max()) / 127 / 2 if weight.ndim > 1 and "table" not in name else 0.0,
        )
        for name, weight in masters.items()
    }


@pytest.mark.parametrize(
    "strategy",
    ["zero3+params_as=int8", "zero3+params_as=int8:forward", "hpz+params_as=int8", "zero2+params_as=int8"],
)
def test_weights_arrive_rounded_once_and_masters_stay(run_ranks: Pool, strategy: str) -> None:
    ranks = run_ranks(4, errors_of_weights, strategy)
    for errors in ranks:
        assert errors == ranks[0]
        assert all(error <= allowed * 1.001 for error, allowed in errors.values())
        assert all(error > 0 for error, allowed in errors.values() if allowed)


def gradients_of(strategy: str, num_micro: int = 1) -> dict[str, Tensor]:
    """The final ones, whole, before any step."""
    model, optimizer = small(strategy, node_size=2)
    for micro in range(num_micro):
        backward(model, micro)
    optimizer.clip_grad_norm(1e9)
    found = {}
    for unit in engine_of(model).units:
        for state in unit.trainable_states:
            flat, final = state.flat, state.gradient.final_for_optimizer
            rows = [torch.empty_like(final) for _ in range(dist.get_world_size())]
            dist.all_gather(rows, final.contiguous())
            spans = [torch.tensor([flat.spans[flat.depth_of_master].start])] * 1
            starts = [torch.empty_like(spans[0]) for _ in rows]
            dist.all_gather(starts, spans[0])
            whole = torch.zeros(flat.num_elems, dtype=final.dtype)
            for start, row in zip(starts, rows, strict=True):
                whole[int(start) : int(start) + row.numel()] = row
            for param, interval in zip(flat.params, flat.intervals, strict=True):
                found[param.name] = whole[interval.start : interval.stop].clone()
    return found


@pytest.mark.parametrize(
    ("base", "codec"),
    slow_but(
        [("ddp", "int8"), ("zero2", "bf16"), ("zero3", "int8"), ("hsdp", "bf16"), ("hpz", "int8")],
        [
            (base, codec)
            for base in ("ddp", "zero1", "zero2", "zero3", "hsdp", "hfsdp", "hpz")
            for codec in ("bf16", "int8", "int4")
        ],
    ),
)
def test_gradients_are_those_of_exact_training_within_the_codec(run_ranks: Pool, base: str, codec: str) -> None:
    """Each of two hops rounds by half a step of its block at most, and so does the sum that is sent around."""
    (expected, *_), (seen, *others) = (run_ranks(4, gradients_of, name) for name in (base, f"{base}+grads_as={codec}"))
    steps = {"bf16": 2**-8, "int8": 1 / 127, "int4": 1 / 7}[codec]
    for name, gradient in expected.items():
        assert all(torch.equal(seen[name], other[name]) for other in others)
        error = float((seen[name] - gradient).abs().max())
        if parse(codec).has_scales and "weight" in name and "table" not in name and ".1." not in name:
            assert 0 < error <= 1.5 * steps * float(gradient.abs().max()) * 4  # one rank's may be larger than the mean
        elif "bias" in name or "table" in name:
            torch.testing.assert_close(seen[name], gradient)  # another order of summation


def sum_of_many(strategy: str, num_steps: int) -> tuple[Tensor, Tensor]:
    """Of the gradients of steps that change nothing: as they came, and nearly exactly."""
    totals = []
    for name in (strategy, "zero3+grads_as=bf16"):
        model, optimizer = small(name, node_size=2)
        states = [state for unit in engine_of(model).units for state in unit.states]
        state = next(state for state in states if "head.weight" in [param.name for param in state.flat.params])
        total = torch.zeros(1)
        for step in range(num_steps):
            backward(model, step)
            optimizer.clip_grad_norm(1e9)
            total = total + state.gradient.final.double()
            optimizer.zero_grad()
        totals.append(total)
    return totals[0], totals[1]


def test_with_feedback_what_was_lost_arrives_later(run_ranks: Pool) -> None:
    """The sum of many gradients is right to about the loss of one; without it, errors add up."""
    errors = {}
    for codec in ("int4", "int4:feedback"):
        found = run_ranks(2, sum_of_many, f"zero3+grads_as={codec}", 24)
        errors[codec] = [float((seen - expected).norm() / expected.norm()) for seen, expected in found]
    assert all(with_it < without / 3 for with_it, without in zip(errors["int4:feedback"], errors["int4"], strict=True))


def norms_with_a_nan(strategy: str) -> tuple[list[float], bool]:
    """Rank 1 has a gradient that is not a number in its second step, which is left out."""
    model, optimizer = small(strategy, node_size=2, skip_nonfinite=True)
    norms = []
    for step in range(3):
        loss = backward(model, step)
        if step == 1 and dist.get_rank() == 1:
            optimizer.zero_grad()
            x = torch.zeros(4, 8, dtype=torch.long)
            (model(x).sum() * float("nan")).backward()
        elif step == 1:
            optimizer.zero_grad()
            backward(model, step)
        norms.append(float(optimizer.clip_grad_norm(1.0)))
        optimizer.step()
        optimizer.zero_grad()
        assert torch.isfinite(loss)
        assert optimizer.num_skipped_steps == (step > 0)
    return norms, all(bool(weight.isfinite().all()) for weight in sw.full_state_dict(model).values())


@pytest.mark.parametrize("codec", ["bf16", "e4m3", "int8", "int4", "int4:asymmetric", "int4:feedback"])
def test_what_is_not_a_number_arrives_as_such_on_every_rank(run_ranks: Pool, codec: str) -> None:
    """And leaves nothing behind: the step after it is an ordinary one."""
    for norms, is_finite in run_ranks(2, norms_with_a_nan, f"zero3+grads_as={codec}"):
        assert [norm == norm for norm in norms] == [True, False, True]
        assert is_finite


@pytest.mark.parametrize("strategy", ["zeropp", "zero3+params_as=int8:2048+grads_as=int8:2048", "ddp+grads_as=int8"])
def test_odd_shapes(run_ranks: Pool, strategy: str) -> None:
    """Parameters of one element and of none, and fewer of them than ranks."""
    (exactly, *_), (told, *others) = (
        run_ranks(4, tell_sharded, train_odd, OddStack, name, node_size=2) for name in (EXACT, strategy)
    )
    assert all(other.values == told.values for other in others)
    assert all(relative(*pair) < FARTHEST for pair in zip(told.values, exactly.values, strict=True))


# ---------------------------------------------------------------------------------------------------------
# checkpoints


def save_and_go_on(folder: Path, saving: str, loading: str) -> tuple[bool, float]:
    """Whether masters and moments are the same to the last bit in another layout; and the next loss there."""
    model, optimizer = small(saving, node_size=2)
    for step in range(3):
        backward(model, step)
        optimizer.step()
        optimizer.zero_grad()
    sw.save(folder, model, optimizer)
    expected = sw.full_state_dict(model)
    other, other_optimizer = small(loading, node_size=2)
    sw.load(folder, other, other_optimizer)
    weights = sw.full_state_dict(other)
    return all(torch.equal(weights[name], weight) for name, weight in expected.items()), float(backward(other, 3))


@pytest.mark.parametrize(("saving", "loading"), [("zeropp", "zero3"), ("zero3", "zeropp")])
def test_checkpoints_fit_all(run_ranks: Pool, tmp_path: Path, saving: str, loading: str) -> None:
    for is_same, loss in run_ranks(4, save_and_go_on, tmp_path / "saved", saving, loading):
        assert is_same
        assert loss == loss


# ---------------------------------------------------------------------------------------------------------
# bad input


@pytest.mark.parametrize(
    ("strategy", "precision", "words"),
    [
        ("zero3+params_as=bf16", "bf16", "params_as='bf16' with parameters in bfloat16: they would be sent in as many"),
        ("zero3+params_as=fp16", "bf16", "params_as='fp16' with parameters in bfloat16"),
        ("zero3+grads_as=int4:feedback", "fp16", "grads_as='int4:feedback' with loss scaling"),
    ],
)
def test_codecs_that_do_not_fit_the_precision(run_ranks: Pool, strategy: str, precision: str, words: str) -> None:
    for error in run_ranks.errors(2, train_sharded, IN_TREE, strategy, precision=precision):
        assert error is not None
        assert words in error


@pytest.mark.parametrize(
    ("strategy", "words"),
    [
        ("zero3+params_as=int4", "16 values are too few for weights"),
        ("zero3+params_as=int8:feedback", "feedback is for gradients"),
        ("zero3+grads_as=int8:forward", "grads_as='int8:forward': a forward has no gradients; forward is for"),
        ("ddp+params_as=int8:forward", "parameters that every rank updates are never sent"),
        ("zero2+params_as=int8:forward", "'int8:forward' with gathered_until='always': .*; write 'int8', or gathered"),
        ("shard_grad_op+params_as=int8:forward", "'int8:forward' with gathered_until='backward'"),
        ("zeropp+params_as=int8:64:forward", "params='node' with optimizer='world': .* stays encoded.*'int8:64'"),
        ("hfsdp+params_as=int8:forward", "split parameters as far as the optimizer"),
        ("ddp+params_as=int8", "parameters that every rank updates are never sent"),
        ("zero3+grads_as=int7", "unknown kind 'int7'"),
        ("zero3+grads_as=int8:100", "a block of 100 elements; it must be a power of two from 64 to 2048"),
        ("zero3+optimizer_as=int8", "'optimizer_as' is not sent"),
        ("zero3+grads_as=int8+grads_as=int4", "grads_as is 'int8' already"),
        ("hpz_offload+params_as=int8", "unknown strategy"),
        ("hpz+params=host+grads=host+optimizer=host+params_as=int8", "stays on the device if it is encoded"),
    ],
)
def test_what_cannot_be_is_refused_with_the_reason(strategy: str, words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        layout_of(strategy)
