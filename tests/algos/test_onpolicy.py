"""Every option of the on-policy algorithms changes the number that it says it changes, as worked out on paper.

The nets of `learner` are one layer, set by hand: V(o) = o, and both choices are as likely, log pi = -log 2. What agents see is
one number, its value. Advantages are not scaled, and gamma = lambda = 1/2, unless a test says otherwise. Adam's first step
is by the rate, whatever the gradient is: the rate is 1/4. What `actor_loss` is given is written down by `listen`.
"""

import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from bench import check_every_option_is_tested, plain

from shoal.algos.a2c import A2C
from shoal.algos.base import Seat
from shoal.algos.optimiser import Optimiser
from shoal.algos.ppo import PPO
from shoal.algos.samples import Samples
from shoal.buffers.minibatches import spans
from shoal.kernels import native
from shoal.nets.config import NetConfig
from shoal.ops.schedules import Now
from shoal.spec import Batch, Box, Discrete, EnvSpec, Frame, Group, MultiDiscrete, Result, UserError, View
from shoal.training.loop import Loop
from shoal.training.settings import Settings, resolve
from shoal.tree import tree_leaves, tree_map

JUNK = 4096.0  # stands where nothing may look
Y, N = True, False
LOG_2 = math.log(2)
TWO = Discrete(2)
KINDS = [False] if native.why_not() else [False, True]
HALF_WAY = Now(50, 100, 5)
PLAIN = {
    "rollout": 3,
    "gamma": 0.5,
    "lam": 0.5,
    "lr": 0.25,
    "entropy": 0.0,
    "epochs": 1,
    "minibatches": 1,
    "value_clip": None,
    "grad_clip": None,
    "advantage_scope": "none",
    "normalise_obs": False,
    "normalise_value": False,
}


def world(n=1, obs=(1,), action=TWO, **more):
    group = {k: more.pop(k) for k in ("mortal", "masked") if k in more}
    return EnvSpec((Group("agents", "t", tuple(f"agent_{i}" for i in range(n)), obs, action, **group),), **more)


def learner(spec=None, net=None, kernels=False, **config):
    nets = NetConfig(**{"hidden": (), **(net or {})})
    config = PPO.Config(**{**plain(PPO), **PLAIN, **config})
    a = PPO(Seat(spec or world(), ("agents",), config, nets, torch.Generator().manual_seed(0), kernels=kernels))
    with torch.no_grad():
        for name, m in a.nets.items():
            for p in m.net.parameters():
                p.zero_()
            if name != "actor":
                m.net.body.weights[0].fill_(1.0)
    return a


def learn(a, batch):
    return a.update(Samples(a, batch))


def listen(a):
    told, loss = [], a.actor_loss

    def actor_loss(log_prob, entropy, batch):
        out, means = loss(log_prob, entropy, batch)
        weights = None if a.critic is None else [float(p.detach().flatten()[0]) for p in a.critic.parameters()]
        told.append({**vars(batch), "now": log_prob.detach(), "loss": out.detach(), "critic": weights})
        return out, means

    a.actor_loss = actor_loss
    return told


def shaped(x):
    """[T] or [T, B, N] -> [T, B, N]."""
    x = torch.as_tensor(x)
    return x[:, None, None] if x.dim() == 1 else x


def happened(r, v, w=None, terminated=None, over=None, ratio=1.0, noise=0):
    """A batch of steps paid r, in which v is seen and then w. `ratio`: how much likelier the actions became since."""
    r, v = shaped(r).float(), shaped(v).float()
    w = torch.full_like(v, JUNK) if w is None else shaped(w).float()
    yes = torch.ones_like(r, dtype=torch.bool)
    terminated = ~yes if terminated is None else shaped(terminated).expand_as(yes)
    over = ~yes[..., 0] if over is None else shaped(over)[..., 0].expand(r.shape[:2])
    first = torch.zeros_like(yes)
    first[0] = True
    frames = (Frame({"agents": View(x[..., None], yes, yes, first)}) for x in (v, w))
    log_prob = torch.full_like(r, -LOG_2 - math.log(ratio))
    batch = Batch(
        *frames,
        {"agents": torch.zeros_like(r, dtype=torch.long)},
        {"agents": Result(r, terminated)},
        over,
        {"agents": {"log_prob": log_prob}},
        {"agents": {}},
        {"agents": r},
    )
    batch.noise = torch.rand(noise, generator=torch.Generator().manual_seed(1))
    return batch


def near(x, y, tol=2e-5):
    x = x.detach() if isinstance(x, torch.Tensor) else torch.tensor(x)
    torch.testing.assert_close(x.double(), torch.tensor(y, dtype=torch.float64), rtol=tol, atol=tol)


# --- options that change one number -----------------------------------------------------------------------------------


@dataclass
class Switch:
    """An option, set or not on top of `base`, with the number that is to be expected of it."""

    batch: dict[str, Any]
    measure: Any  # (learner, what it told, metrics) -> the number
    plain: Any
    value: Any
    switched: Any
    base: Any = None


def advantage(a, told, metrics):
    return told[-1]["advantage"].flatten()


def target(a, told, metrics):
    return told[-1]["target"].flatten()


def loss(a, told, metrics):
    return told[-1]["loss"]


def first_weights(a, told, metrics):
    """Of critic and actor."""
    return torch.stack([m.net.body.weights[0].flatten()[0] for m in (a.critic, a.actor)])


def metric(name):
    return lambda a, told, metrics: metrics[name]


def moment(a, told, metrics):
    return a.critic_optimiser.first.norm()


def adam_steps(a, told, metrics):
    assert a.actor_optimiser.steps == a.critic_optimiser.steps
    return a.actor_optimiser.steps


# tests/ops/test_returns.py: delta = 1, -5, 4 and A = 1 - 4/4, -5 + 4/4, 4
COLUMN = {"r": [1.0, 2, 3], "v": [4.0, 8, 2], "w": [8.0, 2, 6]}
# cut off in step 1, where the last observation is worth 10: A_1 = 2 + 10/2 - 8 = -1, A_0 = 1 - 1/4
CUT = {"r": [1.0, 2, 3], "v": [4.0, 8, 2], "w": [8.0, 10, 6], "over": [N, Y, N]}
# terminated in each step, from a value of 0: A = r = target
PAID = {"r": [2.0, 6], "v": [0.0, 0], "terminated": [Y, Y]}
# one step from a value of 1 that is paid 3 and terminates: A = 2, target 3. The value's error is 2^2 / 2, its slope in weight
# and bias -2, -2. A choice of two, as likely: the slope in its logits is -2 / 2, 2 / 2
ONE = {"r": [3.0], "v": [1.0], "terminated": [Y]}
LIKELIER = {**ONE, "ratio": 1.5}

