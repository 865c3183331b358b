"""torch's distributed checkpoints, of every shape that torch gives them, read here; and ours, loaded by torch."""

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor

import shardwise as sw
from shardwise import CheckpointError
from shardwise.checkpoint.index import Stored
from shardwise.checkpoint.interop.dcp_write import write_dcp
from shardwise.checkpoint.opened import Opened, open_checkpoint
from tests.checkpoint.by_hand import read_whole
from tests.checkpoint.interop import peers
from tests.harness import Pool

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def save(path: Path, value: dict[str, Any]) -> Path:
    dcp.save(value, checkpoint_id=path, no_dist=True)
    return path


def weights(opened: Opened) -> dict[str, Tensor]:
    with opened.reader() as reader:
        return {name: read_whole(reader, saved) for name, saved in opened.index.tensors.items()}


def adam_of(net: torch.nn.Module) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(net.named_parameters(), lr=torch.tensor(0.25), betas=(0.5, 0.75))
    net(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    return optimizer


# ---------------------------------------------------------------------------------------------------------
# read


def save_rectangles(path: Path) -> dict[str, Tensor]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    whole = {name: torch.randn(5, 7, 3) for name in ("columns", "both", "deep", "copies")}
    placements = {
        "columns": (Replicate(), Shard(1)),
        "both": (Shard(0), Shard(1)),
        "deep": (Shard(2), Shard(0)),
        "copies": (Replicate(), Replicate()),
    }
    sharded = {name: distribute_tensor(value, mesh, placements[name]) for name, value in whole.items()}
    dcp.save({"model": sharded}, checkpoint_id=path)
    return whole


@pytest.mark.slow
def test_tensors_that_are_cut_into_rectangles(run_ranks: Pool, tmp_path: Path) -> None:
    whole = run_ranks(4, save_rectangles, tmp_path / "here")[0]
    found = weights(open_checkpoint(tmp_path / "here"))
    assert {name: torch.equal(value, whole[name]) for name, value in found.items()} == dict.fromkeys(whole, True)


def test_layouts_of_state_dicts(tmp_path: Path) -> None:
    """The model under the names that people give it, or under none."""
    model, other = {"a.weight": torch.ones(3), "b": torch.zeros(())}, {"count": 3, "rng": torch.zeros(5)}
    for number, value in enumerate(
        [
            {"model": model, "train": other, "step": torch.tensor(1)},
            {"app": {"model": model}},
            model,
            {"state_dict": model},
        ]
    ):
        opened = open_checkpoint(save(tmp_path / str(number), value))
        assert set(opened.index.tensors) == set(model)
        assert opened.index.optimizer is None
    assert open_checkpoint(tmp_path / "0").index.origin["left out"] == "train; step"


def test_a_step_beside_the_model_comes_along(tmp_path: Path) -> None:
    path = save(tmp_path / "x", {"model": {"a": torch.ones(3)}, "step": 3, "epoch": 1})
    index = open_checkpoint(path).index
    assert index.extra == {"step": 3}
    assert index.origin["left out"] == "epoch"


def test_wrappers_leave_no_trace_in_names(tmp_path: Path) -> None:
    names = ["_orig_mod.a", "b._checkpoint_wrapped_module.c", "_fsdp_wrapped_module.d._orig_mod.e"]
    for prefix in ("", "module."):
        path = save(tmp_path / f"x{prefix}", {"model": {prefix + name: torch.ones(1) for name in names}})
        assert set(open_checkpoint(path).index.tensors) == {"a", "b.c", "d.e"}
    path = save(tmp_path / "mixed", {"model": {"module.a": torch.ones(1), "b": torch.ones(1)}})
    assert set(open_checkpoint(path).index.tensors) == {"module.a", "b"}
    path = save(tmp_path / "twice", {"model": {"_orig_mod.a": torch.ones(1), "a": torch.ones(1)}})
    with pytest.raises(CheckpointError, match="two of its tensors are called 'a'"):
        open_checkpoint(path)


def test_an_optimizer_with_names_beside_its_numbers(tmp_path: Path) -> None:
    net = torch.nn.Linear(3, 2)
    opened = open_checkpoint(save(tmp_path / "x", {"model": net.state_dict(), "optimizer": adam_of(net).state_dict()}))
    index = opened.index
    assert index.optimizer is not None
    assert [(group["lr"], group["betas"]) for group in index.optimizer.groups] == [(0.25, [0.5, 0.75])]
    for name in ("weight", "bias"):
        assert set(index.tensors[name].state) == {"step", "exp_avg", "exp_avg_sq"}


def test_what_is_in_a_group_and_has_no_state_may_be_frozen(tmp_path: Path) -> None:
    net = torch.nn.Linear(3, 2)
    net.bias.requires_grad_(False)
    state = {"model": net.state_dict(), "optim": adam_of(net).state_dict()}
    index = open_checkpoint(save(tmp_path / "c", state)).index
    assert {name: saved.is_trained for name, saved in index.tensors.items()} == {"weight": True, "bias": None}


def test_what_else_is_beside_an_optimizers_state_is_spoken_of(tmp_path: Path) -> None:
    net = torch.nn.Linear(3, 2)
    given = {"model": net.state_dict(), "optimizer": {**adam_of(net).state_dict(), "scaler": {"scale": 2.0}}}
    index = open_checkpoint(save(tmp_path / "x", given)).index
    assert index.optimizer is not None
    assert index.origin["left out"] == "scaler"


def test_an_optimizer_by_number_is_left_out_with_a_word(tmp_path: Path) -> None:
    net = torch.nn.Linear(3, 2)
    optimizer = adam_of(net).state_dict()
    del optimizer["param_groups"][0]["param_names"]
    index = open_checkpoint(save(tmp_path / "x", {"model": net.state_dict(), "optimizer": optimizer})).index
    assert index.optimizer is None
    assert (
        "the optimizer, whose state has no names: save it with torch's get_optimizer_state_dict"
        in index.origin["left out"]
    )


def refused(path: Path, words: str) -> None:
    with pytest.raises(CheckpointError, match=words):
        open_checkpoint(path)


def test_metadata_that_names_a_function_is_refused(tmp_path: Path) -> None:
    path = save(tmp_path / "x", {"model": {"a": torch.ones(3)}})
    (path / ".metadata").write_bytes(pickle.dumps({"a": print}))
    refused(path, r"cannot read .*x: .*names builtins.print, which is neither a tensor nor a plain container")


def edit(path: Path, change: Callable[[Any], None]) -> None:
    metadata = pickle.loads((path / ".metadata").read_bytes())  # noqa: S301
    change(metadata)
    (path / ".metadata").write_bytes(pickle.dumps(metadata))


def lead_out(metadata: Any) -> None:
    for info in metadata.storage_data.values():
        info.relative_path = "../x/__0_0.distcp"


def point_beyond(metadata: Any) -> None:
    for info in metadata.storage_data.values():
        info.offset = 1 << 50


def overlap(metadata: Any) -> None:
    entry = metadata.state_dict_metadata["model.a"]
    entry.size = torch.Size([6])


def lie_about_the_dtype(metadata: Any) -> None:
    metadata.state_dict_metadata["model.a"].properties.dtype = torch.float64


def forget_the_place(metadata: Any) -> None:
    metadata.storage_data.clear()


def compress(metadata: Any) -> None:
    for info in metadata.storage_data.values():
        info.transform_descriptors = ["stream.zstd"]


def be_something_else(metadata: Any) -> None:
    metadata.state_dict_metadata = [1, 2]


WRONG: dict[str, tuple[Callable[[Any], None], str]] = {
    "leads out": (lead_out, "'../x/__0_0.distcp', which is not inside"),
    "beyond": (point_beyond, "is .* bytes long, not"),
    "a gap": (overlap, "has pieces for 3 of the 6 elements of 'a'"),
    "a dtype": (lie_about_the_dtype, r"'model.a' has no torch.float64 \(3,\) at \(0,\) in its file"),
    "no place": (forget_the_place, "cannot be understood: it has no"),
    "compressed": (compress, "was compressed when it was saved"),
    "nonsense": (be_something_else, "cannot be understood"),
}


@pytest.mark.parametrize("name", WRONG)
def test_metadata_that_cannot_be_right_is_refused(tmp_path: Path, name: str) -> None:
    change, words = WRONG[name]
    path = save(tmp_path / "x", {"model": {"a": torch.ones(3)}})
    edit(path, change)
    refused(path, words)


DEEP = b")" + b"\x85" * 300_000


def put_in_a_path(metadata: Any) -> None:
    metadata.planner_data["model.a"] = ("optimizer", "state", "DEEP", "x")


def put_in_a_name(metadata: Any) -> None:
    metadata.planner_data["model.a"] = ("model", "DEEP")


def put_in_a_version(metadata: Any) -> None:
    metadata.version = "DEEP"


def put_in_a_shape(metadata: Any) -> None:
    metadata.state_dict_metadata["model.a"].size = "DEEP"


def put_in_a_dtype(metadata: Any) -> None:
    metadata.state_dict_metadata["model.a"].properties.dtype = "DEEP"
    metadata.state_dict_metadata["model.a"].chunks = []


def put_in_an_offset(metadata: Any) -> None:
    for index in metadata.storage_data:
        object.__setattr__(index, "offset", "DEEP")


@pytest.mark.parametrize(
    "change", [put_in_a_path, put_in_a_name, put_in_a_version, put_in_a_shape, put_in_a_dtype, put_in_an_offset]
)
def test_what_is_nested_without_end_is_not_followed(tmp_path: Path, change: Callable[[Any], None]) -> None:
    """A tuple of a tuple of a tuple: to compare it, to hash it or to print it would end the process."""
    path = save(tmp_path / "x", {"model": {"a": torch.ones(3)}})
    edit(path, change)
    content = (path / ".metadata").read_bytes()
    assert content.count(b"\x8c\x04DEEP") == 1
    (path / ".metadata").write_bytes(content.replace(b"\x8c\x04DEEP", DEEP))
    if change is put_in_a_version:
        assert open_checkpoint(path).index.origin["version"] == "unknown"
    else:
        refused(path, "cannot be understood")


def test_truncated_files_are_refused(tmp_path: Path) -> None:
    path = save(tmp_path / "x", {"model": {"a": torch.ones(300)}})
    content = (path / "__0_0.distcp").read_bytes()
    for length in (0, 10, len(content) // 2, len(content) - 1):
        (path / "__0_0.distcp").write_bytes(content[:length])
        refused(path, "bytes long, not")
    (path / "__0_0.distcp").unlink()
    refused(path, "No such file")


# ---------------------------------------------------------------------------------------------------------
# written


def save_own(path: Path) -> list[float]:
    sw.init()
    net = peers.fresh()
    model, optimizer = sw.shard(net, peers.adamw(net), "zero3", precision="fp32")
    peers.train(model, optimizer, peers.BEFORE)
    sw.save(path, model, optimizer)
    return peers.train(model, optimizer, peers.AFTER)


def go_on_with_torch(path: Path) -> list[float]:
    """As torch's users do it, with other weights and settings to begin with."""
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    model, optimizer = peers.fully_sharded(seed=1)
    for group in optimizer.param_groups:
        group.update(lr=1.0, betas=(0.5, 0.5), weight_decay=3.0)
    held, state = get_state_dict(model, optimizer)
    dcp.load({"model": held, "optimizer": state}, checkpoint_id=path)
    set_state_dict(model, optimizer, model_state_dict=held, optim_state_dict=state)
    dist.barrier()
    return peers.train(model, optimizer, peers.AFTER)


@pytest.mark.slow
def test_torch_goes_on_from_ours_bit_for_bit(run_ranks: Pool, tmp_path: Path) -> None:
    expected = run_ranks(2, save_own, tmp_path / "own")[0]
    told: list[int] = []
    opened = open_checkpoint(tmp_path / "own")
    write_dcp(opened, tmp_path / "dcp", told.append)
    assert run_ranks(2, go_on_with_torch, tmp_path / "dcp")[0] == expected
    assert sum(told) >= sum(stored.num_bytes for _, stored in opened.index.every_stored())
    # And it is ours again.
    assert run_ranks(2, peers.go_on, tmp_path / "dcp", "zero1")[0] == expected


def test_large_tensors_are_written_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from shardwise.checkpoint.interop import dcp_write

    monkeypatch.setattr(dcp_write, "_PART_BYTES", 48)
    given = {"a": torch.randn(7, 3, 2), "b": torch.randn(50), "c": torch.tensor(2), "d": torch.empty(0, 3)}
    path = save(tmp_path / "x", {"model": given})
    write_dcp(open_checkpoint(path), tmp_path / "y")
    held = {"model": {name: torch.zeros_like(value) for name, value in given.items()}}
    dcp.load(held, checkpoint_id=tmp_path / "y", no_dist=True)
    assert all(torch.equal(held["model"][name], value) for name, value in given.items())
    found = open_checkpoint(tmp_path / "y")
    assert all(torch.equal(value, given[name]) for name, value in weights(found).items())
    assert len(found.index.tensors["a"].pieces) == 4


def test_a_step_that_is_a_number_becomes_what_torch_has(tmp_path: Path) -> None:
    net = torch.nn.Linear(3, 2)
    given = adam_of(net).state_dict()
    for state in given["state"].values():
        state["step"] = 1
    opened = open_checkpoint(save(tmp_path / "x", {"model": net.state_dict(), "optimizer": given}))
    assert opened.index.tensors["bias"].state["step"] == 1
    write_dcp(opened, tmp_path / "y")
    step = open_checkpoint(tmp_path / "y").index.tensors["bias"].state["step"]
    assert isinstance(step, Stored)
    assert (step.shape, step.dtype) == ((), "F32")


def test_what_cannot_be_read_leaves_nothing_behind(tmp_path: Path) -> None:
    path = save(tmp_path / "x", {"model": {"a": torch.ones(300)}})
    opened = open_checkpoint(path)
    with (path / "__0_0.distcp").open("ab") as file:
        file.write(b"more")
    with pytest.raises(CheckpointError, match="bytes long"):
        write_dcp(opened, tmp_path / "y")
    assert [entry.name for entry in tmp_path.iterdir()] == ["x"]
