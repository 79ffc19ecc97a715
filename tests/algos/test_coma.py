"""COMA's baseline, returns, masks and options, with the numbers worked out on paper.

The nets of `learner` are one layer, set by hand. The critic says that choices are worth what an agent sees, Q(o, a) = o[a]; the
policy has both choices as likely, whatever it sees, and no floor. gamma = lambda = 1/2, and Adam's first step is by the rate,
1/4, unless a test says otherwise. A draw among equals is the first choice: the noise is the same everywhere. What the losses
are given is written down by `told`.
"""

import inspect
import math
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import pytest
import torch

from shoal.algos.base import Replay, Rollout
from shoal.algos.coma import COMA
from shoal.kernels import native
from shoal.nets.layers import NetConfig
from shoal.ops import losses, values
from shoal.ops.schedules import Now
from shoal.spec import Batch, Box, Discrete, EnvSpec, Frame, Group, MultiDiscrete, Result, UserError, View
from shoal.tree import tree_leaves, tree_map
from shoal.training.loop import Loop
from shoal.training.settings import Settings, resolve

JUNK = 4096.0  # stands where nothing may look
Y, N = True, False
LOG_2 = math.log(2)
KINDS = [False] if native.why_not() else [False, True]
HALF_WAY = Now(50, 100, 5)
PLAIN = {
    "rollout": 3,
    "gamma": 0.5,
    "lam": 0.5,
    "epsilon": 0.0,
    "epsilon_last": 0.0,
    "epsilon_steps": 100,
    "entropy": 0.0,
    "advantage_scope": "none",
    "dueling": False,
    "target_every": 1000,
    "target_tau": 1.0,
    "huber": None,
    "lr": 0.25,
    "grad_clip": None,
    "normalise_obs": False,
    "normalise_value": False,
}


def agent_group(n=1, action=None, name="agents", obs=None, **more):
    action = action or Discrete(2)
    return Group(name, "t", tuple(f"{name}_{i}" for i in range(n)), obs or (sum(action.sizes),), action, **more)


def world(n=1, action=None, **more):
    group = {k: more.pop(k) for k in ("mortal", "masked", "obs") if k in more}
    return EnvSpec((agent_group(n, action, **group),), **{"common": True, **more})


def clear(net):
    with torch.no_grad():
        for p in net.parameters():
            p.zero_()


def learner(spec=None, net=None, fused=False, logits=None, **config):
    spec = spec or world()
    nets = NetConfig(**{"hidden": (), **(net or {})})
    groups = tuple(g.name for g in spec.groups)
    a = COMA(spec, groups, COMA.Config(**{**PLAIN, **config}), nets, torch.Generator().manual_seed(0))
    cat_groups = spec.state or sum(g.n * g.obs[0] for g in spec.groups)
    with torch.no_grad():
        for g in groups if nets.memory == "none" else ():
            clear(a.actors[g])
            if logits is not None:
                a.actors[g].net.body.biases[0].copy_(torch.tensor(logits))
            for critic in (a.critics[g], a.target.module[g]):
                clear(critic)
                layer = critic.net.body.weights[0]  # [A, joined observations, own, others' actions, last actions]
                if len(layer) == (width := spec[g].obs[0]):
                    layer[:, cat_groups : cat_groups + width] = torch.eye(width)
    if fused:
        a.fuse()
    return a


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
    q, w, r=0.0, action=0, terminated=N, over=N, alive=Y, alive_tp1=Y, legal=None, legal_tp1=None, start=N, last=None, choices=2
):
    """A batch of steps in which q is seen and then w, and that are paid r. `last`: what was done before the first, one-hot."""
    q, w = steps(q), steps(w)
    there = torch.ones(q.shape[:-1], dtype=torch.bool)
    learner_reward, ended = each(r, there, torch.float), each(terminated, there, torch.bool)
    now, then, begins = (each(x, there, torch.bool) for x in (alive, alive_tp1, start))
    action = torch.as_tensor(action)
    action = action if action.dim() > 3 else each(action, there, torch.long)
    masks = [None if x is None else torch.tensor(x).expand(*there.shape, choices) for x in (legal, legal_tp1)]
    before = torch.zeros(*there.shape[1:], choices) if last is None else torch.tensor(last).float().expand(*there.shape[1:], -1)
    return Batch(
        Frame({"agents": View(q, now, now, begins, masks[0])}),
        Frame({"agents": View(w, then, then, ~there, masks[1])}),
        {"agents": action},
        {"agents": Result(torch.full_like(learner_reward, JUNK), ended)},
        each(over, there, torch.bool)[..., 0],
        {"agents": {}},
        {"agents": {"last": before}},
        {"agents": learner_reward},
        torch.full((there.numel() * choices,), 0.5),
    )


@pytest.fixture
def told(monkeypatch):
    """What was learnt from: of each step of the critic values and goals; of the actor's values, chances, and advantages."""
    seen: dict[str, list[Any]] = {"critic": [], "actor": []}
    error, credit = losses.value_error, values.counterfactual

    def value_error(value, target, huber=None):
        seen["critic"].append({"value": value.detach().clone(), "target": target.clone()})
        return error(value, target, huber)

    def counterfactual(q, probability, played, space):
        out = credit(q, probability, played, space)
        seen["actor"].append({"q": q, "chance": probability, "played": played, "advantage": out})
        assert not out.requires_grad
        return out

    monkeypatch.setattr(losses, "value_error", value_error)
    monkeypatch.setattr(values, "counterfactual", counterfactual)
    return seen


def near(x, y, tol=2e-5):
    x = x.detach() if isinstance(x, torch.Tensor) else torch.tensor(x)
    torch.testing.assert_close(x.double(), torch.tensor(y, dtype=torch.float64), rtol=tol, atol=tol)


def moment(optimiser, param):
    """Adam's first moment of one parameter: a tenth of its first gradient."""
    sizes = [p.numel() for p in optimiser._params]
    k = next(k for k, p in enumerate(optimiser._params) if p is param)
    return optimiser.first.split(sizes)[k].reshape(param.shape)


def inputs(module):
    """What a net is given from now on."""
    seen: list[Any] = []
    module.register_forward_pre_hook(lambda _, args: seen.append(args[0].detach().clone()))
    return seen


# --- options that change one number -----------------------------------------------------------------------------------


@dataclass
class Switch:
    """An option, set or not on top of `base`, with the number that is to be expected of it."""

    batch: dict[str, Any]
    measure: Any  # (learner, what was told, metrics) -> the number
    plain: Any
    value: Any
    switched: Any
    base: Any = None


def goals(a, told, metrics):
    return told["critic"][-1]["target"].flatten()


def first_weights(a, told, metrics):
    """Of the critic, by an agent's own observation, and of the actor."""
    return torch.stack([a.critics["agents"].net.body.weights[0][0, 2], a.actors["agents"].net.body.weights[0][0, 0]])


def target_weight(a, told, metrics):
    return a.target.module["agents"].net.body.weights[0][0, 2]


def epsilon(a, told, metrics):
    assert metrics["epsilon"] == a.epsilon
    return a.epsilon


def entropy_weight(a, told, metrics):
    return a.entropy_weight


def feed(name):
    return lambda a, *_: float(getattr(a.feed, name))