SWITCHES = {
    "gamma": Switch(COLUMN, advantage, [0.0, -4, 4], 1.0, [4.75, -0.5, 7]),  # deltas 5, -4, 7
    "lam": Switch(COLUMN, advantage, [0.0, -4, 4], 1.0, [-0.5, -3, 4]),  # returns 3.5, 5, 6 less the values
    "reward_scale": Switch(COLUMN, advantage, [0.0, -4, 4], 2.0, [1.6875, -1.25, 7]),  # deltas 2, -3, 7
    "time_limit": Switch(CUT, advantage, [0.75, -1, 4], False, [-0.5, -6, 4]),  # A_1 = 2 - 8
    "normalise_reward": Switch(PAID, advantage, [2.0, 6], True, [2 / 20**0.5, 6 / 20**0.5]),  # (4 + 36) / 2
    "normalise_value": Switch(PAID, target, [2.0, 6], True, [-1.0, 1]),
    "advantage_scope": Switch(PAID, advantage, [2.0, 6], "group", [-1.0, 1]),  # see test_advantages_are_scaled_over_a_scope
    "huber": Switch(ONE, metric("value_loss"), 2.0, 1.0, 1.5),  # 1 (2 - 1/2)
    "value_weight": Switch(ONE, metric("grad_norm_critic"), 2 * 2**0.5, 2.0, 4 * 2**0.5),
    # in the second of two epochs the value is 1.25 + 0.25: 1.5^2 / 2; held within 0.2 of 1 it is 1.2: 1.8^2 / 2
    "value_clip": Switch(ONE, metric("value_loss"), (2 + 1.125) / 2, 0.2, (2 + 1.62) / 2, {"epochs": 2}),
    "grad_clip": Switch(ONE, moment, 0.1 * 2 * 2**0.5, 0.5, 0.1 * 0.5),  # Adam's first moment is a tenth of the gradient
    "lr": Switch(ONE, first_weights, [1.25, 0.25], 0.5, [1.5, 0.5]),
    "lr_critic": Switch(ONE, first_weights, [1.25, 0.25], 0.5, [1.5, 0.25]),
    "lr_schedule": Switch(ONE, first_weights, [1.25, 0.25], "linear", [1.125, 0.125]),  # half-way: see test_rates_follow_...
    "lr_last": Switch(ONE, first_weights, [1.125, 0.125], 0.5, [1.1875, 0.1875], {"lr_schedule": "linear"}),
    "weight_decay": Switch(ONE, first_weights, [1.25, 0.25], 0.5, [1.25 - 0.25 * 0.5, 0.25]),  # rate times decay times 1
    "clip": Switch(LIKELIER, loss, -2.4, 0.4, -2.8),  # -1.2 A, -1.4 A
    "clip_schedule": Switch(LIKELIER, loss, -2.4, "linear", -2.2),  # half-way to 0
    "clip_last": Switch(LIKELIER, loss, -2.2, 0.5, -2.3, {"clip_schedule": "linear"}),  # half-way to 0.1
    "entropy": Switch(ONE, loss, -2.0, 0.5, -2 - 0.5 * LOG_2),
    "entropy_schedule": Switch(ONE, loss, -2 - 0.5 * LOG_2, "linear", -2 - 0.25 * LOG_2, {"entropy": 0.5}),
    "entropy_last": Switch(
        ONE, loss, -2 - 0.25 * LOG_2, 0.5, -2 - 0.375 * LOG_2, {"entropy": 0.5, "entropy_schedule": "linear"}
    ),
    "epochs": Switch(ONE, adam_steps, 1.0, 3, 3.0),
    "minibatches": Switch({**PAID, "noise": 2}, adam_steps, 1.0, 2, 2.0),
    "rollout": Switch(ONE, lambda a, *_: float(a.feed.steps), 3.0, 7, 7.0),
    "episodes": Switch(ONE, lambda a, *_: float(a.feed.steps), 3.0, 2, 10.0),  # episodes of at most 5 steps
}
ELSEWHERE = {  # option -> the test of it, here or in a file of its own
    "after_death": "tests/algos/test_after_death.py",
    "lr_kl_factor": "test_the_adaptive_rate_moves_by_its_factor_between_its_bounds",
    "lr_kl_least": "test_the_adaptive_rate_moves_by_its_factor_between_its_bounds",
    "lr_kl_most": "test_the_adaptive_rate_moves_by_its_factor_between_its_bounds",
    "advantage_every": "test_advantages_computed_anew_are_those_of_the_critic_that_moved",
    "chunk": "test_a_chunk_stays_together_and_every_moment_is_taken_once",
    "critic": "test_a_critic_sees_its_own_its_teams_or_the_worlds",
    "critic_input": "test_a_critic_sees_its_own_its_teams_or_the_worlds",
    "critic_slices": "test_slices_go_from_the_last_to_the_first_towards_targets_that_stay",
    "minibatch_episodes": "tests/algos/test_episodes.py",
    "kl_stop": "test_a_policy_that_moved_too_far_stops_and_its_critic_goes_on",
    "learning_starts": "test_before_learning_starts_nothing_but_statistics_moves",
    "noise_keep": "test_exploration_remembers_and_its_density_is_that_of_one_step",
    "log_std": "test_actions_spread_by_log_std_and_are_squashed",
    "normalise_obs": "test_observations_are_normalised_by_what_was_seen_before_the_update",
    "normalise_state": "tests/algos/test_observations.py",
    "normaliser": "test_a_normaliser_of_the_users_own",
    "random_steps": "test_first_steps_are_uniform_over_what_is_legal",
    "shaper": "tests/training/test_shaper.py",
    "state_normaliser": "tests/algos/test_observations.py",
    "squash": "test_actions_spread_by_log_std_and_are_squashed",
    "target_tau": "test_a_target_critic_gives_the_values_and_follows",
}


def test_every_option_has_a_number_of_its_own():
    check_every_option_is_tested((PPO, A2C), SWITCHES, ELSEWHERE, globals())


@pytest.mark.parametrize("kernels", KINDS)
@pytest.mark.parametrize("option", SWITCHES)
def test_switching_an_option_changes_the_number_expected_by_hand(option, kernels):
    s = SWITCHES[option]
    for config, expected in (({}, s.plain), ({option: s.value}, s.switched)):
        a = learner(world(horizon=5), None, kernels, **(s.base or {}), **config)
        told = listen(a)
        a.set_schedules(HALF_WAY)
        metrics = learn(a, happened(**s.batch))
        near(s.measure(a, told, metrics), expected)
    assert s.plain != s.switched


# --- advantages -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("scope", "expected"),
    [
        ("none", [[1, 5], [3, 7]]),
        ("group", [[-3 / 5**0.5, 1 / 5**0.5], [-1 / 5**0.5, 3 / 5**0.5]]),  # mean 4, variance (9 + 1 + 1 + 9) / 4
        ("agent", [[-1, -1], [1, 1]]),  # 1, 3 and 5, 7
        ("batch", [[-1, 1], [-1, 1]]),  # 1, 5 and 3, 7: a minibatch is a moment here
    ],
)
def test_advantages_are_scaled_over_a_scope(scope, expected):
    a = learner(world(2), advantage_scope=scope, minibatches=2)
    told = listen(a)
    learn(a, happened([[[1.0, 5]], [[3.0, 7]]], torch.zeros(2, 1, 2), terminated=torch.ones(2, 1, 2).bool(), noise=2))
    moments = sorted((t["advantage"][0, 0] for t in told), key=lambda x: float(x.sum()))
    if scope == "batch":
        assert [t.tolist() for t in moments] == [pytest.approx([-1.0, 1.0])] * 2
    near(torch.stack(moments), expected)


@pytest.mark.parametrize(("limit", "learnt", "expected"), [(True, [N, Y], [0, 1]), (False, [Y, Y], [2, 1])])
def test_turns_that_wait_for_a_time_limit_are_learnt_from_if_it_is_an_end(limit, learnt, expected):
    """Agent 0 moves, agent 1 moves, cut off at agent 1's turn; each is paid 1 a step and all values are 0. Agent 0's turn is
    worth 1 + 1 with time_limit false; else nobody knows how it would have gone on."""
    a = learner(world(2, mortal=True, turns=True), time_limit=limit)
    batch = happened(torch.ones(2, 1, 2), torch.zeros(2, 1, 2), torch.zeros(2, 1, 2), over=[N, Y])
    for frame, turns in ((batch.frame, (0, 1)), (batch.next, (1, 1))):
        frame["agents"].active = torch.tensor(turns)[:, None, None] == torch.arange(2)
    told = listen(a)
    learn(a, batch)
    assert [told[0]["active"][k, 0, k] for k in (0, 1)] == learnt
    assert [told[0]["advantage"][k, 0, k] for k in (0, 1)] == expected


