"""DDPG and TD3 for every kind of action: targets, steps, what critics are told and all options, worked out on paper.

The nets of `learner` are one layer, set by hand. An agent does what it sees, mu(o) = tanh(o_0) or the largest of o, and its
copy the opposite. In SOLO, one agent of one number, the critic says Q(o, a) = o_1 + 2 a and its copy Q'(o, a) = o_1 + 4 a; that
of a second critic, o_1 + 6 a. gamma = 1/2, errors are squared and halved, and Adam's first step is by the rate, 1/4; nothing is
regularised, unless a test says otherwise. Uniform noise is 1/2 everywhere, where a normal is 0. H is what tanh makes 1/2 of.
"""

import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from bench import check_every_option_is_tested, plain

from shoal.algos.base import Seat
from shoal.algos.ddpg import DDPG
from shoal.algos.ppo import PPO
from shoal.algos.random import Random
from shoal.algos.samples import Samples
from shoal.algos.td3 import TD3
from shoal.ids import catalog
from shoal.kernels import native
from shoal.nets.config import NetConfig
from shoal.ops import losses
from shoal.ops.distributions import make
from shoal.ops.schedules import Now
from shoal.ops.values import as_vector
from shoal.spec import Batch, Box, Discrete, EnvSpec, Frame, Group, MultiDiscrete, Result, UserError, View
from shoal.training.loop import Loop
from shoal.training.settings import Settings, resolve
from shoal.tree import tree_leaves, tree_map

JUNK = 4096.0  # stands where nothing may look
H = math.atanh(0.5)
Y, N = True, False
CPU = torch.device("cpu")
KINDS = [False] if native.why_not() else [False, True]
HALF_WAY = Now(50, 100, 5)
STILL = {"lr_critic": 1e-30}  # a critic that does not move before its actor does
PLAIN = {
    "gamma": 0.5,
    "lr": 0.25,
    "grad_clip": None,
    "normalise_obs": False,
    "noise": 0.0,
    "noise_last": 0.0,
    "noise_steps": 100,
    "random_steps": 0,
    "regularise": 0.0,
    "target_every": 1000,
    "target_tau": 1.0,
}


def line(d=1):
    return Box((-1.0,) * d, (1.0,) * d)


def agent_group(n=1, action=None, obs=2, name="agents", team="t", **more):
    return Group(name, team, tuple(f"{name}_{i}" for i in range(n)), (obs,), action or line(), **more)


def world(n=1, action=None, obs=2, **more):
    group = {k: more.pop(k) for k in ("mortal", "masked") if k in more}
    return EnvSpec((agent_group(n, action, obs, **group),), **more)


SOLO = world()


def set_layer(layer, matrix):
    """One layer of which everything is zero but the weights: out = matrix in; of every agent, where each has its own."""
    with torch.no_grad():
        for p in layer.parameters():
            p.zero_()
        w, m = layer.weights[0], torch.as_tensor(matrix).float()
        w.copy_(m if w.dim() == 2 else m.T)


def learner(
    spec=SOLO, cls=DDPG, group="agents", net=None, actor=None, slow_actor=None, q=None, slow=None, kernels=False, **config
):
    """`actor`, `slow_actor`, `q`, `slow`: the weights of actor and critics and of their copies; of critics a row for each."""
    nets = NetConfig(**{"hidden": (), **(net or {})})
    config = cls.Config(**{**plain(cls), **PLAIN, **config})
    a = cls(Seat(spec, (group,), config, nets, torch.Generator().manual_seed(0), kernels=kernels))
    a.peers = {group: a}
    if nets.memory == "none":
        layer = a.actor.body
        actor = torch.eye(layer.width_out, layer.width_in) if actor is None else torch.tensor(actor)
        set_layer(layer, actor)
        set_layer(a.target_actor.module.body, -actor if slow_actor is None else slow_actor)
        solo = spec is SOLO and not a.central
        q = q or ([[0.0, 1, 2]] if solo else None)
        slow = slow or ([[0.0, 1, 4], [0, 1, 6]] if solo else q)
        for judges, rows in ((a.critics, q), (a.target.module, slow)):
            for k, judge in enumerate(judges):
                row = torch.zeros(1, judge.head.body.width_in) if rows is None else torch.tensor([rows[k % len(rows)]])
                set_layer(judge.head.body, row)
    return a


def learn(a, batch):
    return a.update(Samples(a, batch))


def steps(x):
    """[T, A], [T, B, A] or [T, B, N, A] -> [T, B, N, A]."""
    x = torch.as_tensor(x).float()
    return x[:, None, None] if x.dim() == 2 else x[:, :, None] if x.dim() == 3 else x


def each(x, like, dtype):
    """A number, [T], [T, B] or [T, B, N] -> `like`, [T, B, N]."""
    x = torch.as_tensor(x, dtype=dtype)
    while 0 < x.dim() < 3:
        x = x[..., None]
    return x.expand_as(like).clone()


def happened(
    q,
    w,
    action=0.0,
    r=0.0,
    terminated=N,
    over=N,
    alive=Y,
    alive_tp1=Y,
    legal=None,
    legal_tp1=None,
    start=N,
    spec=SOLO,
    noise=None,
):
    """A batch of steps in which q is seen, the action done and then w seen, and that are paid r; dicts where groups differ."""
    views, after, actions, results, learner_reward = {}, {}, {}, {}, {}
    for g in spec.groups:
        of = lambda x: x[g.name] if isinstance(x, dict) else x  # noqa: B023, E731
        seen, then = steps(of(q)), steps(of(w))
        there = torch.ones(seen.shape[:-1], dtype=torch.bool)
        flags = [each(of(x), there, torch.bool) for x in (alive, alive_tp1, start, terminated)]
        masks = [None if of(x) is None else torch.tensor(of(x)).expand(*there.shape, -1) for x in (legal, legal_tp1)]
        views[g.name] = View(seen, flags[0], flags[0].clone(), flags[2], masks[0])
        after[g.name] = View(then, flags[1], flags[1].clone(), torch.zeros_like(there), masks[1])
        if isinstance(g.action, Discrete):
            actions[g.name] = each(of(action), there, torch.long)
        else:
            x = torch.as_tensor(of(action))
            x = each(x, there, torch.float)[..., None] if x.dim() == 0 else steps(x)
            actions[g.name] = x if isinstance(g.action, Box) else x.long()
        learner_reward[g.name] = each(of(r), there, torch.float)
        results[g.name] = Result(torch.full_like(learner_reward[g.name], JUNK), flags[3])
    ends, none = each(over, there, torch.bool)[..., 0], {g.name: {} for g in spec.groups}
    noise = torch.full((10_000,), 0.5) if noise is None else noise
    return Batch(Frame(views), Frame(after), actions, results, ends, dict(none), dict(none), learner_reward, noise)


@pytest.fixture
def told(monkeypatch):
    """What was learnt from: of each update values and targets [K, T, B, N], losses and masks of critics and actor."""
    seen, error, total = [], losses.value_error, losses.masked_sum

    def value_error(value, target, huber=None):
        seen.append({"value": value.detach().clone(), "target": target[0].clone()})
        return error(value, target, huber)

    def masked_sum(x, mask):
        who = "actor" if "critic" in seen[-1] else "critic"
        seen[-1] |= {who: x.detach().clone(), f"mask_{who}": mask}
        return total(x, mask)

    monkeypatch.setattr(losses, "value_error", value_error)
    monkeypatch.setattr(losses, "masked_sum", masked_sum)
    return seen


def near(x, y, tol=2e-5):
    x = x.detach() if isinstance(x, torch.Tensor) else torch.tensor(x)
    torch.testing.assert_close(x.double(), torch.tensor(y, dtype=torch.float64), rtol=tol, atol=tol)


def slope(optimiser, param):
    """The gradient of one parameter in the first step: ten times Adam's first moment."""
    sizes = [p.numel() for p in optimiser._params]
    k = next(k for k, p in enumerate(optimiser._params) if p is param)
    return 10 * optimiser.first.split(sizes)[k].reshape(param.shape)


def heard(judge):
    """What a critic is given from now on: what it sees, and the actions that it is told."""
    seen: list[Any] = []
    judge.register_forward_pre_hook(lambda _, args: seen.append(tuple(x.detach().clone() for x in args)))
    return seen


def weight(a, which="critic"):
    nets = {"critic": a.critics, "slow": a.target.module}
    return nets[which][0].head.body.weights[0] if which in nets else vars(a)["_modules"][which].body.weights[0]


def copied(a):
    """Of the copies: the critic's weight of an action, and the actor's of what it sees."""
    return torch.stack([weight(a, "slow")[0, 2], a.target_actor.module.body.weights[0][0, 0]])


# --- options that change one number -----------------------------------------------------------------------------------


@dataclass
class Switch:
    """An option, set or not on top of `base`, with the number that is to be expected of it."""

    measure: Any  # (learner, what was told, metrics) -> the number
    plain: Any
    value: Any
    switched: Any
    base: Any = None
    batch: Any = None  # on top of ONE


def target(a, told, metrics):
    return told[-1]["target"].flatten()


def first_weights(a, told, metrics):
    """Of the critic, by the second number that is seen, and of the actor."""
    return torch.stack([weight(a)[0, 1], a.actor.body.weights[0][0, 0]])


def noise(a, told, metrics):
    assert metrics["noise"] == a.epsilon
    return a.epsilon


def feed(name):
    return lambda a, *_: float(getattr(a.feed, name) or 0)


