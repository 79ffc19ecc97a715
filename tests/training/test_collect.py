"""Collecting: memory, actions in the world's units, what episodes add up to, and whose numbers are drawn."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shoal.algos.base import Acted, Algorithm, Rollout, Seat
from shoal.algos.onpolicy import Minibatch
from shoal.algos.ppo import PPO
from shoal.algos.samples import Samples
from shoal.envs.base import World
from shoal.envs.probe.probe_constant import ProbeConstant
from shoal.envs.probe.probe_copy import ProbeCopy
from shoal.envs.probe.probe_deaths import ProbeDeaths
from shoal.envs.probe.probe_delay import ProbeDelay
from shoal.envs.probe.probe_observation import ProbeObservation
from shoal.envs.probe.probe_teams import ProbeTeams
from shoal.envs.probe.probe_terminated import ProbeTerminated
from shoal.envs.probe.probe_truncated import ProbeTruncated
from shoal.envs.probe.probe_turns import ProbeTurns
from shoal.nets.config import NetConfig
from shoal.spec import Batch, Box, Discrete, EnvSpec, Frame, Group, MultiDiscrete, UserError
from shoal.training.collect import Collector, Players, to_space
from shoal.training.shaping import Shaping
from shoal.training.stats import EpisodeStats, MetricMeans, returns_of
from shoal.tree import tree_leaves, tree_map

torch.set_num_threads(1)


class Counter(Algorithm):
    """Remembers how many steps ago an agent started, and returns that number with its actions, as an extra."""

    bare = False  # memory is a tensor, not a dict of them
    fixed: Any = None  # what it always does, where it is continuous

    def __init__(self, seat: Seat):
        super().__init__(seat)
        self.feed, self.noise = Rollout(4), 1
        self.calls: list[Any] = []

    def memory(self, rows: int, device: torch.device) -> dict[str, Any]:
        def each(n: int) -> Any:
            if self.bare:
                return torch.zeros(rows, n)
            return {"count": torch.zeros(rows, n, dtype=torch.long), "deep": [torch.zeros(rows, n, 2)]}

        return {g: each(self.spec[g].n) for g in self.groups}

    def act(self, frame: Frame, memory: Any, noise: Any, explore: bool) -> Acted:
        self.calls.append((noise, explore))
        actions, after, extras = {}, {}, {}
        for g in self.groups:
            count = memory[g] if self.bare else memory[g]["count"]
            extras[g] = {"count": count.clone()}
            after[g] = tree_map(lambda x: x + 1, memory[g])
            space, lead = self.spec[g].action, count.shape
            if isinstance(space, Box):
                actions[g] = torch.tensor(self.fixed).expand(*lead, *space.shape)
            else:
                actions[g] = torch.zeros(*lead, *space.shape, dtype=torch.long)
        return Acted(actions, after, extras)

    def update(self, samples: Samples) -> dict[str, Tensor]:
        return {}


def collector(env: World, cls: type[Algorithm] = Counter, seed: int = 0, **attributes: Any) -> Collector:
    cls = type("Fake", (cls,), attributes)
    spec = env.spec
    config, net = cls.Config(), NetConfig()
    players = [cls(Seat(spec, (g.name,), config, net, torch.Generator().manual_seed(0))) for g in spec.groups]
    return Collector(env, Players(spec, players), torch.Generator().manual_seed(seed))


def counted(batch: Batch, before: Tensor) -> Tensor:
    """What should be remembered at each step [T, B, N]: one more than the step before, and zero where an agent starts."""
    start, out = batch.frame["agents"].start, []
    for t in range(start.shape[0]):
        before = torch.where(start[t], 0, before)
        out.append(before)
        before = before + 1
    return torch.stack(out)


# --- memory ---


def test_memory_is_zeroed_where_a_row_starts_and_only_there() -> None:
    """Rows of unequal episodes, over several collects: each row counts its own steps."""
    env = ProbeTerminated(ProbeTerminated.Config(n=2, length=5, stagger=True), rows=8)
    c = collector(env)
    clock = torch.zeros(8, dtype=torch.long)
    apart = 0
    for _ in range(4):
        before = tree_map(torch.clone, c.memory)
        batch = c.collect(7)
        seen = batch.extras["agents"]["count"]
        assert torch.equal(seen, counted(batch, before["agents"]["count"]))
        for t in range(7):  # and by the rows' own clocks, which know nothing of `start`
            assert torch.equal(seen[t], clock[:, None].expand(8, 2))
            apart += len(clock.unique()) > 1
            clock = torch.where(batch.over[t], 0, clock + 1)
    assert apart > 20  # rows were out of step nearly always


def test_memory_of_a_late_arrival_alone_is_zeroed() -> None:
    """probe_deaths: agent 1 arrives at step 2, agents 0 and 2 are there from 0; all start over after 8."""
    c = collector(ProbeDeaths(rows=3))
    seen = c.collect(16).extras["agents"]["count"]
    first, late = [0, 1, 2, 3, 4, 5, 6, 7], [0, 1, 0, 1, 2, 3, 4, 5]
    for row in range(3):
        assert seen[:8, row, 0].tolist() == first
        assert seen[:8, row, 2].tolist() == first
        assert seen[:8, row, 1].tolist() == late
        assert seen[8:, row, 0].tolist() == first
        # it is not there when the second episode begins, so it still remembers the first: 6, 7; zeroed when it arrives
        assert seen[8:, row, 1].tolist() == [6, 7, 0, 1, 2, 3, 4, 5]


def test_the_whole_tree_is_zeroed() -> None:
    c = collector(ProbeDeaths(rows=2))
    c.collect(11)
    deep = c.memory["agents"]["deep"][0]
    assert torch.equal(deep, c.memory["agents"]["count"][..., None].expand(2, 3, 2).float())
    assert deep[0, :, 0].tolist() == [3.0, 1.0, 3.0]


def test_memory_may_be_a_bare_tensor() -> None:
    """A tree of [B, N, ...] may be a single leaf."""
    c = collector(ProbeDeaths(rows=2), bare=True)
    assert c.collect(4).extras["agents"]["count"][:, 0, 1].tolist() == [0.0, 1.0, 0.0, 1.0]


def test_batches_carry_the_memory_before_their_first_step() -> None:
    c = collector(ProbeDeaths(rows=2))
    first = c.collect(3)
    assert first.memory["agents"]["count"].tolist() == [[0, 0, 0]] * 2
    assert c.memory["agents"]["count"].tolist() == [[3, 1, 3]] * 2
    second = c.collect(3)
    assert second.memory["agents"]["count"].tolist() == [[3, 1, 3]] * 2
    assert first.memory["agents"]["count"].tolist() == [[0, 0, 0]] * 2  # and the first one's is not written over
    assert second.extras["agents"]["count"][0].tolist() == [[3, 1, 3]] * 2


# --- actions ---


def test_to_space() -> None:
    box = Box((-2.0, 0.0), (1.0, 2.0))
    # -1 -> low, 1 -> high, 0 -> the middle; beyond is clipped: -3 -> -2 and 0, 1/2 -> 1/4 and 3/2
    for action, expected in (
        ((-1, -1), (-2, 0)),
        ((1, 1), (1, 2)),
        ((0, 0), (-0.5, 1)),
        ((-3, 7), (-2, 2)),
        ((0.5, 0.5), (0.25, 1.5)),
    ):
        assert to_space(box, torch.tensor(action, dtype=torch.float32)).tolist() == list(expected)
    choice = torch.tensor([2, 0])
    assert to_space(Discrete(3), choice) is choice
    assert to_space(MultiDiscrete((3, 2)), choice) is choice


def test_the_world_is_stepped_in_its_own_units(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is stored is the action whose density is known; what the world gets is clipped and scaled."""
    env = ProbeCopy(ProbeCopy.Config(n=2, actions="continuous"), rows=3)
    c = collector(env, fixed=[-3.0, 0.5])
    given: list[Tensor] = []
    step = env.step
    monkeypatch.setattr(env, "step", lambda actions, noise: given.append(actions["agents"]) or step(actions, noise))
    batch = c.collect(4)
    assert len(given) == 4
    assert all(torch.equal(a, torch.tensor([-2.0, 1.5]).expand(3, 2, 2)) for a in given)
    assert torch.equal(batch.actions["agents"], torch.tensor([-3.0, 0.5]).expand(4, 3, 2, 2))
    # paid minus the mean squared distance from (-2, 1.5) to the symbol, which is what is seen
    seen = batch.frame["agents"].obs
    expected = -((seen - torch.tensor([-2.0, 1.5])) ** 2).mean(-1)
    torch.testing.assert_close(batch.results["agents"].reward, expected)


