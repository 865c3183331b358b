"""Accelerate: a loop whose import was changed trains as it did, and goes on under another strategy."""

from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
from accelerate.utils import DistributedDataParallelKwargs, GradientAccumulationPlugin
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from typer.testing import CliRunner

import shardwise as sw
from shardwise.base.errors import ConfigurationError
from shardwise.cli import app
from shardwise.integrations.accelerate import Accelerator
from tests.harness import Pool
from tests.integrations.scripts import ROOT, forget_accelerate, torchrun

TOLERANCE = 1e-6
STRATEGIES: dict[str, dict[str, Any]] = {
    "ddp": {"strategy": "ddp"},
    "zero2": {"strategy": "zero2"},
    "zero3": {"strategy": "zero3"},
    "hsdp": {"strategy": "hsdp", "node_size": 1},
    "zero3_offload": {"strategy": "zero3_offload"},
}


class Blocks(nn.Module):
    def __init__(self, width: int = 24) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.first = nn.Linear(6, width)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(3))
        self.last = nn.Linear(width, 1)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.first(inputs)
        for block in self.blocks:
            hidden = hidden + block(hidden)
        return self.last(hidden)


def new_accelerator(words: dict[str, Any] | None, **keywords: Any) -> Any:
    forget_accelerate()
    keywords = {"cpu": True, "gradient_accumulation_steps": 2, **keywords, **(words or {})}
    return (accelerate.Accelerator if words is None else Accelerator)(**keywords)


def prepared(accelerator: Any, shuffle: bool = True) -> tuple[Any, ...]:
    model = Blocks()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(96, 6, generator=generator)
    loader = DataLoader(TensorDataset(inputs, inputs.square().sum(1, keepdim=True)), batch_size=8, shuffle=shuffle)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=20)
    return accelerator.prepare(loader, model, scheduler, optimizer)


def loop(
    words: dict[str, Any] | None, folder: Path, epochs: tuple[int, ...] = (0, 1), shuffle: bool = True, **keywords: Any
) -> Any:
    """The script: losses, norms and learning rates of every step."""
    accelerator = new_accelerator(words, **keywords)
    torch.manual_seed(11)
    loader, model, scheduler, optimizer = prepared(accelerator, shuffle)
    if epochs[0]:
        accelerator.load_state(str(folder / "state"))
    seen = []
    for epoch in epochs:
        for inputs, targets in loader:
            with accelerator.accumulate(model):
                loss = nn.functional.mse_loss(model(inputs), targets)
                accelerator.backward(loss)
                norm = None
                if accelerator.sync_gradients:
                    accelerator.clip_grad_value_(model.parameters(), 0.2)
                    norm = float(accelerator.clip_grad_norm_(model.parameters(), 1.0, norm_type=3.0))
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            mean = float(accelerator.reduce(loss.detach(), "mean"))
            seen.append((mean, norm or 0.0, scheduler.get_last_lr()[0]))
        if epoch == 0:
            accelerator.save_state(str(folder / "state"))
    accelerator.save_model(model, str(folder / "model"))
    return seen


@pytest.fixture(scope="module")
def beside(run_ranks: Pool, tmp_path_factory: pytest.TempPathFactory) -> list[tuple[float, ...]]:
    """The same two processes with Accelerate alone."""
    folder = tmp_path_factory.mktemp("accelerate")
    return run_ranks(2, loop, None, folder)[0]


def flat(rows: list[tuple[float, ...]]) -> list[float]:
    return [value for row in rows for value in row]


@pytest.mark.quick("zero2", "zero3_offload")
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_loop_trains_as_it_did(
    run_ranks: Pool, tmp_path: Path, beside: list[tuple[float, ...]], strategy: str
) -> None:
    first, second = run_ranks(2, loop, STRATEGIES[strategy], tmp_path)
    assert flat(first) == pytest.approx(flat(beside), abs=TOLERANCE, rel=TOLERANCE)
    assert second == first
    weights = load_file(tmp_path / "model" / "model.safetensors")
    assert {name: tuple(value.shape) for name, value in weights.items()} == {
        name: tuple(value.shape) for name, value in Blocks().state_dict().items()
    }


def test_sync_each_batch_changes_nothing(run_ranks: Pool, tmp_path: Path, beside: list[tuple[float, ...]]) -> None:
    found = run_ranks(2, loop_synced, tmp_path)[0]
    assert flat(found) == pytest.approx(flat(beside), abs=TOLERANCE, rel=TOLERANCE)


