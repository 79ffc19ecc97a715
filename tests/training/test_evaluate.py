"""Evaluation: a fixed number of episodes a row, from a seed of its own, touching nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from shoal.algos.base import Acted, Algorithm, Rollout, Seat
from shoal.algos.ppo import PPO
from shoal.algos.random import Random
from shoal.algos.samples import Samples
from shoal.envs.base import World
from shoal.envs.probe.probe_copy import ProbeCopy
from shoal.envs.probe.probe_deaths import ProbeDeaths
from shoal.envs.probe.probe_illegal import ProbeIllegal
from shoal.envs.probe.probe_terminated import ProbeTerminated
from shoal.envs.probe.probe_truncated import ProbeTruncated
from shoal.nets.config import NetConfig
from shoal.spec import Discrete, EnvSpec, Frame, Group, UserError
from shoal.training.collect import Collector, Players
from shoal.training.evaluate import AbandonedError, Episodes, EvalConfig, evaluate, rows_for
from shoal.training.seeds import generator, seed_of

torch.set_num_threads(1)


class Zero(Algorithm):
    """Does nothing, and notes how it was asked to."""

    def __init__(self, seat: Seat):
        super().__init__(seat)
        self.feed, self.noise = Rollout(4), 2
        self.asked: set[tuple[bool, bool]] = set()
        self.counts: list[Tensor] = []

    def memory(self, rows: int, device: torch.device) -> dict[str, Any]:
        return {g: {"count": torch.zeros(rows, self.spec[g].n)} for g in self.groups}

    def act(self, frame: Frame, memory: Any, noise: Any, explore: bool) -> Acted:
        self.asked.add((noise is None, explore))
        self.counts.append(memory[self.groups[0]]["count"][:, 0])
        actions = {g: torch.zeros(frame[g].alive.shape, dtype=torch.long) for g in self.groups}
        after = {g: {"count": memory[g]["count"] + 1} for g in self.groups}
        return Acted(actions, after, {g: {} for g in self.groups})

    def update(self, samples: Samples) -> dict[str, Tensor]:
        return {}


def players(env: World, cls: Any = Zero) -> Players:
    draw = torch.Generator().manual_seed(1)
    return Players(env.spec, [cls(Seat(env.spec, (g.name,), cls.Config(), NetConfig((8,)), draw)) for g in env.spec.groups])


def staggered(cls: Any, rows: int, n: int = 2) -> World:
    return cls(cls.Config(n=n, length=5, stagger=True), rows=rows)


def brute(env: World, who: Players, each: int, seed: int) -> list[list[float]]:
    """Every row's first `each` episodes by plain bookkeeping: lengths, [rows][each]. The draws are those of the seed."""
    draw = generator(seed, "eval")
    env.reset(torch.rand(env.rows, env.noise, generator=draw))
    lengths: list[list[float]] = [[] for _ in range(env.rows)]
    now = [0] * env.rows
    while min(map(len, lengths)) < each:
        who.noise(draw, env.rows)
        actions = {g.name: torch.zeros(env.rows, g.n, dtype=torch.long) for g in env.spec.groups}
        out = env.step(actions, torch.rand(env.rows, env.noise, generator=draw))
        for b in range(env.rows):
            now[b] += 1
            if out.over[b]:
                lengths[b].append(now[b])
                now[b] = 0
    return [x[:each] for x in lengths]


@pytest.mark.parametrize("cls", [ProbeTerminated, ProbeTruncated])
@pytest.mark.parametrize("each", [1, 3])
def test_a_fixed_number_of_episodes_a_row(cls: Any, each: int) -> None:
    """Rows end at different times. Each pays 1 a step, so that an episode's return is its length."""
    env = staggered(cls, 16)
    who = players(env)
    episodes = evaluate(env, who, each, seed=3)
    expected = torch.tensor(brute(staggered(cls, 16), who, each, 3), dtype=torch.float64)  # [rows, each]
    assert len({tuple(x) for x in expected.tolist()}) > 3
    assert torch.equal(episodes.lengths, expected.T.flatten())
    assert torch.equal(episodes.returns["agents"], expected.T.flatten()[:, None].expand(16 * each, 2))


def test_short_episodes_are_not_favoured() -> None:
    """Lengths are uniform in 1 ... 5, mean 3. The first 256 to finish of 256 rows would average well below that."""
    env = staggered(ProbeTerminated, 256)
    lengths = evaluate(env, players(env), 4, seed=0).lengths
    assert len(lengths) == 1024
    assert abs(lengths.mean().item() - 3) < 4 * (2 / 1024) ** 0.5  # the variance of a length is 2
    counts = torch.bincount(lengths.long(), minlength=6)[1:]
    assert counts.min().item() > 150  # about 205 of each


