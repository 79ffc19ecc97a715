"""Every probe world by every algorithm that declares it can take it, at the answer stated in the world's own file."""

import dataclasses

import pytest
import torch
from worlds import probes

from shoal.algos.checks import fits
from shoal.api import make
from shoal.envs.probe.base import Valued
from shoal.ids import catalog
from shoal.spec import UserError
from shoal.training.evaluate import evaluate
from shoal.training.loop import Loop
from shoal.training.settings import Settings, resolve

GAMMA = 0.9


def learners():
    """Every algorithm that learns, once: names that stand for equal settings of one class are one."""
    by_config = {}
    for id, e in catalog("algos").items():
        if e.load().learns:
            by_config.setdefault((e.cls, e.load().Config(**e.settings)), id)
    return list(by_config.values())


# settings worth a run of their own, of the world and of the nets, beside each world's defaults
VARIANTS = [
    *((p, {}, {}) for p in probes()),
    ("probe_copy", {"actions": "multi"}, {}),
    ("probe_copy", {"actions": "continuous"}, {}),
    ("probe_illegal", {"actions": "multi"}, {}),
    ("probe_matrix", {"payoff": "penalty"}, {}),
    ("probe_truncated", {"stagger": True, "n": 2}, {}),
    ("probe_terminated", {"stagger": True, "n": 2}, {}),
    ("probe_deaths", {"copy": False}, {}),
    ("probe_leave", {"common": True}, {}),
    ("probe_turns", {"copy": False}, {}),
    ("probe_teams", {"shaped": True}, {"share": "none"}),  # one of the pair is to copy and the other to miss
    ("probe_image", {"vector": True}, {}),
    ("probe_image", {"n": 2}, {"share": "none"}),
]
VARIANT_IDS = [f"{e}-{'-'.join(map(str, c.values()))}" for e, c, _ in VARIANTS]


def train(algo, env, config, solved=lambda loop: None, iterations=200, net=None, more=None):
    """The loop itself, without a folder. Stops as soon as `solved` raises no AssertionError; at the end it may."""
    known = {f.name for f in dataclasses.fields(catalog("algos")[algo].load().Config)}
    wanted = {
        "rollout": 16,
        "epochs": 4,
        "minibatches": 2,
        "lr": 5e-3 if "epochs" in known else 1e-2,  # one step a rollout: a larger one
        "lr_schedule": "linear",
        "gamma": GAMMA,
        "entropy": 0.005,
        **{"every": 32, "batch": 128, "capacity": 20_000, "learning_starts": 1_000, "epsilon_steps": 30_000},
        "target_every": 50,
        **{"noise": 0.5, "noise_steps": 30_000, "random_steps": 1_000},
    }
    if algo == "coma":  # many steps of the critic a rollout, and a target that is never far behind
        wanted |= {"critic_slices": 16, "target_every": 16}
        del wanted["every"], wanted["batch"]
    elif "every" in known:
        wanted |= {"lr": 3e-3, "target_tau": 1.0, "huber": 1.0, "n_step": 1, "epsilon_keep": 0.0, "grad_clip": 10.0}
        wanted |= {"normalise_reward": False}  # values are compared in units of the rewards
    hidden = (32,)
    net = {"activation": "tanh", **(net or {})}  # of the zeros that probe_truncated shows relu makes zeros, for ever
    if "critics" in known:  # targets that follow smoothly, and critics that take products of what is seen and what is done
        wanted |= {"target_every": 1, "target_tau": 0.05}
        hidden = (64, 64)
    asked = {**{k: v for k, v in wanted.items() if k in known}, **(more or {})}
    sections = {"algo": asked, "net": {"hidden": hidden, "memory_width": 32, **net}, "env": config}
    run = {"envs": 32, "steps": iterations * 16 * 32, "quiet": True}
    if catalog("algos")[algo].load().reward == "common" and not make(env, 1, **config).spec.common:
        run["reward"] = "team-mean"
    loop = Loop(resolve(Settings(algo, env, run, sections)))
    for k in range(1, iterations + 1):
        loop.iterate()
        if k % 10 == 0 and k < iterations:
            try:
                solved(loop)
            except AssertionError:
                continue
            return loop
    solved(loop)
    return loop