# action 0, worth 1 beside 0, is paid 3; it would be done again, worth 8: G = 3 + 8/2 = 7, the error 6. A = 1 - 1/2. The
# critic's slope is -6 in three weights, of the team's observations, the own one, and the bias; the actor's is -A / 2 in two
ONE = {"q": [[1.0, 0]], "w": [[8.0, 6]], "r": 3.0}
# G_1 = 2 + 16/2 = 10, G_0 = 1 + (8/2 + 10/2) / 2
TWO = {"q": [[1.0, 0], [1, 0]], "w": [[8.0, JUNK], [16, 0]], "r": [1.0, 2]}
AGAIN = {"replay": 10}  # from a replay of so many episodes
SWITCHES = {
    "gamma": Switch(TWO, goals, [5.5, 10], 1.0, [14.0, 18]),  # 1 + (8 + 18) / 2
    "lam": Switch(TWO, goals, [5.5, 10], 1.0, [6.0, 10]),  # 1 + 10/2
    "reward_scale": Switch(TWO, goals, [5.5, 10], 2.0, [7.0, 12]),  # 2 + (8/2 + 12/2) / 2
    "time_limit": Switch({**TWO, "over": [N, Y]}, goals, [5.5, 10], False, [3.5, 2]),  # 1 + (8/2 + 2/2) / 2
    "huber": Switch(ONE, lambda a, told, metrics: metrics["critic_loss"], 18.0, 1.0, 5.5),  # 6^2 / 2; 1 (6 - 1/2)
    "lr": Switch(ONE, first_weights, [1.25, 0.25], 0.5, [1.5, 0.5]),
    "lr_critic": Switch(ONE, first_weights, [1.25, 0.25], 0.5, [1.5, 0.25]),
    "lr_schedule": Switch(ONE, first_weights, [1.25, 0.25], "linear", [1.125, 0.125]),  # half-way
    "lr_last": Switch(ONE, first_weights, [1.125, 0.125], 0.5, [1.1875, 0.1875], {"lr_schedule": "linear"}),
    "weight_decay": Switch(ONE, first_weights, [1.25, 0.25], 0.5, [1.25 - 0.25 * 0.5, 0.25]),
    "grad_clip": Switch(ONE, lambda a, *_: a.critic_optimiser.first.norm(), 0.6 * 3**0.5, 0.5, 0.05),
    "target_every": Switch(ONE, target_weight, 1.0, 1, 1.25),
    "target_tau": Switch(ONE, target_weight, 1.25, 0.25, 1.0625, {"target_every": 1}),
    "epsilon": Switch(ONE, epsilon, 0.0, 0.5, 0.25),  # half-way to 0
    "epsilon_last": Switch(ONE, epsilon, 0.5, 0.25, 0.625, {"epsilon": 1.0}),
    "epsilon_steps": Switch(ONE, epsilon, 0.5, 200, 0.75, {"epsilon": 1.0}),
    "epsilon_schedule": Switch(ONE, epsilon, 0.5, "constant", 1.0, {"epsilon": 1.0}),
    "entropy": Switch(ONE, entropy_weight, 0.0, 0.5, 0.5),  # see test_entropy_is_that_of_the_policy_with_its_floor
    "entropy_schedule": Switch(ONE, entropy_weight, 0.5, "linear", 0.25, {"entropy": 0.5}),
    "entropy_last": Switch(ONE, entropy_weight, 0.25, 0.5, 0.375, {"entropy": 0.5, "entropy_schedule": "linear"}),
    "rollout": Switch(ONE, feed("steps"), 3.0, 7, 7.0),
    "episodes": Switch(ONE, feed("steps"), 3.0, 2, 10.0),  # episodes of at most 5 steps
    "replay": Switch(ONE, feed("capacity"), 50.0, 20, 100.0, AGAIN),
    "batch": Switch(ONE, feed("batch"), 16.0, 4, 4.0, AGAIN),
    "every": Switch(ONE, feed("every"), 16.0 * 5, 12.5, 12.5, AGAIN),  # as many as a batch has
}
ELSEWHERE = {  # option -> the test of it, here or in a file of its own
    "after_death": "tests/algos/test_after_death.py",
    "advantage_scope": "test_advantages_are_scaled_over_a_scope",
    "critic_slices": "test_slices_go_from_the_last_to_the_first_and_are_judged_before_each_step",
    "dueling": "test_a_dueling_critic",
    "last_action": "test_agents_see_what_they_did_last",
    "normalise_obs": "test_observations_are_normalised_by_what_was_seen_before_the_update",
    "normalise_reward": "test_rewards_are_divided_by_the_root_mean_square_of_all_so_far",
    "normalise_value": "test_the_critic_speaks_in_the_units_of_the_returns_seen",
    "normaliser": "test_a_normaliser_of_the_users_own",
    "shaper": "test_agents_are_paid_the_mean_of_their_team_and_what_a_shaper_makes_of_it",
}


def test_every_option_has_a_number_of_its_own():
    """A new field of the Config fails here until it is listed in SWITCHES, or in ELSEWHERE with the test that sees it."""
    options = {f.name for f in fields(COMA.Config)}
    assert set(SWITCHES) | set(ELSEWHERE) == options
    assert not set(SWITCHES) & set(ELSEWHERE)
    for option, test in ELSEWHERE.items():
        if test.endswith(".py"):
            source = (Path(__file__).parents[2] / test).read_text()
        else:
            source = inspect.getsource(globals()[test])
        assert option in source, f"{test} says nothing of {option}"


@pytest.mark.parametrize("fused", KINDS)
@pytest.mark.parametrize("option", SWITCHES)
def test_switching_an_option_changes_the_number_expected_by_hand(option, fused, told):
    s = SWITCHES[option]
    for config, expected in (({}, s.plain), ({option: s.value}, s.switched)):
        a = learner(world(horizon=5), None, fused, **{**(s.base or {}), **config})
        a.set_schedules(HALF_WAY)
        metrics = a.update(happened(**s.batch))
        near(s.measure(a, told, metrics), expected)
    assert s.plain != s.switched


def test_what_it_is_fed():
    assert learner(rollout=7).feed == Rollout(7)
    assert learner(world(horizon=5), episodes=3).feed == Rollout(15)
    a = learner(world(horizon=5), replay=10, batch=4)
    assert a.feed == Replay(4, 5, 20, 20, 50, 3, whole=True)  # nothing before there is a batch of episodes
    assert learner(world(horizon=5), replay=10, batch=4, every=7, episodes=2).feed == Replay(4, 5, 20, 7, 50, 10, whole=True)
    for asked in ("episodes", "replay"):
        with pytest.raises(UserError, match=f"--algo.{asked} needs a world whose episodes have a longest length"):
            learner(**{asked: 2})


@pytest.mark.parametrize(
    ("option", "value"),
    [
        *((x, 0) for x in ("rollout", "episodes", "batch", "every", "epsilon_steps", "target_every")),
        *((x, 0.0) for x in ("lr", "lr_critic", "huber", "grad_clip", "reward_scale")),
        *((x, 1.1) for x in ("gamma", "lam", "epsilon", "epsilon_last", "entropy_last", "lr_last", "target_tau")),
        *((x, -0.1) for x in ("gamma", "lam", "epsilon", "epsilon_last", "entropy_last", "lr_last", "target_tau")),
        *((x, -1) for x in ("replay", "entropy", "critic_slices", "weight_decay")),
    ],
)
def test_what_is_out_of_bounds_is_refused_by_its_flag(option, value):
    with pytest.raises(UserError, match=f"--algo.{option.replace('_', '-')} is "):
        COMA.Config(**{option: value})


