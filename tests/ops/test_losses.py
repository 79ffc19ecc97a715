"""Losses by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from shoal.kernels import native
from shoal.ops import losses

torch.set_num_threads(1)
NAN = math.nan


def near(x: Tensor, y: list[float] | float, tol: float = 1e-6) -> None:
    torch.testing.assert_close(x.detach(), torch.tensor(y, dtype=x.dtype), rtol=tol, atol=tol)


# clip 0.2. The objective is min(rho A, clip(rho) A), the loss its negative; d loss / d log_prob = -rho A where rho A is the
# lesser one, and zero where the clipped one is.
#   A = 2:   rho 1.5 -> min(3, 2.4) clipped      rho 1.1 -> 2.2          rho 0.5 -> min(1, 1.6) = 1, not clipped
#   A = -2:  rho 1.5 -> min(-3, -2.4) = -3       rho 0.9 -> -1.8         rho 0.5 -> min(-1, -1.6) clipped
PPO = [
    (2.0, 1.5, -2.4, 0.0),
    (2.0, 1.1, -2.2, -2.2),
    (2.0, 0.9, -1.8, -1.8),
    (2.0, 0.5, -1.0, -1.0),
    (-2.0, 1.5, 3.0, 3.0),
    (-2.0, 1.1, 2.2, 2.2),
    (-2.0, 0.9, 1.8, 1.8),
    (-2.0, 0.5, 1.6, 0.0),
]


@pytest.mark.parametrize(("advantage", "ratio", "loss", "slope"), PPO)
def test_ppo_clip(advantage: float, ratio: float, loss: float, slope: float) -> None:
    old = torch.tensor([-1.3])
    log_prob = (old + math.log(ratio)).requires_grad_()
    out, rho = losses.ppo_clip(log_prob, old, torch.tensor([advantage]), 0.2)
    near(out, [loss])
    near(rho, [ratio])
    (grad,) = torch.autograd.grad(out.sum(), log_prob)
    near(grad, [slope])
    if slope == 0:
        assert grad.tolist() == [0.0]


def test_ppo_starts_at_the_policy_gradient() -> None:
    log_prob = torch.tensor([-1.0, -2.0], requires_grad=True)
    out, rho = losses.ppo_clip(log_prob, log_prob.detach(), torch.tensor([3.0, -4.0]), 0.2)
    assert out.tolist() == [-3.0, 4.0]
    assert rho.tolist() == [1.0, 1.0]
    assert torch.autograd.grad(out.sum(), log_prob)[0].tolist() == [-3.0, 4.0]


def test_value_error() -> None:
    value = torch.tensor([0.5, 3.0, -3.0], requires_grad=True)
    target = torch.zeros(3)
    out = losses.value_error(value, target)
    assert out.tolist() == [0.125, 4.5, 4.5]
    assert torch.autograd.grad(out.sum(), value)[0].tolist() == [0.5, 3.0, -3.0]
    # huber 1: half the square inside; outside 1 * (|e| - 1/2), with slope 1.  huber 2: 2 * (3 - 1) = 4, slope 2
    out = losses.value_error(value, target, 1.0)
    assert out.tolist() == [0.125, 2.5, 2.5]
    assert torch.autograd.grad(out.sum(), value)[0].tolist() == [0.5, 1.0, -1.0]
    out = losses.value_error(value, target, 2.0)
    assert out.tolist() == [0.125, 4.0, 4.0]
    assert torch.autograd.grad(out.sum(), value)[0].tolist() == [0.5, 2.0, -2.0]


def test_value_clip() -> None:
    # old 1, target 3, clip 1/2
    #   2    error 1/2; held at 1.5, error 1.5^2/2 = 1.125: the worse one, and no slope
    #   1.25 inside: 1.75^2/2 = 1.53125, slope -1.75
    #   -1   error 8; held at 0.5, 2.5^2/2 = 3.125: the free one is worse, slope -4
    #   3    error 0; held at 1.5: 1.125, no slope
    #   6    error 4.5; held at 1.5: 1.125: the free one, slope 3
    value = torch.tensor([2.0, 1.25, -1.0, 3.0, 6.0], requires_grad=True)
    out = losses.value_clip(value, torch.ones(5), torch.full((5,), 3.0), 0.5)
    assert out.tolist() == [1.125, 1.53125, 8.0, 1.125, 4.5]
    assert torch.autograd.grad(out.sum(), value)[0].tolist() == [0.0, -1.75, -4.0, 0.0, 3.0]
    # with huber 1: 1.5 - 0.5 = 1; 1.75 - 0.5; 4 - 0.5; 1; 3 - 0.5
    out = losses.value_clip(value, torch.ones(5), torch.full((5,), 3.0), 0.5, 1.0)
    assert out.tolist() == [1.0, 1.25, 3.5, 1.0, 2.5]


def test_approximate_kl() -> None:
    old = torch.tensor([0.5, 0.5], dtype=torch.float64).log()
    new = torch.tensor([0.25, 0.75], dtype=torch.float64).log()
    out = losses.approximate_kl(new, old)
    # rho = 1/2: -1/2 + log 2 = 0.193147; rho = 3/2: 1/2 - log 1.5 = 0.094535
    near(out, [0.1931471805599453, 0.0945348918918356], 1e-12)
    # the mean under the old policy is KL(old || new) = (log 2 + log 2/3) / 2
    near(out.mean(), (math.log(2) + math.log(2 / 3)) / 2, 1e-12)
    assert losses.approximate_kl(old, old).tolist() == [0.0, 0.0]
    assert (losses.approximate_kl(torch.linspace(-3, 3, 101), torch.zeros(101)) >= 0).all()


def test_approximate_kl_of_close_policies_does_not_drown() -> None:
    """Log-ratio 1e-3: e^x - 1 - x = x^2/2 + x^3/6 = 5.00167e-7, far below float32's spacing at one."""
    out = losses.approximate_kl(torch.tensor([1e-3]), torch.tensor([0.0]))
    assert out.item() == pytest.approx(5.00167e-7, rel=1e-3)


