"""SAC: targets, the actor's loss, temperatures, masks and options, with the numbers worked out on paper.

The nets of `learner` are one layer, set by hand. Of continuous actions an agent sees (m, v): its mean is m, its deviation 1,
and two critics say Q_0 = v + a + 2 and Q_1 = v + a. Of choices the logits are `logits`, whatever is seen, and an agent sees
what its choices are worth to each critic, end to end. The critics' copies say the same, unless `worth` is given others.
gamma = 1/2, alpha = 1, errors are squared and halved, Adam's first step is by the rate, 1/4, and draws are the middle ones,
unless a test says otherwise. What the critics' loss is given is written down by `told`.
"""

import math
from dataclasses import dataclass, fields
from typing import Any

import pytest
import torch
from bench import check_every_option_is_tested, plain

from shoal.algos.base import Seat
from shoal.algos.sac import SAC
from shoal.algos.samples import Samples
from shoal.ids import catalog
from shoal.kernels import native
from shoal.nets.config import NetConfig
from shoal.ops import losses
from shoal.ops.schedules import Now
from shoal.spec import Batch, Box, Discrete, EnvSpec, Frame, Group, MultiDiscrete, Result, UserError, View
from shoal.training.loop import Loop
from shoal.training.settings import Settings, resolve
from shoal.tree import tree_leaves, tree_map

JUNK = 4096.0  # stands where nothing may look
Y, N = True, False
KINDS = [False] if native.why_not() else [False, True]
HALF_WAY = Now(50, 100, 5)
LINE = Box((-1.0,), (1.0,))
H = 0.9189385332046727  # log(2 pi) / 2: a standard normal's density in the middle is e^-H
SPREAD = math.atanh(3 / 7)  # what the actor puts out for a deviation of 1: -5 + 7/2 (3/7 + 1) = 0
ONES = 0.8413447460685429  # Phi(1): noise of 1; 0.5 is noise of 0
TANH = 0.7615941559557649  # of 1; 1 - TANH^2 = e^-0.8675616609660546
LOG_PI_1 = -0.5 - H + 0.8675616609660546  # log pi where u = z = 1
LOG_2, LOG_3 = math.log(2), math.log(3)
PLAIN = {
    "gamma": 0.5,
    "alpha": 1.0,
    "lr": 0.25,
    "huber": None,
    "grad_clip": None,
    "normalise_obs": False,
    "prioritised": True,
    "random_steps": 0,
    "target_every": 1000,
    "target_tau": 1.0,
}
STILL = {"lr_critic": 1e-12}  # critics that are the same before their step and after


def agent_group(n=1, action=LINE, name="agents", obs=None, **more):
    wide = 2 if isinstance(action, Box) else 2 * sum(action.sizes)
    return Group(name, "t", tuple(f"{name}_{i}" for i in range(n)), obs or (wide,), action, **more)


def world(n=1, action=LINE, **more):
    group = {k: more.pop(k) for k in ("mortal", "masked", "obs") if k in more}
    return EnvSpec((agent_group(n, action, **group),), **more)


def layer(net, weights, bias=None):
    """One layer of which everything is zero but what is given: weights [out, in], for all agents or [N, out, in]."""
    with torch.no_grad():
        for p in net.parameters():
            p.zero_()
        own = net.weights[0].dim() == 3  # [N, in, out]
        given = torch.as_tensor(weights).float()
        net.weights[0].copy_(given.mT if own else given)
        if bias is not None:
            net.biases[0].copy_(torch.as_tensor(bias).float())


def worth(a, *rows, slow=None):
    """What the critics say, (weights, bias) of each, and their copies, if that is something else."""
    for critics, said in ((a.critics, rows), (a.target.module, slow or rows)):
        for judge, (weights, bias) in zip(critics, said, strict=True):
            layer(judge.head.body, weights, bias)


def learner(spec=None, net=None, kernels=False, logits=None, **config):
    spec = spec or world()
    nets = NetConfig(**{"hidden": (), **(net or {})})
    groups = tuple(g.name for g in spec.groups)
    config = SAC.Config(**{**plain(SAC), **PLAIN, **config})
    a = SAC(Seat(spec, groups, config, nets, torch.Generator().manual_seed(0), kernels=kernels))
    if nets.memory == "none":
        box, body = isinstance(a.space, Box), a.actor.body
        means = torch.zeros(body.width_out, body.width_in)
        if box:
            means[: a.width, : a.width] = torch.eye(a.width)
        layer(body, means, [0.0] * a.width + [SPREAD] * a.width if box else (logits or [0.0] * a.width))
        if not a.central:
            if box:
                rows = [([[0.0] * (body.width_in - 1) + [1.0] * (1 + a.width)], [2.0 if k == 0 else 0.0]) for k in range(2)]
            else:
                both = torch.eye(2 * a.width)
                rows = [(both[: a.width], None), (both[a.width :], None)]
            worth(a, *rows[: len(a.critics)])
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
    a, q, w, r=0.0, action=0, terminated=N, over=N, alive=Y, alive_tp1=Y, legal=None, legal_tp1=None, own=0.5, following=0.5
):
    """A batch of steps in which q is seen and then w, and that are paid r. `own`: the noise of the actor's loss, `following`
    that of the next actions."""
    q, w = steps(q), steps(w)
    there = torch.ones(q.shape[:-1], dtype=torch.bool)
    learner_reward, ended = each(r, there, torch.float), each(terminated, there, torch.bool)
    now, then = (each(x, there, torch.bool) for x in (alive, alive_tp1))
    action = torch.as_tensor(action)
    if isinstance(a.space, Box):
        action = action.float().expand(*there.shape, a.width).clone()
    else:
        action = action if action.dim() > 3 else each(action, there, torch.long)
    masks = [None if x is None else torch.tensor(x).expand(*there.shape, a.width) for x in (legal, legal_tp1)]
    sample = [torch.as_tensor(x).float().expand(*there.shape, a.width).flatten() for x in (own, following)]
    return Batch(
        Frame({"agents": View(q, now, now, ~there, masks[0])}),
        Frame({"agents": View(w, then, then, ~there, masks[1])}),
        {"agents": action},
        {"agents": Result(torch.full_like(learner_reward, JUNK), ended)},
        each(over, there, torch.bool)[..., 0],
        {"agents": {}},
        {"agents": {}},
        {"agents": learner_reward},
        torch.cat(sample),
    )


@pytest.fixture
def told(monkeypatch):
    """What the critics' loss was given: values [K, T, B, N] and targets [T, B, N]."""
    seen, error = [], losses.value_error

    def value_error(value, target, huber=None):
        seen.append({"value": value.detach().clone(), "target": target[0].clone()})
        return error(value, target, huber)

    monkeypatch.setattr(losses, "value_error", value_error)
    return seen


def near(x, y, tol=2e-5):
    x = x.detach() if isinstance(x, torch.Tensor) else torch.tensor(x)
    torch.testing.assert_close(x.double(), torch.tensor(y, dtype=torch.float64), rtol=tol, atol=tol)


def slope(optimiser, param):
    """The first gradient of one parameter, of which Adam's first moment is a tenth."""
    sizes = [p.numel() for p in optimiser._params]
    k = next(k for k, p in enumerate(optimiser._params) if p is param)
    return 10 * optimiser.first.split(sizes)[k].reshape(param.shape)


def inputs(judge):
    """What a critic is given from now on, [T, B, N, seen and told]."""
    seen: list[Any] = []

    def hook(_, args):
        seen.append((args[0] if judge.n > 1 else args[0][..., 0, :]).detach().clone())

    judge.head.register_forward_pre_hook(hook)
    return seen


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
    """Of v in the second critic, and of the actor's mean."""
    return torch.stack([a.critics[1].head.body.weights[0][0, 1], a.actor.body.biases[0][0]])


def target_weight(a, told, metrics):
    return a.target.module[1].head.body.weights[0][0, 1]


def alpha(a, told, metrics):
    assert metrics["alpha"] == a.alpha.mean() == a.entropy_weight
    return a.alpha


def feed(name):
    return lambda a, *_: float(getattr(a.feed, name) or 0)


