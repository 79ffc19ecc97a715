"""A recording does the same to the same tensors, or says why it cannot be replayed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from shoal.kernels import native
from shoal.kernels.recording import Recording, out_variant


def recorded(work: Any) -> Recording:
    with Recording() as made:
        work()
    return made


def test_a_replay_writes_to_the_same_tensors() -> None:
    x, total, kept = torch.tensor([1.0, 2.0, 3.0]), torch.zeros(()), []

    def work() -> None:
        y = (x[1:] * 2).view(2, 1)  # a view, an operation, a view
        y += 1
        total.add_(y.sum())  # 5 + 7
        kept.append((y, *x.max(0), torch.zeros(2).index_fill_(0, torch.tensor([1]), 4.0) + y[:, 0]))

    made = recorded(work)
    assert total == 12
    (y, top, where, filled) = kept[0]
    x.copy_(torch.tensor([9.0, 0.0, 0.5]))
    made.replay()
    assert total == 12 + 1 + 2
    assert y.flatten().tolist() == [1, 2]
    assert (top.item(), where.item()) == (9, 0)  # of two results neither has a tensor to be written into
    assert filled.tolist() == [1, 6]  # what is filled is zero again before
    assert len(kept) == 1


def test_gradients_are_replayed() -> None:
    """d/dw of (w x)^2 is 2 w x^2: of w = 3 and x = 1, 2 the sum 6 + 24; then of w = 1 and x = 2, 2: 16."""
    w, x, grad = torch.tensor(3.0, requires_grad=True), torch.tensor([1.0, 2.0]), torch.zeros(())
    made = recorded(lambda: grad.copy_(torch.autograd.grad((w * x).square().sum(), w)[0]))
    assert grad == 30
    w.data.fill_(1)
    x.fill_(2)
    made.replay()
    assert grad == 16


def test_a_replay_draws_on_from_the_generator() -> None:
    one, other = torch.Generator().manual_seed(5), torch.Generator().manual_seed(5)
    kept: list[Tensor] = []
    made = recorded(lambda: kept.append(torch.rand(4, generator=one, dtype=torch.float64)))
    assert torch.equal(kept[0], torch.rand(4, generator=other, dtype=torch.float64))
    for _ in range(3):
        made.replay()
        assert torch.equal(kept[0], torch.rand(4, generator=other, dtype=torch.float64))


@pytest.mark.parametrize(
    "read",
    [
        lambda x: x.sum().item(),
        lambda x: bool(x.any()),
        lambda x: x[x > 1],
        lambda x: x.nonzero(),
        lambda x: x.clone().unsqueeze_(0),
    ],
)
def test_work_that_reads_numbers_out_is_not_replayed(read: Any) -> None:
    x = torch.tensor([1.0, 2.0])
    made = recorded(lambda: (x.mul_(2), read(x), x.add_(1)))
    assert x.tolist() == [3, 5]  # the work itself ran to its end
    assert made.broken is not None
    assert "reads a tensor out, or gives it another shape" in made.broken


def test_work_that_takes_too_much_memory_is_not_replayed() -> None:
    x = torch.zeros(200)
    for most, fits in ((1000, False), (2000, True)):
        with Recording(most) as made:
            _ = x + 1, x + 2
        assert made.bytes == 1600
        assert (made.broken is None) == fits


def test_operations_are_matched_with_their_variants_that_write_into_a_tensor() -> None:
    aten = torch.ops.aten
    for func, variant in {
        aten.add.Tensor: aten.add.out,
        aten.sum.dim_IntList: aten.sum.IntList_out,
        aten.where.self: aten.where.self_out,
        aten.arange.default: aten.arange.out,
        aten.rand.generator: aten.rand.generator_out,
    }.items():
        assert out_variant(func)[1] is variant  # type: ignore[index]
    assert out_variant(aten.max.dim) is None


@pytest.mark.compiler
def test_kernels_are_replayed_in_as_many_threads_as_there_are() -> None:
    x = torch.randn(5000, 1, 6, generator=torch.Generator().manual_seed(0))
    weights, biases = [torch.ones(8, 6), torch.ones(2, 8)], [torch.zeros(8), torch.zeros(2)]
    kept: list[Tensor] = []
    made = recorded(lambda: kept.append(native.mlp(x, weights, biases)))
    first = kept[0].clone()
    for threads in (1, 2):
        native.share(threads)
        kept[0].fill_(torch.nan)
        made.replay()
        assert torch.equal(kept[0], first)
    native.share(1)
    x.zero_()
    made.replay()
    assert kept[0].abs().max() == 0