# 1/4, worth 1 + 2/4, is paid 3. Next the copy of the actor does -1/2, worth 3 - 4/2 to that of the critic: y = 3 + 1/2, the
# error 2. The critic's slopes are -2 times H, 1, 1/4 and 1; after its step an action is worth 2.25
ONE = {"q": [[H, 1]], "w": [[H, 3]], "action": [[0.25]], "r": 3.0}
SWITCHES = {
    "gamma": Switch(target, [3.5], 1.0, [4.0]),
    "critics": Switch(target, [3.5], 2, [3.0]),  # 3 - 6/2 is less
    "reward_scale": Switch(target, [3.5], 2.0, [6.5]),
    "time_limit": Switch(target, [3.5], False, [3.0], None, {"over": Y}),
    "huber": Switch(lambda a, told, metrics: metrics["loss_critic"], 2.0, 1.0, 1.5),  # 2^2 / 2; 1 (2 - 1/2)
    "lr": Switch(first_weights, [1.25, 1.25], 0.5, [1.5, 1.5]),
    "lr_critic": Switch(first_weights, [1.25, 1.25], 0.5, [1.5, 1.25]),
    "lr_schedule": Switch(first_weights, [1.25, 1.25], "linear", [1.125, 1.125]),  # half-way
    "lr_critic_schedule": Switch(first_weights, [1.25, 1.25], "linear", [1.125, 1.25]),
    "lr_last": Switch(first_weights, [1.125, 1.125], 0.5, [1.1875, 1.1875], {"lr_schedule": "linear"}),
    "weight_decay": Switch(first_weights, [1.25, 1.25], 0.5, [1.125, 1.125]),  # less rate times decay times 1
    "grad_clip": Switch(lambda a, *_: a.critic_optimiser.first.norm(), 0.2 * (H**2 + 1 + 1 / 16 + 1) ** 0.5, 0.5, 0.05),
    "target_every": Switch(lambda a, *_: copied(a), [4.0, -1], 1, [2.25, 1.25]),
    "target_tau": Switch(lambda a, *_: copied(a), [2.25, 1.25], 0.25, [4 - 1.75 / 4, -1 + 2.25 / 4], {"target_every": 1}),
    "delay": Switch(lambda a, *_: a.actor_optimiser.steps, 1.0, 2, 0.0),
    "regularise": Switch(lambda a, told, metrics: metrics["loss_actor"], -2.0, 0.5, -2 + H**2 / 2, STILL),
    "random_steps": Switch(lambda a, *_: a.warmup.float(), 0.0, 51, 1.0),
    "noise": Switch(noise, 0.0, 0.5, 0.25),  # half-way to 0
    "noise_last": Switch(noise, 0.5, 0.25, 0.625, {"noise": 1.0}),
    "noise_steps": Switch(noise, 0.5, 200, 0.75, {"noise": 1.0}),
    "noise_schedule": Switch(noise, 0.5, "constant", 1.0, {"noise": 1.0}),
    "rollout": Switch(feed("steps"), 4.0, 7, 7.0),
    "every": Switch(feed("every"), 16.0, 0.5, 0.5),
    "batch": Switch(feed("batch"), 256.0, 32, 32.0),
    "capacity": Switch(feed("capacity"), 500_000.0, 1000, 1000.0),
    "learning_starts": Switch(feed("start"), 5000.0, 0, 0.0),
    "prioritised": Switch(feed("alpha"), 0.0, True, 0.6),
    "priority": Switch(feed("alpha"), 0.6, 0.25, 0.25, {"prioritised": True}),
    "priority_weight": Switch(feed("beta"), 0.4, 0.7, 0.7, {"prioritised": True}),
}
ELSEWHERE = {  # option -> the test of it, here or in a file of its own
    "after_death": "tests/algos/test_after_death.py",
    "burn_in": "test_the_burn_in_brings_memories_up_to_date_and_is_not_learnt_from",
    "chunk": "test_the_burn_in_brings_memories_up_to_date_and_is_not_learnt_from",
    "critic": "test_what_critics_see_and_are_told",
    "critic_input": "test_what_critics_see_and_are_told",
    "gumbel": "test_the_slope_of_a_choice_is_that_of_the_relaxed_one",
    "n_step": "test_so_many_rewards_and_fewer_where_time_ends",
    "noise_keep": "test_exploration_that_remembers",
    "normalise_obs": "test_observations_are_normalised_by_what_was_collected",
    "normalise_state": "tests/algos/test_observations.py",
    "normalise_reward": "test_rewards_are_divided_by_the_root_mean_square_of_what_was_collected",
    "normaliser": "test_a_normaliser_of_the_users_own",
    "others": "test_whose_actions_stand_beside_an_agents_own",
    "shaper": "test_the_replay_holds_what_was_paid_at_the_time",
    "state_normaliser": "tests/algos/test_observations.py",
    "smooth": "test_next_actions_are_smoothed_within_a_limit_by_td3_alone",
    "smooth_limit": "test_next_actions_are_smoothed_within_a_limit_by_td3_alone",
}


def test_every_option_has_a_number_of_its_own():
    check_every_option_is_tested((DDPG, TD3), SWITCHES, ELSEWHERE, globals())


@pytest.mark.parametrize("kernels", KINDS)
@pytest.mark.parametrize("option", SWITCHES)
def test_switching_an_option_changes_the_number_expected_by_hand(option, kernels, told):
    s = SWITCHES[option]
    for config, expected in (({}, s.plain), ({option: s.value}, s.switched)):
        a = learner(kernels=kernels, **{**(s.base or {}), **config})
        a.set_schedules(HALF_WAY)
        metrics = learn(a, happened(**{**ONE, **(s.batch or {})}))
        near(s.measure(a, told, metrics), expected)
    assert s.plain != s.switched


def test_names_and_defaults():
    known = catalog("algos")
    for name, cls in (("ddpg", DDPG), ("td3", TD3)):
        assert [known[x].cls for x in (f"i{name}", f"ma{name}")] == [cls.__name__] * 2
        assert (known[f"i{name}"].settings, known[f"ma{name}"].settings) == ({}, {"critic": "world"})
        assert cls.Config().critic == "own"
    assert [(c.Config().critics, c.Config().delay) for c in (DDPG, TD3)] == [(1, 1), (2, 2)]


@pytest.mark.parametrize(
    ("option", "value"),
    [
        *((x, 0) for x in ("rollout", "every", "batch", "capacity", "chunk", "n_step", "target_every", "critics", "delay")),
        *((x, 0) for x in ("lr", "lr_critic", "huber", "grad_clip", "reward_scale", "noise_steps", "gumbel")),
        *((x, 1.1) for x in ("gamma", "target_tau", "lr_last", "priority_weight", "noise_keep")),
        *((x, -0.1) for x in ("gamma", "target_tau", "lr_last", "priority_weight", "noise_keep")),
        *((x, -1) for x in ("weight_decay", "learning_starts", "burn_in", "priority", "random_steps")),
        *((x, -0.1) for x in ("noise", "noise_last", "regularise", "smooth", "smooth_limit")),
    ],
)
def test_what_is_out_of_bounds_is_refused_by_its_flag(option, value):
    with pytest.raises(UserError, match=f"--algo.{option.replace('_', '-')} is "):
        TD3.Config(**{option: value})


def test_what_is_refused():
    with pytest.raises(UserError, match=r"--net.trunk shared does not go with TD3, whose critics take actions as well"):
        learner(cls=TD3, net={"trunk": "shared"})
    for space in (Discrete(2), MultiDiscrete((2, 3))):
        with pytest.raises(UserError, match=f"--algo.noise-keep is for continuous actions; those of agents are {space.kind}"):
            learner(world(action=space), noise_keep=0.5)
    with pytest.raises(UserError, match=r"--algo.critic-input joined is for critics that see more than their own"):
        learner(critic_input="joined")
    with pytest.raises(UserError, match=r"--algo.n-step counts steps of the world"):
        learner(world(2, mortal=True, turns=True), n_step=2)


# --- targets ----------------------------------------------------------------------------------------------------------

# rows: nothing ends; terminated in step 0, 1, 2; cut off in step 0, 1, 2. Rewards are 1, 2, 4 and the next moments are worth
# 8, 16, 32: 1 + 8/2 = 5; 1 + 2/2 + 16/4 = 6; 1 + 2/2 + 4/4 + 32/8 = 7
ENDS = {1: [5.0, 1, 5, 5, 5, 5, 5], 2: [6.0, 1, 2, 6, 5, 6, 6], 3: [7.0, 1, 2, 3, 5, 6, 7]}
AS_DEATHS = {1: [5.0, 1, 5, 5, 1, 5, 5], 2: [6.0, 1, 2, 6, 1, 2, 6], 3: [7.0, 1, 2, 3, 1, 2, 3]}


@pytest.mark.parametrize("limit", [True, False])
@pytest.mark.parametrize("n", [1, 2, 3])
@pytest.mark.parametrize(("mortal", "scope"), [(False, "own"), (True, "own"), (True, "world")])
def test_so_many_rewards_and_fewer_where_time_ends(n, limit, mortal, scope, told):
    """n_step. What lies after an end is another episode's: junk."""
    spec = world(mortal=mortal, common=scope == "world")
    a = learner(spec, q=[[0.0, 1, 0]], n_step=n, time_limit=limit, critic=scope)
    assert a.feed.length == n
    terminated, over = torch.zeros(3, 7, dtype=torch.bool), torch.zeros(3, 7, dtype=torch.bool)
    r, w = torch.tensor([1.0, 2, 4])[:, None].expand(3, 7).clone(), torch.tensor([8.0, 16, 32])[:, None].expand(3, 7).clone()
    for k in range(3):
        terminated[k, 1 + k] = over[k, 4 + k] = over[k, 1 + k] = True
        for row in (1 + k, 4 + k):
            r[k + 1 :, row] = w[k + 1 :, row] = JUNK
        w[k, 1 + k] = JUNK
    seen = torch.stack((w, w), -1)
    metrics = learn(a, happened(torch.ones(n, 7, 2), seen[:n], 0.0, r[:n], terminated[:n], over[:n], spec=spec))
    near(told[0]["target"][0, :, 0], (ENDS if limit else AS_DEATHS)[n])
    assert told[0]["value"].shape == (1, 1, 7, 1)  # of one moment each: the others were there for their rewards
    assert told[0]["actor"].shape == (1, 7, 1)
    near(metrics["predictQ"], 1.0)


