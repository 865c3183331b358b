"""The host update is torch's, bit for bit."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from shardwise.base.errors import StateError
from shardwise.core.native.adamw import AdamSettings, AdamUpdate, adamw, update_with_torch
from shardwise.core.native.cores import cores_for
from shardwise.core.native.library import library

FIRST = AdamSettings(1e-3, 0.9, 0.999, 1e-8, 0.1, decoupled=True, maximize=False, fused=False, step=1)
CORES = cores_for(0, 1)
SIZES = (1, 7, 16, 255, 256, 4097, 65_537, (1 << 20) + 3)


@pytest.fixture(autouse=True)
def _one_thread_for_torch() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@dataclass
class State:
    master: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor

    @classmethod
    def of(cls, num_elems: int) -> "State":
        return cls(torch.randn(num_elems), torch.zeros(num_elems), torch.zeros(num_elems))

    def clone(self) -> "State":
        return State(self.master.clone(), self.exp_avg.clone(), self.exp_avg_sq.clone())

    def update(
        self,
        grad: Tensor,
        settings: AdamSettings,
        out: Tensor | None = None,
        scale: float = 1.0,
        cores: tuple[int, ...] = CORES,
    ) -> None:
        adamw(AdamUpdate(self.master, self.exp_avg, self.exp_avg_sq, grad, out, settings, scale), cores)

    def assert_same(self, other: "State") -> None:
        """To the last bit; the sign of a zero aside, which depends in torch on where in the array it is."""
        assert self.exp_avg.equal(other.exp_avg)
        assert self.exp_avg_sq.equal(other.exp_avg_sq)
        assert self.master.equal(other.master)


class Torch:
    """torch's optimizer on a copy of the weights."""

    def __init__(self, state: State, given: AdamSettings) -> None:
        self.param = torch.nn.Parameter(state.master.clone())
        kind = torch.optim.AdamW if given.decoupled else torch.optim.Adam
        self.optimizer = kind(
            [self.param],
            lr=given.lr,
            betas=(given.beta1, given.beta2),
            eps=given.eps,
            weight_decay=given.weight_decay,
            maximize=given.maximize,
            foreach=False,
            fused=given.fused,
        )

    def step(self, grad: Tensor) -> State:
        self.param.grad = grad.clone()
        self.optimizer.step()
        own = self.optimizer.state[self.param]
        return State(self.param.detach(), own["exp_avg"], own["exp_avg_sq"])


def bits(tensor: Tensor) -> Tensor:
    return tensor.view(torch.int32 if tensor.dtype == torch.float32 else torch.int16)


def gradients(num_elems: int) -> Tensor:
    """Of very different sizes, some zero."""
    return torch.randn(num_elems) * torch.randn(num_elems).exp() * (torch.rand(num_elems) > 0.01)


@pytest.mark.parametrize("num_elems", SIZES)
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("decoupled", [True, False])
def test_equals_torch_bit_for_bit(num_elems: int, fused: bool, weight_decay: float, decoupled: bool) -> None:
    given = FIRST._replace(fused=fused, weight_decay=weight_decay, decoupled=decoupled)
    ours = State.of(num_elems)
    peer = Torch(ours, given)
    for step in range(1, 31 if num_elems < 10_000 else 4):
        grad = gradients(num_elems)
        ours.update(grad, given._replace(step=step))
        ours.assert_same(peer.step(grad))


