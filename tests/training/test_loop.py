"""The loop: what is due when, who is paid what, hooks, stopping, divergence, and one writer a run."""

import json
import re
import subprocess
import sys

import pytest
import torch

import shoal
from shoal.cli import main
from shoal.nets.layers import MLP
from shoal.spec import UserError
from shoal.training.diverged import DivergedError
from shoal.training.loop import Loop
from shoal.training.settings import Settings, resolve

SMALL = {"envs": 8, "quiet": True, "seed": 1}
QUICK = {"algo": {"rollout": 10}, "eval": {"episodes": 4}, "log": {"tensorboard": False}}


def loop_of(env, reward="own", **config):
    return Loop(resolve(Settings("mappo", env, {**SMALL, "reward": reward}, {"env": config})))


def test_pay_own_team_mean_and_sum():
    for reward, expected in (("own", None), ("team-mean", "mean"), ("team-sum", "sum")):
        loop = loop_of("simple_tag", reward)
        batch = loop.collector.collect(25)
        loop.shaping(batch)
        for g in ("adversary", "agent"):
            raw = batch.results[g].reward
            want = raw if expected is None else getattr(raw, expected)(-1, keepdim=True).expand_as(raw)
            assert torch.allclose(batch.learner_reward[g], want)


def test_teams_of_several_groups_are_paid_together():
    loop = loop_of("simple_world_comm", "team-sum")
    batch = loop.collector.collect(25)
    loop.shaping(batch)
    total = batch.results["leadadversary"].reward.sum(-1) + batch.results["adversary"].reward.sum(-1)
    assert torch.allclose(batch.learner_reward["leadadversary"][..., 0], total)
    assert torch.allclose(batch.learner_reward["adversary"][..., 2], total)


def test_shaping_is_paid_and_never_reported():
    loop = loop_of("probe_teams", shaped=True)
    batch = loop.collector.collect(16)
    loop.shaping(batch)
    result = batch.results["pair"]
    assert result.shaping is not None
    assert result.shaping.abs().sum() > 0
    assert torch.equal(batch.learner_reward["pair"], result.reward + result.shaping)
    loop.collector.episode_stats.count(batch)
    reported = loop.collector.episode_stats.take()["return/pair"]
    assert float(reported) == pytest.approx(float(result.reward.sum((0, 1)).mean() / batch.over.sum()))


def test_hooks_add_metrics_and_stop(tmp_path):
    class Stop(shoal.Hook):
        seen = 0

        def after_iteration(self, loop):
            self.seen += 1
            if self.seen == 3:
                loop.stop("enough")
            return {"mine/seen": float(self.seen)}

        def on_evaluation(self, loop, episodes):
            return {"mine/episodes": len(episodes.lengths)}

    run = shoal.train("ippo", "simple", steps=8000, hook=Stop(), out=tmp_path / "r", **SMALL, **QUICK | {"log": {"every": 80}})
    lines = [x for x in run.metrics if x["kind"] == "train"]
    assert [x["step"] for x in lines] == [80, 160, 240]
    assert [x["mine/seen"] for x in lines] == [1, 2, 3]
    assert run.evaluations()[0]["mine/episodes"] == 4  # with the evaluation it is of
    assert run.load("last")["step"] == 240
    run = shoal.resume(run)
    assert run.load("last")["step"] == 8000


def test_hooks_are_checked(tmp_path):
    class Liar(shoal.Hook):
        def after_iteration(self, loop):
            return {"return/agents": 1e9}

        def on_evaluation(self, loop, episodes):
            return {"return/agents": 1e9}

    run = shoal.train("ippo", "simple", steps=400, hook=Liar(), out=tmp_path / "r", **SMALL, **QUICK)
    assert all(x["return/agents"] is None or x["return/agents"] < 0 for x in run.metrics)  # returns stay raw
    for wrong in (Liar, [Liar()]):
        with pytest.raises(UserError, match=r"shoal\.Hook"):
            shoal.train("ippo", "simple", steps=400, hook=wrong, out=tmp_path / "x", **SMALL, **QUICK)
    with pytest.raises(UserError, match="'lrr'"):
        shoal.train("ippo", "simple", steps=400, out=tmp_path / "x", **SMALL, **{**QUICK, "algo": {"lrr": 1}})
    assert not (tmp_path / "x").exists()


