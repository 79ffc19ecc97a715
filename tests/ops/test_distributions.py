"""Distributions by hand, by formula and by counting."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from shoal.ops.distributions import Choice, Normal, TanhNormal, make, noise_of, params_of
from shoal.spec import Box, Discrete, MultiDiscrete

torch.set_num_threads(1)
LAST = 1 - 2.0**-24  # the largest number torch.rand gives
F64 = torch.float64


def logs(*p: float) -> Tensor:
    return torch.tensor(p, dtype=F64).log()


def near(x: Tensor, y: Any, tol: float = 1e-9) -> None:
    torch.testing.assert_close(x.detach(), torch.as_tensor(y, dtype=x.dtype), rtol=tol, atol=tol)


def uniform(*shape: int, seed: int = 0) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed))


# --- choices ---


def test_choice_by_hand() -> None:
    # 1/2, 1/4, 1/4 (the logits shifted by 3, which changes nothing): entropy 1/2 log 2 + 2/4 log 4 = 3/2 log 2
    pi = Choice(logs(0.5, 0.25, 0.25) + 3, (3,))
    near(pi.log_prob(torch.tensor(0)), -math.log(2))
    near(pi.log_prob(torch.tensor(2)), -math.log(4))
    near(pi.entropy(), 1.5 * math.log(2))
    assert pi.mode().item() == 0


def test_multi_discrete_adds_up() -> None:
    # dimensions of 3 and 2: 1/2, 1/4, 1/4 and 1/8, 7/8
    pi = Choice(torch.cat((logs(0.5, 0.25, 0.25), logs(0.125, 0.875))), (3, 2), single=False)
    near(pi.log_prob(torch.tensor([1, 0])), -math.log(4) - math.log(8))
    near(pi.log_prob(torch.tensor([0, 1])), -math.log(2) + math.log(0.875))
    second = math.log(8) / 8 - 0.875 * math.log(0.875)
    near(pi.entropy(), 1.5 * math.log(2) + second)
    assert pi.mode().tolist() == [0, 1]
    assert pi.sample(torch.tensor([0.5, LAST, 0.5, LAST, 0.01])).tolist() == [1, 0]


def test_one_dimension_of_a_multi_discrete_keeps_its_dimension() -> None:
    pi = make(MultiDiscrete((3,)), logs(0.5, 0.25, 0.25).expand(4, 2, 3))
    assert pi.mode().shape == (4, 2, 1)
    assert pi.sample(uniform(4, 2, 3)).shape == (4, 2, 1)
    near(pi.log_prob(torch.ones(4, 2, 1, dtype=torch.long)), torch.full((4, 2), -math.log(4), dtype=F64))
    assert pi.entropy().shape == (4, 2)


def test_masks_go_into_the_softmax() -> None:
    # of 1/2, 1/4, 1/4 the first is illegal: the rest are 1/2 each, entropy log 2
    legal = torch.tensor([False, True, True])
    pi = Choice(logs(0.5, 0.25, 0.25), (3,), legal)
    assert pi.log_prob(torch.tensor(0)).item() == -math.inf
    near(pi.log_prob(torch.tensor(1)), -math.log(2))
    near(pi.entropy(), math.log(2))
    assert pi.mode().item() == 1
    only = Choice(logs(0.5, 0.25, 0.25), (3,), torch.tensor([False, False, True]))
    near(only.entropy(), 0.0)
    near(only.log_prob(torch.tensor(2)), 0.0)


@pytest.mark.parametrize("sizes", [(5,), (3, 2, 4)])
def test_masked_is_unmasked_over_the_legal_subset(sizes: tuple[int, ...]) -> None:
    """Each dimension by itself, with the illegal choices taken out of logits and noise."""
    draw = torch.Generator().manual_seed(3)
    logits = torch.randn(sum(sizes), generator=draw, dtype=F64)
    legal = torch.rand(sum(sizes), generator=draw) < 0.6
    starts = [sum(sizes[:d]) for d in range(len(sizes))]
    legal[starts] = True
    pi = Choice(logits, sizes, legal, single=len(sizes) == 1)
    entropy = torch.zeros((), dtype=F64)
    log_prob = torch.zeros((), dtype=F64)
    noise = torch.rand(sum(sizes), generator=draw)
    sample = pi.sample(noise).reshape(-1)
    for d, (at, n) in enumerate(zip(starts, sizes, strict=True)):
        kept = legal[at : at + n].nonzero()[:, 0]
        alone = Choice(logits[at : at + n][kept], (len(kept),))
        entropy += alone.entropy()
        log_prob += alone.log_prob(torch.tensor(0))
        assert sample[d].item() == kept[alone.sample(noise[at : at + n][kept])].item()
    near(pi.entropy(), entropy)
    zeros = torch.zeros(len(sizes), dtype=torch.long)
    near(pi.log_prob(zeros[0] if len(sizes) == 1 else zeros), log_prob)


def test_the_illegal_is_never_drawn() -> None:
    """100 000 draws, the illegal choices being the likely ones, u = 0 and the largest u among the noise."""
    edges = torch.tensor([0.0, 2.0**-24, LAST])
    noise = uniform(100_000, 6)
    pick = uniform(100_000, 6, seed=1)
    noise = torch.where(pick < 0.3, edges[(uniform(100_000, 6, seed=2) * 3).long()], noise)
    noise[0], noise[1] = 0.0, LAST
    logits = torch.tensor([50.0, 0.0, -50.0, 50.0, 1.0, 50.0])
    for sizes, legal, allowed in (
        ((6,), [False, True, True, False, True, False], [{1, 2, 4}]),
        ((3, 3), [False, True, True, False, True, False], [{1, 2}, {1}]),
    ):
        pi = Choice(logits.expand(100_000, 6), sizes, torch.tensor(legal).expand(100_000, 6), single=False)
        sample = pi.sample(noise)
        for d, some in enumerate(allowed):
            assert set(sample[:, d].tolist()) <= some
    worst = torch.tensor([LAST, 0.0, 0.0, LAST, 0.0, LAST])  # for the illegal the best noise, for the legal the worst
    assert Choice(logits, (6,), torch.tensor([False, True, True, False, True, False])).sample(worst).item() == 4
    assert torch.isfinite(Choice(logits, (6,)).log_prob(Choice(logits, (6,)).sample(torch.zeros(6))))


def test_entropy_of_the_masked_has_a_finite_gradient() -> None:
    logits = torch.tensor([[1.0, 2.0, 3.0, -1.0], [80.0, -80.0, 3.0, 0.0]], requires_grad=True)
    legal = torch.tensor([[True, False, True, True], [False, True, False, False]])
    pi = Choice(logits, (4,), legal)
    log_prob, entropy = pi.log_prob_and_entropy(torch.tensor([2, 1]))
    (grad,) = torch.autograd.grad((entropy + log_prob).sum(), logits)
    assert entropy.isfinite().all()
    assert grad.isfinite().all()
    assert grad[~legal].tolist() == [0.0] * 4
    # the gradient is that of the legal subset alone
    few = torch.tensor([1.0, 3.0, -1.0], requires_grad=True)
    alone = Choice(few, (3,))
    (expected,) = torch.autograd.grad(alone.entropy() + alone.log_prob(torch.tensor(1)), few)
    near(grad[0][legal[0]], expected, 1e-6)
    # and of entropy alone, by hand: dH/dx_i = -p_i (log p_i + H); here p = 1/2, 1/4, 1/4, H = 3/2 log 2
    x = logs(0.5, 0.25, 0.25, 0.9).requires_grad_()
    mask = torch.tensor([True, True, True, False])
    (grad,) = torch.autograd.grad(Choice(x, (4,), mask).entropy(), x)
    log2 = math.log(2)
    near(grad, [-0.5 * 0.5 * log2, 0.25 * 0.5 * log2, 0.25 * 0.5 * log2, 0.0])


@pytest.mark.parametrize("masked", [False, True])
def test_frequencies_are_the_softmax(masked: bool) -> None:
    """Chi-square over 200 000 draws: below the 99.9 % point (18.47 with 4 degrees of freedom, 13.82 with 2)."""
    n = 200_000
    logits = torch.tensor([1.0, 0.0, -2.0, 0.5, 2.0])
    legal = torch.tensor([True, False, True, True, False]) if masked else torch.ones(5, dtype=torch.bool)
    pi = Choice(logits.expand(n, 5), (5,), legal.expand(n, 5) if masked else None)
    counts = torch.bincount(pi.sample(uniform(n, 5, seed=7)), minlength=5).double()
    p = logits.masked_fill(~legal, -math.inf).double().softmax(0)
    assert counts[~legal].sum() == 0
    chi = ((counts - n * p).square() / (n * p))[legal].sum().item()
    assert chi < (13.82 if masked else 18.47)


def test_dimensions_are_drawn_independently() -> None:
    n = 100_000
    pi = Choice(torch.zeros(n, 4), (2, 2), single=False)
    sample = pi.sample(uniform(n, 4, seed=5))
    counts = torch.bincount(sample[:, 0] * 2 + sample[:, 1], minlength=4).double()
    assert ((counts - n / 4).square() / (n / 4)).sum().item() < 16.27  # 99.9 %, 3 degrees of freedom


# --- normals ---


def test_normal_by_formula() -> None:
    mean = torch.tensor([[1.0, -2.0]], dtype=F64)
    log_std = torch.tensor([math.log(2), math.log(0.5)], dtype=F64)
    pi = Normal(mean, log_std)
    # z = (3 - 1)/2 = 1 and (-1 + 2)/0.5 = 2: -(1/2 + log 2) - (2 - log 2) - log 2pi
    near(pi.log_prob(torch.tensor([[3.0, -1.0]], dtype=F64)), [-2.5 - math.log(2 * math.pi)])
    # 1/2 log(2 pi e s^2) each; the logs of 2 and 1/2 cancel
    near(pi.entropy(), [math.log(2 * math.pi * math.e)])
    near(Normal(mean, log_std + 1).entropy(), [math.log(2 * math.pi * math.e) + 2])
    assert pi.mode().tolist() == [[1.0, -2.0]]


def test_normal_sample_is_the_inverse_distribution() -> None:
    pi = Normal(torch.tensor([1.0], dtype=F64), torch.tensor([math.log(2)], dtype=F64))
    # Phi(0) = 0.5, Phi(1) = 0.841344746, Phi(-2) = 0.022750132
    for u, z in ((0.5, 0.0), (0.8413447460685429, 1.0), (0.022750131948179195, -2.0)):
        near(pi.sample(torch.tensor([u], dtype=F64)), [1 + 2 * z], 1e-7)
    assert Normal(torch.zeros(2), torch.zeros(2)).sample(torch.tensor([0.0, LAST])).isfinite().all()


def test_normal_sample_moments() -> None:
    u = ((torch.arange(200_000, dtype=F64) + 0.5) / 200_000)[:, None]
    x = Normal(torch.tensor([0.7], dtype=F64).expand_as(u), torch.tensor([math.log(1.5)], dtype=F64)).sample(u)
    z = (x - 0.7) / 1.5
    near(z.mean(), 0.0, 1e-9)
    near(z.square().mean(), 1.0, 1e-3)
    near(z.pow(3).mean(), 0.0, 1e-6)
    near(z.pow(4).mean(), 3.0, 1e-2)
    sample = Normal(torch.zeros(200_000, 1), torch.zeros(1)).sample(uniform(200_000, 1, seed=2))
    assert abs(sample.mean().item()) < 4 / math.sqrt(200_000)
    assert sample.std().item() == pytest.approx(1, abs=4 / math.sqrt(2 * 200_000))


def test_tanh_normal_is_a_change_of_variables() -> None:
    mean, std = 0.3, 0.8
    pi = TanhNormal(torch.tensor([mean], dtype=F64), torch.tensor([math.log(std)], dtype=F64))
    for a in (-0.9, 0.0, 0.5):
        x = math.atanh(a)
        inside = -((x - mean) ** 2) / (2 * std**2) - math.log(std * math.sqrt(2 * math.pi))
        near(pi.log_prob(torch.tensor([a], dtype=F64)), inside - math.log(1 - a * a))
    both = TanhNormal(torch.tensor([mean, mean], dtype=F64), torch.tensor([math.log(std)] * 2, dtype=F64))
    each = pi.log_prob(torch.tensor([0.5], dtype=F64)) + pi.log_prob(torch.tensor([-0.9], dtype=F64))
    near(both.log_prob(torch.tensor([0.5, -0.9], dtype=F64)), each)
    near(pi.mode(), [math.tanh(mean)])
    near(pi.sample(torch.tensor([0.8413447460685429], dtype=F64)), [math.tanh(mean + std)], 1e-7)


@pytest.mark.parametrize(("mean", "std"), [(0.3, 0.8), (-1.0, 0.3), (0.0, 1.5)])
def test_tanh_normal_integrates_to_one(mean: float, std: float) -> None:
    n = 400_000
    a = ((torch.arange(n, dtype=F64) + 0.5) / n * 2 - 1)[:, None]
    pi = TanhNormal(torch.tensor([mean], dtype=F64).expand_as(a), torch.tensor([math.log(std)], dtype=F64))
    near(pi.log_prob(a).exp().sum() * 2 / n, 1.0, 1e-4)


def test_tanh_normal_at_the_edges() -> None:
    mean = torch.tensor([0.0, 30.0, -30.0], requires_grad=True)
    pi = TanhNormal(mean[:, None], torch.full((1,), 2.0))
    for noise in (0.0, 0.5, LAST):
        sample = pi.sample(torch.full((3, 1), noise))
        assert (sample.abs() < 1).all()
        out = pi.log_prob(sample.detach())
        assert out.isfinite().all()
        assert torch.autograd.grad(out.sum(), mean, retain_graph=True)[0].isfinite().all()
    for edge in (-1.0, 1.0):
        assert pi.log_prob(torch.full((3, 1), edge)).isfinite().all()


# --- all ---


@pytest.mark.parametrize("kind", ["single", "masked", "multi", "multi masked", "one of multi", "normal", "tanh"])
def test_both_at_once_equal_each(kind: str) -> None:
    draw = torch.Generator().manual_seed(0)
    logits = torch.randn(4, 3, 5, generator=draw)
    legal = torch.rand(4, 3, 5, generator=draw) < 0.5
    legal[..., 0] = legal[..., 3] = True
    pi = {
        "single": lambda: Choice(logits, (5,)),
        "masked": lambda: Choice(logits, (5,), legal),
        "multi": lambda: Choice(logits, (3, 2), single=False),
        "multi masked": lambda: Choice(logits, (3, 2), legal, single=False),
        "one of multi": lambda: Choice(logits, (5,), single=False),
        "normal": lambda: Normal(logits, torch.zeros(5) - 0.5),
        "tanh": lambda: TanhNormal(logits, torch.zeros(5) - 0.5),
    }[kind]()
    action = pi.sample(torch.rand(4, 3, 5, generator=draw))
    log_prob, entropy = pi.log_prob_and_entropy(action)
    assert log_prob.shape == entropy.shape == (4, 3)
    assert log_prob.isfinite().all()
    torch.testing.assert_close(log_prob, pi.log_prob(action))
    torch.testing.assert_close(entropy, pi.entropy())


def test_make_and_sizes() -> None:
    box = Box((-1.0, 0.0), (1.0, 2.0))
    assert [params_of(s) for s in (Discrete(5), MultiDiscrete((3, 2)), box)] == [5, 5, 2]
    assert [noise_of(s) for s in (Discrete(5), MultiDiscrete((3, 2)), box)] == [5, 5, 2]
    assert make(Discrete(5), torch.zeros(2, 5)).sample(torch.rand(2, 5)).shape == (2,)
    assert make(MultiDiscrete((3, 2)), torch.zeros(2, 5)).sample(torch.rand(2, 5)).shape == (2, 2)
    assert type(make(box, torch.zeros(2, 2), log_std=torch.zeros(2))) is Normal
    assert type(make(box, torch.zeros(2, 2), log_std=torch.zeros(2), squash=True)) is TanhNormal


def test_nothing_here_draws() -> None:
    before = torch.random.get_rng_state()
    for pi, width in ((Choice(torch.zeros(9, 4), (4,)), 4), (Normal(torch.zeros(9, 2), torch.zeros(2)), 2)):
        noise = uniform(9, width)
        assert torch.equal(pi.sample(noise), pi.sample(noise))
        pi.log_prob_and_entropy(pi.sample(noise))
    assert torch.equal(before, torch.random.get_rng_state())


# --- draws that are differentiated ---


def test_a_relaxed_draw_by_hand() -> None:
    """u = e^-1, e^-2 and e^-4 shake by 0, -log 2 and -log 4: logits of log 1, 4 and 4 are log 1, 2 and 1 then, p = 1/4, 1/2,
    1/4. The draw is the second, and its gradient that of p: dp_i/dx_j = p_i ([i = j] - p_j)."""
    x = logs(1, 4, 4).requires_grad_()
    noise = torch.tensor([-1.0, -2.0, -4.0], dtype=F64).exp()
    sample = Choice(x, (3,)).relaxed(noise, 1.0)
    assert sample.tolist() == [0.0, 1.0, 0.0]
    (grad,) = torch.autograd.grad(sample @ torch.tensor([3.0, 5.0, 7.0], dtype=F64), x)
    near(grad, [0.25 * (3 - 5), 0.0, 0.25 * (7 - 5)])  # p_j (w_j - 5), 5 being the mean
    # half the temperature: p = 1/6, 4/6, 1/6 and twice the slope
    sample = Choice(x, (3,)).relaxed(noise, 0.5)
    (grad,) = torch.autograd.grad(sample @ torch.tensor([3.0, 5.0, 7.0], dtype=F64), x)
    near(grad, [2 / 6 * (3 - 5), 0.0, 2 / 6 * (7 - 5)])


@pytest.mark.parametrize("temperature", [0.3, 1.0, 4.0])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("sizes", [(5,), (3, 2), (2, 2, 1)])
def test_a_relaxed_draw_is_one_hot_with_the_gradient_of_a_softmax(
    sizes: tuple[int, ...], masked: bool, temperature: float
) -> None:
    draw = torch.Generator().manual_seed(0)
    x = (3 * torch.randn(400, 2, 5, generator=draw)).requires_grad_()
    noise, weight = torch.rand(400, 2, 5, generator=draw), torch.randn(400, 2, 5, generator=draw)
    noise[0], noise[1] = 0.0, LAST
    legal = torch.rand(400, 2, 5, generator=draw) < 0.5
    legal[..., [sum(sizes[:d]) for d in range(len(sizes))]] = True
    if not masked:
        legal[:] = True
    pi = Choice(x, sizes, legal if masked else None, single=len(sizes) == 1)
    out = pi.relaxed(noise, temperature)
    assert ((out == 0) | (out == 1)).all()
    assert (out[~legal] == 0).all()
    sample = pi.sample(noise) if len(sizes) > 1 else pi.sample(noise)[..., None]
    for d, part in enumerate(out.split(sizes, -1)):
        assert (part.sum(-1) == 1).all()
        assert torch.equal(part.argmax(-1), sample[..., d])
    (grad,) = torch.autograd.grad((out * weight).sum(), x)
    shaken = (x - (-noise.clamp(2.0**-24, LAST).log()).log()).masked_fill(~legal, -math.inf)
    soft = torch.cat([(p / temperature).softmax(-1) for p in shaken.split(sizes, -1)], -1)
    (expected,) = torch.autograd.grad((soft * weight).sum(), x)
    torch.testing.assert_close(grad, expected)
    assert grad.isfinite().all()
    assert (grad[~legal] == 0).all()
    assert grad.abs().max() > 0.01


def test_an_only_choice_is_drawn_without_a_gradient() -> None:
    x = torch.tensor([80.0, -80.0, 3.0], requires_grad=True)
    sample = Choice(x, (3,), torch.tensor([False, True, False])).relaxed(torch.tensor([LAST, 0.0, LAST]), 0.1)
    assert sample.tolist() == [0.0, 1.0, 0.0]
    assert torch.autograd.grad(sample @ torch.arange(3.0), x)[0].tolist() == [0.0] * 3


ONE = 0.8413447460685429  # Phi(1)


def test_a_path_by_hand() -> None:
    """Mean 1/2, deviation 1/2, z = 1: u = 1, a = tanh 1, and log pi = -1/2 - log(1/2) - log(2 pi)/2 - log(1 - a^2)."""
    pi = TanhNormal(torch.tensor([0.5], dtype=F64), torch.tensor([math.log(0.5)], dtype=F64))
    a, log_prob = pi.path(torch.tensor([ONE], dtype=F64))
    near(a, [0.7615941559557649], 1e-7)
    near(log_prob, -0.5 + 0.6931471806 - 0.9189385332 + 0.8675616609, 1e-7)  # 1 - a^2 = 0.4199743416
    # a second dimension of u = 0 adds -log(2 pi)/2 with a deviation of 1
    both = TanhNormal(torch.tensor([0.5, 0.0], dtype=F64), torch.tensor([math.log(0.5), 0.0], dtype=F64))
    a, more = both.path(torch.tensor([ONE, 0.5], dtype=F64))
    near(a, [0.7615941559557649, 0.0], 1e-7)
    near(more, log_prob.item() - 0.9189385332, 1e-7)


def test_a_path_is_a_draw_and_its_density_that_of_a_transform() -> None:
    draw = torch.Generator().manual_seed(0)
    mean, log_std = (torch.randn(50, 2, 3, generator=draw, dtype=F64) for _ in range(2))
    noise = torch.rand(50, 2, 3, generator=draw, dtype=F64)
    pi = TanhNormal(mean, log_std * 0.3)
    a, log_prob = pi.path(noise)
    assert log_prob.shape == (50, 2)
    near(pi.sample(noise), a, 2e-6)  # which stays a millionth from the edges
    inside = torch.distributions.Normal(mean, (log_std * 0.3).exp())
    outside = torch.distributions.TransformedDistribution(inside, [torch.distributions.TanhTransform(cache_size=1)])
    same = outside.transforms[0](mean + (log_std * 0.3).exp() * torch.distributions.Normal(0, 1).icdf(noise))
    near(a, same, 1e-6)
    near(log_prob, outside.log_prob(same).sum(-1), 1e-5)


def test_the_slope_of_a_path_by_differences() -> None:
    """And by hand: with z held, u = m + s z, d log pi/dm = 2 a and d log pi/d log s = -1 + 2 a s z."""
    draw = torch.Generator().manual_seed(1)
    mean, log_std = (torch.randn(20, 3, generator=draw, dtype=F64).requires_grad_() for _ in range(2))
    noise = torch.rand(20, 3, generator=draw, dtype=F64)
    weight = torch.randn(20, 3, generator=draw, dtype=F64)
    step = 1e-5
    for k in (0, 1):  # of the action, of the log-probability

        def out(m: Tensor, s: Tensor, k: int = k) -> Tensor:
            x = TanhNormal(m, s).path(noise)[k]
            return (x * weight).sum(-1) if k == 0 else x

        for grad, which in zip(torch.autograd.grad(out(mean, log_std).sum(), (mean, log_std)), (0, 1), strict=True):
            for d in range(3):
                off = torch.zeros(3, dtype=F64)
                off[d] = step
                up, down = ([x.detach() + sign * off * (which == i) for i, x in enumerate((mean, log_std))] for sign in (1, -1))
                near(grad[:, d], (out(*up) - out(*down)) / (2 * step), 1e-6)
    a, log_prob = TanhNormal(mean, log_std).path(noise)
    by_mean, by_log_std = torch.autograd.grad(log_prob.sum(), (mean, log_std))
    near(by_mean, 2 * a)
    z = torch.special.ndtri(noise)
    near(by_log_std, -1 + 2 * a * log_std.exp() * z)


def test_a_path_is_finite_however_far_out() -> None:
    """u = 30 in float32, where 1 - tanh(u)^2 is zero: its logarithm is log 4 - 2 u, within e^-2u."""
    mean = torch.tensor([30.0, -30.0, 1e4, -1e4, 0.0], requires_grad=True)
    log_std = torch.zeros(5, requires_grad=True)
    a, log_prob = TanhNormal(mean[:, None], log_std[:, None]).path(torch.full((5, 1), 0.5))
    assert a[:2, 0].tolist() == [1.0, -1.0]
    near(log_prob[:2], [-0.9189385 - math.log(4) + 60] * 2, 1e-5)
    assert log_prob.isfinite().all()
    for grad in torch.autograd.grad((log_prob + a[:, 0]).sum(), (mean, log_std)):
        assert grad.isfinite().all()
    for u in (0.0, LAST):
        edge = TanhNormal(mean[:, None], log_std[:, None] + 2).path(torch.full((5, 1), u))
        assert all(x.isfinite().all() for x in edge)
