"""Learning on the particle worlds: minutes, not seconds; `make test-slow`. Thresholds leave room for another machine's
rounding: on two CPU cores seed 0 reached what the comments say."""

import pytest

import shoal

pytestmark = pytest.mark.slow
COMMON = {"envs": 256, "quiet": True, "log": {"tensorboard": False}}


def learnt(path, algo, env, steps, config=None, algo_config=None, **more):
    algo_config = {"lr": 1e-3, "gamma": 0.95, **(algo_config or {})}
    return shoal.train(algo, env, steps=steps, algo=algo_config, env=config or {}, out=path, **COMMON, **more)


@pytest.mark.parametrize(
    ("algo", "actions", "bar"), [("mappo", "discrete", -18), ("ippo", "discrete", -19), ("mappo", "continuous", -19)]
)
def test_agents_cover_landmarks(tmp_path, algo, actions, bar):
    run = learnt(tmp_path / "r", algo, "simple_spread", 600_000, {"actions": actions})
    assert float(shoal.evaluate(run, 100).returns["agents"].mean()) > bar  # random: -26


def test_predators_catch_more_than_random_ones(tmp_path):
    run = learnt(tmp_path / "r", "mappo", "simple_tag", 400_000)
    ours = shoal.evaluate(run, 100).stats["touches"].mean()
    theirs = shoal.evaluate(run, 100, team={"adversary": "random"}).stats["touches"].mean()
    assert float(ours) > 2 * float(theirs)


def test_separate_nets_learn_to_talk_or_at_least_to_the_middle(tmp_path):
    run = learnt(tmp_path / "r", "mappo", "simple_speaker_listener", 600_000)
    assert float(shoal.evaluate(run, 100).returns["listener"].mean()) > -20  # random: -41, the centre: -16.6


@pytest.mark.parametrize(("algo", "actions"), [("maddpg", "discrete"), ("matd3", "continuous"), ("masac", "continuous")])
def test_agents_cover_landmarks_from_a_replay(tmp_path, algo, actions):
    past = {"rollout": 5, "every": 25, "batch": 256, "lr_schedule": "linear"}
    net = {"activation": "relu", "hidden": (128, 128)}
    run = learnt(tmp_path / "r", algo, "simple_spread", 250_000, {"actions": actions}, past, reward="team-mean", net=net)
    assert float(shoal.evaluate(run, 100).returns["agents"].mean()) > -18  # -15.7 to -13.4; random: -26