def test_the_lowest_of_the_copies_counts_and_the_first_critic_is_climbed(told):
    """TD3. Next +1/2 and -1/2 are done: 2 and 3, -2 and -3. y = 2/2 and -3/2 for both critics, which say 1.5 and 3.5: halves of
    the squares of 1/2, 5/2 and of 3, 5. The actor does -1/2 and 1/2 now: 1 - 1 and 1 + 1 by the first critic."""
    a = learner(cls=TD3, q=[[0.0, 1, 2], [0, 1, 10]], delay=1, prioritised=True, **STILL)
    metrics = learn(a, happened([[[-H, 1], [H, 1]]], [[[-H, 0], [H, 0]]], [[[0.25], [0.25]]]))
    near(told[0]["target"].flatten(), [1.0, -1.5])
    near(told[0]["value"][..., 0], [[[1.5, 1.5]], [[3.5, 3.5]]])
    near(metrics["loss_critic"], (3.25 + 17) / 2)
    near(metrics["predictQ"], 2.5)
    near(metrics["td_error"], (1.5 + 4) / 2)
    near(metrics["priority"], [1.5, 4])
    near(told[0]["actor"].flatten(), [0.0, -2])
    # slopes of both critics' biases: (1/2 + 3) / 2 and (5/2 + 5) / 2
    near(slope(a.critic_optimiser, a.critics[0].head.body.biases[0]), [1.75])
    near(slope(a.critic_optimiser, a.critics[1].head.body.biases[0]), [3.75])


def test_errors_of_critics_do_not_cancel():
    """One says 1.5 and one 3.5, and y is 2.5: each is wrong by 1."""
    a = learner(q=[[0.0, 1, 2], [0, 1, 10]], critics=2, prioritised=True)
    metrics = learn(a, happened([[0.0, 1]], [[0.0, 0]], [[0.25]], 2.5, terminated=Y))
    near(metrics["loss_critic"], 1.0)
    near(metrics["td_error"], 1.0)
    near(metrics["priority"], [1.0])


def test_importance_weighs_the_critics_loss_and_not_the_priority():
    """Errors of 4 and 2: 8 and 2, of which a half and the whole."""
    a, batch = learner(prioritised=True), happened([[[0.0, 1], [0, 2]]], [[[0.0, 0], [0, 0]]], 0.0, [[5.0, 4]], terminated=Y)
    batch.weight = torch.tensor([0.5, 1.0])
    metrics = learn(a, batch)
    near(metrics["loss_critic"], (4 + 2) / 2)
    near(metrics["td_error"], 3.0)
    near(metrics["priority"], [4.0, 2])
    near(slope(a.critic_optimiser, a.critics[0].head.body.biases[0]), [-2.0])
    assert "priority" not in learn(learner(), batch)


def phi(*z):
    return torch.special.ndtr(torch.tensor(z))


def test_next_actions_are_smoothed_within_a_limit_by_td3_alone(told):
    """smooth 1/2 and smooth_limit 0.6: noise of 1, 3 and -3 about 1/4 is 1/2 and, held, 0.6; 3/4 and 1/2 are 1. y = 4 a / 2."""
    w = [[[math.atanh(x), 0] for x in (0.25, 0.25, 0.25, 0.75)]]
    sample = torch.cat((torch.full((4,), 0.9), phi(1.0, 3, -3, 1)))  # the first are for the actor's own loss
    for cls, more, done in (
        (DDPG, {}, [0.25, 0.25, 0.25, 0.75]),
        (TD3, {"smooth": 0.5, "smooth_limit": 0.6}, [0.75, 0.85, -0.35, 1]),
        (TD3, {"smooth": 0.25, "smooth_limit": 0.6}, [0.5, 0.85, -0.35, 1]),
        (TD3, {"smooth": 0.5, "smooth_limit": 0.125}, [0.375, 0.375, 0.125, 0.875]),
    ):
        a = learner(cls=cls, slow_actor=torch.eye(1, 2), slow=[[0.0, 1, 4]], **more)
        assert a.draws(1, 4) == 8
        learn(a, happened(w, w, noise=sample))
        near(told[-1]["target"].flatten(), [2 * x for x in done])


def test_choices_are_the_copys_largest_whatever_the_noise(told):
    """The copy does the opposite of 1, 0: the second of 2 and 4, y = 4/2; and of what is legal the first."""
    for cls in (DDPG, TD3):
        for legal, expected in ((None, 2.0), ([Y, N], 1.0)):
            spec = world(action=Discrete(2), masked=legal is not None)
            a = learner(spec, cls, q=[[0.0, 0, 2, 4]])
            masks = {"legal": None if legal is None else [N, Y], "legal_tp1": legal}
            learn(a, happened([[0.0, 0]], [[1.0, 0]], noise=torch.tensor([0.5, 0.5, 0.999, 0.001]), spec=spec, **masks))
            near(told[-1]["target"].flatten(), [expected])


def test_several_choices_at_once(told):
    """Of two and of three: the copy does the opposite of what it sees, 0 and 1 of what is legal, worth 1 + 8; done was 1, 2."""
    spec = world(action=MultiDiscrete((2, 3)), obs=5, masked=True)
    a = learner(spec, q=[[0.0] * 5 + [1, 2, 4, 8, 16]])
    action = torch.tensor([1, 2]).reshape(1, 1, 1, 2)
    legal = [Y, Y, N, Y, Y]
    learn(a, happened([[0.0] * 5], [[0.0, 1, 0, 1, 2]], action, legal=[Y] * 5, legal_tp1=legal, spec=spec))
    near(told[0]["target"].flatten(), [9 / 2])
    near(told[0]["value"].flatten(), [18.0])


# --- statistics -------------------------------------------------------------------------------------------------------


def test_rewards_are_divided_by_the_root_mean_square_of_what_was_collected(told):
    """normalise_reward: 2 and 6 were collected, of mean square 20; what the dead are paid is not counted."""
    for mortal in (False, True):
        spec = world(mortal=mortal)
        a = learner(spec, normalise_reward=True, reward_scale=3.0)
        zeros = [[[0.0, 0], [0, 0]]]
        a.update_statistics(happened(zeros, zeros, r=[[2.0, 6]], spec=spec))
        if mortal:
            a.update_statistics(happened(zeros, zeros, r=[[JUNK, JUNK]], alive=N, spec=spec))
        for _ in range(2):  # an update is no witness
            learn(a, happened(zeros, zeros, r=[[10.0, 4]], terminated=Y, spec=spec))
            near(told[-1]["target"].flatten(), [30 / 20**0.5, 12 / 20**0.5])


def test_observations_are_normalised_by_what_was_collected(told):
    """normalise_obs: 1 and 3 have mean 2 and deviation 1: 5 is 3 then, worth 3, and 4 is 2."""
    a = learner(normalise_obs=True, slow=[[0.0, 1, 0]], **STILL)
    a.update_statistics(happened([[[1.0, 1], [3, 3]]], [[[JUNK, 0], [JUNK, 0]]]))
    metrics = learn(a, happened([[2.0 + H, 5]], [[0.0, 4]], r=3.0))
    near(told[0]["value"].flatten(), [3.0])
    near(told[0]["target"].flatten(), [3 + 2 / 2])
    assert a.observations.norms["agents"].count == 2
    near(metrics["loss_actor"], -3.0 - 2 / 2)


def test_a_normaliser_of_the_users_own(tmp_path, told):
    """With this `normaliser` an observation of 4 is 2, and next 8 is 4."""
    (tmp_path / "halves.py").write_text(
        "from torch import nn\n"
        "class Halves(nn.Module):\n"
        "    def __init__(self, *shape):\n"
        "        super().__init__()\n"
        "    def update(self, x, mask=None):\n"
        "        pass\n"
        "    def normalise(self, x, clip=None):\n"
        "        return x / 2\n"
        "    def denormalise(self, x):\n"
        "        return x * 2\n"
    )
    a = learner(normaliser=f"{tmp_path}/halves.py:Halves", normalise_obs=True)
    learn(a, happened([[0.0, 4]], [[0.0, 8]], r=3.0))
    near(told[0]["value"].flatten(), [2.0])
    near(told[0]["target"].flatten(), [3 + 4 / 2])


@pytest.mark.parametrize(
    ("schedule", "share"), [("constant", 1.0), ("linear", 0.55), ("exponential", 0.1**0.5), ("exponential:0.8/update", 0.8**5)]
)
def test_rates_and_noise_follow_their_schedules(schedule, share):
    """Half-way, after 50 of 100 steps and 5 updates. Noise has a time of its own: it is over after 100 steps."""
    both = {"lr_schedule": schedule, "lr_last": 0.1, "noise": 0.8, "noise_last": 0.2}
    a = learner(lr=1e-3, lr_critic=2e-3, **both)
    near(a.epsilon, 0.8)
    a.set_schedules(HALF_WAY)
    metrics = learn(a, happened(**ONE))
    near(metrics["learning_rate_actor"], 1e-3 * share, 1e-9)
    near(metrics["learning_rate_critic"], 2e-3 * share, 1e-9)
    near(metrics["noise"], 0.5, 1e-6)
    for step in (100, 900):
        a.set_schedules(Now(step, 1000, 5))
        near(a.epsilon, 0.2, 1e-6)
    a = learner(lr=1e-3, lr_critic=2e-3, lr_critic_schedule=schedule, lr_last=0.1)
    a.set_schedules(HALF_WAY)
    near(a.actor_optimiser.rate, 1e-3, 1e-9)
    near(a.critic_optimiser.rate, 2e-3 * share, 1e-9)


# --- who moves when ---------------------------------------------------------------------------------------------------


def moved(a):
    parts = {
        "critic": a.critic_optimiser.vector,
        "actor": a.actor_optimiser.vector,
        "moments": torch.cat((a.actor_optimiser.first, a.actor_optimiser.second, a.actor_optimiser.steps[None])),
        "copy": a.target._flat[0],
        "actor's copy": a.target_actor._flat[0],
    }
    return {k: x.clone() for k, x in parts.items()}