@pytest.mark.parametrize("fused", [False, True])
def test_equals_torch_on_several_threads(fused: bool) -> None:
    """Where torch cuts an array for its threads shows in no bit."""
    torch.set_num_threads(3)
    given = FIRST._replace(fused=fused)
    ours = State.of(400_009)
    peer, grad = Torch(ours, given), gradients(400_009)
    ours.update(grad, given)
    ours.assert_same(peer.step(grad))


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 1 << 30),
    num_elems=st.integers(1, 3000),
    given_settings=st.builds(
        AdamSettings,
        lr=st.floats(1e-6, 0.5),
        beta1=st.floats(0.0, 0.999),
        beta2=st.floats(0.0, 0.9999),
        eps=st.sampled_from([1e-8, 1e-6, 1e-15]),
        weight_decay=st.sampled_from([0.0, 0.01, 0.3]),
        decoupled=st.booleans(),
        maximize=st.booleans(),
        fused=st.booleans(),
        step=st.just(1),
    ),
)
def test_equals_torch_whatever_the_settings(seed: int, num_elems: int, given_settings: AdamSettings) -> None:
    torch.manual_seed(seed)
    ours = State.of(num_elems)
    peer = Torch(ours, given_settings)
    for step in range(1, 4):
        grad = gradients(num_elems)
        ours.update(grad, given_settings._replace(step=step))
        ours.assert_same(peer.step(grad))


@pytest.mark.parametrize("begin", [1, 5, 16])
def test_a_view_in_the_middle_of_a_flat(begin: int) -> None:
    """Unaligned, and nothing beside it is touched."""
    whole = State.of(100_000)
    before = whole.clone()
    part = State(*(tensor[begin : begin + 70_001] for tensor in (whole.master, whole.exp_avg, whole.exp_avg_sq)))
    out = torch.zeros(100_000, dtype=torch.bfloat16)
    peer = Torch(part, FIRST)
    grad = gradients(70_001)
    part.update(grad, FIRST, out[begin : begin + 70_001])
    part.assert_same(peer.step(grad))
    assert out[begin : begin + 70_001].equal(part.master.bfloat16())
    for rest in (slice(0, begin), slice(begin + 70_001, None)):
        assert whole.master[rest].equal(before.master[rest])
        assert not whole.exp_avg[rest].any()
        assert not out[rest].any()


