"""Every strategy trains as one process does: losses, gradient norms and weights.

Two measures. Against one process on the *whole batch*, results differ by the order of summation only: in fp32 by
less than 1e-5, relative, after a dozen steps. Against one process that cuts the batch as a world of two does and adds
its two gradients, nothing at all differs, because a sum of two has no order: strategies must be *bit-identical*
to it, and so to each other, in every precision.

For 16-bit formats the second measure is the sharp one. For the first there is no tolerance that is both small and
honest (a gradient whose rounding flips its sign moves a weight by a whole learning rate under Adam), so it is
calibrated by the format itself: distances to fp32 may be at most `FAITHFUL` times what the format alone costs one
process.
"""

from functools import cache
from statistics import fmean

import pytest

from tests.harness import Pool
from tests.support.models import IN_TREE, MODELS
from tests.support.strategies import ALL, CORNERS, NAMED, SOME, STRATEGIES, mixture, slow_but
from tests.support.training import (
    FORMATS,
    Outcome,
    Poke,
    assert_close,
    assert_same,
    relative,
    train_alone,
    train_sharded,
    weight_error,
)

FP32_TOLERANCE = 1e-5
FAITHFUL = 3.0

alone = cache(train_alone)

# (world, ranks per node)
ONE_NODE, TWO_NODES_OF_ONE, TWO_NODES_OF_TWO = (2, 2), (2, 1), (4, 2)

PRECISIONS = {
    "bf16": {"precision": "bf16"},
    "bf16, reduced in bf16": {"precision": "bf16", "reduce_dtype": "bf16"},
    "fp16": {"precision": "fp16"},
    "pure-bf16": {"precision": "pure-bf16"},
}


def sharded(pool: Pool, world: int, node_size: int, strategy: str, model: str = IN_TREE, **options: object) -> Outcome:
    """The outcome of rank 0, once all ranks are known to agree on every bit of it."""
    outcomes = pool(world, train_sharded, model, STRATEGIES[strategy], node_size=node_size, **options)
    for outcome in outcomes[1:]:
        assert_same(outcome, outcomes[0])
    return outcomes[0]


@pytest.mark.parametrize(
    ("world", "node_size", "strategy"),
    slow_but(
        [*((*ONE_NODE, strategy) for strategy in {*NAMED, *CORNERS}), (*TWO_NODES_OF_ONE, "hpz")],
        [
            *((*ONE_NODE, strategy) for strategy in ALL),
            *((*TWO_NODES_OF_ONE, strategy) for strategy in ("hsdp", "hfsdp", "hpz", "mapping")),
        ],
    ),
)
def test_all_strategies_are_bit_identical_in_a_world_of_two(
    run_ranks: Pool, world: int, node_size: int, strategy: str
) -> None:
    outcome = sharded(run_ranks, world, node_size, strategy, precision="fp32")
    assert_same(outcome, alone(IN_TREE, num_slices=2))
    assert_close(outcome, alone(IN_TREE), FP32_TOLERANCE)


@pytest.mark.parametrize(
    "strategy",
    slow_but(
        ("zero3", "hsdp", "hpz", "mapping"),
        [*NAMED, "mapping", "hsdp, all on host", "hfsdp, all on disk", "hpz, all on host"],
    ),
)
def test_two_nodes_of_two_equal_one_process(run_ranks: Pool, strategy: str) -> None:
    outcome = sharded(run_ranks, *TWO_NODES_OF_TWO, strategy, precision="fp32")
    assert_close(outcome, alone(IN_TREE), FP32_TOLERANCE)


@pytest.mark.parametrize(
    ("strategy", "world", "node_size"),
    slow_but(
        [("mapping", 1, 1), ("zero3", 3, 1)],
        [(strategy, *world) for strategy in ("zero3", "mapping") for world in ((1, 1), (3, 3), (3, 1))],
    ),
)
def test_other_worlds_equal_one_process(run_ranks: Pool, strategy: str, world: int, node_size: int) -> None:
    outcome = sharded(run_ranks, world, node_size, strategy, precision="fp32")
    assert_close(outcome, alone(IN_TREE), FP32_TOLERANCE)
    if world == 1:
        assert_same(outcome, alone(IN_TREE))