@pytest.mark.parametrize(
    ("every", "judged_by"), [("rollout", [0, 0, 0, 0]), ("epoch", [0, 0, 2, 2]), ("minibatch", [0, 1, 2, 3])]
)
@pytest.mark.parametrize("scope", ["none", "batch"])
def test_advantages_computed_anew_are_those_of_the_critic_that_moved(every, judged_by, scope):
    """Two epochs of two minibatches of two steps. V = w o + b, so A_t = r_t + (w o' + b) / 2 - (w o + b) with lambda 0."""
    a = learner(advantage_every=every, epochs=2, minibatches=2, lam=0.0, advantage_scope=scope)
    told = listen(a)
    learn(a, happened([1.0, 2, 3, 7], [1.0, 2, 4, 8], [2.0, 4, 8, 1], noise=8))
    assert len({tuple(t["critic"]) for t in told}) == 4  # it moved each time
    learner_reward, after = {1: 1, 2: 2, 4: 3, 8: 7}, {1: 2, 2: 4, 4: 8, 8: 1}
    for k, t in enumerate(told):
        w, b = told[judged_by[k]]["critic"]
        seen = t["actor_input"].flatten().tolist()
        expected = torch.tensor([learner_reward[o] + (w * after[o] + b) / 2 - (w * o + b) for o in seen])
        scaled = (expected - expected.mean()) / expected.std(correction=0) if scope == "batch" else expected
        near(t["advantage"].flatten(), scaled.tolist())
        near(t["target"].flatten(), [x + w * o + b for x, o in zip(expected.tolist(), seen, strict=True)])


def test_a_target_critic_gives_the_values_and_follows():
    """target_tau 1/4. The slow copy says V = 3 o: A = 1 + 3 * 2 / 2 - 3 = 1, to be learnt is 1 + 3; the critic says 1."""
    a = learner(target_tau=0.25, value_clip=0.1)
    with torch.no_grad():
        a.target.net.body.weights[0].fill_(3.0)
    told = listen(a)
    learn(a, happened([1.0], [1.0], [2.0]))
    near(told[0]["advantage"].flatten(), [1.0])
    near(told[0]["target"].flatten(), [4.0])
    near(told[0]["value"].flatten(), [1.0])  # clips are round the critic's own
    near(a.critic.net.body.weights[0].flatten(), [1.25])
    near(a.target.net.body.weights[0].flatten(), [0.75 * 3 + 0.25 * 1.25])
    near(a.target.net.body.biases[0].flatten(), [0.25 * 0.25])
    assert all(p.requires_grad is False for p in a.target.parameters())
    learn(a, happened([1.0], [1.0], [2.0]))
    v = 0.75 * 3 + 0.25 * 1.25 + 0.25 * 0.25  # of the target, at 1
    near(told[1]["target"].flatten(), [1 + (2 * v - 0.0625) / 2])


# --- the critic in slices of time ---


def test_slices_go_from_the_last_to_the_first_towards_targets_that_stay():
    """critic_slices 2 of five steps: 2 ... 4, whose values are 1; then 0 and 1, whose values are 1.5 after a step by 1/4 of
    weight and bias. The targets are the rewards."""
    a = learner(rollout=5, critic_slices=2)
    told = listen(a)
    metrics = learn(a, happened([2.0, 3, 4, 5, 6], [1.0] * 5, terminated=[Y] * 5))
    near(told[0]["advantage"].flatten(), [0.5, 1.5, 3, 4, 5])
    near(told[0]["target"].flatten(), [2.0, 3, 4, 5, 6])
    assert (a.critic_optimiser.steps, a.actor_optimiser.steps) == (2, 1)
    # (9 + 16 + 25) / 6 of the last three, (0.25 + 2.25) / 4 of the first two
    near(metrics["value_loss"], (3 * 50 / 6 + 2 * 2.5 / 4) / 5)


def test_a_slice_in_which_nobody_acts_is_in_no_mean_and_no_step():
    """critic_slices 2 of four steps, in the last two of which the agent is dead: errors of 1 and 2 alone."""
    a = learner(world(mortal=True), rollout=4, critic_slices=2)
    batch = happened([2.0, 3, JUNK, JUNK], [1.0, 1, JUNK, JUNK], terminated=[Y] * 4)
    batch.frame["agents"].alive = batch.frame["agents"].active = torch.tensor([Y, Y, N, N])[:, None, None]
    metrics = learn(a, batch)
    near(metrics["value_loss"], (1 + 4) / 4)
    near(metrics["grad_norm_critic"], 1.5 * 2**0.5)
    assert a.critic_optimiser.steps == 1


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        ({"lr_schedule": "kl"}, "--algo.lr-schedule kl needs more than one step an update"),
        ({"critic": "own", "critic_input": "agent"}, "--algo.critic-input agent is for critics that see more than their own"),
    ],
)
def test_options_that_do_not_go_together_are_refused(config, sentence):
    with pytest.raises(UserError, match=sentence):
        learner(**config)


def test_slices_leave_no_step_out():
    """Twenty-five steps in ten slices, each step with a weight of its own that only it moves."""
    assert [b - a for a, b in spans(25, 10)] == [2, 3, 2, 3, 2, 3, 2, 3, 2, 3]
    assert spans(3, 10) == [(0, 1), (1, 2), (2, 3)]
    spec = world(obs=(25,))
    a = learner(spec, rollout=25, critic_slices=10, lr=1e-3)
    batch = happened([5.0] * 25, [0.0] * 25, terminated=[Y] * 25)
    for frame in (batch.frame, batch.next):
        frame["agents"].obs = torch.eye(25)[:, None, None]
    learn(a, batch)
    assert a.critic_optimiser.steps == 10
    moved = (a.critic.net.body.weights[0][0].detach() - 1).tolist()
    assert all(x > 1e-4 for x in moved)
    assert all(moved[k] < moved[k + 5] for k in range(20))  # the later, the longer ago: Adam's momentum goes on


@pytest.mark.parametrize("memory", ["none", "gru", "lstm"])
@pytest.mark.parametrize("env", ["probe_deaths", "probe_turns"])
def test_slices_of_a_critic_that_stands_still_give_the_same_advantages(memory, env):
    """Also with memory: a slice begins with the memory before it."""
    algo = {"rollout": 16, "lr_critic": 1e-30, "normalise_value": False}
    seen = []
    for slices in (0, 5):
        loop = loop_of(
            "mappo", env, algo={**algo, "critic_slices": slices, "epochs": 1, "minibatches": 1}, net={"memory": memory}
        )
        a = loop.learners[0]
        told = listen(a)
        learn(a, batch_of(loop))
        seen.append(torch.where(told[0]["active"], told[0]["advantage"], 0))
    assert seen[0].abs().max() > 0.5
    torch.testing.assert_close(seen[1], seen[0], rtol=0, atol=1e-5)


# --- rates and stops ---


