"""Mixers: by hand, and never worse for the team than for its agents."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from shoal.nets.layers import MLP, NetConfig
from shoal.nets.mixer import Monotone

torch.set_num_threads(1)


def draw(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def slopes(mixer: Monotone, q: Tensor, state: Tensor) -> Tensor:
    """What one more for each agent is worth to the team, [..., N]."""
    q = q.clone().requires_grad_()
    return torch.autograd.grad(mixer(q, state).sum(), q)[0]


def set_to(layers: MLP, *numbers: tuple[list[list[float]], list[float]]) -> None:
    """Weights and biases of each layer, as lists."""
    with torch.no_grad():
        for w, b, (weight, bias) in zip(layers.weights, layers.biases, numbers, strict=True):
            w.copy_(torch.tensor(weight))
            b.copy_(torch.tensor(bias))


def by_hand() -> Monotone:
    """Two agents, two units, a state of one number."""
    mixer = Monotone(1, 2, 2, 0, NetConfig(), draw())
    set_to(mixer.inner, ([[1.0], [-1], [0], [2]], [0.0, 0, -3, 0]))
    set_to(mixer.shift, ([[0.0], [1]], [0.0, 2]))
    set_to(mixer.outer, ([[-1.0], [2]], [0.0, 0]))
    set_to(mixer.value, ([[1.0], [-1]], [1.0, 0]), ([[0.5, 7]], [0.25]))
    return mixer


def test_by_hand() -> None:
    """State 1: weights in |1 -1 -3 2| are 1 1 for agent 0 and 3 2 for agent 1, shifts 0 and 3, weights out |-1 2|, and the
    state's own value 0.5 * 2 + 7 * 0 + 0.25 = 1.25. Agents worth 2 and -1 make 2 - 3 = -1 and 2 - 2 + 3 = 3."""
    mixer, state = by_hand(), torch.tensor([1.0])
    assert mixer(torch.tensor([2.0, -1]), state).tolist() == pytest.approx([math.expm1(-1) + 2 * 3 + 1.25])
    # the slope of ELU at -1 is 1/e, at 3 it is 1: 1/e + 2 and 3/e + 4
    assert slopes(mixer, torch.tensor([2.0, -1]), state).tolist() == pytest.approx([1 / math.e + 2, 3 / math.e + 4])
    # state 0: weights in 0 0 3 0, weights out 0: the state's value, 0.5 * relu(1) + 0.25, is all there is
    assert mixer(torch.tensor([2.0, -1]), torch.tensor([0.0])).tolist() == [0.75]


def test_shapes_and_that_moments_do_not_mix() -> None:
    mixer = by_hand()
    q, state = torch.randn(4, 3, 2, generator=draw(1)), torch.randn(4, 3, 1, generator=draw(2))
    out = mixer(q, state)
    assert out.shape == (4, 3, 1)
    torch.testing.assert_close(out[2, 1], mixer(q[2, 1], state[2, 1]))


@pytest.mark.parametrize("hyper", [0, 16])
@pytest.mark.parametrize("seed", range(4))
def test_the_team_never_loses_by_what_an_agent_gains(hyper: int, seed: int) -> None:
    """Whatever the weights have become, the state is and the agents are worth."""
    g = draw(seed)
    mixer = Monotone(5, 3, 8, hyper, NetConfig(), g)
    if seed:  # the first are as they begin
        with torch.no_grad():
            for p in mixer.parameters():
                p.normal_(0, 0.5 * seed, generator=g)
    q, state = 3 * torch.randn(500, 3, generator=g), 2 * torch.randn(500, 5, generator=g)
    each = slopes(mixer, q, state)
    assert (each >= 0).all()
    assert ((each > 0).float().mean(0) > 0.5).all()  # and mostly the team gains
    better = mixer(q + torch.rand(500, 3, generator=g), state)
    assert (better >= mixer(q, state) - 1e-3 * mixer(q, state).abs()).all()


def test_the_state_says_how_much_an_agent_counts() -> None:
    mixer, q = Monotone(5, 3, 8, 16, NetConfig(), draw()), torch.zeros(50, 3)
    each = slopes(mixer, q, torch.randn(50, 5, generator=draw(1)))
    assert each.std(0).min() > 0
    nothing = slopes(mixer, q[:1], torch.zeros(1, 5))
    assert (nothing > 0.01).all()  # and where it says nothing, everybody


def test_it_begins_about_as_steep_as_the_mean() -> None:
    each = torch.cat(
        [
            slopes(Monotone(12, 3, 32, 64, NetConfig(), draw(k)), torch.zeros(50, 3), torch.randn(50, 12, generator=draw(k)))
            for k in range(5)
        ]
    )
    assert 0.1 < each.mean().item() * 3 < 10


def test_everything_learns_and_the_seed_makes_it() -> None:
    mixer = Monotone(5, 3, 8, 16, NetConfig(), draw())
    mixer(torch.randn(50, 3, generator=draw(1)), torch.randn(50, 5, generator=draw(2))).square().sum().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in mixer.parameters())
    same, other = (Monotone(5, 3, 8, 16, NetConfig(), draw(k)).state_dict() for k in (0, 1))
    assert all(torch.equal(x, same[k]) for k, x in mixer.state_dict().items())
    assert not torch.equal(same["inner.weights.0"], other["inner.weights.0"])


def test_agents_that_share_by_name_can_be_mixed() -> None:
    mixer = Monotone(5, 2, 8, 16, NetConfig(share="agent_0=a,agent_1=b"), draw())
    assert mixer(torch.zeros(3, 2), torch.zeros(3, 5)).shape == (3, 1)
