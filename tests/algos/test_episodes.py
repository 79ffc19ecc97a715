"""Rollouts of whole episodes: minibatches of them, a critic that is trained in slices of each minibatch's time, and padding
after episodes that end early."""

from copy import deepcopy
from dataclasses import replace

import pytest
import torch
from test_onpolicy import JUNK, LOG_2, learn, learner, listen, near, world

from shoal.algos.samples import Samples
from shoal.spec import Batch, Frame, Result, UserError, View
from shoal.training.loop import Loop
from shoal.training.players import rollout_episodes
from shoal.training.settings import Settings, resolve
from shoal.tree import tree_map

# a walk between 0 and 7 that ends at either end, or after 6 steps; both agents push, and are paid for where they are
LINE = '''"""Two who walk a line together."""

from dataclasses import dataclass

import torch

from shoal.envs.base import Move, World
from shoal.spec import Discrete, EnvSpec, Frame, Group, Result


class Line(World):
    noise_begin, noise_step = 1, 1

    @dataclass(frozen=True)
    class Config:
        max_cycles: int = 6

    def setup(self):
        group = Group("agents", "agents", ("left", "right"), obs=(2,), action=Discrete(2))
        self.spec = EnvSpec((group,), state=2, common=True, horizon=self.config.max_cycles)

    def begin(self, noise):
        return {"place": 2 + (noise[:, 0] * 4).long()}

    def advance(self, state, actions, noise):
        push = (actions["agents"] * 2 - 1).sum(-1)
        place = state["place"] + torch.where(noise[:, 0] < 0.3, -1, push)
        ended = (place <= 0) | (place >= 7)
        reward = (place.to(self.dtype) / 7)[:, None].expand(-1, 2)
        return Move({"place": place}, {"agents": Result(reward, ended[:, None].expand(-1, 2))}, ended)

    def observe(self, state):
        seen = torch.stack((state["place"] / 7, state["clock"] / 6), -1).to(self.dtype)
        return Frame({"agents": self.view(seen[:, None].expand(-1, 2, -1), state["clock"])}, seen.square())
'''

SHORT = {"simple_spread": {"max_cycles": 6}}


def loop_of(name, world, rows, run=None, groups=None, /, **sections):
    how = {"envs": rows, "quiet": True, "steps": 10_000, "device": "cpu", **(run or {})}
    return Loop(resolve(Settings(name, world, how, sections, groups or {})))


@pytest.fixture(scope="module")
def line(tmp_path_factory):
    path = tmp_path_factory.mktemp("line") / "line.py"
    path.write_text(LINE)
    return str(path)


# --- the critic in slices of the episodes of each minibatch ---


def played(rows, steps):
    """Rewards of each row's episodes, one after another; each is terminated at its end. All see 1; what comes after is junk."""
    reward, seen = torch.full((steps, len(rows)), JUNK), torch.full((steps, len(rows)), JUNK)
    over = torch.zeros(steps, len(rows), dtype=torch.bool)
    for b, episodes in enumerate(rows):
        flat = [x for e in episodes for x in e]
        reward[: len(flat), b], seen[: len(flat), b] = torch.tensor(flat), 1.0
        for k in range(len(episodes)):
            over[sum(map(len, episodes[: k + 1])) - 1, b] = True
    yes = torch.ones(steps, len(rows), 1, dtype=torch.bool)
    frames = (Frame({"agents": View(seen[..., None, None].clone(), yes, yes, ~yes)}) for _ in range(2))
    reward = {"agents": reward[..., None]}
    batch = Batch(
        *frames,
        {"agents": torch.zeros_like(yes, dtype=torch.long)},
        {"agents": Result(reward["agents"], over[..., None])},
        over,
        {"agents": {"log_prob": torch.full(yes.shape, -LOG_2)}},
        {"agents": {}},
        reward,
    )
    batch.noise = torch.tensor([0.1, 0.2, 0.3, 0.4])  # in this order
    return batch


