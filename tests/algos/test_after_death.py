"""after_death: an agent's return ends with it, or goes on until its team's episode ends; the numbers worked out on paper.

gamma = lambda = 1/2 everywhere. Nets are one layer, set by hand: V(o) = o, or Q(o, a) = o[a]. Agent 1 has 6 more by its id, so
that its value is 6 where it sees zeros, as the dead do. What the world shows, pays and has done by the dead is JUNK.
"""

import dataclasses

import pytest
import torch

from shoal.algos import coma, onpolicy, recall
from shoal.algos.coma import COMA
from shoal.algos.ddpg import DDPG
from shoal.algos.iql import IQL
from shoal.algos.optimiser import Optimiser
from shoal.algos.ppo import PPO
from shoal.algos.qmix import QMIX
from shoal.algos.sac import SAC
from shoal.algos.td3 import TD3
from shoal.algos.vdn import VDN
from shoal.api import make
from shoal.ids import catalog
from shoal.nets.layers import NetConfig
from shoal.ops import losses
from shoal.spec import Batch, Box, Discrete, EnvSpec, Frame, Group, MultiDiscrete, Result, UserError, View
from shoal.training.evaluate import evaluate
from shoal.training.loop import Loop
from shoal.training.settings import Settings, resolve

JUNK = 4096.0
Y, N = True, False
BOTH, FIRST, SECOND, NOBODY = [Y, Y], [Y, N], [N, Y], [N, N]
PLAIN = {"gamma": 0.5, "normalise_obs": False}
ON_POLICY = {
    **{"rollout": 3, "lam": 0.5, "lr": 0.25, "entropy": 0.0, "epochs": 1, "minibatches": 1, "value_clip": None},
    **{"grad_clip": None, "advantage_scope": "none", "normalise_value": False},
}


def group(name="agents", n=2, action=None, team="t", obs=1, mortal=True):
    return Group(name, team, tuple(f"{name}_{i}" for i in range(n)), (obs,), action or Discrete(2), mortal=mortal)


def world(*groups, common=True, **more):
    return EnvSpec(groups or (group(),), common=common, **more)


def made(cls, spec, net=None, groups=("agents",), **config):
    config = {**PLAIN, **(ON_POLICY if cls is PPO else {}), **config}
    a = cls(spec, groups, cls.Config(**config), NetConfig(**{"hidden": (), **(net or {})}), torch.Generator().manual_seed(0))
    a.peers = dict.fromkeys(groups, a)
    return a


def each(x, shape, dtype):
    """[T] of one for all agents, or [T, N] -> [T, 1, N]."""
    x = torch.as_tensor(x, dtype=dtype)
    x = x[:, None, None] if x.dim() == 1 else x[:, None]
    return x.expand(shape).clone()


def lived(
    alive,
    alive_tp1,
    learner_reward,
    ended=None,
    over=N,
    seen=None,
    seen_tp1=None,
    start_tp1=N,
    active=None,
    acts_tp1=None,
    action=0,
):
    """Steps [T, 1, N] of one row in which agents are alive now and then, and are paid; each sees a row of numbers."""
    steps = len(alive)
    shape = (steps, 1, 2)
    alive, alive_tp1 = each(alive, shape, torch.bool), each(alive_tp1, shape, torch.bool)
    ended = each([NOBODY] * steps if ended is None else ended, shape, torch.bool)
    obs, obs_tp1 = (torch.tensor(x, dtype=torch.float).reshape(steps, 1, 2, -1) for x in (seen, seen_tp1))
    begins = each([NOBODY] * steps if start_tp1 is N else start_tp1, shape, torch.bool)
    active = alive if active is None else each(active, shape, torch.bool)
    then = alive_tp1 if acts_tp1 is None else each(acts_tp1, shape, torch.bool)
    reward = each(learner_reward, shape, torch.float)
    return Batch(
        Frame({"agents": View(obs, alive, active, torch.zeros_like(alive))}),
        Frame({"agents": View(obs_tp1, alive_tp1, then, begins)}),
        {"agents": each([[action] * 2] * steps, shape, torch.long)},
        {"agents": Result(torch.full_like(reward, JUNK), ended)},
        torch.tensor([over] * steps if isinstance(over, bool) else over)[:, None],
        {"agents": {"log_prob": torch.zeros(shape)}},
        {"agents": {}},
        {"agents": reward},
        torch.full((4096,), 0.5),
    )