@pytest.mark.parametrize(
    ("schedule", "share"),
    [
        ("constant", 1.0),
        ("linear", 0.1 + 0.9 / 2),
        ("cosine", 0.1 + 0.9 * (1 + math.cos(math.pi / 2)) / 2),
        ("exponential", 0.1**0.5),
        ("exponential:0.8/update", 0.8**5),
        ("exponential:0.5/update", 0.1),  # 1/32, but no less than lr_last
        ("exponential:0.99/step", 0.99**50),
        ("file.py:Fifth", 0.9),  # 5 / 5 of the first less the last
    ],
)
def test_rates_follow_their_schedule(schedule, share, tmp_path):
    """Half-way, after 50 of 100 steps and 5 updates; entropy and clip take the same words."""
    (tmp_path / "file.py").write_text(
        "class Fifth:\n"
        "    def __init__(self, first, last):\n"
        "        self.first, self.last = first, last\n"
        "    def __call__(self, now):\n"
        "        return self.first * now.updates / 5 - self.last\n"
    )
    word = schedule.replace("file.py", f"{tmp_path}/file.py")
    names = {"lr_schedule": word, "entropy_schedule": word, "clip_schedule": word}
    a = learner(lr=1e-3, lr_critic=2e-3, entropy=0.5, clip=0.3, lr_last=0.1, entropy_last=0.1, clip_last=0.1, **names)
    a.set_schedules(HALF_WAY)
    near(a.actor_optimiser.rate, 1e-3 * share, 1e-9)
    near(a.critic_optimiser.rate, 2e-3 * share, 1e-9)
    near(a.entropy_weight, 0.5 * share, 1e-7)
    near(a.clip, 0.3 * share, 1e-7)


@pytest.mark.parametrize(
    ("schedule", "times"),
    [
        ("kl", 1 / 1.5),  # 0.0945 is more than twice 0.008
        ("kl:0.04", 1 / 1.5),
        ("kl:0.1", 1.0),
        ("kl:0.2", 1.5),  # less than half
    ],
)
@pytest.mark.parametrize("epochs", [2, 3])
def test_rates_adapt_to_the_divergence_after_each_epoch(schedule, times, epochs):
    """Actions that became 1.5 times likelier diverge by 0.5 - log 1.5 = 0.0945. The actor stands still for kl_stop. After the
    first step of an update nothing is known: it has not moved when its divergence is measured."""
    a = learner(lr=1e-3, lr_critic=2e-3, lr_schedule=schedule, kl_stop=1e-9, epochs=epochs)
    for updates in (1, 2):
        a.set_schedules(HALF_WAY)
        metrics = learn(a, happened(**LIKELIER))
        near(metrics["kl"], 0.5 - math.log(1.5))
        near(a.actor_optimiser.rate, 1e-3 * times ** ((epochs - 1) * updates), 1e-9)
        near(a.critic_optimiser.rate, 2e-3 * times ** ((epochs - 1) * updates), 1e-9)
        assert metrics["learning_rate"] == a.actor_optimiser.rate


def test_the_adaptive_rate_moves_by_its_factor_between_its_bounds():
    """It has diverged by 0.0945, more than twice 0.04, and then less than half of 0.2."""
    for schedule, settings, rate in (
        ("kl:0.04", {"lr_kl_factor": 2.0}, 5e-4),
        ("kl:0.04", {"lr_kl_factor": 2.0, "lr_kl_least": 8e-4}, 8e-4),
        ("kl:0.2", {"lr_kl_factor": 3.0, "lr_kl_most": 2e-3}, 2e-3),
    ):
        a = learner(lr=1e-3, lr_schedule=schedule, kl_stop=1e-9, epochs=2, **settings)
        a.set_schedules(HALF_WAY)
        learn(a, happened(**LIKELIER))
        near(a.actor_optimiser.rate, rate, 1e-9)
    with pytest.raises(UserError, match=r"--algo.lr-kl-least is 0.1, more than the 0.01 of --algo.lr-kl-most"):
        learner(lr_schedule="kl", lr_kl_least=0.1)
    with pytest.raises(UserError, match=r"--algo.lr-kl-factor is for --algo.lr-schedule kl, which is linear"):
        learner(lr_schedule="linear", lr_kl_factor=2.0)
    with pytest.raises(UserError, match=r"--algo.lr-kl-factor is 0.5: it must be at least 1\."):
        learner(lr_schedule="kl", lr_kl_factor=0.5)


def test_a_schedule_with_rates_of_its_own_is_the_same_for_the_critic():
    a = learner(lr=1e-3, lr_critic=2e-3, lr_schedule="CyclicLR:base_lr=1e-4,max_lr=4e-3,step_size_up=2")
    rates = []
    for k in range(3):
        a.set_schedules(Now(0, 1, k))
        rates.append((float(a.actor_optimiser.rate), float(a.critic_optimiser.rate)))
    near(torch.tensor(rates), [[1e-4, 1e-4], [2.05e-3, 2.05e-3], [4e-3, 4e-3]], 1e-8)


def test_a_policy_that_moved_too_far_stops_and_its_critic_goes_on():
    still = learner(kl_stop=0.09, epochs=3)  # it has moved by 0.0945 before the first step
    before = {k: x.clone() for k, x in still.state_dict().items() if k.startswith("actor")}
    metrics = learn(still, happened(**LIKELIER))
    assert metrics["kept"] == 0
    assert all(torch.equal(x, still.state_dict()[k]) for k, x in before.items())  # Adam's moments too
    assert (still.actor_optimiser.steps, still.critic_optimiser.steps) == (0, 3)
    # from a ratio of one: the first step is taken and moves logits by 0.5 and -0.5 (weight and bias), and the others are not:
    # pi = 1 / (1 + e^-1) = 0.7311, ratio 1.4621, divergence 0.4621 - log 1.4621
    once = learner(kl_stop=0.01, epochs=4)
    metrics = learn(once, happened(**ONE))
    near(metrics["kept"], 0.25)
    near(metrics["kl"], 0.75 * (0.46212 - math.log(1.46212)))
    assert (once.actor_optimiser.steps, once.critic_optimiser.steps) == (1, 4)
    near(once.actor.net.body.weights[0].flatten(), [0.25, -0.25])
    assert learn(learner(kl_stop=9.0), happened(**ONE))["kept"] == 1


def test_rates_and_stops_do_not_go_by_steps_not_taken_nor_by_random_actions():
    """Before learning_starts the policy does not move; random_steps are 0.0945 off, which says nothing of its own moves."""
    early = {"lr": 1e-3, "lr_schedule": "kl:0.04", "epochs": 2}
    for config, batch, later in (
        ({"learning_starts": 60}, ONE, 1.5),
        ({"random_steps": 60, "kl_stop": 0.09}, LIKELIER, 1 / 1.5),
    ):
        a = learner(**early, **config)
        a.set_schedules(HALF_WAY)  # step 50
        metrics = learn(a, happened(**batch))
        near(a.actor_optimiser.rate, 1e-3, 1e-9)
        assert metrics.get("kept", 1) == 1
        a.set_schedules(Now(60, 100, 6))
        metrics = learn(a, happened(**batch))
        near(a.actor_optimiser.rate, 1e-3 * later, 1e-9)
        assert metrics.get("kept", 0) == 0


@pytest.mark.parametrize(
    ("net", "config"),
    [
        ({}, {}),
        ({}, {"kl_stop": 1e9, "epochs": 2}),
        ({}, {"critic_slices": 2}),
        ({"trunk": "shared"}, {}),
        ({}, {"target_tau": 0.5}),
    ],
)
def test_before_learning_starts_nothing_but_statistics_moves(net, config):
    a = learner(net=net, learning_starts=60, weight_decay=0.1, normalise_obs=True, normalise_value=True, **config)
    moving = ("actor", "critic", "target")  # nets, and the moments and steps of their optimisers
    before = {k: x.clone() for k, x in a.state_dict().items() if k.startswith(moving)}
    assert len(before) >= 7
    a.set_schedules(HALF_WAY)  # step 50
    learn(a, happened(**PAID))
    assert all(torch.equal(x, a.state_dict()[k]) for k, x in before.items())
    assert (a.observations.norms["agents"].count, a.value_norm.count) == (2, 2)
    a.set_schedules(Now(60, 100, 6))
    learn(a, happened(**ONE))
    assert all(not torch.equal(p, before[k]) for k, p in a.named_parameters() if "biases" in k)
    assert a.actor_optimiser.steps == config.get("epochs", 1)


