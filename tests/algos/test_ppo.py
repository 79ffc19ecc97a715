"""PPO's own promises: ratios begin at one, the dead count nowhere, agents with nets of their own do not touch each other."""

import dataclasses

import pytest
import torch

from shoal.algos.base import Seat
from shoal.algos.ppo import PPO
from shoal.algos.samples import Samples
from shoal.nets.config import NetConfig
from shoal.ops.schedules import Now
from shoal.spec import Batch, Discrete, EnvSpec, Frame, Group, Result, View
from shoal.training.loop import Loop
from shoal.training.settings import Settings, resolve
from shoal.tree import tree_map


def loop_of(name, env, config=None, rows=8, /, **sections):
    settings = Settings(name, env, {"envs": rows, "quiet": True, "steps": 10_000}, {"env": config or {}, **sections})
    return Loop(resolve(settings))


def batch_of(loop, steps=16):
    batch = loop.collector.collect(steps)
    loop.shaping(batch)
    a = loop.learners[0]
    batch.noise = torch.rand(a.draws(*batch.over.shape), generator=torch.Generator().manual_seed(5))
    return batch


def learn(a, batch):
    return a.update(Samples(a, batch))


def weights(algorithm):
    return {k: x.clone() for k, x in algorithm.state_dict().items()}


WORLDS = [
    ("simple_spread", {}, {}),
    ("simple_reference", {"actions": "multi"}, {}),
    ("probe_illegal", {}, {}),
    ("probe_illegal", {"actions": "multi"}, {}),
    ("probe_deaths", {}, {}),
    ("probe_copy", {"actions": "continuous"}, {}),
    ("probe_copy", {"actions": "continuous"}, {"squash": True}),
]


@pytest.mark.parametrize("share", ["id", "plain", "none"])
@pytest.mark.parametrize(("env", "config", "algo"), WORLDS)
def test_ratios_begin_at_one(env, config, algo, share):
    """Also after earlier updates moved the weights and the observation statistics."""
    loop = loop_of("mappo", env, config, algo={**algo, "epochs": 1, "minibatches": 1, "rollout": 16}, net={"share": share})
    for _ in range(3):
        metrics = learn(loop.learners[0], batch_of(loop))
        assert abs(float(metrics["kl"])) < 1e-6
        assert float(metrics["clip_fraction"]) == 0
        assert float(metrics["grad_norm_actor"]) > 0


@pytest.mark.parametrize("algo", ["ippo", "mappo"])
@pytest.mark.parametrize("env", ["probe_deaths", "probe_turns"])
def test_who_does_not_act_is_in_no_loss_and_no_statistic(algo, env):
    loop = loop_of(algo, env, algo={"rollout": 16})
    learner, batch = loop.learners[0], batch_of(loop)
    twin = loop_of(algo, env, algo={"rollout": 16}).learners[0]
    twin.load_state_dict(learner.state_dict())
    spoilt = tree_map(torch.clone, batch)
    gone, waits = ~batch.frame["agents"].alive, ~batch.frame["agents"].active
    assert waits.any()
    spoilt.extras["agents"]["log_prob"][waits] = -7.0
    spoilt.actions["agents"][waits] = 1 - spoilt.actions["agents"][waits]
    spoilt.frame["agents"].obs[gone] = 1e3
    spoilt.learner_reward["agents"][gone] = 1e3  # what the dead are paid after their death
    learn(learner, batch)
    learn(twin, spoilt)
    for k, x in weights(learner).items():
        assert torch.equal(x, twin.state_dict()[k]), k


def test_agents_with_nets_of_their_own_do_not_touch_each_other():
    settings = {
        "rollout": 16,
        "advantage_scope": "none",
        "normalise_value": False,
        "grad_clip": None,
        "normalise_obs": False,
    }
    loop = loop_of("ippo", "probe_copy", algo=settings, net={"share": "none"})
    learner, batch = loop.learners[0], batch_of(loop)
    twin = loop_of("ippo", "probe_copy", algo=settings, net={"share": "none"}).learners[0]
    twin.load_state_dict(learner.state_dict())
    other = tree_map(torch.clone, batch)
    other.learner_reward["agents"][..., 1] += 5.0
    learn(learner, batch)
    learn(twin, other)
    for k, x in learner.actor.named_parameters():
        y = twin.actor.get_parameter(k)
        assert torch.equal(x[0], y[0]), k
        assert not torch.equal(x[1], y[1]), k


def test_plain_sharing_gives_equals_the_same_choice_and_ids_tell_them_apart():
    obs = torch.ones(1, 3, 18)
    view = View(obs, *(torch.ones(1, 3, dtype=torch.bool) for _ in range(3)))
    for share, same in (("plain", True), ("id", False), ("none", False)):
        actor = loop_of("ippo", "simple_spread", net={"share": share}).learners[0].actor
        logits = actor(view.obs).logits[0][0]
        assert torch.allclose(logits[0], logits[1]) == same