def test_every_group_gets_its_own() -> None:
    env = ProbeTeams(rows=2)
    c = collector(env, fixed=[0.0, 0.0])
    batch = c.collect(3)
    assert set(batch.actions) == set(batch.extras) == set(batch.memory) == {g.name for g in env.spec.groups}
    for a in c.players.algorithms:
        noise, explore = a.calls[0]
        assert explore is True
        assert set(noise) == set(a.groups)
        assert noise[a.groups[0]].shape == (2, env.spec[a.groups[0]].n, 1)


def test_somebody_must_play_every_group() -> None:
    env = ProbeTeams(rows=2)
    one = Counter(Seat(env.spec, (env.spec.groups[0].name,), Counter.Config(), NetConfig(), torch.Generator()))
    with pytest.raises(AssertionError, match="every group needs somebody who plays it"):
        Players(env.spec, [one])


# --- frames ---


def test_next_is_true_and_the_frame_begins_again() -> None:
    env = ProbeTerminated(ProbeTerminated.Config(length=3), rows=2)
    batch = collector(env).collect(6)
    shown, after = batch.frame["agents"].obs[:, 0, 0].argmax(-1), batch.next["agents"].obs[:, 0, 0]
    assert shown.tolist() == [0, 1, 2, 0, 1, 2]
    assert batch.over[:, 0].tolist() == [False, False, True] * 2
    assert after[[0, 1, 3, 4]].argmax(-1).tolist() == [1, 2, 1, 2]
    assert after[[2, 5]].abs().sum() == 0  # past the end, and not the new episode's first
    assert batch.frame["agents"].start[:, 0, 0].tolist() == [True, False, False] * 2
    assert not batch.next["agents"].start.any()


