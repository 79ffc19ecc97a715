"""COMA's baseline, returns, masks and options, with the numbers worked out on paper.

The nets of `learner` are one layer, set by hand. The values of choices are what an agent sees, Q(o, a) = o[a]; the policy has
both choices as likely, whatever it sees, and no floor. gamma = lambda = 1/2, and Adam's first step is by the rate, 1/4, unless
a test says otherwise. A draw among equals is the first choice: the noise is the same everywhere. What the losses are given is
in `recorded`.
"""

import math
from typing import Any

import pytest
import torch
from bench import (
    CPU,
    GRU,
    HALF_WAY,
    JUNK,
    KERNELS,
    N,
    Switch,
    Y,
    act,
    agent_group,
    check_every_option_is_tested,
    collect,
    draw,
    feed,
    halves,
    inputs,
    make_batch,
    make_frame,
    make_learner,
    make_loop,
    near,
    record_losses,
    same_state,
    set_layer,
    slope,
    spec_of,
    spoil,
    update,
)

from shoal.algos.base import Replay, Rollout
from shoal.algos.coma import COMA
from shoal.algos.samples import Samples
from shoal.ops import values
from shoal.ops.schedules import Now
from shoal.spec import Box, Discrete, EnvSpec, MultiDiscrete, UserError
from shoal.tree import tree_leaves, tree_map

LOG_2 = math.log(2)
LSTM = {**GRU, "memory": "lstm"}
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


def world(n=1, action=None, **more):
    return spec_of(n, action, **{"common": True, **more})


def learner(spec=None, net=None, kernels=False, logits=None, **config):
    """Where agents see a number for each of its choices they are its values, else all values are 0."""
    a = make_learner(COMA, spec or world(), net=net, kernels=kernels, **{**PLAIN, **config})
    at = a.spec.state or sum(g.n * g.obs[0] for g in a.spec.groups)  # own observations come after all of them or the state
    for g in a.groups if not a.recurrent else ():
        set_layer(a.actors[g].net.body, 0.0, logits)
        for critic in (a.critics[g], a.target.module[g]):
            body, width = critic.net.body, a.spec[g].obs[0]
            weights = torch.zeros(body.width_out, body.width_in)
            if body.width_out == width:
                weights[:, at : at + width] = torch.eye(width)
            set_layer(body, weights)
    return a


@pytest.fixture
def recorded(monkeypatch):
    """Of each step of the critic values and targets; of the actor's Q, probabilities, and advantages."""
    advantages: list[Any] = []
    counterfactual = values.counterfactual

    def record(q, probability, taken, space):
        out = counterfactual(q, probability, taken, space)
        advantages.append({"q": q, "probability": probability, "advantage": out})
        assert not out.requires_grad
        return out

    monkeypatch.setattr(values, "counterfactual", record)
    return {"critic": record_losses(monkeypatch), "actor": advantages}


def actor_layer(a):
    return a.actors["agents"].net.body


def critic_layer(a, target=False):
    return (a.target.module if target else a.critics)["agents"].net.body


# --- options that change one number -----------------------------------------------------------------------------------


def targets(a, recorded, metrics):
    return recorded["critic"][-1]["target"].flatten()


def first_weights(a, recorded, metrics):
    """Of the critic, by an agent's own observation, and of the actor."""
    return torch.stack([critic_layer(a).weights[0][0, 2], actor_layer(a).weights[0][0, 0]])


def target_weight(a, recorded, metrics):
    return critic_layer(a, target=True).weights[0][0, 2]


def epsilon(a, recorded, metrics):
    assert metrics["epsilon"] == a.epsilon
    return a.epsilon


def entropy_weight(a, recorded, metrics):
    return a.entropy_weight


# action 0, of values 1 and 0, is paid 3; it would be done again, with the value 8: G = 3 + 8/2 = 7, the error 6. A = 1 - 1/2.
# The critic's slope is -6 in three weights, of the team's observations, the own one, and the bias; the actor's is -A / 2 in two
ONE = {"obs": [[1.0, 0]], "next_obs": [[8.0, 6]], "reward": 3.0}
# G_1 = 2 + 16/2 = 10, G_0 = 1 + (8/2 + 10/2) / 2
TWO = {"obs": [[1.0, 0], [1, 0]], "next_obs": [[8.0, JUNK], [16, 0]], "reward": [1.0, 2]}
AGAIN = {"replay": 10}  # from a replay of so many episodes
SWITCHES = {
    "gamma": Switch(targets, [5.5, 10], 1.0, [14.0, 18], None, TWO),  # 1 + (8 + 18) / 2
    "lam": Switch(targets, [5.5, 10], 1.0, [6.0, 10], None, TWO),  # 1 + 10/2
    "reward_scale": Switch(targets, [5.5, 10], 2.0, [7.0, 12], None, TWO),  # 2 + (8/2 + 12/2) / 2
    "time_limit": Switch(targets, [5.5, 10], False, [3.5, 2], None, {**TWO, "over": [N, Y]}),  # 1 + (8/2 + 2/2) / 2
    "huber": Switch(lambda a, recorded, metrics: metrics["critic_loss"], 18.0, 1.0, 5.5),  # 6^2 / 2; 1 (6 - 1/2)
    "lr": Switch(first_weights, [1.25, 0.25], 0.5, [1.5, 0.5]),
    "lr_critic": Switch(first_weights, [1.25, 0.25], 0.5, [1.5, 0.25]),
    "lr_schedule": Switch(first_weights, [1.25, 0.25], "linear", [1.125, 0.125]),  # half-way
    "lr_last": Switch(first_weights, [1.125, 0.125], 0.5, [1.1875, 0.1875], {"lr_schedule": "linear"}),
    "weight_decay": Switch(first_weights, [1.25, 0.25], 0.5, [1.25 - 0.25 * 0.5, 0.25]),
    "grad_clip": Switch(lambda a, *_: a.critic_optimiser.first.norm(), 0.6 * 3**0.5, 0.5, 0.05),
    "target_every": Switch(target_weight, 1.0, 1, 1.25),
    "target_tau": Switch(target_weight, 1.25, 0.25, 1.0625, {"target_every": 1}),
    "epsilon": Switch(epsilon, 0.0, 0.5, 0.25),  # half-way to 0
    "epsilon_last": Switch(epsilon, 0.5, 0.25, 0.625, {"epsilon": 1.0}),
    "epsilon_steps": Switch(epsilon, 0.5, 200, 0.75, {"epsilon": 1.0}),
    "epsilon_schedule": Switch(epsilon, 0.5, "constant", 1.0, {"epsilon": 1.0}),
    "entropy": Switch(entropy_weight, 0.0, 0.5, 0.5),  # see test_entropy_is_that_of_the_policy_with_its_floor
    "entropy_schedule": Switch(entropy_weight, 0.5, "linear", 0.25, {"entropy": 0.5}),
    "entropy_last": Switch(entropy_weight, 0.25, 0.5, 0.375, {"entropy": 0.5, "entropy_schedule": "linear"}),
    "rollout": Switch(feed("steps"), 3.0, 7, 7.0),
    "episodes": Switch(feed("steps"), 3.0, 2, 10.0),  # episodes of at most 5 steps
    "replay": Switch(feed("capacity"), 50.0, 20, 100.0, AGAIN),
    "batch": Switch(feed("batch"), 16.0, 4, 4.0, AGAIN),
    "every": Switch(feed("every"), 16.0 * 5, 12.5, 12.5, AGAIN),  # as many as a batch has
}
ELSEWHERE = {  # option -> the test of it, here or in a file of its own
    "after_death": "tests/algos/test_after_death.py",
    "advantage_scope": "test_advantages_are_scaled_over_a_scope",
    "critic_slices": "test_slices_go_from_the_last_to_the_first_with_values_from_before_each_step",
    "dueling": "test_a_dueling_critic",
    "last_action": "test_agents_see_what_they_did_last",
    "normalise_obs": "test_observations_are_normalised_by_what_was_seen_before_the_update",
    "normalise_state": "tests/algos/test_observations.py",
    "normalise_reward": "test_rewards_are_divided_by_the_root_mean_square_of_all_so_far",
    "normalise_value": "test_values_are_in_the_units_of_the_returns_seen",
    "normaliser": "test_a_normaliser_of_the_users_own",
    "shaper": "test_agents_are_paid_the_mean_of_their_team_and_what_a_shaper_makes_of_it",
    "state_normaliser": "tests/algos/test_observations.py",
}