@pytest.mark.parametrize("tau", [1.0, 0.25])
@pytest.mark.parametrize(
    ("delay", "every", "active", "copies"),
    [
        (1, 1, [1, 2, 3, 4, 5, 6, 7, 8], [1, 2, 3, 4, 5, 6, 7, 8]),
        (1, 3, [1, 2, 3, 4, 5, 6, 7, 8], [3, 6]),
        (2, 1, [2, 4, 6, 8], [2, 4, 6, 8]),
        (2, 2, [2, 4, 6, 8], [4, 8]),
        (3, 1, [3, 6], [3, 6]),
    ],
)
def test_actor_and_copies_move_once_in_so_many_updates(delay, every, active, copies, tau):
    """The critics move each time; the actor's metrics stay what they were while it waits."""
    a = learner(cls=TD3, delay=delay, target_every=every, target_tau=tau, weight_decay=0.1)
    last = {"loss_actor": torch.zeros(()), "grad_norm_actor": torch.zeros(())}
    for k in range(1, 9):
        before = moved(a)
        metrics = learn(a, happened([[H * k / 8, 1]], [[H, 3]], [[0.25]], 3.0 + k))
        after = moved(a)
        differs = {part for part, x in after.items() if not torch.equal(x, before[part])}
        assert differs == {"critic"} | ({"actor", "moments"} if k in active else set()) | (
            {"copy", "actor's copy"} if k in copies else set()
        )
        for part, ahead in (("copy", "critic"), ("actor's copy", "actor")) if k in copies else ():
            torch.testing.assert_close(after[part], before[part] + tau * (after[ahead] - before[part]))
        for name, x in last.items():
            assert torch.equal(metrics[name], x) == (k not in active)
            last[name] = metrics[name]
        near(metrics["target_lag"], ((after["critic"] - after["copy"]).norm() / after["critic"].norm()).item())


def test_the_numbers_of_a_delayed_step():
    """Nothing is known of the actor in the first update; in the second it makes its first step. Copies follow by half."""
    a = learner(cls=TD3, target_every=1, target_tau=0.5, **STILL)
    one, two, three = (learn(a, happened(**ONE)) for _ in range(3))
    assert (one["loss_actor"], one["grad_norm_actor"]) == (0, 0)
    near(two["loss_actor"], -2.0)  # 1 + 2/2
    near(two["grad_norm_actor"], 2 * 0.75 * (H**2 + 1 + 1) ** 0.5)  # by what is seen, and the bias
    assert (three["loss_actor"], three["grad_norm_actor"]) == (two["loss_actor"], two["grad_norm_actor"])
    near(a.actor.body.weights[0][0], [1.25, 0.25])
    near(a.target_actor.module.body.weights[0][0], [(-1 + 1.25) / 2, 0.125])
    near(weight(a, "slow")[0], [0.0, 1, 3])  # from 4 to 2
    assert a.actor_optimiser.steps == 1


@pytest.mark.parametrize("mortal", [False, True])
def test_an_actor_that_is_not_due_stands_still_where_its_step_is_computed_all_the_same(mortal):
    """As it is on a device that is not to be waited for."""
    spec = world(mortal=mortal)
    a = learner(spec, q=[[0.0, 1, 2]], weight_decay=0.1)
    batch, before = happened(**ONE, spec=spec), moved(a)
    for due in (False, True):
        samples = Samples(a, batch)
        a._update_actor(samples, {"agents": batch.actions["agents"]}, a._noise(samples), torch.tensor(due))
        after = moved(a)
        same = {part: torch.equal(x, before[part]) for part, x in after.items()}
        assert same == {"critic": True, "copy": True, "actor's copy": True, "actor": not due, "moments": not due}


# --- the actor's loss -------------------------------------------------------------------------------------------------

# two agents do 1/2 and -1/2 now and have done 1/4 and 3/4; all critics say 2 a_0 + 6 a_1
PAIR = {"q": [[[[H], [-H]]]], "w": [[[[0.0], [0]]]], "action": [[[[0.25], [0.75]]]]}


def pair(common=True, mortal=False, **config):
    spec = world(2, obs=1, common=common, mortal=mortal)
    return learner(spec, q=[[0.0, 0, 2, 6]], critic="world", **{**STILL, **config}), spec


@pytest.mark.parametrize("common", [False, True])
@pytest.mark.parametrize("others", ["buffer", "policy"])
def test_whose_actions_stand_beside_an_agents_own(others, common, told):
    """others buffer: 2 (1/2) + 6 (3/4) and 2 (1/4) - 6 (1/2). policy: 2 (1/2) - 6 (1/2) for both. The slope of an agent is that
    of its own action either way: -2 (1 - 1/4) and -6 (1 - 1/4), of which the mean."""
    a, spec = pair(common, others=others)
    learn(a, happened(**PAIR, spec=spec))
    near(told[0]["actor"].flatten(), [-5.5, 2.5] if others == "buffer" else [2.0, 2])
    near(slope(a.actor_optimiser, a.actor.body.ids).flatten(), [-0.75, -2.25])
    near(slope(a.actor_optimiser, a.actor.body.biases[0]), [-3.0])
    assert a.actor_optimiser.steps == 1
    assert all(p.requires_grad for p in a.critics.parameters())


@pytest.mark.parametrize("common", [False, True])
def test_the_actors_loss_is_what_its_actions_are_worth_to_one_critic_or_several(common):
    a, spec = pair(common, others="policy")
    near(learn(a, happened(**PAIR, spec=spec))["loss_actor"], 2.0)


@pytest.mark.parametrize("others", ["buffer", "policy"])
@pytest.mark.parametrize("action", [line(2), Discrete(3), MultiDiscrete((2, 3))])
def test_one_pass_for_all_is_the_sum_of_the_agents_own(others, action):
    """A curved critic that judges for all: the slope of the agents' own losses, each with the others' actions held."""
    spec = world(3, action, 4, common=True)
    config = {**PLAIN, **STILL, "critic": "world", "others": others, "regularise": 0.1}
    net, config = NetConfig(hidden=(8,), gain_actor=1.0), DDPG.Config(**{**plain(DDPG), **config})
    a = DDPG(Seat(spec, ("agents",), config, net, torch.Generator().manual_seed(0)))
    assert a.as_one
    g = torch.Generator().manual_seed(1)
    q, rows = torch.randn(1, 5, 3, 4, generator=g), 5
    done = {"continuous": torch.rand(1, rows, 3, 2, generator=g), "discrete": torch.randint(3, (1, rows, 3), generator=g)}
    done["multi-discrete"] = torch.randint(2, (1, rows, 3, 2), generator=g)
    batch = happened(q, q, done[action.kind], spec=spec, noise=torch.rand(a.draws(1, rows), generator=g))
    params = a.actor(q)[0]
    u = a._noise(Samples(a, batch))["now"]
    mine = params.tanh() if action.kind == "continuous" else make(a.space, params, None).relaxed(u, 1.0)
    was = mine.detach() if others == "policy" else as_vector(batch.actions["agents"], action)
    loss, judge = 0.1 * params.square().mean(-1).sum(), a.critics[0]
    for i in range(3):
        beside = torch.stack([mine[..., k, :] if k == i else was[..., k, :] for k in range(3)], -2)
        loss = loss - judge(judge.features(q.flatten(2))[0], beside.flatten(-2)[..., None, :]).sum()
    expected = torch.cat([x.flatten() for x in torch.autograd.grad(loss / (rows * 3), tuple(a.actor.parameters()))])
    learn(a, batch)
    torch.testing.assert_close(10 * a.actor_optimiser.first, expected, rtol=1e-4, atol=1e-6)
    assert expected.abs().max() > 1e-3


def gumbel(*g):
    """Uniform numbers whose Gumbel noise is g."""
    return torch.exp(-torch.exp(-torch.tensor(g)))


@pytest.mark.parametrize(("temperature", "second"), [(1.0, 3.0), (2.0, 3**0.5)])
def test_the_slope_of_a_choice_is_that_of_the_relaxed_one(temperature, second, told):
    """gumbel. Logits with noise are 0 and log 3: the second is taken, worth 6 beside 2. p = 1/4, 3/4 at temperature 1, and the
    slope of the first is p_0 (2 - 5) = -3/4; over the temperature, and by its softmax, at others."""
    spec = world(action=Discrete(2))
    a = learner(spec, q=[[0.0, 0, 2, 6]], gumbel=temperature, **STILL)
    sample = torch.cat((gumbel(1.0, -0.5), torch.full((2,), 0.5)))
    metrics = learn(a, happened([[-1.0, math.log(3) + 0.5]], [[0.0, 0]], noise=sample, spec=spec))
    near(metrics["loss_actor"], -6.0)
    p = 1 / (1 + second)
    by = p * (1 - p) * 4 / temperature
    near(slope(a.actor_optimiser, a.actor.body.biases[0]), [by, -by])


def test_several_choices_have_slopes_of_their_own():
    """Worth 2, 6 and 1, 0, 4 with chances 1/4, 3/4 and a third each: p (w - mean w), means 5 and 5/3."""
    spec = world(action=MultiDiscrete((2, 3)), obs=5)
    a = learner(spec, q=[[0.0] * 5 + [2, 6, 1, 0, 4]], **STILL)
    sample = torch.full((a.draws(1, 1),), 0.5)
    metrics = learn(a, happened([[0.0, math.log(3), 0, 0, 0]], [[0.0] * 5], [[0.0, 0]], noise=sample, spec=spec))
    near(metrics["loss_actor"], -7.0)  # among equals the first
    by = [-0.75, 0.75, (1 - 5 / 3) / 3, -5 / 9, (4 - 5 / 3) / 3]
    near(slope(a.actor_optimiser, a.actor.body.biases[0]), [-x for x in by])


def test_an_illegal_choice_is_not_taken_and_has_no_slope():
    """The third, whose logit is 30 and whose noise is large, is illegal now: 0 and log 3 are left, as above."""
    spec = world(action=Discrete(3), obs=3, masked=True)
    a = learner(spec, q=[[0.0, 0, 0, 2, 6, JUNK]], **STILL)
    sample = torch.tensor([0.5, 0.5, 0.999, 0.5, 0.5, 0.999])
    legal = {"legal": [Y, Y, N], "legal_tp1": [Y, Y, Y]}
    metrics = learn(a, happened([[0.0, math.log(3), 30]], [[9.0, 0, 0]], 1, noise=sample, spec=spec, **legal))
    near(metrics["loss_actor"], -6.0)
    near(slope(a.actor_optimiser, a.actor.body.biases[0]), [0.75, -0.75, 0])


