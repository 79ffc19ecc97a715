"""Noise that remembers: uniform still, alike in neighbours, fresh where an episode starts. Tosses between the best and any."""

from __future__ import annotations

import pytest
import torch

from shoal.ops.explore import correlated, epsilon_greedy, floored, perturbed
from shoal.spec import Discrete, MultiDiscrete


def walk(keep: float, steps: int = 400, many: int = 1000) -> tuple[torch.Tensor, torch.Tensor]:
    """[steps, many, 1, 1] of one process each, uniform and normal; all begin at the first step."""
    g = torch.Generator().manual_seed(0)
    z, out, normal = torch.full((many, 1, 1), 99.0), [], []  # what was before does not matter where it starts
    for t in range(steps):
        u, z = correlated(torch.rand(many, 1, 1, generator=g), z, torch.full((many, 1), t == 0), keep)
        out.append(u)
        normal.append(z)
    return torch.stack(out), torch.stack(normal)


@pytest.mark.parametrize("keep", [0.0, 0.5, 0.9])
def test_each_is_uniform_and_neighbours_are_alike(keep: float) -> None:
    u, z = walk(keep)
    assert float(u.mean()) == pytest.approx(0.5, abs=0.01)
    assert float(u.var()) == pytest.approx(1 / 12, abs=0.002)
    share = torch.histc(u, 10, 0, 1) / u.numel()
    assert share.tolist() == pytest.approx([0.1] * 10, abs=0.01)
    for t in (0, 1, 399):  # at every age alike: neither narrow at first nor ever wider
        assert float(z[t].var()) == pytest.approx(1, abs=0.15)
    for apart in (1, 3):
        ahead, behind = z[apart:].flatten(), z[:-apart].flatten()
        assert float(torch.corrcoef(torch.stack([ahead, behind]))[0, 1]) == pytest.approx(keep**apart, abs=0.02)


def test_by_hand() -> None:
    """ndtri(0.841345) = 1 and ndtri(0.5) = 0; 0.6 * 2 + 0.8 * 1 = 2, and ndtr(2) = 0.977250."""
    noise = torch.tensor([[[0.8413447, 0.5], [0.8413447, 0.5]]])  # [1, N = 2, D = 2]
    u, z = correlated(noise, torch.full((1, 2, 2), 2.0), torch.tensor([[False, True]]), 0.6)
    assert z.flatten().tolist() == pytest.approx([2.0, 1.2, 1.0, 0.0], abs=1e-5)
    assert u.flatten().tolist() == pytest.approx([0.9772499, 0.8849303, 0.8413447, 0.5], abs=1e-5)


def test_without_memory_the_noise_comes_back() -> None:
    noise = torch.rand(50, 3, 2, generator=torch.Generator().manual_seed(1))
    u, _ = correlated(noise, torch.full((50, 3, 2), 5.0), torch.zeros(50, 3, dtype=torch.bool), 0.0)
    assert torch.allclose(u, noise, atol=1e-6)


def test_the_edges_stay_finite() -> None:
    u, z = correlated(torch.tensor([[[0.0, 1.0]]]), torch.zeros(1, 1, 2), torch.tensor([[True]]), 0.9)
    assert z.isfinite().all()
    assert 0 < float(u.min()) < 1e-6
    assert 1 - 1e-6 < float(u.max()) <= 1


# --- epsilon-greedy ---


def tossed(
    epsilon: float, space: Discrete | MultiDiscrete, greedy: list[int] | int, legal: list[bool] | None = None
) -> torch.Tensor:
    """[5000, 2, ...] of two agents' actions."""
    noise = torch.rand(5000, 2, 1 + sum(space.sizes), generator=torch.Generator().manual_seed(0))
    mask = None if legal is None else torch.tensor(legal).expand(5000, 2, -1)
    return epsilon_greedy(torch.tensor(greedy).expand(5000, 2, *space.shape), noise, torch.tensor(epsilon), space, mask)


def test_epsilon_nothing_and_everything() -> None:
    assert (tossed(0.0, Discrete(4), 3) == 3).all()
    share = tossed(1.0, Discrete(4), 3).flatten().bincount(minlength=4) / 10_000
    assert share.tolist() == pytest.approx([0.25] * 4, abs=0.02)


def test_epsilon_is_how_often_any_action_is_taken() -> None:
    # half of the time one of four: 1/8 for each, and 1/2 more for the greedy one
    share = tossed(0.5, Discrete(4), 2).flatten().bincount(minlength=4) / 10_000
    assert share.tolist() == pytest.approx([0.125, 0.125, 0.625, 0.125], abs=0.02)


def test_epsilon_takes_what_is_legal() -> None:
    # one of 0, 1 and 3 in nine of ten: 0.3 each, and a tenth more for the greedy one
    share = tossed(0.9, Discrete(5), 1, [True, True, False, True, False]).flatten().bincount(minlength=5) / 10_000
    assert share.tolist() == pytest.approx([0.3, 0.4, 0.0, 0.3, 0.0], abs=0.02)
    assert share[2] == share[4] == 0


def test_epsilon_is_tossed_for_each_row_and_agent() -> None:
    """By hand: coins of 0.1 and 0.9 about an epsilon of 0.5; of the wild one the larger number (Gumbel's) is taken."""
    noise = torch.tensor([[[0.1, 0.2, 0.3, 0.9], [0.9, 0.2, 0.3, 0.9]], [[0.9, 0.9, 0.3, 0.2], [0.1, 0.2, 0.9, 0.3]]])
    out = epsilon_greedy(torch.tensor([[0, 0], [1, 0]]), noise, torch.tensor(0.5), Discrete(3), None)
    assert out.tolist() == [[2, 0], [1, 1]]
    wild = tossed(0.5, Discrete(1000), 2) != 2  # one in a thousand is not seen
    both = wild.long().sum(1).bincount() / 5000
    assert both.tolist() == pytest.approx([0.25, 0.5, 0.25], abs=0.03)


