"""Updates from a replay: how many are due and what is in one; the replay that learners share; its files by a checkpoint."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from shoal.algos.base import Replay, Rollout
from shoal.buffers.episodes import Episodes
from shoal.buffers.prioritised import Prioritised
from shoal.buffers.replay import ReplayBuffer, Uniform
from shoal.ops.schedules import Now
from shoal.spec import Batch, Box, Discrete, EnvSpec, Frame, Group, MultiDiscrete, Result, UserError, View
from shoal.training.loop import Loop
from shoal.training.offpolicy import OffPolicyTrainer, batch_of, transitions_of
from shoal.training.replay import cost, make_replay, memory_to_store
from shoal.training.segments import Segments
from shoal.training.settings import Settings, resolve
from shoal.tree import tree_leaves, tree_map

torch.set_num_threads(1)
SPEC = EnvSpec(
    (
        Group("wolf", "wolves", ("wolf_0", "wolf_1"), (3,), Discrete(4), masked=True),
        Group("sheep", "flock", ("sheep_0",), (2,), Box((-1.0, -1.0), (1.0, 1.0))),
        Group("dog", "flock", ("dog_0",), (2,), MultiDiscrete((3, 2))),
    )
)


def learner(groups: tuple[str, ...] = ("wolf",), **feed: Any) -> Any:
    """An algorithm that learns from a replay, as far as a trainer knows it."""
    given = {"batch": 4, "length": 1, "start": 10, "every": 2, "capacity": 24, **feed}
    return SimpleNamespace(feed=Replay(**given), groups=groups, needs_peers=False, variant=lambda: 0)


def frame(steps: int, rows: int, g: torch.Generator) -> Frame:
    """[T, B, ...]."""

    def view(n: int, width: int, legal: int | None) -> View:
        flags = [torch.rand(steps, rows, n, generator=g) < 0.5 for _ in range(3)]
        mask = None if legal is None else torch.rand(steps, rows, n, legal, generator=g) < 0.5
        return View(torch.randn(steps, rows, n, width, generator=g), *flags, mask)

    return Frame({"wolf": view(2, 3, 4), "sheep": view(1, 2, None), "dog": view(1, 2, None)})


def rollout(steps: int, rows: int, seed: int = 0) -> Batch:
    g = torch.Generator().manual_seed(seed)
    actions = {
        "wolf": torch.randint(4, (steps, rows, 2), generator=g),
        "sheep": torch.randn(steps, rows, 1, 2, generator=g),
        "dog": torch.randint(2, (steps, rows, 1, 2), generator=g),
    }
    sizes = {"wolf": 2, "sheep": 1, "dog": 1}
    results = {
        k: Result(torch.randn(steps, rows, n, generator=g, dtype=torch.float64), torch.rand(steps, rows, n, generator=g) < 0.2)
        for k, n in sizes.items()
    }
    learner_reward = {k: 2 * p.reward for k, p in results.items()}  # the learner's pay is not what is reported
    memory = {"wolf": {"hidden": torch.randn(steps, rows, 2, 5, generator=g)}, "sheep": {}, "dog": {}}
    over = torch.rand(steps, rows, generator=g) < 0.3
    return Batch(frame(steps, rows, g), frame(steps, rows, g), actions, results, over, {}, memory, learner_reward)


def made(algorithm: Any, rows: int = 2) -> ReplayBuffer:
    b = rollout(1, rows)
    replay = make_replay([algorithm], SPEC, tree_map(lambda x: x[0], b.frame), 1, rows, tree_map(lambda x: x[0], b.memory))
    replay.allocate()
    return replay


def same(a: Any, b: Any) -> bool:
    xs, ys = tree_leaves(a), tree_leaves(b)
    return len(xs) == len(ys) and all(x.dtype == y.dtype and torch.equal(x, y) for x, y in zip(xs, ys, strict=True))


# --- how many updates are due ---


def trainer(rows: int = 2, update: Any = None, **feed: Any) -> OffPolicyTrainer:
    algorithm = learner(**feed)

    def uniform(n: int) -> Tensor:
        return torch.rand(n, dtype=torch.float64, generator=torch.Generator().manual_seed(1))

    return OffPolicyTrainer(algorithm, made(algorithm, rows), update or (lambda a, b: None), uniform)


def test_updates_are_due_for_environment_steps_from_the_start_on() -> None:
    one = trainer(start=10, every=4)
    assert [one.updates_due(step) for step in (0, 9, 10, 13, 14, 17, 18, 30)] == [0, 0, 0, 0, 1, 1, 2, 5]
    many = trainer(start=10, every=0.5)  # two for every step
    assert [many.updates_due(step) for step in (9, 10, 11, 12, 20)] == [0, 0, 2, 4, 20]


@pytest.mark.parametrize("stride", [1, 3, 8, 21])
@pytest.mark.parametrize(("every", "total"), [(4, 45), (0.25, 720), (2.5, 72), (7, 25)])
def test_in_iterations_of_any_length_as_many_are_due_in_all(stride: int, every: float, total: int) -> None:
    """To step 190 from 10 on; what an iteration leaves over the next one has."""
    one, steps = trainer(start=10, every=every), [*range(0, 190, stride), 190]
    assert sum(one.updates_due(b) - one.updates_due(a) for a, b in pairwise(steps)) == total


def test_no_update_is_due_before_a_sequence_is_whole() -> None:
    one = trainer(rows=3, start=0, every=1, length=4)
    assert one.start == 12  # four steps of three rows
    assert [one.updates_due(step) for step in (9, 12, 15)] == [0, 0, 3]
    assert trainer(rows=2, start=9, every=1, length=4).start == 9


# --- what is in one ---


def test_ways_to_draw() -> None:
    assert type(trainer().sampler) is Uniform
    ranked = trainer(alpha=0.6, length=3).sampler
    assert isinstance(ranked, Prioritised)
    assert (ranked.alpha, ranked.length) == (0.6, 3)
    whole = trainer(whole=True, length=3).sampler
    assert isinstance(whole, Episodes)
    assert not whole.replace


def test_weights_make_up_for_priorities_more_and_more() -> None:
    one = trainer(alpha=0.6, beta=0.4)
    assert isinstance(one.sampler, Prioritised)
    for step, beta in ((0, 0.4), (50, 0.7), (100, 1.0), (200, 1.0)):
        one.set_schedules(Now(step, 100, 0))
        assert float(one.sampler.beta) == pytest.approx(beta)
    trainer().set_schedules(Now(0, 100, 0))  # there is nothing to schedule


def test_an_update_draws_learns_and_writes_priorities_back() -> None:
    given: list[tuple[Any, Batch]] = []

    def update(algorithm: Any, batch: Batch) -> Tensor:
        given.append((algorithm, batch))
        return torch.tensor([7.0, 8.0, 9.0, 10.0])

    one, b = trainer(update=update, alpha=1.0, length=3), rollout(8, 2)
    one.replay.put(transitions_of(b), memory_to_store([one.algorithm], b.memory))
    one.sampler.wrote(8)
    one()
    (algorithm, batch), sampler = given[0], one.sampler
    assert algorithm is one.algorithm
    assert isinstance(sampler, Prioritised)
    assert batch.over.shape == (3, 4)
    assert batch.weight is not None
    assert batch.weight.tolist() == [1.0] * 4
    assert batch.filled is None
    assert sorted(set(sampler.mass.view(-1).tolist()) - {0.0, 1.0}) == pytest.approx([7.0, 8, 9, 10])
    assert float(sampler.top) == pytest.approx(10.0)


def test_an_update_on_whole_episodes_says_what_is_filled() -> None:
    given: list[Batch] = []
    one, b = trainer(update=lambda _, batch: given.append(batch), whole=True, length=4, batch=3), rollout(8, 2)
    b.over = torch.zeros(8, 2, dtype=torch.bool)
    b.over[2, 0] = True  # one episode, of three steps
    one.replay.put(transitions_of(b), memory_to_store([one.algorithm], b.memory))
    one.sampler.wrote(8)
    one()
    filled = given[0].filled
    assert filled is not None
    assert filled.sum(0).tolist() == [3, 0, 0]
    assert same(given[0].frame["wolf"].obs[:3, 0], b.frame["wolf"].obs[:3, 0])
    assert torch.equal(given[0].memory["wolf"]["hidden"][0], b.memory["wolf"]["hidden"][0, 0])


# --- the replay that they share ---


def test_a_rollout_comes_back_as_a_batch() -> None:
    algorithm, b = learner(("wolf", "dog")), rollout(6, 2)
    replay = made(algorithm)
    assert (replay.steps, replay.rows) == (12, 2)  # 24 environment steps
    replay.put(transitions_of(b), memory_to_store([algorithm], b.memory))
    slot, row = torch.tensor([1, 3]), torch.tensor([1, 0])
    out = batch_of(*replay.windows(slot, row, 2))

    def at(x: Tensor) -> Tensor:
        return torch.stack([x[1:3, 1], x[3:5, 0]], 1)

    assert same(out.frame, tree_map(at, b.frame))
    assert same(out.next, tree_map(at, b.next))
    assert same(out.actions, tree_map(at, b.actions))
    assert same(out.over, at(b.over))
    assert same({g: p.terminated for g, p in out.results.items()}, {g: at(p.terminated) for g, p in b.results.items()})
    assert same(out.learner_reward, {g: at(x).float() for g, x in b.learner_reward.items()})  # as it was paid at the time
    assert set(out.memory) == {"wolf", "dog"}
    hidden = b.memory["wolf"]["hidden"]
    assert torch.equal(out.memory["wolf"]["hidden"], torch.stack([hidden[1, 1], hidden[3, 0]]))  # before their first steps
    assert out.frame["wolf"].legal is not None
    assert out.frame["sheep"].legal is None


@pytest.mark.parametrize("what", ["learner_reward", "actions", "results"])
def test_groups_are_known_by_name_and_not_by_order(what: str) -> None:
    """The loop pays team by team, and an algorithm may play the first and the last group together."""
    pair = EnvSpec(tuple(Group(g, g, (f"{g}_0",), (3,), Discrete(4)) for g in ("wolf", "dog")))
    g = torch.Generator().manual_seed(0)
    view = View(torch.zeros(1, 2, 1, 3), *torch.ones(3, 1, 2, 1, dtype=torch.bool))
    seen = Frame({"wolf": view, "dog": view})
    actions = {k: torch.full((1, 2, 1), n) for k, n in (("wolf", 1), ("dog", 2))}
    results = {k: Result(x.float(), x > 1) for k, x in actions.items()}
    b = Batch(
        seen, seen, actions, results, torch.rand(1, 2, generator=g) < 0.5, {}, {}, {k: x.float() for k, x in actions.items()}
    )
    replay = make_replay([learner(())], pair, tree_map(lambda x: x[0], seen), 1, 2, {})
    replay.allocate()
    setattr(b, what, dict(reversed(getattr(b, what).items())))
    replay.put(transitions_of(b), {})
    out = batch_of(*replay.windows(torch.tensor([0]), torch.tensor([0]), 1))
    assert (out.learner_reward["wolf"].item(), out.learner_reward["dog"].item()) == (1.0, 2.0)
    assert (out.actions["wolf"].item(), out.actions["dog"].item()) == (1, 2)
    assert (out.results["wolf"].terminated.item(), out.results["dog"].terminated.item()) == (False, True)


def test_only_memory_of_those_who_learn_from_the_replay_is_stored() -> None:
    memory = {"wolf": 1, "sheep": 2, "dog": 3}
    fresh: Any = SimpleNamespace(feed=Rollout(8), groups=("sheep",), needs_peers=False)
    assert memory_to_store([learner(("wolf",)), fresh, learner(("dog",))], memory) == {"wolf": 1, "dog": 3}


def refused(*learners: Any, steps: int = 1, rows: int = 2) -> str:
    b = rollout(1, rows)
    with pytest.raises(UserError) as error:
        make_replay(list(learners), SPEC, tree_map(lambda x: x[0], b.frame), steps, rows, tree_map(lambda x: x[0], b.memory))
    return str(error.value)


def test_replays_that_will_not_do() -> None:
    assert refused(learner(capacity=2000), learner(("dog",), capacity=500)) == (
        "the groups want replays of 500 and 2,000 steps: give them one --algo.capacity."
    )
    assert refused(learner(capacity=1599, length=800)) == (
        "a replay of 1,599 steps is too small for 2 rows and 800 steps at a time: --algo.capacity must be 1,600 at least "
        "(COMA's --algo.replay counts episodes)."
    )
    longer = refused(learner(capacity=20, length=3), learner(("dog",), capacity=20, length=11))
    assert "11 steps at a time: --algo.capacity must be 22 at least" in longer  # the longest of all
    assert "16 steps at a time: --algo.capacity must be 64 at least" in refused(
        learner(capacity=63), steps=16, rows=4
    )  # or the rollout


def test_a_replay_that_just_will() -> None:
    b = rollout(1, 3)
    now = tree_map(lambda x: x[0], (b.frame, b.memory))
    for capacity in (33, 35):  # whole steps of all rows: what a rollout of 8 makes whole is 4 + 8 - 1 steps
        replay = make_replay([learner(capacity=capacity, length=4)], SPEC, now[0], 8, 3, now[1])
        assert (replay.steps, replay.rows) == (11, 3)
    fresh: Any = SimpleNamespace(feed=Rollout(8), groups=("sheep",), needs_peers=False)
    assert make_replay([fresh, learner(capacity=35)], SPEC, now[0], 8, 3, now[1]).steps == 11


def test_cost_in_a_sentence() -> None:
    """A frame: wolves 2 * 3 floats, 6 flags, 8 legal; sheep and dog 2 floats and 3 flags each: 24 + 14 + 22 = 60 bytes. Two of
    them; actions 2 * 8, 2 * 4, 2 * 8; pay 4 * 4; ends 4 and 1: 120 + 40 + 16 + 5 = 181. Memory 2 * 5 floats: 40."""
    replay = made(learner(capacity=2400))
    assert replay.bytes == 2400 * 221
    assert cost(replay) == "The replay holds 2,400 steps in 530 kB on cpu."


# --- its files ---


def ring(steps: int = 10) -> ReplayBuffer:
    replay = ReplayBuffer({"id": torch.zeros(1, dtype=torch.long)}, {"past": torch.zeros(1)}, steps, 2)
    replay.allocate()
    return replay


def go_on(replay: ReplayBuffer, steps: int) -> int:
    now = int(replay.count)
    t = torch.arange(now, now + steps)[:, None] * 100 + torch.arange(2)
    replay.put({"id": t}, {"past": -t.float()})
    return now + steps


def loaded(folder: Path, spans: list[list[int]], count: int, steps: int = 10) -> tuple[ReplayBuffer, Segments]:
    replay, segments = ring(steps), Segments(folder)
    segments.load(replay, spans, count)
    return replay, segments


def check(replay: ReplayBuffer, begin: int, end: int) -> None:
    assert replay[:, 1:]["id"].flatten().tolist() == [100 * t + 1 for t in range(begin, end)]
    slot = replay.slots(torch.arange(begin, end))
    assert replay.windows(slot, slot * 0, 1)[1]["past"].tolist() == [-100.0 * t for t in range(begin, end)]
    assert int(replay.count) == end


def names(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir())


def test_a_save_adds_what_is_new_and_all_comes_back(tmp_path: Path) -> None:
    replay, segments = ring(), Segments(tmp_path)
    assert segments.save(replay, go_on(replay, 4)) == [[0, 4]]
    assert segments.save(replay, 4) == [[0, 4]]  # nothing is new
    first = (tmp_path / "000000000000-000000000004.pt").read_bytes()
    spans = segments.save(replay, go_on(replay, 3))
    assert spans == [[0, 4], [4, 7]]
    segments.prune()
    assert names(tmp_path) == ["000000000000-000000000004.pt", "000000000004-000000000007.pt"]
    assert (tmp_path / names(tmp_path)[0]).read_bytes() == first  # written once and never changed
    check(loaded(tmp_path, spans, 7)[0], 0, 7)


def test_across_the_rings_end(tmp_path: Path) -> None:
    """Ten steps a row. What a file holds of steps that were overwritten since is left where it is."""
    replay, segments = ring(), Segments(tmp_path)
    segments.save(replay, go_on(replay, 4))
    segments.save(replay, go_on(replay, 4))
    spans = segments.save(replay, go_on(replay, 5))  # thirteen: the oldest is 3
    assert spans == [[0, 4], [4, 8], [8, 13]]
    check(loaded(tmp_path, spans, 13)[0], 3, 13)
    spans = segments.save(replay, go_on(replay, 1))  # the oldest is 4: the first file is not needed
    assert spans == [[4, 8], [8, 13], [13, 14]]
    assert len(names(tmp_path)) == 4  # but it is there until the checkpoint that does without it is written
    segments.prune()
    assert len(names(tmp_path)) == 3
    check(loaded(tmp_path, spans, 14)[0], 4, 14)
    go_on(replay, 10)
    spans = segments.save(replay, go_on(replay, 7))  # more than the ring since the last save
    assert spans == [[21, 31]]
    segments.prune()
    assert names(tmp_path) == ["000000000021-000000000031.pt"]
    check(loaded(tmp_path, spans, 31)[0], 21, 31)


def test_a_save_that_was_killed_leaves_nothing_behind(tmp_path: Path) -> None:
    replay, segments = ring(), Segments(tmp_path)
    spans = segments.save(replay, go_on(replay, 4))
    segments.prune()
    # the next save wrote a file that no checkpoint names, and half of another
    segments.save(replay, go_on(replay, 2))
    (tmp_path / "000000000006-000000000009.pt.part").write_bytes(b"half")
    again, after = loaded(tmp_path, spans, 4)
    check(again, 0, 4)
    assert len(names(tmp_path)) == 3
    spans = after.save(again, go_on(again, 5))
    assert spans == [[0, 4], [4, 9]]
    after.prune()
    assert names(tmp_path) == ["000000000000-000000000004.pt", "000000000004-000000000009.pt"]
    check(loaded(tmp_path, spans, 9)[0], 0, 9)


def test_until_a_checkpoint_names_the_new_files_the_old_ones_stay(tmp_path: Path) -> None:
    replay, segments = ring(), Segments(tmp_path)
    old = segments.save(replay, go_on(replay, 6))
    segments.prune()
    go_on(replay, 10)
    segments.save(replay, 16)  # killed here
    check(loaded(tmp_path, old, 6)[0], 0, 6)


def test_files_that_are_damaged_missing_or_of_another_run(tmp_path: Path) -> None:
    replay, segments = ring(), Segments(tmp_path)
    spans = segments.save(replay, go_on(replay, 4))
    other = ReplayBuffer({"id": torch.zeros(1, 2, dtype=torch.long)}, {}, 10, 2)
    other.allocate()
    with pytest.raises(UserError, match="other shapes"):
        Segments(tmp_path).load(other, spans, 4)
    path = tmp_path / names(tmp_path)[0]
    path.write_bytes(path.read_bytes()[:200])
    with pytest.raises(UserError, match="is damaged"):
        loaded(tmp_path, spans, 4)
    path.unlink()
    with pytest.raises(UserError, match="is missing"):
        loaded(tmp_path, spans, 4)


def test_a_replay_that_was_never_saved(tmp_path: Path) -> None:
    replay, segments = ring(), Segments(tmp_path / "replay")
    assert segments.save(replay, 0) == []
    segments.prune()  # no folder yet
    check(loaded(tmp_path, [], 0)[0], 0, 0)


def test_a_window_has_the_memory_from_before_its_first_step_wherever_it_begins() -> None:
    """A net unrolled from there remembers at every step what was remembered when it was played."""
    algo = {"rollout": 6, "capacity": 400, "normalise_obs": False}
    sections = {"algo": algo, "net": {"memory": "gru", "hidden": (8,), "memory_width": 4}}
    loop = Loop(resolve(Settings("iql", "probe_deaths", {"envs": 4, "quiet": True, "device": "cpu"}, sections)))
    loop.iterate()
    loop.iterate()
    assert loop.replay is not None
    (learner,) = loop.learners
    row = torch.arange(4)
    whole, before = loop.replay.windows(torch.zeros(4, dtype=torch.long), row, 12)
    batch = batch_of(whole, before)
    view = batch.frame["agents"]
    with torch.no_grad():
        obs = learner.observations["agents"].actor_input(batch.frame)  # type: ignore[operator]
        _, after = learner._q_net("agents")(obs, before["agents"], view.start, view.active)  # type: ignore[operator]
    for t in range(1, 12):
        _, held = loop.replay.windows(torch.full((4,), t), row, 1)
        torch.testing.assert_close(held["agents"]["hidden"], after["hidden"][t - 1])
    assert (after["hidden"][3] != after["hidden"][2]).any()