def test_one_algorithm_for_two_groups_equals_one_group():
    """Groups with equal spaces, bound to one instance, are agents side by side."""
    generator = torch.Generator().manual_seed(0)
    rand = lambda *shape: torch.rand(*shape, generator=generator)  # noqa: E731
    one = EnvSpec((Group("agents", "t", ("x_0", "x_1", "x_2"), (4,), Discrete(3)),))
    two = EnvSpec((Group("a", "t", ("a_0", "a_1"), (4,), Discrete(3)), Group("b", "t", ("b_0",), (4,), Discrete(3))))
    config = PPO.Config(rollout=5, critic="world", normalise_obs=False)
    whole = PPO(Seat(one, ("agents",), config, NetConfig(), torch.Generator().manual_seed(1)))
    split = PPO(Seat(two, ("a", "b"), config, NetConfig(), torch.Generator().manual_seed(1)))
    steps, rows = 5, 6
    yes = torch.ones(steps, rows, 3, dtype=torch.bool)

    def frame(obs):
        return Frame({"agents": View(obs, yes, yes, ~yes)})

    obs, after, reward = rand(steps, rows, 3, 4), rand(steps, rows, 3, 4), rand(steps, rows, 3)
    noise = {"agents": rand(steps, rows, 3, 3)}
    with torch.no_grad():  # as the collector acts
        actions, _, extras = whole.act(frame(obs), {"agents": {}}, noise, True)
    over = torch.zeros(steps, rows, dtype=torch.bool)
    nothing = {g: {} for g in ("agents", "a", "b")}  # to remember
    batch = Batch(
        frame(obs), frame(after), actions, {"agents": Result(reward, ~yes)}, over, extras, nothing, {"agents": reward}
    )
    batch.noise = rand(whole.draws(steps, rows))

    def parts(x):
        return {"a": x[:, :, :2], "b": x[:, :, 2:]}

    def cut(f):
        views = {g: View(*(None if x is None else parts(x)[g] for x in vars(f["agents"]).values())) for g in "ab"}
        return Frame(views)

    with torch.no_grad():
        theirs, _, left = split.act(cut(frame(obs)), nothing, parts(noise["agents"]), True)
    assert torch.equal(torch.cat([theirs["a"], theirs["b"]], 2), actions["agents"])
    results = {g: Result(parts(reward)[g], parts(~yes)[g]) for g in "ab"}
    halves = Batch(cut(batch.frame), cut(batch.next), theirs, results, over, left, nothing, parts(reward), batch.noise)
    one_metrics, two_metrics = learn(whole, batch), learn(split, halves)
    assert all(torch.allclose(one_metrics[k], two_metrics[k], atol=1e-6) for k in one_metrics)
    assert all(torch.allclose(x, split.state_dict()[k], atol=1e-6) for k, x in whole.state_dict().items())


def test_rates_follow_their_schedule():
    loop = loop_of("mappo", "simple_spread", algo={"lr": 1e-3, "lr_critic": 2e-3, "lr_schedule": "linear", "lr_last": 0.1})
    a = loop.learners[0]
    for progress, share in ((0.0, 1.0), (0.5, 0.55), (1.0, 0.1)):
        a.set_schedules(Now(int(progress * 10_000), 10_000, 0))
        assert float(a.actor_optimiser.rate) == pytest.approx(1e-3 * share)
        assert float(a.critic_optimiser.rate) == pytest.approx(2e-3 * share)


def test_groups_have_settings_of_their_own():
    settings = Settings(
        "mappo",
        "simple_tag",
        {"envs": 4, "quiet": True},
        {"algo": {"lr": 1e-3}, "net": {"hidden": (16,)}},
        {"agent": {"algo": {"lr": 5e-4, "critic": "own"}, "net": {"hidden": (8, 8)}}},
    )
    loop = Loop(resolve(settings))
    adversary, agent = (loop.players.of[g] for g in ("adversary", "agent"))
    assert (adversary.config.lr, agent.config.lr) == (1e-3, 5e-4)
    assert (adversary.config.critic, agent.config.critic) == ("world", "own")
    assert (adversary.net.hidden, agent.net.hidden) == ((16,), (8, 8))


def test_central_critics_see_their_team_or_the_world():
    for critic, width in (("own", 34), ("team", 4 * 34), ("world", 4 * 34 + 2 * 28)):
        a = loop_of("mappo", "simple_world_comm", algo={"critic": critic}).players.of["adversary"]
        assert a.critic.net.body.weights[0].shape[1] == width


def test_normalisers_move_in_training_alone():
    loop = loop_of("mappo", "simple_spread", algo={"rollout": 16})
    a, batch = loop.learners[0], batch_of(loop)
    before = weights(a)
    loop.players.act(loop.collector.frame, loop.collector.memory, loop.players.noise(torch.Generator(), 8), explore=True)
    assert all(torch.equal(x, before[k]) for k, x in a.state_dict().items())
    learn(a, batch)
    assert float(a.observations.norms["agents"].count) == 16 * 8 * 3
    assert dataclasses.asdict(a.config)["normalise_obs"]
