"""Mixers: by hand, and never worse for the team than for its agents."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from shoal.nets.mixer import MonotonicMixer

torch.set_num_threads(1)


def draw(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def slopes(mixer: MonotonicMixer, q: Tensor, state: Tensor) -> Tensor:
    """What one more for each agent is worth to the team, [..., N]."""
    q = q.clone().requires_grad_()
    return torch.autograd.grad(mixer(q, state).sum(), q)[0]


def set_to(layer: Any, weight: list[list[float]], bias: list[float]) -> None:
    with torch.no_grad():
        layer[0].copy_(torch.tensor(weight))
        layer[1].copy_(torch.tensor(bias))


def by_hand() -> MonotonicMixer:
    """Two agents, two units, one unit in the nets that make weights, a state of four numbers, of which the first matters: it
    goes in at half its size, for 4 ** -0.5 is 1/2."""
    mixer = MonotonicMixer(4, 2, 2, 1, draw())
    first = [2.0, 4, 2, -2, 0, 2]  # for weights in, weights out, the value's two units, the two shifts
    set_to(mixer.look, [[x, 0, 0, 0] for x in first], [0.0, 0, 1, 0, 0, 2])
    set_to(mixer.inner, [[1.0], [-1], [0], [2]], [0.0, 0, -3, 0])
    set_to(mixer.outer, [[-1.0], [1]], [1.0, 0])
    set_to(mixer.value, [[0.5, 7]], [0.25])
    return mixer


def test_by_hand() -> None:
    """State 1, that is 1/2: the nets' units are 1 and 2, so weights in |1 -1 -3 2| are 1 1 for agent 0 and 3 2 for agent 1,
    weights out |-2 + 1| and 2, shifts 0 and 1 + 2 = 3, and the state's own value 0.5 * relu(2) + 7 * relu(-1) + 0.25 = 1.25.
    Agents worth 2 and -1 make 2 - 3 = -1 and 2 - 2 + 3 = 3."""
    mixer, state = by_hand(), torch.tensor([1.0, 9, 9, 9])
    assert mixer(torch.tensor([2.0, -1]), state).tolist() == pytest.approx([math.expm1(-1) + 2 * 3 + 1.25])
    # the slope of ELU at -1 is 1/e, at 3 it is 1: 1/e + 2 and 3/e + 4
    assert slopes(mixer, torch.tensor([2.0, -1]), state).tolist() == pytest.approx([1 / math.e + 2, 3 / math.e + 4])
    # state 0: weights in 0 0 3 0, weights out 1 and 0, shifts 0 and 2: elu(-3) and the state's value, 0.5 * relu(1) + 0.25
    assert mixer(torch.tensor([2.0, -1]), torch.zeros(4)).tolist() == pytest.approx([math.expm1(-3) + 0.75])


def test_shapes_and_that_moments_do_not_mix() -> None:
    mixer = by_hand()
    q, state = torch.randn(4, 3, 2, generator=draw(1)), torch.randn(4, 3, 4, generator=draw(2))
    out = mixer(q, state)
    assert out.shape == (4, 3, 1)
    torch.testing.assert_close(out[2, 1], mixer(q[2, 1], state[2, 1]))


@pytest.mark.parametrize("hyper", [1, 16])
@pytest.mark.parametrize("seed", range(4))
def test_the_team_never_loses_by_what_an_agent_gains(hyper: int, seed: int) -> None:
    """Whatever the weights have become, the state is and the agents are worth."""
    g = draw(seed)
    mixer = MonotonicMixer(5, 3, 8, hyper, g)
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
    mixer, q = MonotonicMixer(5, 3, 8, 16, draw()), torch.zeros(50, 3)
    each = slopes(mixer, q, torch.randn(50, 5, generator=draw(1)))
    assert each.std(0).min() > 0
    nothing = slopes(mixer, q[:1], torch.zeros(1, 5))
    assert (nothing > 0.01).all()  # and where it says nothing, everybody


def test_it_begins_about_as_steep_as_the_mean() -> None:
    each = torch.cat(
        [
            slopes(MonotonicMixer(12, 3, 32, 64, draw(k)), torch.zeros(50, 3), torch.randn(50, 12, generator=draw(k)))
            for k in range(5)
        ]
    )
    assert 0.1 < each.mean().item() * 3 < 10


def test_everything_learns_and_the_seed_makes_it() -> None:
    mixer = MonotonicMixer(5, 3, 8, 16, draw())
    mixer(torch.randn(50, 3, generator=draw(1)), torch.randn(50, 5, generator=draw(2))).square().sum().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in mixer.parameters())
    same, other = (MonotonicMixer(5, 3, 8, 16, draw(k)).state_dict() for k in (0, 1))
    assert all(torch.equal(x, same[k]) for k, x in mixer.state_dict().items())
    assert not torch.equal(same["inner.0"], other["inner.0"])