# --- minibatches ---


@pytest.mark.parametrize(("chunk", "shape"), [("auto", (1, 4)), (1, (1, 4)), (2, (2, 2)), (4, (4, 1)), ("all", (4, 1))])
def test_a_chunk_stays_together_and_every_moment_is_taken_once(chunk, shape):
    """Four steps of two rows in two minibatches; what is seen in step t of row b is 10 b + t."""
    a = learner(rollout=4, chunk=chunk, epochs=3, minibatches=2)
    told = listen(a)
    seen = torch.arange(4.0)[:, None, None] + torch.tensor([0.0, 10.0])[:, None]
    assert a.draws(4, 2) == 3 * 8 // shape[0]
    learn(a, happened(torch.ones(4, 2, 1), seen, torch.zeros(4, 2, 1), noise=a.draws(4, 2)))
    pieces = [t["actor_input"][..., 0, 0] for t in told]
    assert [tuple(p.shape) for p in pieces] == [shape] * 6
    for epoch in range(3):
        taken = torch.cat([p.flatten() for p in pieces[2 * epoch : 2 * epoch + 2]])
        assert sorted(taken.tolist()) == [0, 1, 2, 3, 10, 11, 12, 13]
    for p in pieces:
        assert torch.equal(p, p[:1] + torch.arange(float(shape[0]))[:, None])  # steps of one row, in their order
    assert all(torch.equal(t["value"].flatten(), t["actor_input"].flatten()) for t in told)  # all of a moment moves together


def test_chunks_are_whole_rollouts_with_memory_and_must_divide_one():
    assert learner(net={"memory": "none"}).chunk == 1
    loop = loop_of("ppo", "probe_memory", algo={"episodes": 3}, net={"memory": "gru"})
    assert (loop.learners[0].chunk, loop.rollout) == (12, 12)  # three episodes of four steps
    with pytest.raises(UserError, match="chunk is 2: it must divide the 3 steps"):
        learner(chunk=2)
    with pytest.raises(UserError, match=r"--algo.episodes needs a world whose episodes have a longest length"):
        learner(episodes=2)


# --- acting ---


@pytest.mark.parametrize(
    ("space", "legal", "log_prob"),
    [
        (Discrete(3), [Y, N, Y], -LOG_2),
        (Discrete(3), None, -math.log(3)),
        (MultiDiscrete((3, 2)), [Y, N, Y, Y, Y], -LOG_2 - LOG_2),
        (Box((0.0, 0.0), (1.0, 1.0)), None, -2 * LOG_2),  # the density of a square of 2 by 2
    ],
)
def test_first_steps_are_uniform_over_what_is_legal(space, legal, log_prob):
    """A policy that would always take the first choice does so only after random_steps."""
    a = learner(world(action=space, masked=legal is not None), random_steps=60, log_std=-3.0)
    with torch.no_grad():
        a.actor.net.body.biases[0][0] = 50.0
    rows = 6000
    yes = torch.ones(rows, 1, dtype=torch.bool)
    view = View(torch.ones(rows, 1, 1), yes, yes, ~yes, None if legal is None else torch.tensor(legal).expand(rows, 1, -1))
    noise = {"agents": torch.rand(rows, 1, a.noise, generator=torch.Generator().manual_seed(0))}

    def acted(step, explore=True, quiet=False):
        a.set_schedules(Now(step, 100, 0))
        actions, _, extras = a.act(Frame({"agents": view}), {"agents": {}}, None if quiet else noise, explore)
        return actions["agents"].reshape(rows, -1), extras["agents"].get("log_prob")

    actions, logs = acted(59)
    near(logs, [[log_prob]] * rows)
    if isinstance(space, Box):
        assert actions.abs().max() <= 1
        shares = torch.stack([((actions >= x) & (actions < x + 0.5)).float().mean(0) for x in (-1.0, -0.5, 0.0, 0.5)])
        near(shares, [[0.25] * 2] * 4, 0.02)
    else:
        sizes = [Y] * sum(space.sizes) if legal is None else legal
        for d, (n, may) in enumerate(zip(space.sizes, torch.tensor(sizes).split(space.sizes), strict=True)):
            shares = torch.bincount(actions[:, d], minlength=n) / rows
            assert (shares[~may] == 0).all()
            near(shares, (may.float() / may.sum()).tolist(), 0.02)
    own, own_logs = acted(60)
    assert not torch.equal(own, actions)
    assert (own[:, 0] > 40).all() if isinstance(space, Box) else (own[:, 0] == 0).all()
    assert not torch.allclose(own_logs, logs)
    assert torch.equal(acted(59, explore=False)[0], own)  # nor where nothing is explored
    assert torch.equal(acted(59, quiet=True)[0], acted(60, quiet=True)[0])


def test_actions_spread_by_log_std_and_are_squashed():
    """The mean is 0 and Phi(1.96) = 0.975: the action is 1.96 std, or tanh of that with squash."""
    yes = torch.ones(1, 1, dtype=torch.bool)
    view, noise = View(torch.ones(1, 1, 1), yes, yes, ~yes), torch.full((1, 1, 1), 0.9750021)
    for log_std, squash, expected in ((0.0, False, 1.96), (-1.0, False, 1.96 / math.e), (-1.0, True, math.tanh(1.96 / math.e))):
        a = learner(world(action=Box((-1.0,), (1.0,))), log_std=log_std, squash=squash)
        actions, log_prob = act(a, view, noise)
        near(actions.flatten(), [expected])
        density = -(1.96**2) / 2 - log_std - 0.5 * math.log(2 * math.pi)
        near(log_prob.flatten(), [density - (math.log(1 - expected**2) if squash else 0)])
        batch = happened([1.0], [1.0], [1.0])
        batch.actions["agents"], batch.extras["agents"]["log_prob"] = actions[None], log_prob[None]
        metrics = learn(a, batch)
        near(metrics["std"], math.exp(log_std))
        assert abs(metrics["kl"]) < 1e-6


@torch.no_grad()
def test_exploration_remembers_and_its_density_is_that_of_one_step():
    """noise_keep 0.6: z = 1.96, then 0.6 z + 0.8 xi with xi = 0 is 1.176, then with xi = 1.96 it is 2.2736; a start forgets."""
    yes = torch.ones(1, 1, dtype=torch.bool)
    a = learner(world(action=Box((-1.0,), (1.0,))), noise_keep=0.6)
    memory = a.memory(1, torch.device("cpu"))
    told = []
    for start, u in ((yes, 0.9750021), (~yes, 0.5), (~yes, 0.9750021), (yes, 0.5)):
        frame = Frame({"agents": View(torch.ones(1, 1, 1), yes, yes, start)})
        actions, memory, extras = a.act(frame, memory, {"agents": torch.full((1, 1, 1), u)}, explore=True)
        told.append((actions["agents"].item(), extras["agents"]["log_prob"].item()))
    for (action, log_prob), z in zip(told, (1.96, 1.176, 2.2736, 0.0), strict=True):
        assert abs(action - z) < 1e-4
        assert abs(log_prob - (-(z**2) / 2 - 0.5 * math.log(2 * math.pi))) < 1e-4
    greedy, after, _ = a.act(frame, memory, None, explore=False)
    assert greedy["agents"].item() == 0
    assert torch.equal(after["agents"]["noise"], memory["agents"]["noise"])
    with pytest.raises(UserError, match=r"--algo.noise-keep is for continuous actions"):
        learner(noise_keep=0.5)


