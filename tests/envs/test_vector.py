"""Rows of ordinary Python environments: serial, forked and spawned workers give the same numbers; workers die, hang and fail;
episodes are played again. The toy's actions are commands: 7 dies, 8 hangs, 9 raises."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from processes import alive, wait_for

import shoal
import shoal.tree
from shoal.envs.rows import RowRunner, Slots, arrays
from shoal.envs.vector import BITS
from shoal.spec import UserError
from shoal.training.stats import EpisodeStats

TOY = '''
"""A toy whose actions are commands."""
import os, signal, time
from dataclasses import dataclass
import numpy as np
from shoal.envs.rows import Row
from shoal.envs.vector import Host, HostConfig
from shoal.spec import Discrete, EnvSpec, Group, MultiDiscrete

MADE = 0

class ToyRow(Row):
    """Sees [seed mod 1000, clock, sum of what it did]; is paid its action; lasts 3 + seed mod 4 steps; ends by termination
    where the seed is even."""
    shapes = True

    def __init__(self, config):
        self.honest, self.exits, self.draws = config.honest, config.exits == "step", 0
        if config.exits == "making":
            raise SystemExit("I am gone")
        group = Group("agents", "agents", ("a_0", "a_1"), (3,), Discrete(10), masked=True)
        seen = {"vector": (2,), "image": (1, 6, 6)}
        mortals = Group("mortals", "mortals", ("m_0",), seen, MultiDiscrete((2, 3)), mortal=True)
        self.spec = EnvSpec((group, mortals), state=1, horizon=6, stats={"luck": "last"})

    def reset(self, seed, out):
        self.draws += 1
        self.seed, self.clock, self.sum = seed if self.honest else seed + 7 * self.draws, 0, 0
        self.see(out)
        out.start["mortals"][:] = True

    def see(self, out):
        out.obs["agents"][0] = self.seed % 1000, self.clock, self.sum
        out.obs["agents"][1] = -out.obs["agents"][0]
        out.obs["mortals"]["vector"][:] = self.clock
        out.obs["mortals"]["image"][:] = self.clock
        out.legal["agents"][:] = True
        out.state[:] = self.clock
        out.alive["mortals"][:] = out.active["mortals"][:] = self.clock < 2
        out.start["mortals"][:] = False

    def step(self, actions, out):
        a = int(actions["agents"][0])
        if a == 7:
            os.kill(os.getpid(), signal.SIGKILL)
        if a == 8:
            time.sleep(1000)
        if a == 9:
            raise SystemExit(3) if self.exits else ValueError("no nines")
        self.clock += 1
        self.sum += a
        self.see(out)
        out.reward["agents"][:] = actions["agents"]
        out.reward["mortals"][:] = actions["mortals"].sum()
        out.shaping["agents"][:] = 0.5
        over = self.clock >= 3 + self.seed % 4
        out.terminated["agents"][:] = over and self.seed % 2 == 0
        out.stat("luck", self.seed % 5)
        return over

class Toy(Host):
    @dataclass(frozen=True)
    class Config(HostConfig):
        honest: bool = True  # episodes follow from their seeds
        exits: str = ""  # where it calls sys.exit

    @classmethod
    def row(cls, config, drawn=False):
        return ToyRow(config)
'''


@pytest.fixture(scope="module")
def toy(tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("toy") / "toy.py"
    path.write_text(TOY)
    return str(path)


def noise(rows: int, generator: torch.Generator) -> torch.Tensor:
    return torch.rand(rows, 2, generator=generator)


def moves(rows: int, generator: torch.Generator) -> dict[str, torch.Tensor]:
    pair = torch.stack([torch.randint(0, n, (rows, 1), generator=generator) for n in (2, 3)], -1)
    return {"agents": torch.randint(0, 7, (rows, 2), generator=generator), "mortals": pair}


def leaves(tree) -> list[torch.Tensor]:
    return shoal.tree.tree_leaves(tree)


def story(env, steps: int, seed: int = 0) -> list:
    g = torch.Generator().manual_seed(seed)
    outcomes = [env.reset(noise(env.rows, g))]
    outcomes += [env.step(moves(env.rows, g), noise(env.rows, g)) for _ in range(steps)]
    return outcomes


def same(a, b) -> bool:
    return all(torch.equal(x, y) for x, y in zip(leaves(a), leaves(b), strict=True))


def pids(env) -> list[int]:
    return [w.process.pid for w in env.pool.workers]


# --- what a step is ---


@pytest.mark.parametrize("how", [{"workers": 1}, {"workers": 2}, {"workers": 3, "overlap": False}, {"workers": 9}])
def test_workers_change_no_number(toy, how):
    here, there = shoal.make(toy, rows=5, workers=0), shoal.make(toy, rows=5, **how)
    for a, b in zip(story(here, 25), story(there, 25), strict=True):
        assert same(a, b)
    assert len(there.halves) == (1 if how.get("overlap") is False else 2)
    there.close()


def test_spawned_workers_load_a_users_file_by_path(toy):
    here, there = shoal.make(toy, rows=3, workers=0), shoal.make(toy, rows=3, workers=2, start="spawn")
    for a, b in zip(story(here, 8), story(there, 8), strict=True):
        assert same(a, b)
    there.close()


def test_an_episode_that_ends_begins_again_in_the_same_trip(toy):
    env = shoal.make(toy, rows=1, workers=0)
    env.reset(torch.tensor([[0.0, 8 / (1 << BITS)]]))  # seed 8: three steps, then terminated
    for t in range(3):
        last = env.step({"agents": torch.tensor([[4, 2]]), "mortals": torch.tensor([[[1, 2]]])}, torch.tensor([[0.0, 0.0025]]))
        assert bool(last.over[0]) == (t == 2)
    assert last.next["agents"].obs[0].tolist() == [[8, 3, 12], [-8, -3, -12]]  # the true end
    assert last.frame["agents"].obs[0].tolist() == [[81, 0, 0], [-81, 0, 0]]  # seed 0.0025 * 2 ** 15
    assert last.results["agents"].terminated.tolist() == [[True, True]]
    assert last.results["agents"].reward.tolist() == [[4.0, 2.0]]
    assert last.results["agents"].shaping.tolist() == [[0.5, 0.5]]
    assert last.results["mortals"].reward.tolist() == [[3.0]]
    assert last.results["mortals"].terminated.tolist() == [[False]]
    assert last.next["agents"].start.tolist() == [[False, False]]
    assert last.frame["agents"].start.tolist() == [[True, True]]
    assert (last.next["mortals"].alive.tolist(), last.frame["mortals"].alive.tolist()) == ([[False]], [[True]])
    assert (last.next["mortals"].start.tolist(), last.frame["mortals"].start.tolist()) == ([[False]], [[True]])
    assert last.next["mortals"].obs["image"].dtype == torch.uint8
    assert last.frame.state.tolist() == [[0.0]]
    assert last.stats["luck"].tolist() == [3.0]


def test_an_odd_seed_is_truncated_and_seeds_come_from_the_noise(toy):
    env = shoal.make(toy, rows=2, workers=0)
    first = env.reset(torch.tensor([[1 / (1 << BITS), 0.0], [0.0, 5 / (1 << BITS)]]))
    assert first["agents"].obs[:, 0, 0].tolist() == [(1 << BITS) % 1000, 5]
    for _ in range(4):
        last = env.step(moves(2, torch.Generator().manual_seed(0)), torch.zeros(2, 2))
    assert last.over.tolist() == [False, True]
    assert last.results["agents"].terminated.tolist() == [[False, False], [False, False]]


def test_frames_are_new_tensors_that_later_steps_leave_alone(toy):
    env = shoal.make(toy, rows=4, workers=2)
    outcomes = story(env, 6)
    copies = [[x.clone() for x in leaves(t)] for t in outcomes]
    story(env, 6, seed=3)
    assert all(torch.equal(x, y) for t, c in zip(outcomes, copies, strict=True) for x, y in zip(leaves(t), c, strict=True))
    env.close()


def test_what_a_row_does_not_write_is_zero_and_not_the_last_steps():
    class Lazy(shoal.envs.rows.Row):
        spec = shoal.spec.EnvSpec(
            (shoal.spec.Group("agents", "agents", ("a",), (1,), shoal.spec.Discrete(2)),), stats={"x": "sum"}
        )
        clock = 0

        def reset(self, seed, out):
            out.obs["agents"][:] = seed

        def step(self, actions, out):
            self.clock += 1
            if self.clock == 1:
                out.reward["agents"][:], out.terminated["agents"][:] = 3, True
                out.stat("x", 2)
            return False

    row = Lazy()
    whole = arrays(row, 1)
    runner = RowRunner([row], [0], whole)
    runner.reset([0])
    runner.step(0, 1)
    assert (whole["reward", "agents"].tolist(), whole[("stats",)].tolist()) == ([[3.0]], [[2.0]])
    runner.step(0, 1)
    assert (whole["reward", "agents"].tolist(), whole["terminated", "agents"].tolist()) == ([[0.0]], [[False]])
    assert whole[("stats",)].tolist() == [[0.0]]
    assert isinstance(runner.now[0], Slots)


# --- accidents ---


def test_a_killed_worker_is_replaced_and_its_rows_truncated(toy):
    env, twin = shoal.make(toy, rows=6, workers=2), shoal.make(toy, rows=6, workers=0)
    g, h = (torch.Generator().manual_seed(4) for _ in range(2))
    before, _ = env.reset(noise(6, g)), twin.reset(noise(6, h))
    victim = env.pool.workers[0]
    os.kill(victim.process.pid, signal.SIGKILL)
    out, other = env.step(moves(6, g), noise(6, g)), twin.step(moves(6, h), noise(6, h))
    lost = victim.at
    assert lost == [0, 2, 4]  # some of each half
    for i in range(6):
        if i in lost:
            assert bool(out.over[i])
            assert torch.equal(out.next["agents"].obs[i], before["agents"].obs[i])  # where it was last seen
            assert out.frame["agents"].obs[i, 0, 1:].tolist() == [0, 0]
            assert not torch.equal(out.frame["agents"].obs[i, 0, 0], before["agents"].obs[i, 0, 0])  # another episode
            assert bool(out.frame["agents"].start[i].all())
            assert not out.next["mortals"].start[i].any()
            assert out.results["agents"].reward[i].tolist() == [0, 0]
            assert not out.results["agents"].terminated[i].any()
        else:
            assert torch.equal(out.next["agents"].obs[i], other.next["agents"].obs[i])
            assert not bool(out.over[i])
    assert env.restarts == 1
    assert len(env.news) == 1
    assert "died (SIGKILL) and was replaced" in env.news[0]
    assert "3 rows" in env.news[0]
    again = env.step(moves(6, g), noise(6, g))  # and it goes on
    assert again.next["agents"].obs[lost, 0, 1].tolist() == [1, 1, 1]
    env.close()


def test_a_worker_that_dies_between_two_halves_loses_each_half_once(toy):
    env = shoal.make(toy, rows=4, workers=1)
    g = torch.Generator().manual_seed(0)
    env.reset(noise(4, g))
    actions = moves(4, g)
    deadly = {k: a.clone() for k, a in actions.items()}
    deadly["agents"][0, 0] = 7
    env.send(0, {k: a[:2] for k, a in deadly.items()}, noise(2, g))
    first = env.receive(0)
    assert first.over.tolist() == [True, True]
    env.send(0, {k: a[:2] for k, a in actions.items()}, noise(2, g))  # the first half goes on, the other is still lost
    env.send(1, {k: a[2:] for k, a in actions.items()}, noise(2, g))
    assert env.receive(0).over.tolist() == [False, False]
    second = env.receive(1)
    assert second.over.tolist() == [True, True]
    assert second.frame["agents"].obs[:, 0, 1].tolist() == [0, 0]
    env.send(1, {k: a[2:] for k, a in actions.items()}, noise(2, g))
    assert env.receive(1).over.tolist() == [False, False]
    assert env.restarts == 1
    env.close()


def test_a_worker_that_hangs_is_replaced(toy):
    env = shoal.make(toy, rows=2, workers=2, timeout=2)
    env.reset(torch.rand(2, 2, generator=torch.Generator().manual_seed(0)))
    hung = pids(env)[1]
    actions = {"agents": torch.tensor([[1, 1], [8, 1]]), "mortals": torch.zeros(2, 1, 2, dtype=torch.long)}
    out = env.step(actions, torch.rand(2, 2, generator=torch.Generator().manual_seed(1)))
    assert out.over.tolist() == [False, True]
    assert "took longer than 2 s (--env.timeout)" in env.news[0]
    assert not alive(hung)
    env.close()


def test_a_worker_that_dies_again_and_again_ends_the_run_with_a_sentence(toy):
    env = shoal.make(toy, rows=1, workers=1)
    env.reset(torch.rand(1, 2))
    actions = {"agents": torch.tensor([[7, 0]]), "mortals": torch.zeros(1, 1, 2, dtype=torch.long)}
    for _ in range(3):
        env.step(actions, torch.rand(1, 2))
    with pytest.raises(UserError, match=r"the environment failed: its worker died \(SIGKILL\), 4 times in a row"):
        env.step(actions, torch.rand(1, 2))
    env.close()


def test_a_worker_that_dies_ever_again_between_steps_that_go_well_ends_the_run_too(toy):
    env = shoal.make(toy, rows=2, workers=1)
    env.reset(torch.rand(2, 2))
    well = {"agents": torch.ones(2, 2, dtype=torch.long), "mortals": torch.zeros(2, 1, 2, dtype=torch.long)}
    deadly = {**well, "agents": torch.tensor([[7, 1], [1, 1]])}

    def play() -> None:
        for _ in range(9):
            env.step(well, torch.rand(2, 2))
            env.step(deadly, torch.rand(2, 2))

    with pytest.raises(UserError, match=r"its worker died \(SIGKILL\), 4 times in \d+ steps"):
        play()
    env.close()


def test_episodes_that_an_accident_cut_off_are_not_counted(toy):
    env = shoal.make(toy, rows=4, workers=2)
    env.reset(torch.full((4, 2), 0.3))
    well = {"agents": torch.ones(4, 2, dtype=torch.long), "mortals": torch.zeros(4, 1, 2, dtype=torch.long)}
    out = env.step(well, torch.rand(4, 2))
    assert out.lost.tolist() == [False] * 4
    os.kill(env.pool.workers[1].process.pid, signal.SIGKILL)
    out = env.step(well, torch.rand(4, 2))
    assert out.lost.tolist() == out.over.tolist() == [False, True, False, True]
    flags = lambda *rows: torch.tensor([[r] for r in rows])  # noqa: E731  [T, B] of one row
    one = shoal.make(toy, rows=1, workers=0)
    episode_stats = EpisodeStats(one)
    rewards = {"agents": torch.full((5, 1, 2), 1.0), "mortals": torch.zeros(5, 1, 1)}
    over, lost = flags(False, True, False, False, True), flags(False, True, False, False, False)
    results = {g: SimpleNamespace(reward=x) for g, x in rewards.items()}
    episode_stats.count(SimpleNamespace(results=results, over=over, stats={"luck": torch.zeros(5, 1)}, lost=lost))
    outcomes = episode_stats.take()
    assert (outcomes["episodes"], outcomes["episode_length"], outcomes["return/agents"]) == (1, 3, 3)  # the second alone
    env.close()


def test_a_worker_may_start_processes_of_its_own(tmp_path):
    path = tmp_path / "parents.py"
    path.write_text(
        textwrap.dedent("""
        import multiprocessing
        import gymnasium, numpy as np
        from gymnasium.spaces import Box, Discrete

        class Parent(gymnasium.Env):
            observation_space, action_space = Box(0, 9, (1,), np.float32), Discrete(2)
            def reset(self, seed=None, options=None):
                child = multiprocessing.get_context("fork").Process(target=int)
                child.start()
                child.join()
                return np.array([child.exitcode], np.float32), {}
        """)
    )
    env = shoal.make(str(path), rows=1, workers=1)
    assert env.reset(torch.rand(1, 2))["agents"].obs.tolist() == [[[0]]]
    env.close()


@pytest.mark.parametrize("workers", [0, 2])
def test_an_exception_of_the_environments_own_is_told_with_its_place(toy, workers):
    env = shoal.make(toy, rows=2, workers=workers)
    env.reset(torch.rand(2, 2))
    actions = {"agents": torch.tensor([[1, 1], [9, 1]]), "mortals": torch.zeros(2, 1, 2, dtype=torch.long)}
    with pytest.raises(
        UserError,
        match=r"the environment failed: ValueError: no nines \(toy.py, line \d+; row 1, whose episode began with seed \d+\)\.",
    ):
        env.step(actions, torch.rand(2, 2))
    env.close()


@pytest.mark.parametrize("workers", [0, 2])
def test_a_world_that_calls_sys_exit_is_told_and_ends_nobody_else(toy, workers):
    env = shoal.make(toy, rows=2, workers=workers, exits="step")
    env.reset(torch.rand(2, 2))
    actions = {"agents": torch.tensor([[1, 1], [9, 1]]), "mortals": torch.zeros(2, 1, 2, dtype=torch.long)}
    words = r"the environment failed: SystemExit: 3 \(toy.py, line \d+; row 1, whose episode began with seed \d+\)\."
    with pytest.raises(UserError, match=words):
        env.step(actions, torch.rand(2, 2))
    env.close()
    with pytest.raises(UserError, match=r"the environment failed: SystemExit: I am gone \(toy.py, line \d+\)\."):
        shoal.make(toy, rows=2, workers=workers, exits="making")


def test_closing_leaves_no_process_and_a_closed_world_can_begin_again(toy):
    env = shoal.make(toy, rows=4, workers=2)
    story(env, 2)
    mine = pids(env)
    assert all(map(alive, mine))
    env.close()
    env.close()
    assert not any(map(alive, mine))
    story(env, 2)
    more = pids(env)
    del env  # forgotten without a word
    import gc

    gc.collect()
    assert not any(map(alive, more))


@pytest.mark.parametrize(("how", "start"), [("SIGKILL", "fork"), ("SIGINT", "fork"), ("SIGTERM", "fork"), ("SIGKILL", "spawn")])
def test_no_worker_outlives_its_parent(toy, tmp_path, how, start):
    code = f"""
        import shoal, signal, torch, time
        if __name__ == "__main__":
            signal.signal(signal.SIGINT, signal.default_int_handler)  # whoever runs the tests in the background ignores it
            env = shoal.make({toy!r}, rows=4, workers=2, start={start!r})
            env.reset(torch.rand(4, 2))
            print(*[w.process.pid for w in env.pool.workers], flush=True)
            hang = torch.full((4, 2), {8 if how == "SIGKILL" else 1})
            env.step({{"agents": hang, "mortals": torch.zeros(4, 1, 2, dtype=torch.long)}}, torch.rand(4, 2))
            time.sleep(60)
    """
    path = tmp_path / "parent.py"
    path.write_text(textwrap.dedent(code))
    parent = subprocess.Popen([sys.executable, str(path)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert parent.stdout is not None
    children = [int(x) for x in parent.stdout.readline().split()]
    assert len(children) == 2
    assert all(map(alive, children))
    parent.send_signal(getattr(signal, how))
    parent.wait(120)
    assert wait_for(lambda: not any(map(alive, children)))


def test_workers_leave_a_signal_to_whoever_started_them(toy):
    """A batch system tells all processes of a job at once: the parent saves, and needs its rows for that."""
    env, twin = shoal.make(toy, rows=4, workers=2), shoal.make(toy, rows=4, workers=0)
    env.reset(torch.full((4, 2), 0.3))
    twin.reset(torch.full((4, 2), 0.3))
    for pid in pids(env):
        os.kill(pid, signal.SIGTERM)
        os.kill(pid, signal.SIGINT)
    time.sleep(0.2)
    actions = moves(4, torch.Generator().manual_seed(0))
    assert same(env.step(actions, torch.full((4, 2), 0.6)), twin.step(actions, torch.full((4, 2), 0.6)))
    assert env.restarts == 0
    mine = pids(env)
    env.close()
    assert not any(map(alive, mine))


def test_an_episode_too_long_to_be_kept_begins_anew(toy, monkeypatch):
    monkeypatch.setattr("shoal.envs.vector.LONGEST", 60)
    env = shoal.make(toy, rows=2, workers=0)
    env.reset(torch.full((2, 2), 0.3))
    env._history.began[:], env._history.log[0][:] = 0, [{}] * 63  # as if it had gone on for so long
    env._history.add(slice(0, 2), {})
    assert env._history.seeds.tolist() == [-1, -1]
    other = shoal.make(toy, rows=2, workers=0)
    frame = other.set_state(env.get_state())
    assert other.begun_anew.tolist() == [True, True]
    assert frame["agents"].obs[:, 0, 1].tolist() == [0, 0]


# --- playing again ---


@pytest.mark.parametrize(("first", "second"), [(0, 2), (2, 0), (2, 3)])
def test_a_state_is_played_forward_again(toy, first, second):
    env, other = shoal.make(toy, rows=5, workers=first), shoal.make(toy, rows=5, workers=second)
    last = story(env, 13)[-1]
    state = env.get_state()
    frame = other.set_state(state)
    assert same(frame, last.frame)
    assert other.news == []
    assert not other.begun_anew.any()
    for t in range(12):
        g, h = (torch.Generator().manual_seed(100 + t) for _ in range(2))
        assert same(env.step(moves(5, g), noise(5, g)), other.step(moves(5, h), noise(5, h)))
    assert same(env.get_state()["actions"], other.get_state()["actions"])
    for e in (env, other):
        e.close()


def test_an_environment_that_does_not_repeat_begins_anew_and_says_so(toy):
    env = shoal.make(toy, rows=3, workers=0, honest=False)
    story(env, 4)
    other = shoal.make(toy, rows=3, workers=0, honest=False)
    story(other, 30)  # its counters are elsewhere
    frame = other.set_state(env.get_state())
    assert bool(other.begun_anew.any())
    assert frame["agents"].obs[other.begun_anew][:, 0, 1].tolist() == [0] * int(other.begun_anew.sum())
    assert bool(frame["agents"].start[other.begun_anew].all())
    assert "rows did not come out the same" in other.news[0]


def test_the_past_is_kept_from_the_oldest_episode_under_way_only(toy):
    env = shoal.make(toy, rows=4, workers=0)
    story(env, 1000)
    assert max(map(len, env._history.log)) < 200
    lengths = [len(next(iter(a.values()), ())) for a in env.get_state()["actions"]]
    assert max(lengths) <= 6


def test_a_state_of_other_rows_is_refused(toy):
    env = shoal.make(toy, rows=4, workers=0)
    story(env, 1)
    with pytest.raises(UserError, match="4 rows and the world 3"):
        shoal.make(toy, rows=3, workers=0).set_state(env.get_state())


@pytest.mark.parametrize(
    ("setting", "sentence"),
    [({"workers": -1}, "--env.workers is -1"), ({"timeout": 0.0}, "--env.timeout is 0"), ({"start": "frok"}, "frok")],
)
def test_wrong_settings_are_a_sentence(toy, setting, sentence):
    with pytest.raises(UserError, match=sentence):
        shoal.make(toy, rows=2, **setting)


def test_numbers_in_arrays_are_of_the_dtypes_of_the_contract(toy):
    env = shoal.make(toy, rows=2, workers=0)
    frame = env.reset(torch.rand(2, 2))
    assert frame["agents"].obs.dtype == torch.float32
    out = env.step(moves(2, torch.Generator().manual_seed(0)), torch.rand(2, 2))
    assert (out.over.dtype, out.results["agents"].reward.dtype, out.stats["luck"].dtype) == (
        torch.bool,
        torch.float32,
        torch.float32,
    )
    assert env.whole["action", "agents"].dtype == np.int64
