"""Running statistics against one pass over everything."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from shoal.nets.norm import Running

torch.set_num_threads(1)
F64 = torch.float64


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=F64)


def check(running: Running, x: Tensor, tol: float = 1e-12) -> None:
    """x [samples, *shape]."""
    torch.testing.assert_close(running.mean, x.mean(0), rtol=tol, atol=tol)
    torch.testing.assert_close(running.var, x.var(0, correction=0), rtol=tol, atol=tol)
    assert running.count.item() == x.shape[0]


def test_by_hand() -> None:
    running = Running()
    running.update(torch.tensor([1.0, 3.0]))  # mean 2, variance 1
    assert (running.mean.item(), running.var.item(), running.count.item()) == (2.0, 1.0, 2.0)
    running.update(torch.tensor([5.0, 7.0]))  # all: 1, 3, 5, 7: mean 4, variance (9 + 1 + 1 + 9) / 4 = 5
    assert (running.mean.item(), running.var.item(), running.count.item()) == (4.0, 5.0, 4.0)
    assert running.normalise(torch.tensor(4 + math.sqrt(5.0), dtype=F64)).item() == pytest.approx(1.0, abs=1e-7)


def test_merged_batches_are_one_pass() -> None:
    """Batches of unequal size, scale and place, the first a single sample."""
    running, seen = Running(3), []
    for k, (n, scale, shift) in enumerate([(1, 1.0, 5.0), (7, 3.0, -2.0), (64, 0.1, 100.0), (2, 50.0, 0.0)]):
        x = normal(n, 3, seed=k) * scale + shift
        running.update(x)
        seen.append(x)
        check(running, torch.cat(seen))


def test_leading_dimensions_are_all_samples() -> None:
    running = Running(3)
    x = normal(4, 5, 2, 3)
    running.update(x)
    check(running, x.reshape(-1, 3))
    scalar = Running()
    scalar.update(x)
    check(scalar, x.reshape(-1))


def test_masks() -> None:
    running, x, y = Running(3), normal(4, 5, 3), normal(4, 5, 3, seed=1) + 9
    mask = torch.rand(4, 5, generator=torch.Generator().manual_seed(2)) < 0.5
    running.update(x, mask)
    check(running, x[mask])
    running.update(y, ~mask)
    check(running, torch.cat((x[mask], y[~mask])))
    before = running.state_dict()
    before = {k: v.clone() for k, v in before.items()}
    running.update(y + 1000, torch.zeros_like(mask))  # nobody: nothing moves
    assert all(torch.equal(before[k], v) for k, v in running.state_dict().items())


def test_nobody_at_first() -> None:
    running = Running(2)
    running.update(normal(4, 2), torch.zeros(4, dtype=torch.bool))
    assert running.mean.tolist() == [0.0, 0.0]
    assert running.var.tolist() == [1.0, 1.0]
    assert running.count.item() == 0
    x = normal(4, 2)
    running.update(x)
    check(running, x)


def test_what_is_masked_may_be_anything() -> None:
    """The dead are in no statistic, whatever stands in their place: a NaN or an infinity must not pass the mask."""
    running = Running(1)
    x = torch.tensor([[1.0], [math.nan], [3.0], [math.inf]])
    running.update(x, torch.tensor([True, False, True, False]))
    assert (running.mean.item(), running.var.item(), running.count.item()) == (2.0, 1.0, 2.0)


def test_denormalise_is_the_inverse() -> None:
    running = Running(3)
    running.update(normal(100, 3) * torch.tensor([1.0, 50.0, 0.01]) + torch.tensor([0.0, 300.0, -5.0]))
    x = normal(10, 3, seed=4) * 100
    torch.testing.assert_close(running.denormalise(running.normalise(x)), x, rtol=1e-12, atol=1e-12)
    assert running.normalise(x.float()).dtype == torch.float32
    assert running.denormalise(x.float()).dtype == torch.float32
    unit = running.normalise(running.denormalise(normal(10, 3).float()))
    torch.testing.assert_close(unit, normal(10, 3).float(), rtol=1e-4, atol=1e-3)


def test_before_any_sample_it_is_the_identity() -> None:
    x = normal(5, 2)
    torch.testing.assert_close(Running(2).normalise(x), x, rtol=1e-7, atol=1e-7)


def test_clip() -> None:
    running = Running()
    running.update(torch.tensor([-1.0, 1.0]))  # mean 0, deviation 1
    x = torch.tensor([-30.0, -2.0, 0.5, 30.0], dtype=F64)
    torch.testing.assert_close(running.normalise(x, 10.0), torch.tensor([-10.0, -2.0, 0.5, 10.0], dtype=F64), rtol=1e-7, atol=0)
    assert running.normalise(x)[0].item() < -29


def test_a_constant_does_not_blow_up() -> None:
    running = Running(1)
    running.update(torch.full((10, 1), 3.0))
    assert running.var.item() == 0.0
    out = running.normalise(torch.tensor([[3.0], [3.001]]))
    assert out[0].item() == 0.0
    assert abs(out[1].item()) < 11  # by at most 1e-4


def test_far_from_zero_the_variance_stays() -> None:
    running, seen = Running(1), []
    for k in range(50):
        x = normal(20, 1, seed=k) + 1e6
        running.update(x)
        seen.append(x)
    check(running, torch.cat(seen), 1e-9)


def test_ties_far_from_zero_do_not_cancel() -> None:
    running = Running(5, tied=[[0, 1, 2, 3, 4]])
    running.update(torch.full((10, 5), 496256.59375))
    assert running.scale.isfinite().all()
    assert float(running.var.abs().max()) < 1e-12


def test_statistics_are_saved_and_have_no_gradient() -> None:
    running = Running(2)
    state = running.state_dict()
    assert {k: v.dtype for k, v in state.items() if v.dtype == F64} == {"mean": F64, "var": F64, "count": F64}
    assert set(state) - {"mean", "var", "count"} == {"shift", "scale"}  # as they are used, in float32
    addresses = [b.data_ptr() for b in running.buffers()]
    running.update(normal(4, 2).requires_grad_())
    assert [b.data_ptr() for b in running.buffers()] == addresses
    assert not any(b.requires_grad for b in running.buffers())
    assert list(running.parameters()) == []


# --- numbers whose statistics are one ---


def test_tied_numbers_have_one_mean_and_one_variance() -> None:
    running = Running(3, tied=[[0, 2]])
    running.update(torch.tensor([[1.0, 10.0, 3.0], [5.0, 20.0, 7.0]]))
    # 1, 5, 3, 7: mean 4, variance (9 + 1 + 1 + 9) / 4 = 5; alone: 10, 20: mean 15, variance 25
    assert running.mean.tolist() == pytest.approx([4.0, 15.0, 4.0], abs=1e-12)
    assert running.var.tolist() == pytest.approx([5.0, 25.0, 5.0], abs=1e-12)
    assert running.count.item() == 2
    running.update(torch.tensor([[9.0, 30.0, 11.0]]))
    # 1, 3, 5, 7, 9, 11: mean 6, variance (25 + 9 + 1) / 3 = 35/3; alone: 10, 20, 30: mean 20, variance 200/3
    assert running.mean.tolist() == pytest.approx([6.0, 20.0, 6.0], abs=1e-12)
    assert running.var.tolist() == pytest.approx([35 / 3, 200 / 3, 35 / 3], abs=1e-12)
    x = torch.tensor([8.0, 20.0, 8.0])
    assert running.normalise(x).tolist() == pytest.approx([2 / math.sqrt(35 / 3), 0.0, 2 / math.sqrt(35 / 3)], abs=1e-6)


@pytest.mark.parametrize("masked", [False, True])
def test_merged_batches_with_ties_are_one_pass_over_the_pool(masked: bool) -> None:
    """Two ties, one of two and one of three numbers, and a number alone; batches of unequal size, scale and place."""
    running, ties, seen = Running(6, tied=[[0, 3], [5, 1, 2]]), [[0, 3], [1, 2, 5], [4]], []
    for k, (n, scale, shift) in enumerate([(1, 1.0, 5.0), (7, 3.0, -2.0), (64, 0.1, 30.0), (8, 9.0, 0.0)]):
        x = normal(n, 6, seed=k) * scale + shift * normal(6, seed=50 + k)
        mask = torch.rand(n, generator=torch.Generator().manual_seed(k)) < 0.6 if masked else None
        running.update(x, mask)
        seen.append(x if mask is None else x[mask])
        pool = torch.cat(seen)
        for places in ties:
            for i in places:
                assert running.mean[i].item() == pytest.approx(pool[:, places].mean().item(), rel=1e-9, abs=1e-9)
                assert running.var[i].item() == pytest.approx(pool[:, places].var(correction=0).item(), rel=1e-9, abs=1e-9)
        assert running.count.item() == len(pool)


def test_ties_are_not_saved() -> None:
    """They follow from the world, and one pass of the same statistics fits both."""
    assert set(Running(3, tied=[[0, 2]]).state_dict()) == set(Running(3).state_dict())
