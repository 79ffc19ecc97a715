"""Actors and critics: shapes, and the plain nets that they stand for."""

from __future__ import annotations

import pytest
import torch

from shoal.nets.heads import Actor, Critic
from shoal.nets.layers import NetConfig
from shoal.ops.distributions import Choice, Normal, TanhNormal
from shoal.spec import Box, Discrete, MultiDiscrete, Space

torch.set_num_threads(1)
BOX = Box((-1.0, 0.0), (1.0, 2.0))
SHARES = ("id", "plain", "none")


def draw(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def config(share: str) -> NetConfig:
    return NetConfig((8,), share=share)  # type: ignore[arg-type]


@pytest.mark.parametrize("lead", [(), (5,), (6, 5)])
@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize(("space", "action", "width"), [(Discrete(5), (), 5), (MultiDiscrete((3, 2)), (2,), 5), (BOX, (2,), 2)])
def test_actor_shapes(space: Space, action: tuple[int, ...], width: int, share: str, lead: tuple[int, ...]) -> None:
    actor = Actor(4, space, 3, config(share), draw())
    pi = actor(torch.randn(*lead, 3, 4, generator=draw(1)))
    drawn = pi.sample(torch.rand(*lead, 3, width, generator=draw(2)))
    assert drawn.shape == pi.mode().shape == (*lead, 3, *action)
    assert pi.log_prob(drawn).shape == pi.entropy().shape == (*lead, 3)


def test_actor_kinds() -> None:
    x = torch.zeros(2, 3, 4)
    assert type(Actor(4, Discrete(2), 3, config("id"), draw())(x)) is Choice
    assert type(Actor(4, BOX, 3, config("id"), draw())(x)) is Normal
    assert type(Actor(4, BOX, 3, config("id"), draw(), squash=True)(x)) is TanhNormal


def test_actor_begins_nearly_uniform() -> None:
    """The last layer's gain is a hundredth: logits within about 0.01 |h| of zero."""
    pi = Actor(4, Discrete(5), 3, config("id"), draw())(torch.randn(100, 3, 4, generator=draw(1)))
    assert pi.logits[0].abs().max().item() < 0.05
    assert pi.logits[0].abs().max().item() > 0


def test_actor_masks() -> None:
    legal = torch.tensor([False, True, False, False, True]).expand(100, 3, 5)
    pi = Actor(4, Discrete(5), 3, config("id"), draw())(torch.randn(100, 3, 4, generator=draw(1)), legal)
    assert set(pi.sample(torch.rand(100, 3, 5, generator=draw(2))).flatten().tolist()) == {1, 4}


@pytest.mark.parametrize(("share", "rows"), [("id", 1), ("plain", 1), ("none", 3)])
def test_standard_deviations_are_learnt_and_held(share: str, rows: int) -> None:
    actor = Actor(4, BOX, 3, config(share), draw(), log_std=-0.5)
    assert actor.log_std.shape == (rows, 2)
    assert "log_std" in dict(actor.named_parameters())
    pi = actor(torch.zeros(7, 3, 4))
    assert torch.equal(pi.log_std, torch.full((7, 3, 2), -0.5))
    with torch.no_grad():
        actor.log_std[-1, 0], actor.log_std[-1, 1] = 9.0, -9.0
    pi = actor(torch.zeros(7, 3, 4))
    assert pi.log_std[0, 2].tolist() == [2.0, -5.0]
    assert pi.log_std[0, 0].tolist() == ([2.0, -5.0] if rows == 1 else [-0.5, -0.5])


def test_discrete_actors_have_no_deviation() -> None:
    assert not hasattr(Actor(4, Discrete(2), 3, config("id"), draw()), "log_std")


@pytest.mark.parametrize("lead", [(), (5,), (6, 5)])
@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize("central", [False, True])
def test_critic_shapes(central: bool, share: str, lead: tuple[int, ...]) -> None:
    critic = Critic(4, 3, config(share), draw(), central)
    x = torch.randn(*lead, 4, generator=draw(1)) if central else torch.randn(*lead, 3, 4, generator=draw(1))
    assert critic(x).shape == (*lead, 3)


@pytest.mark.parametrize("share", ["id", "plain"])
def test_central_critic_with_sharing_is_one_net_with_a_head_an_agent(share: str) -> None:
    critic = Critic(4, 3, config(share), draw(), central=True)
    first, last = critic.body.weights
    assert first.shape == (8, 4)  # no ids in it: it reads the state once
    assert last.shape == (3, 8)
    x = torch.randn(6, 4, generator=draw(1))
    torch.testing.assert_close(critic(x), torch.tanh(x @ first.T) @ last.T)
    assert critic(x).std(-1).min() > 0  # agents may be paid differently


def test_central_critic_without_sharing_is_a_net_an_agent() -> None:
    critic = Critic(4, 3, config("none"), draw(), central=True)
    first, last = critic.body.weights  # [3, 4, 8], [3, 8, 1]
    x = torch.randn(6, 4, generator=draw(1))
    expected = torch.stack([(torch.tanh(x @ first[i]) @ last[i])[:, 0] for i in range(3)], -1)
    torch.testing.assert_close(critic(x), expected)
    critic(x)[:, 1].sum().backward()
    assert first.grad is not None
    assert first.grad[1].abs().sum() > 0
    assert first.grad[0].abs().sum() == 0


def test_own_critic_looks_at_its_own_agent_alone() -> None:
    for share in SHARES:
        critic = Critic(4, 3, config(share), draw(), central=False)
        x = torch.randn(6, 3, 4, generator=draw(1))
        y = x.clone()
        y[:, 1] += 1
        moved = (critic(x) != critic(y)).any(0).tolist()
        assert moved == [False, True, False]