def test_every_option_has_a_number_of_its_own():
    check_every_option_is_tested((COMA,), SWITCHES, ELSEWHERE, globals())


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("option", SWITCHES)
def test_switching_an_option_changes_the_number_expected_by_hand(option, kernels, recorded):
    s = SWITCHES[option]
    for config, expected in s.cases(option):
        a = learner(world(horizon=5), None, kernels, **config)
        a.set_schedules(HALF_WAY)
        metrics = update(a, make_batch(**{**ONE, **(s.batch or {})}))
        near(s.measure(a, recorded, metrics), expected)


def test_what_it_is_fed():
    assert learner(rollout=7).feed == Rollout(7)
    assert learner(world(horizon=5), episodes=3).feed == Rollout(15, episodes=3)
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


@pytest.mark.parametrize(
    ("spec", "net", "sentence"),
    [
        (
            world(2, common=False),
            {},
            "COMA needs agents that are paid alike: ask for --reward team-mean or --reward team-sum",
        ),
        (world(2, mortal=True, turns=True), {}, "COMA cannot play turn-based worlds"),
        (world(), {"trunk": "shared"}, "--net.trunk shared does not go with COMA"),
        (world(), {"attention": "actor"}, "--net.attention does not go with COMA"),
        (world(action=Box((-1.0,), (1.0,))), {}, "COMA takes discrete and multi-discrete actions"),
        (world(obs=(3, 32, 32)), {}, "COMA's critic takes numbers, and agents see pictures here"),
    ],
)
def test_what_is_refused(spec, net, sentence):
    with pytest.raises(UserError, match=sentence):
        make_learner(COMA, spec, net=net)


# --- the counterfactual baseline --------------------------------------------------------------------------------------

PAYOFF = [[8.0, 0], [2, 4]]  # of agent 0's choice and agent 1's
LIKELY = [math.log(3), 0.0]  # 3/4 and 1/4; half of it replaced by 1/2 and 1/2: 5/8 and 3/8


def matrix_game(**config):
    """A critic that knows the game. It sees two observations, its own, two choices of each, and those before."""
    a = learner(world(2, obs=(1,)), logits=LIKELY, **{"epsilon": 0.5, **config})
    payoff = torch.tensor(PAYOFF)
    for target in (False, True):
        weights = critic_layer(a, target).weights[0].data
        weights[:, 5:7] = payoff  # of agent 0's choices, by agent 1's
        weights[:, 3:5] = payoff.T
    return a


def joint_actions(*actions):
    """A step in which rows do these."""
    obs = torch.zeros(1, len(actions), 2, 1)
    return make_batch(obs, obs, 0.0, [list(actions)], terminated=Y)


def test_an_advantage_is_what_an_agent_added_itself(recorded):
    """With agent 1's first choice the value of agent 0's policy is 5/8 8 + 3/8 2 = 5.75, with its second 3/8 4 = 1.5; that of
    agent 1's is 5/8 8 = 5 with agent 0's first choice, and 5/8 2 + 3/8 4 = 2.75 with its second."""
    a = matrix_game()
    metrics = update(a, joint_actions([0, 0], [0, 1], [1, 0], [1, 1]))
    near(recorded["critic"][0]["value"][0], [[8.0, 8], [0, 0], [2, 2], [4, 4]])
    near(recorded["actor"][0]["probability"], [[[[5 / 8, 3 / 8]] * 2] * 4])
    advantage = [[2.25, 3], [-1.5, -5], [-3.75, -0.75], [2.5, 1.25]]
    near(recorded["actor"][0]["advantage"][0], advantage)
    near(metrics["advantage"], (2.25 + 3 + 1.5 + 5 + 3.75 + 0.75 + 2.5 + 1.25) / 8)
    first, second = math.log(5 / 8), math.log(3 / 8)  # the floor is in the log-probability as well
    gain = [2.25 * first, 3 * first, -1.5 * first, -5 * second, -3.75 * second, -0.75 * first, 2.5 * second, 1.25 * second]
    near(metrics["policy_loss"], -sum(gain) / 8)
    near(metrics["entropy"], -5 / 8 * first - 3 / 8 * second)