def near(x, y, tol=2e-5):
    torch.testing.assert_close(x.detach().double(), torch.tensor(y, dtype=torch.float64), rtol=tol, atol=tol)


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
        assert made(cls, spec, after_death=asked).returns_after_death == goes_on
    assert made(PPO, spec, after_death=asked).observations.blank == goes_on


def test_what_is_refused():
    for cls in (PPO, IQL, DDPG, SAC):
        with pytest.raises(UserError, match=r"--algo.after-death team is for agents that are paid alike: ask for --reward"):
            made(cls, world(common=False), after_death="team")
    for cls in (VDN, QMIX):
        with pytest.raises(UserError, match=f"{cls.__name__} has one value for a team, which ends with it"):
            made(cls, world(), after_death="own")
    assert made(DDPG, world(), critic="world").as_one
    assert not made(DDPG, world(), critic="world", after_death="own").as_one  # each has a value of its own, to end with it


# --- on-policy: advantages, masks, what the dead see and earn ---


def valuing(spec=None, net=None, **config):
    a = made(PPO, spec or world(), net, **config)
    with torch.no_grad():
        for m in a.nets.values():
            for p in m.net.parameters():
                p.zero_()
        if a.critic is not None:
            a.critic.net.body.weights[0].fill_(1.0)
            a.critic.net.body.ids[1] = 6.0
    return a


def advantages(a, batch):
    told, loss = [], a.policy_loss
    a.policy_loss = lambda log_prob, entropy, data: told.append(data) or loss(log_prob, entropy, data)
    metrics = a.update(batch)
    return told[0], metrics


