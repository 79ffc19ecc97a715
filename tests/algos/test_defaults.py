"""Defaults that follow from the world and the run, and what has the last word."""

import json
from dataclasses import dataclass

import pytest
import torch

import shoal
from shoal.algos import defaults
from shoal.algos.base import Seat
from shoal.algos.coma import COMA
from shoal.algos.ddpg import DDPG
from shoal.algos.ddqn import DDQN
from shoal.algos.ppo import PPO
from shoal.nets.config import NetConfig
from shoal.spec import Box, Discrete, EnvSpec, Group


def world(horizon, agents=1, action=None):
    names = tuple(f"agent_{i}" for i in range(agents))
    return EnvSpec((Group("agents", "agents", names, obs=(3,), action=action or Discrete(2)),), horizon=horizon)


def filled(config, horizon, steps=1_000_000, **k):
    return defaults.filled(config, world(horizon, **k), ("agents",), steps)


@pytest.mark.parametrize(("horizon", "gamma", "rollout"), [(25, 0.95, 25), (50, 0.95, 50), (51, 0.99, 128), (499, 0.99, 128)])
def test_short_episodes_are_seen_whole_and_discounted_more(horizon, gamma, rollout):
    c = filled(PPO.Config(), horizon)
    assert (c.gamma, c.rollout) == (gamma, rollout)


@pytest.mark.parametrize(("horizon", "far"), [(499, False), (501, True), (None, True)])
def test_long_episodes_are_discounted_less_by_those_who_learn_from_a_rollout(horizon, far):
    c = filled(PPO.Config(), horizon)
    assert (c.gamma, c.lam, c.minibatches) == ((0.995, 0.98, 32) if far else (0.99, 0.95, 8))
    assert filled(PPO.Config(), horizon, agents=2).minibatches == 4
    assert filled(DDQN.Config(), horizon).gamma == 0.99


def test_what_was_given_stays():
    c = filled(PPO.Config(gamma=0.9, rollout=7, minibatches=1, entropy=0.5), 25)
    assert (c.gamma, c.rollout, c.minibatches, c.entropy) == (0.9, 7, 1, 0.5)


def test_a_class_that_derives_has_its_own():
    @dataclass(frozen=True)
    class Config(PPO.Config):
        gamma: float | None = 0.5

    assert filled(Config(), 25).gamma == 0.5


def test_teams_and_lone_agents_choices_and_throttles():
    assert [filled(PPO.Config(), 200, agents=n).minibatches for n in (1, 2, 3)] == [8, 4, 4]
    assert filled(PPO.Config(), 200).entropy == 0.01
    assert filled(PPO.Config(), 200).noise_keep == 0  # choices have no noise to keep
    throttle = filled(PPO.Config(), 200, action=Box((-1.0,), (1.0,)))
    assert (throttle.entropy, throttle.noise_keep) == (0, 0.75)  # 50 / 200 is forgotten in a step
    assert [filled(DDPG.Config(), h, action=Box((-1.0,), (1.0,))).noise_keep for h in (25, 50, 100, 999)] == [0, 0, 0.5, 0.95]


@pytest.mark.parametrize(
    ("steps", "every", "starts", "epsilon_steps"),
    [(20_000, 1, 1_000, 2_000), (50_000, 1, 2_500, 5_000), (300_000, 3, 5_000, 30_000), (10_000_000, 25, 5_000, 1_000_000)],
)
def test_replays_go_by_the_length_of_the_run(steps, every, starts, epsilon_steps):
    c = filled(DDQN.Config(), 500, steps)
    assert (c.every, c.learning_starts, c.epsilon_steps) == (every, starts, epsilon_steps)


def test_every_rule_fills_a_field_that_is_none_and_says_so_in_its_help():
    from shoal.flags import flags_of

    for cls in (PPO, DDQN, DDPG, COMA):
        blank, helps = cls.Config(), {f.name: f.help for f in flags_of(cls.Config, "").values()}
        for name in cls.Config.rules:
            assert getattr(blank, name) is None
            assert getattr(filled(blank, 25), name) is not None
            assert "none: " in helps[name.replace("_", "-")], name


def test_a_run_records_what_was_filled_in_and_a_resume_keeps_it(tmp_path):
    small = {"envs": 8, "quiet": True, "eval": {"every": 0}, "log": {"tensorboard": False}}
    run = shoal.train("iql", "simple_spread", steps=2_000, out=str(tmp_path / "run"), **small)
    recorded = json.loads((tmp_path / "run" / "config.json").read_text())["players"]["agents"]
    assert (recorded["algo"]["gamma"], recorded["algo"]["every"], recorded["algo"]["epsilon_steps"]) == (0.95, 1, 200)
    assert (recorded["net"]["hidden"], recorded["net"]["activation"]) == ([128, 128], "relu")
    shoal.resume(run, steps=4_000, quiet=True)
    again = json.loads((tmp_path / "run" / "config.json").read_text())["players"]["agents"]
    assert again == recorded  # a longer run goes on as it began


def test_nets_of_a_family_and_what_was_asked_for(tmp_path):
    small = {"envs": 8, "steps": 400, "quiet": True, "eval": {"every": 0}, "log": {"tensorboard": False}}
    run = shoal.train("qmix", "simple_spread", out=str(tmp_path / "run"), net={"hidden": (8,)}, **small)
    net = json.loads((run.path / "config.json").read_text())["players"]["agents"]["net"]
    assert (net["hidden"], net["activation"]) == ([8], "relu")


def test_an_algorithm_that_is_made_by_hand_has_them_too():
    a = PPO(Seat(world(25), ("agents",), PPO.Config(), NetConfig(), torch.Generator()))
    assert (a.config.gamma, a.feed.steps) == (0.95, 25)