def test_the_slope_of_the_policy_is_that_of_its_log_probability_alone():
    """Actions 0 and 1: A = -1.5 and -5. d pi / d logit = 3/4 1/4 / 2 = 3/32: -A (3/32) / (5/8) = 0.225 of agent 0 and
    A (3/32) / (3/8) = -1.25 of agent 1, of which the mean. Were the baseline in it, it would be another."""
    a = matrix_game()
    metrics = update(a, joint_actions([0, 1]))
    mean = (0.225 - 1.25) / 2
    near(slope(a.actor_optimiser, actor_layer(a).biases[0]), [mean, -mean], 1e-6)
    near(slope(a.actor_optimiser, actor_layer(a).ids), [[0.1125, -0.1125], [-0.625, 0.625]], 1e-6)
    # the critic's values are 0, as its targets are: had the actor's loss reached it, it would have moved
    near(metrics["grad_norm_critic"], 0.0)
    assert a.critic_optimiser.first.abs().max() == 0


def test_entropy_is_that_of_the_policy_with_its_floor():
    """pi = 5/8, 3/8: the slope of -w H in the first logit is w (3/32) log(5/3). All advantages are 0."""
    a = learner(logits=LIKELY, epsilon=0.5, entropy=0.25)
    metrics = update(a, make_batch([[0.0, 0]], [[0.0, 0]], terminated=Y))
    near(metrics["policy_loss"], 0.0)
    near(metrics["entropy"], -5 / 8 * math.log(5 / 8) - 3 / 8 * math.log(3 / 8))
    expected = 0.25 * 3 / 32 * math.log(5 / 3)
    near(slope(a.actor_optimiser, actor_layer(a).biases[0]), [expected, -expected], 1e-7)


def test_a_critic_does_not_see_its_own_agents_action(recorded):
    """Change what agent 1 of three did in step 0: its own critic sees nothing of it then, the others do; all do a step later,
    when it is what was done last."""
    batch = make_batch(torch.ones(3, 1, 3, 2), torch.ones(3, 1, 3, 2), 1.0, [[[0, 1, 0]], [[1, 0, 0]], [[0, 0, 1]]])
    other = tree_map(torch.clone, batch)
    other.actions["agents"][0, 0, 1] = 0
    seen, q = [], []
    for given in (batch, other):
        a = learner(world(3))
        with torch.no_grad():
            for p in a.critics.parameters():
                p.copy_(torch.randn(p.shape, generator=torch.Generator().manual_seed(p.numel())))
        critic_inputs = inputs(a.critics["agents"])
        update(a, given)
        seen.append(critic_inputs[0])  # [T, B, N, *]
        q.append(recorded["actor"][-1]["q"])
    differs = (seen[0] != seen[1]).any(-1)[:, 0]
    assert differs.tolist() == [[Y, N, Y], [Y, Y, Y], [N, N, N]]
    assert (q[0] != q[1]).any(-1)[:, 0].tolist() == [[Y, N, Y], [Y, Y, Y], [N, N, N]]
    # observations of all, one's own, actions without one's own, last actions
    assert seen[0][1, 0, 1].tolist() == [1] * 6 + [1] * 2 + [0, 1, 0, 0, 1, 0] + [1, 0, 0, 1, 1, 0]
    assert seen[0][1, 0, 2].tolist() == [1] * 6 + [1] * 2 + [0, 1, 1, 0, 0, 0] + [1, 0, 0, 1, 1, 0]


def test_unlike_groups_do_not_see_their_own_either():
    """One of two choices and two of three and two: columns 0 1 | 2 ... 6 | 7 ... 11."""
    groups = agent_group(1, Discrete(2), "a"), agent_group(2, MultiDiscrete((3, 2)), "b", obs=(4,))
    a = learner(EnvSpec(groups, common=True))
    assert a.others_a.tolist() == [[0, 0, *[1] * 10]]
    assert a.others_b.tolist() == [[1, 1, *[0] * 5, *[1] * 5], [1, 1, *[1] * 5, *[0] * 5]]
    obs = {"a": torch.full((1, 1, 1, 2), 7.0), "b": torch.full((1, 1, 2, 4), 9.0)}
    actions = {"a": 1, "b": torch.tensor([[[[2, 1], [0, 0]]]])}
    batch = make_batch(obs, obs, 0.0, actions, Y, Y, start=Y, next_start=Y, spec=a.spec)
    for x in (batch.actions, batch.learner_reward):  # the groups' order is the spec's, not that of dicts
        x["a"] = x.pop("a")
    assert a.draws(1, 1) == 12
    seen = {g: inputs(a.critics[g]) for g in ("a", "b")}
    update(a, batch)
    state, first, second = [7.0] * 2 + [9.0] * 8, [0, 0, 1, 0, 1], [1, 0, 0, 1, 0]
    assert seen["a"][0][0, 0, 0].tolist() == [*state, 7, 7, 0, 0, *first, *second, *[0] * 12]
    assert seen["b"][0][0, 0, 0].tolist() == [*state, *[9] * 4, 0, 1, *[0] * 5, *second, *[0] * 12]
    assert seen["b"][0][0, 0, 1].tolist() == [*state, *[9] * 4, 0, 1, *first, *[0] * 5, *[0] * 12]


def test_speaker_and_listener_do_not_see_their_own():
    loop = loop_of("simple_speaker_listener", 4, algo={"rollout": 2, "critic_slices": 0})
    (a,) = loop.learners
    assert a.groups == ("speaker", "listener")
    seen = {g: inputs(a.critics[g]) for g in a.groups}
    batch = collect(loop, 2)
    update(a, batch)
    hot = {g: values.one_hot(batch.actions[g], a.spaces[g]) for g in a.groups}
    for g, other in (("speaker", "listener"), ("listener", "speaker")):
        actions = seen[g][0][..., 14 + batch.frame[g].obs.shape[-1] :][..., :8]
        parts = {"speaker": actions[..., :3], "listener": actions[..., 3:]}
        assert (parts[g] == 0).all()
        assert torch.equal(parts[other], hot[other])


# --- returns ----------------------------------------------------------------------------------------------------------