def check(loop):
    world = make(loop.resolved.settings.env, 256, **loop.resolved.settings.section("env"))
    seen = evaluate(world, loop.players, 1, seed=7)
    answer = world.answer
    for g, returns in seen.returns.items():
        score = float(returns.mean())
        assert score >= answer.floor[g] - 1e-6, f"{g} reached {score:.3f}, floor {answer.floor[g]:.3f}"
        if getattr(world.config, "shaped", False):  # who ignores the shaping earns more than the answer
            assert abs(score - answer.best[g]) <= answer.slack
    assert float(seen.stats.get("illegal", torch.zeros(1)).sum()) == 0
    assert float(loop.collector.episode_stats.done.get("stat/illegal", torch.zeros(1))) == 0  # nor while it explored
    if isinstance(world, Valued):
        frames, truth = world.frames(), world.values(GAMMA)
        batch_of_one = _framed(frames)
        for a in loop.learners:
            with torch.no_grad():
                value = a.values(batch_of_one)[0]  # [states, N]
            (g,) = a.groups
            active = frames[g].active
            wrong = (value - truth[g])[active].abs().max()
            assert wrong < 0.12 * max(1.0, float(truth[g].abs().max())), f"{g}: values are off by {wrong:.3f}"


def _timed(view):
    return type(view)(*(None if x is None else x[None] for x in vars(view).values()))


def by_cost(env, config, algo):
    """Other pictures than the plain ones are seen by two in each run of the tests, and by all in the slow ones."""
    return [pytest.mark.slow] if env == "probe_image" and config and algo not in ("mappo", "ddqn") else []


CASES = [
    pytest.param(algo, env, config, net, id=f"{id}-{algo}", marks=by_cost(env, config, algo))
    for (env, config, net), id in zip(VARIANTS, VARIANT_IDS, strict=True)
    for algo in learners()
]


@pytest.mark.parametrize(("algo", "env", "config", "net"), CASES)
def test_probe_is_solved(algo, env, config, net):
    world = make(env, 1, **config)
    try:
        fits(catalog("algos")[algo].load(), world.spec, [g.name for g in world.spec.groups])
    except UserError:
        return  # declared: it cannot take this world; tests of `fits` see that it says so
    if env == "probe_memory":  # what needs memory cannot be solved without: a coin's toss
        loop = train(algo, env, config, iterations=10)
        seen = evaluate(make(env, 256), loop.players, 1, seed=7)
        assert abs(float(seen.returns["agents"].mean())) < 0.3
        return
    train(algo, env, config, check, net=net)


KINDS = {catalog("algos")[algo].cls: algo for algo in reversed(learners())}  # the first name of each class


LSTM = [pytest.param(a, "lstm", marks=[] if a in ("ppo", "ddqn") else [pytest.mark.slow]) for a in KINDS.values()]


@pytest.mark.parametrize(("algo", "memory"), [*((a, "gru") for a in learners()), *LSTM])
def test_what_was_seen_long_ago_is_remembered(algo, memory):
    """Two agents with signs of their own; without memory it is a coin's toss, see above."""
    short = {"chunk": 8, "burn_in": 1, "batch": 64}  # two episodes, and little to wait for
    replays = "burn_in" in {f.name for f in dataclasses.fields(catalog("algos")[algo].load().Config)}
    train(algo, "probe_memory", {"n": 2}, check, net={"memory": memory}, more=short if replays else None)


@pytest.mark.parametrize(("env", "config", "net"), VARIANTS, ids=VARIANT_IDS)
def test_bf16_reaches_the_same(env, config, net):
    memory = "gru" if env == "probe_memory" else "none"
    train("mappo", env, config, check, net={**net, "precision": "bf16", "memory": memory})