def loop_synced(folder: Path) -> Any:
    plugin = GradientAccumulationPlugin(num_steps=2, sync_each_batch=True)
    words = {"strategy": "zero2"}
    return loop(words, folder, gradient_accumulation_steps=1, gradient_accumulation_plugin=plugin)


def test_its_state_goes_on_under_another_strategy(run_ranks: Pool, tmp_path: Path) -> None:
    """In the same order, which Accelerate does not save."""
    expected = run_ranks(2, loop, {"strategy": "zero3"}, tmp_path, shuffle=False)[0]
    found = run_ranks(2, loop, {"strategy": "zero1"}, tmp_path, epochs=(1,), shuffle=False)[0]
    assert flat(found) == pytest.approx(flat(expected[-len(found) :]), abs=TOLERANCE, rel=TOLERANCE)


def test_state_of_plain_accelerate_goes_on(run_ranks: Pool, tmp_path: Path) -> None:
    """Its optimizer is saved by number: the parameters have the order of this one's groups."""
    expected = run_ranks(2, loop, None, tmp_path, shuffle=False)[0]
    found = run_ranks(2, loop, {"strategy": "zero3"}, tmp_path, epochs=(1,), shuffle=False)[0]
    assert flat(found) == pytest.approx(flat(expected[-len(found) :]), abs=TOLERANCE, rel=TOLERANCE)


def test_its_state_is_verified(run_ranks: Pool, tmp_path: Path) -> None:
    run_ranks(2, loop, {"strategy": "zero3"}, tmp_path)
    place = tmp_path / "state"
    assert CliRunner().invoke(app, ["verify", str(place)]).exit_code == 0
    assert "Adam" in CliRunner().invoke(app, ["inspect", str(place)]).stdout
    shard = place / "shardwise" / "rank-00000.safetensors"
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    # As the Trainer has it, with whole weights beside it.
    (place / "model.safetensors").write_bytes((tmp_path / "model" / "model.safetensors").read_bytes())
    damaged = CliRunner().invoke(app, ["verify", str(place)])
    assert damaged.exit_code == 5
    assert "rank-00000.safetensors is damaged" in damaged.stdout
    assert "model.safetensors: good" in damaged.stdout


@pytest.mark.slow
def test_the_example_runs(tmp_path: Path) -> None:
    printed = torchrun(str(ROOT / "examples" / "accelerate_loop.py"), "--output_dir", "run", cwd=tmp_path)
    losses = [float(line.rpartition(" ")[2]) for line in printed.splitlines() if line.startswith("epoch")]
    assert len(losses) == 3
    assert losses[2] < losses[1] < losses[0]
    assert (tmp_path / "run" / "model.safetensors").is_file()
    assert (tmp_path / "run" / "epoch-2" / "shardwise" / "complete").is_file()


def mixed() -> tuple[str, torch.dtype, bool]:
    accelerator = new_accelerator({"strategy": "zero3"}, mixed_precision="bf16")
    _, model, _, optimizer = prepared(accelerator)
    output = model(torch.ones(2, 6))
    return sw.describe(model).splitlines()[1], output.dtype, optimizer.step_was_skipped


def test_a_mixed_precision_becomes_ours_and_outputs_come_in_fp32(run_ranks: Pool) -> None:
    words = "computes in bfloat16, updates in float32, reduces in float32"
    assert run_ranks(2, mixed) == [(words, torch.float32, False)] * 2


def overflow() -> list[tuple[bool, float]]:
    """A step that is left out does not move the schedule."""
    accelerator = new_accelerator({"strategy": "zero2", "precision": "fp32", "skip_nonfinite": True})
    _, model, scheduler, optimizer = prepared(accelerator)
    seen = []
    for step in range(4):
        with accelerator.accumulate(model):
            accelerator.backward(model(torch.full((2, 6), float("nan") if step == 1 else 1.0)).mean())
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        seen.append((optimizer.step_was_skipped, scheduler.get_last_lr()[0]))
    return seen


def test_a_step_that_is_left_out_is_told(run_ranks: Pool) -> None:
    seen = run_ranks(2, overflow)[0]
    assert [skipped for skipped, _ in seen] == [False, True, True, False]
    assert seen[1][1] == seen[0][1] == 1e-2
    assert seen[3][1] < 1e-2


