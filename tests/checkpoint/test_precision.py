"""From any precision into any other: more digits are exact, fewer are refused with a list, or rounded when asked."""

import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import shardwise as sw
from shardwise.checkpoint.loading import holds
from tests.checkpoint.test_refusals import edit, refused
from tests.harness import Pool
from tests.promises.test_checkpoints import values
from tests.support.trainee import features

MASTERS = {"fp32": torch.float32, "bf16": torch.float32, "fp16": torch.float32, "pure-bf16": torch.bfloat16}


class Net(nn.Module):
    def __init__(self, frozen: torch.dtype = torch.float32, seen: torch.dtype = torch.int64) -> None:
        super().__init__()
        self.first = nn.Linear(16, 300)
        self.frozen = nn.Linear(16, 300, bias=False).to(frozen).requires_grad_(False)
        self.norm = nn.LayerNorm(300)
        self.last = nn.Linear(300, 3)
        self.register_buffer("seen", torch.zeros(3, dtype=seen))

    def forward(self, x: Tensor) -> Tensor:
        self.seen += 1
        frozen = nn.functional.linear(x, self.frozen.weight.to(x.dtype))
        return self.last(self.norm(self.first(x) + frozen))


def build(strategy: str, precision: str, seed: int, **options: Any) -> tuple[nn.Module, Any]:
    torch.manual_seed(seed)
    model = Net(**options)
    return sw.shard(model, torch.optim.AdamW(model.parameters(), lr=1e-2), strategy, precision=precision)


def step(model: nn.Module, optimizer: Any, number: int) -> float:
    loss = model(features(number, dist.get_rank())).float().square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return float(loss.detach())


def convert_each(root: Path) -> None:
    """Runs on every rank: from each precision into each."""
    sw.init()
    for given in MASTERS:
        model, optimizer = build("zero3", given, 0)
        for number in range(2):
            step(model, optimizer, number)
        sw.save(root / given, model, optimizer)
    for given in MASTERS:
        for wanted, master in MASTERS.items():
            model, optimizer = build("zero2", wanted, 1)
            load = partial(sw.load, root / given, model, optimizer)
            if torch.promote_types(MASTERS[given], master) != master:
                before = sw.full_state_dict(model)
                refused(
                    load,
                    r"weights would lose digits \(6 differences: 'first.weight' is F32 in it, BF16 in the "
                    r"model; .*'last.bias' is F32 .*choose a precision= .* or load with allow_rounding=True",
                )
                after = sw.full_state_dict(model)
                assert all(torch.equal(after[name], value) for name, value in before.items())
                load = partial(load, allow_rounding=True)
            load()
            sw.save(root / f"{given} to {wanted}", model, optimizer)
            assert step(model, optimizer, 2) < 1.0


@pytest.mark.slow
def test_from_every_precision_into_every_other(run_ranks: Pool, tmp_path: Path) -> None:
    run_ranks(2, convert_each, tmp_path)
    for given in MASTERS:
        saved = values(tmp_path / given)
        for wanted, master in MASTERS.items():
            label = f"{given} to {wanted}"
            seen = values(tmp_path / label)
            for name, value in saved.items():
                if not isinstance(value, Tensor):
                    continue
                is_kept = "frozen" in name or name == "seen" or name.startswith("step of")
                expected = value if is_kept else value.to(master)
                assert seen[name].dtype == expected.dtype, f"{label}: {name}"
                assert torch.equal(seen[name], expected), f"{label}: {name}"
            assert (seen["optimizer"].scaler is not None) == (wanted == "fp16")
            if given == wanted:
                assert seen["optimizer"] == saved["optimizer"]


def spoil(value: float | None, index: dict[str, Any]) -> None:
    scaler = index["optimizer"]["scaler"]
    if value is None:
        del scaler["scale"]
    else:
        scaler["scale"] = value


def meet_scales(root: Path) -> None:
    """The scale of an overflow comes back; a model that has none passes by, and keeps its own when it gets none."""
    sw.init()
    model, optimizer = build("ddp", "fp16", 0)
    for number in range(2):
        (model(features(number, 0)).float().square().mean() * (1e30 if number else 1.0)).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert (optimizer.loss_scale, optimizer.num_skipped_steps) == (2.0**15, 1)
    sw.save(root / "fp16", model, optimizer)
    again, other = build("zero3", "fp16", 1)
    sw.load(root / "fp16", again, other)
    assert (other.loss_scale, other.num_skipped_steps) == (2.0**15, 1)
    for number, value in enumerate((None, float("nan"))):
        path = root / f"spoilt {number}"
        if dist.get_rank() == 0:
            shutil.copytree(root / "fp16", path)
            edit(path, partial(spoil, value))
        dist.barrier()
        refused(partial(sw.load, path, again, other), "loss scaler is .* lacks one of .*'scale'")
    plain, unscaled = build("zero3", "fp32", 1)
    sw.load(root / "fp16", plain, unscaled)
    sw.save(root / "fp32", plain, unscaled)
    fresh, own = build("zero3", "fp16", 1)
    sw.load(root / "fp32", fresh, own)
    assert (own.loss_scale, own.num_skipped_steps) == (2.0**16, 0)


def test_loss_scales_go_on(run_ranks: Pool, tmp_path: Path) -> None:
    run_ranks(2, meet_scales, tmp_path)


def convert_the_rest(root: Path) -> None:
    """What has no master is kept in the dtype of the model, and follows the same rules."""
    sw.init()
    model, optimizer = build("zero3", "bf16", 0)
    step(model, optimizer, 0)
    sw.save(root / "here", model, optimizer)
    narrow = build("zero3", "bf16", 1, frozen=torch.bfloat16, seen=torch.int32)
    refused(
        partial(sw.load, root / "here", *narrow),
        r"\(2 differences: 'frozen.weight' is F32 in it, BF16 .*; 'seen' is I64 in it, I32",
    )
    sw.load(root / "here", *narrow, allow_rounding=True)
    expected, seen = sw.full_state_dict(model), sw.full_state_dict(narrow[0])
    assert seen["seen"].tolist() == [1, 1, 1]
    assert torch.equal(seen["frozen.weight"], expected["frozen.weight"].to(torch.bfloat16))
    sw.save(root / "narrow", *narrow)
    wide = build("ddp", "fp32", 2, frozen=torch.float64)
    sw.load(root / "narrow", *wide)
    assert torch.equal(sw.full_state_dict(wide[0])["frozen.weight"], seen["frozen.weight"].double())
    # A count is no weight, whatever is allowed.
    other = build("zero3", "bf16", 1, seen=torch.float32)
    for allowed in (False, True):
        refused(
            partial(sw.load, root / "here", *other, allow_rounding=allowed),
            r"another model \(1 difference: 'seen' is I64 in it, F32 in the model\)",
        )


def test_what_has_no_master_keeps_to_the_same_rules(run_ranks: Pool, tmp_path: Path) -> None:
    run_ranks(2, convert_the_rest, tmp_path)


def test_floats_of_eight_bits_go_into_all_wider_ones() -> None:
    for small in (torch.float8_e4m3fn, torch.float8_e5m2):
        for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
            assert holds(dtype, small)
            assert not holds(small, dtype)
        assert holds(small, small)
    assert not holds(torch.float8_e4m3fn, torch.float8_e5m2)
    assert holds(torch.float32, torch.bfloat16)
    assert not holds(torch.float16, torch.bfloat16)