def test_outputs_are_regularised_before_tanh():
    """regularise 1/2 of the mean of squares: slopes 1/2 o over two outputs; the critic says nothing."""
    spec = world(action=line(2))
    a = learner(spec, q=[[0.0] * 4], regularise=0.5, **STILL)
    near(learn(a, happened([[1.0, -3]], [[0.0, 0]], [[0.0, 0]], spec=spec))["loss_actor"], 0.5 * 10 / 2)
    near(slope(a.actor_optimiser, a.actor.body.biases[0]), [0.5, -1.5])


# --- those who are not there, and those who wait ----------------------------------------------------------------------


@pytest.mark.parametrize("common", [False, True])
@pytest.mark.parametrize("others", ["buffer", "policy"])
def test_the_dead_are_in_no_loss_and_critics_hear_nothing_of_them(others, common, told):
    """Agent 1 is dead: Q = 2/4, y = 2. The actor's action is worth 2/2 beside nothing; its slope, -2 (1 - 1/4), is whole."""
    a, spec = pair(common, True, others=others, prioritised=True)
    said = heard(a.critics[0])
    gone = {"alive": [[[Y, N]]], "alive_tp1": [[[Y, N]]]}
    metrics = learn(a, happened(**PAIR, r=[[[2.0, JUNK]]], spec=spec, **gone))
    near(told[0]["value"][0, 0, 0, 0], 0.5)
    near(told[0]["target"][0, 0, 0], 2.0)
    near(metrics["loss_critic"], 1.5**2 / 2)
    near(metrics["td_error"], 1.5)
    near(metrics["predictQ"], 0.5)
    near(metrics["priority"], [1.5])
    near(said[0][1][0, 0, 0], [0.25, 0])
    assert (said[0][0][..., 1] == 0).all()  # nor do they see its observation
    near(said[1][1][0, 0, 0], [0.5, 0])
    near(metrics["loss_actor"], -1.0)
    near(slope(a.actor_optimiser, a.actor.body.ids).flatten(), [-1.5, 0])
    near(slope(a.critic_optimiser, a.critics[0].head.body.biases[0]).flatten(), [-1.5] if common else [-1.5, 0])


@pytest.mark.parametrize(("ended", "common", "expected"), [(N, N, [2.5, 5]), (Y, N, [2.5, 6]), (N, Y, [4.5]), (Y, Y, [4.5])])
def test_who_is_cut_off_alone_is_bootstrapped_by_its_own_next_action(ended, common, expected, told):
    """Next 1/2 and -1/2 are done. Agent 1 is gone then: to agent 0 that is 2/2, y = 2 + 1/2. To itself it is 2/2 - 6/2:
    y = 6 - 1, or 6 if it died. One critic for all hears nothing of it: 4 + 1/2."""
    a, spec = pair(common, True)
    said = heard(a.target.module[0])
    ends = {"alive_tp1": [[[Y, N]]], "terminated": [[[N, ended]]]}
    learn(a, happened(PAIR["q"], [[[[-H], [H]]]], PAIR["action"], [[[2.0, 6]]], spec=spec, **ends))
    near(told[0]["target"].flatten(), expected)
    near(said[0][1][0, 0], [[0.5, 0]] if common else [[0.5, 0], [0.5, -0.5]])


# agents alive now; alive next; terminated; over -> y. They are paid 2 and 6; next they see 8 and 4: worth their sum and 2
LIVES = {
    "both go on": ([Y, Y], [Y, Y], [N, N], N, 4 + 14 / 2),
    "one dies": ([Y, Y], [Y, N], [N, Y], N, 4 + 10 / 2),
    "one was dead": ([Y, N], [Y, N], [N, N], N, 2 + 10 / 2),
    "both die": ([Y, Y], [N, N], [Y, Y], Y, 4.0),
    "the last one dies": ([Y, N], [N, N], [Y, N], Y, 2.0),
    "one arrives": ([Y, N], [Y, Y], [N, N], N, 2 + 14 / 2),
    "cut off": ([Y, Y], [Y, Y], [N, N], Y, 4 + 14 / 2),
    "nobody is there": ([N, N], [N, N], [N, N], N, None),
    "one dies, one arrives": ([Y, N], [N, Y], [Y, N], N, 2 + 6 / 2),
}


@pytest.mark.parametrize("limit", [True, False])
def test_those_who_are_judged_as_one_end_when_nobody_goes_on(limit, told):
    alive, alive_tp1, terminated, over, y = zip(*LIVES.values(), strict=True)
    spec, rows = world(2, obs=1, common=True, mortal=True), len(LIVES)
    a = learner(spec, q=[[1.0, 1, 0, 0]], critic="world", time_limit=limit)
    torch.nn.init.constant_(a.target.module[0].head.body.biases[0], 2.0)
    learner_reward = torch.tensor([2.0, 6]).expand(1, rows, 2).where(torch.tensor([alive]), JUNK)
    w = torch.tensor([8.0, 4])[:, None].expand(1, rows, 2, 1)
    learn(
        a, happened(torch.zeros(1, rows, 2, 1), w, 0.0, learner_reward, [terminated], [over], [alive], [alive_tp1], spec=spec)
    )
    there = told[0]["mask_critic"]
    assert there.flatten().tolist() == [x is not None for x in y]
    pay = [4.0 if all(x) else 2.0 for x in alive]
    expected = [x if limit or not cut else p for x, cut, p in zip(y, over, pay, strict=True) if x is not None]
    near(told[0]["target"][there], expected)
    assert torch.equal(told[0]["mask_actor"], torch.tensor([alive]))


def test_where_nobody_acts_nothing_moves():
    for common in (False, True):
        a, spec = pair(common, True, weight_decay=0.5, lr_critic=None)
        before = {k: x.clone() for k, x in a.state_dict().items() if ".updates" not in k}
        metrics = learn(a, happened(**PAIR, r=JUNK, alive=N, alive_tp1=N, spec=spec))
        assert all(torch.equal(x, a.state_dict()[k]) for k, x in before.items())
        assert (metrics["loss_critic"], metrics["loss_actor"]) == (0, 0)


@pytest.mark.parametrize("scope", ["own", "world"])
def test_who_waits_is_paid_until_its_next_turn_and_valued_there(scope, told):
    """Agent 0 moves in steps 0 and 2, agent 1 in 1 and 3. A turn is worth what is seen then: 1 + 2 + 6/2, 4 + 8 + 10/2 and
    32 + 64 + 4/2; agent 1's next turn is not seen. Critics hear nothing of who waits."""
    spec = world(2, obs=1, mortal=True, turns=True)
    a = learner(spec, q=[[1.0, 0]] if scope == "own" else [[1.0, 1, 0, 0]], critic=scope)
    said = heard(a.critics[0])
    q = [[[[1.0], [0]]], [[[0], [1]]], [[[6], [0]]], [[[0], [4]]]]
    w = [*q[1:], [[[10.0], [0]]]]
    batch = happened(q, w, [[[[0.25], [0.75]]]] * 4, [[[1.0, 16]], [[2, 32]], [[4, 64]], [[8, 128]]], spec=spec)
    turn = torch.tensor([[[Y, N]], [[N, Y]]]).repeat(2, 1, 1)
    batch.frame["agents"].active, batch.next["agents"].active = turn, ~turn
    learn(a, batch)
    assert told[0]["mask_critic"].nonzero()[:, [0, 2]].tolist() == [[0, 0], [1, 1], [2, 0]]
    near(told[0]["target"][told[0]["mask_critic"]], [6.0, 98, 17])
    assert torch.equal(told[0]["mask_actor"], turn)
    if scope == "world":
        near(said[0][1][:, 0, 0], [[0.25, 0], [0, 0.75], [0.25, 0], [0, 0.75]])


# --- every kind of action in one world --------------------------------------------------------------------------------

SPEAKER = agent_group(1, Discrete(3), 2, "speaker")
LISTENERS = agent_group(2, line(2), 2, "listener")
SCRIBE = agent_group(1, MultiDiscrete((2, 3)), 1, "scribe", "u")
MIXED = EnvSpec((SPEAKER, LISTENERS, SCRIBE))
STATED = EnvSpec((SPEAKER, LISTENERS, SCRIBE), state=2)
SCRIBES = [[1.0], [0], [0], [0], [1]]  # it sees 1: the first of two and the last of three; its copy does 1 and 0
SEEN = {"speaker": [[1.0, -2]], "listener": [[[[H, -H], [0, H]]]], "scribe": [[1.0]]}
NEXT = {"speaker": [[1.0, -2]], "listener": [[[[-H, 0.0], [H, H]]]], "scribe": [[1.0]]}
DONE = {"speaker": 2, "listener": [[[[0.25, 0.5], [-0.25, 0]]]], "scribe": [[1.0, 1]]}
ALL_SEEN = [1, -2, H, -H, 0, H, 1]
WAS = {"speaker": [0, 0, 1], "listener": [0.25, 0.5, -0.25, 0], "scribe": [0, 1, 0, 1, 0]}
NOW = {"speaker": [1, 0, 0], "listener": [0.5, -0.5, 0, 0.5], "scribe": [1, 0, 0, 0, 1]}  # what policies would do
THEN = {"speaker": [0, 1, 0], "listener": [0.5, 0, -0.5, -0.5], "scribe": [0, 1, 1, 0, 0]}  # what copies do next


def party(spec=MIXED, players=None, **config):
    """A learner for each group, or who is given, who know each other."""
    config = {"critic": "world", **STILL, **config}
    made = {g.name: learner(spec, group=g.name, actor=SCRIBES if g.name == "scribe" else None, **config) for g in spec.groups}
    made |= players or {}
    for a in made.values():
        a.peers = made
    return made


def told_all(speaker, listener, scribe):
    return [*speaker, *listener, *scribe]


def mixed_batch(spec=MIXED, **more):
    batch = happened(SEEN, NEXT, DONE, spec=spec, **more)
    if spec.state:
        batch.frame.state, batch.next.state = torch.tensor([[[5.0, 6]]]), torch.tensor([[[7.0, 8]]])
    return batch