def test_returns_of_all_lengths_with_ends_at_unequal_times(recorded):
    """Three steps paid 1, 2, 4, after which the value of the second choice was 8, 16, 32: G_2 = 4 + 16, G_1 = 2 + (8 + 10) / 2,
    G_0 = 1 + (4 + 5.5) / 2. Rows: no end; terminated in step 1: G_1 = 2, G_0 = 1 + (4 + 1) / 2; cut off in step 1, where 16 is
    that of what would be drawn: G_1 = 2 + 8, G_0 = 1 + (4 + 5) / 2. What was done next is the second choice; what would be
    drawn where nothing was done any more is the first."""
    a = learner(logits=[50.0, -50.0])
    next_obs = torch.full((3, 3, 2), JUNK)
    for t, x in enumerate((8.0, 16, 32)):
        next_obs[t, :, 1] = x
    next_obs[2, :, 0], next_obs[2, :, 1] = 32.0, JUNK  # the rollout ends
    next_obs[1, 2] = torch.tensor([16.0, JUNK])  # cut off
    next_obs[1, 1] = JUNK  # dead
    terminated, over = [[N] * 3, [N, Y, N], [N] * 3], [[N] * 3, [N, Y, Y], [N] * 3]
    update(a, make_batch(torch.zeros(3, 3, 2), next_obs, [1.0, 2, 4], 1, terminated, over))
    near(recorded["critic"][0]["target"][..., 0], [[5.75, 3.5, 5.5], [11, 2, 10], [20, 20, 20]])


def test_next_actions_are_the_stored_ones_and_drawn_where_there_are_none():
    """Two agents and four steps, cut off in step 1. Noise that is larger for the second choice draws it, where asked."""
    a = learner(world(2))
    actions = torch.tensor([[[0, 1]], [[1, 0]], [[0, 0]], [[1, 0]]])
    batch = make_batch(torch.zeros(4, 1, 2, 2), torch.zeros(4, 1, 2, 2), 0.0, actions, over=[N, Y, N, N])
    batch.frame["agents"].start[2] = True
    noise = torch.full((4, 1, 2, 2), 0.5)
    noise[1, 0, 0, 1] = noise[3, 0, 1, 1] = noise[2, 0, 1, 1] = noise[0, 0, 0, 1] = 0.9
    batch.noise = noise.flatten()
    target_inputs = inputs(a.target.module["agents"])
    update(a, batch)
    (seen,) = target_inputs  # [T, B, N, 4 + 2 + 4 + 4]
    now, last = seen[:, 0, :, 6:10], seen[:, 0, :, 10:]
    one, two = [1, 0], [0, 1]
    none = [0, 0]
    # agent 0's critic sees agent 1's next, and the other way round
    assert now[:, 0].tolist() == [[*none, *one], [*none, *one], [*none, *one], [*none, *two]]
    assert now[:, 1].tolist() == [[*two, *none], [*two, *none], [*two, *none], [*one, *none]]
    hot = [[*one, *two], [*two, *one], [*one, *one], [*two, *one]]
    assert last[:, 0].tolist() == last[:, 1].tolist() == hot  # what was done now is what was done last then


def test_a_draw_goes_by_the_policy_with_its_floor_and_what_is_legal():
    """Of 3/4 and 1/4 with half a floor, 5/8; the third is never legal, and next neither is the first for agent 1."""
    a = learner(world(2, Discrete(3), masked=True), logits=[math.log(3), 0.0, 9.0], epsilon=0.5)
    rows = 4000
    zeros = torch.zeros(1, rows, 2, 3)
    batch = make_batch(zeros, zeros, legal=[Y, Y, N], next_legal=[[Y, Y, N], [N, Y, N]])
    assert a.draws(1, rows) == rows * 6
    batch.noise = torch.rand(rows * 6, generator=torch.Generator().manual_seed(0))
    seen = inputs(a.target.module["agents"])
    update(a, batch)
    actions = seen[0][0, :, :, 9:15]  # six observations, three own
    near(actions[:, 1, :3].mean(0), [5 / 8, 3 / 8, 0], 0.02)  # agent 1 sees what agent 0 would do
    assert (actions[:, 0, 3:] == torch.tensor([0.0, 1, 0])).all()


def test_the_dead_do_nothing_next():
    """Agent 1 dies in step 0, and is there no more when the rollout ends: its place is zeros, drawn or stored."""
    a = learner(world(2, mortal=True))
    batch = make_batch(
        *[torch.zeros(2, 1, 2, 2)] * 2,
        action=1,
        terminated=[[[N, Y]], [[N, N]]],
        alive=[[[Y, Y]], [[Y, N]]],
        next_alive=[[[Y, N]]] * 2,
    )
    following, now = inputs(a.target.module["agents"]), inputs(a.critics["agents"])
    update(a, batch)
    assert following[0][:, 0, 0, 6:10].tolist() == [[0, 0, 0, 0]] * 2
    assert following[0][:, 0, 1, 6:10].tolist() == [[0, 1, 0, 0], [1, 0, 0, 0]]  # stored, then drawn
    assert now[0][:, 0, 0, 6:10].tolist() == [[0, 0, 0, 1], [0, 0, 0, 0]]
    assert following[0][1, 0, 0, 10:].tolist() == [0, 1, 0, 0]


LIVES = {
    # agent 1: terminated -> 1 + 0; goes on -> 1 + 8/2, with what follows; not there -> in no loss
    "dies": (Y, [[Y, Y], [Y, N]], [1.0, 2]),
    "goes on": (N, [[Y, Y], [Y, Y]], [1 + (8 / 2 + 6 / 2) / 2, 2]),
}


@pytest.mark.parametrize("case", LIVES)
def test_a_death_ends_an_agents_own_return(case, recorded):
    """Two steps paid 1 and 2; the next values are 8 and 8: G_1 = 2 + 4, G_0 = 1 + (4 + 3) / 2 where it goes on."""
    ended, alive, expected = LIVES[case]
    a = learner(world(2, mortal=True), after_death="own")
    now, then = torch.tensor(alive)[:, None], torch.tensor([alive[1], alive[1]])[:, None]
    obs, next_obs, ends = torch.zeros(2, 1, 2, 2), torch.full((2, 1, 2, 2), 8.0), [[[N, ended]], [[N, N]]]
    update(a, make_batch(obs, next_obs, [1.0, 2], terminated=ends, alive=now, next_alive=then))
    near(recorded["critic"][0]["target"][:, 0, 0], [4.5, 6])
    near(recorded["critic"][0]["target"][0, 0, 1], expected[0])


