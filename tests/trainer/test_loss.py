"""The chunked loss is the plain one: in value, in gradients, under every layout; and logits are never there whole."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import shardwise as sw
from shardwise.base.errors import ConfigurationError
from shardwise.planner.training import CHUNK_LOGITS_BYTES, tokens_per_chunk
from shardwise.trainer import loss as loss_module
from shardwise.trainer.loss import Chunks, chunked_cross_entropy
from shardwise.trainer.model import Head, Transformer
from shardwise.trainer.shapes import TransformerShape
from tests.harness import Pool
from tests.support.models import SEQ, VOCAB, tokens
from tests.support.trainee import LAYOUTS, NODES, Trainee, check

NUM_TOKENS, WIDTH, CLASSES = 37, 24, 101


def plain(hidden: Tensor, weight: Tensor, targets: Tensor, **options: Any) -> Tensor:
    return F.cross_entropy(F.linear(hidden, weight).float(), targets, **options)


def exact(hidden: Tensor, weight: Tensor, targets: Tensor, **options: Any) -> Tensor:
    return F.cross_entropy(F.linear(hidden, weight), targets, **options)


def example(dtype: torch.dtype = torch.float32, spread: float = 3.0) -> tuple[Tensor, Tensor, Tensor]:
    hidden = torch.randn(NUM_TOKENS, WIDTH).to(dtype)
    weight = (torch.randn(CLASSES, WIDTH) * spread * WIDTH**-0.5).to(dtype)
    targets = torch.randint(CLASSES, (NUM_TOKENS,))
    targets[::5] = -100
    return hidden, weight, targets


def value_and_grads(
    loss_of: Any, hidden: Tensor, weight: Tensor, targets: Tensor, **options: Any
) -> tuple[Tensor, Tensor, Tensor]:
    hidden, weight = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    loss = loss_of(hidden, weight, targets, **options)
    (loss * 3).backward()
    assert hidden.grad is not None
    assert weight.grad is not None
    assert (hidden.grad.dtype, weight.grad.dtype) == (hidden.dtype, weight.dtype)
    return loss.detach(), hidden.grad, weight.grad


# ---------------------------------------------------------------------------------------------------------
# equal to the plain path


@pytest.mark.parametrize("chunk", [1, 8, 37, 1000, None])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_fp32_equals_the_plain_path(chunk: int | None, reduction: str) -> None:
    case = example()
    expected = value_and_grads(plain, *case, reduction=reduction)
    seen = value_and_grads(chunked_cross_entropy, *case, chunk_tokens=chunk, reduction=reduction)
    for a, b in zip(seen, expected, strict=True):
        assert a.dtype == b.dtype
        assert float((a - b).norm() / b.norm()) < 1e-6


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("spread", [0.1, 1.0, 5.0])
def test_sixteen_bits_are_at_least_as_near_to_the_truth_as_the_plain_path(dtype: torch.dtype, spread: float) -> None:
    case = example(dtype, spread)
    hidden, weight, targets = case
    truth = value_and_grads(exact, hidden.double(), weight.double(), targets)
    for chunk in (3, 16, None):
        seen = value_and_grads(chunked_cross_entropy, *case, chunk_tokens=chunk)
        assert seen[0].dtype == torch.float32
        assert abs(float(seen[0]) / float(truth[0]) - 1) < 1e-6
        for ours, theirs, true in zip(seen, value_and_grads(plain, *case), truth, strict=True):
            assert float((ours - true).norm()) <= float((theirs - true).norm()) + 1e-12


def test_gradients_are_the_derivative() -> None:
    hidden, weight, targets = example(torch.float64)
    inputs = (hidden[:4, :3].clone().requires_grad_(), weight[:9, :3].clone().requires_grad_())
    assert torch.autograd.gradcheck(lambda h, w: chunked_cross_entropy(h, w, targets[:4] % 9, chunk_tokens=3), inputs)


def test_any_number_of_leading_dims_and_another_ignored_index() -> None:
    hidden, weight = torch.randn(2, 3, 4, WIDTH), torch.randn(CLASSES, WIDTH)
    targets = torch.randint(5, (2, 3, 4))
    expected = plain(hidden.flatten(0, -2), weight, targets.flatten(), ignore_index=2)
    torch.testing.assert_close(chunked_cross_entropy(hidden, weight, targets, ignore_index=2, chunk_tokens=5), expected)


@pytest.mark.parametrize("num_tokens", [0, None])
def test_without_a_target_it_is_as_in_torch(num_tokens: int | None) -> None:
    hidden, weight, targets = example()
    hidden, targets = hidden[:num_tokens], targets[:num_tokens]
    seen = value_and_grads(chunked_cross_entropy, hidden, weight, targets.fill_(-100), chunk_tokens=8)
    expected = value_and_grads(plain, hidden, weight, targets)
    for a, b in zip(seen, expected, strict=True):
        torch.testing.assert_close(a, b, equal_nan=True)


def test_a_kept_graph_may_be_used_twice_and_a_frozen_side_gets_nothing() -> None:
    hidden, weight, targets = example()
    hidden.requires_grad_()
    loss = chunked_cross_entropy(hidden, weight, targets, chunk_tokens=8)
    first, second = (torch.autograd.grad(loss, hidden, retain_graph=True)[0] for _ in range(2))
    assert torch.equal(first, second)
    assert weight.grad is None
    with torch.no_grad():
        assert torch.equal(chunked_cross_entropy(hidden, weight, targets, chunk_tokens=8), loss)
    assert not chunked_cross_entropy(hidden.detach(), weight, targets).requires_grad


def test_under_autocast_products_are_in_its_dtype() -> None:
    hidden, weight, targets = example()
    hidden.requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        loss = chunked_cross_entropy(hidden, weight, targets, chunk_tokens=8)
    loss.backward()
    assert (loss.dtype, hidden.grad.dtype) == (torch.float32, torch.float32)  # type: ignore[union-attr]
    torch.testing.assert_close(loss, chunked_cross_entropy(hidden.bfloat16(), weight.bfloat16(), targets))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"reduction": "meen"}, "did you mean 'mean'"),
        ({"chunk_tokens": 0}, "chunk_tokens=0"),
        ({"targets": torch.zeros(3, dtype=torch.long)}, r"hidden \(37, 24\), targets \(3,\)"),
        ({"weight": torch.zeros(CLASSES, WIDTH, dtype=torch.bfloat16)}, "float32 and weight torch.bfloat16"),
    ],
)
def test_what_cannot_be_is_refused(change: dict[str, Any], words: str) -> None:
    hidden, weight, targets = example()
    with pytest.raises(ConfigurationError, match=words):
        chunked_cross_entropy(**{"hidden": hidden, "weight": weight, "targets": targets, **change})


# ---------------------------------------------------------------------------------------------------------
# memory


class Largest(TorchDispatchMode):
    """The most elements that any operator put into one tensor; and which matrix products ran."""

    def __init__(self) -> None:
        super().__init__()
        self.num_elems = 0
        self.num_products = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        sizes = [leaf.untyped_storage().nbytes() // leaf.itemsize for leaf in tree_leaves(out) if torch.is_tensor(leaf)]
        self.num_elems = max([self.num_elems, *sizes])
        self.num_products += func in (torch.ops.aten.mm.default, torch.ops.aten.addmm_.default)
        return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_tensor_is_larger_than_a_chunk_of_logits(dtype: torch.dtype) -> None:
    num_tokens, width, classes, chunk = 512, 8, 1024, 32
    hidden = torch.randn(num_tokens, width, dtype=dtype, requires_grad=True)
    weight = torch.randn(classes, width, dtype=dtype, requires_grad=True)
    targets = torch.randint(classes, (num_tokens,))
    with Largest() as seen:
        plain(hidden, weight, targets).backward()
    assert seen.num_elems == num_tokens * classes
    with Largest() as seen:
        chunked_cross_entropy(hidden, weight, targets, chunk_tokens=chunk).backward()
    assert seen.num_elems == max(chunk * classes, classes * width)
    assert seen.num_products == 3 * num_tokens // chunk, "each logit is computed once, and its two gradients"
    with Largest() as seen, torch.no_grad():
        chunked_cross_entropy(hidden, weight, targets, chunk_tokens=chunk)
    assert seen.num_products == num_tokens // chunk


def test_one_gradient_of_each_is_all_that_is_held_until_the_backward() -> None:
    hidden, weight, targets = example(torch.bfloat16)
    hidden.requires_grad_()
    weight.requires_grad_()
    held: list[Tensor] = []

    def hold(tensor: Tensor) -> Tensor:
        held.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(hold, lambda tensor: tensor):
        chunked_cross_entropy(hidden, weight, targets, chunk_tokens=4)
    assert sum(tensor.nbytes for tensor in held) == 4 * (hidden.numel() + weight.numel() + 1)


def test_a_chunk_takes_as_many_tokens_as_its_logits_may_take_memory() -> None:
    assert tokens_per_chunk(128256) == 512
    assert tokens_per_chunk(128256, "large") == 2048
    assert tokens_per_chunk(32000) * 32000 * 4 <= CHUNK_LOGITS_BYTES["small"]
    assert tokens_per_chunk(10**9) == 64


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_compiled_chunks_agree_within_rounding(dtype: torch.dtype) -> None:
    hidden, weight, targets = example(dtype)
    targets[3] = -100
    eager, compiled = (
        value_and_grads(chunked_cross_entropy, hidden, weight, targets, chunk_tokens=16, chunks=chunks)
        for chunks in (Chunks(), Chunks(is_compiled=True))
    )
    precision = torch.finfo(dtype).eps
    for ours, theirs in zip(compiled, eager, strict=True):
        assert float((ours - theirs).norm() / theirs.norm()) < 4 * precision


# ---------------------------------------------------------------------------------------------------------
# in the model


class InHead:
    """Builds a transformer whose loss takes several chunks, although it is tiny."""

    def __init__(self, tied: bool) -> None:
        self.tied = tied

    def __call__(self) -> nn.Module:
        loss_module.tokens_per_chunk = lambda *_: 63
        return Transformer(
            TransformerShape(vocab=VOCAB, hidden=24, layers=3, heads=2, kv_heads=1, ffn=41, max_seq=SEQ, tied=self.tied)
        )


@pytest.fixture
def _chunks_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    """`InHead` sets this in this process as on the ranks."""
    monkeypatch.setattr(loss_module, "tokens_per_chunk", tokens_per_chunk)


def train(trainee: Trainee) -> list[float]:
    """Two micro-batches a step, the forward of the second before the backward of the first."""
    told = []
    for step in range(3):
        losses = []
        for micro in range(2):

            def loss_of(rank: int, step: int = step, micro: int = micro) -> Tensor:
                batch = tokens(step, 2 * rank + micro, 2 * trainee.world, batch=24)
                return trainee.model(batch[:, :-1], batch[:, 1:]) / 2

            losses.append(trainee.share(loss_of))
        with trainee.accumulate():
            losses[0].backward()
        losses[1].backward()
        told.extend([trainee.mean(losses[0] + losses[1]), trainee.clip(0.5)])
        trainee.step()
    return told


@pytest.mark.usefixtures("_chunks_as_they_were")
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_every_layout_equals_one_process(run_ranks: Pool, tied: bool) -> None:
    check(run_ranks, train, InHead(tied), LAYOUTS)


@pytest.mark.usefixtures("_chunks_as_they_were")
def test_nodes_equal_one_process(run_ranks: Pool) -> None:
    check(run_ranks, train, InHead(False), NODES, world=4, node_size=2)


def losses_in(precision: str) -> list[float]:
    sw.init()
    torch.manual_seed(0)
    model = InHead(False)()
    assert list(model.state_dict())[-1] == "head.weight"
    model, optimizer = sw.shard(model, torch.optim.SGD(model.parameters(), lr=0.1), "zero3", precision=precision)
    losses = []
    for step in range(3):
        batch = tokens(step)
        loss = model(batch[:, :-1], batch[:, 1:])
        assert loss.dtype == torch.float32
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


@pytest.mark.usefixtures("_chunks_as_they_were")
@pytest.mark.parametrize("precision", ["bf16", "fp16", "pure-bf16"])
def test_sixteen_bits_under_zero3(run_ranks: Pool, precision: str) -> None:
    expected = run_ranks(2, losses_in, "fp32")[0]
    assert run_ranks(2, losses_in, precision)[0] == pytest.approx(expected, rel=5e-3)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_compiled_head_skips_the_loss(backend: str) -> None:
    head = Head(WIDTH, CLASSES)
    hidden, _, targets = example()
    expected = value_and_grads(
        lambda h, w, t: torch.func.functional_call(head, {"weight": w}, (h, t)), hidden, head.weight.detach(), targets
    )
    torch._dynamo.reset()
    head.compile(backend=backend)
    hidden.requires_grad_()
    loss = head(hidden, targets)
    (loss * 3).backward()
    assert torch.equal(loss.detach(), expected[0])
    assert torch.equal(hidden.grad, expected[1])
    assert torch.equal(head.weight.grad, expected[2])
    torch.testing.assert_close(head(hidden), F.linear(hidden, head.weight))
    torch._dynamo.reset()


# ---------------------------------------------------------------------------------------------------------
# on a GPU, products of 16-bit matrices have fp32 results


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_on_a_gpu(dtype: torch.dtype) -> None:
    hidden, weight, targets = (tensor.cuda() for tensor in example(dtype))
    truth = value_and_grads(exact, hidden.double(), weight.double(), targets)
    theirs = value_and_grads(plain, hidden, weight, targets)
    for chunk in (8, 16, None):
        seen = value_and_grads(chunked_cross_entropy, hidden, weight, targets, chunk_tokens=chunk)
        assert seen[0].dtype == torch.float32
        for mine, other, true in zip(seen, theirs, truth, strict=True):
            assert float((mine - true).norm()) <= 1.05 * float((other - true).norm()) + 1e-6 * float(true.norm())


@pytest.mark.gpu
def test_memory_on_a_gpu() -> None:
    num_tokens, width, classes = 8192, 512, 32768
    hidden = torch.randn(num_tokens, width, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(classes, width, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    targets = torch.randint(classes, (num_tokens,), device="cuda")
    chunk = 512
    chunked_cross_entropy(hidden[:64], weight, targets[:64]).backward()  # cuBLAS's workspace
    hidden.grad = weight.grad = None
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    chunked_cross_entropy(hidden, weight, targets, chunk_tokens=chunk).backward()
    # fp32 logits and their softmax, or the softmax and its 16-bit copy; the gradients in fp32, then in 16 bits beside.
    chunk_bytes = (4 + 4 + 2) * chunk * classes
    gradient_bytes = (4 + 2) * (num_tokens * width + classes * width)
    assert torch.cuda.max_memory_allocated() - before <= chunk_bytes + gradient_bytes + 2**20