def test_what_is_refused():
    with pytest.raises(
        UserError, match=r"COMA needs agents that are paid alike: ask for --reward team-mean or --reward team-sum"
    ):
        learner(world(2, common=False))
    with pytest.raises(UserError, match="COMA cannot play turn-based worlds"):
        learner(world(2, mortal=True, turns=True))
    with pytest.raises(UserError, match=r"--net.trunk shared does not go with COMA"):
        learner(net={"trunk": "shared"})
    with pytest.raises(UserError, match=r"--net.attention does not go with COMA"):
        learner(net={"attention": "actor"})
    for group, sentence in (
        (Group("agents", "t", ("a",), (2,), Box((-1.0,), (1.0,))), "COMA takes discrete and multi-discrete actions"),
        (Group("agents", "t", ("a",), (3, 32, 32), Discrete(2)), "COMA's critic takes numbers, and agents see pictures here"),
    ):
        with pytest.raises(UserError, match=sentence):
            COMA(EnvSpec((group,), common=True), ("agents",), COMA.Config(), NetConfig(), torch.Generator())


# --- the counterfactual baseline --------------------------------------------------------------------------------------

PAYOFF = [[8.0, 0], [2, 4]]  # of agent 0's choice and agent 1's
LIKELY = [math.log(3), 0.0]  # 3/4 and 1/4; half of it replaced by 1/2 and 1/2: 5/8 and 3/8


def matrix_game(**config):
    """A critic that knows the game. It sees two observations, its own, two choices of each, and those before."""
    a = learner(world(2, obs=(1,)), logits=LIKELY, **{"epsilon": 0.5, **config})
    with torch.no_grad():
        for critic in (a.critics["agents"], a.target.module["agents"]):
            weights, payoff = critic.net.body.weights[0], torch.tensor(PAYOFF)
            weights[:, 5:7] = payoff  # what agent 0's choices are worth, by agent 1's
            weights[:, 3:5] = payoff.T
    return a


def every_joint_action():
    zeros = torch.zeros(1, 4, 2, 1)
    return happened(zeros, zeros, 0.0, [[[0, 0], [0, 1], [1, 0], [1, 1]]], terminated=Y)


def test_what_an_agent_added_itself(told):
    """Agent 0's policy is worth 5/8 8 + 3/8 2 = 5.75 beside agent 1's first choice, 3/8 4 = 1.5 beside its second; agent 1's is
    worth 5/8 8 = 5 beside agent 0's first choice and 5/8 2 + 3/8 4 = 2.75 beside its second."""
    a = matrix_game()
    metrics = a.update(every_joint_action())
    near(told["critic"][0]["value"][0], [[8.0, 8], [0, 0], [2, 2], [4, 4]])
    near(told["actor"][0]["chance"], [[[[5 / 8, 3 / 8]] * 2] * 4])
    advantage = [[2.25, 3], [-1.5, -5], [-3.75, -0.75], [2.5, 1.25]]
    near(told["actor"][0]["advantage"][0], advantage)
    near(metrics["advantage"], (2.25 + 3 + 1.5 + 5 + 3.75 + 0.75 + 2.5 + 1.25) / 8)
    first, second = math.log(5 / 8), math.log(3 / 8)  # the floor is in the log-probability as well
    said = [2.25 * first, 3 * first, -1.5 * first, -5 * second, -3.75 * second, -0.75 * first, 2.5 * second, 1.25 * second]
    near(metrics["policy_loss"], -sum(said) / 8)
    near(metrics["entropy"], -5 / 8 * first - 3 / 8 * second)


def test_the_slope_of_the_policy_is_that_of_its_log_probability_alone():
    """Actions 0 and 1: A = -1.5 and -5. d pi / d logit = 3/4 1/4 / 2 = 3/32: -A (3/32) / (5/8) = 0.225 of agent 0 and
    A (3/32) / (3/8) = -1.25 of agent 1, of which the mean. Were the baseline in it, it would be another."""
    a = matrix_game()
    batch = every_joint_action()
    for x in (batch.frame, batch.next):
        x.views["agents"] = tree_map(lambda t: t[:, 1:2], x["agents"])
    batch = Batch(
        batch.frame,
        batch.next,
        {"agents": batch.actions["agents"][:, 1:2]},
        {"agents": tree_map(lambda t: t[:, 1:2], batch.results["agents"])},
        batch.over[:, 1:2],
        {},
        {"agents": {"last": torch.zeros(1, 2, 2)}},
        {"agents": batch.learner_reward["agents"][:, 1:2]},
        torch.full((4,), 0.5),
    )
    metrics = a.update(batch)
    slope = (0.225 - 1.25) / 2
    near(moment(a.actor_optimiser, a.actors["agents"].net.body.biases[0]), [0.1 * slope, -0.1 * slope], 1e-6)
    near(moment(a.actor_optimiser, a.actors["agents"].net.body.ids), [[0.01125, -0.01125], [-0.0625, 0.0625]], 1e-6)
    # the critic's values are 0, as its goals are: had the actor's loss reached it, it would have moved
    near(metrics["grad_norm_critic"], 0.0)
    assert a.critic_optimiser.first.abs().max() == 0


def test_entropy_is_that_of_the_policy_with_its_floor():
    """pi = 5/8, 3/8: the slope of -w H in the first logit is w (3/32) log(5/3). All advantages are 0."""
    a = learner(logits=LIKELY, epsilon=0.5, entropy=0.25)
    metrics = a.update(happened([[0.0, 0]], [[0.0, 0]], terminated=Y))
    near(metrics["policy_loss"], 0.0)
    near(metrics["entropy"], -5 / 8 * math.log(5 / 8) - 3 / 8 * math.log(3 / 8))
    slope = 0.25 * 3 / 32 * math.log(5 / 3)
    near(moment(a.actor_optimiser, a.actors["agents"].net.body.biases[0]), [0.1 * slope, -0.1 * slope], 1e-7)


def test_a_critic_does_not_see_its_own_agents_action(told):
    """Change what agent 1 of three did in step 0: its own critic hears nothing of it then, the others do; all do a step later,
    when it is what was done last."""
    spec = world(3)
    batch = happened(torch.ones(3, 1, 3, 2), torch.ones(3, 1, 3, 2), 1.0, [[[0, 1, 0]], [[1, 0, 0]], [[0, 0, 1]]])
    other = tree_map(torch.clone, batch)
    other.actions["agents"][0, 0, 1] = 0
    seen, said = [], []
    for given in (batch, other):
        a = learner(spec)
        with torch.no_grad():
            for p in a.critics.parameters():
                p.copy_(torch.randn(p.shape, generator=torch.Generator().manual_seed(p.numel())))
        heard = inputs(a.critics["agents"])
        a.update(given)
        seen.append(heard[0])  # [T, B, N, *]
        said.append(told["actor"][-1]["q"])
    differs = (seen[0] != seen[1]).any(-1)[:, 0]
    assert differs.tolist() == [[Y, N, Y], [Y, Y, Y], [N, N, N]]
    assert (said[0] != said[1]).any(-1)[:, 0].tolist() == [[Y, N, Y], [Y, Y, Y], [N, N, N]]
    # observations of all, one's own, actions without one's own, last actions
    assert seen[0][1, 0, 1].tolist() == [1] * 6 + [1] * 2 + [0, 1, 0, 0, 1, 0] + [1, 0, 0, 1, 1, 0]
    assert seen[0][1, 0, 2].tolist() == [1] * 6 + [1] * 2 + [0, 1, 1, 0, 0, 0] + [1, 0, 0, 1, 1, 0]