def test_masked_sum_and_mean() -> None:
    x, mask = torch.tensor([1.0, 2.0, NAN, 4.0]), torch.tensor([True, True, False, True])
    assert losses.masked_sum(x, mask).item() == 7.0
    assert losses.masked_mean(x, mask).item() == pytest.approx(7 / 3)
    assert losses.masked_sum(x[:2], None).item() == 3.0
    assert losses.masked_mean(x[:2], None).item() == 1.5
    nobody = torch.zeros(4, dtype=torch.bool)
    assert losses.masked_sum(x, nobody).item() == 0.0
    assert losses.masked_mean(x, nobody).item() == 0.0


def test_the_masked_get_no_gradient() -> None:
    x = torch.tensor([1.0, 2.0, 8.0], requires_grad=True)
    mask = torch.tensor([True, True, False])
    assert torch.autograd.grad(losses.masked_mean(x.square(), mask), x)[0].tolist() == [1.0, 2.0, 0.0]
    assert torch.autograd.grad(losses.masked_sum(x.square(), mask), x)[0].tolist() == [2.0, 4.0, 0.0]


def test_normalise_leaves_the_dead_out() -> None:
    # the living: 1, 3, 1, 3: mean 2, deviation 1 (not the sample's 1.15): -1, 1, -1, 1; the dead become zero
    x = torch.tensor([[1.0, 3.0, 1000.0], [1.0, 3.0, NAN]])
    mask = torch.tensor([[True, True, False], [True, True, False]])
    assert losses.normalise(x, mask).tolist() == [[-1.0, 1.0, 0.0], [-1.0, 1.0, 0.0]]
    x[:, 2] = -7.0
    assert losses.normalise(x, mask).tolist() == [[-1.0, 1.0, 0.0], [-1.0, 1.0, 0.0]]


def test_normalise_without_a_mask() -> None:
    # 0, 2, 4, 6, 8: mean 4, variance (16 + 4 + 0 + 4 + 16) / 5 = 8
    out = losses.normalise(torch.tensor([0.0, 2, 4, 6, 8], dtype=torch.float64), None)
    near(out, [x / math.sqrt(8) for x in (-4, -2, 0, 2, 4)], 1e-8)
    assert losses.normalise(torch.full((3,), 5.0), None).tolist() == [0.0, 0.0, 0.0]  # all alike: zero, not NaN


def test_normalise_along_some_dimensions() -> None:
    # [T, B, N] over time and rows: agent 0 has 1, 3, 1, 3 (mean 2, deviation 1), agent 1 has 0, 20, 20 (NaN is dead):
    # mean 40/3, variance ((40/3)^2 + 2 (20/3)^2) / 3 = 800/9: -sqrt 2, sqrt 1/2, sqrt 1/2
    x = torch.tensor([[[1.0, 0.0], [3.0, 20.0]], [[1.0, 20.0], [3.0, NAN]]])
    mask = ~x.isnan()
    half = math.sqrt(0.5)
    near(losses.normalise(x, mask, (0, 1)), [[[-1.0, -2 * half], [1.0, half]], [[-1.0, half], [1.0, 0.0]]])
    near(losses.normalise(x[..., :1], None, (0, 1)), [[[-1.0], [1.0]], [[-1.0], [1.0]]])
    assert losses.masked_mean(x, mask, (0, 1)).tolist() == [[[2.0, pytest.approx(40 / 3)]]]
    nobody = torch.zeros_like(mask)
    assert losses.normalise(x, nobody, (0, 1)).tolist() == torch.zeros(2, 2, 2).tolist()