def test_epsilon_of_several_dimensions_is_one_toss() -> None:
    legal = [True, True, False, True, True]
    out = tossed(0.5, MultiDiscrete((3, 2)), [1, 0], legal).flatten(0, 1)
    share = torch.zeros(3, 2).index_put_((out[:, 0], out[:, 1]), torch.tensor(1e-4), accumulate=True)
    # wild, 1/8 for each of the four that are legal; all dimensions are greedy together
    assert share.flatten().tolist() == pytest.approx([0.125, 0.125, 0.625, 0.125, 0.0, 0.0], abs=0.02)


def test_coins_of_nought_and_just_below_one() -> None:
    edge = torch.tensor([[0.0, 0.1, 0.9], [1 - 2**-24, 0.1, 0.9]])
    assert epsilon_greedy(torch.tensor([0, 0]), edge, torch.tensor(0.0), Discrete(2), None).tolist() == [0, 0]
    assert epsilon_greedy(torch.tensor([0, 0]), edge, torch.tensor(1.0), Discrete(2), None).tolist() == [1, 1]


def test_floored() -> None:
    pi = torch.tensor([[0.5, 0.5, 0.0, 0.25, 0.75]])
    # halves: of 1/3 each and of 1/2 each
    out = floored(pi, torch.tensor(0.5), MultiDiscrete((3, 2)), None)
    assert out[0].tolist() == pytest.approx([5 / 12, 5 / 12, 2 / 12, 0.375, 0.625])
    # legal are 0 and 1, and 1 alone
    pi, legal = torch.tensor([[1.0, 0, 0, 0, 1]]), torch.tensor([[True, True, False, False, True]])
    assert floored(pi, torch.tensor(0.5), MultiDiscrete((3, 2)), legal).tolist() == [[0.75, 0.25, 0.0, 0.0, 1.0]]
    assert torch.equal(floored(pi, torch.tensor(0.0), MultiDiscrete((3, 2)), legal), pi)
    assert floored(pi, torch.tensor(1.0), MultiDiscrete((3, 2)), legal).tolist() == [[0.5, 0.5, 0.0, 0.0, 1.0]]


@pytest.mark.parametrize("epsilon", [0.0, 0.1, 0.5, 0.9, 1.0])
def test_floored_sums_to_one_in_each_dimension_and_leaves_what_is_not_legal(epsilon: float) -> None:
    g, sizes = torch.Generator().manual_seed(0), (3, 4)
    legal = torch.rand(200, 2, 7, generator=g) < 0.5
    legal[..., 0] = legal[..., 3] = True
    logits = torch.randn(200, 2, 7, generator=g).masked_fill(~legal, -torch.inf)
    pi = torch.cat([x.softmax(-1) for x in logits.split(sizes, -1)], -1)
    out = floored(pi, torch.tensor(epsilon), MultiDiscrete(sizes), legal)
    for x in out.split(sizes, -1):
        torch.testing.assert_close(x.sum(-1), torch.ones(200, 2))
    assert (out[~legal] == 0).all()
    count = torch.cat([x.sum(-1, keepdim=True).expand_as(x) for x in legal.split(sizes, -1)], -1)
    assert (out >= epsilon / count - 1e-6)[legal].all()


# --- noise beside an action ---


def test_perturbed_by_hand() -> None:
    """ndtri of 0.841345, 0.5 and 0.022750 is 1, 0 and -2: 1/4 of it is added, held within 3/10 where there is a limit."""
    action, noise = torch.tensor([0.5, -0.1, 0.2]), torch.tensor([0.8413447, 0.5, 0.0227501])
    assert perturbed(action, noise, 0.25).tolist() == pytest.approx([0.75, -0.1, -0.3], abs=1e-5)
    assert perturbed(action, noise, 0.25, 0.3).tolist() == pytest.approx([0.75, -0.1, -0.1], abs=1e-5)
    assert perturbed(action, noise, 0.25, 0.1).tolist() == pytest.approx([0.6, -0.1, 0.1], abs=1e-5)
    assert perturbed(action, noise, torch.tensor(0.25)).tolist() == perturbed(action, noise, 0.25).tolist()
    assert torch.equal(perturbed(action, noise, 0.0), action)


def test_perturbed_stays_within_the_space() -> None:
    """The sum is held, not the noise: 0.9 + 1 is 1 and -0.9 + 1 is 0.1."""
    noise = torch.tensor([0.8413447, 0.8413447, 0.1586553])
    assert perturbed(torch.tensor([0.9, -0.9, -0.9]), noise, 1.0).tolist() == pytest.approx([1.0, 0.1, -1.0], abs=1e-5)
    edges = perturbed(torch.zeros(2), torch.tensor([0.0, 1.0]), 0.1)  # ndtri(1e-7) = -5.2
    assert edges.tolist() == pytest.approx([-0.52, 0.52], abs=0.005)
    spread = perturbed(torch.zeros(20_000, 1), torch.rand(20_000, 1, generator=torch.Generator().manual_seed(0)), 0.2)
    assert float(spread.std()) == pytest.approx(0.2, abs=0.004)
    assert float(spread.mean()) == pytest.approx(0.0, abs=0.004)
