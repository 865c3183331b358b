"""What goes wrong is said on every rank, in words, and harms nothing that was there before."""

import json
import os
import resource
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import shardwise as sw
from shardwise.checkpoint import folder
from tests.harness import Pool
from tests.support.trainee import features


class Net(nn.Module):
    def __init__(self, width: int = 600, layers: int = 1, bias: bool = True, buffer: bool = False) -> None:
        super().__init__()
        self.first = nn.Linear(16, width, bias=bias)
        self.more = nn.ModuleList(nn.Linear(8, 8) for _ in range(layers))
        self.last = nn.Linear(width, 3)
        if buffer:
            self.register_buffer("seen", torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x))


def adamw(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-2)


def built(
    strategy: str = "zero3",
    make: Callable[[list[nn.Parameter]], torch.optim.Optimizer] = adamw,
    net: Callable[[], nn.Module] = Net,
    seed: int = 0,
    **options: Any,
) -> tuple[nn.Module, Any]:
    sw.init()
    torch.manual_seed(seed)
    model = net()
    return sw.shard(model, make(list(model.parameters())), strategy, **{"precision": "fp32", **options})


def step(model: nn.Module, optimizer: Any, number: int = 0) -> None:
    model(features(number, dist.get_rank())).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def save_one(path: Path, strategy: str = "zero3", **options: Any) -> None:
    model, optimizer = built(strategy, **options)
    step(model, optimizer)
    sw.save(path, model, optimizer, extra={"step": 1})


def refused(call: Callable[[], Any], words: str, kind: type[Exception] = sw.CheckpointError) -> None:
    with pytest.raises(kind, match=words) as raised:
        call()
    # Every rank hears the same.
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, str(raised.value))
    assert len(set(found)) == 1, found


# ---------------------------------------------------------------------------------------------------------
# saves that fail


def fail_to_save(path: Path) -> None:
    """One rank may write no more than a few bytes, as on a full disk; the older checkpoint survives."""
    model, optimizer = built()
    step(model, optimizer)
    sw.save(path, model, optimizer, extra={"step": 1})
    step(model, optimizer, 1)
    before = sw.full_state_dict(model)
    for rank in range(2):
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        if dist.get_rank() == rank:
            resource.setrlimit(resource.RLIMIT_FSIZE, (2000, limits[1]))
        try:
            refused(
                lambda: sw.save(path, model, optimizer, extra={"step": 2}),
                rf"rank {rank}: cannot write .*rank-0000{rank}.safetensors: File too large",
            )
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        dist.barrier()
        assert [entry.name for entry in path.parent.iterdir()] == [path.name]
    other, other_optimizer = built("ddp", seed=1)
    assert sw.load(path, other, other_optimizer) == {"step": 1}
    # Nothing happened to the model: it trains on, and the next save is good.
    assert all(torch.equal(value, before[key]) for key, value in sw.full_state_dict(model).items())
    sw.save(path, model, optimizer, extra={"step": 2})
    assert sw.load(path, other, other_optimizer) == {"step": 2}


def test_a_full_disk_on_one_rank_fails_on_all_and_spares_the_older_one(run_ranks: Pool, tmp_path: Path) -> None:
    run_ranks(2, fail_to_save, tmp_path / "run" / "here")


def refuse_saves(path: Path) -> None:
    model, optimizer = built()
    rank = dist.get_rank()
    refused(lambda: sw.save(path / "x", model, optimizer, extra={"rng": torch.zeros(2)}), r"extra= must be .* JSON")
    (path / "mine").mkdir(exist_ok=True)
    (path / "mine" / "notes").write_text("not a checkpoint")
    refused(lambda: sw.save(path / "mine", model), "is not a checkpoint, so it is not replaced")
    refused(lambda: sw.save(path / f"x{rank}", model), "the ranks differ in sw.save's path", sw.WireError)
    refused(lambda: sw.save(path / "x", model, optimizer if rank else None), "the ranks differ in what", sw.WireError)
    refused(lambda: sw.save("/proc/nowhere/x", model), "rank 0: cannot make /proc/nowhere/x.partial")
    plain = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0)
    other = built()[1]
    for wrong in (plain, other):
        refused(lambda wrong=wrong: sw.save(path / "x", model, wrong), "give the one", sw.ConfigurationError)
    refused(lambda: sw.save(path / "x", Net()), "is not sharded", sw.StateError)
    optimizer.state["a counter"] = {"count": 3}
    refused(lambda: sw.save(path / "x", model, optimizer), "keeps state for 'a counter'")
    del optimizer.state["a counter"]
    step(model, optimizer)
    states = list(optimizer.inner.state.values())
    for value, words in {
        (1, 2): "as a tuple, which a checkpoint cannot hold",
        torch.zeros(3): "cannot be cut for another world",
    }.items():
        for state in states:
            state["history"] = value
        refused(lambda: sw.save(path / "x", model, optimizer), f"keeps 'history' of .*{words}")
    for state in states:
        del state["history"]
    states[0]["only here"] = rank
    if rank:
        del states[0]["only here"]
    refused(lambda: sw.save(path / "x", model, optimizer), "such state cannot be merged")
    states[0].pop("only here", None)
    assert {entry.name for entry in path.iterdir()} == {"mine"}
    with sw.whole(model):
        refused(lambda: sw.save(path / "x", model), "inside `with sw.whole", sw.StateError)
    sw.save(path / "x", model, optimizer)