# v = 1 and a = 1/2: Q = 3.5 and 1.5, paid 3; next v = 4 and a' = 0 with log pi = -H: y = 3 + (min(6, 4) + H) / 2. Slopes in
# the weights of v and a and in the bias are -(error), half of it and all of it; the actor's mean rises with Q, and log alpha
# falls, for the entropy, H, is more than -1
GOAL = 5 + H / 2
ONE = {"q": [[0.0, 1]], "w": [[0.0, 4]], "r": 3.0, "action": 0.5}
ERRORS = GOAL - 3.5, GOAL - 1.5
SWITCHES = {
    "gamma": Switch(target, [GOAL], 1.0, [7 + H]),
    "critics": Switch(target, [GOAL], 1, [6 + H / 2]),
    "alpha": Switch(target, [GOAL], 0.5, [5 + H / 4]),
    "alpha_auto": Switch(alpha, [math.exp(-0.25)], False, [1.0]),
    "target_entropy": Switch(alpha, [math.exp(-0.25)], 1.0, [math.exp(0.25)]),  # more than H
    "lr_alpha": Switch(alpha, [math.exp(-0.25)], 0.5, [math.exp(-0.5)], {"lr_critic": 0.25, "lr": 0.125}),
    "reward_scale": Switch(target, [GOAL], 2.0, [3 + GOAL]),
    "time_limit": Switch(target, [GOAL], False, [3.0], None, {"over": Y}),
    "huber": Switch(lambda a, told, m: m["loss_critic"], sum(e * e for e in ERRORS) / 2, 1.0, sum(ERRORS) - 1),
    "delay": Switch(first_weights, [1.25, 0.25], 2, [1.25, 0.0]),
    "lr": Switch(first_weights, [1.25, 0.25], 0.5, [1.5, 0.5]),
    "lr_critic": Switch(first_weights, [1.25, 0.25], 0.5, [1.5, 0.25]),
    "lr_schedule": Switch(first_weights, [1.25, 0.25], "linear", [1.125, 0.125]),  # half-way
    "lr_critic_schedule": Switch(first_weights, [1.25, 0.25], "linear", [1.125, 0.25]),
    "lr_last": Switch(first_weights, [1.125, 0.125], 0.5, [1.1875, 0.1875], {"lr_schedule": "linear"}),
    "weight_decay": Switch(first_weights, [1.25, 0.25], 0.5, [1.25 - 0.25 * 0.5, 0.25]),  # rate times decay times 1
    "grad_clip": Switch(lambda a, *_: a.critic_optimiser.first.norm(), 0.15 * math.hypot(*ERRORS), 0.5, 0.05),
    "target_every": Switch(target_weight, 1.0, 1, 1.25),
    "target_tau": Switch(target_weight, 1.25, 0.25, 1.0625, {"target_every": 1}),
    "random_steps": Switch(lambda a, *_: a.warmup.float(), 0.0, 51, 1.0),  # after 50 steps
    "rollout": Switch(feed("steps"), 4.0, 7, 7.0),
    "every": Switch(feed("every"), 16.0, 0.5, 0.5),
    "batch": Switch(feed("batch"), 256.0, 32, 32.0),
    "capacity": Switch(feed("capacity"), 500_000.0, 1000, 1000.0),
    "learning_starts": Switch(feed("start"), 5000.0, 0, 0.0),
    "prioritised": Switch(feed("alpha"), 0.6, False, 0.0),
    "priority": Switch(feed("alpha"), 0.6, 0.25, 0.25),
    "priority_weight": Switch(feed("beta"), 0.4, 0.7, 0.7),
}
ELSEWHERE = {  # option -> the test of it, here or in a file of its own
    "after_death": "tests/algos/test_after_death.py",
    "burn_in": "test_how_long_sequences_are",
    "chunk": "test_how_long_sequences_are",
    "critic": "test_what_critics_see_and_are_told",
    "critic_input": "test_what_critics_see_and_are_told",
    "noise_keep": "test_exploration_that_goes_on",
    "n_step": "test_so_many_rewards_and_then_the_value_with_its_entropy",
    "normalise_obs": "test_observations_are_normalised_by_what_was_collected",
    "normalise_state": "tests/algos/test_observations.py",
    "normalise_reward": "test_rewards_are_divided_by_the_root_mean_square_of_what_was_collected",
    "normaliser": "test_a_normaliser_of_the_users_own",
    "others": "test_others_do_what_they_did_or_what_they_would",
    "shaper": "test_the_replay_holds_what_a_shaper_paid",
    "state_normaliser": "tests/algos/test_observations.py",
}


def test_every_option_has_a_number_of_its_own():
    check_every_option_is_tested((SAC,), SWITCHES, ELSEWHERE, globals())


@pytest.mark.parametrize("kernels", KINDS)
@pytest.mark.parametrize("option", SWITCHES)
def test_switching_an_option_changes_the_number_expected_by_hand(option, kernels, told):
    s = SWITCHES[option]
    for config, expected in (({}, s.plain), ({option: s.value}, s.switched)):
        a = learner(None, None, kernels, **{**(s.base or {}), **config})
        a.set_schedules(HALF_WAY)
        metrics = learn(a, happened(a, **{**ONE, **(s.batch or {})}))
        near(s.measure(a, told, metrics), expected)
    assert s.plain != s.switched


def test_names_and_defaults():
    assert catalog("algos")["isac"].settings == {}
    assert catalog("algos")["masac"].settings == {"critic": "world"}
    c = SAC.Config()
    assert (c.critics, c.alpha, c.alpha_auto, c.target_entropy, c.critic) == (2, 0.2, True, None, "own")
    a = SAC(Seat(world(3), ("agents",), c, NetConfig(), torch.Generator().manual_seed(0)))
    near(a.alpha, [0.2] * 3)  # one an agent
    assert a.alpha_optimiser.rate == a.critic_optimiser.rate == c.lr
    assert {"weights.log", "alpha_optimiser.first"} <= set(a.state_dict())
    assert set(a.nets) == {"actor", "critic", "target_critic"}
    with pytest.raises(UserError, match=r"--net.trunk shared does not go with SAC"):
        learner(net={"trunk": "shared"})


@pytest.mark.parametrize(
    ("option", "value"),
    [
        *((x, 0) for x in ("rollout", "every", "batch", "capacity", "chunk", "n_step", "target_every", "critics", "delay")),
        *((x, 0.0) for x in ("lr", "lr_critic", "lr_alpha", "alpha", "huber", "grad_clip", "reward_scale")),
        *((x, 1.1) for x in ("gamma", "target_tau", "lr_last", "priority_weight")),
        *((x, -0.1) for x in ("gamma", "target_tau", "lr_last", "priority_weight")),
        *((x, -1) for x in ("weight_decay", "learning_starts", "burn_in", "priority", "random_steps", "alpha", "lr_alpha")),
        *(("noise_keep", x) for x in (-0.1, 1.0)),
    ],
)
def test_what_is_out_of_bounds_is_refused_by_its_flag(option, value):
    with pytest.raises(UserError, match=f"--algo.{option.replace('_', '-')} is "):
        SAC.Config(**{option: value})


# --- continuous actions -----------------------------------------------------------------------------------------------


def test_the_next_value_is_that_of_a_draw_with_its_entropy(told):
    """Next v = 4 and u = 0 or 1, m being 0, with noise of 0 or 1. The copies say Q'_0 = v + 2 a and Q'_1 = 5: 4 and 5, or
    4 + 2 tanh 1 and 5. The online critics say something else."""
    a = learner(alpha=0.25)
    rows = [([[0.0, 1, 1]], [JUNK])] * 2
    worth(a, *rows, slow=[([[0.0, 1, 2]], [0.0]), ([[0.0, 0, 0]], [5.0])])
    w = [[[0.0, 4]] * 4]
    noise = torch.tensor([0.5, ONES, ONES, 0.5]).reshape(1, 4, 1, 1)
    batch = happened(a, torch.zeros(1, 4, 2), w, 3.0, terminated=[[N, N, Y, N]], over=[[N, N, Y, Y]], following=noise, own=JUNK)
    learn(a, batch)
    quiet = 3 + (4 + 0.25 * H) / 2
    near(told[0]["target"].flatten(), [quiet, 3 + (5 - 0.25 * LOG_PI_1) / 2, 3, quiet])  # a cut is no end