def test_stops_at_a_score_and_after_a_time(tmp_path):
    run = shoal.train("ippo", "probe_constant", steps=80_000, stop_score=0.9, out=tmp_path / "a", **SMALL, **QUICK)
    assert run.load("last")["step"] == 0  # 1 is reached before anything is learnt
    run = shoal.train("ippo", "probe_copy", steps=10**9, time="1s", out=tmp_path / "b", **SMALL, **QUICK)
    state = run.load("last")
    assert 1 <= state["seconds"] < 10
    assert 0 < state["step"] < 10**9


def test_a_loss_that_is_not_finite_stops_the_run(tmp_path, capsys):
    quick = ["--steps", "20000", "--envs", "8", "--eval.episodes", "4", "--log.tensorboard", "false", "--quiet"]
    diverging = ["--algo.lr", "1e30", "--algo.normalise-value", "false", "--algo.grad-clip", "none"]
    assert main(["train", "mappo", "simple_spread", *quick, *diverging, "--out", str(tmp_path / "r")]) == 1
    err = capsys.readouterr().err
    assert err.startswith("shoal: a loss was not finite")
    assert err.count("\n") == 1
    assert f"the last good checkpoint is {tmp_path / 'r' / 'checkpoints' / 'last.pt'}: start from its weights with" in err
    assert err.endswith(f"--init {tmp_path / 'r'} with a smaller learning rate, --algo.lr below 1e+30.\n")
    state = shoal.Run(tmp_path / "r").load("last")
    weights = [x for x in state["algorithms"]["agents"].values() if x.is_floating_point()]
    assert all(x.isfinite().all() for x in weights)
    assert not state["algorithms"]["agents"]["actor_optimiser.broken"]
    with pytest.raises(DivergedError):
        shoal.resume(tmp_path / "r", quiet=True)


def test_one_process_writes_a_run(tmp_path):
    run = shoal.train("ippo", "simple", steps=800, until=400, out=tmp_path / "r", **SMALL, **QUICK)
    before = (run.path / "metrics.jsonl").read_bytes()
    (run.path / "metrics.jsonl").write_bytes(before + b'{"step": 480, "kind": "train", "time": 1}\n')  # as a live run would
    lock = run.lock()
    with pytest.raises(UserError, match="another process"):
        shoal.resume(run)
    assert (run.path / "metrics.jsonl").read_bytes() != before  # not cut while somebody else is at it
    lock.close()
    shoal.resume(run)
    assert 480 not in [x["step"] for x in run.metrics if len(x) == 3]


def test_best_and_numbered_checkpoints(tmp_path):
    sections = {**QUICK, "eval": {"episodes": 4, "every": 160}, "save": {"every": 160, "keep": 3}}
    run = shoal.train("ippo", "simple", steps=1600, out=tmp_path / "r", **SMALL, **sections)
    names = sorted(p.name for p in run.checkpoints.iterdir())
    assert names == ["best.pt", "last.pt", *(f"step-{s:012d}.pt" for s in (1280, 1440, 1600))]
    scores = {x["step"]: x["return/agents"] for x in run.evaluations()}
    assert run.load("best")["best"] == max(scores.values())
    assert scores[run.load("best")["step"]] == max(scores.values())
    assert next(iter(scores)) == 0
    log = [x for x in (run.path / "train.log").read_text().splitlines() if x.startswith("Step:")]
    assert len(log) == len(scores)
    assert log[0].startswith("Step:       0, Reward: [")


def test_train_log_records_the_model(tmp_path):
    run = shoal.train("mappo", "simple_spread", steps=80, out=tmp_path / "r", **SMALL, **QUICK)
    text = (run.path / "train.log").read_text()
    for part in (
        "Model: mappo (PPO) for agents",
        "num_envs: 8",
        "class PPO(OnPolicy)",
        "class OnPolicy(Algorithm, ABC)",
        "class Optimiser",
        '"lr": 0.001',
        "state_size: [(18,)",
    ):
        assert part in text
    versions = json.loads((run.path / "versions.json").read_text())
    assert versions["torch"] == torch.__version__