def test_an_agent_that_is_cut_off_alone_is_bootstrapped(recorded):
    """Agent 1 leaves without having terminated, and agent 0 goes on: its last observation has the value 8, 1 + 8/2."""
    a = learner(world(2, mortal=True), after_death="own")
    obs, next_obs = torch.zeros(2, 1, 2, 2), torch.full((2, 1, 2, 2), 8.0)
    update(a, make_batch(obs, next_obs, [1.0, 2], alive=[[[Y, Y]], [[Y, N]]], next_alive=[[[Y, N]]] * 2))
    near(recorded["critic"][0]["target"][0, 0], [4.5, 5])


def test_nothing_is_returned_from_after_an_agent_is_gone(recorded):
    """Whatever is paid in step 1 to an agent that left in step 0, and whether it terminated or not."""
    zeros = torch.zeros(2, 1, 2, 2)
    for ended in (N, Y):
        for junk in (0.0, JUNK):
            a = learner(world(2, mortal=True), after_death="own")
            gone = {"alive": [[[Y, Y]], [[Y, N]]], "next_alive": [[[Y, N]]] * 2, "terminated": [[[N, ended]], [[N, N]]]}
            update(a, make_batch(zeros, zeros, [[[1.0, 1]], [[2, junk]]], **gone))
            near(recorded["critic"][-1]["target"][0, 0], [1.5, 1])


def test_what_is_not_filled_is_in_nothing(recorded):
    """Rows of three steps, of which two and three belong to episodes: G_1 = 2, G_0 = 1 + (8/2 + 2/2) / 2 in the first. Whatever
    lies beyond, the weights come out the same."""
    spec = world(horizon=3)
    filled = torch.tensor([[Y, Y], [Y, Y], [N, Y]])
    done = []
    for junk in (0.0, JUNK):
        a = learner(spec, replay=10, entropy=0.1, advantage_scope="agent", normalise_value=True, epsilon=0.5)
        obs, next_obs = torch.ones(3, 2, 2), torch.full((3, 2, 2), 8.0)
        obs[..., 1] = next_obs[..., 1] = 0
        reward = torch.tensor([[1.0, 1], [2, 2], [4, 4]])
        obs[2, 0, 0], next_obs[2, 0, 1], reward[2, 0] = junk, junk, junk
        ends = [[N, N], [Y, N], [N, Y]]
        batch = make_batch(obs, next_obs, reward, [[0, 0], [0, 1], [1, 0]], terminated=ends, over=ends)
        batch.filled = filled
        metrics = update(a, batch)
        done.append((a, {k: x.item() for k, x in metrics.items()}))
        assert a.value_norm.count == 5
    (a, one), (b, two) = done
    assert same_state(a, b)
    assert one == two
    metrics = update(learner(spec, replay=10), batch)
    # G = 3.5, 2 and, of three steps whose next values are 8 and 0 (of the second choice): G_2 = 4, G_1 = 2 + (8/2 + 4/2) / 2,
    # G_0 = 1 + (0 + 5/2) / 2. Values 1, 1 and 1, 0, 1
    near(recorded["critic"][-1]["target"][filled].flatten(), [3.5, 2.25, 2, 5, 4])
    errors = [2.5, 1.25, 1, 5, 3]
    near(metrics["critic_loss"], sum(e**2 / 2 for e in errors) / 5)
    near(metrics["td_error"], sum(errors) / 5)
    near(metrics["q"], 4 / 5)


# --- the critic's steps ---


def single_steps(rewards, **config):
    """Steps that each end, of an agent that sees nothing and starts anew: the critic is its biases, and they are 0."""
    zeros = torch.zeros(len(rewards), 2)
    return learner(**config), make_batch(zeros, zeros, rewards, terminated=Y, over=Y, start=Y)


def test_slices_go_from_the_last_to_the_first_with_values_from_before_each_step(recorded):
    """critic_slices 2 of four steps: values of 2 and 3 are 0; then those of 0 and 1 are 1/4, after a step of 1/4. So advantages
    are half of 0 and of 1/4: the value of the other choice is 0."""
    a, batch = single_steps([2.0, 3, 4, 5], critic_slices=2)
    metrics = update(a, batch)
    assert len(recorded["critic"]) == 2
    near(recorded["critic"][0]["value"].flatten(), [0.0, 0])
    near(recorded["critic"][0]["target"].flatten(), [4.0, 5])
    near(recorded["critic"][1]["value"].flatten(), [0.25, 0.25])
    near(recorded["critic"][1]["target"].flatten(), [2.0, 3])
    near(recorded["actor"][0]["q"][:, 0, 0], [[0.25, 0], [0.25, 0], [0, 0], [0, 0]])
    near(recorded["actor"][0]["advantage"].flatten(), [0.125, 0.125, 0, 0])
    near(metrics["critic_loss"], ((16 + 25) / 4 + (1.75**2 + 2.75**2) / 4) / 2)
    assert (a.critic_optimiser.steps, a.actor_optimiser.steps) == (2, 1)
    near(metrics["q"], 0.125)


def test_slices_of_which_nothing_is_filled_are_in_no_mean_and_no_clock(recorded):
    """critic_slices 4 of four steps, of which two, and then one, belong to an episode. 3 is missed by 3; then 2 by 2 - 1/4, as
    the critic has moved by 1/4. Each is a step of the target's clock, and what is not filled is none: copied every 2 steps, the
    target is what the critic is after two, and not after the third."""
    a, batch = single_steps([2.0, 3, JUNK, JUNK], critic_slices=4, target_every=2)
    batch.filled = torch.tensor([[Y], [Y], [N], [N]])
    metrics = update(a, batch)
    near(metrics["critic_loss"], (9 + 1.75**2) / 4)
    near(metrics["td_error"], (3 + 1.75) / 2)
    near(metrics["q"], 0.25 / 2)
    assert (a.critic_optimiser.steps, a.target.updates, metrics["target_lag"]) == (2, 2, 0)
    batch.filled = torch.tensor([[Y], [N], [N], [N]])
    assert update(a, batch)["target_lag"] > 0
    assert (a.critic_optimiser.steps, a.target.updates) == (3, 3)