def test_the_mean_and_the_deviation_follow_from_what_is_seen(told):
    """m = 1/2 and a deviation of e^(-3/2): -3/2 + 7/2 tanh 0. u = 1/2 + e^(-3/2), log pi = -1/2 + 3/2 - H - log(1 - a^2)."""
    a = learner()
    layer(a.actor.body, [[1.0, 0], [0, 0]])
    learn(a, happened(a, [[0.0, 0]], [[0.5, 4]], 0.0, following=ONES))
    x = math.tanh(0.5 + math.exp(-1.5))
    near(told[0]["target"].flatten(), [(4 + x - (1 - H - math.log(1 - x * x))) / 2])


def test_the_slope_of_the_actor():
    """u = z = 1 with alpha = 3/4: L = 3/4 log pi - (v + a), as the second critic is lower. dL/dm = 3/4 2a - (1 - a^2);
    dL/d log s = 3/4 (2a - 1) - (1 - a^2), times d log s / d(output) = 7/2 (1 - (3/7)^2) = 20/7. Critics do not move by it."""
    a = learner(alpha=0.75, **STILL)
    metrics = learn(a, happened(a, [[0.0, 4]], [[0.0, 0]], own=ONES, following=JUNK, terminated=Y))
    near(metrics["loss_actor"], 0.75 * LOG_PI_1 - 4 - TANH)
    near(metrics["entropy"], -LOG_PI_1)
    by_mean = 1.5 * TANH - (1 - TANH**2)
    by_spread = (0.75 * (2 * TANH - 1) - (1 - TANH**2)) * 20 / 7
    near(slope(a.actor_optimiser, a.actor.body.biases[0]), [by_mean, by_spread])
    near(slope(a.actor_optimiser, a.actor.body.weights[0]), [[0.0, 4 * by_mean], [0, 4 * by_spread]])
    near(metrics["grad_norm_actor"], math.hypot(by_mean, by_spread) * 17**0.5)
    # the critics' own slopes are those of their errors alone, 6 and 4, of v = 4 and a = 0
    near(slope(a.critic_optimiser, a.critics[0].head.body.weights[0]), [[0.0, 24, 0]])
    near(slope(a.critic_optimiser, a.critics[1].head.body.biases[0]), [4.0])
    assert all(p.requires_grad for p in a.critics.parameters())


def test_the_lowest_critic_is_climbed():
    """Q_0 = a and Q_1 = -a with m = 1 and -1: what is climbed is -a, and a. Of alpha 2a is left, tiny."""
    for m, up in ((1.0, -1.0), (-1.0, 1.0)):
        a = learner(alpha=1e-9, **STILL)
        worth(a, ([[0.0, 0, 1]], [0.0]), ([[0.0, 0, -1]], [0.0]))
        learn(a, happened(a, [[m, 0]], [[0.0, 0]]))
        near(slope(a.actor_optimiser, a.actor.body.biases[0])[0], -up * (1 - TANH**2))


def test_dimensions_are_summed(told):
    """Two dimensions in the middle: -log pi = 2 H, and -2 is asked for."""
    a = learner(world(action=Box((-1.0,) * 2, (1.0,) * 2), obs=(3,)))
    metrics = learn(a, happened(a, [[0.0, 0, 1]], [[0.0, 0, 4]], 3.0, torch.tensor([0.5, 0.25])))
    near(told[0]["target"].flatten(), [3 + (4 + 2 * H) / 2])
    near(told[0]["value"].flatten(), [3.75, 1.75])
    near(metrics["entropy"], 2 * H)
    near(slope(a.alpha_optimiser, a.weights.log), [2 * H + 2])


@pytest.mark.parametrize(
    ("asked", "noise", "expected"),
    [
        # L = -log alpha (log pi + asked): the slope is -log pi - asked
        (None, 0.5, H + 1),
        (0.5, 0.5, H - 0.5),
        (H, 0.5, 0.0),
        (2.0, 0.5, H - 2),
        (0.5, ONES, -LOG_PI_1 - 0.5),
    ],
)
def test_the_weight_of_the_entropy_moves_until_it_is_as_asked(asked, noise, expected):
    a = learner(target_entropy=asked, alpha=0.5)
    learn(a, happened(a, [[0.0, 1]], [[0.0, 4]], own=noise))
    near(slope(a.alpha_optimiser, a.weights.log), [expected], 1e-6 if expected == 0.0 else 2e-5)
    if expected:  # too much entropy: less weight
        near(a.alpha.log(), [math.log(0.5) - math.copysign(0.25, expected)], 1e-3)
    still = learner(target_entropy=asked, alpha=0.5, alpha_auto=False)
    metrics = learn(still, happened(still, [[0.0, 1]], [[0.0, 4]], own=noise))
    assert still.alpha.tolist() == [0.5]
    assert metrics["alpha"] == 0.5
    assert still.alpha_optimiser is None


def test_every_agent_has_a_weight_of_its_own(told):
    """Agent 0 draws the middle, -log pi = H, and agent 1 u = z = 1; asked is what lies between. Of two the mean is descended.
    Weights of 1 and 1/2 go into each one's own target and loss."""
    asked = (H - LOG_PI_1) / 2
    a = learner(world(2), target_entropy=asked, **STILL)
    with torch.no_grad():
        a.weights.log[1] = -LOG_2
    u = torch.tensor([0.5, ONES])[:, None]
    metrics = learn(a, happened(a, torch.zeros(1, 1, 2, 2), torch.zeros(1, 1, 2, 2), own=u, following=u))
    near(told[0]["target"].flatten(), [H / 2, (TANH - LOG_PI_1 / 2) / 2])
    near(metrics["loss_actor"], (-H + LOG_PI_1 / 2 - TANH) / 2)
    near(metrics["entropy"], asked)
    near(slope(a.alpha_optimiser, a.weights.log), [(H - asked) / 2, (-LOG_PI_1 - asked) / 2])
    assert (a.alpha[0] > 1, a.alpha[1] < 0.5) == (H < -LOG_PI_1, H < -LOG_PI_1) or (a.alpha[0] < 1 and a.alpha[1] > 0.5)


def test_deviations_are_held_between_bounds():
    """-5 + 7/2 (tanh x + 1): -5 and 2 far out, -3/2 in the middle, and the slope 7/2 there."""
    a = learner()
    x = torch.tensor([[0.0, -1e4], [0, 0], [0, 1e4], [0, -1]], requires_grad=True)
    pi = a._policy(x, None)
    near(pi.log_std.flatten(), [-5.0, -1.5, 2.0, -1.5 - 3.5 * TANH])
    assert torch.equal(pi.mean, x[:, :1])
    (grad,) = torch.autograd.grad(pi.log_std.sum(), x)
    near(grad[:, 1], [0.0, 3.5, 0.0, 3.5 * (1 - TANH**2)])
    layer(a.actor.body, [[1.0, 0], [0, 1e4]])  # by what is seen
    yes = torch.ones(3, 1, dtype=torch.bool)
    frame = Frame({"agents": View(torch.tensor([[[0.0, -1]], [[0, 0]], [[0, 1]]]), yes, yes, ~yes)})
    sample = a.act(frame, {"agents": {}}, {"agents": torch.full((3, 1, 1), ONES)}, True)[0]["agents"]
    near(sample.flatten(), [math.tanh(math.exp(x)) if x < 2 else 1 - 1e-6 for x in (-5.0, -1.5, 2.0)], 1e-5)


def seen(obs, n=1, legal=None):
    obs = torch.as_tensor(obs).float()
    yes = torch.ones(obs.shape[:-1], dtype=torch.bool)
    return Frame({"agents": View(obs, yes, yes, ~yes, legal)})


def acted(a, frame, noise, explore):
    given = None if noise is None else {"agents": torch.as_tensor(noise).expand(*frame["agents"].active.shape, a.noise)}
    with torch.no_grad():
        actions, memory, extras = a.act(frame, {"agents": {}}, given, explore)
    assert (memory, extras) == ({"agents": {}}, {"agents": {}})
    return actions["agents"].flatten().tolist()


