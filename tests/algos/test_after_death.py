"""after_death: an agent's return ends with it, or goes on until its team's episode ends; the numbers worked out on paper.

gamma = lambda = 1/2 everywhere. Nets are one layer, set by hand: V(o) = o, or Q(o, a) = o[a]. Agent 1 has 6 more by its id, so
that its value is 6 where it sees zeros, as the dead do. What the world shows, pays and has done by the dead is JUNK.
"""

import dataclasses
import math

import pytest
import torch
from bench import (
    GRU,
    JUNK,
    REPLAY,
    N,
    Y,
    agent_group,
    collect,
    make_batch,
    make_learner,
    make_loop,
    make_view,
    near,
    record_losses,
    same_state,
    set_layer,
    spoil,
    td_targets,
    update,
)

from shoal.algos import coma, offpolicy, onpolicy
from shoal.algos.coma import COMA
from shoal.algos.ddpg import DDPG
from shoal.algos.iql import IQL
from shoal.algos.optimiser import Optimiser
from shoal.algos.ppo import PPO
from shoal.algos.qmix import QMIX
from shoal.algos.sac import SAC
from shoal.algos.samples import Samples
from shoal.algos.td3 import TD3
from shoal.algos.vdn import VDN
from shoal.api import make
from shoal.ids import catalog
from shoal.ops import losses
from shoal.spec import Box, Discrete, EnvSpec, MultiDiscrete, UserError
from shoal.training.evaluate import evaluate

BOTH, FIRST, SECOND, NOBODY = [Y, Y], [Y, N], [N, Y], [N, N]
PLAIN = {"gamma": 0.5, "normalise_obs": False}
ON_POLICY = {
    **{"rollout": 3, "lam": 0.5, "lr": 0.25, "entropy": 0.0, "epochs": 1, "minibatches": 1, "value_clip": None},
    **{"grad_clip": None, "advantage_scope": "none", "normalise_value": False},
}


def group(name="agents", n=2, action=None, team="t", obs=1, mortal=True):
    return agent_group(n, action, name, obs, team, mortal=mortal)


def world(*groups, common=True, **more):
    return EnvSpec(groups or (group(),), common=common, **more)


def learner(cls, spec, net=None, groups=("agents",), **config):
    return make_learner(cls, spec, groups=groups, net=net, **{**PLAIN, **(ON_POLICY if cls is PPO else {}), **config})


def one_row(obs, next_obs, alive, next_alive, reward, terminated=N, **more):
    """A batch of one row of two agents: all is [T, N] -> [T, 1, N], or [T]; obs [T, N] or [T, N, O] -> [T, 1, N, O]."""
    obs, next_obs = (torch.tensor(x).float().reshape(len(x), 1, 2, -1) for x in (obs, next_obs))
    more |= {"alive": alive, "next_alive": next_alive, "reward": reward, "terminated": terminated}
    rows = {k: x[:, None] if x.dim() == 2 else x for k, x in ((k, torch.as_tensor(x)) for k, x in more.items())}
    return make_batch(obs, next_obs, **rows, extras={"agents": {"log_prob": torch.zeros(obs.shape[:-1])}})


# --- who it is for ---


@pytest.mark.parametrize(
    ("spec", "asked", "goes_on"),
    [
        (world(), "auto", Y),
        (world(), "team", Y),
        (world(), "own", N),
        (world(common=False), "auto", N),
        (world(common=False), "own", N),
        (world(group(mortal=False)), "auto", N),  # nobody dies
        (world(group(n=1)), "auto", N),  # a team of one ends with it
        (world(group(n=1), group("others", 1)), "auto", Y),
        (world(group(n=1), group("others", 1, team="u")), "auto", N),
    ],
)
def test_a_return_goes_on_where_a_teams_pay_is_common_and_its_agents_die(spec, asked, goes_on):
    for cls in (PPO, IQL, DDPG):
        assert learner(cls, spec, after_death=asked).returns_after_death == goes_on
    assert learner(PPO, spec, after_death=asked).observations.zero_dead == goes_on


