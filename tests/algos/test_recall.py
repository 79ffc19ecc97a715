"""What is learnt towards where agents move in turn, by hand; and what critics are told of actions that the world clips."""

import math

import pytest
import torch

from shoal.algos import recall
from shoal.algos.ddpg import DDPG
from shoal.algos.sac import SAC
from shoal.nets.layers import NetConfig
from shoal.ops.values import as_vector
from shoal.spec import Batch, Box, Discrete, EnvSpec, Frame, Group, Result, UserError, View

BOX = Box((-1.0,), (1.0,))


def side(name, n=1, **more):
    return Group(name, name, tuple(f"{name}_{i}" for i in range(n)), (1,), BOX, mortal=True, **more)


def learner(spec, group, cls=DDPG, as_one=True, **config):
    a = cls(spec, (group,), cls.Config(critic="world", gamma=0.5, **config), NetConfig(hidden=()), torch.Generator())
    a.peers, a.as_one = {g.name: a for g in spec.groups}, as_one
    return a


def flags(*steps):
    """[T, 1, N] of what each agent does at each step."""
    return torch.tensor(steps, dtype=torch.bool)[:, None]


def played(spec, active, acts_tp1, terminated, over):
    def frame(active):
        there = {g: torch.ones_like(x) for g, x in active.items()}
        views = {g: View(torch.zeros(*x.shape, 1), there[g], x, torch.zeros_like(x)) for g, x in active.items()}
        return Frame(views)

    results = {g: Result(torch.zeros(x.shape), terminated.expand(x.shape)) for g, x in active.items()}
    return Batch(frame(active), frame(acts_tp1), {}, results, over, {g: {} for g in active}, {})


@pytest.mark.parametrize("as_one", [False, True])
def test_what_is_paid_while_a_side_waits_goes_to_its_last_turn(as_one):
    """left moves at 0 and 2, right at 1 and 3. left is paid 1 at 1 and 3, when right moves; at 3 it is over for good. Of its
    first move: 0 + 1 + 1/2 of the value at its next turn, 30; of its second 0 + 1."""
    spec = EnvSpec((side("left"), side("right")), common=True, turns=True)
    left, right = flags([1], [0], [1], [0]), flags([0], [1], [0], [1])
    end = torch.tensor([0, 0, 0, 1], dtype=torch.bool)[:, None]
    batch = played(spec, {"left": left, "right": right}, {"left": right, "right": left}, end[..., None], end)
    reward, value = torch.tensor([0.0, 1, 0, 1])[:, None, None], torch.tensor([10.0, 20, 30, 40])[:, None, None]
    target, mask = recall.targets(learner(spec, "left", as_one=as_one), batch, reward, value + 1, value)
    assert target.shape == mask.shape == (4, 1, 1)
    assert mask.flatten().tolist() == [True, False, True, False]
    assert target[mask].tolist() == [16.0, 1.0]


def test_one_value_for_agents_that_move_in_turn_has_one_mask():
    """Two agents of one side in turn: somebody always moves, so the value of each moment is that of the next."""
    spec = EnvSpec((side("agents", 2),), common=True, turns=True)
    now, following = flags([1, 0], [0, 1], [1, 0]), flags([0, 1], [1, 0], [0, 1])
    never = torch.zeros(3, 1, dtype=torch.bool)
    batch = played(spec, {"agents": now}, {"agents": following}, never[..., None], never)
    value = torch.tensor([10.0, 20, 30])[:, None, None]
    reward = torch.tensor([[2.0, 4], [0, 2], [1, 1]])[:, None]
    target, mask = recall.targets(learner(spec, "agents"), batch, reward, value + 12, value)
    assert mask.shape == target.shape == (3, 1, 1)
    assert bool(mask.all())
    assert target.flatten().tolist() == [3 + 10.0, 1 + 15.0, 1 + 21.0]


def test_critics_are_told_what_the_world_was_given():
    """An action beyond its bounds, as one of PPO's may be, is clipped on its way to the world."""
    assert as_vector(torch.tensor([[3.0], [-0.5], [-2.0]]), BOX).flatten().tolist() == [1.0, -0.5, -1.0]


@pytest.mark.parametrize("asked", [-1.0, 2.0])
def test_a_share_of_entropy_that_cannot_be_is_refused(asked):
    spec = EnvSpec((Group("agents", "agents", ("agent_0",), (1,), Discrete(3)),))
    with pytest.raises(
        UserError, match=f"--algo.target-entropy is {asked:g}: for the discrete actions of agents it is a share"
    ):
        learner(spec, "agents", SAC, target_entropy=asked)
    assert learner(spec, "agents", SAC, target_entropy=1.0)._goal(None) == math.log(3)


@pytest.mark.parametrize(
    ("start", "kept"), [([False, False], True), ([True, False], True), ([False, True], True), ([True, True], False)]
)
def test_one_critics_memory_outlives_late_arrivals_and_ends_with_the_episode(start, kept):
    """Memory of those who start was zeroed before; the other copy is the same, and goes on."""
    spec = EnvSpec((side("agents", 2),), common=True)
    a = DDPG(spec, ("agents",), DDPG.Config(critic="world"), NetConfig(memory="gru", memory_width=3), torch.Generator())
    memory, start = a.memory(1, torch.device("cpu")), torch.tensor([start])
    for x in memory["agents"]["critic"]["0"].values():
        x.copy_(torch.full_like(x, 0.7).masked_fill(start[..., None], 0))
    there = torch.ones(1, 2, dtype=torch.bool)
    frame = Frame({"agents": View(torch.tensor([[[0.3], [-0.6]]]), there, there, start)})
    _, after, _ = a.act(frame, memory, {"agents": torch.full((1, 2, a.noise), 0.5)}, True)
    before = {k: torch.full((1, 1, 3), 0.7 if kept else 0.0) for k in memory["agents"]["critic"]["0"]}
    expected = a.critics[0].see(a.observations.seen(frame, 1), before)[1]["hidden"]
    torch.testing.assert_close(after["agents"]["critic"]["0"]["hidden"], expected.expand(1, 2, 3))