def test_it_is_evaluated_by_the_mean_and_explores_by_drawing():
    a, frame = learner(), seen([[[0.5, 0]]])
    assert a.noise == 1
    assert a.greedy
    for explore in (False, True):
        assert acted(a, frame, None, explore) == pytest.approx([math.tanh(0.5)])
        assert acted(a, frame, ONES, explore) == pytest.approx([math.tanh(1.5)], abs=1e-6)
    warmup = learner(random_steps=10)
    assert acted(warmup, frame, 0.75, True) == [0.5]  # 2 u - 1
    assert acted(warmup, frame, ONES, False) == pytest.approx([math.tanh(1.5)], abs=1e-6)
    assert acted(warmup, frame, None, True) == pytest.approx([math.tanh(0.5)])
    warmup.set_schedules(Now(9, 100, 0))
    assert acted(warmup, frame, 0.75, True) == [0.5]
    warmup.set_schedules(Now(10, 100, 0))
    assert acted(warmup, frame, ONES, True) == pytest.approx([math.tanh(1.5)], abs=1e-6)


def test_exploration_that_goes_on():
    """noise_keep 0.6: z = 0.6 2 + 0.8 1 = 2, and 1 for who starts; evaluation draws afresh and remembers nothing of it."""
    a, yes = learner(world(2), noise_keep=0.6), torch.ones(1, 2, dtype=torch.bool)
    memory = a.memory(1, torch.device("cpu"))
    assert memory["agents"]["noise"].tolist() == [[[0.0], [0.0]]]
    memory["agents"]["noise"] += 2
    frame = Frame({"agents": View(torch.zeros(1, 2, 2), yes, yes, torch.tensor([[N, Y]]))})
    for explore, expected in ((True, [2.0, 1]), (False, [1.0, 1])):
        actions, after, _ = a.act(frame, memory, {"agents": torch.full((1, 2, 1), ONES)}, explore)
        near(actions["agents"].flatten(), [math.tanh(x) for x in expected])
        near(after["agents"]["noise"].flatten(), expected if explore else [2.0, 2])
    with pytest.raises(UserError, match=r"--algo.noise-keep is for continuous actions; those of agents are discrete"):
        learner(world(action=THREE), noise_keep=0.6)


def test_an_actor_that_waits_keeps_its_metrics_and_its_weight():
    """delay 2: the first update moves critics alone, the second everything; in the third metrics stay those of the second."""
    a = learner(delay=2, target_every=1)
    first, log = a.actor.body.biases[0].clone(), []
    for k in range(3):
        batch = happened(a, [[0.0, 1]], [[0.0, 4]], 3.0, own=(0.5, ONES, 0.5)[k])
        log.append(learn(a, batch))
        assert torch.equal(a.actor.body.biases[0], first) == (k != 1)
        assert (a.alpha.item() == 1) == (k == 0)
        assert (a.target.lag() == 0) == (k == 1)  # they follow with the actor
        if k == 1:
            first = a.actor.body.biases[0].clone()
            moment = log[1]
    assert a.actor_optimiser.steps == a.alpha_optimiser.steps == 1
    for name in a.actor_metrics:
        assert log[2][name] == moment[name]
    near(moment["entropy"], -LOG_PI_1)
    near(moment["alpha"], math.exp(-0.25))


# --- choices ----------------------------------------------------------------------------------------------------------

LIKELY = [math.log(2), 0.0, 0.0]  # 1/2, 1/4, 1/4, of entropy 3/2 log 2
THREE = Discrete(3)


def test_of_choices_the_next_value_is_expected_and_not_drawn(told):
    """The copies say 4, 8, 12 and 8, 4, 16, of which the lower 4, 4, 12: 4/2 + 4/4 + 12/4 = 6, and the entropy. What is drawn
    is no matter. The value learnt is that of the action taken, to each critic: 2 and 5."""
    a = learner(world(action=THREE), logits=LIKELY, alpha=0.5)
    both = torch.eye(6)
    worth(a, (both[:3], None), (both[3:], None), slow=[(2 * both[:3], None), (2 * both[3:], None)])
    for noise in ([0.1, 0.5, 0.9], [0.9, 0.5, 0.1]):
        batch = happened(a, [[1.0, 2, 3, 4, 5, 6]], [[2.0, 4, 6, 4, 2, 8]], 3.0, 1, following=noise, own=noise)
        learn(a, batch)
        near(told[0]["target"].flatten(), [3 + (6 + 0.5 * 1.5 * LOG_2) / 2])
        near(told[0]["value"].flatten(), [2.0, 5])


def test_of_choices_the_actors_loss_is_expected_and_not_drawn():
    """L = -alpha H - sum p q with q = 4, 4, 12: dL/dx_i = p_i (alpha (log p_i + H) - (q_i - 6)) and H = 3/2 log 2."""
    grads = []
    for noise in ([0.1, 0.5, 0.9], [0.9, 0.5, 0.1]):
        a = learner(world(action=THREE), logits=LIKELY, alpha=0.5, **STILL)
        metrics = learn(a, happened(a, [[4.0, 8, 12, 8, 4, 16]], [[0.0] * 6], own=noise, following=noise, terminated=Y))
        near(metrics["loss_actor"], -0.75 * LOG_2 - 6)
        near(metrics["entropy"], 1.5 * LOG_2)
        grads.append(slope(a.actor_optimiser, a.actor.body.biases[0]))
        near(grads[-1], [0.5 * (0.25 * LOG_2 + 2), 0.25 * (-0.25 * LOG_2 + 2), 0.25 * (-0.25 * LOG_2 - 6)])
    assert torch.equal(*grads)


def test_only_what_is_legal_is_expected(told):
    """Of 1/2, 1/4, 1/4 the first is illegal next: 4/2 + 12/2 and log 2. At the moment the last is: 2/3 and 1/3 of 4 and 4."""
    a = learner(world(action=THREE, masked=True), logits=LIKELY, **STILL)
    batch = happened(
        a, [[4.0, 8, JUNK, 8, 4, JUNK]], [[JUNK, 8, 12, JUNK, 4, 16]], 3.0, 1, legal=[Y, Y, N], legal_tp1=[N, Y, Y]
    )
    metrics = learn(a, batch)
    near(told[0]["target"].flatten(), [3 + (8 + LOG_2) / 2])
    near(told[0]["value"].flatten(), [8.0, 4])
    entropy = LOG_3 - 2 / 3 * LOG_2
    near(metrics["entropy"], entropy)
    near(metrics["loss_actor"], -entropy - 4)
    by_first = 2 / 3 * (LOG_2 - LOG_3 + entropy)
    near(slope(a.actor_optimiser, a.actor.body.biases[0]), [by_first, -by_first, 0])


@pytest.mark.parametrize(
    ("asked", "legal", "entropy", "goal"),
    [
        (None, None, LOG_3, 0.2 * LOG_3),
        (0.5, None, LOG_3, 0.5 * LOG_3),
        (1.0, None, LOG_3, LOG_3),
        (None, [Y, Y, Y], LOG_3, 0.2 * LOG_3),
        (None, [Y, N, Y], LOG_2, 0.2 * LOG_2),
        (0.5, [Y, N, Y], LOG_2, 0.5 * LOG_2),
        (0.5, [N, N, Y], 0.0, 0.0),  # where there is no choice nothing is asked for
    ],
)
def test_a_share_of_the_most_entropy_that_there_can_be_is_asked_for(asked, legal, entropy, goal):
    a = learner(world(action=THREE, masked=legal is not None), target_entropy=asked)
    metrics = learn(a, happened(a, [[1.0] * 6], [[1.0] * 6], legal=legal, legal_tp1=legal))
    near(metrics["entropy"], entropy)
    near(slope(a.alpha_optimiser, a.weights.log), [entropy - goal], 1e-6)
    near(a.alpha.log(), [-0.25 if entropy - goal > 1e-3 else 0.0], 0.05)


def test_the_share_asked_for_goes_by_what_is_legal_at_the_moment():
    """Two rows, of two choices and of three: log 2 and log 3, and half of each is asked for."""
    a = learner(world(action=THREE, masked=True), target_entropy=0.5)
    zeros = torch.zeros(1, 2, 6)
    learn(a, happened(a, zeros, zeros, legal=[[[[Y, Y, N]], [[Y, Y, Y]]]], legal_tp1=[N, N, Y]))
    near(slope(a.alpha_optimiser, a.weights.log), [0.25 * (LOG_2 + LOG_3)])