A, B, C, D = [1.0] * 4, [3.0] * 4, [0.0] * 4, [2.0] * 4
SLICED = {
    "critic_slices": 2,
    "advantage_every": "minibatch",
    "minibatch_episodes": 2,
    "lam": 0.0,
    "optimiser": "sgd",
}


@pytest.mark.parametrize(
    ("rows", "episodes", "longest"),
    [
        ([[A], [B], [C], [D]], 1, 4),
        ([[A, C], [B, D]], 2, 4),
        ([[A, C], [B, D]], 2, 5),  # they end early: two steps of padding
    ],
    ids=["a row each", "two a row", "two a row that end early"],
)
def test_slices_of_each_minibatch_go_from_the_last_to_the_first_towards_targets_computed_anew(rows, episodes, longest):
    """V = v = w + b of what all see, 1 at first; targets r + v / 2, and r at the end. A step by 1/4 of a mean error e, in w and
    in b, takes v down by e / 2.

        A, B    v 1          targets 1.5 3.5 (1 and 3 at the end)
                steps 2, 3   errors -0.5 0, -2.5 -2: mean -1.25         v 1.625
                steps 0, 1   errors 0.125, -1.875: mean -0.875          v 2.0625
        C, D    v 2.0625     targets 1.03125 3.03125 (0 and 2)
                steps 2, 3   errors 1.03125 2.0625, -0.96875 0.0625: mean 0.546875     v 1.7890625
                steps 0, 1   errors 0.7578125, -1.2421875: mean -0.2421875             v 1.91015625

    Advantages are minus the errors."""
    padded = longest > 4
    a = learner(world(horizon=longest), episodes=episodes, **SLICED)
    batch = played(rows, longest * episodes)
    if padded:
        batch.filled = torch.arange(10)[:, None].expand(10, 2) < 8
    told = listen(a)
    learn(a, batch)
    assert (a.actor_optimiser.steps, a.critic_optimiser.steps) == (2, 4)
    expected = (
        ([[1.5, 3.5]] * 3 + [[1, 3]], [[-0.125, 1.875]] * 2 + [[0.5, 2.5], [0, 2]]),
        ([[1.03125, 3.03125]] * 3 + [[0, 2]], [[-0.7578125, 1.2421875]] * 2 + [[-1.03125, 0.96875], [-2.0625, -0.0625]]),
    )
    for t, (target, advantage) in zip(told, expected, strict=True):
        near(t["target"][:4, :, 0], target)
        near(t["advantage"][:4, :, 0], advantage)
        assert (t["active"] is not None) == padded
    assert told[0]["critic"] == pytest.approx([1 + 1.0625 / 2, 1.0625 / 2])  # the actor's step comes after the slices
    near(sum(p.sum() for p in a.critic.parameters()), 1.91015625)


def test_sixty_four_episodes_in_tens_are_25_steps_of_the_actor_and_250_of_the_critic():
    algo = {"episodes": 16, "minibatch_episodes": 10, "epochs": 4, "critic_slices": 10, "advantage_every": "minibatch"}
    loop = loop_of("mappo", "simple_spread", 4, algo=algo, net={"hidden": (8,)}, env={"max_cycles": 10})
    a = loop.learners[0]
    sizes = []

    def descend(loss, count, keep=None, whole=a.critic_optimiser.descend):
        sizes.append(count)
        return whole(loss, count, keep)

    a.critic_optimiser.descend = descend
    loop.iterate()
    assert loop.step == 64 * 10
    assert (a.actor_optimiser.steps, a.critic_optimiser.steps) == (25, 250)
    assert sizes == [10 * 3] * 250  # one step of ten episodes, of three agents


@pytest.mark.parametrize("scope", ["none", "batch", "group", "agent"])
def test_advantages_of_sliced_minibatches_are_normalised_over_the_minibatch(scope):
    a = learner(world(horizon=4), episodes=1, **{**SLICED, "advantage_scope": scope})
    told = listen(a)
    learn(a, played([[A], [B], [C], [D]], 4))
    for t in told:
        assert (abs(t["advantage"].mean()) < 1e-6) == (scope != "none")