def test_saves_that_cannot_be_right_are_refused(run_ranks: Pool, tmp_path: Path) -> None:
    run_ranks(2, refuse_saves, tmp_path)


def save_between(path: Path) -> None:
    model, optimizer = built(early_update=True)
    step(model, optimizer)
    model(features(1, dist.get_rank())).square().mean().backward()
    for call in (sw.save, sw.load):
        refused(partial(call, path, model, optimizer), "updated weights .* call step", sw.StateError)
    optimizer.step()
    sw.save(path, model, optimizer)


def test_half_an_update_is_not_saved(run_ranks: Pool, tmp_path: Path) -> None:
    run_ranks(2, save_between, tmp_path / "here")


# ---------------------------------------------------------------------------------------------------------
# loads that fail


def edit(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change an index, with a marker that agrees with it."""
    index = json.loads((path / folder.INDEX).read_text())
    change(index)
    shutil.copytree(path, folder.partial_of(path))
    folder.complete(path, json.dumps(index))


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 4)


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def lead_out(index: dict[str, Any]) -> None:
    index["files"][1]["name"] = "../rank-00001.safetensors"


def leave_a_gap(index: dict[str, Any]) -> None:
    del index["tensors"]["first.weight"]["pieces"][0]


def lead_too_far(index: dict[str, Any]) -> None:
    index["tensors"]["first.weight"]["pieces"][0][1] = 1 << 40


def claim_everything(index: dict[str, Any]) -> None:
    index["tensors"]["first.weight"]["shape"] = [1 << 20, 1 << 20]


def set_a_rate(index: dict[str, Any]) -> None:
    index["optimizer"]["groups"][0]["lr"] = "fast"


def set_a_pair(index: dict[str, Any]) -> None:
    index["optimizer"]["groups"][0]["betas"] = 0.9


# What is found before anything is changed, and what only reading finds.
BROKEN: dict[str, tuple[Callable[[Path], Any], str]] = {
    "gone": (shutil.rmtree, "there is no checkpoint"),
    "no marker": (lambda path: (path / folder.MARKER).unlink(), "its save did not finish"),
    "truncated": (lambda path: truncate(path / folder.rank_file(1)), "bytes long, and was written with"),
    "a file is gone": (lambda path: (path / folder.rank_file(1)).unlink(), "rank-00001.safetensors: No such file"),
    "index changed": (lambda path: (path / folder.INDEX).write_text("{}"), "its digest differs"),
    "leads out": (lambda path: edit(path, lead_out), "'../rank-00001.safetensors', which is not inside"),
    "a gap": (lambda path: edit(path, leave_a_gap), "for element 0 of 'first.weight'"),
    "too far": (lambda path: edit(path, lead_too_far), "'first.weight' up to byte .* bytes long"),
    "no rate": (lambda path: edit(path, set_a_rate), "optimizer has lr='fast', this one has lr=0.01"),
    "no pair": (lambda path: edit(path, set_a_pair), r"optimizer has betas=0.9, this one has betas=\(0.9, 0.999\)"),
    "everything": (lambda path: edit(path, claim_everything), "of the 1099511627776 elements of 'first.weight'"),
}
DAMAGED: dict[str, tuple[Callable[[Path], Any], str]] = {
    "a byte": (lambda path: flip(path / folder.rank_file(1)), "(?s)is damaged: bytes 0 to .*a mixture .* load another"),
}


def load_broken(root: Path) -> None:
    save_one(root / "good")
    model, optimizer = built("ddp", seed=1)
    before = sw.full_state_dict(model)
    for name, (spoil, words) in (BROKEN | DAMAGED).items():
        path = root / name
        if dist.get_rank() == 0:
            shutil.copytree(root / "good", path)
            spoil(path)
        dist.barrier()
        refused(lambda path=path: sw.load(path, model, optimizer), words)
        if name in BROKEN:
            after = sw.full_state_dict(model)
            assert all(torch.equal(after[key], value) for key, value in before.items()), name
    assert sw.load(root / "good", model, optimizer) == {"step": 1}


def test_broken_checkpoints_are_refused_before_anything_changes(run_ranks: Pool, tmp_path: Path) -> None:
    run_ranks(2, load_broken, tmp_path)


def choose_otherwise(index: dict[str, Any]) -> None:
    """As others write it: their choice, not ours."""
    index["optimizer"]["groups"][0] |= {"fused": None, "foreach": True, "capturable": None}


def load_into_fused(path: Path) -> None:
    save_one(path)
    if dist.get_rank() == 0:
        edit(path, choose_otherwise)
    dist.barrier()
    model, optimizer = built("ddp", lambda params: torch.optim.AdamW(params, lr=1e-2, fused=True), seed=1)
    sw.load(path, model, optimizer)
    assert optimizer.param_groups[0]["fused"] is True
    step(model, optimizer)


def test_how_updates_are_computed_is_the_running_programs_choice(run_ranks: Pool, tmp_path: Path) -> None:
    run_ranks(2, load_into_fused, tmp_path / "here")


def count_in_numbers(index: dict[str, Any]) -> None:
    """As DeepSpeed does."""
    for tensor in index["tensors"].values():
        if "step" in tensor["state"]:
            tensor["state"]["step"] = 5


def load_numbers(path: Path) -> None:
    save_one(path)
    if dist.get_rank() == 0:
        edit(path, count_in_numbers)
    dist.barrier()
    for has_stepped in (False, True):
        model, optimizer = built("ddp", seed=1)
        if has_stepped:
            step(model, optimizer)
        before = [optimizer.state[param].get("step") for param in (model.first.weight, model.last.bias)]
        sw.load(path, model, optimizer)
        after = [optimizer.state[param]["step"] for param in (model.first.weight, model.last.bias)]
        assert [float(count) for count in after] == [5.0, 5.0]
        if has_stepped:
            assert all(a is b for a, b in zip(before, after, strict=True)), "a recorded step reads it where it is"
        step(model, optimizer)
        assert [float(count) for count in after] == [6.0, 6.0]


def test_steps_may_be_counted_in_numbers(run_ranks: Pool, tmp_path: Path) -> None:
    run_ranks(2, load_numbers, tmp_path / "here")


def two_groups(params: list[nn.Parameter], first: int = 1) -> torch.optim.Optimizer:
    return torch.optim.AdamW([{"params": params[:first]}, {"params": params[first:]}], lr=1e-2)


OTHERS: dict[str, tuple[dict[str, Any], str]] = {
    "fewer parameters": ({"net": partial(Net, bias=False)}, "1 difference: 'first.bias' is in it, not in the model"),
    "more parameters": (
        {"net": partial(Net, layers=2)},
        "2 differences: 'more.1.weight' is in the model, not in it; 'more.1.bias' is in the model, not in it",
    ),
    "other shapes": (
        {"net": partial(Net, width=601)},
        r"3 differences: .*'first.weight' is \(600, 16\) in it, \(601, 16\) in the model",
    ),
    "more buffers": ({"net": partial(Net, buffer=True)}, "1 difference: 'seen' is in the model, not in it"),
    "many more": ({"net": partial(Net, layers=20)}, "38 differences: .*; and 18 more"),
    "another optimizer": ({"make": partial(torch.optim.SGD, lr=1.0)}, "optimizer is AdamW, this one is SGD"),
    "more groups": ({"make": two_groups}, "has 1 groups, this one has 2"),
}


def load_others(root: Path) -> None:
    save_one(root / "here")
    save_one(root / "groups", make=two_groups)
    for options, words in OTHERS.values():
        refused(partial(sw.load, root / "here", *built("zero2", **options)), words)
    other = built("zero2", make=partial(two_groups, first=2))
    refused(partial(sw.load, root / "groups", *other), "'first.bias' is in group 1 .* and in group 0 of this one")


def test_other_models_and_optimizers_are_refused(run_ranks: Pool, tmp_path: Path) -> None:
    run_ranks(2, load_others, tmp_path)


def load_whole_state(path: Path) -> None:
    """State that was made for whole matrices cannot be cut; whoever can, is refused at sw.shard."""
    model, optimizer = built("ddp")
    step(model, optimizer)
    for param in optimizer.param_groups[0]["params"]:
        optimizer.state[param]["rows"] = torch.zeros(5)
    sw.save(path, model, optimizer)
    sw.load(path, *built("ddp", seed=1))
    refused(partial(sw.load, path, *built("zero3", seed=1)), "'rows' of parameter .* was made for the whole")


def test_state_for_whole_matrices_stays_whole(run_ranks: Pool, tmp_path: Path) -> None:
    run_ranks(2, load_whole_state, tmp_path / "here")


def test_the_messages_of_state_dicts_lead_here(run_ranks: Pool) -> None:
    run_ranks(1, ask_for_state_dicts)


def ask_for_state_dicts() -> None:
    model, optimizer = built()
    refused(model.state_dict, "sw.save", sw.StateError)
    refused(optimizer.state_dict, "sw.save", sw.StateError)
    refused(lambda: model.load_state_dict({}), "sw.load", sw.StateError)
    refused(lambda: optimizer.load_state_dict({}), "sw.load", sw.StateError)