def test_unlike_groups_do_not_see_their_own_either():
    """One of two choices and two of three and two: columns 0 1 | 2 ... 6 | 7 ... 11."""
    groups = agent_group(1, Discrete(2), "a"), agent_group(2, MultiDiscrete((3, 2)), "b", obs=(4,))
    a = learner(EnvSpec(groups, common=True))
    assert a.others_a.tolist() == [[0, 0, *[1] * 10]]
    assert a.others_b.tolist() == [[1, 1, *[0] * 5, *[1] * 5], [1, 1, *[1] * 5, *[0] * 5]]
    yes = torch.ones(1, 1, 2, dtype=torch.bool)
    views = {
        "a": View(torch.full((1, 1, 1, 2), 7.0), *[yes[..., :1]] * 3),
        "b": View(torch.full((1, 1, 2, 4), 9.0), *[yes] * 3),
    }
    batch = Batch(
        Frame(views),
        Frame(views),
        {"b": torch.tensor([[[[2, 1], [0, 0]]]]), "a": torch.tensor([[[1]]])},
        {g: Result(torch.zeros(1, 1, n), torch.ones(1, 1, n).bool()) for g, n in (("a", 1), ("b", 2))},
        torch.ones(1, 1).bool(),
        {},
        {"a": {"last": torch.zeros(1, 1, 2)}, "b": {"last": torch.zeros(1, 2, 5)}},
        {"b": torch.zeros(1, 1, 2), "a": torch.zeros(1, 1, 1)},
        torch.full((12,), 0.5),
    )
    assert a.draws(1, 1) == 12
    heard = {g: inputs(a.critics[g]) for g in ("a", "b")}
    a.update(batch)
    state, first, second = [7.0] * 2 + [9.0] * 8, [0, 0, 1, 0, 1], [1, 0, 0, 1, 0]
    assert heard["a"][0][0, 0, 0].tolist() == [*state, 7, 7, 0, 0, *first, *second, *[0] * 12]
    assert heard["b"][0][0, 0, 0].tolist() == [*state, *[9] * 4, 0, 1, *[0] * 5, *second, *[0] * 12]
    assert heard["b"][0][0, 0, 1].tolist() == [*state, *[9] * 4, 0, 1, *first, *[0] * 5, *[0] * 12]


def test_speaker_and_listener_do_not_see_their_own():
    loop = loop_of("simple_speaker_listener", 4, algo={"rollout": 2})
    (a,) = loop.learners
    assert a.groups == ("speaker", "listener")
    heard = {g: inputs(a.critics[g]) for g in a.groups}
    batch = batch_of(loop, 2)
    a.update(batch)
    hot = {g: values.one_hot(batch.actions[g], a.spaces[g]) for g in a.groups}
    for g, blank in (("speaker", "listener"), ("listener", "speaker")):
        actions = heard[g][0][..., 14 + batch.frame[g].obs.shape[-1] :][..., :8]
        parts = {"speaker": actions[..., :3], "listener": actions[..., 3:]}
        assert (parts[g] == 0).all()
        assert torch.equal(parts[blank], hot[blank])


# --- returns ----------------------------------------------------------------------------------------------------------


def test_returns_of_all_lengths_with_ends_at_unequal_times(told):
    """Three steps paid 1, 2, 4, after which the choice of the second was worth 8, 16, 32: G_2 = 4 + 16, G_1 = 2 + (8 + 10) / 2,
    G_0 = 1 + (4 + 5.5) / 2. Rows: no end; terminated in step 1: G_1 = 2, G_0 = 1 + (4 + 1) / 2; cut off in step 1, where 16 is
    what would be drawn: G_1 = 2 + 8, G_0 = 1 + (4 + 5) / 2. What was done next is the second choice; what would be drawn where
    nothing was done any more is the first."""
    a = learner(logits=[50.0, -50.0])
    w = torch.full((3, 3, 2), JUNK)
    for t, x in enumerate((8.0, 16, 32)):
        w[t, :, 1] = x
    w[2, :, 0], w[2, :, 1] = 32.0, JUNK  # the rollout ends
    w[1, 2] = torch.tensor([16.0, JUNK])  # cut off
    w[1, 1] = JUNK  # dead
    batch = happened(torch.zeros(3, 3, 2), w, [1.0, 2, 4], 1, terminated=[[N] * 3, [N, Y, N], [N] * 3])
    batch.over = torch.tensor([[N] * 3, [N, Y, Y], [N] * 3])
    a.update(batch)
    near(told["critic"][0]["target"][..., 0], [[5.75, 3.5, 5.5], [11, 2, 10], [20, 20, 20]])


def test_next_actions_are_the_stored_ones_and_drawn_where_there_are_none():
    """Two agents and four steps, cut off in step 1. Noise that is larger for the second choice draws it, where asked."""
    a = learner(world(2))
    actions = torch.tensor([[[0, 1]], [[1, 0]], [[0, 0]], [[1, 0]]])
    batch = happened(torch.zeros(4, 1, 2, 2), torch.zeros(4, 1, 2, 2), 0.0, actions, over=[N, Y, N, N])
    batch.frame["agents"].start[2] = True
    noise = torch.full((4, 1, 2, 2), 0.5)
    noise[1, 0, 0, 1] = noise[3, 0, 1, 1] = noise[2, 0, 1, 1] = noise[0, 0, 0, 1] = 0.9
    batch.noise = noise.flatten()
    heard = inputs(a.target.module["agents"])
    a.update(batch)
    (seen,) = heard  # [T, B, N, 4 + 2 + 4 + 4]
    done, before = seen[:, 0, :, 6:10], seen[:, 0, :, 10:]
    one, two = [1, 0], [0, 1]
    none = [0, 0]
    # agent 0's critic sees agent 1's next, and the other way round
    assert done[:, 0].tolist() == [[*none, *one], [*none, *one], [*none, *one], [*none, *two]]
    assert done[:, 1].tolist() == [[*two, *none], [*two, *none], [*two, *none], [*one, *none]]
    hot = [[*one, *two], [*two, *one], [*one, *one], [*two, *one]]
    assert before[:, 0].tolist() == before[:, 1].tolist() == hot  # what was done now is what was done last then


def test_a_draw_goes_by_the_policy_with_its_floor_and_what_is_legal():
    """Of 3/4 and 1/4 with half a floor, 5/8; the third is never legal, and next neither is the first for agent 1."""
    a = learner(world(2, Discrete(3), masked=True), logits=[math.log(3), 0.0, 9.0], epsilon=0.5)
    rows = 4000
    legal = torch.tensor([[Y, Y, N], [N, Y, N]]).expand(1, rows, 2, 3)
    batch = happened(torch.zeros(1, rows, 2, 3), torch.zeros(1, rows, 2, 3), choices=3)
    batch.frame["agents"].legal = torch.tensor([Y, Y, N]).expand(1, rows, 2, 3)
    batch.next["agents"].legal = legal
    assert a.draws(1, rows) == rows * 6
    batch.noise = torch.rand(rows * 6, generator=torch.Generator().manual_seed(0))
    heard = inputs(a.target.module["agents"])
    a.update(batch)
    done = heard[0][0, :, :, 9:15]  # six observations, three own
    near(done[:, 1, :3].mean(0), [5 / 8, 3 / 8, 0], 0.02)  # agent 1 sees what agent 0 would do
    assert (done[:, 0, 3:] == torch.tensor([0.0, 1, 0])).all()