@pytest.mark.parametrize("common", [False, True])
@pytest.mark.parametrize("others", ["buffer", "policy"])
@pytest.mark.parametrize("who", ["speaker", "listener", "scribe"])
def test_a_central_critic_is_told_what_everybody_does_whatever_kind_it_is(who, others, common):
    """In the order of the world's groups, choices one-hot: what was done; next, what the copies of all policies do; and in the
    actor's loss its own action, of each agent apart, beside what the others did or would do."""
    spec = EnvSpec(MIXED.groups, common=common)
    a = party(spec, others=others)[who]
    said, then = heard(a.critics[0]), heard(a.target.module[0])
    learn(a, mixed_batch(spec))
    for got, expected in ((said[0], WAS), (then[0], THEN)):
        for row in got[1][0, 0]:
            near(row, told_all(**expected), 1e-6)
    near(said[0][0][0, 0, 0], ALL_SEEN)
    assert len(said[0][1][0, 0]) == (2 if who == "listener" and not common else 1)
    beside = WAS if others == "buffer" else NOW
    mine = {**beside, who: NOW[who]}
    rows = [mine]
    if who == "listener" and others == "buffer":  # each apart
        rows = [{**mine, who: NOW[who][:2] + WAS[who][2:]}, {**mine, who: WAS[who][:2] + NOW[who][2:]}]
    elif who == "listener" and not common:
        rows = [mine, mine]
    near(said[1][1][0, 0], [told_all(**x) for x in rows], 1e-6)


OWN = [[H, -H], [0, H]]
SCOPES = [  # options, world -> what listeners' critics see; whose actions they are told
    ({"critic": "own"}, MIXED, OWN, None),
    ({"critic": "team"}, MIXED, [ALL_SEEN[:6]] * 2, ["speaker", "listener"]),
    ({"critic": "world"}, MIXED, [ALL_SEEN] * 2, ["speaker", "listener", "scribe"]),
    ({"critic": "world"}, STATED, [[5, 6]] * 2, ["speaker", "listener", "scribe"]),
    ({"critic": "team"}, STATED, [ALL_SEEN[:6]] * 2, ["speaker", "listener"]),
    ({"critic": "world", "critic_input": "joined"}, STATED, [ALL_SEEN] * 2, ["speaker", "listener", "scribe"]),
    ({"critic": "world", "critic_input": "agent"}, STATED, [[5, 6, *x] for x in OWN], ["speaker", "listener", "scribe"]),
    ({"critic": "team", "critic_input": "agent"}, MIXED, [ALL_SEEN[:6] + x for x in OWN], ["speaker", "listener"]),
]


@pytest.mark.parametrize(("config", "spec", "seen", "whose"), SCOPES)
def test_what_critics_see_and_are_told(config, spec, seen, whose):
    a = party(spec, **config)["listener"]
    assert a.needs_peers == (whose is not None)
    said, then = heard(a.critics[0]), heard(a.target.module[0])
    learn(a, mixed_batch(spec))
    near(said[0][0][0, 0], seen, 1e-6)
    for got, expected in ((said[0], WAS), (then[0], THEN)):
        own = [expected["listener"][:2], expected["listener"][2:]]
        near(got[1][0, 0], own if whose is None else [[x for g in whose for x in expected[g]]] * 2, 1e-6)
    if spec.state and config["critic"] == "world" and "critic_input" not in config:
        assert then[0][0][0, 0].tolist() == [[7, 8]] * 2


def players_of(kind):
    """Who plays the listeners, and what is done next, by the noise that is drawn for them."""
    if kind == "random":
        args = Random.Config(), NetConfig(), torch.Generator()
        return {"listener": Random(Seat(MIXED, ("listener",), *args))}, [-1, 0, 0.5, 0.75]
    if kind == "frozen":
        a = learner(MIXED, group="listener", critic="world", noise=1.0, random_steps=9)
        a.learns = False
        return {"listener": a}, [-0.5, 0, 0.5, 0.5]  # its policy, and not its copy
    if kind == "on-policy":
        a = PPO(
            Seat(
                MIXED,
                ("listener",),
                PPO.Config(**{**plain(PPO), "normalise_obs": False}),
                NetConfig(hidden=()),
                torch.Generator(),
            )
        )
        set_layer(a.actor.net.body, torch.eye(2))
        with torch.no_grad():
            a.actor.log_std.fill_(math.log(1 / 4))
        z = torch.special.ndtri(torch.tensor([1e-9, 0.5, 0.75, 0.875]).clamp(min=2.0**-24)).tolist()
        return {"listener": a}, [-1, z[1] / 4, H + z[2] / 4, H + z[3] / 4]  # the first is clipped, as the world would
    return {}, [0.5, 0, -0.5, -0.5]


@pytest.mark.parametrize("others", ["buffer", "policy"])
@pytest.mark.parametrize("kind", ["learning", "random", "frozen", "on-policy"])
def test_who_is_asked_for_next_actions(kind, others):
    """A learner's copy, without its exploration; a frozen policy itself; who draws, by noise of its own."""
    players, expected = players_of(kind)
    made = party(players=players, others=others, noise=0.5)
    a, theirs = made["speaker"], made["listener"].noise * 2
    assert a.draws(1, 1) == 2 * 3 + (1 + (others == "policy")) * (theirs + 11)  # own, next, and the peers'
    sample = torch.full((a.draws(1, 1),), 0.3)
    sample[6:10] = torch.tensor([0.0, 0.5, 0.75, 0.875])
    said, then = heard(a.critics[0]), heard(a.target.module[0])
    learn(a, mixed_batch(noise=sample))
    near(then[0][1][0, 0, 0], [*THEN["speaker"], *expected, *THEN["scribe"]], 1e-4)
    if others == "policy" and kind in ("learning", "frozen", "random"):
        now = [2 * 0.3 - 1] * 4 if kind == "random" else NOW["listener"]
        near(said[1][1][0, 0, 0], [*NOW["speaker"], *now, *NOW["scribe"]], 1e-5)


GRU = {"memory": "gru", "memory_width": 2, "activation": "relu"}
DUET = EnvSpec((agent_group(1, line(), 1, "a"), agent_group(1, Discrete(2), 2, "b")))


def set_memory(net, see=None):
    """h' = (tanh o + h) / 2 in each of two numbers."""
    set_layer(net.body, torch.eye(2) if see is None else see)
    set_layer(net.memory.inward, torch.cat((torch.zeros(4, 2), torch.eye(2))))
    set_layer(net.memory.inner, torch.zeros(6, 2))


@pytest.mark.parametrize("cls", [PPO, DDPG])
def test_a_peer_with_memory_is_asked_with_what_it_remembers(cls):
    """It does what it remembers more of. Two steps of darkness after a memory of 0, 1 that leans to the second; where it starts
    it remembers nothing, and does the first."""
    config = cls.Config(**{**plain(cls), **({"normalise_obs": False} if cls is PPO else {**PLAIN, "random_steps": 5})})
    b = cls(Seat(DUET, ("b",), config, NetConfig(hidden=(), **GRU), torch.Generator()))
    for net in [b.actor.net] if cls is PPO else [b.actor, b.target_actor.module]:
        set_memory(net)
        set_layer(net.out, torch.eye(2))
    for start, then, now in (([N, N], [1, 1], [1, 1]), ([N, Y], [1, 0], [1, 0]), ([Y, N], [0, 0], [0, 0])):
        a = learner(DUET, group="a", critic="world", others="policy", chunk=2)
        a.peers = {"a": a, "b": b}
        said, copy = heard(a.critics[0]), heard(a.target.module[0])
        dark = {"a": [[0.0], [0]], "b": [[0.0, 0], [0, 0]]}
        batch = happened(dark, dark, {"a": 0.0, "b": 0}, start={"a": N, "b": start}, spec=DUET)
        batch.memory = b.memory(1, CPU) | {"a": {}}
        batch.memory["b"]["actor"]["hidden"][..., 1] = 1.0
        learn(a, batch)
        assert copy[0][1][:, 0, 0, 2].tolist() == then
        assert said[1][1][:, 0, 0, 2].tolist() == now


@pytest.mark.parametrize("share", ["id", "plain", "none", "agents_0=x,agents_1=x"])
def test_one_critic_where_pay_is_common_and_else_one_each(share):
    """Whatever agents share otherwise; the critics of an own observation beside the world's go by it."""
    for common in (True, False):
        a = learner(world(2, common=common), net={"share": share}, critic="world")
        body = a.critics[0].head.body
        assert (a.critics[0].n, body.sets, body.ids) == ((1, 1, None) if common else (2, 2, None))
        assert a.as_one == common
    a = learner(world(2, common=True), net={"share": share}, critic="world", critic_input="agent")
    assert not a.as_one
    assert a.critics[0].head.body.sets == (2 if share == "none" else 1)


def test_critics_of_agents_that_are_paid_unlike_learn_apart():
    """Agent 0's is wrong by 4 and agent 1's by nothing: only the first one's weights have a slope."""
    a, spec = pair(False)
    learn(a, happened(PAIR["q"], PAIR["w"], [[[[0.0], [0]]]], [[[4.0, 0]]], terminated=Y, spec=spec))
    near(slope(a.critic_optimiser, a.critics[0].head.body.biases[0]).flatten(), [-2.0, 0])  # of two agents


@torch.no_grad()
def test_what_a_moment_is_worth():
    """1 + 2 (1/2); of two agents judged as one 2/2 - 6/2 for both."""
    near(learner().values(happened(**ONE).frame).flatten(), [2.0])
    a, spec = pair()
    near(a.values(happened(**PAIR, spec=spec).frame).flatten(), [-2.0, -2])
    assert set(a.nets) == {"actor", "critic", "target_critic", "target_actor"}


# --- exploration ------------------------------------------------------------------------------------------------------


def scene(obs, legal=None, start=N):
    obs = torch.tensor(obs)
    yes = torch.ones(obs.shape[:-1], dtype=torch.bool)
    return Frame({"agents": View(obs, yes, yes, torch.tensor(start).expand_as(yes), legal)})