def test_what_is_refused():
    for cls in (PPO, IQL, DDPG, SAC):
        with pytest.raises(UserError, match=r"--algo.after-death team is for agents that are paid alike: ask for --reward"):
            learner(cls, world(common=False), after_death="team")
    for cls in (VDN, QMIX):
        with pytest.raises(UserError, match=f"{cls.__name__} has one value for a team, which ends with it"):
            learner(cls, world(), after_death="own")
    assert learner(DDPG, world(), critic="world").as_one
    assert not learner(DDPG, world(), critic="world", after_death="own").as_one  # each has a value of its own, to end with it


# --- on-policy: advantages, masks, what the dead see and earn ---


def ppo_of(spec=None, net=None, **config):
    """V(o) = o, and 6 more for agent 1; with a shared trunk all values are 0. Both choices are as likely."""
    a = learner(PPO, spec or world(), net, **config)
    set_layer(a.actor.net.body, 0.0)
    if a.critic is not None:
        set_layer(a.critic.net.body, 1.0)
        a.critic.net.body.ids.data[1] = 6.0
    return a


def minibatch_of(a, batch):
    """What its actor and its critic learn from a batch, and the metrics."""
    given, loss = [], a.actor_loss
    a.actor_loss = lambda log_prob, entropy, minibatch: given.append(minibatch) or loss(log_prob, entropy, minibatch)
    metrics = update(a, batch)
    return given[0], metrics


