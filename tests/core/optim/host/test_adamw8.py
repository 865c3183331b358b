"""8-bit states are torchao's, code for code."""

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from shardwise.base.errors import StateError
from shardwise.core.native.adamw import AdamSettings, AdamUpdate, Moment8, adamw, update_with_torch
from shardwise.core.native.cores import cores_for

FIRST = AdamSettings(1e-3, 0.9, 0.999, 1e-8, 0.1, decoupled=True, maximize=False, fused=False, step=1)
CORES = cores_for(0, 1)


@dataclass
class State8:
    master: Tensor
    exp_avg_codes: Tensor
    exp_avg_scale: Tensor
    exp_avg_sq_codes: Tensor
    exp_avg_sq_scale: Tensor

    @classmethod
    def of(cls, num_elems: int) -> "State8":
        codes, num_blocks = torch.zeros(num_elems, dtype=torch.uint8), -(-num_elems // 256)
        scales = torch.zeros(num_blocks), torch.zeros(num_blocks)
        return cls(torch.randn(num_elems), codes, scales[0], codes.clone(), scales[1])

    def clone(self) -> "State8":
        return State8(*(tensor.clone() for tensor in vars(self).values()))

    def update(
        self,
        grad: Tensor,
        settings: AdamSettings,
        out: Tensor | None = None,
        scale: float = 1.0,
        cores: tuple[int, ...] = CORES,
    ) -> None:
        adamw(AdamUpdate(self.master, *self.moments(*maps()), grad, out, settings, scale), cores)

    def moments(self, signed: Tensor, unsigned: Tensor) -> tuple[Moment8, Moment8]:
        return (
            Moment8(self.exp_avg_codes, self.exp_avg_scale, signed),
            Moment8(self.exp_avg_sq_codes, self.exp_avg_sq_scale, unsigned),
        )

    def assert_same(self, other: "State8") -> None:
        for name, tensor in vars(self).items():
            assert tensor.equal(vars(other)[name]), name


def maps() -> tuple[Tensor, Tensor]:
    quant_utils = pytest.importorskip("torchao.optim.quant_utils")
    return torch.tensor(quant_utils.create_dynamic_map(True)), torch.tensor(quant_utils.create_dynamic_map(False))


def gradients(num_elems: int) -> Tensor:
    return torch.randn(num_elems) * torch.randn(num_elems).mul(2).exp() * (torch.rand(num_elems) > 0.01)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("decoupled", [True, False])
@pytest.mark.parametrize("beta1", [0.9, 0.3])
def test_equals_torchao_bit_for_bit(decoupled: bool, beta1: float) -> None:
    optim = pytest.importorskip("torchao.optim")
    num_elems = 256 * 97
    given = FIRST._replace(decoupled=decoupled, beta1=beta1)
    ours = State8.of(num_elems)
    param = torch.nn.Parameter(ours.master.clone())
    kind = optim.AdamW8bit if decoupled else optim.Adam8bit
    optimizer = kind([param], lr=given.lr, betas=(beta1, given.beta2), weight_decay=given.weight_decay)
    for step in range(1, 30):
        param.grad = gradients(num_elems)
        optimizer.step()
        ours.update(param.grad, given._replace(step=step))
        mean, square = (optimizer.state[param][name] for name in ("exp_avg", "exp_avg_sq"))
        ours.assert_same(State8(param.detach(), mean.codes, mean.scale, square.codes, square.scale))


def test_codes_are_torchaos_for_every_float_around_every_boundary() -> None:
    """With a first step of beta 0 the new moment is the gradient: its codes are what torchao's quantiser gives."""
    quant_utils = pytest.importorskip("torchao.optim.quant_utils")
    signed, unsigned = maps()
    given = FIRST._replace(beta1=0.0, beta2=0.0, weight_decay=0.0)
    for lookup, root in ((signed, 1.0), (unsigned, 0.5)):
        boundaries = (lookup[1:] + lookup[:-1]) / 2
        bits = boundaries.view(torch.int32)[:, None] + torch.arange(-3, 4, dtype=torch.int32)
        near = torch.cat([bits.flatten().view(torch.float32), lookup, torch.tensor([0.0, 1e-30, -1e-30, 2**-24])])
        near = near[near.abs() <= 1] if root == 1.0 else near[(near >= 0) & (near <= 1)].sqrt()
        blocks = near.split(255)
        grad = torch.cat([torch.nn.functional.pad(block, (1, 255 - block.numel()), value=1.0) for block in blocks])
        state = State8.of(grad.numel())
        state.update(grad, given)
        codes = state.exp_avg_codes if root == 1.0 else state.exp_avg_sq_codes
        moment = grad if root == 1.0 else grad.square()
        scaled, scale = quant_utils.scale_tensor(moment, 256)
        assert codes.equal(quant_utils.quantize_8bit_with_qmap(scaled, lookup))
        assert scale.eq(1.0).all()


@pytest.mark.parametrize("num_elems", [1, 255, 256, 1000, 256 * 700 + 13])
@pytest.mark.parametrize("decoupled", [True, False])
def test_torch_operations_make_the_same_codes(num_elems: int, decoupled: bool) -> None:
    given = FIRST._replace(decoupled=decoupled, maximize=True)
    ours, out = State8.of(num_elems), torch.empty(num_elems, dtype=torch.bfloat16)
    other = ours.clone()
    for step in range(1, 8):
        grad = gradients(num_elems).bfloat16()
        now = given._replace(step=step)
        ours.update(grad, now, out, scale=0.25)
        update_with_torch(AdamUpdate(other.master, *other.moments(*maps()), grad, None, now, 0.25))
        # torch's square root may round otherwise; Adam's decay lets the weights into the moments.
        torch.testing.assert_close(ours.master, other.master, rtol=1e-6, atol=1e-6)
        other.master.copy_(ours.master)
        ours.assert_same(other)
    assert out.equal(ours.master.bfloat16())


def test_the_number_of_threads_changes_nothing() -> None:
    num_elems = 600_000
    start, grad = State8.of(num_elems), gradients(num_elems).half()
    results = []
    for num_threads in (1, 2, 5):
        state = start.clone()
        state.update(grad, FIRST, cores=CORES[:1] * num_threads)
        results.append(state)
    results[1].assert_same(results[0])
    results[2].assert_same(results[0])


def test_overflow_stays_visible() -> None:
    state, grad = State8.of(1024), torch.ones(1024)
    grad[300] = float("nan")
    state.update(grad, FIRST)
    assert state.master.isnan().nonzero().flatten().tolist() == [300]
    assert state.exp_avg_scale.isnan().tolist() == [False, True, False, False]


def test_scales_must_fit_the_blocks() -> None:
    state = State8.of(512)
    state.exp_avg_scale = torch.zeros(3)
    with pytest.raises(
        StateError, match="exp_avg_scale of a host update must be a flat, contiguous CPU tensor of 2 elements"
    ):
        state.update(torch.zeros(512), FIRST)


def test_a_map_that_is_too_fine_is_refused() -> None:
    signed, unsigned = maps()
    state = State8.of(256)
    fine = torch.linspace(0.5, 0.500001, 256)
    with pytest.raises(StateError, match="must ascend as torchao's do"):
        adamw(AdamUpdate(state.master, *state.moments(fine, unsigned), torch.zeros(256), None, FIRST, 1.0), CORES)
    assert signed.numel() == 256
