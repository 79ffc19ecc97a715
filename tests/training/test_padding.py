"""Rollouts of whole episodes in worlds where they end early: what is padding, how all rows begin anew, what is counted."""

import pytest
import torch
from test_collect import collector

from shoal.envs.classic.pendulum import Pendulum
from shoal.envs.probe.probe_terminated import ProbeTerminated
from shoal.training.loop import Loop
from shoal.training.settings import Settings, resolve
from shoal.tree import tree_leaves


def staggered(rows=16):
    """Episodes of 1 to 5 steps, each paid 1."""
    return ProbeTerminated(ProbeTerminated.Config(n=2, length=5, stagger=True), rows=rows)


def loop_of(name, world, /, run=None, **sections):
    how = {"envs": 8, "quiet": True, "steps": 10_000, "device": "cpu", "compile": "off", **(run or {})}
    return Loop(resolve(Settings(name, world, how, sections)))


def test_each_rows_first_episodes_belong_and_the_rest_is_padding():
    c = collector(staggered())
    c.episodes = 2
    for _ in range(3):
        assert c.frame["agents"].start.all()
        batch = c.collect(10)
        assert (batch.frame["agents"].start[0]).all()
        for row in range(16):
            ends = [t for t in range(10) if batch.over[t, row]]
            assert batch.filled[:, row].tolist() == [t <= ends[1] for t in range(10)]
            assert ends[-1] == 9  # the episode under way is ended
            assert batch.lost[:, row].tolist() == [t in ends[2:] for t in range(10)]
        assert batch.extras["agents"]["count"][0].sum() == 0  # nobody remembers what was before
        assert 0 < batch.filled.sum() < batch.filled.numel()
        assert not batch.results["agents"].terminated[-1].all()  # whom it did not end by itself was cut off


def test_rows_begin_anew_without_further_draws():
    """Those that were over in the last step begin as they do when nobody ends the others."""
    one, other = collector(staggered()), collector(staggered())
    other.episodes = 2
    batch, ended = one.collect(10), other.collect(10)
    assert torch.equal(one.generator.get_state(), other.generator.get_state())
    over = batch.over[-1]
    assert over.any()
    assert not over.all()
    for x, y in zip(tree_leaves(one.frame), tree_leaves(other.frame), strict=True):
        assert torch.equal(x[over], y[over])
    assert torch.equal(batch.over[:-1], ended.over[:-1])
    assert torch.equal(one.env.get_state()["step"][over], other.env.get_state()["step"][over])


def test_episodes_of_the_padding_are_not_reported_and_its_steps_are_counted():
    """Of each row two episodes of 1 to 5 steps that are paid 1 a step; 3 would be over in less."""
    loop = loop_of("ippo", "probe_terminated", env={"length": 5, "stagger": True}, algo={"episodes": 2}, net={"hidden": (4,)})
    batches = []

    def collect(steps, whole=loop.collector.collect):
        batches.append(whole(steps))
        return batches[-1]

    loop.collector.collect = collect
    for k in range(1, 4):
        loop.iterate()
        assert loop.step == k * 8 * 10
        (batch,), batches = batches[-1:], []
        told = loop.collector.episode_stats.take()
        assert told["episodes"] == 8 * 2
        assert told["episode_length"] * 16 == batch.filled.sum()
        assert told["return/agents"] == told["episode_length"]
        assert told["reward_total/agents"].tolist() == [10.0]  # of a row, all that was earned
    assert not any(x.any() for x in loop.collector.episode_stats.carry.values())  # none is under way


def test_where_every_episode_is_as_long_as_it_can_be_nothing_changes(monkeypatch):
    """A native world that does not say so, and Python rows: bit for bit as with a rollout of as many steps."""
    algo = {"epochs": 2, "minibatches": 3, "normalise_reward": True, "advantage_every": "epoch"}

    def state(world, padded, algo, **env):
        loop = loop_of("ppo", world, env=env, algo=algo, net={"hidden": (8,)})
        assert (loop.collector.episodes is not None) == padded
        for _ in range(3):
            loop.iterate()
        batch = loop.collector.collect(loop.rollout)
        assert (batch.filled is not None) == (padded and not env)  # Python rows are looked at: there is nothing to leave out
        loop.env.close()
        loop.eval_env.close()
        everything = {
            **loop.learners[0].state_dict(),
            "frames": batch.frame["agents"].obs,
            "noise": loop.collector.generator.get_state(),
        }
        return [*everything.values(), *tree_leaves(loop.collector.episode_stats.state_dict())]

    def same(a, b):
        return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))

    in_python = {"horizon": 7, "workers": 0}
    world = "gymnasium/Pendulum-v1"
    assert same(
        state(world, True, {**algo, "episodes": 2}, **in_python), state(world, False, {**algo, "rollout": 14}, **in_python)
    )
    known = state("Pendulum-v1", False, {**algo, "episodes": 1})
    monkeypatch.setattr(Pendulum, "fixed_length", False)
    assert same(state("Pendulum-v1", True, {**algo, "episodes": 1}), known)
    assert same(state("Pendulum-v1", False, {**algo, "rollout": 200}), known)


@pytest.mark.parametrize("workers", [0, 2])
def test_python_rows_begin_anew(workers):
    """CartPole for at most 40 steps, which random actions seldom last."""
    algo = {"episodes": 1, "epochs": 1, "random_steps": 5000}
    loop = loop_of("ppo", "gymnasium/CartPole-v1", env={"horizon": 40, "workers": workers}, algo=algo)
    try:
        loop.iterate()
        before = loop.collector.frame["agents"].obs
        batch = loop.collector.collect(40)
        assert torch.equal(batch.frame["agents"].obs[0], before)
        assert batch.frame["agents"].start[0].all()
        assert 0 < batch.filled.sum() < batch.filled.numel() / 2 + 40
        assert (batch.filled & batch.over).sum(0).tolist() == [1] * 8
        assert batch.over[-1].all()
        now = loop.collector.frame["agents"]
        assert now.start.all()
        assert now.obs.abs().max() < 0.05  # where CartPole begins
        assert (now.obs != before).any(-1).all()
        assert loop.env.get_state()["actions"] == [{}] * 8  # nothing is to be played again
    finally:
        loop.env.close()
        loop.eval_env.close()