@pytest.mark.parametrize("grad_dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("out_dtype", [torch.float32, torch.bfloat16, torch.float16, None])
@pytest.mark.parametrize("num_elems", [37, 200_003])
def test_dtypes_in_and_out(grad_dtype: torch.dtype, out_dtype: torch.dtype | None, num_elems: int) -> None:
    ours = State.of(num_elems)
    peer = Torch(ours, FIRST)
    out = None if out_dtype is None else torch.empty(num_elems, dtype=out_dtype)
    for step in range(1, 4):
        grad = gradients(num_elems).to(grad_dtype)
        ours.update(grad, FIRST._replace(step=step), out, scale=0.37)
        ours.assert_same(peer.step((grad * 0.37).float()))
    if out is not None:
        assert bits(out).equal(bits(ours.master.to(out.dtype)))


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("begin", [0, 1, 37])
@pytest.mark.parametrize("run", [partial(adamw, cores=CORES), update_with_torch])
def test_into_other_memory(fused: bool, begin: int, run: Callable[[AdamUpdate], None]) -> None:
    """The results are those of an update in place, to the bit, and the old state stays."""
    end, settings_ = begin + 200_003, FIRST._replace(fused=fused)
    state, grad = State.of(end), gradients(end).bfloat16()
    state.exp_avg, state.exp_avg_sq = torch.randn(end), torch.rand(end)
    rows = [row[begin:] for row in (state.master, state.exp_avg, state.exp_avg_sq)]
    before, new = [row.clone() for row in rows], [torch.full((end,), 7.0) for _ in rows]
    outs = [torch.zeros(end, dtype=torch.bfloat16)[begin:] for _ in range(2)]
    run(AdamUpdate(*rows, grad[begin:], outs[0], settings_, 1.0, (new[0][begin:], new[1][begin:], new[2][begin:])))
    assert all(bits(row).equal(bits(old)) for row, old in zip(rows, before, strict=True))
    run(AdamUpdate(*rows, grad[begin:], outs[1], settings_, 1.0))
    assert all(bits(row).equal(bits(other[begin:])) for row, other in zip(rows, new, strict=True))
    assert all(other[:begin].eq(7.0).all() for other in new)
    assert bits(outs[0]).equal(bits(outs[1]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_weights_are_rounded_to_nearest_even(dtype: torch.dtype) -> None:
    halves = torch.tensor([1.0, 1.0 + 2**-8, 1.0 + 3 * 2**-8, 1.0 + 2**-11, 65519.0, 65520.0, 1e-40, 3e38, -0.0])
    special = torch.tensor([float("inf"), float("-inf"), float("nan")])
    master = torch.cat([halves, special, torch.randn(150_000) * torch.randn(150_000).mul(8).exp()])
    state, out = State(master, *(torch.zeros_like(master) for _ in range(2))), torch.empty(master.numel(), dtype=dtype)
    state.update(torch.zeros_like(master), FIRST._replace(weight_decay=0.0), out)
    expected = state.master.to(dtype)
    assert out.isnan().equal(expected.isnan())
    is_number = ~expected.isnan()
    assert bits(out[is_number]).equal(bits(expected[is_number]))


def test_the_number_of_threads_changes_nothing() -> None:
    num_elems = 1_000_003
    start, grad = State.of(num_elems), gradients(num_elems).bfloat16()
    first = CORES[0]
    results = []
    for num_threads in (1, 2, 3, 7):
        state, out = start.clone(), torch.empty(num_elems, dtype=torch.bfloat16)
        state.update(grad, FIRST, out, cores=(first,) * num_threads)
        results.append((state, out))
    for state, out in results[1:]:
        state.assert_same(results[0][0])
        assert out.equal(results[0][1])


def test_a_processor_that_is_not_there_loses_no_work() -> None:
    state = State.of(300_000)
    peer, grad = Torch(state, FIRST), gradients(300_000)
    state.update(grad, FIRST, cores=(CORES[0], 1000, 100_000))
    state.assert_same(peer.step(grad))


def test_overflow_stays_visible() -> None:
    state, grad, out = State.of(1000), torch.zeros(1000), torch.empty(1000, dtype=torch.bfloat16)
    grad[3], grad[700] = float("inf"), float("nan")
    state.update(grad, FIRST, out)
    assert state.master.isnan().nonzero().flatten().tolist() == [3, 700]
    assert out.isnan().nonzero().flatten().tolist() == [3, 700]


@pytest.mark.parametrize("fused", [False, True])
def test_torch_operations_do_the_same_where_there_is_no_compiler(fused: bool) -> None:
    num_elems = (1 << 20) + 77
    given = FIRST._replace(fused=fused, maximize=True)
    ours, out = State.of(num_elems), torch.empty(num_elems, dtype=torch.bfloat16)
    other, other_out = ours.clone(), torch.empty(num_elems, dtype=torch.bfloat16)
    for step in (1, 2):
        grad = gradients(num_elems).bfloat16()
        now = given._replace(step=step)
        ours.update(grad, now, out, scale=0.5)
        update_with_torch(AdamUpdate(other.master, other.exp_avg, other.exp_avg_sq, grad, other_out, now, 0.5))
    ours.assert_same(other)
    assert out.equal(other_out)


def test_is_compiled_where_the_tests_run() -> None:
    assert library() is not None


def test_what_is_not_as_it_must_be_is_refused() -> None:
    state, grad = State.of(100), torch.zeros(100)
    with pytest.raises(
        StateError, match=r"grad of a host update must be a flat, contiguous CPU tensor of 100 .* \(99,\)"
    ):
        state.update(grad[:99], FIRST)
    with pytest.raises(StateError, match=r"out of a host update .* torch.float64"):
        state.update(grad, FIRST, torch.empty(100, dtype=torch.float64))
    with pytest.raises(StateError, match=r"grad of a host update must be a flat, contiguous .* with strides \(2,\)"):
        state.update(torch.zeros(200)[::2], FIRST)
    with pytest.raises(StateError, match="on meta"):
        state.update(torch.zeros(100, device="meta"), FIRST)