@pytest.mark.parametrize("strategy", slow_but(("zero2", "hpz"), [*SOME, "zero1", "hpz"]))
def test_micro_batches_do_not_change_the_result(run_ranks: Pool, strategy: str) -> None:
    outcome = sharded(run_ranks, *TWO_NODES_OF_ONE, strategy, precision="fp32", num_micro=3, num_steps=8)
    assert_close(outcome, alone(IN_TREE, num_steps=8), FP32_TOLERANCE)


@pytest.mark.parametrize(
    ("strategy", "accumulate"),
    slow_but(
        [("zero1", "all"), ("hfsdp", "all"), ("hpz", "none")],
        [(strategy, accumulate) for strategy in ("zero1", "hsdp", "hfsdp", "hpz") for accumulate in ("all", "none")],
    ),
)
def test_accumulating_otherwise_costs_time_only(run_ranks: Pool, strategy: str, accumulate: str) -> None:
    """No micro-batch said to be the last, or all of them: gradients come home in the step, or again and again."""
    options = {"num_micro": 3, "accumulate": accumulate, "num_steps": 5}
    outcome = sharded(run_ranks, *TWO_NODES_OF_TWO, strategy, precision="fp32", **options)
    assert_close(outcome, alone(IN_TREE, num_steps=5), FP32_TOLERANCE)


@pytest.mark.parametrize("seed", slow_but((1,), range(3)))
def test_any_mixture_of_layouts(run_ranks: Pool, seed: int) -> None:
    """Units of one model under layouts that nobody named, with more or fewer units gathered ahead."""
    budget = [None, 25_000, 60_000][seed % 3]
    options = {"precision": "fp32", "num_steps": 8, "memory_budget": budget, "node_size": 2}
    two = run_ranks(2, train_sharded, IN_TREE, mixture(seed), **options)
    assert_same(two[0], alone(IN_TREE, num_slices=2, num_steps=8))
    four = run_ranks(4, train_sharded, IN_TREE, mixture(seed), num_micro=3, **options)
    assert_close(four[0], alone(IN_TREE, num_steps=8), FP32_TOLERANCE)


@pytest.mark.parametrize("strategy", ["ddp", "zero3"])
def test_a_run_under_way_can_be_sharded(run_ranks: Pool, strategy: str) -> None:
    """Weights and the optimizer's moments are taken over in the middle."""
    outcome = sharded(run_ranks, *TWO_NODES_OF_ONE, strategy, precision="fp32", num_steps_alone=7)
    assert_close(outcome, alone(IN_TREE), FP32_TOLERANCE)


@pytest.mark.parametrize(
    ("model", "strategy"),
    slow_but(
        [*((model, "zero3") for model in MODELS if model != IN_TREE), ("t5", "ddp"), ("in-tree tied", "hsdp")],
        [(model, strategy) for model in MODELS if model != IN_TREE for strategy in SOME],
    ),
)
def test_models_as_users_have_them(run_ranks: Pool, model: str, strategy: str) -> None:
    outcome = sharded(run_ranks, *ONE_NODE, strategy, model, precision="fp32")
    assert_same(outcome, alone(model, num_slices=2))
    assert_close(outcome, alone(model), FP32_TOLERANCE)


@pytest.mark.slow
@pytest.mark.parametrize("model", ["in-tree tied", "t5"])
def test_models_on_two_nodes_in_micro_batches(run_ranks: Pool, model: str) -> None:
    outcome = sharded(run_ranks, *TWO_NODES_OF_TWO, "hpz", model, precision="fp32", num_micro=3)
    assert_close(outcome, alone(model), FP32_TOLERANCE)