@pytest.mark.parametrize("memory", ["none", "lstm"])
@pytest.mark.parametrize("env", ["simple_spread", "probe_deaths", "probe_turns"])
@pytest.mark.parametrize("sliced", [True, False])
def test_an_episode_is_the_same_as_a_part_of_its_row_and_as_a_row_of_its_own(env, memory, sliced):
    """Minibatches of three of 8 episodes, cut out of rows of two, or laid side by side because some might have ended early."""
    algo = {"episodes": 2, "minibatch_episodes": 3, "epochs": 2, "critic_slices": 3 * sliced, "advantage_every": "minibatch"}
    net = {"hidden": (8,), "memory": memory, "memory_width": 8}
    loop, twin = (loop_of("mappo", env, 4, algo=algo, net=net, env=SHORT.get(env, {})) for _ in range(2))
    loop.iterate()  # memory and statistics are of something
    twin.iterate()
    a, b, batch = loop.learners[0], twin.learners[0], rollout_of(loop, loop.rollout)
    learn(a, replace(batch, filled=None))
    learn(b, replace(batch, filled=torch.ones_like(batch.over)))
    assert b.actor_optimiser.steps == 2 * (2 * 8 // 3)
    equal_states(a, b)


def rollout_of(loop, steps):
    batch = loop.collector.collect(steps)
    loop.shaping(batch)
    batch.noise = torch.rand(loop.learners[0].draws(*batch.over.shape), generator=torch.Generator().manual_seed(5))
    return batch


def equal_states(a, b, tol=2e-5):
    one, other = a.state_dict(), b.state_dict()
    assert one.keys() == other.keys()
    for k, x in one.items():
        torch.testing.assert_close(x, other[k], rtol=tol, atol=tol, msg=lambda m, k=k: f"{k}: {m}")


# --- padding after episodes that end early ---

GRU = {"memory": "gru", "memory_width": 8}
PADDED = [
    ("ppo", "simple_spread", {}, {}),
    ("ppo", "simple_spread", {"normalise_reward": True, "huber": 1.0, "kl_stop": 1e-3}, {"trunk": "shared"}),
    ("mappo", "simple_spread", {"critic_slices": 3, "advantage_every": "epoch"}, GRU),
    ("mappo", "probe_deaths", {"advantage_scope": "agent", "lr_schedule": "kl"}, GRU),
    ("mappo", "probe_turns", {"critic_slices": 2, "target_tau": 0.1, "normalise_reward": True}, {"memory": "lstm"}),
    ("ippo", "probe_leave", {}, {}),
    ("a2c", "simple_spread", {"normalise_reward": True}, {}),
    ("maa2c", "probe_deaths", {"critic_slices": 2, "advantage_scope": "agent"}, GRU),
    ("coma", "simple_spread", {"critic_slices": 0, "normalise_reward": True}, {}),
    ("coma", "probe_deaths", {"critic_slices": 2, "target_every": 2, "advantage_scope": "agent"}, GRU),
]


@pytest.mark.parametrize(("algo", "env", "config", "net"), PADDED, ids=lambda x: x if isinstance(x, str) else "-".join(x))
def test_padding_is_in_no_loss_and_no_statistic(algo, env, config, net):
    """An episode of each row, and as many steps of padding in which anything may have happened: the update is that of the
    episode. Twice as many slices of time are the same, for the later half of them is empty."""
    config = {**config, **({"epochs": 2, "minibatches": 1} if algo in ("ppo", "ippo", "mappo") else {})}
    loops = []
    for times in (1, 2):
        slices = {"critic_slices": times * config["critic_slices"]} if "critic_slices" in config else {}
        run = {"reward": "team-mean"} if algo == "coma" or env == "probe_leave" else {}
        horizon = {"simple_spread": 6, "probe_deaths": 8, "probe_turns": 6, "probe_leave": 3}[env]
        loops.append(
            loop_of(
                algo,
                env,
                4,
                run,
                algo={**config, **slices, "rollout": times * horizon},
                net={"hidden": (8,), **net},
                env=SHORT.get(env, {}),
            )
        )
    plain, padded = loops
    a, b = plain.learners[0], padded.learners[0]
    assert a.spec.horizon == horizon
    padded.collector.episodes = 1
    batch = rollout_of(padded, 2 * horizon)
    assert torch.equal(batch.filled, torch.arange(2 * horizon)[:, None].expand(-1, 4) < horizon)
    draws = a.draws(horizon, 4)
    within = tree_map(lambda x: x[:horizon].clone(), replace(batch, memory={}, noise=None, lost=None, filled=None))
    within.memory, within.noise = batch.memory, batch.noise[:draws]
    spoil(batch, horizon)
    for one, what in ((a, within), (b, batch)):
        metrics = one.update(Samples(one, what))
    assert all(x.isfinite() for x in metrics.values())
    assert a.actor_optimiser.steps == b.actor_optimiser.steps > 0
    assert a.critic is None if net.get("trunk") else a.critic_optimiser.steps == b.critic_optimiser.steps
    equal_states(a, b)


def spoil(batch, after):
    """Whatever is seen, done, earned, and whoever is there, after so many steps."""
    for frame in (batch.frame, batch.next):
        for view in frame.views.values():
            view.obs = view.obs.clone()
            view.obs[after:] = -7.0
            view.alive, view.active, view.start = (x.clone() for x in (view.alive, view.active, view.start))
            view.start[after:] = ~view.start[after:]
    for g, x in batch.learner_reward.items():
        batch.learner_reward[g] = torch.cat((x[:after], torch.full_like(x[after:], 1e3)))
        batch.results[g].terminated = torch.cat((batch.results[g].terminated[:after], ~batch.results[g].terminated[after:]))
        batch.actions[g] = torch.cat((batch.actions[g][:after], 1 - batch.actions[g][after:].clamp(max=1)))
        for name, extra in batch.extras[g].items():
            batch.extras[g][name] = torch.cat((extra[:after], torch.full_like(extra[after:], -7.0)))


@pytest.mark.parametrize("episodes", [1, 3])
def test_losses_and_statistics_are_those_of_the_finished_episodes_alone(line, episodes):
    """Against a plain computation, episode by episode."""
    algo = {"episodes": episodes, "epochs": 1, "minibatches": 1, "gamma": 0.9, "lam": 0.8, "advantage_scope": "none"}
    algo |= {"value_clip": None, "optimiser": "sgd", "lr_schedule": "constant", "grad_clip": None, "lr": 0.1, "entropy": 0.0}
    loop = loop_of("mappo", line, 8, algo=algo, net={"hidden": ()})
    a = loop.learners[0]
    for _ in range(2):
        loop.iterate()  # statistics are of something
    before, batch = deepcopy(a), rollout_of(loop, 6 * episodes)
    view, after = batch.frame["agents"], batch.next["agents"]
    finished = []  # the places of each one's steps
    for row in range(8):
        begins = 0
        for _ in range(episodes):
            ends = next(t for t in range(begins, 6 * episodes) if batch.over[t, row])
            finished.append([(t, row) for t in range(begins, ends + 1)])
            begins = ends + 1
    lengths = {len(e) for e in finished}
    assert min(lengths) < 6
    assert 6 in lengths
    assert sum(map(len, finished)) == batch.filled.sum() < batch.filled.numel()

    with torch.no_grad():
        value = before.denormalised(before.critic.value(before.observations.critic_input(batch.frame))[0])
        value_tp1 = before.denormalised(before.critic.value(before.observations.critic_input(batch.next))[0])
    advantage, target, places = [], [], []
    for episode in finished:
        later = torch.zeros(2)
        for t, row in reversed(episode):
            delta = batch.learner_reward["agents"][t, row] - value[t, row]
            delta = delta + 0.9 * value_tp1[t, row] * ~batch.results["agents"].terminated[t, row]
            later = delta + 0.9 * 0.8 * later
            advantage.append(later)
            target.append(later + value[t, row])
            places.append((t, row))
    at = tuple(torch.tensor(places).T)
    norm = deepcopy(before.value_norm)
    norm.update(torch.stack(target))
    goal = norm.normalise(torch.stack(target))
    predicted = before.critic.value(before.observations.critic_input(batch.frame))[0][at]
    loss = (0.5 * (predicted - goal).square()).mean()
    slopes = torch.autograd.grad(loss, list(before.critic.parameters()))
    metrics = a.update(Samples(a, batch))
    near(metrics["value_loss"], loss.item())
    near(metrics["policy_loss"], -torch.stack(advantage).mean().item())
    for p, then, slope in zip(a.critic.parameters(), before.critic.parameters(), slopes, strict=True):
        torch.testing.assert_close(p, then - 0.1 * slope)
    spread = torch.stack(target) - value[at]
    near(metrics["explained_variance"], (1 - spread.var(correction=0) / torch.stack(target).var(correction=0)).item())
    seen = deepcopy(before.observations)
    seen.norms["agents"].update(view.obs[at])
    seen.state_norm.update(batch.frame.state[at])
    for k, x in seen.state_dict().items():
        torch.testing.assert_close(a.observations.state_dict()[k], x)
    assert a.value_norm.count - before.value_norm.count == 2 * len(places)
    assert after.alive.all()


@pytest.mark.parametrize("episodes", [2, 5])
def test_minibatches_of_episodes_that_end_early(line, episodes):
    """Each minibatch has three whole episodes, each of as many steps as it had, and each epoch each of them."""
    algo = {"episodes": episodes, "minibatch_episodes": 3, "epochs": 3, "normalise_obs": False}
    loop = loop_of("mappo", line, 4, algo=algo, net={"hidden": (8,)})
    a, batch = loop.learners[0], rollout_of(loop, 6 * episodes)
    told = listen(a)
    a.update(Samples(a, batch))
    assert len(told) == a.actor_optimiser.steps == 3 * 4 * episodes // 3
    lengths = []
    for t in told:
        assert t["active"].shape == (6, 3, 2)
        clocks = (t["actor_input"][:, :, 0, 1] * 6).round()
        for k in range(3):
            length = int(t["active"][:, k, 0].sum())
            assert clocks[:length, k].tolist() == list(range(length))  # from an episode's first step on
            assert t["active"][:length, k].all()
            lengths.append(length)
    each = (batch.filled & batch.over).sum()
    assert each == 4 * episodes
    assert sum(lengths) == 3 * batch.filled.sum()


# --- what cannot be ---


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        (
            {"critic_slices": 2, "advantage_every": "minibatch", "minibatches": 2},
            "these are of single steps: give --algo.episodes",
        ),
        ({"minibatch_episodes": 2}, "--algo.minibatch-episodes is 2, and rollouts are not of whole episodes"),
        ({"minibatch_episodes": 2, "episodes": 2, "chunk": 5}, "--algo.chunk is 5, and --algo.minibatch-episodes keeps whole"),
        ({"minibatch_episodes": 0, "episodes": 2}, "--algo.minibatch-episodes is 0: it must be more than zero"),
    ],
)
def test_what_does_not_go_together_is_refused(config, sentence):
    with pytest.raises(UserError, match=sentence):
        learner(world(horizon=5), **config)


def test_slices_of_minibatches_that_are_no_single_steps():
    for config in ({"minibatches": 1}, {"chunk": "all", "minibatches": 2}, {"chunk": 5}, {"minibatch_episodes": 2}):
        a = learner(world(horizon=5), critic_slices=2, advantage_every="minibatch", episodes=2, **config)
        assert a.slices_in_minibatch
    learner(world(horizon=5), {"memory": "gru"}, critic_slices=2, advantage_every="minibatch", rollout=5, minibatches=2)


def test_all_who_learn_from_rollouts_must_want_whole_episodes_where_they_end_early(line):
    groups = {"adversary": {"algo": {"episodes": 1}}, "agent": {"algo": {"rollout": 25}}}
    loop_of("ippo", "simple_tag", 2, None, groups)  # 25 steps of both
    players = loop_of("ippo", "simple_tag", 2, None, groups).players.algorithms
    with pytest.raises(UserError, match=r"one group wants rollouts of whole episodes and another of steps"):
        rollout_episodes(players)