def test_several_dimensions_are_worth_their_mean_and_have_the_sum_of_entropies(told):
    """Dimensions of 2 and 3 with 1/2, 1/2 and 1/2, 1/4, 1/4. The choices (1, 2) are worth (3 + 9) / 2 to the first critic and
    one more to the second. Next 4 and 6, and 4, 8, 12: (5 + 7) / 2 = 6, and log 2 + 3/2 log 2."""
    a = learner(world(action=MultiDiscrete((2, 3))), logits=[0.0, 0.0, *LIKELY], alpha=0.5, **STILL)
    q, w = torch.tensor([2.0, 3, 7, 8, 9]), torch.tensor([4.0, 6, 4, 8, 12])
    action = torch.tensor([1, 2]).reshape(1, 1, 1, 2)
    metrics = learn(a, happened(a, torch.cat((q, q + 1))[None], torch.cat((w, w + 1))[None], 3.0, action))
    near(told[0]["value"].flatten(), [6.0, 7])
    near(told[0]["target"].flatten(), [3 + (6 + 0.5 * 2.5 * LOG_2) / 2])
    near(metrics["entropy"], 2.5 * LOG_2)
    # (2.5 + 7/2 + 8/4 + 9/4) / 2 = 5.125; slopes p_i (alpha (log p_i + H) - (q_i - mean) / 2) in each dimension
    near(metrics["loss_actor"], -1.25 * LOG_2 - 5.125)
    second = [0.5 * (0.25 * LOG_2 + 0.375), 0.25 * (-0.25 * LOG_2 - 0.125), 0.25 * (-0.25 * LOG_2 - 0.625)]
    near(slope(a.actor_optimiser, a.actor.body.biases[0]), [0.125, -0.125, *second])
    near(slope(a.alpha_optimiser, a.weights.log), [2.5 * LOG_2 - 0.2 * math.log(6)])
    masked = learner(world(action=MultiDiscrete((2, 3)), masked=True), logits=[0.0, 0.0, *LIKELY])
    legal = [N, Y, Y, Y, N]  # one choice, and two of 2/3 and 1/3
    learn(masked, happened(masked, [[0.0] * 10], [[0.0] * 10], 0.0, action, legal=legal, legal_tp1=legal))
    near(slope(masked.alpha_optimiser, masked.weights.log), [LOG_3 - 2 / 3 * LOG_2 - 0.2 * LOG_2])


def test_it_is_evaluated_by_the_likeliest_choice_and_explores_by_drawing():
    """Noise of 0.9 beside 0.1 outweighs twice the chance: -log(-log u) is 2.25 and -0.83."""
    a = learner(world(action=THREE), logits=LIKELY)
    frame, u = seen(torch.zeros(1, 1, 6)), [0.1, 0.9, 0.1]
    for explore in (False, True):
        assert acted(a, frame, None, explore) == [0]
        assert acted(a, frame, u, explore) == [1]
    masked = learner(world(action=THREE, masked=True), logits=LIKELY, random_steps=10)
    frame = seen(torch.zeros(1, 1, 6), legal=torch.tensor([[[N, Y, Y]]]))
    assert acted(masked, frame, None, False) == [1]
    assert acted(masked, frame, [0.9, 0.1, 0.9], False) == [2]
    assert acted(masked, frame, [0.9, 0.3, 0.2], True) == [1]  # anything that is legal
    several = learner(world(action=MultiDiscrete((2, 3))), logits=[0.0, 0.1, *LIKELY])
    assert acted(several, seen(torch.zeros(1, 1, 10)), None, False) == [1, 0]


# --- teams ------------------------------------------------------------------------------------------------------------


def team(n=2, logits=None, **more):
    """Of agents that are paid alike, with a critic of the world: (m, v) of each, and then what each does. Q_0 = v_0 + sum of
    actions + 2 and Q_1 without the 2."""
    config = {k: more.pop(k) for k in list(more) if k in {f.name for f in fields(SAC.Config)}}
    a = learner(world(n, **{"common": True, **more}), logits=logits, critic="world", **config)
    row = [[0.0, 1] + [0.0] * (2 * n - 2) + [1.0] * n]
    worth(a, (row, [2.0]), (row, [0.0]))
    return a


def test_one_critic_of_a_team_has_the_entropies_of_all_in_its_value(told):
    """Two agents are paid 2 and 4, the mean of which is 3; next they draw 0 and tanh 1: y = 3 + (4 + tanh 1 - log pi_0 -
    log pi_1) / 2, with weights of 1 and 1/2."""
    a = team()
    assert a.as_one
    assert len(a.critics[0].head.body.weights[0]) == 1
    with torch.no_grad():
        a.weights.log[1] = -LOG_2
    u = torch.tensor([0.5, ONES])[:, None]
    q, w = [[[[0.0, 1], [0, JUNK]]]], [[[[0.0, 4], [0, JUNK]]]]
    learn(a, happened(a, q, w, [[[2.0, 4]]], torch.tensor([[0.5], [0.25]]), following=u))
    assert told[0]["value"].shape == (2, 1, 1, 1)
    near(told[0]["value"].flatten(), [3.75, 1.75])
    near(told[0]["target"].flatten(), [3 + (4 + TANH + H - LOG_PI_1 / 2) / 2])


@pytest.mark.parametrize(
    ("now", "then", "ended", "there"),
    [
        ([Y, Y], [Y, Y], [N, N], [Y, Y]),
        ([Y, N], [Y, N], [N, N], [Y, N]),  # was dead
        ([Y, Y], [Y, N], [N, Y], [Y, N]),  # dies
        ([Y, Y], [N, Y], [Y, N], [N, Y]),
        ([Y, N], [Y, Y], [N, N], [Y, Y]),  # arrives
        ([Y, Y], [N, N], [Y, Y], None),  # nobody goes on
    ],
)
def test_the_dead_are_not_in_a_teams_value(now, then, ended, there, told):
    """y = 3 + (v + actions + entropies of those who go on) / 2, the first of whom draws the middle and the second tanh 1."""
    a = team(mortal=True)
    u = torch.tensor([0.5, ONES])[:, None]
    learner_reward = [[[3.0 if x else JUNK for x in now]]]
    w = [[[[0.0, 4], [0, JUNK]]]]
    batch = happened(
        a, torch.zeros(1, 1, 2, 2), w, learner_reward, 0.5, [[ended]], alive=[[now]], alive_tp1=[[then]], following=u
    )
    learn(a, batch)
    v = 4.0 if then[0] else 0.0  # of the first agent, who sees nothing when it is dead
    worths = [(0.0, H), (TANH, -LOG_PI_1)]
    value = 0.0 if there is None else v + sum(x + bonus for (x, bonus), y in zip(worths, there, strict=True) if y)
    near(told[0]["target"].flatten(), [3 + value / 2])
    near(told[0]["value"].flatten(), [2 + 0.5 * sum(now), 0.5 * sum(now)])  # what the dead do is not said


def test_agents_of_a_team_improve_their_own_part():
    """Each beside what the others did, 1/2: L_0 = -H - (4 + 0 + 1/2) and L_1 = log pi_1 - (4 + tanh 1 + 1/2)."""
    a = team(**STILL)
    u = torch.tensor([0.5, ONES])[:, None]
    metrics = learn(a, happened(a, [[[[0.0, 4], [0, 0]]]], torch.zeros(1, 1, 2, 2), 0.0, 0.5, own=u))
    near(metrics["loss_actor"], (-H - 4.5 + LOG_PI_1 - 4.5 - TANH) / 2)
    near(metrics["entropy"], (H - LOG_PI_1) / 2)
    by_mean = (-1 + 2 * TANH - (1 - TANH**2)) / 2
    near(slope(a.actor_optimiser, a.actor.body.biases[0])[0], by_mean)


@pytest.mark.parametrize("others", ["buffer", "policy"])
def test_others_do_what_they_did_or_what_they_would(others):
    """others: Q = v + 2 a_0 a_1 would tell, but a layer is linear: what the critic is told does. Agents did 1/4 and 1/2 and
    would do 0 and tanh 1. Where they are judged at once the slope is that of each for its own part all the same."""
    a = team(others=others, **STILL)
    u = torch.tensor([0.5, ONES])[:, None]
    heard = inputs(a.critics[1])
    metrics = learn(a, happened(a, [[[[0.0, 4], [0, 0]]]], torch.zeros(1, 1, 2, 2), 0.0, torch.tensor([[0.25], [0.5]]), own=u))
    actions = heard[-1][0, 0, :, 4:]
    if others == "buffer":
        near(actions, [[0.0, 0.5], [0.25, TANH]])
        near(metrics["loss_actor"], (-H - 4.5 + LOG_PI_1 - 4.25 - TANH) / 2)
    else:
        near(actions, [[0.0, TANH]])
        near(metrics["loss_actor"], (-H + LOG_PI_1) / 2 - 4 - TANH)
    near(slope(a.actor_optimiser, a.actor.body.biases[0])[0], (-1 + 2 * TANH - (1 - TANH**2)) / 2)