def test_explained_variance() -> None:
    target = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)
    near(losses.explained_variance(target, target, None), 1.0)
    near(losses.explained_variance(target + 5, target, None), 1.0)  # a constant error is no variance
    near(losses.explained_variance(torch.full_like(target, 2.0), target, None), 0.0)
    # 3, 2, 1: the errors -2, 0, 2 have variance 8/3, the targets 2/3: 1 - 4
    near(losses.explained_variance(target.flip(0), target, None), -3.0)
    # 1, 1, 3: errors 0, 1, 0: mean 1/3, variance 2/9: 1 - (2/9) / (2/3) = 2/3
    value = torch.tensor([1.0, 1.0, 3.0], dtype=torch.float64)
    near(losses.explained_variance(value, target, None), 2 / 3)
    mask = torch.tensor([True, True, True, False])
    far = torch.tensor([1000.0], dtype=torch.float64)
    near(losses.explained_variance(torch.cat((value, -far)), torch.cat((target, far)), mask), 2 / 3)
    assert losses.explained_variance(value, torch.ones_like(value), None).isfinite()  # targets all alike


# --- summed up: old log-probabilities 0, advantages 2, 2, -2 and one of the dead; ratios 1.5, 0.9, 1.5 -----------------------

RATIO, A, H = [1.5, 0.9, 1.5, 7.0], [2.0, 2.0, -2.0, 1e6], [0.5, 1.0, 1.5, 1e6]
ALIVE = [True, True, True, False]
KINDS = [False] if native.why_not() else [False, True]


@pytest.mark.parametrize("fused", KINDS)
@pytest.mark.parametrize("made", [float, torch.tensor])
def test_ppo_is_the_sum_over_the_living_less_the_weighted_entropy(made: Any, fused: bool) -> None:
    """Clips and weights that are tensors, as schedules set them, give what numbers give."""
    mask, old = torch.tensor(ALIVE), torch.zeros(4)
    log_prob = torch.tensor(RATIO).log().requires_grad_()
    entropy = torch.tensor(H).requires_grad_()
    total, means = losses.ppo(log_prob, entropy, old, torch.tensor(A), mask, made(0.2), made(0.1), fused)
    # clip 0.2: -1.2 * 2 (clipped), -0.9 * 2, 1.5 * 2: -1.2 in all; the entropy is 3 in all
    near(total, -1.2 - 0.1 * 3)
    near(means["policy_loss"], -0.4)
    near(means["entropy"], 1.0)
    near(means["clip_fraction"], 2 / 3)
    # 0.5 - log 1.5 twice and -0.1 - log 0.9 once
    near(means["kl"], (2 * (0.5 - math.log(1.5)) - 0.1 - math.log(0.9)) / 3)
    slopes = torch.autograd.grad(total, (log_prob, entropy))
    near(slopes[0], [0.0, -1.8, 3.0, 0.0])
    near(slopes[1], [-0.1, -0.1, -0.1, 0.0])
    wide, means = losses.ppo(log_prob, entropy, old, torch.tensor(A), mask, made(0.5 + 1e-6), made(0.0), fused)
    near(wide, -3.0 - 1.8 + 3.0)  # nothing is clipped, and the entropy is worth nothing
    near(means["clip_fraction"], 0.0)


@pytest.mark.parametrize("made", [float, torch.tensor])
def test_a2c_is_the_log_probability_times_the_advantage(made: Any) -> None:
    log_prob = torch.tensor([-1.0, -2.0, -3.0, NAN], requires_grad=True)
    entropy = torch.tensor(H, requires_grad=True)
    total, means = losses.a2c(log_prob, entropy, torch.tensor(A), torch.tensor(ALIVE), made(0.1))
    # 1 * 2 + 2 * 2 - 3 * 2 = 0, less 0.1 * 3
    near(total, -0.3)
    near(means["policy_loss"], 0.0)
    near(means["entropy"], 1.0)
    slopes = torch.autograd.grad(total, (log_prob, entropy))
    assert slopes[0].tolist() == [-2.0, -2.0, 2.0, 0.0]
    near(slopes[1], [-0.1, -0.1, -0.1, 0.0])
    assert not any(x.requires_grad for x in means.values())
    both, _ = losses.a2c(log_prob[:2], entropy[:2], torch.tensor(A[:2]), None, made(1.0))
    near(both, 6.0 - 1.5)