def test_the_dead_do_nothing_next():
    """Agent 1 dies in step 0, and is there no more when the rollout ends: its place is zeros, drawn or stored."""
    a = learner(world(2, mortal=True))
    zeros = torch.zeros(2, 1, 2, 2)
    batch = happened(
        zeros, zeros, 0.0, 1, terminated=[[[N, Y]], [[N, N]]], alive=[[[Y, Y]], [[Y, N]]], alive_tp1=[[[Y, N]]] * 2
    )
    heard, now = inputs(a.target.module["agents"]), inputs(a.critics["agents"])
    a.update(batch)
    assert heard[0][:, 0, 0, 6:10].tolist() == [[0, 0, 0, 0]] * 2
    assert heard[0][:, 0, 1, 6:10].tolist() == [[0, 1, 0, 0], [1, 0, 0, 0]]  # stored, then drawn
    assert now[0][:, 0, 0, 6:10].tolist() == [[0, 0, 0, 1], [0, 0, 0, 0]]
    assert heard[0][1, 0, 0, 10:].tolist() == [0, 1, 0, 0]


LIVES = {
    # agent 1: terminated -> 1 + 0; goes on -> 1 + 8/2, with what follows; not there -> in no loss
    "dies": (Y, [[Y, Y], [Y, N]], [1.0, 2]),
    "goes on": (N, [[Y, Y], [Y, Y]], [1 + (8 / 2 + 6 / 2) / 2, 2]),
}


@pytest.mark.parametrize("case", LIVES)
def test_a_death_ends_an_agents_own_return(case, told):
    """Two steps paid 1 and 2; next is worth 8, then 8: G_1 = 2 + 4, G_0 = 1 + (4 + 3) / 2 where it goes on."""
    ended, alive, expected = LIVES[case]
    a = learner(world(2, mortal=True), after_death="own")
    w = torch.full((2, 1, 2, 2), 8.0)
    now, then = torch.tensor(alive)[:, None], torch.tensor([alive[1], alive[1]])[:, None]
    batch = happened(torch.zeros(2, 1, 2, 2), w, [1.0, 2], terminated=[[[N, ended]], [[N, N]]], alive=now, alive_tp1=then)
    a.update(batch)
    near(told["critic"][0]["target"][:, 0, 0], [4.5, 6])
    near(told["critic"][0]["target"][0, 0, 1], expected[0])


def test_an_agent_that_is_cut_off_alone_is_bootstrapped(told):
    """Agent 1 leaves without having terminated, and agent 0 goes on: its last observation is worth 8 to it, 1 + 8/2."""
    a = learner(world(2, mortal=True), after_death="own")
    w = torch.full((2, 1, 2, 2), 8.0)
    batch = happened(torch.zeros(2, 1, 2, 2), w, [1.0, 2], alive=[[[Y, Y]], [[Y, N]]], alive_tp1=[[[Y, N]]] * 2)
    a.update(batch)
    near(told["critic"][0]["target"][0, 0], [4.5, 5])


def test_nothing_is_returned_from_after_an_agent_is_gone(told):
    """Whatever is paid in step 1 to an agent that left in step 0, and whether it terminated or not."""
    for ended in (N, Y):
        for junk in (0.0, JUNK):
            a = learner(world(2, mortal=True), after_death="own")
            zeros = torch.zeros(2, 1, 2, 2)
            gone = {"alive": [[[Y, Y]], [[Y, N]]], "alive_tp1": [[[Y, N]]] * 2, "terminated": [[[N, ended]], [[N, N]]]}
            a.update(happened(zeros, zeros, [[[1.0, 1]], [[2, junk]]], **gone))
            near(told["critic"][-1]["target"][0, 0], [1.5, 1])


def test_what_is_not_filled_is_in_nothing(told):
    """Rows of three steps, of which two and three belong to episodes: G_1 = 2, G_0 = 1 + (8/2 + 2/2) / 2 in the first. Whatever
    lies beyond, the weights come out the same."""
    spec = world(horizon=3)
    filled = torch.tensor([[Y, Y], [Y, Y], [N, Y]])
    done = []
    for junk in (0.0, JUNK):
        a = learner(spec, replay=10, entropy=0.1, advantage_scope="agent", normalise_value=True, epsilon=0.5)
        q, w = torch.ones(3, 2, 2), torch.full((3, 2, 2), 8.0)
        q[..., 1] = w[..., 1] = 0
        r = torch.tensor([[1.0, 1], [2, 2], [4, 4]])
        q[2, 0, 0], w[2, 0, 1], r[2, 0] = junk, junk, junk
        batch = happened(q, w, r, [[0, 0], [0, 1], [1, 0]], terminated=[[N, N], [Y, N], [N, Y]])
        batch.over = torch.tensor([[N, N], [Y, N], [N, Y]])
        batch.filled = filled
        metrics = a.update(batch)
        done.append((a, {k: x.item() for k, x in metrics.items()}))
        assert a.value_norm.count == 5
    (a, one), (b, two) = done
    assert all(torch.equal(x, b.state_dict()[k]) for k, x in a.state_dict().items())
    assert one == two
    plain = learner(spec, replay=10)
    metrics = plain.update(batch)
    # G = 3.5, 2 and, of three steps whose next moments are worth 8 and 0 (its second choice): G_2 = 4,
    # G_1 = 2 + (8/2 + 4/2) / 2, G_0 = 1 + (0 + 5/2) / 2. Values 1, 1 and 1, 0, 1
    near(told["critic"][-1]["target"][filled].flatten(), [3.5, 2.25, 2, 5, 4])
    errors = [2.5, 1.25, 1, 5, 3]
    near(metrics["critic_loss"], sum(e**2 / 2 for e in errors) / 5)
    near(metrics["td_error"], sum(errors) / 5)
    near(metrics["q"], 4 / 5)


# --- the critic's steps ---


def lonely(rewards, **config):
    """Steps that each end, of an agent that sees nothing and starts anew: the critic is its biases, and they are 0."""
    zeros = torch.zeros(len(rewards), 2)
    return learner(**config), happened(zeros, zeros, rewards, terminated=Y, over=Y, start=Y)


def test_slices_go_from_the_last_to_the_first_and_are_judged_before_each_step(told):
    """critic_slices 2 of four steps: 2 and 3 are worth 0; then 0 and 1, worth 1/4 after a step of 1/4. So advantages are half
    of 0 and of 1/4: the other choice is worth 0."""
    a, batch = lonely([2.0, 3, 4, 5], critic_slices=2)
    metrics = a.update(batch)
    assert len(told["critic"]) == 2
    near(told["critic"][0]["value"].flatten(), [0.0, 0])
    near(told["critic"][0]["target"].flatten(), [4.0, 5])
    near(told["critic"][1]["value"].flatten(), [0.25, 0.25])
    near(told["critic"][1]["target"].flatten(), [2.0, 3])
    near(told["actor"][0]["q"][:, 0, 0], [[0.25, 0], [0.25, 0], [0, 0], [0, 0]])
    near(told["actor"][0]["advantage"].flatten(), [0.125, 0.125, 0, 0])
    near(metrics["critic_loss"], ((16 + 25) / 4 + (1.75**2 + 2.75**2) / 4) / 2)
    assert (a.critic_optimiser.steps, a.actor_optimiser.steps) == (2, 1)
    near(metrics["q"], 0.125)