@pytest.mark.parametrize(("slices", "steps"), [(0, 1), (1, 1), (3, 3), (9, 4)])
def test_as_many_steps_of_the_critic_as_slices_and_at_most_as_there_are_steps(slices, steps, recorded):
    a, batch = single_steps([2.0, 3, 4, 5], critic_slices=slices)
    update(a, batch)
    assert (a.critic_optimiser.steps, a.target.updates, len(recorded["critic"])) == (steps, steps, steps)
    near(torch.cat([x["target"] for x in recorded["critic"][::-1]]).flatten(), [2.0, 3, 4, 5])


def test_the_target_follows_by_steps_of_the_critic():
    """Every second of four: as the critic is after all. Every third: as it was after three, about 3/4."""
    for every, lags in ((2, False), (3, True), (5, True)):
        a, batch = single_steps([20.0, 30, 40, 50], critic_slices=4, target_every=every)
        metrics = update(a, batch)
        assert (metrics["target_lag"] > 0) == lags
        bias = critic_layer(a, target=True).biases[0][0].item()
        assert bias == pytest.approx({2: 1.0, 3: 0.75, 5: 0.0}[every], abs=0.1)


def test_returns_are_of_the_target_net_and_advantages_of_the_critic(recorded):
    """Q' = 3 o: G = 3 + 3 * 8 / 2, whatever the critic's Q is."""
    a = learner()
    critic_layer(a, target=True).weights[0].data.mul_(3)
    update(a, make_batch(**ONE))
    near(recorded["critic"][0]["target"].flatten(), [15.0])
    near(recorded["actor"][0]["advantage"].flatten(), [0.5])


def test_a_dueling_critic(recorded):
    """dueling: a third output is the value, and choices are what they add to it: 4 and -2 about 7 are 10 and 4, A = 10 - 7."""
    a = learner(world(obs=(3,)), dueling=True)
    assert critic_layer(a).width_out == 3
    update(a, make_batch([[4.0, -2, 7]], [[6.0, 0, 5]], 1.0))
    near(recorded["critic"][0]["value"].flatten(), [10.0])
    near(recorded["critic"][0]["target"].flatten(), [1 + (5 + 3) / 2])
    near(recorded["actor"][0]["advantage"].flatten(), [3.0])


@pytest.mark.parametrize(
    ("scope", "expected"),
    [
        ("none", [[1, 5], [3, 7]]),
        ("group", [[-3 / 5**0.5, 1 / 5**0.5], [-1 / 5**0.5, 3 / 5**0.5]]),  # mean 4, variance (9 + 1 + 1 + 9) / 4
        ("agent", [[-1, -1], [1, 1]]),  # 1, 3 and 5, 7
    ],
)
def test_advantages_are_scaled_over_a_scope(scope, expected, recorded):
    """advantage_scope. The value of the second choice is 0, that of the first twice the advantage."""
    a = learner(world(2), advantage_scope=scope)
    obs = torch.zeros(2, 1, 2, 2)
    obs[..., 0] = 2 * torch.tensor([[[1.0, 5]], [[3, 7]]])
    update(a, make_batch(obs, obs, terminated=Y))
    near(recorded["critic"][-1]["actor_loss"][:, 0] / LOG_2, expected)  # -A log 1/2


# --- choices of several dimensions, and those that are illegal ---


def test_several_dimensions(recorded):
    """Choices of values 1, 3 and 10, 20, of which 3 and 10 were taken: (3 + 10) / 2 less (2 + 15) / 2. The log-probabilities
    add up. Next the firsts are drawn: (4 + 8) / 2."""
    a = learner(world(action=MultiDiscrete((2, 2))))
    batch = make_batch([[1.0, 3, 10, 20]], [[4.0, 9, 8, 9]], 2.0, torch.tensor([1, 0]).reshape(1, 1, 1, 2))
    metrics = update(a, batch)
    near(recorded["critic"][0]["value"].flatten(), [6.5])
    near(recorded["critic"][0]["target"].flatten(), [2 + 6 / 2])
    near(recorded["actor"][0]["advantage"].flatten(), [-2.0])
    near(metrics["policy_loss"], 2 * -2 * LOG_2)
    near(metrics["entropy"], 2 * LOG_2)


def test_an_illegal_choice_is_in_no_baseline_floor_or_entropy(recorded):
    """The logits are 0, 30, 0 and the second is illegal: each of the others has 1/2, floor or not."""
    for floor in (0.0, 0.5):
        a = learner(world(action=Discrete(3), masked=True), logits=[0.0, 30, 0], epsilon=floor, entropy=0.1)
        legal = [Y, N, Y]
        metrics = update(a, make_batch([[4.0, JUNK, 2]], [[6.0, JUNK, 8]], 2.0, legal=legal, next_legal=legal))
        near(recorded["actor"][-1]["probability"].flatten(), [0.5, 0, 0.5])
        near(recorded["actor"][-1]["advantage"].flatten(), [1.0])
        near(recorded["critic"][-1]["target"].flatten(), [2 + 6 / 2])
        near(metrics["policy_loss"], LOG_2)
        near(metrics["entropy"], LOG_2)
        assert slope(a.actor_optimiser, actor_layer(a).biases[0])[1] == 0
        assert a.actor_optimiser.first.isfinite().all()


# --- acting ---


def test_the_floor_is_in_what_is_drawn_and_the_greedy_one_has_none():
    a = learner(world(2, Discrete(3), masked=True), logits=[math.log(3), 0.0, 30.0], epsilon=0.5)
    rows = 5000
    frame = make_frame(torch.zeros(rows, 2, 3), start=Y, legal=[[Y, Y, N], [N, Y, N]])
    noise, memory = draw(a, rows), a.memory(rows, CPU)
    assert a.noise == 3
    actions, after, extras = act(a, frame, noise, memory)
    near(torch.bincount(actions["agents"][:, 0], minlength=3) / rows, [5 / 8, 3 / 8, 0], 0.02)
    assert (actions["agents"][:, 1] == 1).all()
    assert torch.equal(after["agents"]["last"], values.one_hot(actions["agents"], Discrete(3)))
    assert extras == {"agents": {}}
    assert (memory["agents"]["last"] == 0).all()
    greedy = act(a, frame, None, memory).actions
    assert greedy["agents"].unique(dim=0).tolist() == [[0, 1]]
    a.epsilon.fill_(1.0)
    actions = act(a, frame, noise, memory).actions
    near((actions["agents"][:, 0] == 0).float().mean(), 0.5, 0.02)