def test_consecutive_collects_go_on() -> None:
    def stream(lengths: list[int]) -> Tensor:
        c = collector(ProbeTerminated(ProbeTerminated.Config(length=5), rows=2))
        return torch.cat([c.collect(n).frame["agents"].obs.clone() for n in lengths])

    assert torch.equal(stream([12]), stream([3, 4, 5]))


def test_tensors_keep_their_addresses() -> None:
    def addresses() -> list[int]:
        b = c.collect(4)
        assert not b.frame["agents"].obs.isnan().any()
        moving = (b.frame["agents"].obs, b.next["agents"].obs, b.actions, b.results["agents"].reward, b.extras)
        return [x.data_ptr() for x in tree_leaves(moving)]

    c = collector(ProbeDeaths(rows=2))
    assert addresses() == addresses()


# --- whose numbers are drawn ---


def test_the_global_generator_is_left_alone() -> None:
    before = torch.random.get_rng_state()
    c = collector(ProbeCopy(rows=3))
    c.collect(5)
    assert torch.equal(before, torch.random.get_rng_state())


def test_the_same_seed_gives_the_same_numbers() -> None:
    def run(seed: int, disturb: int = 0) -> Tensor:
        torch.manual_seed(disturb)
        return collector(ProbeCopy(rows=4), seed=seed).collect(9).frame["agents"].obs.clone()

    assert torch.equal(run(1), run(1, disturb=5))
    assert not torch.equal(run(1), run(2))