@torch.no_grad()
def act(a, view, noise):
    """Actions and their log-probabilities, as a collector has them."""
    given = None if noise is None else {"agents": noise}
    actions, _, extras = a.act(Frame({"agents": view}), {"agents": {}}, given, explore=noise is not None)
    return actions["agents"], extras["agents"].get("log_prob")


@pytest.mark.parametrize("kernels", KINDS)
def test_an_illegal_choice_is_in_no_draw_density_entropy_or_divergence(kernels):
    """The logits are -50, 30, -50 and the second is illegal: each of the others has 1/2."""
    a = learner(world(action=Discrete(3), masked=True), kernels=kernels, entropy=0.5)
    with torch.no_grad():
        a.actor.net.body.biases[0].copy_(torch.tensor([-50.0, 30, -50]))
    rows = 500
    yes = torch.ones(3, rows, 1, dtype=torch.bool)
    legal = torch.tensor([Y, N, Y]).expand(3, rows, 1, 3)
    view = View(torch.ones(3, rows, 1, 1), yes, yes, ~yes, legal)
    noise = torch.rand(3, rows, 1, 3, generator=torch.Generator().manual_seed(0))
    noise[0, 0, 0, 1] = 1 - 2**-24  # the luckiest draw there is
    (actions, log_prob), (greedy, _) = act(a, view, noise), act(a, view, None)
    assert set(actions.flatten().tolist()) == {0, 2}
    assert set(greedy.flatten().tolist()) <= {0, 2}
    near(log_prob.flatten(), [-LOG_2] * 3 * rows)
    batch = happened(torch.full((3, rows, 1), 2.0), torch.ones(3, rows, 1), torch.zeros(3, rows, 1))
    batch.frame["agents"].legal = legal
    batch.actions["agents"], batch.extras["agents"]["log_prob"] = actions, log_prob
    told = listen(a)
    metrics = learn(a, batch)
    near(metrics["entropy"], LOG_2)
    near(metrics["entropy_loss"], -0.5 * LOG_2)
    assert (metrics["kl"], metrics["clip_fraction"]) == (0, 0)
    near(told[0]["now"].flatten(), [-LOG_2] * 3 * rows)
    weights = a.actor.net.body
    assert (weights.weights[0][1], weights.biases[0][1]) == (0, 30)  # and no gradient reached it
    assert weights.biases[0][0] != -50


# --- seeing ---


@pytest.mark.parametrize(
    ("critic", "given", "width", "expected"),
    [
        ("own", "state", 2, None),
        ("team", "state", 4, [1.0, 2, 0, 0]),  # agent_1 is dead
        ("team", "agent", 6, [[1.0, 2, 0, 0, 1, 2], [1.0, 2, 0, 0, 3, 4]]),
        ("world", "state", 3, [7.0, 8, 9]),
        ("world", "joined", 6, [1.0, 2, 0, 0, 5, 6]),
        ("world", "agent", 5, [[7.0, 8, 9, 1, 2], [7.0, 8, 9, 3, 4]]),
    ],
)
@pytest.mark.parametrize("memory", ["none", "gru"])
def test_a_critic_sees_its_own_its_teams_or_the_worlds(critic, given, width, expected, memory):
    """critic and critic_input, in a world of two teams with a state of its own."""
    groups = Group("agents", "t", ("a_0", "a_1"), (2,), Discrete(2), mortal=True), Group("b", "u", ("b_0",), (2,), Discrete(2))
    config = PPO.Config(**{**PLAIN, "rollout": 1, "critic": critic, "critic_input": given})
    net = NetConfig(hidden=(8,), memory=memory)
    a = PPO(Seat(EnvSpec(groups, state=3), ("agents",), config, net, torch.Generator()))
    assert a.critic.net.body.width_in == width
    told = listen(a)
    batch = happened(torch.ones(1, 1, 2), torch.zeros(1, 1, 2), torch.zeros(1, 1, 2))
    alive = torch.tensor([[[Y, N]]])
    start = torch.zeros(1, 1, 2, dtype=torch.bool)
    views = {
        "agents": View(torch.tensor([[[[1.0, 2], [3, 4]]]]), alive, alive, start),
        "b": View(torch.tensor([[[[5.0, 6]]]]), *[torch.ones(1, 1, 1, dtype=torch.bool)] * 2, start[..., :1]),
    }
    batch.frame = batch.next = Frame(views, torch.tensor([[[7.0, 8, 9]]]))
    batch.memory = a.memory(1, torch.device("cpu"))
    learn(a, batch)
    assert told[0]["actor_input"][0, 0].tolist() == [[1, 2], [3, 4]]
    assert (told[0]["critic_input"] is told[0]["actor_input"]) == (critic == "own")
    if expected is not None:
        assert told[0]["critic_input"][0, 0].tolist() == expected
    assert told[0]["active"][0, 0].tolist() == [Y, N]


def test_observations_are_normalised_by_what_was_seen_before_the_update():
    """normalise_obs: 1 and 3 have mean 2 and deviation 1, so that 5 is 3 then; 1, 3, 5, 5 have mean 3.5 and variance 2.75."""
    a = learner(normalise_obs=True)
    told = listen(a)
    zeros = {"r": [1.0, 1], "w": [1.0, 1]}
    learn(a, happened(v=[1.0, 3], **zeros))
    near(told[0]["actor_input"].flatten(), [1.0, 3])
    learn(a, happened(v=[5.0, 5], **zeros))
    near(told[1]["actor_input"].flatten(), [3.0, 3])
    learn(a, happened(v=[3.5, 1e6], **zeros))
    near(told[2]["actor_input"].flatten(), [0.0, 10.0])  # held within 10
    norm = a.observations.norms["agents"]
    assert norm.count == 6
    off = learner()
    told = listen(off)
    learn(off, happened(v=[1.0, 3], **zeros))
    learn(off, happened(v=[5.0, 5], **zeros))
    near(told[1]["actor_input"].flatten(), [5.0, 5])


def test_values_speak_in_the_units_of_the_returns_seen():
    """normalise_value: after returns of 2 and 6 the critic's 1 means 4 + 2 * 1."""
    a = learner(normalise_value=True, lr_critic=1e-30)
    told = listen(a)
    learn(a, happened(**PAID))
    learn(a, happened([3.0], [1.0], [-1.0]))
    # V = 6, V' = 4 - 2 = 2: A = 3 + 2 / 2 - 6 = -2. The target 4 moves the mean of 2, 6, 4 nowhere: it is 0 deviations off
    near(told[1]["advantage"].flatten(), [-2.0])
    near(told[1]["target"].flatten(), [0.0])
    near(told[1]["value"].flatten(), [1.0])


def test_rewards_are_divided_by_the_root_mean_square_of_all_so_far():
    """normalise_reward: 2 and 6, then 10 and 14: the mean square of all four is (4 + 36 + 100 + 196) / 4 = 84."""
    a = learner(normalise_reward=True)
    told = listen(a)
    learn(a, happened(**PAID))
    learn(a, happened([10.0, 14], [0.0, 0], terminated=[Y, Y]))
    _, b = told[1]["critic"]  # V(0), learnt meanwhile
    near(told[1]["advantage"].flatten(), [10 / 84**0.5 - b, 14 / 84**0.5 - b])


@pytest.mark.parametrize(("env", "square"), [("probe_constant", 1.0), ("probe_turns", None)])
def test_constant_pay_and_pay_out_of_turn_are_not_blown_up(env, square):
    """In probe_turns a move is paid while the other moves: who acts at the moment earns nothing at it."""
    loop = loop_of("mappo", env, algo={"rollout": 16, "normalise_reward": True})
    a, batch = loop.learners[0], batch_of(loop)
    learn(a, batch)
    seen = a.reward_norm.var + a.reward_norm.mean.square()
    near(seen, float(batch.learner_reward["agents"].double().square().mean()) if square is None else square)