def test_memory_starts_anew_with_each_episode() -> None:
    env = staggered(ProbeTerminated, 4)
    who = players(env)
    evaluate(env, who, 2, seed=0)
    assert who.algorithms[0].counts[0].tolist() == [0.0] * 4
    assert torch.stack(who.algorithms[0].counts).max().item() == 4  # never more than an episode's steps


def test_the_same_seed_gives_the_same_numbers() -> None:
    def run(seed: int, sampled: bool = True) -> Tensor:
        env = ProbeCopy(rows=8)
        return evaluate(env, players(env, PPO), 2, seed, sampled).returns["agents"]

    before = torch.random.get_rng_state()
    one = run(0)
    assert torch.equal(before, torch.random.get_rng_state())
    torch.manual_seed(99)
    assert torch.equal(one, run(0))
    assert not torch.equal(one, run(1))


def test_it_does_not_matter_what_the_world_did_before() -> None:
    env = staggered(ProbeTerminated, 8)
    who = players(env)
    one = evaluate(env, who, 2, seed=0)
    env.step({"agents": torch.zeros(8, 2, dtype=torch.long)}, torch.rand(8, env.noise, generator=torch.Generator()))
    two = evaluate(env, who, 2, seed=0)
    assert torch.equal(one.lengths, two.lengths)


def test_greedy_and_sampled() -> None:
    env = ProbeCopy(rows=64)
    who = players(env)
    evaluate(env, who, 1, 0)
    assert who.algorithms[0].asked == {(True, False)}  # no noise, no exploring
    who = players(env)
    evaluate(env, who, 1, 0, sampled=True)
    assert who.algorithms[0].asked == {(False, True)}
    ppo = players(env, PPO)
    greedy, sampled = evaluate(env, ppo, 1, 0), evaluate(env, ppo, 1, 0, sampled=True)
    assert not torch.equal(greedy.returns["agents"], sampled.returns["agents"])
    # who is never greedy (random) gets noise all the same
    assert evaluate(env, players(env, Random), 1, 0).returns["agents"].std() > 0


def test_training_is_not_touched() -> None:
    """An evaluation between two collects changes nothing of what is collected."""

    def run(look: bool) -> tuple[Tensor, Any]:
        env = ProbeCopy(rows=4)
        who = players(env, PPO)
        c = Collector(env, who, torch.Generator().manual_seed(0))
        c.episode_stats.count(c.collect(5))
        weights = [p.clone() for p in who.algorithms[0].parameters()]
        if look:
            evaluate(ProbeCopy(rows=8), who, 2, 0, sampled=True)
        assert all(torch.equal(x, y) for x, y in zip(weights, who.algorithms[0].parameters(), strict=True))
        batch = c.collect(5)
        c.episode_stats.count(batch)
        return batch.frame["agents"].obs.clone(), c.episode_stats.take()["reward_total/agents"]

    (one, episode_stats), (two, other) = run(False), run(True)
    assert torch.equal(one, two)
    assert torch.equal(episode_stats, other)


def test_returns_are_raw() -> None:
    """probe_deaths pays 10 of shaping to whoever is not there: an evaluation sees 3, 6 and 5."""
    env = ProbeDeaths(ProbeDeaths.Config(copy=False), rows=3)
    episodes = evaluate(env, players(env), 2, 0)
    assert episodes.returns["agents"].tolist() == [[3.0, 6.0, 5.0]] * 6
    assert episodes.lengths.tolist() == [8.0] * 6
    assert episodes.each().tolist() == [3.0, 6.0, 5.0]


def test_stats_are_an_episodes_own() -> None:
    """probe_illegal counts illegal choices, summed: zero for whoever masks; Zero does not, and is legal half the time or so."""
    env = ProbeIllegal(ProbeIllegal.Config(n=1), rows=64)
    assert evaluate(env, players(env, Random), 1, 0).stats["illegal"].tolist() == [0.0] * 64
    episodes = evaluate(env, players(env), 1, 0)
    rewards = episodes.returns["agents"][:, 0]
    # a step pays -10 if illegal, else 0 or 1: the count can be read off the return
    assert torch.equal(episodes.stats["illegal"], ((8 - rewards) / 10).floor().clamp(min=0))
    assert episodes.stats["illegal"].std() > 0