def test_a_line_of_train_log_covers_all_since_the_last_one(tmp_path):
    """r_t is what each agent earned since the last line, whatever was logged and resumed meanwhile; the std is a team's."""
    sections = {**QUICK, "eval": {"episodes": 4, "every": 320}, "log": {"tensorboard": False, "every": 80}}
    whole = shoal.train("ippo", "simple_tag", steps=640, out=tmp_path / "whole", **SMALL, **sections)
    half = shoal.train("ippo", "simple_tag", steps=640, until=160, out=tmp_path / "half", **SMALL, **sections)
    shoal.resume(half, quiet=True)
    lines = [x for x in (whole.path / "train.log").read_text().splitlines() if x.startswith("Step:")]
    earned_lines = [re.search(r"r_t: (None|\[[^]]*\])", x)[1] for x in lines]
    assert earned_lines[0] == "None"
    for k, line in enumerate(earned_lines[1:]):
        mine = [x for x in whole.metrics if x["kind"] == "train" and 320 * k < x["step"] <= 320 * (k + 1)]
        assert len(mine) == 4
        earned = [sum(v) for g in ("adversary", "agent") for v in zip(*(x[f"reward_total/{g}"] for x in mine), strict=True)]
        assert any(earned)
        assert [float(v) for v in line[1:-1].split()] == pytest.approx(earned, rel=1e-3)
    stds = [[float(v) for v in re.search(r"Reward: \[[^]]*\] \[([^]]*)\], Avg", x)[1].split()] for x in lines]
    evaluations = [[x["return_std/adversary"], x["return_std/agent"]] for x in whole.evaluations()]
    assert stds == [pytest.approx(x, abs=1e-3) for x in evaluations]  # a team is one group here
    again = [x for x in (half.path / "train.log").read_text().splitlines() if x.startswith("Step:")]
    assert [re.sub("<.*?>", "", x) for x in again] == [re.sub("<.*?>", "", x) for x in lines]


def test_python_api_as_the_readme_has_it(tmp_path):
    run = shoal.train("mappo", "simple_spread", steps=400, out=tmp_path / "r", **SMALL, **QUICK)
    policy, world = shoal.load(run.path), shoal.make("simple_spread")
    names = world.spec["agents"].agents
    actions, memory = policy.act({name: [0.1] * 18 for name in names})
    assert set(actions) == set(names)
    assert all(isinstance(a, int) and 0 <= a < 5 for a in actions.values())
    some, _ = policy.act({names[1]: [0.1] * 18}, memory)
    assert some == {names[1]: actions[names[1]]}
    with pytest.raises(UserError, match="no agent 'bob'"):
        policy.act({"bob": [0.0]})
    with pytest.raises(UserError, match="shape"):
        policy.act({name: [0.1] * 3 for name in names})
    one, other = shoal.evaluate(run, episodes=10), shoal.evaluate(run, episodes=10)
    assert torch.equal(one.returns["agents"], other.returns["agents"])


def test_policy_plays_in_mpe2_as_it_does_here(tmp_path):
    """The same policy, the same starts: Shoal's world and mpe2's give the same returns."""
    from mpe2 import simple_spread_v3

    run = shoal.train("mappo", "simple_spread", steps=400, out=tmp_path / "r", **SMALL, **QUICK)
    policy, world = shoal.load(run.path), simple_spread_v3.parallel_env()
    observations, _ = world.reset(seed=5)
    ours = shoal.make("simple_spread", dtype=torch.float64)
    bodies = world.unwrapped.world.entities
    zeros = torch.zeros(1, 3, 2, dtype=torch.float64)
    pos = torch.tensor([[list(b.state.p_pos) for b in bodies]], dtype=torch.float64)
    frame = ours.set_state({"pos": pos, "vel": zeros, "clock": torch.zeros(1, dtype=torch.long)})
    memory, total, mine = None, 0.0, 0.0
    while world.agents:
        here, _ = policy.act(dict(zip(world.agents, frame["agents"].obs[0].float(), strict=True)), memory)
        actions, memory = policy.act(observations, memory)
        assert here == actions
        observations, rewards, *_ = world.step(actions)
        outcome = ours.step({"agents": torch.tensor([list(actions.values())])}, torch.zeros(1, ours.noise))
        frame = outcome.frame
        total += sum(rewards.values())
        mine += float(outcome.results["agents"].reward.sum())
    assert mine == pytest.approx(total, abs=1e-6)


def test_import_loads_no_torch():
    code = "import sys, shoal; dir(shoal); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


@pytest.mark.compiler
@pytest.mark.parametrize("matmul", ["tf32", "float32"])
def test_nets_choose_their_kernels_by_the_precision_that_is_asked_for(monkeypatch, matmul):
    """They ask while they are made: what the process had set before must not decide."""
    seen = []
    take = MLP.use_kernels
    monkeypatch.setattr(MLP, "use_kernels", lambda net: (seen.append(torch.backends.cuda.matmul.allow_tf32), take(net)))
    torch.backends.cuda.matmul.allow_tf32 = matmul != "tf32"
    Loop(resolve(Settings("maddpg", "probe_copy", {"matmul": matmul, "compile": "fused"}, {})))
    assert len(seen) >= 2
    assert set(seen) == {matmul == "tf32"}
