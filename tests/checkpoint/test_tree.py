"""The tree of a checkpoint: alike blocks are one line, and nothing is lost in the sums."""

from pathlib import Path

import torch

from shardwise.checkpoint.index import Index, Saved
from shardwise.checkpoint.tree import totals_of, tree_of, walk
from tests.checkpoint.by_hand import save_by_hand, some_tensors


def saved(*shape: int, dtype: str = "F32") -> Saved:
    return Saved(shape, dtype, ())


def lines(tensors: dict[str, Saved], depth: int | None = None) -> list[str]:
    return ["  " * level + node.name for level, node in walk(tree_of(tensors), depth)]


def test_alike_blocks_are_one_line() -> None:
    tensors = {"model.embed.weight": saved(9, 4), "head.weight": saved(9, 4)}
    for layer in range(12):
        tensors[f"model.layers.{layer}.up.weight"] = saved(8, 4)
        tensors[f"model.layers.{layer}.up.bias"] = saved(8)
        tensors |= {f"model.layers.{layer}.experts.{expert}.weight": saved(4, 4) for expert in range(3)}
    assert lines(tensors) == [
        "model",
        "  embed.weight",
        "  layers.0-11",
        "    up",
        "      weight",
        "      bias",
        "    experts.0-2.weight",
        "head.weight",
    ]
    assert lines(tensors, depth=2) == ["model", "  embed.weight", "  layers.0-11", "head.weight"]
    root = tree_of(tensors)
    assert root.num_elems == sum(each.num_elems for each in tensors.values())
    assert root.num_bytes == 4 * root.num_elems


def test_a_block_that_differs_has_a_line_of_its_own() -> None:
    shapes = [(4, 4), (4, 4), (4, 5), (4, 4), (4, 4)]
    tensors = {f"h.{number}.w": saved(*shape) for number, shape in enumerate(shapes)}
    assert lines(tensors) == ["h", "  0-1.w", "  2.w", "  3-4.w"]
    assert lines({"h.0.w": saved(3), "h.1.w": saved(3, dtype="BF16")}) == ["h", "  0.w", "  1.w"]
    assert lines({"h.0.w": saved(3), "h.2.w": saved(3)}) == ["h", "  0.w", "  2.w"]


def test_strange_names_are_all_there() -> None:
    names = ["a", "a.b", "a.b.c", "..", "", ".".join("x" * 5000), "b."]
    found = [node for _, node in walk(tree_of({name: saved(2) for name in names})) if node.saved is not None]
    assert len(found) == len(names)


def test_totals_by_class(tmp_path: Path) -> None:
    tensors = some_tensors()
    frozen, buffers = ("embed.weight",), ("running.count",)
    index = save_by_hand(tmp_path / "c", tensors, frozen=frozen, buffers=buffers)
    totals = totals_of(index)
    params = [tensor for name, tensor in tensors.items() if name not in buffers]
    trained = [tensor for name, tensor in tensors.items() if name not in (*buffers, *frozen)]
    assert totals["num_params"] == sum(tensor.numel() for tensor in params)
    assert totals["num_trained"] == sum(tensor.numel() for tensor in trained)
    assert (totals["num_frozen"], totals["num_buffers"], totals["buffers_bytes"]) == (44, 1, 40)
    assert totals["weights_bytes"] == sum(tensor.nbytes for tensor in params)
    assert totals["state_bytes"] == sum(2 * 4 * tensor.numel() for tensor in trained)
    assert totals["dtypes"]["I64"] == tensors["running.count"].numel()
    assert totals["state_dtypes"] == {"F32": totals["state_bytes"] // 4}
    assert torch.tensor(list(totals["dtypes"].values())).sum() == sum(tensor.numel() for tensor in tensors.values())


def test_what_nobody_says_is_not_known() -> None:
    trained = Saved((3,), "F32", (), "parameter", True)
    totals = totals_of(Index((), {"a": trained, "b": saved(4)}))
    assert (totals["num_trained"], totals["num_frozen"], totals["num_buffers"], totals["buffers_bytes"]) == (
        3,
        None,
        None,
        None,
    )
    totals = totals_of(Index((), {"a": trained}))
    assert (totals["num_trained"], totals["num_frozen"], totals["num_buffers"], totals["buffers_bytes"]) == (3, 0, 0, 0)