def played(a, frame, u, explore=True):
    rows = len(frame["agents"].obs)
    return a.act(frame, a.memory(rows, CPU), None if u is None else {"agents": u}, explore)[0]["agents"]


@torch.no_grad()
def test_noise_is_added_for_each_row_and_agent_and_clipped():
    """noise 1/4 of 1, -2, 4 and 0 about 1/2, 0, 1/2 and 0."""
    a = learner(world(2, obs=1), noise=0.25)
    frame = scene([[[H], [0]], [[H], [0]]])
    u = phi(1.0, -2, 4, 0).reshape(2, 2, 1)
    near(played(a, frame, u).flatten(), [0.75, -0.5, 1, 0])
    calm = [0.5, 0, 0.5, 0]
    near(played(a, frame, None, False).flatten(), calm)
    near(played(a, frame, u, False).flatten(), calm)
    a.learns = False
    near(played(a, frame, u).flatten(), calm)
    a.learns = True
    a.epsilon.fill_(0.5)
    near(played(a, frame, u).flatten(), [1.0, -1, 1, 0])
    assert {"epsilon", "warmup"} <= set(a.state_dict())


@torch.no_grad()
def test_choices_are_drawn_and_now_and_then_random():
    """Gumbel numbers, a coin, and numbers for anything, of noise 1/2. Rows: the draw, here not the best; the coin, anything;
    and the same where the best is illegal, as is the second, whose number is the largest."""
    a = learner(world(2, Discrete(3), 3, masked=True), noise=0.5)
    assert a.noise == 7
    legal = torch.tensor([[Y, Y, Y], [Y, N, Y]])[:, None].expand(2, 2, 3)
    frame = scene([[[1.0, 2, 3]] * 2] * 2, legal)
    draw, anything = [0.99, 0.5, 0.01], [0.4, 0.9, 0.5]
    u = torch.tensor([[[*draw, 0.51, *anything], [*draw, 0.49, *anything]]] * 2)
    assert played(a, frame, u).tolist() == [[0, 1], [0, 2]]
    assert played(a, frame, None, False).tolist() == played(a, frame, u, False).tolist() == [[2, 2], [2, 2]]
    a.learns = False
    assert played(a, frame, u).tolist() == [[2, 2], [2, 2]]
    b = learner(world(1, MultiDiscrete((2, 2)), 4), noise=0.5)
    u = torch.tensor([[[0.9, 0.5, 0.5, 0.5, coin, 0.1, 0.2, 0.4, 0.3]] for coin in (0.6, 0.4)])
    assert played(b, scene([[[0.0, 1, 0, 1]]] * 2), u).tolist() == [[[0, 1]], [[1, 0]]]


@torch.no_grad()
def test_shares_of_what_is_drawn():
    """Chances 3/4 and 1/4, half of it replaced by 1/2 and 1/2; the third is never legal."""
    rows = 20_000
    a = learner(world(action=Discrete(3), obs=3, masked=True), noise=0.5)
    legal = torch.tensor([Y, Y, N]).expand(rows, 1, 3)
    frame = scene([[[math.log(3), 0.0, 9]]] * rows, legal)
    u = torch.rand(rows, 1, 7, generator=torch.Generator().manual_seed(0))
    near(torch.bincount(played(a, frame, u).flatten(), minlength=3) / rows, [5 / 8, 3 / 8, 0], 0.02)


@torch.no_grad()
def test_the_first_steps_are_uniformly_random():
    """random_steps: whatever the policy says, of what is legal; and no more after them, nor by who does not explore."""
    a = learner(world(2, obs=1), random_steps=100)
    frame, u = scene([[[H], [0.0]]]), torch.tensor([[[0.125], [1.0]]])
    near(played(a, frame, u).flatten(), [-0.75, 1])
    near(played(a, frame, u, False).flatten(), [0.5, 0])
    for step, warmup in ((99, True), (100, False)):
        a.set_schedules(Now(step, 1000, 0))
        near(played(a, frame, u).flatten(), [-0.75, 1] if warmup else [0.5, 0])
    b = learner(world(action=Discrete(3), obs=3, masked=True), random_steps=100)
    legal = torch.tensor([[[Y, Y, N]], [[N, Y, Y]]])
    u = torch.tensor([[[0.6, 0.5, 0.9, 0.5, 0.5, 0.5, 0.5]]] * 2)
    assert played(b, scene([[[0.0, 50, 0]]] * 2, legal), u).flatten().tolist() == [0, 2]
    b.learns = False
    assert played(b, scene([[[0.0, 50, 0]]] * 2, legal), u).flatten().tolist() == [1, 1]


@torch.no_grad()
def test_exploration_that_remembers():
    """noise_keep 0.6: z = 0.6 (1) + 0.8 (1/2) = 1, and 1/2 where an episode starts; of the size 1 and, from step to step, a
    correlation of 0.6."""
    a = learner(noise_keep=0.6, noise=0.1)
    memory = {"agents": {"noise": torch.ones(2, 1, 1)}}
    actions, after, _ = a.act(scene([[[0.0, 0]]] * 2, start=[[N], [Y]]), memory, {"agents": phi(0.5, 0.5)[:, None, None]}, True)
    near(actions["agents"].flatten(), [0.1, 0.05])
    near(after["agents"]["noise"].flatten(), [1.0, 0.5])
    still = a.act(scene([[[0.0, 0]]] * 2), memory, {"agents": phi(2.0, 2)[:, None, None]}, False)
    assert still[0]["agents"].abs().max() == 0
    assert torch.equal(still[1]["agents"]["noise"], memory["agents"]["noise"])
    rows, z = 20_000, []
    memory = a.memory(rows, CPU)
    g = torch.Generator().manual_seed(0)
    for t in range(4):
        u = {"agents": torch.rand(rows, 1, 1, generator=g)}
        actions, memory, _ = a.act(scene([[[0.0, 0]]] * rows, start=t == 0), memory, u, True)
        z.append(actions["agents"].flatten() * 10)
    near(torch.stack(z).std(-1), [1.0] * 4, 0.03)
    near(torch.corrcoef(torch.stack(z))[3], [0.6**3, 0.6**2, 0.6, 1], 0.03)
    assert learner().memory(3, CPU) == {"agents": {}}


# --- memory -----------------------------------------------------------------------------------------------------------

BRIGHT = 50.0  # what is seen is 0 or this, whose tanh is 0 or 1
SWAP = [[0.0, 1], [1, 0]]


def remembering(spec=SOLO, slow=None, slow_actor=None, **config):
    """The actor does tanh of the second number it remembers; the critic says Q = h_0 + 2 a. `slow`: what their copies see."""
    a = learner(spec, net=GRU, **{**STILL, **config})
    for net, see in ((a.actor, None), (a.target_actor.module, slow_actor)):
        set_memory(net, see)
        set_layer(net.out, [[0.0, 1]])
    for judge, see in ((a.critics[0], None), (a.target.module[0], slow)):
        set_memory(judge, see)
        set_layer(judge.head.body, [[1.0, 0, 2]])
    return a


def lights(*pairs):
    return [[x * BRIGHT for x in pair] for pair in pairs]


# critic's memory before: 1, 0. Then 1/2, 1/2 and 3/4, 1/4 in the burn-in; 3/8, 1/8 and 3/16, 9/16; at last 19/32, 25/32
# actor's: 0, 1. Then 0, 1 and 1/2, 1/2; 1/4, 1/4 and 1/8, 5/8; at last 9/16, 13/16
LOOKS, LATER = lights((0, 1), (1, 0), (0, 0), (0, 1)), lights((1, 0), (0, 0), (0, 1), (1, 1))


def remembered(action=((0.0,), (0.0,), (0.25,), (0.5,)), **more):
    batch = happened(LOOKS, LATER, [list(x) for x in action], [JUNK, JUNK, 1.0, 2], **more)
    batch.memory = {
        "agents": {"actor": {"hidden": torch.tensor([[[0.0, 1]]])}, "critic": {"0": {"hidden": torch.tensor([[[1.0, 0]]])}}}
    }
    return batch


def test_the_burn_in_brings_memories_up_to_date_and_is_not_learnt_from(told):
    """burn_in 2 and chunk 2, each net by its own memory: Q = 3/8 + 2/4, 3/16 + 1. Next 3/16 + 2 tanh 5/8, 19/32 + 2 tanh 13/16;
    the actor's own are tanh 1/4 and tanh 5/8."""
    a = remembering(burn_in=2, chunk=2)
    assert a.feed.length == 4
    learn(a, remembered())
    near(told[0]["value"].flatten(), [7 / 8, 19 / 16], 1e-6)
    then = [3 / 16 + 2 * math.tanh(5 / 8), 19 / 32 + 2 * math.tanh(13 / 16)]
    near(told[0]["target"].flatten(), [1 + then[0] / 2, 2 + then[1] / 2], 1e-6)
    near(told[0]["actor"].flatten(), [-3 / 8 - 2 * math.tanh(1 / 4), -3 / 16 - 2 * math.tanh(5 / 8)], 1e-6)
    lengths = [
        learner(net=GRU).feed.length,
        learner(net=GRU, chunk=3, burn_in=0, n_step=3).feed.length,
        learner(chunk=3).feed.length,
    ]
    assert lengths == [4 + 16, 5, 3]


def test_copies_remember_the_same_steps_by_themselves(told):
    """The critic's copy sees the lights swapped: 1, 0; 1/2, 1/2; 1/4, 1/4; 5/8, 1/8; 13/16, 9/16. The actor's: 1/2, 1/2;
    1/4, 3/4; 1/8, 3/8; 9/16, 3/16; 25/32, 19/32."""
    a = remembering(slow=SWAP, slow_actor=SWAP, burn_in=2, chunk=2)
    learn(a, remembered())
    then = [5 / 8 + 2 * math.tanh(3 / 16), 13 / 16 + 2 * math.tanh(19 / 32)]
    near(told[0]["target"].flatten(), [1 + then[0] / 2, 2 + then[1] / 2], 1e-6)
    near(told[0]["value"].flatten(), [7 / 8, 19 / 16], 1e-6)