OPTIONS = [  # world, settings of the algorithm, of its nets
    ("probe_copy", {"critic": "own"}, {"trunk": "shared"}),
    ("probe_deaths", {"critic": "own"}, {"trunk": "shared"}),
    ("probe_copy", {"critic_input": "agent"}, {"trunk": "shared"}),
    ("probe_deaths", {"critic_input": "agent"}, {"trunk": "shared"}),
    ("probe_teams", {"critic": "team", "critic_input": "agent"}, {"trunk": "shared"}),
    ("probe_memory", {"critic_input": "agent"}, {"trunk": "shared", "memory": "gru"}),
    ("probe_copy", {}, {"layer_norm": True}),
    ("probe_deaths", {}, {"attention": "critic"}),
    ("probe_teams", {}, {"attention": "critic"}),
    ("probe_deaths", {}, {"share": "agent_0=a,agent_1=b,agent_2=a"}),
    ("probe_deaths", {"critic_slices": 10}, {}),
    ("probe_deaths", {"target_tau": 0.2, "lam": 0.0}, {}),  # nothing but the target's values to learn from
    ("probe_deaths", {"lr_schedule": "kl", "lr": 1e-5}, {}),  # so slow that the rate has to rise
    ("probe_deaths", {"advantage_every": "minibatch"}, {}),
    ("probe_deaths", {"critic_input": "agent"}, {}),
    ("probe_copy", {"normalise_reward": True}, {}),
]


@pytest.mark.parametrize(
    ("env", "more", "net"), OPTIONS, ids=["-".join((e, *c, *n, *map(str, (c | n).values()))) for e, c, n in OPTIONS]
)
def test_probe_is_solved_with_an_option(env, more, net):
    train("mappo", env, {}, check, net=net, more=more)


# The best sum of a row's and a column's number, for all nine cells alike: mean of the row + mean of the column - mean of all.
# climbing: rows -19/3, -17/3, 5/3, columns -19/3, -23/3, 11/3, all -31/9; penalty: -30, 2/3, -30 both ways, all -178/9.
SUMS = {
    "climbing": [[-83 / 9, -95 / 9, 7 / 9], [-77 / 9, -89 / 9, 13 / 9], [-11 / 9, -23 / 9, 79 / 9]],
    "penalty": [[-362 / 9, -86 / 9, -362 / 9], [-86 / 9, 190 / 9, -86 / 9], [-362 / 9, -86 / 9, -362 / 9]],
}


@pytest.mark.parametrize("payoff", ["climbing", "penalty"])
@pytest.mark.parametrize("algo", ["vdn", "qmix"])
def test_mixers_hold_of_a_game_what_theory_says(algo, payoff):
    """From uniform play a sum learns the best sum, to the number, and chooses its peak; a monotone mixer something that fits no
    worse. Neither holds the game itself: the best joint choice, 11 and 10, is not theirs."""
    more = {"epsilon_schedule": "constant", "huber": None, "grad_clip": None, "every": 16, "batch": 512, "lr": 2e-2}
    loop = train(algo, "probe_matrix", {"payoff": payoff}, iterations=120, more=more)
    (learner,) = loop.learners
    seen = evaluate(make("probe_matrix", 8, payoff=payoff), loop.players, 1, seed=7)
    (reached,) = set(seen.returns["agents"].flatten().tolist())
    safe, most = (5, 11) if payoff == "climbing" else (2, 10)
    assert reached == safe if algo == "vdn" else safe <= reached < most
    frame = make("probe_matrix", 9, payoff=payoff).reset(torch.zeros(9, 0))
    q = learner._q_net("agents")(learner.observations["agents"].actor_input(frame))[0]  # [9, 2, 3]
    cells = torch.cartesian_prod(torch.arange(3), torch.arange(3))
    with torch.no_grad():
        joint = learner.joint(q.gather(-1, cells[..., None])[..., 0][None], None, _framed(frame), False).reshape(3, 3)
    truth, best_sum = make("probe_matrix", 1, payoff=payoff).table, torch.tensor(SUMS[payoff])
    if algo == "vdn":
        torch.testing.assert_close(joint, best_sum, rtol=0.1, atol=1.5)
    else:
        assert (joint - truth).square().mean() < 1.1 * (best_sum - truth).square().mean()


def _framed(frame):
    return dataclasses.replace(frame, views={g: _timed(v) for g, v in frame.views.items()})