def test_a_rate_that_adapts_stays_where_nobody_acted():
    a = learner(world(mortal=True), lr=1e-3, lr_schedule="kl", epochs=2)
    batch = happened(**ONE)
    view = batch.frame["agents"]
    view.alive = view.active = ~view.active
    learn(a, batch)
    assert float(a.actor_optimiser.rate) == pytest.approx(1e-3)


def test_a_normaliser_of_the_users_own(tmp_path):
    """With this `normaliser` targets of 2 and 6 are 1 and 3, an observation of 4 is 2, and a value of 2 means 4."""
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
    told = listen(a)
    learn(a, happened([2.0, 6], [4.0, 0], terminated=[Y, Y]))
    near(told[0]["actor_input"].flatten(), [2.0, 0])
    near(told[0]["target"].flatten(), [1.0, 3])
    near(told[0]["advantage"].flatten(), [2.0 - 4, 6])
    assert (a.value_norm.seen, a.observations.norms["agents"].seen) == (2, 2)


# --- one net for both ---


@pytest.mark.parametrize("kernels", KINDS)
def test_a_shared_trunk_descends_both_losses_at_once(kernels):
    """The slopes of both choices and of the value, in weight and bias: -1, 1, -2 twice: the norm is the root of 12; with a
    value weight of 2 they are -1, 1, -4: the root of 36. Clipped to 0.5, all are scaled alike."""
    for weight, norm, slopes in ((1.0, 12**0.5, [-1.0, 1, -2]), (2.0, 6.0, [-1.0, 1, -4])):
        a = learner(net={"trunk": "shared"}, kernels=kernels, grad_clip=0.5, value_weight=weight)
        assert a.critic is None
        assert sum(isinstance(m, Optimiser) for m in a.modules()) == 1
        with torch.no_grad():
            a.actor.net.body.weights[0][2] = 1.0
        metrics = learn(a, happened(**ONE))
        near(metrics["grad_norm"], norm)
        near(metrics["value_loss"], 2.0)
        near(a.actor_optimiser.first, [0.1 * 0.5 / norm * x for x in (*slopes, *slopes)])
        near(a.actor.net.body.weights[0].flatten(), [0.25, -0.25, 1.25], 1e-4)


WORLD = {"critic": "world", "critic_input": "agent"}


@pytest.mark.parametrize("kernels", KINDS)
def test_a_trunk_that_a_central_critic_shares_descends_the_sum_of_both_losses(kernels):
    """What is seen is 2, of a world whose state is 3. The trunk is one unit, f = 1/2 o + 1/4 = 5/4. The logits are 0.4 f
    and -0.4 f, 1 apart, so that the choice that was taken has p = 1 / (1 + 1/e); V = 2 f - 1/2 s = 1. It is paid 4, and that is
    the end: A = 3.

        L_pi = -A log p          of the logits -+ 3 (1 - p), and so of f: -3 (1 - p) 0.8
        L_v  = (V - 4)^2 / 2     of V -3, and so of f: -3 x 2, times the value weight

    The trunk's weight has o = 2 times the sum of both, its bias the sum; the heads' weights have f and s times their own."""
    p = 1 / (1 + math.exp(-1))
    slope = 3 * (1 - p)
    for weight in (0.0, 1.0, 2.0):
        net = {"trunk": "shared", "hidden": (1,), "activation": "relu", "critic_hidden": ()}
        a = learner(world(state=1), net, kernels, value_weight=weight or 1e-30, **WORLD)
        assert sum(isinstance(m, Optimiser) for m in a.modules()) == 1
        actor = a.actor
        with torch.no_grad():
            actor.net.body.weights[0].fill_(0.5)
            actor.net.body.biases[0].fill_(0.25)
            actor.policy.weights[0].copy_(torch.tensor([[0.4], [-0.4]]))
            actor.policy.biases[0].zero_()
            actor.critic.body.weights[0].copy_(torch.tensor([[2.0, -0.5]]))
            actor.critic.body.biases[0].zero_()
        batch = happened([4.0], [2.0], terminated=[Y])
        batch.extras["agents"]["log_prob"].fill_(math.log(p))
        batch.frame.state = batch.next.state = torch.full((1, 1, 1), 3.0)
        metrics = learn(a, batch)
        near(metrics["policy_loss"], -3.0)
        near(metrics["value_loss"], 4.5)
        whole = -slope * 0.8 - 6 * weight
        of_heads = {
            "policy": [-slope * 1.25, slope * 1.25, -slope, slope],
            "critic": [-3.75 * weight, -9 * weight, -3 * weight],
        }
        grads = dict(zip([k for k, _ in actor.named_parameters()], gradients(a, actor), strict=True))
        near(grads["net.body.weights.0"], [2 * whole])
        near(grads["net.body.biases.0"], [whole])
        near(torch.cat([x for k, x in grads.items() if k.startswith("policy")]), of_heads["policy"])
        near(torch.cat([x for k, x in grads.items() if k.startswith("critic")]), of_heads["critic"])


def gradients(a, net):
    """Of each parameter of a net, as Adam's first moment has them after a first step that was not clipped."""
    flat = a.actor_optimiser.first / 0.1
    return flat.split([p.numel() for p in net.parameters()])


def test_a_trunk_that_a_central_critic_shares_takes_what_goes_with_it():
    central = {"trunk": "shared", "hidden": (8,)}
    for config, net, sentence in (
        ({"critic_slices": 2}, {}, "--net.trunk shared is one net for actor and critic"),
        ({"lr_critic": 1e-3}, {}, "--net.trunk shared is one net for actor and critic"),
        ({}, {"critic_hidden": (8,)}, "with --algo.critic own, no --net.critic-hidden"),
        ({"critic": "world"}, {}, "--algo.critic world does not see apart with --algo.critic-input state: take"),
        ({**WORLD, "critic_input": "joined"}, {}, "does not see apart with --algo.critic-input joined: take --algo.critic-i"),
        ({"critic": "team"}, {}, "--algo.critic team does not see apart with --algo.critic-input state: take"),
        ({**WORLD, "critic_slices": 2}, {}, "--net.trunk shared is one net for actor and critic"),
        ({**WORLD, "lr_critic": 1e-3}, {}, "--net.trunk shared is one net for actor and critic"),
        (WORLD, {"hidden": ()}, "shares hidden layers or a memory"),
        (WORLD, {"module": "torch.nn:Linear"}, "shares hidden layers or a memory"),
        (WORLD, {"attention": "both"}, "does not go with attention over agents"),
        (WORLD, {"attention": "critic"}, "does not go with attention over agents"),
    ):
        with pytest.raises(UserError, match=sentence):
            learner(net={**central, **net}, **config)


def test_pictures_of_an_agent_go_through_the_trunk_beside_a_state_of_numbers():
    """An agent's own picture is the trunk's to encode; pictures that a critic joins are refused, and so are those of critics
    with nets of their own."""
    pictures, nets = world(2, obs=(1, 5, 5), state=3), {"trunk": "shared", "hidden": (4,), "convolutions": "2x3/1"}
    a = PPO(Seat(pictures, ("agents",), PPO.Config(**WORLD), NetConfig(**nets), torch.Generator().manual_seed(0)))
    obs, yes = torch.rand(6, 1, 2, 1, 5, 5), torch.ones(6, 1, 2, dtype=torch.bool)
    frame = Frame({"agents": View(obs, yes, yes, yes)}, torch.rand(6, 1, 3))
    values = a.values(frame)
    assert values.shape == (6, 1, 2)
    for other in (Frame({"agents": View(obs + 1, yes, yes, yes)}, frame.state), Frame(frame.views, frame.state + 1)):
        assert (a.values(other) != values).all()
    for spec, net in ((world(2, obs=(1, 5, 5)), nets), (pictures, {**nets, "trunk": "own"})):
        with pytest.raises(UserError, match=r"--algo.critic-input agent does not take pictures"):
            PPO(Seat(spec, ("agents",), PPO.Config(**WORLD), NetConfig(**net), torch.Generator().manual_seed(0)))