def test_stats_by_how(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stat that shows the step of the episode, 1 ... L: sum L (L + 1) / 2, mean (L + 1) / 2, last L."""
    env = staggered(ProbeTerminated, 8)
    hows = {"sum": "sum", "mean": "mean", "last": "last"}
    object.__setattr__(env.spec, "stats", hows)
    step = env.step
    clock = torch.zeros(8)

    def with_stats(actions: Any, noise: Tensor) -> Any:
        clock.add_(1)
        out = step(actions, noise)
        out.stats = {h: clock.clone() for h in hows}
        clock[out.over] = 0
        return out

    monkeypatch.setattr(env, "step", with_stats)
    episodes = evaluate(env, players(env), 3, 0)
    length = episodes.lengths
    assert length.unique().numel() > 2
    assert torch.equal(episodes.stats["sum"], length * (length + 1) / 2)
    torch.testing.assert_close(episodes.stats["mean"], (length + 1) / 2)
    assert torch.equal(episodes.stats["last"], length)


def test_watch_sees_every_step_and_the_returns_so_far() -> None:
    env = ProbeTerminated(ProbeTerminated.Config(n=1, length=3), rows=1)
    totals: list[float] = []
    evaluate(env, players(env), 2, 0, watch=lambda e, total: totals.append(total.item()))
    assert totals == [0.0, 1.0, 2.0] * 2


def test_metrics() -> None:
    returns = torch.tensor([[1.0, 3.0], [5.0, 11.0]], dtype=torch.float64)
    episodes = Episodes({"a": returns}, torch.tensor([4.0, 6.0]), {"won": torch.tensor([0.0, 1.0])})
    got = {k: v.item() for k, v in episodes.metrics().items()}
    # each agent 3 and 7; episodes 2 and 8, which deviate by 3 from their mean
    assert got == {
        "episodes": 2.0,
        "episode_length": 5.0,
        "return/a": 5.0,
        "return_sum/a": 10.0,
        "return/a/0": 3.0,
        "return/a/1": 7.0,
        "return_std/a": 3.0,
        "won": 0.5,
    }
    assert episodes.each().tolist() == [3.0, 7.0]


def test_the_spread_is_a_teams_own() -> None:
    """Of the zero-sum pair a and b the mean over all is 0 in each episode; c plays with b."""
    a, b = torch.tensor([[2.0], [8.0]]), torch.tensor([[-2.0], [-8.0]])
    episodes = Episodes({"a": a, "b": b, "c": b - 4}, torch.ones(2), {})
    groups = [Group(n, t, (n,), (1,), Discrete(2)) for n, t in (("a", "red"), ("b", "blue"), ("c", "blue"))]
    assert episodes.spread(EnvSpec(tuple(groups))) == [3.0, 3.0]
    episodes.returns["c"] = torch.tensor([[0.0], [-10.0]])  # blue: -1 and -9
    assert episodes.spread(EnvSpec(tuple(groups))) == [3.0, 4.0]


@pytest.mark.parametrize(
    ("episodes", "expected"), [(1, (1, 1)), (64, (64, 1)), (256, (256, 1)), (257, (129, 2)), (1000, (250, 4))]
)
def test_rows_for(episodes: int, expected: tuple[int, int]) -> None:
    assert rows_for(episodes, 256) == expected
    rows, each = rows_for(episodes, 256)
    assert rows * each >= episodes


@pytest.mark.parametrize("stagger", [True, False], ids=["any length", "fixed length"])
def test_an_episode_that_never_ends(stagger: bool) -> None:
    env = ProbeTruncated(ProbeTruncated.Config(length=50, stagger=stagger), rows=4)
    assert env.fixed_length != stagger
    with pytest.raises(UserError, match=r"did not end within 16 steps.*--eval\.longest"):
        evaluate(env, players(env), 3, 0, longest=16)
    lengths = evaluate(env, players(env), 3, 0, longest=50).lengths
    assert lengths.reshape(3, 4).sum(0).max() > 50  # the limit is each episode's


def test_an_evaluation_is_abandoned_before_any_step() -> None:
    env, asked = ProbeTruncated(ProbeTruncated.Config(length=50), rows=2), iter([False] * 7 + [True])
    who = players(env)
    with pytest.raises(AbandonedError):
        evaluate(env, who, 1, 0, abandon=lambda: next(asked))
    assert len(who.algorithms[0].counts) == 7


def test_config() -> None:
    with pytest.raises(UserError, match=r"--eval.episodes is 0: an evaluation needs at least one\."):
        EvalConfig(episodes=0)
    with pytest.raises(UserError, match=r"--eval.every is -1: it is a number of steps, 0 for never\."):
        EvalConfig(every=-1)
    with pytest.raises(UserError, match=r"--eval.longest is 0: it is a number of steps, at least 1\."):
        EvalConfig(longest=0)


def test_seeds_are_a_tree() -> None:
    paths: list[tuple[Any, ...]] = [
        (0, "eval"),
        (0, "collect"),
        (1, "eval"),
        (0, "eval", 1),
        (0, "nets", "a"),
        (0, "nets", "b"),
        (0,),
    ]
    seeds = [seed_of(*p) for p in paths]
    assert len(set(seeds)) == len(paths)
    assert all(0 <= s < 2**63 for s in seeds)
    assert seed_of(0, "eval") == seed_of(0, "eval")
    assert torch.equal(torch.rand(3, generator=generator(5, "x")), torch.rand(3, generator=generator(5, "x")))