def two_models() -> list[float]:
    """Two models with an optimizer each, and a frozen one with none."""
    accelerator = new_accelerator({"strategy": "zero3"}, gradient_accumulation_steps=1)
    models = [Blocks(16), Blocks(24), Blocks(24).requires_grad_(False)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models[:2]]
    first, teacher, opt_a, second, opt_b = accelerator.prepare(
        models[0], models[2], optimizers[1], models[1], optimizers[0]
    )
    norms = []
    for _ in range(2):
        outputs = first(torch.ones(2, 6)) + second(torch.ones(2, 6)) - teacher(torch.ones(2, 6)).detach()
        accelerator.backward(outputs.square().mean())
        norms += [float(accelerator.clip_grad_norm_(model.parameters(), 9.0)) for model in (first, second)]
        for optimizer in (opt_a, opt_b):
            optimizer.step()
            optimizer.zero_grad()
    return norms


def test_models_find_their_optimizers(run_ranks: Pool) -> None:
    alone = [Blocks(16), Blocks(24), Blocks(24)]
    expected = []
    for _ in range(2):
        outputs = alone[0](torch.ones(2, 6)) + alone[1](torch.ones(2, 6)) - alone[2](torch.ones(2, 6)).detach()
        outputs.square().mean().backward()
        for model in alone[:2]:
            expected.append(float(nn.utils.clip_grad_norm_(model.parameters(), 9.0)))
            torch.optim.SGD(model.parameters(), lr=0.1).step()
            model.zero_grad()
    assert run_ranks(2, two_models)[0] == pytest.approx(expected, rel=1e-5)


# ---------------------------------------------------------------------------------------------------------
# refusals

KEYWORDS = {
    "a misspelt keyword": ({"stratgy": "zero3"}, "did you mean 'strategy'"),
    "another engine": ({"fsdp_plugin": object()}, "write **sw.from_accelerate(FILE).words"),
    "fp8": ({"mixed_precision": "fp8"}, "use 'bf16'"),
    "two precisions": ({"mixed_precision": "bf16", "precision": "fp32"}, "contradict each other"),
    "a compiled model": ({"dynamo_backend": "inductor"}, "compile its blocks"),
    "a hook of DDP's": (
        {"kwargs_handlers": [DistributedDataParallelKwargs(comm_hook="bf16")]}, "strategy='...+grads_as=bf16'",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", KEYWORDS)
def test_what_is_refused_at_once(case: str) -> None:
    keywords, reason = KEYWORDS[case]
    with pytest.raises(ConfigurationError) as caught:
        new_accelerator(keywords)
    assert reason in str(caught.value)
    assert "\n" not in str(caught.value)


def alone_on_cpu() -> None:
    new_accelerator({"cpu": False})


def clip_too_early() -> None:
    accelerator = new_accelerator({"strategy": "zero3"})
    _, model, _, _ = prepared(accelerator)
    with accelerator.accumulate(model):
        accelerator.backward(model(torch.ones(2, 6)).mean())
        accelerator.clip_grad_norm_(model.parameters(), 1.0)


def clip_others() -> None:
    accelerator = new_accelerator({"strategy": "zero3"}, gradient_accumulation_steps=1)
    _, model, _, _ = prepared(accelerator)
    accelerator.backward(model(torch.ones(2, 6)).mean())
    accelerator.clip_grad_norm_(model.blocks.parameters(), 1.0)


def optimizer_later() -> None:
    accelerator = new_accelerator({"strategy": "zero3"})
    model = Blocks()
    optimizer = torch.optim.SGD(model.parameters())
    accelerator.prepare(model)
    accelerator.prepare(optimizer)


def two_dtypes() -> None:
    model = Blocks()
    model.last.to(torch.bfloat16)
    new_accelerator({"strategy": "zero3"}).prepare(model)


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        pytest.param(
            alone_on_cpu, "cpu=True", marks=pytest.mark.skipif(torch.cuda.is_available(), reason="each has a GPU")
        ),
        (clip_too_early, "if accelerator.sync_gradients:"),
        (clip_others, "model.parameters() of the model that `prepare` returned"),
        (optimizer_later, "model, optimizer = accelerator.prepare(model, optimizer)"),
        (two_dtypes, "parameters in bfloat16, float32"),
    ],
)
def test_what_is_refused_on_every_rank(run_ranks: Pool, script: Any, reason: str) -> None:
    for error in run_ranks.errors(2, script):
        assert error is not None
        assert reason in error