@pytest.mark.parametrize(
    ("precision", "strategy"),
    slow_but(
        [
            *(("bf16", strategy) for strategy in ("ddp", "zero2", "zero3", "hpz", "zero3_nvme")),
            *((precision, "hpz") for precision in PRECISIONS if precision != "bf16"),
        ],
        [
            *(("bf16", strategy) for strategy in NAMED),
            *((precision, strategy) for precision in PRECISIONS for strategy in ("ddp", "hpz") if precision != "bf16"),
        ],
    ),
)
def test_sixteen_bits_are_bit_identical_in_a_world_of_two(run_ranks: Pool, precision: str, strategy: str) -> None:
    outcome = sharded(run_ranks, *TWO_NODES_OF_ONE, strategy, **PRECISIONS[precision])
    assert_same(outcome, alone(IN_TREE, formats=FORMATS[precision], num_slices=2))
    assert outcome.num_skipped == 0


@pytest.mark.parametrize("strategy", ["hsdp"])
@pytest.mark.parametrize("precision", slow_but(["pure-bf16"], ["bf16", "bf16, reduced in bf16", "pure-bf16"]))
def test_bf16_costs_no_more_than_in_one_process(run_ranks: Pool, precision: str, strategy: str) -> None:
    exact = alone(IN_TREE)
    rounded = alone(IN_TREE, formats=FORMATS[precision])
    outcome = sharded(run_ranks, *TWO_NODES_OF_TWO, strategy, **PRECISIONS[precision])

    def distances(of: Outcome) -> dict[str, float]:
        return {
            "losses": fmean(map(relative, of.losses, exact.losses)),
            "norms": fmean(map(relative, of.norms, exact.norms)),
            "weights": weight_error(of.weights, exact.weights),
        }

    allowed = distances(rounded)
    for what, distance in distances(outcome).items():
        assert distance <= FAITHFUL * allowed[what], (what, distance, allowed[what])


@pytest.mark.parametrize("strategy", ["hpz"])
def test_fp16_in_a_world_of_four(run_ranks: Pool, strategy: str) -> None:
    """Slices of three samples have gradients so large that the first scale overflows: here as in one process."""
    outcome = sharded(run_ranks, *TWO_NODES_OF_TWO, strategy, precision="fp16")
    expected = alone(IN_TREE, formats=FORMATS["fp16"], num_slices=4)
    assert (outcome.num_skipped, outcome.loss_scale) == (expected.num_skipped, expected.loss_scale)
    assert expected.num_skipped == 1
    # A sum of four in another order is rounded differently in fp32, and fp16 (2**-11) makes that visible.
    assert max(map(relative, outcome.losses, expected.losses)) < 2**-11


@pytest.mark.parametrize("model", slow_but(("llama",), ["gpt2", "llama", "qwen3"]))
@pytest.mark.parametrize("strategy", ["zero3"])
def test_hugging_face_models_in_bf16(run_ranks: Pool, strategy: str, model: str) -> None:
    outcome = sharded(run_ranks, *ONE_NODE, strategy, model, precision="bf16")
    assert_same(outcome, alone(model, formats=FORMATS["bf16"], num_slices=2))


@pytest.mark.parametrize("strategy", slow_but(("ddp", "zero2", "zero3", "hpz", "zero3_nvme"), [*NAMED, "mapping"]))
def test_overflow_skips_the_step_everywhere(run_ranks: Pool, strategy: str) -> None:
    """One rank's gradient overflows in step 3: no rank takes that step, the scale halves, and training goes on."""
    poke = Poke(step=3, slice=1)
    outcome = sharded(run_ranks, *TWO_NODES_OF_ONE, strategy, precision="fp16", num_steps=6, poke=poke)
    assert (outcome.num_skipped, outcome.loss_scale) == (1, 2.0**15)
    assert_same(outcome, alone(IN_TREE, formats=FORMATS["fp16"], num_slices=2, num_steps=6, poke=poke))


@pytest.mark.parametrize("strategy", ["zero1", "zero3"])
def test_overflow_without_clipping(run_ranks: Pool, strategy: str) -> None:
    """Nobody asks for the norm; the overflow must be found all the same."""
    poke = Poke(step=1, slice=0)
    options = {"num_steps": 4, "clip": None, "poke": poke}
    outcome = sharded(run_ranks, *ONE_NODE, strategy, precision="fp16", **options)
    assert outcome.num_skipped == 1
    assert_same(outcome, alone(IN_TREE, formats=FORMATS["fp16"], num_slices=2, **options))