def test_the_dead_leave_no_last_action():
    a = learner(world(2, mortal=True))
    after = act(a, make_frame(torch.zeros(1, 2, 2), alive=[[Y, N]], start=[[N, Y]])).memory
    assert after["agents"]["last"].tolist() == [[[1, 0], [0, 0]]]


def test_agents_see_what_they_did_last():
    """last_action: the memory's before the first step, nothing where an agent starts, else the step before. The critic sees it
    either way."""
    for shown in (True, False):
        a = learner(last_action=shown)
        actor_inputs, critic_inputs = inputs(actor_layer(a)), inputs(a.critics["agents"])
        obs, memory = torch.full((4, 2), 7.0), {"agents": {"last": torch.tensor([[[0.0, 1]]])}}
        update(a, make_batch(obs, obs, 0.0, [1, 0, 1, 1], over=[N, Y, N, N], start=[N, N, Y, N], memory=memory))
        last = [[0, 1], [0, 1], [0, 0], [0, 1]]
        assert actor_inputs[0].reshape(4, -1).tolist() == [[7, 7, *x] if shown else [7, 7] for x in last]
        assert critic_inputs[0].reshape(4, -1)[:, -2:].tolist() == last
        # in the next frames it is what was done now, also where the episode was cut off
        following = [[0, 1], [1, 0], [0, 1], [0, 1]]
        assert actor_inputs[1].reshape(4, -1).tolist() == [[7, 7, *x] if shown else [7, 7] for x in following]


def test_what_was_done_last_is_seen_when_acting():
    """An actor that does again what it did last."""
    a = learner()
    actor_layer(a).weights[0].data[:, 2:] = torch.eye(2)
    frame = make_frame(torch.zeros(2, 1, 2))
    for last, expected in (([[[0.0, 1]], [[1, 0]]], [1, 0]), ([[[1.0, 0]], [[0, 1]]], [0, 1])):
        actions = act(a, frame, None, {"agents": {"last": torch.tensor(last)}}).actions
        assert actions["agents"].flatten().tolist() == expected


# --- normalisers ---


def test_observations_are_normalised_by_what_was_seen_before_the_update():
    """normalise_obs: 1 and 3 have mean 2 and deviation 1, so that 5 is 3 then; of the actor and of the critic."""
    a = learner(world(obs=(1,)), normalise_obs=True)
    actor_inputs, critic_inputs = inputs(actor_layer(a)), inputs(a.critics["agents"])
    first, second = make_batch([[1.0], [3]], [[3.0], [1]]), make_batch([[5.0], [1]], [[3.0], [1]])
    update(a, first)
    assert actor_inputs[0][..., 0].flatten().tolist() == [1, 3]
    update(a, second)
    near(actor_inputs[2][..., 0].flatten(), [3.0, -1])
    near(critic_inputs[1][..., :2].reshape(2, 2), [[3.0, 3], [-1, -1]])
    again = learner(world(obs=(1,), horizon=2), normalise_obs=True, replay=10)
    norm = again.observations["agents"].norms["agents"]
    update(again, first)
    assert norm.count == 0  # of a replay: statistics are of what was collected
    again.update_statistics(first)
    assert norm.count == 2


def test_values_are_in_the_units_of_the_returns_seen(recorded):
    """normalise_value: returns of 2 and 6 have mean 4 and deviation 2: -1 and 1. Values of 1 and 0 are then 6 and 4: A = 1.
    Next, -1 means 4 - 2: G = 3 + 2/2 = 4, which is the mean still."""
    a = learner(normalise_value=True, lr_critic=1e-30)
    metrics = update(a, make_batch([[1.0, 0], [1, 0]], [[0.0, 0]] * 2, [2.0, 6], terminated=Y))
    near(recorded["critic"][0]["target"].flatten(), [-1.0, 1])
    near(recorded["critic"][0]["value"].flatten(), [1.0, 1])
    near(recorded["actor"][0]["advantage"].flatten(), [1.0, 1])
    near(metrics["q"], 6.0)
    near(metrics["td_error"], 1.0)
    # the policy has learnt to do the first: it would draw it again
    update(a, make_batch([[1.0, 0]], [[-1.0, JUNK]], 3.0))
    near(recorded["critic"][1]["target"].flatten(), [0.0])
    assert a.value_norm.count == 3


def test_rewards_are_divided_by_the_root_mean_square_of_all_so_far(recorded):
    """normalise_reward: 2 and 6 and then 10 and 4, of mean square 156 / 4 = 39; the dead are not counted."""
    zeros = [[0.0, 0]] * 2
    for mortal in (False, True):
        a = learner(world(mortal=mortal), normalise_reward=True, reward_scale=3.0)
        update(a, make_batch(zeros, zeros, [2.0, 6], terminated=Y))
        if mortal:
            update(a, make_batch(zeros, zeros, [JUNK, JUNK], terminated=Y, alive=N))
        update(a, make_batch(zeros, zeros, [10.0, 4], terminated=Y))
        near(recorded["critic"][-1]["target"].flatten(), [30 / 39**0.5, 12 / 39**0.5])


def test_a_normaliser_of_the_users_own(tmp_path, recorded):
    """With this `normaliser` a return of 6 is 3, an observation of 4 is 2, and a value of 2 means 4."""
    a = learner(normaliser=halves(tmp_path), normalise_obs=True, normalise_value=True)
    metrics = update(a, make_batch([[4.0, 0]], [[8.0, 0]], 2.0))
    near(recorded["critic"][0]["value"].flatten(), [2.0])
    near(recorded["critic"][0]["target"].flatten(), [(2 + 2 * 4 / 2) / 2])
    near(recorded["actor"][0]["advantage"].flatten(), [2.0])  # of values 4 and 0
    near(metrics["q"], 4.0)


# --- rates ---


@pytest.mark.parametrize(
    ("schedule", "share"),
    [("constant", 1.0), ("linear", 0.55), ("cosine", 0.55), ("exponential", 0.1**0.5), ("exponential:0.8/update", 0.8**5)],
)
def test_rates_follow_their_schedule(schedule, share):
    """Half-way, after 50 of 100 steps and 5 updates. Epsilon has a time of its own: it is over after 100."""
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
def test_values_of_frames():
    """pi = 5/8, 3/8 of 8 and 16."""
    a = learner(logits=LIKELY, epsilon=0.5)
    near(a.values(make_batch([[8.0, 16]], [[0.0, 0]]).frame).flatten(), [11.0])
    assert set(a.nets) == {"actor", "critic", "target_critic"}