@pytest.mark.parametrize("fused", KINDS)
def test_value_is_the_sum_of_errors_of_the_living(fused: bool) -> None:
    # old 1, target 3, values 2 and 1.25: free errors 1/2 and 1.53125; held within 1/2 of the old one, the first is 1.125;
    # beyond huber 1 they are 1.5 - 0.5 and 1.75 - 0.5
    value, old, target = torch.tensor([2.0, 1.25, 99.0]), torch.ones(3), torch.full((3,), 3.0)
    mask = torch.tensor([True, True, False])
    for clip, huber, total in ((None, None, 2.03125), (0.5, None, 2.65625), (None, 1.0, 1.75), (0.5, 1.0, 2.25)):
        out, mean = losses.value(value, old, target, mask, clip, huber, fused)
        near(out, total)
        near(mean["value_loss"], total / 2)


# --- agent by agent ---


def test_means_are_of_all_and_sums_of_each_agent() -> None:
    """Two steps of two agents: 1 2, and 3 of the first alone. The mean is 2; the first has 4 of 2, the second 2 of 1."""
    x, mask = torch.tensor([[1.0, 2.0], [3.0, NAN]], requires_grad=True), torch.tensor([[True, True], [True, False]])
    plain = losses.means({"x": x}, mask)
    assert list(plain) == ["x"]
    assert list(losses.means({"team": x[:, :1]}, mask[:, :1], 2)) == ["team"]  # one value of two agents is not told apart
    out = losses.means({"x": x}, mask, 2)
    near(out["x"], 2.0)
    near(plain["x"], 2.0)
    assert out["x/each"].tolist() == [[4.0, 2.0], [2.0, 1.0]]
    assert not out["x/each"].requires_grad
    assert losses.agent_sums({"x": x[:1]}, None, 2)["x/each"].tolist() == [[1.0, 2.0], [1.0, 1.0]]
    assert losses.agent_sums({"x": x[0]}, None, 2)["x/each"].tolist() == [[1.0, 2.0], [1.0, 1.0]]  # a number an agent


@pytest.mark.parametrize("fused", KINDS)
def test_losses_of_each_agent_are_those_of_its_own_samples(fused: bool) -> None:
    """The samples of above as two steps of two agents: ratios 1.5 and 0.9, and 1.5 and that of the dead."""
    mask, old, zero = torch.tensor(ALIVE).view(2, 2), torch.zeros(2, 2), torch.zeros(())
    log_prob, a, h = (torch.tensor(x).view(2, 2) for x in (torch.tensor(RATIO).log().tolist(), A, H))
    total, means = losses.ppo(log_prob.requires_grad_(), h, old, a, mask, 0.2, 0.1, fused, 2)
    same, alone = losses.ppo(log_prob, h, old, a, mask, 0.2, 0.1, fused)
    assert torch.equal(total, same)
    assert all(torch.equal(x, means[k]) for k, x in alone.items())
    near(means["policy_loss/each"].flatten(), [-2.4 + 3, -1.8, 2, 1])
    near(means["entropy/each"].flatten(), [2.0, 1, 2, 1])
    near(means["clip_fraction/each"].flatten(), [2.0, 0, 2, 1])
    near(means["kl/each"].flatten(), [2 * (0.5 - math.log(1.5)), -0.1 - math.log(0.9), 2, 1])
    _, means = losses.value(zero + log_prob.new_tensor([[1.0, 2], [3, 9]]), old, old, mask, None, None, fused, 2)
    near(means["value_loss"], (0.5 + 2 + 4.5) / 3)
    near(means["value_loss/each"].flatten(), [5.0, 2, 2, 1])
    assert not any(x.requires_grad for x in means.values())


def test_steps_are_averaged_and_agents_sums_added_up() -> None:
    steps = [{"x": torch.tensor(1.0), "x/each": torch.tensor([[1.0, 0], [1, 0]])}]
    steps += [{"x": torch.tensor(4.0), "x/each": torch.tensor([[2.0, 10], [1, 2]])}]
    for out, x in ((losses.mean_of_steps(steps), 2.5), (losses.weighted_means(steps, [1, 3]), 3.25)):
        near(out["x"], x)
        assert out["x/each"].tolist() == [[3.0, 10], [2, 2]]