def test_slices_of_which_nothing_is_filled_are_in_no_mean_and_no_clock(told):
    """critic_slices 4 of four steps, of which two, and then one, belong to an episode. 3 is missed by 3; then 2 by 2 - 1/4, as
    the critic has moved by 1/4. Each is a step of the target's clock, and what is not filled is none: copied every 2 steps, the
    target is what the critic is after two, and not after the third."""
    a, batch = lonely([2.0, 3, JUNK, JUNK], critic_slices=4, target_every=2)
    batch.filled = torch.tensor([[Y], [Y], [N], [N]])
    metrics = a.update(batch)
    near(metrics["critic_loss"], (9 + 1.75**2) / 4)
    near(metrics["td_error"], (3 + 1.75) / 2)
    near(metrics["q"], 0.25 / 2)
    assert (a.critic_optimiser.steps, a.target.updates, metrics["target_lag"]) == (2, 2, 0)
    batch.filled = torch.tensor([[Y], [N], [N], [N]])
    assert a.update(batch)["target_lag"] > 0
    assert (a.critic_optimiser.steps, a.target.updates) == (3, 3)


@pytest.mark.parametrize(("slices", "steps"), [(0, 1), (1, 1), (3, 3), (9, 4)])
def test_as_many_steps_of_the_critic_as_slices_and_at_most_as_there_are_steps(slices, steps, told):
    a, batch = lonely([2.0, 3, 4, 5], critic_slices=slices)
    a.update(batch)
    assert (a.critic_optimiser.steps, a.target.updates, len(told["critic"])) == (steps, steps, steps)
    near(torch.cat([x["target"] for x in told["critic"][::-1]]).flatten(), [2.0, 3, 4, 5])


def test_the_target_follows_by_steps_of_the_critic():
    """Every second of four: as the critic is after all. Every third: as it was after three, about 3/4."""
    for every, lags in ((2, False), (3, True), (5, True)):
        a, batch = lonely([20.0, 30, 40, 50], critic_slices=4, target_every=every)
        metrics = a.update(batch)
        assert (metrics["target_lag"] > 0) == lags
        bias = a.target.module["agents"].net.body.biases[0][0].item()
        assert bias == pytest.approx({2: 1.0, 3: 0.75, 5: 0.0}[every], abs=0.1)


def test_goals_are_of_the_target_and_stay_while_the_critic_moves(told):
    """The copy says 3 o: G = 3 + 3 * 8 / 2, whatever the critic says."""
    a = learner()
    with torch.no_grad():
        a.target.module["agents"].net.body.weights[0].mul_(3)
    a.update(happened(**ONE))
    near(told["critic"][0]["target"].flatten(), [15.0])
    near(told["actor"][0]["advantage"].flatten(), [0.5])


def test_a_dueling_critic(told):
    """dueling: a third output is the value, and choices are what they add to it: 4 and -2 about 7 are 10 and 4, A = 10 - 7."""
    a = learner(world(obs=(3,)), dueling=True)
    assert a.critics["agents"].net.body.width_out == 3
    a.update(happened([[4.0, -2, 7]], [[6.0, 0, 5]], 1.0))
    near(told["critic"][0]["value"].flatten(), [10.0])
    near(told["critic"][0]["target"].flatten(), [1 + (5 + 3) / 2])
    near(told["actor"][0]["advantage"].flatten(), [3.0])


@pytest.mark.parametrize(
    ("scope", "expected"),
    [
        ("none", [[1, 5], [3, 7]]),
        ("group", [[-3 / 5**0.5, 1 / 5**0.5], [-1 / 5**0.5, 3 / 5**0.5]]),  # mean 4, variance (9 + 1 + 1 + 9) / 4
        ("agent", [[-1, -1], [1, 1]]),  # 1, 3 and 5, 7
    ],
)
def test_advantages_are_scaled_over_a_scope(scope, expected, monkeypatch):
    """advantage_scope. The second choice is worth nothing, the first twice the advantage."""
    a = learner(world(2), advantage_scope=scope)
    q = torch.zeros(2, 1, 2, 2)
    q[..., 0] = 2 * torch.tensor([[[1.0, 5]], [[3, 7]]])
    seen, total = [], losses.masked_sum
    monkeypatch.setattr(losses, "masked_sum", lambda x, mask: seen.append(x.detach()) or total(x, mask))
    a.update(happened(q, q, terminated=Y))
    near(seen[-1][:, 0] / LOG_2, expected)  # -A log 1/2


# --- choices of several dimensions, and those that are illegal ---


def test_several_dimensions(told):
    """Choices worth 1, 3 and 10, 20, of which 3 and 10 were taken: (3 + 10) / 2 less (2 + 15) / 2. The log-probabilities add
    up. Next the firsts are drawn: (4 + 8) / 2."""
    a = learner(world(action=MultiDiscrete((2, 2))))
    batch = happened([[1.0, 3, 10, 20]], [[4.0, 9, 8, 9]], 2.0, torch.tensor([1, 0]).reshape(1, 1, 1, 2), choices=4)
    metrics = a.update(batch)
    near(told["critic"][0]["value"].flatten(), [6.5])
    near(told["critic"][0]["target"].flatten(), [2 + 6 / 2])
    near(told["actor"][0]["advantage"].flatten(), [-2.0])
    near(metrics["policy_loss"], 2 * -2 * LOG_2)
    near(metrics["entropy"], 2 * LOG_2)


def test_an_illegal_choice_is_in_no_baseline_floor_or_entropy(told):
    """The logits are 0, 30, 0 and the second is illegal: each of the others has 1/2, floor or not."""
    for floor in (0.0, 0.5):
        a = learner(world(action=Discrete(3), masked=True), logits=[0.0, 30, 0], epsilon=floor, entropy=0.1)
        legal = [Y, N, Y]
        batch = happened([[4.0, JUNK, 2]], [[6.0, JUNK, 8]], 2.0, 0, legal=legal, legal_tp1=legal, choices=3)
        metrics = a.update(batch)
        near(told["actor"][-1]["chance"].flatten(), [0.5, 0, 0.5])
        near(told["actor"][-1]["advantage"].flatten(), [1.0])
        near(told["critic"][-1]["target"].flatten(), [2 + 6 / 2])
        near(metrics["policy_loss"], LOG_2)
        near(metrics["entropy"], LOG_2)
        assert moment(a.actor_optimiser, a.actors["agents"].net.body.biases[0])[1] == 0
        assert a.actor_optimiser.first.isfinite().all()


# --- acting ---


@torch.no_grad()
def test_the_floor_is_in_what_is_drawn_and_the_greedy_one_has_none():
    a = learner(world(2, Discrete(3), masked=True), logits=[math.log(3), 0.0, 30.0], epsilon=0.5)
    rows = 5000
    yes = torch.ones(rows, 2, dtype=torch.bool)
    legal = torch.tensor([[Y, Y, N], [N, Y, N]]).expand(rows, 2, 3)
    frame = Frame({"agents": View(torch.zeros(rows, 2, 3), yes, yes, yes, legal)})
    noise = {"agents": torch.rand(rows, 2, a.noise, generator=torch.Generator().manual_seed(0))}
    assert a.noise == 3
    memory = a.memory(rows, torch.device("cpu"))
    actions, after, extras = a.act(frame, memory, noise, True)
    near(torch.bincount(actions["agents"][:, 0], minlength=3) / rows, [5 / 8, 3 / 8, 0], 0.02)
    assert (actions["agents"][:, 1] == 1).all()
    assert torch.equal(after["agents"]["last"], values.one_hot(actions["agents"], Discrete(3)))
    assert extras == {"agents": {}}
    assert (memory["agents"]["last"] == 0).all()
    greedy, _, _ = a.act(frame, memory, None, False)
    assert greedy["agents"].unique(dim=0).tolist() == [[0, 1]]
    a.epsilon.fill_(1.0)
    actions, _, _ = a.act(frame, memory, noise, True)
    near((actions["agents"][:, 0] == 0).float().mean(), 0.5, 0.02)


