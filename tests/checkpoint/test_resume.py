"""k steps, save, load under another layout and n - k steps are n steps: what the matrix of promises has not."""

from pathlib import Path

import pytest
import torch.distributed as dist

import shardwise as sw
from tests.harness import Pool
from tests.support.models import IN_TREE, MODELS, tokens
from tests.support.strategies import ALL, STRATEGIES, disk_for
from tests.support.training import CLIP, FORMATS, Outcome, Poke, adamw, assert_same, train_alone

NUM_STEPS = 8


def leg(
    first: int,
    last: int,
    strategy: str,
    load_from: Path | None,
    save_to: Path | None,
    model_name: str = IN_TREE,
    poke: Poke | None = None,
    **options: object,
) -> Outcome:
    """Runs on every rank: steps `first` to `last` of a run, from a checkpoint unless they are its first.

    Losses and norms come along in the checkpoint's extra, so the outcome is that of the whole run until then.
    """
    sw.init()
    rank, world = dist.get_rank(), dist.get_world_size()
    spec = MODELS[model_name]
    # Other weights: nothing of what goes on may come from anywhere but the checkpoint.
    model = spec.fresh(seed=0 if load_from is None else 1 + first)
    options = {"precision": "fp32", **disk_for(STRATEGIES[strategy]), **options}
    model, optimizer = sw.shard(model, adamw(list(model.parameters())), STRATEGIES[strategy], **options)
    losses, norms = [], []
    if load_from is not None:
        extra = sw.load(load_from, model, optimizer)
        losses, norms = extra["losses"], extra["norms"]
        assert extra["step"] == first
    for step in range(first, last):
        loss = spec.loss(model, tokens(step, rank, world))
        total = loss.detach().clone()
        (loss if poke is None else poke(loss, step, rank)).backward()
        dist.all_reduce(total)
        losses.append(float(total / world))
        norms.append(float(optimizer.clip_grad_norm(CLIP)))
        optimizer.step()
        optimizer.zero_grad()
    if save_to is not None:
        sw.save(save_to, model, optimizer, extra={"step": last, "losses": losses, "norms": norms})
    return Outcome(losses, norms, sw.full_state_dict(model), optimizer.num_skipped_steps, optimizer.loss_scale)


def legs(jobs: list[tuple[int, int, str, Path | None, Path | None, dict[str, object]]]) -> list[Outcome]:
    return [leg(*job, **options) for *job, options in jobs]


def together(pool: Pool, world: int, jobs: list[tuple[object, ...]]) -> list[Outcome]:
    """The outcomes of rank 0, once all ranks are known to agree on every bit of them."""
    ranks = pool(world, legs, jobs)
    for other in ranks[1:]:
        for seen, expected in zip(other, ranks[0], strict=True):
            assert_same(seen, expected)
    return ranks[0]


@pytest.mark.slow
def test_every_strategy_goes_on_under_another_bit_for_bit(run_ranks: Pool, tmp_path: Path) -> None:
    """From each strategy into the third one after it, in a world of two; the second half plays two nodes."""
    k = 3
    together(run_ranks, 2, [(0, k, name, None, tmp_path / name, {}) for name in ALL])
    after = {name: ALL[(number + 3) % len(ALL)] for number, name in enumerate(ALL)}
    outcomes = together(
        run_ranks, 2, [(k, NUM_STEPS, after[name], tmp_path / name, None, {"node_size": 1}) for name in ALL]
    )
    expected = train_alone(IN_TREE, num_slices=2, num_steps=NUM_STEPS)
    for name, outcome in zip(ALL, outcomes, strict=True):
        try:
            assert_same(outcome, expected)
        except AssertionError as error:
            error.add_note(f"saved under {name}, loaded under {after[name]}")
            raise


PRECISIONS = {"bf16": Poke(-1, 0), "fp16": Poke(2, 1), "pure-bf16": Poke(-1, 0)}


def test_every_precision_goes_on_bit_for_bit(run_ranks: Pool, tmp_path: Path) -> None:
    """With fp16 a step overflows before the save: the scale, and what was skipped, go on as well."""
    k, options = 4, {name: {"precision": name, "poke": poke} for name, poke in PRECISIONS.items()}
    together(run_ranks, 2, [(0, k, "hpz", None, tmp_path / name, options[name]) for name in PRECISIONS])
    outcomes = together(
        run_ranks, 2, [(k, NUM_STEPS, "zero1", tmp_path / name, None, options[name]) for name in PRECISIONS]
    )
    for (name, poke), outcome in zip(PRECISIONS.items(), outcomes, strict=True):
        assert_same(outcome, train_alone(IN_TREE, formats=FORMATS[name], num_slices=2, num_steps=NUM_STEPS, poke=poke))
    assert [outcome.num_skipped for outcome in outcomes] == [0, 1, 0]


def test_weights_that_are_tied_across_units(run_ranks: Pool, tmp_path: Path) -> None:
    together(run_ranks, 2, [(0, 2, "zero3", None, tmp_path / "here", {"model_name": "t5"})])
    (outcome,) = together(run_ranks, 2, [(2, 4, "ddp", tmp_path / "here", None, {"model_name": "t5"})])
    assert_same(outcome, train_alone("t5", num_slices=2, num_steps=4))