# agent 1 sees -2, of value 4, is paid 1 and dies in step 0; agent 0 is paid 2 and 4 after that. Of the dead the value is 6:
# delta = 1 + 6/2 - 4, 2 + 6/2 - 6, and in step 2, where the rollout ends, 4 + 6/2 - 6; or 4 - 6 where the team ends too
DEATH = {
    "alive": [BOTH, FIRST, FIRST],
    "next_alive": [FIRST, FIRST, FIRST],
    "reward": [[1, 1], [2, JUNK], [4, JUNK]],
    "obs": [[0, -2], [0, JUNK], [0, JUNK]],
    "next_obs": [[0, JUNK]] * 3,
}
DIES, NEVER = [SECOND, NOBODY, NOBODY], [NOBODY] * 3
CASES = {  # what differs, and agent 1's advantages: A_2, A_1 = -1 + A_2/4, A_0 = 0 + A_1/4
    "the rollout ends between": ({"terminated": DIES}, [-0.1875, -0.75, 1]),
    "it is cut off alone": ({"terminated": NEVER}, [-0.1875, -0.75, 1]),
    "the team is cut off": ({"terminated": DIES, "over": [N, N, Y]}, [-0.1875, -0.75, 1]),
    "the team ends": (
        {"terminated": [SECOND, NOBODY, FIRST], "next_alive": [FIRST, FIRST, NOBODY], "over": [N, N, Y]},
        [-0.375, -1.5, -2],
    ),
    # it is born again before step 2 and sees 2, of value 8: 2 + 8/2 - 6 = 0; then it is paid its own, 3 + 8/2 - 8 = -1
    "it is born again": (
        {
            "terminated": DIES,
            "alive": [BOTH, FIRST, BOTH],
            "next_alive": [FIRST, BOTH, BOTH],
            "next_start": [NOBODY, SECOND, NOBODY],
            "reward": [[1, 1], [2, JUNK], [4, 3]],
            "obs": [[0, -2], [0, JUNK], [0, 2]],
            "next_obs": [[0, JUNK], [0, 2], [0, 2]],
        },
        [-0.0625, -0.25, -1],
    ),
    # at once: it dies in step 0 and sees 2 in step 1: 1 + 8/2 - 4, 3 + 8/2 - 8, 3 + 8/2 - 8
    "it is born again at once": (
        {
            "terminated": DIES,
            "alive": [BOTH] * 3,
            "next_alive": [BOTH] * 3,
            "next_start": [SECOND, NOBODY, NOBODY],
            "reward": [[1, 1], [2, 3], [4, 3]],
            "obs": [[0, -2], [0, 2], [0, 2]],
            "next_obs": [[0, 2]] * 3,
        },
        [1 - 1.25 / 4, -1.25, -1],
    ),
    # not there in step 0, where the other is paid 1, it sees 2 in step 1: 1 + 8/2 - 6 = -1, 3 + 8/2 - 8, 3 + 8/2 - 8
    "it comes late": (
        {
            "alive": [FIRST, BOTH, BOTH],
            "next_alive": [BOTH] * 3,
            "next_start": [SECOND, NOBODY, NOBODY],
            "reward": [[1, JUNK], [2, 3], [4, 3]],
            "obs": [[0, JUNK], [0, 2], [0, 2]],
            "next_obs": [[0, 2]] * 3,
        },
        [-1 - 1.25 / 4, -1.25, -1],
    ),
    # the time limit comes in the step in which all leave: the value of what it saw last is 4 + 6
    "all leave at the time limit": (
        {
            "alive": [BOTH] * 3,
            "next_alive": [BOTH, BOTH, NOBODY],
            "over": [N, N, Y],
            "reward": [[1, 1]] * 3,
            "obs": [[0, -6]] * 3,
            "next_obs": [[0, -6], [0, -6], [0, 4]],
        },
        [1 + 2.5 / 4, 2.5, 6],  # 1 + 0 - 0 + A_1/4, 1 + 6/4, 1 + 10/2
    ),
    # they leave as a team, and others play on: what comes after is nobody's
    "all leave and others play on": (
        {
            "alive": [BOTH, BOTH, NOBODY],
            "next_alive": [BOTH, NOBODY, NOBODY],
            "reward": [[1, 1], [1, 1], [JUNK, JUNK]],
            "obs": [[0, -6], [0, -6], [JUNK, JUNK]],
            "next_obs": [[0, -6], [0, 4], [JUNK, JUNK]],
        },
        [1 + 6 / 4, 6, None],
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_a_return_goes_on_until_the_team_ends(case):
    differs, expected = CASES[case]
    batch = one_row(**{**DEATH, **differs})
    data, _ = minibatch_of(ppo_of(), batch)
    known = [t for t, x in enumerate(expected) if x is not None]
    near(data.advantage[known, 0, 1], [x for x in expected if x is not None])
    view = batch.frame["agents"]
    value = [6 + (view.obs[t, 0, 1, 0].item() if view.alive[t, 0, 1] else 0) for t in known]
    near(data.target[known, 0, 1], [expected[t] + v for t, v in zip(known, value, strict=True)])
    assert torch.equal(data.active, view.alive)
    assert data.valued[:, 0].tolist() == [BOTH if t in known else NOBODY for t in range(3)]


def test_a_return_that_ends_with_its_agent_is_as_it_was():
    """A_0 = 1 - 4, and nothing is learnt of it afterwards; so it is with own pay, asked for or not."""
    for spec, asked in ((world(), "own"), (world(common=False), "own"), (world(common=False), "auto")):
        data, metrics = minibatch_of(ppo_of(spec, after_death=asked), one_row(**DEATH, terminated=DIES))
        near(data.advantage[0, 0, 1], -3.0)
        assert data.valued is data.active
        # agent 0: 4; 2 + A/4; 1 + A/4. Agent 1: -3
        near(metrics["value_loss"], (4**2 + 3**2 + 1.75**2 + 3**2) / 2 / 4)


def test_a_time_limit_that_is_an_end_ends_it():
    data, _ = minibatch_of(ppo_of(time_limit=False), one_row(**DEATH, terminated=DIES, over=[N, N, Y]))
    near(data.advantage[:, 0, 1], [-0.375, -1.5, -2])


def test_the_dead_are_in_the_value_loss_and_its_statistics_alone():
    """Advantages of agent 1 are -0.1875, -0.75, 1 and of agent 0 1.75, 3, 4, which are the values' errors; six of them."""
    batch = one_row(**DEATH, terminated=DIES)
    _, metrics = minibatch_of(ppo_of(), batch)
    near(metrics["value_loss"], (0.1875**2 + 0.75**2 + 1 + 1.75**2 + 9 + 16) / 2 / 6)
    a = ppo_of(normalise_value=True, advantage_scope="group")
    data, metrics = minibatch_of(a, batch)
    assert a.value_norm.count == 6
    living = torch.tensor([1.75, 3, 4, -0.1875])
    near(data.advantage[0, 0, 1], float((-0.1875 - living.mean()) / living.std(correction=0)))
    assert (data.advantage[1:, 0, 1] == 0).all()


def test_a_shared_trunk_descends_two_means_of_unequal_numbers(monkeypatch):
    """Values are 0 all over, so that policies' losses, -A, are -(1 + 2/4 + 4/16), -(2 + 4/4), -4 and, of agent 1, as agent 0's
    first; those of values A^2 / 2."""
    means, descend = [], Optimiser.descend
    monkeypatch.setattr(
        Optimiser, "descend", lambda self, loss, n, keep: means.append(loss / n) or descend(self, loss, n, keep)
    )
    batch = one_row(**DEATH, terminated=DIES)
    batch.extras["agents"]["log_prob"].fill_(-math.log(2))
    update(ppo_of(net={"trunk": "shared"}, critic="own"), batch)
    near(means[0], -(1.75 + 3 + 4 + 1.75) / 4 + (1.75**2 + 9 + 16) * 2 / 2 / 6)


def test_slices_of_time_learn_of_the_dead_too():
    a = ppo_of(critic_slices=3, lr_critic=1e-30)
    _, metrics = minibatch_of(a, one_row(**DEATH, terminated=DIES))
    near(metrics["value_loss"], (0.1875**2 + 0.75**2 + 1 + 1.75**2 + 9 + 16) / 2 / 6)


def test_a_team_is_all_its_groups_whoever_plays_them():
    """`mine` dies in step 0 and `theirs`, of the same team, in step 1; `foes` go on. Paid are 1 to mine, then 3 to theirs."""
    spec = world(group("mine", 1), group("theirs", 1), group("foes", 1, team="u"))
    obs = {g.name: torch.zeros(3, 1) for g in spec.groups}
    batch = make_batch(
        obs,
        obs,
        {"mine": [1.0, JUNK, JUNK], "theirs": [1.0, 3, JUNK], "foes": [JUNK] * 3},
        alive={"mine": [Y, N, N], "theirs": [Y, Y, N], "foes": [Y, Y, Y]},
        next_alive={"mine": [N, N, N], "theirs": [Y, N, N], "foes": [Y, Y, Y]},
        terminated={"mine": [Y, N, N], "theirs": [N, Y, N], "foes": [N, N, N]},
    )
    samples = Samples(learner(PPO, spec, groups=("mine",)), batch)
    assert samples.terminated.flatten().tolist() == [N, Y, Y]
    assert samples.cut.flatten().tolist() == [N, Y, Y]
    assert samples.reward.flatten().tolist() == [1, 3, 0]
    assert samples.valued.flatten().tolist() == [Y, Y, N]
    one = learner(DDPG, spec, groups=("mine",), critic="world")  # as are all who have one critic
    assert one.as_one
    target, mask = td_targets(one, batch, torch.full((3, 1, 1), 8.0))
    assert mask.flatten().tolist() == [Y, Y, N]
    assert target.flatten().tolist()[:2] == [1 + 8 / 2, 3]


def test_the_living_keep_what_they_are_paid_and_the_dead_earn_their_mean():
    batch = one_row(**{**DEATH, "reward": [[1, 5], [2, JUNK], [4, JUNK]]}, terminated=DIES)
    batch.frame.views["more"], batch.learner_reward["more"] = make_view(torch.zeros(3, 1, 1, 1)), torch.full((3, 1, 1), 8.0)
    a = learner(PPO, world(group(n=2), group("more", 1)))
    assert Samples(a, batch).reward[:, 0].tolist() == [[1, 5], [2, 5], [4, 6]]


# --- in turn ---


def test_the_last_turn_before_a_death_collects_what_the_team_earns_until_its_end():
    """Agent 1 moves in step 0 and dies in step 1, while agent 0 moves, who moves on until the team ends in step 3. Paid are
    1, 2, 4 and 8 a step: 15 in all, less its value, 4. A rollout that ends before knows nothing of its turn."""
    turns = {
        "alive": [BOTH, BOTH, FIRST, FIRST],
        "next_alive": [BOTH, FIRST, FIRST, NOBODY],
        "active": [SECOND, FIRST, FIRST, FIRST],
        "next_active": [FIRST, FIRST, FIRST, NOBODY],
        "reward": [[1, 1], [2, 2], [4, JUNK], [8, JUNK]],
        "terminated": [NOBODY, SECOND, NOBODY, FIRST],
        "over": [N, N, N, Y],
        "obs": [[0, -2], [0, 0], [0, JUNK], [0, JUNK]],
        "next_obs": [[0, 0], [0, JUNK], [0, JUNK], [JUNK, JUNK]],
    }
    spec, zeros = world(turns=True), torch.zeros(4, 1, 2)
    data, _ = minibatch_of(ppo_of(spec), one_row(**turns))
    assert data.active[:, 0].tolist() == [SECOND, FIRST, FIRST, FIRST]
    near(data.advantage[0, 0, 1], 15.0 - 4)
    target, mask = td_targets(learner(IQL, spec), one_row(**turns), zeros, zeros)
    assert mask[0, 0].tolist() == SECOND
    assert target[0, 0, 1] == 15
    before = one_row(**{k: x[:3] for k, x in turns.items()})
    data, _ = minibatch_of(ppo_of(spec), before)
    assert data.active[:, 0].tolist() == [NOBODY, FIRST, FIRST]
    _, mask = td_targets(learner(IQL, spec), before, zeros[:3], zeros[:3])
    assert mask[:, 0].tolist() == [NOBODY, FIRST, FIRST]
    alone, _ = minibatch_of(ppo_of(spec, after_death="own"), one_row(**turns))
    near(alone.advantage[0, 0, 1], 3.0 - 4)


def test_a_turn_before_the_team_is_cut_off_is_bootstrapped_from_what_was_seen_last():
    """Agent 1 moves in step 0, paid 1, and all leave at the time limit in step 1, paid 2: 1 + 2 + 8/2."""
    turns = {"active": [SECOND, FIRST], "next_active": [FIRST, NOBODY], "over": [N, Y]}
    batch = one_row([[0, 0]] * 2, [[0, 0], [0, 4]], [BOTH] * 2, [BOTH, NOBODY], [[1, 1], [2, 2]], **turns)
    target, mask = td_targets(learner(IQL, world(turns=True)), batch, torch.full((2, 1, 2), 8.0), torch.zeros(2, 1, 2))
    assert mask[:, 0].tolist() == [SECOND, FIRST]
    assert target[0, 0, 1] == 1 + 2 + 8 / 2


# --- values of choices, from a replay ---


@pytest.fixture
def recorded(monkeypatch):
    """What critics' losses are given: values, targets and masks."""
    return record_losses(monkeypatch)


def q_learner(cls=IQL, action=None, **config):
    """Q(o, a) = o[a], and 6 or 100 more for agent 1's choices."""
    width = sum((action or Discrete(2)).sizes)
    a = learner(cls, world(group(action=action, obs=width)), **{"huber": None, "prioritised": True, **config})
    for target in (False, True):
        body = a._q_net("agents", target).net.body
        set_layer(body, torch.eye(width))
        body.ids.data[1] = torch.tensor([6.0, 100, 8, 100][:width])
    return a


# a transition: alive, next alive, who terminated, over -> agent 1's value and its target, or none
TRANSITIONS = {
    "goes on": (BOTH, BOTH, NOBODY, N, 6 - 2, 1 + 107 / 2),  # it sees -2, 0 and then 0, 7
    "dies": (BOTH, FIRST, SECOND, N, 6 - 2, 1 + 6 / 2),
    "is cut off alone": (BOTH, FIRST, NOBODY, N, 6 - 2, 1 + 6 / 2),
    "is dead": (FIRST, FIRST, NOBODY, N, 6, 2 + 6 / 2),
    "is dead as the team ends": (FIRST, NOBODY, FIRST, Y, 6, 2.0),
    "is dead as the team is cut off": (FIRST, FIRST, NOBODY, Y, 6, 2 + 6 / 2),
    "ends with the team": (BOTH, NOBODY, BOTH, Y, 6 - 2, 1.0),
    "is cut off with the team": (BOTH, NOBODY, NOBODY, Y, 6 - 2, 1 + 107 / 2),
    "arrives": (FIRST, BOTH, NOBODY, N, 6, 2 + 107 / 2),
    "is left by the last": (SECOND, SECOND, NOBODY, N, 6 - 2, 1 + 107 / 2),
    "is of a team that is gone": (NOBODY, NOBODY, NOBODY, N, None, None),
}


@pytest.mark.parametrize("case", TRANSITIONS)
def test_of_the_dead_the_one_choice_is_learnt_and_bootstrapped_from(case, recorded):
    """Transitions of one step. The living are paid 2 and 1; the dead have done the second choice, which has 100 more."""
    now, then, ended, over, value, target = TRANSITIONS[case]
    obs = [[0.0, 0], [-2, 0] if now[1] else [JUNK, JUNK]]
    next_obs = [[0.0, 0], [0, 7] if then[1] or case == "is cut off with the team" else [JUNK, JUNK]]
    reward = [2.0 if now[0] else JUNK, 1.0 if now[1] else JUNK]
    batch = one_row([obs], [next_obs], [now], [then], [reward], [ended], over=over, action=0 if now[1] else 1)
    update(q_learner(), batch)
    (seen,) = recorded
    assert seen["mask"][0, 0].tolist() == ([Y, Y] if value is not None else NOBODY)
    if value is not None:
        near(seen["value"][0, 0, 1], value)
        near(seen["target"][0, 0, 1], target)


def test_a_team_whose_last_agent_is_born_again_at_once_goes_on(recorded):
    """1 + 107/2; without a new life, 1."""
    obs, next_obs = [[[JUNK, JUNK], [-2.0, 0]]], [[[JUNK, JUNK], [0, 7]]]
    for again, expected in ((SECOND, 54.5), (NOBODY, 1.0)):
        batch = one_row(obs, next_obs, [SECOND], [again], [[JUNK, 1.0]], [SECOND], next_start=[again])
        update(q_learner(), batch)
        near(recorded[-1]["target"][0, 0, 1], expected)


def test_returns_of_several_steps_go_through_a_death(recorded):
    """n_step 2: agent 1 is paid 1, dies, and its team 2: 1 + 2/2 + 6/4. With own: 1."""
    batch = {**{k: x[:2] for k, x in DEATH.items()}, "terminated": DIES[:2]}
    batch |= {"obs": [[[0, 0], [-2, 0]], [[0, 0], [JUNK, JUNK]]], "next_obs": [[[0, 0], [JUNK, JUNK]]] * 2}
    for asked, expected in (("auto", 3.5), ("own", 1.0)):
        update(q_learner(n_step=2, after_death=asked), one_row(**batch))
        near(recorded[-1]["target"][0, 0, 1], expected)


def test_the_dead_have_the_first_choice_in_each_dimension(recorded):
    obs = [[[0.0] * 4, [JUNK] * 4]]
    batch = one_row(obs, obs, [FIRST], [FIRST], [[2.0, JUNK]], action=torch.ones(1, 1, 2, 2).long())
    update(q_learner(action=MultiDiscrete((2, 2))), batch)
    near(recorded[0]["value"][0, 0, 1], (6 + 8) / 2)
    near(recorded[0]["target"][0, 0, 1], 2 + 7 / 2)


def test_priorities_are_of_the_dead_too(recorded):
    """Errors of 2 - 0 and 2 + 6/2 - 6."""
    obs = [[[0.0, 0], [JUNK, JUNK]]]
    batch = one_row(obs, obs, [FIRST], [FIRST], [[2.0, JUNK]])
    near(update(q_learner(), batch)["priority"], [1.5])


def test_mixers_count_the_dead_as_nothing_as_before(recorded):
    """2 + 8/2: the dead add neither to the value nor to the next one."""
    batch = one_row([[[1.0, 0], [JUNK, JUNK]]], [[[8.0, 0], [JUNK, JUNK]]], [FIRST], [FIRST], [[2.0, JUNK]])
    a = q_learner(VDN)
    assert a.returns_after_death
    assert not a.values_dead
    update(a, batch)
    near(recorded[0]["value"].flatten(), [1.0])
    near(recorded[0]["target"].flatten(), [6.0])


# --- actions of the dead, in critics that take them ---


def actor_critic(cls, action, **config):
    """Own critics that add up what is seen and what is done, and 6 for agent 1: Q = o + sum a. Where a critic gives Q of every
    choice, each is what is seen, and the second 100 more."""
    a = learner(cls, world(group(action=action)), **{"huber": None, "random_steps": 0, **config})
    with torch.no_grad():
        for p in a.actor.parameters():
            p.fill_(0.5)
        for critics in (a.critics, a.target.module):
            for critic in critics:
                set_layer(critic.head.body, 1.0)
                critic.head.body.ids[1] = 6.0
                if a.q_of_choices:
                    critic.head.body.biases[0][1] = 100.0
    return a


@pytest.mark.parametrize("action", [Box((-1.0,), (1.0,)), Discrete(2), MultiDiscrete((2, 3))])
@pytest.mark.parametrize("cls", [DDPG, TD3, SAC])
def test_the_dead_do_nothing_now_and_next(cls, action, recorded):
    """Zeros where critics are given actions, now and next; else the first choice; no entropy is theirs."""
    taken = torch.ones(1, 1, 2, *action.shape)
    taken = taken if isinstance(action, Box) else taken.long()
    batch = one_row([[0.0, JUNK]], [[0.0, JUNK]], [FIRST], [FIRST], [[2.0, JUNK]])
    batch.actions["agents"] = taken
    update(actor_critic(cls, action, **({"delay": 1} if cls is TD3 else {})), batch)
    near(recorded[0]["value"][0, 0, 0, 1], 6.0)
    near(recorded[0]["target"].reshape(-1)[1], 2 + 6 / 2)


def test_comas_returns_go_on(recorded):
    """Agent 1 dies in step 0 of two, paid 1 and 2; dead, Q of its one choice is 6: G_1 = 2 + 6/2, G_0 = 1 + (3 + 5/2) / 2."""
    spec = world(group(obs=2))
    config = {"rollout": 2, "lam": 0.5, "epsilon": 0.0, "epsilon_last": 0.0, "normalise_value": False, "dueling": False}
    a = learner(COMA, spec, **config)
    for critics in (a.critics, a.target.module):
        body = critics["agents"].net.body
        set_layer(body, torch.nn.functional.pad(torch.eye(2), (4, body.width_in - 6)))  # after both observations: its own
        body.ids.data[1] = torch.tensor([6.0, 100])
    batch = {k: x[:2] for k, x in DEATH.items()}
    batch |= {"obs": [[[0, 0], [-2, 0]], [[0, 0], [JUNK, JUNK]]], "next_obs": [[[0, 0], [JUNK, JUNK]]] * 2}
    batch = one_row(**batch, terminated=DIES[:2])
    batch.actions["agents"][1, 0, 1] = 1
    update(a, batch)
    near(recorded[0]["value"][:, 0, 1], [4.0, 6])
    near(recorded[0]["target"][:, 0, 1], [3.75, 5])
    assert recorded[0]["mask"].all()


# --- memory, and whole worlds ---


def loop_of(name, world="probe_deaths", rows=4, net=None, run=None, **sections):
    return make_loop(name, world, rows, {"reward": "team-mean", **(run or {})}, net={"hidden": (8,), **(net or {})}, **sections)


@pytest.mark.parametrize("name", ["ippo", "mappo", "coma", "iql", "iddpg"])
def test_values_of_the_dead_are_the_same_when_learnt_and_when_bootstrapped_from(name, monkeypatch):
    """With memory. What a step is bootstrapped from is what the next step learns: of the living too, where next actions are the
    ones taken; targets are copies of their nets as yet."""
    replays = name in ("iql", "iddpg")
    config = {**REPLAY, "chunk": 8, "burn_in": 0} if replays else {"rollout": 8, "normalise_value": False}
    config |= {"critic_slices": 0} if name == "coma" else {}
    loop = loop_of(name, net=GRU, algo=config)
    (a,) = loop.learners
    loop.collector.collect(4)
    batch = collect(loop, 8)
    view, now, then = batch.frame["agents"], [], []
    room, returns = (offpolicy, "n_step") if replays else (coma, "td_lambda") if name == "coma" else (onpolicy, "gae")
    compute, error = getattr(room, returns), losses.value_error

    def computing(reward, *values_and_ends, **more):
        then.append(values_and_ends[int(returns == "gae")])
        now.extend(values_and_ends[:1] if returns == "gae" else ())
        return compute(reward, *values_and_ends, **more)

    def value_error(value, target, huber=None):
        now.append(value.detach())
        return error(value, target, huber)

    monkeypatch.setattr(room, returns, computing)
    monkeypatch.setattr(losses, "value_error", value_error)
    update(a, batch)
    learnt, bootstrapped = now[0].reshape(8, 4, 3)[1:], then[0][:-1]
    same = ~batch.over[:-1, :, None] & (~view.alive[1:] if replays else torch.ones_like(view.alive[1:]))
    assert (same & ~view.alive[1:] & view.alive[:-1]).any()  # somebody died
    assert learnt[same].unique().numel() > 10
    torch.testing.assert_close(learnt[same], bootstrapped[same], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "algo", "net"),
    [
        ("ippo", {"normalise_reward": True, "critic_slices": 3}, GRU),
        ("ippo", {}, {"trunk": "shared"}),
        ("mappo", {"critic_input": "agent"}, {"trunk": "shared"}),
        ("mappo", {"critic_input": "agent"}, {}),
        ("mappo", {}, {"attention": "critic"}),
        ("iql", {**REPLAY, "chunk": 4, "n_step": 2, "dueling": True}, GRU),
        ("isac", {**REPLAY, "n_step": 2}, {}),
        ("masac", {**REPLAY, "critic_input": "agent"}, {}),
        ("maddpg", {**REPLAY, "critic_input": "agent", "others": "policy"}, GRU),
    ],
)
def test_what_the_dead_see_do_and_are_paid_changes_nothing(name, algo, net):
    """Nor does what shaping pays to them; with `ghost` it is 10 a step."""
    loop, twin = (loop_of(name, algo=algo, net=net) for _ in range(2))
    a, b = loop.learners[0], twin.learners[0]
    assert a.returns_after_death
    loop.collector.collect(5)
    batch = collect(loop, getattr(a.feed, "length", a.feed.steps))
    gone, later = ~batch.frame["agents"].alive, ~batch.next["agents"].alive
    assert gone.any()
    spoilt = spoil(batch, gone, gone)
    spoilt.next["agents"].obs[later] = 1e3
    for x, given in ((a, batch), (b, spoilt)):
        x.update_statistics(given)
        update(x, given)
    assert same_state(a, b)
    assert any((x != 0).any() for k, x in a.state_dict().items() if k.endswith("optimiser.first"))


# --- the leaving world ---


def team_earns(name, seed, own, common=False, iterations=40):
    """What the team earns when its policies, trained so long, play greedily."""
    known = {f.name for f in dataclasses.fields(catalog("algos")[name].load().Config)}
    wanted = {"rollout": 12, "epochs": 4, "minibatches": 2, "lr": 5e-3, "gamma": 0.9, "entropy": 0.005, "epsilon_steps": 8_000}
    wanted |= {"noise": 0.5, "noise_steps": 8_000, "random_steps": 500, "target_every": 50}
    if "every" in known and name != "coma":
        wanted |= {"every": 16, "batch": 128, "capacity": 20_000, "learning_starts": 500, "lr": 3e-3}
        wanted |= {"target_every": 1, "target_tau": 0.05} if "critics" in known else {}
    wanted |= {"critic_slices": 12, "target_every": 12} if name == "coma" else {}
    run = {"seed": seed, "steps": iterations * 12 * 32, "reward": "own" if own or common else "team-mean"}
    asked = {k: x for k, x in wanted.items() if k in known}
    loop = loop_of(name, "probe_leave", 32, {"hidden": (32,)}, run, algo=asked, env={"common": common})
    for _ in range(iterations):
        loop.iterate()
    seen = evaluate(make("probe_leave", 8, common=common), loop.players, 1, seed=7)
    (earned,) = set(seen.stats["team"].flatten().tolist())
    return earned


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize("name", ["mappo", "ippo", "a2c", "coma", "iql", "vdn", "qmix", "maddpg", "iddpg", "isac"])
def test_all_leave_for_their_team(name, seed):
    assert team_earns(name, seed, own=False) == 8
    assert team_earns(name, seed, own=False, common=True) == 8


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize("name", ["mappo", "ippo", "iql", "iddpg"])
def test_all_stay_for_themselves(name, seed):
    assert team_earns(name, seed, own=True) == 1