def test_it_goes_on_from_its_state() -> None:
    def make() -> Collector:
        return collector(ProbeTerminated(ProbeTerminated.Config(n=2, length=5, stagger=True), rows=8))

    one, two = make(), make()
    one.episode_stats.count(one.collect(6))
    state = tree_map(torch.clone, one.state_dict())
    expected = tree_map(torch.clone, one.collect(6))
    one.episode_stats.count(expected)
    two.episode_stats.count(two.collect(2))
    two.load_state_dict(state)
    again = two.collect(6)
    two.episode_stats.count(again)
    for x, y in zip(tree_leaves(expected), tree_leaves(again), strict=True):
        assert torch.equal(x, y)
    mine, theirs = one.episode_stats.take(), two.episode_stats.take()
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(mine[k], theirs[k]) for k in mine)
    assert torch.equal(one.episode_stats.carry["length"], two.episode_stats.carry["length"])


# --- from a world to an advantage, all the way ---

IDLE: list[tuple[type[Any], dict[str, Any]]] = [
    (ProbeConstant, {}),
    (ProbeDelay, {}),
    (ProbeObservation, {}),
    (ProbeTerminated, {"n": 2}),
    (ProbeTerminated, {"n": 2, "stagger": True}),
    (ProbeTruncated, {"n": 2}),
    (ProbeTruncated, {"n": 2, "stagger": True}),
    (ProbeDeaths, {"copy": False, "ghost": 0.0}),
    (ProbeTurns, {"copy": False}),
]


JUNK, GAMMA = 1000.0, 0.9


class ExactCritic(nn.Module):
    """A critic that knows the values of observations of agents that are active; the value of everything else is JUNK."""

    def __init__(self, known: dict[Any, float]):
        super().__init__()
        self.known, self.zero = known, nn.Parameter(torch.zeros(()))

    def value(self, obs: Tensor, *memory: Any) -> tuple[Tensor, dict[str, Tensor]]:
        steps, rows, agents, _ = obs.shape
        values = [self.known.get((k % agents, tuple(x)), JUNK) for k, x in enumerate(obs.flatten(0, 2).tolist())]
        return torch.tensor(values).reshape(steps, rows, agents) + self.zero, {}


class KeepsAdvantage(PPO):
    """PPO that keeps the advantages that its actor loss was given."""

    advantage: Tensor

    def actor_loss(self, log_prob: Tensor, entropy: Tensor, batch: Minibatch) -> Any:
        self.advantage = batch.advantage
        return super().actor_loss(log_prob, entropy, batch)


class Exact:
    """PPO on a probe, with a critic that knows the values of active agents."""

    def __init__(self, cls: Any, settings: dict[str, Any], lam: float):
        self.env = cls(cls.Config(**settings), rows=6)
        view, values = self.env.frames()["agents"], self.env.values(GAMMA)["agents"]
        self.known = {(n, tuple(view.obs[k, n].tolist())): values[k, n].item() for k, n in view.active.nonzero().tolist()}
        spec, still = self.env.spec, {"epochs": 1, "minibatches": 1, "learning_starts": 10**9}
        as_is = {"normalise_obs": False, "normalise_value": False, "advantage_scope": "none"}
        config = PPO.Config(gamma=GAMMA, lam=lam, **still, **as_is)  # type: ignore[arg-type]
        self.ppo = KeepsAdvantage(Seat(spec, ("agents",), config, NetConfig(hidden=(4,)), torch.Generator().manual_seed(0)))
        self.collector = Collector(self.env, Players(spec, [self.ppo]), torch.Generator().manual_seed(0))
        self.ppo.critic = ExactCritic(self.known)  # type: ignore[assignment]

    def collect(self, steps: int) -> tuple[Batch, Tensor]:
        batch = self.collector.collect(steps)
        learner_reward(batch, self.env, "own")
        for view in (batch.frame["agents"], batch.next["agents"]):
            assert (self.ppo.critic.value(view.obs)[0][~view.active] == JUNK).all()  # type: ignore[union-attr]
        return batch, batch.frame["agents"].active

    def advantage(self, batch: Batch, bonus: Tensor | float = 0.0) -> Tensor:
        given = replace(batch, learner_reward={"agents": batch.learner_reward["agents"] + bonus})
        self.ppo.update(Samples(self.ppo, given))
        return self.ppo.advantage