def test_what_the_dead_would_do_is_not_said_either():
    """others policy: agent 1 is dead, so that the critic of the team is told nothing of it, as when it learnt."""
    a = team(mortal=True, others="policy", **STILL)
    heard = inputs(a.critics[1])
    alive = [[[Y, N]]]
    u = torch.tensor([0.5, ONES])[:, None]
    learn(a, happened(a, [[[[0.0, 4], [0, 0]]]], torch.zeros(1, 1, 2, 2), 0.0, 0.5, alive=alive, alive_tp1=alive, own=u))
    near(heard[0][0, 0, :, 4:], [[0.5, 0.0]])
    near(heard[-1][0, 0, :, 4:], [[0.0, 0.0]])


@pytest.mark.parametrize("others", ["buffer", "policy"])
def test_what_is_gained_weighs_as_much_beside_entropy_when_others_are_dead(others):
    """Agent 0 draws the middle alone: the slope in its mean is 2a - 1 = -1, whoever is dead, and in the dead one's 0."""
    a = team(mortal=True, others=others, **STILL)
    alive = [[[Y, N]]]
    learn(a, happened(a, [[[[0.0, 4], [0, 0]]]], torch.zeros(1, 1, 2, 2), 0.0, 0.5, alive=alive, alive_tp1=alive))
    near(slope(a.actor_optimiser, a.actor.body.ids)[:, 0], [-1.0, 0])


def test_those_who_wait_have_no_entropy_to_come(told):
    """Three agents in turn, the third of whom is dead, and one critic. Agent 1 moves in step 1, where v = 4 and it would draw
    tanh 1: y_0 = 3 + (4 + tanh 1 - log pi) / 2. The others do nothing then."""
    a = team(3, mortal=True, turns=True)
    assert a.as_one
    t = a.feed.length
    q, alive = torch.zeros(t, 1, 3, 2), torch.tensor([Y, Y, N]).expand(t, 1, 3)
    q[:, 0, 0, 1] = 4.0
    batch = happened(a, q, q, 3.0, 0.5, alive=alive, alive_tp1=alive, following=ONES)
    turn = torch.zeros(t, 1, 3, dtype=torch.bool)
    turn[0::2, 0, 0] = turn[1::2, 0, 1] = True
    batch.frame["agents"].active = turn
    batch.next["agents"].active = turn.roll(1, -1) & alive | turn.roll(-1, -1) & alive
    learn(a, batch)
    near(told[0]["target"][0].flatten(), [3 + (4 + TANH - LOG_PI_1) / 2])


def test_where_pay_differs_each_has_a_critic_and_its_own_entropy_alone(told):
    """Q_i = v_i + a_0 + 3 a_1, without the other's entropy: y_0 = 3 + (4 + 3 tanh 1 + H) / 2, y_1 = 5 + (6 + 3 tanh 1 -
    log pi_1) / 2."""
    a = learner(world(2), critic="world")
    assert not a.as_one
    rows = torch.zeros(2, 1, 6)
    rows[:, 0, 4:] = torch.tensor([1.0, 3])
    rows[0, 0, 1] = rows[1, 0, 3] = 1.0
    worth(a, (rows, None), (rows, None))
    u = torch.tensor([0.5, ONES])[:, None]
    q, w = [[[[0.0, 1], [0, 2]]]], [[[[0.0, 4], [0, 6]]]]
    learn(a, happened(a, q, w, [[[3.0, 5]]], torch.tensor([[0.5], [0.25]]), following=u))
    near(told[0]["value"][0].flatten(), [2.25, 3.25])
    near(told[0]["target"].flatten(), [3 + (4 + 3 * TANH + H) / 2, 5 + (6 + 3 * TANH - LOG_PI_1) / 2])


CRITICS = {  # -> widths of what is seen and of what is told, for actions of one number
    ("own", "state"): (2, 1),
    ("team", "state"): (4, 2),
    ("world", "state"): (7, 2),
    ("world", "joined"): (4, 2),
    ("world", "agent"): (9, 2),
}


@pytest.mark.parametrize("common", [False, True])
@pytest.mark.parametrize(("critic", "critic_input"), CRITICS)
def test_what_critics_see_and_are_told(critic, critic_input, common):
    a = learner(world(2, state=7, common=common), critic=critic, critic_input=critic_input)
    seen_of, told_of = CRITICS[critic, critic_input]
    assert a.critics[0].head.body.width_in == seen_of + told_of
    assert a.as_one == (common and critic != "own" and critic_input != "agent")
    batch = happened(a, torch.full((1, 1, 2, 2), 3.0), torch.zeros(1, 1, 2, 2), 0.0, torch.tensor([[0.5], [0.25]]))
    batch.frame.state, batch.next.state = torch.full((1, 1, 7), 5.0), torch.zeros(1, 1, 7)
    heard = inputs(a.critics[1])
    learn(a, batch)
    state = {"own": [3.0] * 2, "team": [3.0] * 4}.get(critic, [3.0] * 4 if critic_input == "joined" else [5.0] * 7)
    state = state + [3.0] * 2 if critic_input == "agent" else state
    actions = [[0.5], [0.25]] if critic == "own" else [[0.5, 0.25]] * (1 if a.as_one else 2)
    assert heard[0][0, 0].tolist() == [[*state, *x] for x in actions]


@pytest.mark.parametrize("common", [False, True])
@pytest.mark.parametrize("others", ["buffer", "policy"])
def test_critics_of_choices_never_see_an_agents_own_but_the_others(others, common):
    """Three agents of two choices did 1, 0, 0; in the loss they would do 0, 1, 1, and next 1, 1, 0. Their own places are 0."""
    a = learner(world(3, Discrete(2), obs=(1,), common=common), critic="world", others=others)
    assert not a.as_one
    first, second = [0.9, 0.1], [0.1, 0.9]
    own, following = ([torch.tensor((first, second)[k]) for k in ks] for ks in ((0, 1, 1), (1, 1, 0)))
    heard, copies = inputs(a.critics[0]), inputs(a.target.module[0])
    batch = happened(
        a, torch.full((1, 1, 3, 1), 7.0), torch.full((1, 1, 3, 1), 9.0), 0.0, [[[1, 0, 0]]], own=torch.stack(own),
        following=torch.stack(following),
    )  # fmt: skip
    learn(a, batch)

    def beside(*choices):
        hot = [[0, 1] if x else [1, 0] for x in choices]
        return [[x for j in range(3) for x in ([0, 0] if j == i else hot[j])] for i in range(3)]

    assert len(copies) == 1
    assert heard[0][0, 0].tolist() == [[7, 7, 7, *x] for x in beside(1, 0, 0)]  # the critics' own step
    assert copies[0][0, 0].tolist() == [[9, 9, 9, *x] for x in beside(1, 1, 0)]
    assert heard[-1][0, 0].tolist() == [[7, 7, 7, *x] for x in beside(*((1, 0, 0) if others == "buffer" else (0, 1, 1)))]


def test_critics_of_one_choice_of_their_own_are_told_nothing():
    a = learner(world(3, Discrete(2)))
    assert a.critics[0].head.body.width_in == 4  # what it sees
    assert a.critics[0].head.body.width_out == 2


