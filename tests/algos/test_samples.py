"""TD targets where agents move in turn, by hand; and what critics are given of actions that the world clips."""

import math

import pytest
import torch
from bench import CPU, GRU, N, Y, act, agent_group, make_batch, make_frame, make_learner, spec_of, td_targets

from shoal.algos.ddpg import DDPG
from shoal.algos.sac import SAC
from shoal.ops.values import as_vector
from shoal.spec import Box, Discrete, EnvSpec, UserError

LINE = Box((-1.0,), (1.0,))


def side(name, n=1):
    """A team of its own."""
    return agent_group(n, LINE, name, 1, name, mortal=True)


def learner(spec, group, as_one=True):
    a = make_learner(DDPG, spec, groups=(group,), critic="world", gamma=0.5)
    a.as_one = as_one
    return a


@pytest.mark.parametrize("as_one", [False, True])
def test_rewards_while_a_side_waits_go_to_its_last_turn(as_one):
    """left moves at 0 and 2, right at 1 and 3. left is paid 1 at 1 and 3, when right moves; at 3 it is over for good. Of its
    first move: 0 + 1 + 1/2 of the value at its next turn, 30; of its second 0 + 1."""
    spec = EnvSpec((side("left"), side("right")), common=True, turns=True)
    obs, first, second = torch.zeros(4, 1), [Y, N, Y, N], [N, Y, N, Y]
    batch = make_batch(
        {"left": obs, "right": obs},
        {"left": obs, "right": obs},
        [0.0, 1, 0, 1],
        terminated=[N, N, N, Y],
        over=[N, N, N, Y],
        active={"left": first, "right": second},
        next_active={"left": second, "right": first},
        spec=spec,
    )
    value = torch.tensor([10.0, 20, 30, 40])[:, None, None]
    target, mask = td_targets(learner(spec, "left", as_one), batch, value + 1, value)
    assert target.shape == mask.shape == (4, 1, 1)
    assert mask.flatten().tolist() == [True, False, True, False]
    assert target[mask].tolist() == [16.0, 1.0]


def test_one_value_for_agents_that_move_in_turn_has_one_mask():
    """Two agents of one side in turn: somebody always moves, so the value of each next frame is bootstrapped from."""
    spec = EnvSpec((side("agents", 2),), common=True, turns=True)
    obs, turn, reward = torch.zeros(3, 1, 2, 1), [[[Y, N]], [[N, Y]], [[Y, N]]], [[[2.0, 4]], [[0, 2]], [[1, 1]]]
    batch = make_batch(obs, obs, reward, active=turn, next_active=~torch.tensor(turn), spec=spec)
    value = torch.tensor([10.0, 20, 30])[:, None, None]
    target, mask = td_targets(learner(spec, "agents"), batch, value + 12, value)
    assert mask.shape == target.shape == (3, 1, 1)
    assert bool(mask.all())
    assert target.flatten().tolist() == [3 + 10.0, 1 + 15.0, 1 + 21.0]


def test_critics_are_given_the_actions_that_the_world_was_given():
    """An action beyond its bounds, as one of PPO's may be, is clipped on its way to the world."""
    assert as_vector(torch.tensor([[3.0], [-0.5], [-2.0]]), LINE).flatten().tolist() == [1.0, -0.5, -1.0]


@pytest.mark.parametrize("asked", [-1.0, 2.0])
def test_a_share_of_entropy_that_cannot_be_is_refused(asked):
    spec = spec_of(action=Discrete(3))
    with pytest.raises(
        UserError, match=f"--algo.target-entropy is {asked:g}: for the discrete actions of agents it is a share"
    ):
        make_learner(SAC, spec, critic="world", target_entropy=asked)
    assert make_learner(SAC, spec, critic="world", target_entropy=1.0)._goal(None) == math.log(3)


@pytest.mark.parametrize(
    ("start", "kept"), [([False, False], True), ([True, False], True), ([False, True], True), ([True, True], False)]
)
def test_memory_of_one_critic_outlives_late_arrivals_and_ends_with_the_episode(start, kept):
    """Memory of those who start was zeroed before; the other copy is the same, and goes on."""
    a = make_learner(DDPG, spec_of(2, LINE, obs=1, mortal=True, common=True), net=GRU, critic="world")
    assert a.as_one
    memory, frame = a.memory(1, CPU), make_frame([[[0.3], [-0.6]]], start=[start])
    for x in memory["agents"]["critic"]["0"].values():
        x.copy_(torch.full_like(x, 0.7).masked_fill(frame["agents"].start[..., None], 0))
    after = act(a, frame, torch.full((1, 2, a.noise), 0.5), memory).memory
    before = {k: torch.full((1, 1, 8), 0.7 if kept else 0.0) for k in memory["agents"]["critic"]["0"]}
    expected = a.critics[0].features(a.observations.critic_input(frame), before)[1]["hidden"]
    torch.testing.assert_close(after["agents"]["critic"]["0"]["hidden"], expected.expand(1, 2, 8))