@pytest.mark.parametrize("lam", [0.0, 0.95, 1.0])
@pytest.mark.parametrize("steps", [5, 6, 7, 25])
@pytest.mark.parametrize(("cls", "settings"), IDLE)
def test_with_the_exact_values_no_advantage_is_left(cls: Any, settings: dict[str, Any], steps: int, lam: float) -> None:
    """Where no action matters and the critic is right, r + gamma V' - V is zero in every step in which an agent acts: at
    deaths, cuts, late arrivals and turns, and wherever the rollout happens to end. Who does not act has no value that could
    be learnt, so its value here is JUNK, and reaches nothing."""
    exact = Exact(cls, settings, lam)
    for _ in range(3):
        batch, active = exact.collect(steps)
        assert active.any()
        assert exact.advantage(batch)[active].abs().max().item() < 1e-4


@pytest.mark.parametrize("steps", [5, 6])
@pytest.mark.parametrize(("cls", "settings"), IDLE)
def test_a_reward_is_credited_where_it_was_earned(cls: Any, settings: dict[str, Any], steps: int) -> None:
    """One more in a rollout's first step is one more advantage there, for who acts, and nothing later."""
    exact = Exact(cls, settings, 0.95)
    batch, active = exact.collect(steps)
    bonus = torch.zeros(steps, 6, active.shape[-1])
    bonus[0] = 1.0
    gain = (exact.advantage(batch, bonus) - exact.advantage(batch)) * active
    torch.testing.assert_close(gain, bonus * active, rtol=0, atol=1e-3)


@pytest.mark.parametrize(("cls", "settings"), IDLE)
def test_what_comes_after_an_end_does_not_reach_back(cls: Any, settings: dict[str, Any]) -> None:
    """A million paid in every step of later episodes changes no advantage of a row's first one."""
    exact = Exact(cls, settings, 1.0)
    batch, active = exact.collect(25)
    later = (batch.over.long().cumsum(0) - batch.over.long() > 0)[..., None].expand_as(active)  # [T, B, N] after the first end
    assert later.any()
    assert (~later).any()
    moved = exact.advantage(batch, later * 1e6) - exact.advantage(batch)
    assert moved[active & ~later].abs().max().item() == 0
    assert moved[active & later].abs().max().item() > 1e5


def test_what_the_gone_are_paid_does_not_reach_back() -> None:
    """Nor what is paid to an agent that has gone while the episode goes on, whether it died or only left."""
    exact = Exact(ProbeDeaths, {"copy": False}, 1.0)
    batch, active = exact.collect(8)
    for _ in range(2):
        moved = exact.advantage(batch, ~active * 1e6) - exact.advantage(batch)
        assert moved[active].abs().max().item() == 0
        batch.results["agents"].terminated.zero_()  # now they leave without having died


# --- what episodes add up to ---

GROUPS = (Group("a", "a", ("a_0", "a_1"), (1,), Discrete(2)), Group("b", "b", ("b_0",), (1,), Discrete(2)))
HOWS = {"total": "sum", "final": "last", "average": "mean"}


def episode_stats_of(rows: int) -> EpisodeStats:
    return EpisodeStats(SimpleNamespace(spec=EnvSpec(GROUPS, stats=HOWS), rows=rows, device=torch.device("cpu")))  # type: ignore[arg-type]


def happened(rewards: dict[str, Tensor], over: Tensor, stats: dict[str, Tensor]) -> Any:
    """A batch, as far as it is counted."""
    results = {g: SimpleNamespace(reward=x) for g, x in rewards.items()}
    return SimpleNamespace(results=results, over=over, stats=stats, lost=None)