@torch.no_grad()
def test_the_dead_leave_no_last_action():
    a = learner(world(2, mortal=True))
    alive = torch.tensor([[Y, N]])
    frame = Frame({"agents": View(torch.zeros(1, 2, 2), alive, alive, ~alive)})
    _, after, _ = a.act(frame, a.memory(1, torch.device("cpu")), None, False)
    assert after["agents"]["last"].tolist() == [[[1, 0], [0, 0]]]


def test_agents_see_what_they_did_last():
    """last_action: the memory's before the first step, nothing where an agent starts, else the step before. The critic sees it
    either way."""
    for shown in (True, False):
        a = learner(last_action=shown)
        heard, judged = inputs(a.actors["agents"].net.body), inputs(a.critics["agents"])
        batch = happened(
            torch.full((4, 2), 7.0), torch.full((4, 2), 7.0), 0.0, [1, 0, 1, 1], last=[[0.0, 1]], start=[N, N, Y, N]
        )
        batch.over = torch.tensor([[N], [Y], [N], [N]])
        a.update(batch)
        last = [[0, 1], [0, 1], [0, 0], [0, 1]]
        assert heard[0].reshape(4, -1).tolist() == [[7, 7, *x] if shown else [7, 7] for x in last]
        assert judged[0].reshape(4, -1)[:, -2:].tolist() == last
        # at the next moments it is what was done now, also where the episode was cut off
        assert heard[1].reshape(4, -1).tolist() == [[7, 7, *x] if shown else [7, 7] for x in ([0, 1], [1, 0], [0, 1], [0, 1])]


@torch.no_grad()
def test_what_was_done_last_is_seen_when_acting():
    """An actor that does again what it did last."""
    a = learner()
    a.actors["agents"].net.body.weights[0][:, 2:] = torch.eye(2)
    yes = torch.ones(2, 1, dtype=torch.bool)
    frame = Frame({"agents": View(torch.zeros(2, 1, 2), yes, yes, ~yes)})
    for last, expected in (([[[0.0, 1]], [[1, 0]]], [1, 0]), ([[[1.0, 0]], [[0, 1]]], [0, 1])):
        actions, _, _ = a.act(frame, {"agents": {"last": torch.tensor(last)}}, None, False)
        assert actions["agents"].flatten().tolist() == expected


# --- normalisers ---


def test_observations_are_normalised_by_what_was_seen_before_the_update():
    """normalise_obs: 1 and 3 have mean 2 and deviation 1, so that 5 is 3 then; of the actor and of the critic."""
    a = learner(world(obs=(1,)), normalise_obs=True)
    heard, judged = inputs(a.actors["agents"].net.body), inputs(a.critics["agents"])
    a.update(happened([[1.0], [3]], [[3.0], [1]]))
    assert heard[0][..., 0].flatten().tolist() == [1, 3]
    a.update(happened([[5.0], [1]], [[3.0], [1]]))
    near(heard[2][..., 0].flatten(), [3.0, -1])
    near(judged[1][..., :2].reshape(2, 2), [[3.0, 3], [-1, -1]])
    again = learner(world(obs=(1,), horizon=2), normalise_obs=True, replay=10)
    again.update(happened([[1.0], [3]], [[3.0], [1]]))
    assert again._sight("agents").norms["agents"].count == 0  # of the past: who collects is the witness
    again.update_statistics(happened([[1.0], [3]], [[3.0], [1]]))
    assert again._sight("agents").norms["agents"].count == 2


def test_the_critic_speaks_in_the_units_of_the_returns_seen(told):
    """normalise_value: returns of 2 and 6 have mean 4 and deviation 2: -1 and 1. A value of 1 beside 0 is then 6 beside 4:
    A = 1. Next, -1 means 4 - 2: G = 3 + 2/2 = 4, which is the mean still."""
    a = learner(normalise_value=True, lr_critic=1e-30)
    metrics = a.update(happened([[1.0, 0], [1, 0]], [[0.0, 0]] * 2, [2.0, 6], terminated=Y))
    near(told["critic"][0]["target"].flatten(), [-1.0, 1])
    near(told["critic"][0]["value"].flatten(), [1.0, 1])
    near(told["actor"][0]["advantage"].flatten(), [1.0, 1])
    near(metrics["q"], 6.0)
    near(metrics["td_error"], 1.0)
    # the policy has learnt to do the first: it would draw it again
    a.update(happened([[1.0, 0]], [[-1.0, JUNK]], 3.0))
    near(told["critic"][1]["target"].flatten(), [0.0])
    assert a.value_norm.count == 3


def test_rewards_are_divided_by_the_root_mean_square_of_all_so_far(told):
    """normalise_reward: 2 and 6 and then 10 and 4, of mean square 156 / 4 = 39; the dead are not counted."""
    for mortal in (False, True):
        a = learner(world(mortal=mortal), normalise_reward=True, reward_scale=3.0)
        zeros = [[0.0, 0]] * 2
        a.update(happened(zeros, zeros, [2.0, 6], terminated=Y))
        if mortal:
            a.update(happened(zeros, zeros, [JUNK, JUNK], terminated=Y, alive=N))
        a.update(happened(zeros, zeros, [10.0, 4], terminated=Y))
        near(told["critic"][-1]["target"].flatten(), [30 / 39**0.5, 12 / 39**0.5])


def test_a_normaliser_of_the_users_own(tmp_path, told):
    """With this `normaliser` a return of 6 is 3, an observation of 4 is 2, and a value of 2 means 4."""
    (tmp_path / "halves.py").write_text(
        "from torch import nn\n"
        "class Halves(nn.Module):\n"
        "    def __init__(self, *shape):\n"
        "        super().__init__()\n"
        "        self.seen = 0\n"
        "    def update(self, x, mask=None):\n"
        "        self.seen += x.numel()\n"
        "    def normalise(self, x, clip=None):\n"
        "        return x / 2\n"
        "    def denormalise(self, x):\n"
        "        return x * 2\n"
    )
    a = learner(normaliser=f"{tmp_path}/halves.py:Halves", normalise_obs=True, normalise_value=True)
    metrics = a.update(happened([[4.0, 0]], [[8.0, 0]], 2.0))
    near(told["critic"][0]["value"].flatten(), [2.0])
    near(told["critic"][0]["target"].flatten(), [(2 + 2 * 4 / 2) / 2])
    near(told["actor"][0]["advantage"].flatten(), [2.0])  # 4 beside 0
    near(metrics["q"], 4.0)


# --- rates ---


@pytest.mark.parametrize(
    ("schedule", "share"),
    [("constant", 1.0), ("linear", 0.55), ("cosine", 0.55), ("exponential", 0.1**0.5), ("exponential:0.8/update", 0.8**5)],
)
def test_rates_follow_their_schedule(schedule, share):
    """Half-way, after 50 of 100 steps and 5 updates. Epsilon has a time of its own: it is over after 40."""
    names = {"lr_schedule": schedule, "entropy_schedule": schedule}
    a = learner(lr=1e-3, lr_critic=2e-3, entropy=0.5, lr_last=0.1, entropy_last=0.1, epsilon=0.8, epsilon_last=0.2, **names)
    assert (a.epsilon, a.entropy_weight) == (pytest.approx(0.8), 0.5)
    a.set_schedules(HALF_WAY)
    near(a.actor_optimiser.rate, 1e-3 * share, 1e-9)
    near(a.critic_optimiser.rate, 2e-3 * share, 1e-9)
    near(a.entropy_weight, 0.5 * share, 1e-7)
    near(a.epsilon, 0.5, 1e-7)
    for step in (100, 101, 900):
        a.set_schedules(Now(step, 1000, 5))
        near(a.epsilon, 0.2, 1e-7)