# --- whole worlds: who is not there, and what memory holds ------------------------------------------------------------


def loop_of(env, rows=8, /, **sections):
    common = env in ("simple_speaker_listener", "probe_matrix")
    return make_loop("coma", env, rows, {} if common else {"reward": "team-mean"}, **sections)


def test_agents_are_paid_the_mean_of_their_team_and_what_a_shaper_makes_of_it(tmp_path, recorded):
    (tmp_path / "mine.py").write_text("def twice(reward, obs, step, steps):\n    return reward * 2\n")
    for shaper, times in ((None, 1.0), (f"{tmp_path}/mine.py:twice", 2.0)):
        loop = loop_of(
            "simple_spread", algo={"rollout": 8, "gamma": 0.0, "normalise_value": False, "critic_slices": 0, "shaper": shaper}
        )
        batch = collect(loop, 8)
        own = batch.results["agents"].reward
        assert (own - own[..., :1]).abs().max() > 1e-3  # they are paid unlike
        update(loop.learners[0], batch)
        mean = times * own.mean(-1, keepdim=True).expand_as(own)
        torch.testing.assert_close(recorded["critic"][-1]["target"], mean)


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
    """Whatever the dead see, do and are paid, the weights come out the same; and whatever their memory is, where their values
    are not learnt."""
    config = {"rollout": 10, "normalise_value": False, **config}
    loop, twin = (loop_of("probe_deaths", 4, algo=config, net={"hidden": (8,), **net}) for _ in range(2))
    a, b = loop.learners[0], twin.learners[0]
    loop.collector.collect(5)
    batch = collect(loop, 10)
    gone = ~batch.frame["agents"].alive
    assert gone.any()
    spoilt = spoil(batch, gone, gone)
    for part in ("actor", "critic") if a.config.after_death == "own" else ():
        for x in tree_leaves(spoilt.memory["agents"].get(part)):
            x[gone[0]] = 9.0  # who is not there at first arrives with an empty memory
    for _ in range(2):  # statistics move after an update
        update(a, batch)
        update(b, spoilt)
    assert same_state(a, b)
    assert a.actor_optimiser.steps == 2
    assert (a.actor_optimiser.first != 0).any()


@pytest.mark.parametrize("net", [{}, GRU, LSTM], ids=["none", "gru", "lstm"])
def test_slices_of_a_critic_that_stands_still_give_the_same_advantages(net, recorded):
    """Also with memory: a slice begins with the memory before it."""
    for slices in (0, 5):
        loop = loop_of("probe_deaths", algo={"rollout": 16, "lr_critic": 1e-30, "critic_slices": slices}, net=net)
        batch = collect(loop)
        update(loop.learners[0], batch)
    one, other = (torch.where(batch.frame["agents"].active, x["advantage"], 0) for x in recorded["actor"])
    assert one.abs().max() > 1e-5
    torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("memory", [GRU, LSTM], ids=["gru", "lstm"])
@pytest.mark.parametrize("env", ["probe_deaths", "simple_spread", "simple_speaker_listener"])
def test_a_rollout_begins_with_the_memories_that_the_last_one_left(env, memory):
    """Of actors and critics, and what was done last."""
    loop = loop_of(env, net=memory, algo={"rollout": 6})
    a = loop.learners[0]
    loop.collector.collect(3)
    batch = collect(loop, 6)
    samples = Samples(a, batch)
    taken = {g: values.one_hot(batch.actions[g], a.spaces[g]) * batch.frame[g].active[..., None] for g in a.groups}
    last = {g: a._last_action(samples[g], taken[g]) for g in a.groups}
    left = {}
    with torch.no_grad():
        for g in a.groups:
            part, before = samples[g], samples[g].memory
            sees = {
                "actor": a._actor_sees(part.actor_input, last[g]),
                "critic": a._critic_sees(part.critic_input, g, taken, last),
            }
            nets = {"actor": a._policy(g, part.legal), "critic": a.critics[g]}
            left[g] = {k: part.unroll(net, sees[k], before[k])[1] for k, net in nets.items()}
    then = collect(loop, 6).memory  # which is collected into the same tensors
    for g in a.groups:
        for net, after in left[g].items():
            for k, x in after.items():
                assert x[-1].abs().max() > 1e-3
                torch.testing.assert_close(then[g][net][k], x[-1], rtol=0, atol=1e-6)
        assert torch.equal(then[g]["last"], taken[g][-1])


@pytest.mark.parametrize("config", [{}, {"replay": 20, "batch": 4, "every": 50}])
def test_a_run_learns_and_logs_its_metrics(config):
    loop = loop_of("simple_spread", 4, algo={"rollout": 25, "critic_slices": 0, **config}, net=GRU)
    a = loop.learners[0]
    for _ in range(4):
        loop.iterate()
    assert a.actor_optimiser.steps == a.critic_optimiser.steps == (6 if "replay" in config else 4)  # (400 - 100) / 50
    metrics = {k.split("/")[-1]: x for k, x in loop.means.take().items()}
    names = "policy_loss entropy advantage epsilon critic_loss td_error q target_lag learning_rate grad_norm_actor"
    assert set(metrics) == {*names.split(), "grad_norm_critic"}
    assert all(math.isfinite(x) for x in metrics.values())


@pytest.mark.parametrize("memory", [GRU, LSTM], ids=["gru", "lstm"])
def test_next_actions_are_drawn_with_the_memory_after_each_step(memory):
    loop = loop_of("simple_spread", net=memory, algo={"rollout": 6})
    a, calls = loop.learners[0], []
    batch, policy_of = collect(loop, 6), a._policy

    def recording_policy(g, legal):
        def policy(x, before, *more):
            out = policy_of(g, legal)(x, before, *more)
            calls.append((before, tree_map(torch.detach, out[1])))
            return out

        return policy

    a._policy = recording_policy
    update(a, batch)
    (_, after), (before, _) = calls
    assert all(torch.equal(x, after[k]) for k, x in before.items())
    assert all(x.abs().max() > 1e-3 and not x.requires_grad for x in before.values())