class Brute:
    """The same by a loop over episodes: a list of steps a row, summed up when it is over."""

    def __init__(self, rows: int):
        self.steps: list[list[Any]] = [[] for _ in range(rows)]
        self.done: list[dict[str, Any]] = []

    def count(self, rewards: dict[str, Tensor], over: Tensor, stats: dict[str, Tensor]) -> None:
        for t in range(over.shape[0]):
            for b in range(over.shape[1]):
                now = ({g: x[t, b].tolist() for g, x in rewards.items()}, {s: x[t, b].item() for s, x in stats.items()})
                self.steps[b].append(now)
                if over[t, b]:
                    self.done.append(self.sum_up(self.steps[b]))
                    self.steps[b] = []

    def sum_up(self, steps: list[Any]) -> dict[str, Any]:
        out: dict[str, Any] = {"length": len(steps)}
        for g in GROUPS:
            out[g.name] = [sum(r[g.name][i] for r, _ in steps) for i in range(g.n)]
        out["total"] = sum(s["total"] for _, s in steps)
        out["final"] = steps[-1][1]["final"]
        out["average"] = sum(s["average"] for _, s in steps) / len(steps)
        return out

    def take(self) -> dict[str, float]:
        done, self.done = self.done, []
        mean = lambda f: sum(f(e) for e in done) / len(done)  # noqa: E731
        out = {"episodes": float(len(done)), "episode_length": mean(lambda e: e["length"])}
        for g in GROUPS:
            each = [mean(lambda e, i=i, g=g: e[g.name][i]) for i in range(g.n)]
            out.update({f"return/{g.name}/{i}": x for i, x in enumerate(each)})
            out[f"return/{g.name}"], out[f"return_sum/{g.name}"] = sum(each) / g.n, sum(each)
        return {**out, **{s: mean(lambda e, s=s: e[s]) for s in HOWS}}


@pytest.mark.parametrize("p", [0.0, 0.05, 0.3, 1.0])
@pytest.mark.parametrize("what", ["returns", "total", "final", "average"])
def test_episode_stats_are_a_loop_over_episodes(p: float, what: str) -> None:
    """Random rewards, stats and ends, over several collects of several lengths, taken now and then."""
    draw = torch.Generator().manual_seed(3)
    rows, taken = 6, 0
    episode_stats, brute = episode_stats_of(rows), Brute(rows)
    total = {g.name: torch.zeros(g.n, dtype=torch.float64) for g in GROUPS}
    for k, steps in enumerate([5, 1, 9, 4, 16, 7, 30]):
        rewards = {g.name: torch.randn(steps, rows, g.n, generator=draw) for g in GROUPS}
        stats = {s: torch.rand(steps, rows, generator=draw) for s in HOWS}
        over = torch.rand(steps, rows, generator=draw) < p
        episode_stats.count(happened(rewards, over, stats))
        brute.count(rewards, over, stats)
        total = {g: total[g] + x.double().sum((0, 1)) / rows for g, x in rewards.items()}
        if k % 2 == 0:
            got = episode_stats.take()
            for g, x in total.items():
                torch.testing.assert_close(got.pop(f"reward_total/{g}"), x, rtol=1e-9, atol=1e-9)
                total[g] = torch.zeros_like(x)
            if not brute.done:
                assert got.pop("episodes").item() == 0
                assert all(x.isnan().all() for x in got.values())
                continue
            expected = brute.take()
            assert got.keys() == expected.keys()
            names = [what] if what in HOWS else [n for n in expected if n not in HOWS]
            for name in names:
                assert got[name].item() == pytest.approx(expected[name], abs=1e-6), name
            taken += 1
    assert taken == (0 if p == 0 else 4)


def test_episode_stats_by_hand() -> None:
    episode_stats = episode_stats_of(1)
    zero = {s: torch.zeros(3, 1) for s in HOWS}

    def count(a: list[float], over: list[bool]) -> None:
        rewards = {"a": torch.tensor([[[x, 10 * x]] for x in a]), "b": torch.zeros(3, 1, 1)}
        episode_stats.count(happened(rewards, torch.tensor(over)[:, None], zero))

    count([1.0, 2, 4], [False, True, False])  # an episode of 1 + 2; 4 is carried on
    got = episode_stats.take()
    assert (got["return/a/0"].item(), got["return/a/1"].item(), got["return/a"].item()) == (3.0, 30.0, 16.5)
    assert (got["return_sum/a"].item(), got["episode_length"].item(), got["episodes"].item()) == (33.0, 2.0, 1.0)
    assert got["reward_total/a"].tolist() == [7.0, 70.0]
    count([8.0, 16, 32], [False, False, False])
    assert episode_stats.take()["return/a"].isnan()
    count([64.0, 128, 256], [True, True, False])  # 4 + 8 + 16 + 32 + 64 in 5 steps, and 128 in 1
    got = episode_stats.take()
    assert (got["return/a/0"].item(), got["episode_length"].item(), got["episodes"].item()) == (126.0, 3.0, 2.0)