@torch.no_grad()
def test_what_a_moment_is_worth():
    """pi = 5/8, 3/8 of 8 and 16."""
    a = learner(logits=LIKELY, epsilon=0.5)
    near(a.values(happened([[8.0, 16]], [[0.0, 0]]).frame).flatten(), [11.0])
    assert set(a.nets) == {"actor", "critic", "target_critic"}


# --- whole worlds: who is not there, and what is remembered -----------------------------------------------------------


def loop_of(env, rows=8, /, **sections):
    common = env in ("simple_speaker_listener", "probe_matrix")
    run = {"envs": rows, "quiet": True, "steps": 10_000, **({} if common else {"reward": "team-mean"})}
    return Loop(resolve(Settings("coma", env, run, sections)))


def batch_of(loop, steps=16):
    batch = loop.collector.collect(steps)
    loop.shaping(batch)
    batch.noise = torch.rand(loop.learners[0].draws(*batch.over.shape), generator=torch.Generator().manual_seed(5))
    return batch


def test_agents_are_paid_the_mean_of_their_team_and_what_a_shaper_makes_of_it(tmp_path, told):
    (tmp_path / "mine.py").write_text("def twice(reward, obs, step, steps):\n    return reward * 2\n")
    for shaper, times in ((None, 1.0), (f"{tmp_path}/mine.py:twice", 2.0)):
        loop = loop_of("simple_spread", algo={"rollout": 8, "gamma": 0.0, "normalise_value": False, "shaper": shaper})
        batch = batch_of(loop, 8)
        own = batch.results["agents"].reward
        assert (own - own[..., :1]).abs().max() > 1e-3  # they are paid unlike
        loop.learners[0].update(batch)
        mean = times * own.mean(-1, keepdim=True).expand_as(own)
        torch.testing.assert_close(told["critic"][-1]["target"], mean)


GRU, LSTM = ({"memory": m, "memory_width": 8} for m in ("gru", "lstm"))


@pytest.mark.parametrize(
    ("config", "net"),
    [
        ({"after_death": "own"}, {}),
        ({"normalise_value": True, "normalise_reward": True, "advantage_scope": "agent"}, {}),
        ({"critic_slices": 3, "advantage_scope": "group", "after_death": "own"}, GRU),
        ({"normalise_value": True, "last_action": False}, LSTM),
    ],
)
def test_who_does_not_act_is_in_no_loss_and_no_statistic(config, net):
    """Whatever the dead see, do and are paid, the weights come out the same; and whatever they remember, where their values are
    not learnt."""
    config = {"rollout": 10, "normalise_value": False, **config}
    loop, twin = (loop_of("probe_deaths", 4, algo=config, net={"hidden": (8,), **net}) for _ in range(2))
    a, b = loop.learners[0], twin.learners[0]
    loop.collector.collect(5)
    batch = batch_of(loop, 10)
    spoilt = tree_map(torch.clone, batch)
    view, after = batch.frame["agents"], batch.next["agents"]
    gone = ~view.alive
    assert gone.any()
    spoilt.actions["agents"][gone] = 1 - spoilt.actions["agents"][gone]
    spoilt.frame["agents"].obs[gone] = 1e3
    spoilt.next["agents"].obs[gone & ~after.alive] = -1e3
    spoilt.learner_reward["agents"][gone] = 1e3
    for part in ("actor", "critic") if a.config.after_death == "own" else ():
        for x in tree_leaves(spoilt.memory["agents"].get(part)):
            x[gone[0]] = 9.0  # who is not there at first arrives with an empty memory
    for _ in range(2):  # statistics move after an update
        a.update(batch)
        b.update(spoilt)
    assert all(torch.equal(x, b.state_dict()[k]) for k, x in a.state_dict().items())
    assert a.actor_optimiser.steps == 2
    assert (a.actor_optimiser.first != 0).any()


@pytest.mark.parametrize("net", [{}, GRU, LSTM], ids=["none", "gru", "lstm"])
def test_slices_of_a_critic_that_stands_still_give_the_same_advantages(net, told):
    """Also with memory: a slice begins with the memory before it."""
    for slices in (0, 5):
        loop = loop_of("probe_deaths", algo={"rollout": 16, "lr_critic": 1e-30, "critic_slices": slices}, net=net)
        batch = batch_of(loop)
        loop.learners[0].update(batch)
    one, other = (torch.where(batch.frame["agents"].active, x["advantage"], 0) for x in told["actor"])
    assert one.abs().max() > 1e-5
    torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("memory", [GRU, LSTM], ids=["gru", "lstm"])
@pytest.mark.parametrize("env", ["probe_deaths", "simple_spread", "simple_speaker_listener"])
def test_a_rollout_begins_with_the_memories_that_the_last_one_left(env, memory):
    """Of actors and critics, and what was done last."""
    loop = loop_of(env, net=memory, algo={"rollout": 6})
    a = loop.learners[0]
    loop.collector.collect(3)
    batch = batch_of(loop, 6)
    played = {g: values.one_hot(batch.actions[g], a.spaces[g]) * batch.frame[g].active[..., None] for g in a.groups}
    last = {g: a._last(batch, g, played[g]) for g in a.groups}
    left = {}
    with torch.no_grad():
        for g in a.groups:
            _, actor = a._policy(g, batch.frame, last[g], *a._moment(batch, g, "actor"))
            _, critic = a.critics[g](a._seen(batch.frame, g, played, last), *a._moment(batch, g, "critic"))
            left[g] = {"actor": actor, "critic": critic}
    then = batch_of(loop, 6).memory  # which is collected into the same tensors
    for g in a.groups:
        for whose, after in left[g].items():
            for k, x in after.items():
                assert x[-1].abs().max() > 1e-3
                torch.testing.assert_close(then[g][whose][k], x[-1], rtol=0, atol=1e-6)
        assert torch.equal(then[g]["last"], played[g][-1])


@pytest.mark.parametrize("config", [{"rollout": 25}, {"replay": 20, "batch": 4, "every": 50}])
def test_a_run_learns_and_says_so(config):
    loop = loop_of("simple_spread", 4, algo=config, net={**GRU, "hidden": (8,)})
    a = loop.learners[0]
    for _ in range(4):
        loop.iterate()
    assert a.actor_optimiser.steps == a.critic_optimiser.steps == (6 if "replay" in config else 4)  # (400 - 100) / 50
    told = {k.split("/")[-1]: x for k, x in loop.means.take().items()}
    names = "policy_loss entropy advantage epsilon critic_loss td_error q target_lag learning_rate grad_norm_actor"
    assert set(told) == {*names.split(), "grad_norm_critic"}
    assert all(math.isfinite(x) for x in told.values())


@pytest.mark.parametrize("memory", [GRU, LSTM], ids=["gru", "lstm"])
def test_what_would_be_drawn_next_goes_by_what_is_remembered_now(memory):
    """The actor's memory after each step is that before the next moment."""
    loop = loop_of("simple_spread", net=memory, algo={"rollout": 6})
    a, calls = loop.learners[0], []
    batch, policy = batch_of(loop, 6), a._policy

    def listening(*args):
        out = policy(*args)
        calls.append((args[3], tree_map(torch.detach, out[1])))
        return out

    a._policy = listening
    a.update(batch)
    (_, after), (before, _) = calls
    assert all(torch.equal(x, after[k]) for k, x in before.items())
    assert all(x.abs().max() > 1e-3 and not x.requires_grad for x in before.values())