# --- whole worlds: who is not there, and what is remembered -----------------------------------------------------------


def loop_of(name, env, rows=8, /, **sections):
    return Loop(resolve(Settings(name, env, {"envs": rows, "quiet": True, "steps": 10_000}, sections)))


def batch_of(loop, steps=16):
    batch = loop.collector.collect(steps)
    loop.shaping(batch)
    batch.noise = torch.rand(loop.learners[0].draws(*batch.over.shape), generator=torch.Generator().manual_seed(5))
    return batch


GRU, LSTM, ATTENTION = {"memory": "gru"}, {"memory": "lstm"}, {"attention": "critic"}
BLIND = [  # algorithm, its settings, its nets'
    ("ippo", {}, GRU),
    ("mappo", {}, GRU),
    ("mappo", {}, LSTM),
    ("ppo", {}, {**GRU, "trunk": "shared"}),
    ("mappo", {}, ATTENTION),
    ("mappo", {}, {**ATTENTION, **GRU}),
    ("mappo", {"critic_input": "agent"}, {}),
    ("mappo", {"critic_input": "agent"}, LSTM),
    ("mappo", {"critic_input": "agent"}, {"trunk": "shared"}),
    ("mappo", {"critic_input": "agent", "target_tau": 0.3}, {**GRU, "trunk": "shared"}),
    ("mappo", {"chunk": 4}, LSTM),
    ("mappo", {"critic_slices": 3, "advantage_scope": "agent"}, GRU),
    ("mappo", {"advantage_every": "minibatch", "advantage_scope": "batch"}, GRU),
    ("mappo", {"target_tau": 0.3, "normalise_reward": True, "kl_stop": 1e-3}, {}),
    ("maa2c", {"normalise_reward": True}, GRU),
]


@pytest.mark.parametrize("env", ["probe_deaths", "probe_turns"])
@pytest.mark.parametrize(
    ("algo", "config", "net"), BLIND, ids=lambda x: x if isinstance(x, str) else "-".join(map(str, x.values()))
)
def test_who_does_not_act_is_in_no_loss_and_no_statistic(algo, config, net, env):
    """Whatever the dead see, remember, do and are paid, and whatever those who wait do, the weights come out the same."""
    config = {"rollout": 8, **config, **({} if algo == "maa2c" else {"epochs": 2, "minibatches": 2})}
    net = {"hidden": (8,), "memory_width": 8, "attention_width": 8, **net}
    loop, twin = (loop_of(algo, env, 4, algo=config, net=net) for _ in range(2))
    a, b, batch = loop.learners[0], twin.learners[0], batch_of(loop, 8)
    spoilt = tree_map(torch.clone, batch)
    view, after = batch.frame["agents"], batch.next["agents"]
    gone, waits = ~view.alive, ~view.active
    assert waits.any()
    assert gone.any() == (env == "probe_deaths")
    spoilt.extras["agents"]["log_prob"][waits] = -7.0
    spoilt.actions["agents"][waits] = 1 - spoilt.actions["agents"][waits]
    spoilt.frame["agents"].obs[gone] = 1e3
    spoilt.next["agents"].obs[gone & ~after.alive] = -1e3
    spoilt.learner_reward["agents"][gone] = 1e3
    for x in tree_leaves(spoilt.memory):
        x[gone[0]] = 9.0  # who is not there at first arrives with an empty memory
    learn(a, batch)
    learn(b, spoilt)
    assert all(torch.equal(x, b.state_dict()[k]) for k, x in a.state_dict().items())
    assert a.actor_optimiser.steps > 0


@pytest.mark.parametrize("chunk", ["all", 4])
@pytest.mark.parametrize("memory", ["gru", "lstm"])
@pytest.mark.parametrize("env", ["probe_deaths", "probe_turns", "simple_spread"])
def test_what_is_remembered_in_an_update_is_what_was_remembered_in_the_rollout(env, memory, chunk):
    """Ratios begin at one and values in chunks are those of the whole, also after updates that moved everything."""
    algo = {"rollout": 16, "chunk": chunk, "epochs": 1, "minibatches": 1, "lr": 1e-2}
    loop = loop_of("mappo", env, algo=algo, net={"memory": memory, "hidden": (16,), "memory_width": 8})
    a = loop.learners[0]
    told, seen = listen(a), []

    def compare(log_prob, entropy, batch, loss=a.actor_loss):
        assert len(batch.critic_input) == a.chunk
        seen.append(a.critic.value(batch.critic_input, *batch.memory_of("critic"))[0].detach())
        return loss(log_prob, entropy, batch)

    a.actor_loss = compare
    for k in range(3):
        metrics = learn(a, batch_of(loop))
        assert abs(float(metrics["kl"])) < 1e-6
        assert metrics["clip_fraction"] == 0
        assert metrics["grad_norm_actor"] > 0
        torch.testing.assert_close(seen[k], told[k]["value"], rtol=0, atol=1e-6)
        active = torch.tensor(True) if told[k]["active"] is None else told[k]["active"]
        difference = torch.where(active, told[k]["now"] - told[k]["log_prob"], 0)
        assert difference.abs().max() < 1e-5
    assert any(x.abs().max() > 0.01 for x in tree_leaves(told[-1]["memory"]))


@pytest.mark.parametrize("memory", ["gru", "lstm"])
def test_what_is_seen_while_waiting_is_not_remembered(memory):
    """Whatever those who wait for their turn see, the weights come out the same: their memory is held."""
    algo = {"rollout": 16, "normalise_obs": False, "epochs": 2, "minibatches": 2}
    loop, twin = (loop_of("ippo", "probe_turns", algo=algo, net={"memory": memory, "memory_width": 8}) for _ in range(2))
    batch = batch_of(loop)
    spoilt = tree_map(torch.clone, batch)
    for frame in (spoilt.frame, spoilt.next):
        frame["agents"].obs[~frame["agents"].active] = 7.0
    learn(loop.learners[0], batch)
    learn(twin.learners[0], spoilt)
    assert all(torch.equal(x, twin.learners[0].state_dict()[k]) for k, x in loop.learners[0].state_dict().items())


@pytest.mark.parametrize("memory", ["gru", "lstm"])
@pytest.mark.parametrize("env", ["probe_turns", "simple_spread"])
def test_a_rollout_begins_with_the_memories_that_the_last_one_left(env, memory):
    """Of actor and critic, after ten steps: within an episode in both worlds."""
    loop = loop_of("mappo", env, net={"memory": memory, "memory_width": 8})
    a = loop.learners[0]
    batch = batch_of(loop, 10)
    view = batch.frame["agents"]
    moment = view.start, view.active if env == "probe_turns" else None
    with torch.no_grad():
        obs, seen, before = (
            a.observations.actor_input(batch.frame),
            a.observations.critic_input(batch.frame),
            batch.memory["agents"],
        )
        after = {
            "actor": a.actor.unroll(obs, None, before["actor"], *moment)[2],
            "critic": a.critic.value(seen, before["critic"], *moment)[1],
        }
    then = batch_of(loop, 10).memory["agents"]
    for net, parts in after.items():
        for k, x in parts.items():
            assert x[-1].abs().max() > 0.01
            torch.testing.assert_close(then[net][k], x[-1], rtol=0, atol=1e-6)
