"""The small autograd of byte counts: what lives when."""

from shardwise.planner.work.blocks import activation, add, linear, multiply, scale
from shardwise.planner.work.tape import Habits, Tape, Tensor, measure
from shardwise.planner.work.work import chain

N = 1 << 20  # elements of 2 bytes
EAGER = Habits(writes_directly=False)


def test_a_temporary_is_freed_once_it_is_used() -> None:
    work = measure(lambda t, x: scale(t, scale(t, scale(t, x))), N, 2)
    assert work.saved_bytes == 0  # the input goes, too
    assert work.forward_peak_bytes == 2 * 2 * N


def test_what_is_saved_lives_until_its_node_has_run() -> None:
    work = measure(lambda t, x: activation(t, activation(t, x)), N, 2)
    assert work.saved_bytes == 2 * 2 * N  # the input, and the first result
    assert work.output_bytes == 2 * N
    # Both gradients are new memory; when the second is made, the first node's input is gone already.
    assert work.backward_peak_bytes == 2 * N


def test_an_addition_hands_its_gradient_on() -> None:
    work = measure(lambda t, x: add(t, x, x), N, 2)
    assert work.saved_bytes == 0
    # Two references to one storage cannot be added in place.
    assert work.backward_peak_bytes == 2 * N


def test_gradients_are_added_in_place_where_nobody_else_holds_them() -> None:
    def residual(t: Tape, x: Tensor) -> Tensor:
        return add(t, x, scale(t, x))

    # The branch's gradient, which is added to the one that came by itself.
    assert measure(residual, N, 2).backward_peak_bytes == 2 * N


def test_a_product_saves_the_factor_that_the_others_gradient_needs() -> None:
    def half_constant(t: Tape, x: Tensor) -> Tensor:
        return multiply(t, x, t.new(x.num_elems))

    assert measure(half_constant, N, 2).saved_bytes == 2 * N  # the constant, not the input
    assert measure(lambda t, x: multiply(t, x, scale(t, x)), N, 2).saved_bytes == 2 * 2 * N


def test_gradients_of_weights_are_autograds_unless_they_are_written_directly() -> None:
    fan = (1024, 4096)
    eager = measure(lambda t, x: linear(t, x, fan), N, 2, EAGER)
    direct = measure(lambda t, x: linear(t, x, fan), N, 2)
    assert (eager.grad_bytes, direct.grad_bytes) == (2 * 1024 * 4096, 0)
    assert eager.backward_peak_bytes == direct.backward_peak_bytes + eager.grad_bytes
    assert eager.products == direct.products


def test_a_frozen_layer_saves_nothing() -> None:
    work = measure(lambda t, x: linear(t, x, (1024, 1024)), N, 2, Habits(rank=8))
    assert work.saved_bytes == work.grad_bytes == 0
    assert not work.products[0].trainable


def test_a_checkpoint_keeps_its_input_and_computes_again() -> None:
    def block(t: Tape, x: Tensor) -> Tensor:
        wide = activation(t, linear(t, x, (1024, 4096)))
        return linear(t, wide, (4096, 1024))

    none, full, selective = (measure(block, N, 2, EAGER, checkpointing=mode) for mode in ("none", "full", "selective"))
    assert none.saved_bytes == 2 * N * (1 + 4 + 4)
    assert full.saved_bytes == 2 * N
    # The product that widens is kept, what its activation makes of it is not.
    assert selective.saved_bytes == 2 * N * (1 + 4)
    # A recompute ends with the last tensor that is saved: the second product's input.
    assert (none.recomputed, full.recomputed, selective.recomputed) == (0.0, 0.5, 0.0)
    assert full.grad_bytes == selective.grad_bytes == none.grad_bytes
    ends = [work.saved_bytes + work.backward_peak_bytes for work in (none, full, selective)]
    assert ends[0] == ends[1] == ends[2]


def test_a_row_of_blocks_peaks_where_one_of_them_does() -> None:
    one = measure(activation, N, 2)
    row = chain([one] * 3, input_bytes=2 * N)
    assert row.saved_bytes == 3 * one.saved_bytes
    whole = measure(lambda t, x: activation(t, activation(t, activation(t, x))), N, 2)
    assert (row.forward_peak_bytes, row.backward_peak_bytes) == (whole.forward_peak_bytes, whole.backward_peak_bytes)