def test_a_matrix_game_with_a_critic_that_knows_it(told):
    """Agent 0's choices are worth 8 and 0 beside agent 1's first, 2 and 4 beside its second; agent 1's are worth as much. Both
    policies are 3/4 and 1/4. Agents did 0 and 1; next agent 1 draws its first and agent 0 its second."""
    a = learner(world(2, Discrete(2), obs=(1,), common=True), logits=[LOG_3, 0.0], critic="world", net={"share": "none"})
    rows = torch.zeros(2, 2, 6)
    rows[0, :, 4:] = torch.tensor([[8.0, 2], [0, 4]])  # agent 0's choices, by agent 1's
    rows[1, :, 2:4] = torch.tensor([[8.0, 0], [2, 4]])  # agent 1's choices, by agent 0's
    worth(a, (rows, None), (rows, None))
    noise = torch.tensor([[0.01, 0.99], [0.5, 0.5]])
    zeros = torch.zeros(1, 1, 2, 1)
    learn(a, happened(a, zeros, zeros, 3.0, [[[0, 1]]], following=noise))
    entropy = 2 * LOG_2 - 0.75 * LOG_3
    near(told[0]["value"][0].flatten(), [2.0, 2])
    # agent 0 beside a first choice: 3/4 8 = 6; agent 1 beside a second: 3/4 0 + 1/4 4
    near(told[0]["target"].flatten(), [3 + (6 + entropy) / 2, 3 + (1 + entropy) / 2])


# --- who counts, and what is learnt towards ---------------------------------------------------------------------------


def test_the_dead_are_in_no_loss_and_weigh_no_entropy():
    """Of two agents the second is dead: losses, slopes and the weight are those of the first, and the second's weight stays."""
    u = torch.tensor([0.5, ONES])[:, None]
    a = learner(world(2, mortal=True), **STILL)
    alive = [[[Y, N]]]
    q = [[[[0.0, 4], [JUNK, JUNK]]]]
    metrics = learn(a, happened(a, q, q, [[[1.0, JUNK]]], 0.0, alive=alive, alive_tp1=alive, own=u, following=u))
    near(metrics["loss_actor"], -H - 4)
    near(metrics["entropy"], H)
    near(metrics["loss_critic"], ((1 + (4 + H) / 2 - 6) ** 2 + (1 + (4 + H) / 2 - 4) ** 2) / 2)
    near(slope(a.alpha_optimiser, a.weights.log), [H + 1, 0])
    assert a.alpha[1] == 1
    near(slope(a.actor_optimiser, a.actor.body.biases[0])[0], -1.0)


def test_where_nobody_acts_nothing_moves():
    a = learner(world(mortal=True), weight_decay=0.5)
    before = {k: x.clone() for k, x in a.state_dict().items() if "target.updates" not in k}
    metrics = learn(a, happened(a, [[0.0, 1]], [[0.0, 4]], JUNK, alive=N, alive_tp1=N))
    assert all(torch.equal(x, a.state_dict()[k]) for k, x in before.items())
    assert (metrics["loss_critic"], metrics["loss_actor"], metrics["entropy"]) == (0, 0, 0)


def test_so_many_rewards_and_then_the_value_with_its_entropy(told):
    """n_step 2: 1 + 2/2 + (4 + H)/4; terminated in step 1: 1 + 2/2; cut off in step 0: 1 + (8 + H)/2."""
    a = learner(n_step=2)
    assert a.feed.length == 2
    q, w = torch.zeros(2, 3, 2), torch.tensor([[[0.0, 8]] * 3, [[0.0, 4]] * 3])
    batch = happened(
        a, q, w, [1.0, 2], terminated=[[N, N, N], [N, Y, N]], over=[[N, N, Y], [N, Y, N]]
    )  # fmt: skip
    learn(a, batch)
    near(told[0]["target"].flatten(), [2 + (4 + H) / 4, 2, 1 + (8 + H) / 2])
    assert told[0]["value"].shape == (2, 1, 3, 1)  # the second step was there for its reward


def test_how_long_sequences_are():
    """chunk, burn_in and n_step, without memory and with it."""
    assert learner().feed.length == 1
    assert learner(chunk=5, burn_in=3, n_step=2).feed.length == 6  # nothing to warm up
    gru = {"memory": "gru", "memory_width": 4}
    assert learner(net=gru).feed.length == 4 + 16
    a = learner(net=gru, chunk=5, burn_in=3, n_step=2)
    assert a.feed.length == 3 + 5 + 1
    assert (a.chunk, a.burn_in) == (5, 3)
    assert learner(world(2, mortal=True, turns=True)).feed.length == 4  # two turns of each


def test_importance_weighs_the_critics_and_not_the_actor():
    """Errors of 2 and 4 of two critics and two rows, of which the second counts half: (2 + 8) and half of it."""
    a = learner(alpha=1e-9)
    batch = happened(a, torch.zeros(1, 2, 2), torch.zeros(1, 2, 2), 4.0, terminated=Y)
    batch.weight = torch.tensor([1.0, 0.5])
    metrics = learn(a, batch)
    near(metrics["loss_critic"], 7.5)
    near(metrics["priority"], [3.0, 3])
    near(metrics["td_error"], 3.0)
    near(metrics["predictQ"], 1.0)
    near(slope(a.critic_optimiser, a.critics[1].head.body.biases[0]), [-3.0])
    near(slope(a.actor_optimiser, a.actor.body.biases[0])[0], -1.0, 0.01 + 0.25)  # by the critics' slope after their step
    assert "priority" not in learn(learner(prioritised=False), happened(a, [[0.0, 0]], [[0.0, 0]]))


def test_rewards_are_divided_by_the_root_mean_square_of_what_was_collected(told):
    """normalise_reward: 2 and 6 were collected, of mean square 20; the dead are not counted."""
    a = learner(world(mortal=True), normalise_reward=True, reward_scale=3.0)
    zeros = torch.zeros(1, 2, 2)
    a.update_statistics(happened(a, zeros, zeros, [[2.0, 6]]))
    a.update_statistics(happened(a, zeros, zeros, JUNK, alive=N))
    learn(a, happened(a, zeros, zeros, [[10.0, 4]], terminated=Y))
    near(told[0]["target"].flatten(), [30 / 20**0.5, 12 / 20**0.5])


def test_observations_are_normalised_by_what_was_collected(told):
    """normalise_obs: 1 and 3 have mean 2 and deviation 1: (2, 6) is (0, 4), for actor and critics. Updates move nothing."""
    a = learner(normalise_obs=True)
    a.update_statistics(happened(a, [[[1.0, 1], [3, 3]]], [[[JUNK, 0], [JUNK, 0]]]))
    learn(a, happened(a, [[2.0, 3]], [[2.0, 6]], 3.0))
    near(told[0]["value"].flatten(), [3.0, 1])
    near(told[0]["target"].flatten(), [3 + (4 + H) / 2])
    assert a.observations.norms["agents"].count == 2


def test_a_normaliser_of_the_users_own(tmp_path, told):
    """With this `normaliser` v = 8 is 4."""
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
    learn(a, happened(a, [[0.0, 2]], [[0.0, 8]], 3.0))
    near(told[0]["target"].flatten(), [3 + (4 + H) / 2])


def test_what_moments_are_worth_to_those_who_ask():
    """By the mean of the policy, m = 1: v + tanh 1 + 2, to the first critic; of choices the likeliest, 5."""
    a = learner(world(2))
    a.peers = {"agents": a}
    with torch.no_grad():
        near(a.values(seen([[[[1.0, 4], [0, 6]]]])), [[[6 + TANH, 8.0]]])
        b = learner(world(action=THREE), logits=LIKELY)
        b.peers = {"agents": b}
        near(b.values(seen([[[[5.0, 6, 7, 1, 1, 1]]]])), [[[5.0]]])
        c = team()
        c.peers = {"agents": c}
        near(c.values(seen([[[[1.0, 4], [0, 0]]]])), [[[6 + TANH] * 2]])  # one value for all


# --- whole worlds -----------------------------------------------------------------------------------------------------


def loop_of(name, env, rows=8, /, **sections):
    algo = {"capacity": 2000, "learning_starts": 8, "batch": 8, "every": 32, "rollout": 8, "gamma": 0.5}
    algo |= {"random_steps": 0, **sections.pop("algo", {})}
    run = {"envs": rows, "quiet": True, "steps": 10_000, **sections.pop("run", {})}
    return Loop(resolve(Settings(name, env, run, {"net": {"hidden": (8,)}, **sections, "algo": algo})))


def batch_of(loop, steps):
    batch = loop.collector.collect(steps)
    loop.shaping(batch)
    a = loop.learners[0]
    batch.noise = torch.rand(a.draws(*batch.over.shape), generator=torch.Generator().manual_seed(5))
    return batch


REMEMBERS = {"memory": "gru", "memory_width": 8, "hidden": (8,)}
ALIKE = {"run": {"reward": "team-mean"}}
FOUR = Box((-1.0,) * 4, (1.0,) * 4)