def test_memories_are_empty_where_an_episode_starts(told):
    """In step 3: 0, 1/2 and then 1/2, 3/4 of both; the true next moment of step 2 still remembers."""
    a = remembering(burn_in=2, chunk=2)
    learn(a, remembered(start=[N, N, N, Y], over=[N, N, Y, N]))
    near(told[0]["value"].flatten(), [7 / 8, 1.0], 1e-6)
    then = [3 / 16 + 2 * math.tanh(5 / 8), 1 / 2 + 2 * math.tanh(3 / 4)]
    near(told[0]["target"].flatten(), [1 + then[0] / 2, 2 + then[1] / 2], 1e-6)
    near(told[0]["actor"].flatten()[1], -2 * math.tanh(1 / 2), 1e-6)


def test_critics_remember_what_is_seen_and_not_what_is_done(told):
    """What was done before changes nothing of what is said of now."""
    for before in (0.0, 0.9):
        a = remembering(burn_in=2, chunk=2)
        learn(a, remembered(((before,), (-before,), (before,), (0.5,))))
        near(told[-1]["value"].flatten()[1], 19 / 16, 1e-6)


def test_slopes_end_at_the_burn_in():
    """Dim lights are seen in step 0 alone: what moves the weights that see comes from there, in actor and critic."""
    for burn_in, chunk, active in ((1, 1, False), (0, 2, True)):
        a = remembering(burn_in=burn_in, chunk=chunk, lr_critic=None)
        batch = happened([[0.5, 0.5], [0, 0]], [[0.0, 0]] * 2, [[0.0], [0]], [0.0, 5], terminated=Y)
        batch.memory = remembered().memory
        learn(a, batch)
        for optimiser, net in ((a.actor_optimiser, a.actor), (a.critic_optimiser, a.critics[0])):
            assert (slope(optimiser, net.body.weights[0]).abs().max() > 1e-3) == active


@torch.no_grad()
def test_what_acting_leaves_in_the_memories():
    """Of the actor, and where it explores of the critics as well: half of what was, and of the light that is seen."""
    a = remembering()
    frame, memory = scene([[[0.0, BRIGHT]]]), remembered().memory
    for explore, critic in ((True, [0.5, 0.5]), (False, [1.0, 0])):
        actions, after, _ = a.act(frame, memory, {"agents": torch.full((1, 1, 1), 0.5)}, explore)
        near(actions["agents"].flatten(), [math.tanh(1.0)])
        near(after["agents"]["actor"]["hidden"].flatten(), [0.0, 1])
        near(after["agents"]["critic"]["0"]["hidden"].flatten(), critic)
    assert set(learner(cls=TD3, net=GRU).memory(1, CPU)["agents"]["critic"]) == {"0", "1"}


def test_one_critic_for_all_forgets_when_an_episode_starts_whoever_is_there(told):
    """Agent 0 is there later: it is agent 1 that starts in step 1, in another episode. What was remembered is of no matter."""
    spec, said = world(2, obs=1, common=True, mortal=True), []
    for held in (0.0, 1.0):
        a = learner(spec, net=GRU, critic="world", chunk=2, burn_in=0)
        seen = torch.ones(2, 1, 2, 1)
        batch = happened(seen, seen, 0.0, 0.0, over=[Y, N], alive=[[[Y, Y]], [[N, Y]]], start=[[[N, N]], [[N, Y]]], spec=spec)
        batch.memory = tree_map(lambda x: torch.full_like(x, held), a.memory(1, CPU))  # noqa: B023
        learn(a, batch)
        said.append(told[-1]["value"].flatten())
    assert said[0][0] != said[1][0]
    assert said[0][1] == said[1][1]


# --- whole worlds -----------------------------------------------------------------------------------------------------


def loop_of(name, env, rows=8, /, common=False, **sections):
    algo = {"capacity": 2000, "learning_starts": 8, "batch": 8, "every": 32, "rollout": 8, "gamma": 0.5, "random_steps": 0}
    algo |= sections.pop("algo", {})
    run = {"envs": rows, "quiet": True, "steps": 10_000, **({"reward": "team-mean"} if common else {})}
    return Loop(resolve(Settings(name, env, run, {**sections, "algo": algo})))


def batch_of(loop, steps):
    batch = loop.collector.collect(steps)
    loop.shaping(batch)
    a = loop.learners[0]
    batch.noise = torch.rand(a.draws(*batch.over.shape), generator=torch.Generator().manual_seed(5))
    return batch


REMEMBERS = {"memory": "gru", "memory_width": 8, "hidden": (8,)}
POLICY = {"others": "policy"}
BLIND = [  # algorithm, world, paid alike, its settings, its nets'
    ("ddpg", "probe_deaths", False, {"n_step": 3, "chunk": 4, "normalise_reward": True}, {}),
    ("maddpg", "probe_deaths", False, {"n_step": 2, "chunk": 4}, {}),
    ("maddpg", "probe_deaths", True, {"chunk": 8, "normalise_reward": True}, {}),
    ("maddpg", "probe_deaths", False, {"chunk": 8, **POLICY}, {}),
    ("maddpg", "probe_deaths", True, {"chunk": 8, **POLICY}, {}),
    ("matd3", "probe_deaths", True, {"chunk": 4, "delay": 1, "critic_input": "agent"}, {}),
    ("itd3", "probe_deaths", False, {"n_step": 2, "chunk": 4, "delay": 1}, REMEMBERS),
    ("matd3", "probe_deaths", False, {"chunk": 4, "delay": 1}, REMEMBERS),
    ("ddpg", "probe_turns", False, {"normalise_reward": True}, {}),
    ("maddpg", "probe_turns", False, {**POLICY}, {}),
    ("maddpg", "probe_turns", False, {"chunk": 8}, REMEMBERS),
]


@pytest.mark.parametrize(("algo", "env", "common", "config", "net"), BLIND)
def test_who_does_not_act_is_in_no_loss_and_no_statistic(algo, env, common, config, net):
    """Whatever the dead see, remember, do and are paid, and whatever those who wait do, the weights come out the same."""
    loop, twin = (loop_of(algo, env, 4, common=common, algo=config, net={"hidden": (8,), **net}) for _ in range(2))
    a, b = loop.learners[0], twin.learners[0]
    loop.collector.collect(5)
    batch = batch_of(loop, a.feed.length)
    spoilt = tree_map(torch.clone, batch)
    view, after = batch.frame["agents"], batch.next["agents"]
    gone, waits = ~view.alive, ~view.active
    assert waits.any()
    assert gone.any() == (env == "probe_deaths")
    spoilt.actions["agents"][waits] = 1 - spoilt.actions["agents"][waits]
    spoilt.frame["agents"].obs[gone] = 1e3
    spoilt.next["agents"].obs[gone & ~after.alive] = -1e3
    spoilt.learner_reward["agents"][gone] = 1e3
    for x in tree_leaves(spoilt.memory):
        x[gone[0]] = 9  # who is not there at first arrives with an empty memory
    for x, given in ((a, batch), (b, spoilt)):
        x.update_statistics(given)
        learn(x, given)
    assert all(torch.equal(x, b.state_dict()[k]) for k, x in a.state_dict().items())
    assert a.actor_optimiser.steps == a.critic_optimiser.steps == 1
    assert (a.actor_optimiser.first != 0).any()


@pytest.mark.parametrize("common", [False, True])
@pytest.mark.parametrize("env", ["probe_deaths", "probe_turns", "simple_spread"])
def test_what_is_remembered_in_an_update_is_what_was_remembered_when_acting(env, common):
    loop = loop_of("maddpg", env, net=REMEMBERS, common=common)
    a = loop.learners[0]
    loop.collector.collect(3)
    batch = batch_of(loop, 7)
    a.burn_in = 0
    with torch.no_grad():
        samples = Samples(a, batch)
        params, critic = a._actor_output(a.actor, samples)[-1], a._features(a.critics[0], 0, samples)[-1]
    left = loop.collector.memory["agents"]
    kept = left["critic"]["0"]["hidden"]
    assert min(x.abs().max() for x in (params, critic)) > 1e-4
    torch.testing.assert_close(a.actor.out(left["actor"]["hidden"]), params, rtol=0, atol=1e-6)
    torch.testing.assert_close(kept, critic.expand_as(kept), rtol=0, atol=1e-6)


def test_the_replay_holds_what_was_paid_at_the_time(tmp_path):
    """A shaper that pays 7 where the world pays 1, and 9 later on."""
    (tmp_path / "mine.py").write_text("def paid(reward, obs, step, steps):\n    return reward * 0 + 7 + (step > 0) * 2\n")
    loop = loop_of("ddpg", "probe_constant", 4, algo={"shaper": f"{tmp_path}/mine.py:paid"})
    for _ in range(2):
        loop.iterate()
    kept = loop.replay[:, :][3]["agents"]
    assert (kept[:8].unique().tolist(), kept[8:].unique().tolist()) == ([7], [9])


NAMES = "learning_rate_actor learning_rate_critic loss_actor loss_critic predictQ td_error noise target_lag"


@pytest.mark.parametrize("algo", ["iddpg", "matd3"])
def test_a_run_learns_and_says_so(algo):
    """Of speaker and listener, each with its own learner, who ask each other; with memory and by priority."""
    loop = loop_of(algo, "simple_speaker_listener", 4, algo={"prioritised": True, "n_step": 2}, net=REMEMBERS)
    for _ in range(8):
        loop.iterate()
    updates = (256 - 21 * 4) // 32  # of sequences of 4 + 16 + 1 steps
    for a in loop.learners:
        assert (a.critic_optimiser.steps, a.target.updates, a.target_actor.updates) == (updates,) * 3
        assert a.actor_optimiser.steps == (updates if algo == "iddpg" else updates // 2)
    told = loop.means.take()
    names = [*NAMES.split(), "grad_norm_actor", "grad_norm_critic"]
    assert set(told) == {f"{g}/{x}" for g in ("speaker", "listener") for x in names}
    assert all(math.isfinite(x) for x in told.values())