# agent 1 sees -2, worth 4, is paid 1 and dies in step 0; agent 0 is paid 2 and 4 after that. Dead it is worth 6:
# delta = 1 + 6/2 - 4, 2 + 6/2 - 6, and in step 2, where the rollout ends, 4 + 6/2 - 6; or 4 - 6 where the team ends too
DEATH = {
    "alive": [BOTH, FIRST, FIRST],
    "alive_tp1": [FIRST, FIRST, FIRST],
    "learner_reward": [[1, 1], [2, JUNK], [4, JUNK]],
    "seen": [[0, -2], [0, JUNK], [0, JUNK]],
    "seen_tp1": [[0, JUNK]] * 3,
}
DIES, NEVER = [SECOND, NOBODY, NOBODY], [NOBODY] * 3
CASES = {  # what differs, and agent 1's advantages: A_2, A_1 = -1 + A_2/4, A_0 = 0 + A_1/4
    "the rollout ends between": ({"ended": DIES}, [-0.1875, -0.75, 1]),
    "it is cut off alone": ({"ended": NEVER}, [-0.1875, -0.75, 1]),
    "the team is cut off": ({"ended": DIES, "over": [N, N, Y]}, [-0.1875, -0.75, 1]),
    "the team ends": (
        {"ended": [SECOND, NOBODY, FIRST], "alive_tp1": [FIRST, FIRST, NOBODY], "over": [N, N, Y]},
        [-0.375, -1.5, -2],
    ),
    # it is born again before step 2 and sees 2, worth 8: 2 + 8/2 - 6 = 0; then it is paid its own, 3 + 8/2 - 8 = -1
    "it is born again": (
        {
            "ended": DIES,
            "alive": [BOTH, FIRST, BOTH],
            "alive_tp1": [FIRST, BOTH, BOTH],
            "start_tp1": [NOBODY, SECOND, NOBODY],
            "learner_reward": [[1, 1], [2, JUNK], [4, 3]],
            "seen": [[0, -2], [0, JUNK], [0, 2]],
            "seen_tp1": [[0, JUNK], [0, 2], [0, 2]],
        },
        [-0.0625, -0.25, -1],
    ),
    # at once: it dies in step 0 and sees 2 in step 1: 1 + 8/2 - 4, 3 + 8/2 - 8, 3 + 8/2 - 8
    "it is born again at once": (
        {
            "ended": DIES,
            "alive": [BOTH] * 3,
            "alive_tp1": [BOTH] * 3,
            "start_tp1": [SECOND, NOBODY, NOBODY],
            "learner_reward": [[1, 1], [2, 3], [4, 3]],
            "seen": [[0, -2], [0, 2], [0, 2]],
            "seen_tp1": [[0, 2]] * 3,
        },
        [1 - 1.25 / 4, -1.25, -1],
    ),
    # not there in step 0, where the other is paid 1, it sees 2 in step 1: 1 + 8/2 - 6 = -1, 3 + 8/2 - 8, 3 + 8/2 - 8
    "it comes late": (
        {
            "alive": [FIRST, BOTH, BOTH],
            "alive_tp1": [BOTH] * 3,
            "start_tp1": [SECOND, NOBODY, NOBODY],
            "learner_reward": [[1, JUNK], [2, 3], [4, 3]],
            "seen": [[0, JUNK], [0, 2], [0, 2]],
            "seen_tp1": [[0, 2]] * 3,
        },
        [-1 - 1.25 / 4, -1.25, -1],
    ),
    # the time limit comes in the step in which all leave: what it saw last is worth 4 + 6
    "all leave at the time limit": (
        {
            "alive": [BOTH] * 3,
            "alive_tp1": [BOTH, BOTH, NOBODY],
            "over": [N, N, Y],
            "learner_reward": [[1, 1]] * 3,
            "seen": [[0, -6]] * 3,
            "seen_tp1": [[0, -6], [0, -6], [0, 4]],
        },
        [1 + 2.5 / 4, 2.5, 6],  # 1 + 0 - 0 + A_1/4, 1 + 6/4, 1 + 10/2
    ),
    # they leave as a team, and others play on: what comes after is nobody's
    "all leave and others play on": (
        {
            "alive": [BOTH, BOTH, NOBODY],
            "alive_tp1": [BOTH, NOBODY, NOBODY],
            "learner_reward": [[1, 1], [1, 1], [JUNK, JUNK]],
            "seen": [[0, -6], [0, -6], [JUNK, JUNK]],
            "seen_tp1": [[0, -6], [0, 4], [JUNK, JUNK]],
        },
        [1 + 6 / 4, 6, None],
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_a_return_goes_on_until_the_team_ends(case):
    differs, expected = CASES[case]
    batch = lived(**{**DEATH, **differs})
    data, _ = advantages(valuing(), batch)
    known = [t for t, x in enumerate(expected) if x is not None]
    near(data["advantage"][known, 0, 1], [x for x in expected if x is not None])
    worth = [6 + (batch.frame["agents"].obs[t, 0, 1, 0].item() if batch.frame["agents"].alive[t, 0, 1] else 0) for t in known]
    near(data["target"][known, 0, 1], [expected[t] + v for t, v in zip(known, worth, strict=True)])
    assert torch.equal(data["mask"], batch.frame["agents"].alive)
    assert data["valued"][:, 0].tolist() == [BOTH if t in known else NOBODY for t in range(3)]


def test_a_return_that_ends_with_its_agent_is_as_it_was():
    """A_0 = 1 - 4, and nothing is learnt of it afterwards; so it is with own pay, asked for or not."""
    for spec, asked in ((world(), "own"), (world(common=False), "own"), (world(common=False), "auto")):
        data, metrics = advantages(valuing(spec, after_death=asked), lived(**DEATH, ended=DIES))
        near(data["advantage"][0, 0, 1], -3.0)
        assert "valued" not in data
        # agent 0: 4; 2 + A/4; 1 + A/4. Agent 1: -3
        near(metrics["value_loss"], (4**2 + 3**2 + 1.75**2 + 3**2) / 2 / 4)


def test_a_time_limit_that_is_an_end_ends_it():
    data, _ = advantages(valuing(time_limit=False), lived(**DEATH, ended=DIES, over=[N, N, Y]))
    near(data["advantage"][:, 0, 1], [-0.375, -1.5, -2])


def test_the_dead_are_in_the_value_loss_and_its_statistics_alone():
    """Advantages of agent 1 are -0.1875, -0.75, 1 and of agent 0 1.75, 3, 4, which are the values' errors; six of them."""
    batch = lived(**DEATH, ended=DIES)
    _, metrics = advantages(valuing(), batch)
    near(metrics["value_loss"], (0.1875**2 + 0.75**2 + 1 + 1.75**2 + 9 + 16) / 2 / 6)
    a = valuing(normalise_value=True, advantage_scope="group")
    data, metrics = advantages(a, batch)
    assert a.value_norm.count == 6
    living = torch.tensor([1.75, 3, 4, -0.1875])
    near(data["advantage"][0, 0, 1], float((-0.1875 - living.mean()) / living.std(correction=0)))
    assert (data["advantage"][1:, 0, 1] == 0).all()


def test_a_shared_trunk_descends_two_means_of_unequal_numbers(monkeypatch):
    """Values are 0 all over, so that policies' losses, -A, are -(1 + 2/4 + 4/16), -(2 + 4/4), -4 and, of agent 1, as agent 0's
    first; those of values A^2 / 2."""
    gone, total = [], Optimiser.descend
    monkeypatch.setattr(Optimiser, "descend", lambda self, loss, n, keep: gone.append(loss / n) or total(self, loss, n, keep))
    a = valuing(net={"trunk": "shared"}, critic="own")
    a.actor.net.body.weights[0].data.zero_()
    batch = lived(**DEATH, ended=DIES)
    batch.extras["agents"]["log_prob"].fill_(-torch.log(torch.tensor(2.0)))
    a.update(batch)
    near(gone[0], -(1.75 + 3 + 4 + 1.75) / 4 + (1.75**2 + 9 + 16) * 2 / 2 / 6)


def test_slices_of_time_learn_of_the_dead_too():
    a = valuing(critic_slices=3, lr_critic=1e-30)
    _, metrics = advantages(a, lived(**DEATH, ended=DIES))
    near(metrics["value_loss"], (0.1875**2 + 0.75**2 + 1 + 1.75**2 + 9 + 16) / 2 / 6)


def test_a_team_is_all_its_groups_whoever_plays_them():
    """`mine` dies in step 0 and `theirs`, of the same team, in step 1; `foes` go on. Paid are 1 to mine, then 3 to theirs."""
    spec = world(group("mine", 1), group("theirs", 1), group("foes", 1, team="u"))
    a = made(PPO, spec, groups=("mine",))
    alive = {"mine": [Y, N, N], "theirs": [Y, Y, N], "foes": [Y, Y, Y]}
    ended = {"mine": [Y, N, N], "theirs": [N, Y, N], "foes": [N, N, N]}

    def flags(x):
        return torch.tensor(x)[:, None, None]

    def frame(shift):
        there = {g: flags([*x, x[-1]][shift:][:3]) for g, x in alive.items()}
        return Frame({g: View(torch.zeros(3, 1, 1, 1), x, x, torch.zeros_like(x)) for g, x in there.items()})

    learner_reward = {"mine": [1.0, JUNK, JUNK], "theirs": [1.0, 3, JUNK], "foes": [JUNK] * 3}
    results = {g: Result(torch.zeros(3, 1, 1), flags(x)) for g, x in ended.items()}
    over = torch.zeros(3, 1, dtype=torch.bool)
    batch = Batch(frame(0), frame(1), {}, results, over, {}, {}, {g: flags(x) for g, x in learner_reward.items()})
    terminated, cut = a.ends(batch)
    assert terminated.flatten().tolist() == [N, Y, Y]
    assert cut.flatten().tolist() == [N, Y, Y]
    assert a.earned(batch).flatten().tolist() == [1, 3, 0]
    assert a.valued(batch).flatten().tolist() == [Y, Y, N]
    one = made(DDPG, spec, groups=("mine",), critic="world")  # as are all who have one critic
    assert one.as_one
    target, mask = recall.targets(one, batch, one.earned(batch), torch.full((3, 1, 1), 8.0), None)
    assert mask.flatten().tolist() == [Y, Y, N]
    assert target.flatten().tolist()[:2] == [1 + 8 / 2, 3]


def test_the_living_keep_what_they_are_paid_and_the_dead_earn_their_mean():
    spec = world(group(n=2), group("more", 1))
    batch = lived(**{**DEATH, "learner_reward": [[1, 5], [2, JUNK], [4, JUNK]]}, ended=DIES)
    view = View(torch.zeros(3, 1, 1, 1), *[torch.ones(3, 1, 1, dtype=torch.bool)] * 3)
    batch.frame.views["more"] = batch.next.views["more"] = view
    batch.results["more"], batch.learner_reward["more"] = (
        Result(torch.zeros(3, 1, 1), torch.zeros(3, 1, 1).bool()),
        torch.full((3, 1, 1), 8.0),
    )
    assert made(PPO, spec).earned(batch)[:, 0].tolist() == [[1, 5], [2, 5], [4, 6]]


# --- in turn ---


def test_the_last_turn_before_a_death_collects_what_the_team_earns_until_its_end():
    """Agent 1 moves in step 0 and dies in step 1, while agent 0 moves, who moves on until the team ends in step 3. Paid are
    1, 2, 4 and 8 a step: 15 in all, less its value, 4. A rollout that ends before knows nothing of its turn."""
    turns = {
        "alive": [BOTH, BOTH, FIRST, FIRST],
        "alive_tp1": [BOTH, FIRST, FIRST, NOBODY],
        "active": [SECOND, FIRST, FIRST, FIRST],
        "acts_tp1": [FIRST, FIRST, FIRST, NOBODY],
        "learner_reward": [[1, 1], [2, 2], [4, JUNK], [8, JUNK]],
        "ended": [NOBODY, SECOND, NOBODY, FIRST],
        "over": [N, N, N, Y],
        "seen": [[0, -2], [0, 0], [0, JUNK], [0, JUNK]],
        "seen_tp1": [[0, 0], [0, JUNK], [0, JUNK], [JUNK, JUNK]],
    }
    spec = world(turns=True)
    data, _ = advantages(valuing(spec), lived(**turns))
    assert data["mask"][:, 0].tolist() == [SECOND, FIRST, FIRST, FIRST]
    near(data["advantage"][0, 0, 1], 15.0 - 4)
    reward = torch.tensor([1.0, 2, 4, 8])[:, None, None].expand(4, 1, 2)
    value = torch.zeros(4, 1, 2)
    target, mask = recall.targets(made(IQL, spec), lived(**turns), reward, value, value)
    assert mask[0, 0].tolist() == SECOND
    assert target[0, 0, 1] == 15
    between = {k: x[:3] for k, x in turns.items()}
    data, _ = advantages(valuing(spec), lived(**between))
    assert data["mask"][:, 0].tolist() == [NOBODY, FIRST, FIRST]
    _, mask = recall.targets(made(IQL, spec), lived(**between), reward[:3], value[:3], value[:3])
    assert mask[:, 0].tolist() == [NOBODY, FIRST, FIRST]
    alone, _ = advantages(valuing(spec, after_death="own"), lived(**turns))
    near(alone["advantage"][0, 0, 1], 3.0 - 4)


# --- values of choices, from a replay ---


@pytest.fixture
def told(monkeypatch):
    """What critics were given: values, targets and masks."""
    seen, error, total = [], losses.value_error, losses.masked_sum

    def value_error(value, target, huber=None):
        seen.append({"value": value.detach(), "target": target})
        return error(value, target, huber)

    def masked_sum(x, mask):
        seen[-1].setdefault("mask", mask)
        return total(x, mask)

    monkeypatch.setattr(losses, "value_error", value_error)
    monkeypatch.setattr(losses, "masked_sum", masked_sum)
    return seen


def choosing(cls=IQL, action=None, **config):
    """Q(o, a) = o[a], and 6 or 100 more for agent 1's choices."""
    action = action or Discrete(2)
    width = sum(action.sizes)
    a = made(cls, world(group(action=action, obs=width)), **{"huber": None, "prioritised": True, **config})
    with torch.no_grad():
        for target in (False, True):
            body = a._net("agents", target).net.body
            for p in body.parameters():
                p.zero_()
            body.weights[0].copy_(torch.eye(width))
            body.ids[1] = torch.tensor([6.0, 100, 8, 100][:width])
    return a


# a transition: now, then, who terminated, over -> what agent 1 learns: its value and what towards, or none
MOMENTS = {
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


@pytest.mark.parametrize("case", MOMENTS)
def test_of_the_dead_the_one_choice_is_learnt_and_bootstrapped_from(case, told):
    """Transitions of one step. The living are paid 2 and 1; the dead have done the second choice, worth 100 more."""
    now, then, ended, over, value, goal = MOMENTS[case]
    shown = [[0.0, 0], [-2, 0] if now[1] else [JUNK, JUNK]]
    after = [[0.0, 0], [0, 7] if then[1] or case == "is cut off with the team" else [JUNK, JUNK]]
    learner_reward = [2.0 if now[0] else JUNK, 1.0 if now[1] else JUNK]
    batch = lived([now], [then], [learner_reward], [ended], over, [shown], [after], action=0 if now[1] else 1)
    choosing().update(batch)
    (seen,) = told
    assert seen["mask"][0, 0].tolist() == ([Y, Y] if value is not None else NOBODY)
    if value is not None:
        near(seen["value"][0, 0, 1], value)
        near(seen["target"][0, 0, 1], goal)


def test_a_team_whose_last_agent_is_born_again_at_once_goes_on(told):
    """1 + 107/2; without a new life, 1."""
    for again, expected in ((SECOND, 54.5), (NOBODY, 1.0)):
        seen = {"seen": [[[JUNK, JUNK], [-2.0, 0]]], "seen_tp1": [[[JUNK, JUNK], [0, 7]]]}
        choosing().update(lived([SECOND], [again], [[JUNK, 1.0]], [SECOND], start_tp1=[again], **seen))
        near(told[-1]["target"][0, 0, 1], expected)


def test_returns_of_several_steps_go_through_a_death(told):
    """n_step 2: agent 1 is paid 1, dies, and its team 2: 1 + 2/2 + 6/4. With own: 1."""
    batch = {**{k: x[:2] for k, x in DEATH.items()}, "ended": DIES[:2]}
    batch |= {"seen": [[[0, 0], [-2, 0]], [[0, 0], [JUNK, JUNK]]], "seen_tp1": [[[0, 0], [JUNK, JUNK]]] * 2}
    for asked, expected in (("auto", 3.5), ("own", 1.0)):
        choosing(n_step=2, after_death=asked).update(lived(**batch))
        near(told[-1]["target"][0, 0, 1], expected)


def test_the_dead_have_the_first_choice_in_each_dimension(told):
    batch = lived([FIRST], [FIRST], [[2.0, JUNK]], seen=[[[0.0] * 4, [JUNK] * 4]], seen_tp1=[[[0.0] * 4, [JUNK] * 4]])
    batch.actions = {"agents": torch.ones(1, 1, 2, 2, dtype=torch.long)}
    choosing(action=MultiDiscrete((2, 2))).update(batch)
    near(told[0]["value"][0, 0, 1], (6 + 8) / 2)
    near(told[0]["target"][0, 0, 1], 2 + 7 / 2)


def test_priorities_are_of_the_dead_too(told):
    """Errors of 2 - 0 and 2 + 6/2 - 6."""
    batch = lived([FIRST], [FIRST], [[2.0, JUNK]], seen=[[[0.0, 0], [JUNK, JUNK]]], seen_tp1=[[[0.0, 0], [JUNK, JUNK]]])
    near(choosing().update(batch)["priority"], [1.5])


def test_mixers_count_the_dead_as_nothing_as_before(told):
    """2 + 8/2: the dead add neither to the value nor to the next one."""
    batch = lived([FIRST], [FIRST], [[2.0, JUNK]], seen=[[[1.0, 0], [JUNK, JUNK]]], seen_tp1=[[[8.0, 0], [JUNK, JUNK]]])
    a = choosing(VDN)
    assert a.returns_after_death
    assert not a.values_dead
    a.update(batch)
    near(told[0]["value"].flatten(), [1.0])
    near(told[0]["target"].flatten(), [6.0])


# --- actions of the dead, in critics that take them ---


def judging(cls, action, **config):
    """Own critics that add up what is seen and what is done, and 6 for agent 1: Q = o + sum a. Listed choices are worth what is
    seen, and the second 100 more."""
    a = made(cls, world(group(action=action)), **{"huber": None, "random_steps": 0, **config})
    with torch.no_grad():
        for p in a.actor.parameters():
            p.fill_(0.5)
        for nets in (a.critics, a.target.module):
            for judge in nets:
                for p in judge.parameters():
                    p.zero_()
                judge.head.body.weights[0].fill_(1.0)
                judge.head.body.ids[1] = 6.0
                if a.lists:
                    judge.head.body.biases[0][1] = 100.0
    return a


@pytest.mark.parametrize("action", [Box((-1.0,), (1.0,)), Discrete(2), MultiDiscrete((2, 3))])
@pytest.mark.parametrize("cls", [DDPG, TD3, SAC])
def test_the_dead_do_nothing_now_and_next(cls, action, told):
    """Zeros where actions are told, now and next; of listed choices the first; no entropy is theirs."""
    batch = lived([FIRST], [FIRST], [[2.0, JUNK]], seen=[[0.0, JUNK]], seen_tp1=[[0.0, JUNK]])
    done = torch.ones(1, 1, 2, *action.shape)
    batch.actions = {"agents": done if isinstance(action, Box) else done.long()}
    judging(cls, action, **({"delay": 1} if cls is TD3 else {})).update(batch)
    near(told[0]["value"][0, 0, 0, 1], 6.0)
    near(told[0]["target"].reshape(-1)[1], 2 + 6 / 2)


def test_comas_returns_go_on(told):
    """Agent 1 dies in step 0 of two, paid 1 and 2; dead, its one choice is worth 6: G_1 = 2 + 6/2, G_0 = 1 + (3 + 5/2) / 2."""
    spec = world(group(obs=2))
    config = {"rollout": 2, "lam": 0.5, "epsilon": 0.0, "epsilon_last": 0.0, "normalise_value": False, "dueling": False}
    a = made(COMA, spec, **config)
    with torch.no_grad():
        for critics in (a.critics, a.target.module):
            body = critics["agents"].net.body
            for p in body.parameters():
                p.zero_()
            body.weights[0][:, 4:6] = torch.eye(2)  # beside both observations: its own
            body.ids[1] = torch.tensor([6.0, 100])
    batch = {k: x[:2] for k, x in DEATH.items()}
    batch |= {"seen": [[[0, 0], [-2, 0]], [[0, 0], [JUNK, JUNK]]], "seen_tp1": [[[0, 0], [JUNK, JUNK]]] * 2}
    batch = lived(**batch, ended=DIES[:2])
    batch.actions["agents"][1, 0, 1] = 1
    batch.memory, batch.noise = {"agents": {"last": torch.zeros(1, 2, 2)}}, torch.full((8,), 0.5)
    a.update(batch)
    near(told[0]["value"][:, 0, 1], [4.0, 6])
    near(told[0]["target"][:, 0, 1], [3.75, 5])
    assert told[0]["mask"].all()


# --- memory, and whole worlds ---

GRU = {"memory": "gru", "memory_width": 8, "hidden": (8,)}
REPLAY = {"capacity": 2000, "learning_starts": 8, "batch": 8, "every": 32, "rollout": 8}


def loop_of(name, world="probe_deaths", rows=4, algo=None, net=None, run=None, env=None):
    run = {"envs": rows, "quiet": True, "steps": 10_000, "reward": "team-mean", **(run or {})}
    sections = {"algo": algo or {}, "net": {"hidden": (8,), **(net or {})}, "env": env or {}}
    return Loop(resolve(Settings(name, world, run, sections)))


def batch_of(loop, steps):
    batch = loop.collector.collect(steps)
    loop.shaping(batch)
    batch.noise = torch.rand(loop.learners[0].draws(*batch.over.shape), generator=torch.Generator().manual_seed(5))
    return batch


@pytest.mark.parametrize("name", ["ippo", "mappo", "coma", "iql", "iddpg"])
def test_values_of_the_dead_are_the_same_when_learnt_and_when_bootstrapped_from(name, monkeypatch):
    """With memory. What a step is bootstrapped from is what the next step learns: of the living too, where next actions are the
    ones taken; copies are what they are copies of as yet."""
    replays = name in ("iql", "iddpg")
    config = {**REPLAY, "chunk": 8, "burn_in": 0} if replays else {"rollout": 8, "normalise_value": False}
    loop = loop_of(name, net=GRU, algo=config)
    (a,) = loop.learners
    loop.collector.collect(4)
    batch = batch_of(loop, 8)
    view, now, then = batch.frame["agents"], [], []
    room, returns = (recall, "n_step") if replays else (coma, "td_lambda") if name == "coma" else (onpolicy, "gae")
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
    a.update(batch)
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
    batch = batch_of(loop, getattr(a.feed, "length", a.feed.steps))
    gone, later = ~batch.frame["agents"].alive, ~batch.next["agents"].alive
    assert gone.any()
    spoilt = dataclasses.replace(batch, actions=dict(batch.actions), learner_reward=dict(batch.learner_reward))
    spoilt.actions["agents"] = torch.where(gone, 1 - batch.actions["agents"], batch.actions["agents"])
    spoilt.learner_reward["agents"] = torch.where(gone, 1e3, batch.learner_reward["agents"])
    blank = {k: dataclasses.replace(f["agents"]) for k, f in (("frame", batch.frame), ("next", batch.next))}
    for k, mask in (("frame", gone), ("next", later)):
        blank[k].obs = torch.where(mask[..., None], 1e3, blank[k].obs)
        setattr(spoilt, k, dataclasses.replace(getattr(batch, k), views={"agents": blank[k]}))
    for x, given in ((a, batch), (b, spoilt)):
        x.update_statistics(given)
        x.update(given)
    assert all(torch.equal(x, b.state_dict()[k]) for k, x in a.state_dict().items())
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
    loop = loop_of(name, "probe_leave", 32, asked, {"hidden": (32,)}, run, {"common": common})
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