def lives(a, rows=6):
    """A batch of agents that come and go, or wait for their turns, and of whom anything is seen and done."""
    draw, t, n = torch.Generator().manual_seed(0), a.feed.length, a.n
    alive = torch.rand(t + 1, rows, n, generator=draw) < 0.7
    active = alive & (torch.arange(t + 1)[:, None, None] % n == torch.arange(n)) if a.spec.turns else alive
    begins = torch.cat((alive[:1], alive[1:] & ~alive[:-1]))
    obs = torch.randn(t + 1, rows, n, *a.spec["agents"].obs, generator=draw)
    now, then = (Frame({"agents": View(obs[k], alive[k], active[k], begins[k])}) for k in (slice(None, -1), slice(1, None)))
    shape = (t, rows, n, *a.space.shape)
    box = isinstance(a.space, Box)
    actions = torch.rand(shape, generator=draw) if box else torch.randint(2, shape, generator=draw)
    learner_reward = torch.randn(t, rows, n, generator=draw)
    learner_reward = (
        learner_reward.mean(-1, keepdim=True).expand_as(learner_reward).clone() if a.spec.common else learner_reward
    )
    results = {"agents": Result(learner_reward, alive[:-1] & ~alive[1:])}
    memory = {"agents": tree_map(lambda x: torch.randn(x.shape, generator=draw), a.memory(rows, obs.device)["agents"])}
    noise = torch.rand(a.draws(t, rows), generator=draw)
    over = torch.zeros(t, rows, dtype=torch.bool)
    return Batch(now, then, {"agents": actions}, results, over, {}, memory, {"agents": learner_reward}, noise)


BLIND = [  # actions, whether pay is common, whether they take turns, settings, nets
    (Discrete(2), N, N, {"n_step": 2, "normalise_reward": True}, {}),
    (Discrete(2), N, N, {"critic": "world", "others": "policy"}, {}),
    (Discrete(2), Y, N, {"critic": "world"}, REMEMBERS),
    (Discrete(2), N, Y, {}, {}),
    (FOUR, N, N, {}, REMEMBERS),
    (FOUR, N, N, {"critic": "world"}, {}),
    (FOUR, N, N, {"critic": "world", "others": "policy"}, {}),
    (FOUR, Y, N, {"critic": "world", "n_step": 2}, {}),
    (FOUR, Y, N, {"critic": "world", "n_step": 2}, REMEMBERS),
    (FOUR, Y, N, {"critic": "world", "others": "policy"}, {}),
    (FOUR, N, Y, {"critic": "world"}, {}),
]


@pytest.mark.parametrize(("action", "common", "turns", "config", "net"), BLIND)
def test_who_does_not_act_is_in_no_loss_and_no_statistic(action, common, turns, config, net):
    """Whatever the dead see, remember, do, would do and are paid, and those who wait do, the weights come out the same."""
    spec = world(3, action, mortal=True, common=common, turns=turns, obs=(5,))
    nets, settings = NetConfig(**{"hidden": (8,), **net}), SAC.Config(**{**plain(SAC), **config, "chunk": 8, "burn_in": 2})
    a, b = (SAC(Seat(spec, ("agents",), settings, nets, torch.Generator().manual_seed(0))) for _ in range(2))
    batch = lives(a)
    spoilt = tree_map(torch.clone, batch)
    view, after = batch.frame["agents"], batch.next["agents"]
    gone, waits = ~view.alive, ~view.active
    assert gone.any()
    spoilt.actions["agents"][waits] = 1 - spoilt.actions["agents"][waits]
    spoilt.frame["agents"].obs[gone] = 1e3
    spoilt.next["agents"].obs[~after.alive] = -1e3
    spoilt.learner_reward["agents"][gone] = 1e3
    for x in tree_leaves(spoilt.memory["agents"]["actor"] if a.recurrent and a.as_one else spoilt.memory):
        x[gone[0]] = 9  # who is not there at first arrives with an empty memory
    own, following = spoilt.noise.reshape(2, *gone.shape, -1)
    own[waits] = 1 - own[waits]
    if not turns:
        following[~after.alive] = 1 - following[~after.alive]
    for x, given in ((a, batch), (b, spoilt)):
        x.update_statistics(given)
        learn(x, given)
    assert all(torch.equal(x, b.state_dict()[k]) for k, x in a.state_dict().items())
    for o in (a.actor_optimiser, a.critic_optimiser, a.alpha_optimiser):
        assert o.steps == 1
        assert (o.first != 0).any()


METRICS = {
    *("loss_actor", "loss_critic", "predictQ", "td_error", "entropy", "alpha", "target_lag"),
    *("learning_rate_actor", "learning_rate_critic", "grad_norm_actor", "grad_norm_critic"),
}


@pytest.mark.parametrize("net", [{"hidden": (8,)}, REMEMBERS])
@pytest.mark.parametrize(
    ("algo", "env", "more"),
    [
        ("sac", "probe_copy", {"env": {"actions": "continuous"}}),
        ("masac", "simple_spread", {**ALIKE, "env": {"actions": "continuous"}}),
        ("masac", "simple_speaker_listener", {}),
        ("masac", "probe_illegal", {}),
    ],
)
def test_a_run_learns_and_says_so(algo, env, more, net):
    loop = loop_of(algo, env, 4, algo={"prioritised": True, "chunk": 2}, net=net, **more)
    before = [a.alpha.clone() for a in loop.learners]
    for _ in range(4):
        loop.iterate()
    told = loop.means.take()
    assert {k.split("/")[-1] for k in told} == METRICS
    assert all(math.isfinite(x) for x in told.values())
    for a, alpha_before in zip(loop.learners, before, strict=True):
        updates = a.target.updates
        assert updates > 1
        assert a.actor_optimiser.steps == a.critic_optimiser.steps == a.alpha_optimiser.steps == updates
        assert (a.alpha != alpha_before).all()
    assert (len(loop.learners) == 2) == (env == "simple_speaker_listener")


def test_peers_are_asked_what_they_draw_next():
    """The speaker's critic is told what the listener would draw from its policy, one-hot, by the noise that is left for it."""
    loop = loop_of("masac", "simple_speaker_listener", 4, algo={"normalise_obs": False})
    speaker, listener = loop.learners
    assert (speaker.groups, speaker.others, speaker.needs_peers) == (("speaker",), ["listener"], True)
    batch = batch_of(loop, 1)
    assert speaker.draws(1, 4) == 4 * (2 * 3 + 5)
    heard = inputs(speaker.target.module[0])
    learn(speaker, batch)
    theirs = batch.noise[-20:].reshape(1, 4, 1, 5)
    with torch.no_grad():
        logits = listener.actor(batch.next["listener"].obs)[0]
    chosen = (logits - (-theirs.log()).log()).argmax(-1)
    actions = heard[0][..., -8:]
    assert (actions[..., :3] == 0).all()  # its own
    assert torch.equal(actions[..., 3:].argmax(-1), chosen)
    assert (actions[..., 3:].sum(-1) == 1).all()


def test_what_is_remembered_in_an_update_is_what_was_remembered_when_acting():
    loop = loop_of("masac", "simple_spread", 4, net=REMEMBERS, env={"actions": "continuous"}, **ALIKE)
    (a,) = loop.learners
    loop.collector.collect(3)
    batch = batch_of(loop, a.burn_in + 5)
    with torch.no_grad():
        samples = Samples(a, batch)
        params, judged = a._actor_output(a.actor, samples)[-1], a._features(a.critics[1], 1, samples)[-1]
    kept = loop.collector.memory["agents"]
    assert params.abs().max() > 1e-4
    torch.testing.assert_close(a.actor.out(kept["actor"]["hidden"]), params, rtol=0, atol=1e-6)
    torch.testing.assert_close(kept["critic"]["1"]["hidden"][:, :1], judged, rtol=0, atol=1e-6)


def test_the_replay_holds_what_a_shaper_paid(tmp_path):
    (tmp_path / "mine.py").write_text("def paid(reward, obs, step, steps):\n    return reward * 0 + 7\n")
    loop = loop_of("sac", "probe_constant", 4, algo={"shaper": f"{tmp_path}/mine.py:paid"})
    loop.iterate()
    assert loop.replay[:, :][3]["agents"][:8].unique().tolist() == [7]