def test_returns_have_three_names() -> None:
    out = returns_of("a", torch.tensor([[1.0, 5.0], [3.0, 7.0]]))
    assert {k: v.item() for k, v in out.items()} == {"return/a": 4.0, "return_sum/a": 8.0, "return/a/0": 2.0, "return/a/1": 6.0}


# --- what learners are paid, and what is reported ---


def learner_reward(batch: Batch, env: World, reward: str) -> dict[str, Tensor]:
    Shaping(env.spec, reward, {}, torch.zeros((), dtype=torch.long), 0)(batch)
    return batch.learner_reward


def test_shaping_is_paid_and_never_reported() -> None:
    """probe_deaths without copying pays 1 a living step (3, 6 and 5 of 8) and 10 of shaping a step that one is not there."""
    env = ProbeDeaths(ProbeDeaths.Config(copy=False), rows=2)
    c = collector(env)
    batch = c.collect(8)
    out = learner_reward(batch, env, "own")["agents"]
    assert out.sum(0)[0].tolist() == [3 + 50.0, 6 + 20.0, 5 + 30.0]
    assert batch.results["agents"].reward.sum(0)[0].tolist() == [3.0, 6.0, 5.0]
    c.episode_stats.count(batch)
    got = c.episode_stats.take()
    assert [got[f"return/agents/{i}"].item() for i in range(3)] == [3.0, 6.0, 5.0]
    assert got["reward_total/agents"].tolist() == [3.0, 6.0, 5.0]


def test_team_pay_and_raw_returns() -> None:
    """The mean and the sum over the team, shaping on top; what is reported stays each agent's own."""
    env = ProbeDeaths(ProbeDeaths.Config(copy=False), rows=1)
    c = collector(env)
    # step 0: agents 0 and 2 are paid 1, agent 1 is not there yet and is paid 10 of shaping
    batch = c.collect(8)
    assert learner_reward(batch, env, "team-sum")["agents"][0, 0].tolist() == [2.0, 12.0, 2.0]
    mean = learner_reward(batch, env, "team-mean")["agents"][0, 0]
    torch.testing.assert_close(mean, torch.tensor([2 / 3, 2 / 3 + 10, 2 / 3]))
    assert learner_reward(batch, env, "own")["agents"][0, 0].tolist() == [1.0, 10.0, 1.0]
    assert batch.results["agents"].reward[0, 0].tolist() == [1.0, 0.0, 1.0]
    c.episode_stats.count(batch)
    assert c.episode_stats.take()["return_sum/agents"].item() == 14.0


# --- the learners' metrics ---


def test_means_go_by_name() -> None:
    means = MetricMeans()
    means.add("a,b", {"x": torch.tensor(1.0), "y": torch.tensor(10.0)})
    means.add("a,b", {"y": torch.tensor(20.0), "x": 3.0})  # type: ignore[dict-item]
    assert {k: x.item() for k, x in means.take().items()} == {"a/x": 2.0, "a/y": 15.0, "b/x": 2.0, "b/y": 15.0}
    means.add("a,b", {"x": torch.tensor(7.0), "y": torch.tensor(8.0)})
    again = MetricMeans()
    again.load_state_dict(means.state_dict(), torch.device("cpu"))
    assert {k: x.item() for k, x in again.take().items()} == {"a/x": 7.0, "a/y": 8.0, "b/x": 7.0, "b/y": 8.0}


def test_means_of_nothing_and_of_other_things() -> None:
    means = MetricMeans()
    means.add("a", {})
    assert means.take() == {}
    means.load_state_dict(means.state_dict(), torch.device("cpu"))
    means.add("b", {"x": torch.tensor(1.0)})
    with pytest.raises(UserError, match="the metrics of b were x and now are z: they must stay the same"):
        means.add("b", {"z": torch.tensor(1.0)})
