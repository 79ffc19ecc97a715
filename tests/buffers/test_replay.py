"""The replay's ring and the ways to draw from it, by hand and beside a slow model of it in plain Python."""

from __future__ import annotations

import math
import random
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor

from shoal.buffers.capacity import free_bytes, size
from shoal.buffers.episodes import Episodes
from shoal.buffers.prioritised import Prioritised
from shoal.buffers.replay import ReplayBuffer, Sample, Uniform
from shoal.spec import Frame, UserError, View
from shoal.tree import tree_leaves, tree_map

torch.set_num_threads(1)
LAST = 1 - 2**-53  # the largest number below one that is drawn
CLOCK = {"id": torch.zeros(1, dtype=torch.long)}


def clocks(begin: int, steps: int, rows: int) -> dict[str, Tensor]:
    """[T, B]: 100 times the step and the row."""
    return {"id": torch.arange(begin, begin + steps)[:, None] * 100 + torch.arange(rows)}


def ring(steps: int, rows: int, written: int = 0, initial_memory: bool = False) -> ReplayBuffer:
    """A ring of `clocks`, so many steps of which are written, one at a time."""
    first = {"past": torch.zeros(1, dtype=torch.long)} if initial_memory else {}
    replay = ReplayBuffer(CLOCK, first, steps, rows)
    replay.allocate()
    for _ in range(written):
        put(replay, 1)
    return replay


def put(replay: ReplayBuffer, steps: int, *samplers: Uniform) -> None:
    transition = clocks(int(replay.count), steps, replay.rows)
    replay.put(transition, {"past": -transition["id"]} if replay.initial_memory.leaves else {})
    for s in samplers:
        s.wrote(steps)


def ids(replay: ReplayBuffer, sample: Sample, length: int = 1) -> Tensor:
    return replay.windows(sample.slot, sample.row, length)[0]["id"]


def even(n: int, place: float = 0.5) -> Tensor:
    """A grid of so many numbers in [0, 1)."""
    return (torch.arange(n, dtype=torch.float64) + place) / n


# --- the ring ---


def world(steps: int, rows: int, seed: int) -> tuple[Any, Any]:
    """Trees of [T, B, ...]: dicts, dataclasses, tuples and nothing, in five dtypes; and what is before each."""
    g = torch.Generator().manual_seed(seed)

    def of(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.randint(0, 200, (steps, rows, *shape), generator=g).to(dtype)

    def flag(*shape: int) -> Tensor:
        return torch.rand(steps, rows, *shape, generator=g) < 0.25

    seen = {"picture": of(2, 3, 4, dtype=torch.uint8), "numbers": of(2, 5)}
    view = View(seen, flag(2), flag(2), flag(2), None)
    other = View(of(1, 3), flag(1), flag(1), flag(1), flag(1, 4))
    transition = (Frame({"a": view, "b": other}), None, {"n": of(2, dtype=torch.long)}, of(dtype=torch.float64), flag())
    return transition, {"a": {"hidden": of(2, 3)}, "b": {}}


def same(a: Any, b: Any) -> bool:
    xs, ys = tree_leaves(a), tree_leaves(b)
    return len(xs) == len(ys) and all(x.dtype == y.dtype and torch.equal(x, y) for x, y in zip(xs, ys, strict=True))


def test_trees_come_back_as_they_went_in() -> None:
    transitions, initial_memory = world(6, 3, 0)
    replay = ReplayBuffer(tree_map(lambda x: x[0], transitions), tree_map(lambda x: x[0], initial_memory), 6, 3)
    replay.allocate()
    replay.put(transitions, initial_memory)
    out, past = replay.windows(torch.tensor([1, 4, 0]), torch.tensor([2, 0, 1]), 2)
    frame, nothing, actions, number, over = out
    assert isinstance(frame, Frame)
    assert isinstance(frame["b"], View)
    assert frame["a"].legal is None
    assert frame.state is None
    assert nothing is None
    assert frame["a"].obs["picture"].shape == (2, 3, 2, 3, 4)
    assert (actions["n"].dtype, number.dtype, over.dtype) == (torch.long, torch.float64, torch.bool)
    assert same(out, tree_map(lambda x: torch.stack([x[1:3, 2], x[4:6, 0], x[0:2, 1]], 1), transitions))
    assert past["b"] == {}
    assert same(past, tree_map(lambda x: torch.stack([x[1, 2], x[4, 0], x[0, 1]]), initial_memory))


def test_bytes() -> None:
    """A record of `world`: uint8 24; float32 2 * 5 + 3 = 13; bool 3 * 2 + 3 + 4 + 1 = 14; long 2; float64 1. Before it 6 more
    float32. 24 + 13 * 4 + 14 + 2 * 8 + 8 = 114, and 24."""
    transitions, initial_memory = (tree_map(lambda x: x[0], tree) for tree in world(1, 3, 0))
    replay = ReplayBuffer(transitions, initial_memory, 7, 3)
    assert replay.bytes == 7 * 3 * (114 + 24)
    assert replay.transitions.store == {}  # nothing is taken until it is asked for
    replay.allocate()
    stores = [*replay.transitions.store.values(), *replay.initial_memory.store.values()]
    assert sum(x.numel() * x.element_size() for x in stores) == replay.bytes
    assert ReplayBuffer(transitions, {}, 7, 3).bytes == 7 * 3 * 114


def test_more_memory_than_there_is_is_refused() -> None:
    replay = ReplayBuffer({"x": torch.zeros(1, 25, dtype=torch.uint8)}, {}, 1000, 4)  # 100,000 bytes
    with pytest.raises(UserError) as told:
        replay.allocate(lambda _: 30_000)  # of which nine tenths are for it
    assert str(told.value) == (
        "a replay of 4,000 steps takes 100 kB on cpu, and 27 kB can be had: give a smaller --algo.capacity, of 1,080 at most "
        "(COMA's --algo.replay counts episodes)."
    )
    assert replay.transitions.store == {}
    with pytest.raises(UserError, match="takes 100 kB"):
        replay.allocate(lambda _: 111_111)
    replay.allocate(lambda _: 111_112)
    replay.allocate(lambda _: None)  # nobody says
    assert replay.transitions.store[torch.uint8].shape == (1000, 4, 25)


def test_no_machine_has_room_for_everything() -> None:
    free = free_bytes(torch.device("cpu"))
    assert free is not None
    assert 10**6 < free < 10**15
    with pytest.raises(UserError, match="GB can be had"):
        ReplayBuffer({"x": torch.zeros(1, 1000)}, {}, 10**12, 1).allocate()


def test_sizes_in_words() -> None:
    assert [size(n) for n in (0, 999, 1000, 25_600, 1.5e6, 12.34e9)] == [
        "0 bytes", "999 bytes", "1 kB", "25.6 kB", "1.5 MB", "12.3 GB",
    ]  # fmt: skip


def test_slices_are_by_age_and_row() -> None:
    replay = ring(5, 3, 3)
    assert replay[:, :]["id"].tolist() == [[0, 1, 2], [100, 101, 102], [200, 201, 202]]
    put(replay, 4)  # steps 0 and 1 are overwritten
    assert replay[:, 1:2]["id"].tolist() == [[201], [301], [401], [501], [601]]
    assert replay[:2, ::2]["id"].tolist() == [[200, 202], [300, 302]]
    assert replay[-1:, :]["id"].tolist() == [[600, 601, 602]]
    assert ring(5, 3)[:, :]["id"].shape == (0, 3)


def test_what_is_drawn_is_a_copy_and_the_ring_stays_where_it_is() -> None:
    replay = ring(4, 2, 4)
    address = replay.transitions.store[torch.long].data_ptr()
    out = replay.windows(torch.tensor([0]), torch.tensor([1]), 2)[0]["id"]
    put(replay, 4)
    assert out.tolist() == [[1], [101]]
    assert replay.transitions.store[torch.long].data_ptr() == address


def test_windows_go_on_at_the_rings_beginning_and_have_what_was_before_their_first() -> None:
    replay = ring(5, 2, 7, initial_memory=True)  # slots hold steps 5 6 2 3 4
    transitions, initial_memory = replay.windows(torch.tensor([3, 2]), torch.tensor([0, 1]), 4)
    assert transitions["id"].T.tolist() == [[300, 400, 500, 600], [201, 301, 401, 501]]
    assert initial_memory["past"].tolist() == [-300, -201]


@pytest.mark.parametrize(
    "wrong",
    [
        lambda x: x[:, :1],  # rows
        lambda x: x.int(),  # dtype
        lambda x: x[..., None],  # shape
        lambda x: x.float(),
    ],
)
def test_what_does_not_fit_is_refused(wrong: Any) -> None:
    replay = ring(5, 2, 1, initial_memory=True)
    good = clocks(1, 2, 2)
    with pytest.raises(UserError, match=r"tensor 0 of a transition is .* for each of 2 rows .* does not fit"):
        replay.put({"id": wrong(good["id"])}, {"past": good["id"]})
    with pytest.raises(UserError, match="does not fit"):
        replay.put(good, {"past": wrong(good["id"])})
    assert int(replay.count) == 1


def test_more_or_fewer_tensors_or_steps_are_refused() -> None:
    replay, good = ring(5, 2), clocks(0, 2, 2)
    with pytest.raises(UserError, match="1 tensors a transition was given 2"):
        replay.put({**good, "more": good["id"]}, {})
    with pytest.raises(UserError, match="0 tensors a transition was given 1"):
        replay.put(good, {"past": good["id"]})
    with pytest.raises(UserError, match=r"a replay of 5 steps a row was given 6 at once: give it a larger --algo.capacity"):
        put(replay, 6)
    put(replay, 5)
    assert replay[:, :]["id"].tolist() == clocks(0, 5, 2)["id"].tolist()


def test_what_was_read_can_be_written() -> None:
    transitions, initial_memory = world(9, 3, 0)
    one, two = (
        ReplayBuffer(tree_map(lambda x: x[0], transitions), tree_map(lambda x: x[0], initial_memory), 5, 3) for _ in range(2)
    )
    one.allocate()
    for t in (0, 3, 6):
        part = tree_map(lambda x, t=t: x[t : t + 3], (transitions, initial_memory))
        one.put(*part)
    two.allocate()
    two.write(4, 9, one.read(4, 9))
    two.count.fill_(9)
    assert same(one[:, :], two[:, :])
    slot, row = torch.arange(5), torch.tensor([0, 1, 2, 0, 1])
    assert same(one.windows(slot, row, 2), two.windows(slot, row, 2))
    other = ring(5, 3)
    with pytest.raises(UserError, match="other shapes"):
        other.write(4, 9, one.read(4, 9))
    with pytest.raises(UserError, match="other shapes"):
        two.write(4, 8, one.read(4, 9))


# --- every window as likely as any other ---


def test_uniform_reaches_every_window_once_and_no_other() -> None:
    replay = ring(5, 3, 4)
    sample = Uniform(replay, 1).draw(even(12), 12)
    assert ids(replay, sample)[0].tolist() == clocks(0, 4, 3)["id"].flatten().tolist()
    assert sample.weight is None
    assert sample.filled is None
    put(replay, 3)  # seven: steps 2 to 6 are there
    assert ids(replay, Uniform(replay, 1).draw(even(15), 15))[0].tolist() == clocks(2, 5, 3)["id"].flatten().tolist()


def test_uniform_windows_end_with_the_newest_moment() -> None:
    replay = ring(5, 2, 7)  # steps 2 to 6: windows of 3 begin at 2, 3 and 4
    sample = Uniform(replay, 3).draw(even(6), 6)
    windows = ids(replay, sample, 3).T.tolist()
    assert windows == [[t * 100 + b + 100 * k for k in range(3)] for t in (2, 3, 4) for b in (0, 1)]
    whole = Uniform(replay, 5)  # as long as the ring
    assert ids(replay, whole.draw(even(2), 2), 5).T.tolist() == [[200, 300, 400, 500, 600], [201, 301, 401, 501, 601]]


def test_uniform_at_the_edges_of_chance() -> None:
    replay = ring(5, 3, 7)
    edges = torch.tensor([0.0, LAST], dtype=torch.float64)
    assert ids(replay, Uniform(replay, 1).draw(edges, 2))[0].tolist() == [200, 602]


def test_uniform_on_a_large_ring_hits_odd_slots() -> None:
    """Of 2^27 slots float32 knows, in the upper half, every eighth."""
    replay = ReplayBuffer(CLOCK, {}, 2**27, 1)  # never allocated
    replay.count.fill_(2**27)
    noise = torch.rand(20_000, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    slot = Uniform(replay, 1).draw(noise, 20_000).slot
    share = (slot % 8).bincount(minlength=8) / 20_000
    assert share.tolist() == pytest.approx([0.125] * 8, abs=0.01)
    assert (slot[slot >= 2**26] % 2).double().mean().item() == pytest.approx(0.5, abs=0.02)


# --- by priority ---


def ranked() -> tuple[ReplayBuffer, Prioritised]:
    """Three steps of two rows, alpha 1/2: priorities 4 1, 1 9, 16 1, and so masses 2 1 1 3 4 1 of 12."""
    replay = ring(6, 2)
    sampler = Prioritised(replay, 1, 0.5, floor=0.0)
    put(replay, 3, sampler)
    sampler.learnt(Sample(torch.tensor([0, 1, 2]), torch.tensor([0, 1, 0])), torch.tensor([4.0, 9, 16]))
    return replay, sampler


def test_priorities_are_how_often_windows_are_drawn() -> None:
    """120 numbers spread evenly, thirty in each of four shares: ten for each unit of mass, exactly."""
    replay, sampler = ranked()
    counts: Counter[int] = Counter()
    for u in even(30).tolist():
        sample = sampler.draw(torch.full((4,), u, dtype=torch.float64), 4)
        assert ((sample.slot * 2 + sample.row).diff() >= 0).all()  # one from each share, in order
        counts.update(ids(replay, sample)[0].tolist())
    assert counts == {0: 20, 1: 10, 100: 10, 101: 30, 200: 40, 201: 10}


def test_priorities_and_real_chance() -> None:
    """Chi-square of 12,000 draws over six windows: beyond 20.5 (five degrees of freedom) one time in a thousand."""
    _, sampler = ranked()
    noise = torch.rand(12_000, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    places = torch.cat([d.slot * 2 + d.row for d in (sampler.draw(u, 1) for u in noise.split(1))])
    wanted = torch.tensor([2.0, 1, 1, 3, 4, 1]) * 1000
    assert ((places.bincount(minlength=6) - wanted) ** 2 / wanted).sum().item() < 20.5


def test_importance_weights() -> None:
    """Masses end at 2 3 4 7 11 12; shares of 3 begin at 0 3 6 9. Drawn are masses 2, 1, 3 and, at the end, 1."""
    _, sampler = ranked()
    noise = torch.tensor([0.0, 0.0, 0.0, LAST], dtype=torch.float64)
    sample = sampler.draw(noise, 4)
    assert list(zip(sample.slot.tolist(), sample.row.tolist(), strict=True)) == [(0, 0), (1, 0), (1, 1), (2, 1)]
    # n P = 6 * (2 1 3 1)/12 = 1, 1/2, 3/2, 1/2; to the power -1: 1 2 2/3 2, over 2
    assert sample.weight is not None
    assert sample.weight.dtype == torch.float32
    assert sample.weight.tolist() == pytest.approx([0.5, 1.0, 1 / 3, 1.0])
    sampler.beta.fill_(0.5)  # 1, 1.41421, 0.81650, 1.41421 over 1.41421
    half = sampler.draw(noise, 4).weight
    assert half is not None
    assert half.tolist() == pytest.approx([0.7071068, 1.0, 0.5773503, 1.0])
    sampler.beta.fill_(0.0)
    none = sampler.draw(noise, 4).weight
    assert none is not None
    assert none.tolist() == [1.0] * 4
    # of those drawn alone: without a mass of 1 among them the largest is that of mass 2
    sampler.beta.fill_(1.0)
    few = sampler.draw(torch.tensor([0.0, 0.0], dtype=torch.float64), 2)  # at 0 and 6: masses 2 and 3
    assert few.weight is not None
    assert few.weight.tolist() == pytest.approx([1.0, 2 / 3])


def test_what_is_new_has_the_highest_priority_so_far() -> None:
    replay, sampler = ranked()
    put(replay, 1, sampler)
    assert sampler.mass.view(-1)[:8].tolist() == [2, 1, 1, 3, 4, 1, 4, 4]  # the root of 16
    put(replay, 6, sampler)  # all is overwritten, the 16 as well, and was seen
    assert sampler.mass.view(-1)[:12].tolist() == [4.0] * 12
    sampler.learnt(Sample(torch.tensor([0]), torch.tensor([0])), torch.tensor([0.25]))
    assert float(sampler.top) == 16
    assert float(sampler.sums.sum()) == 44.5


def test_before_anything_is_learnt_all_are_alike_and_nothing_is_ever_without_a_chance() -> None:
    replay = ring(6, 2)
    sampler = Prioritised(replay, 1, 0.6)
    put(replay, 2, sampler)
    assert sampler.mass.view(-1).tolist() == [1.0] * 4 + [0.0] * 12
    sample = sampler.draw(even(4) * 0, 4)
    assert sample.weight is not None
    assert sample.weight.tolist() == [1.0] * 4
    sampler.learnt(sample, torch.zeros(4))
    assert (sampler.mass.view(-1)[:4] > 0).all()


def starts(sampler: Prioritised) -> list[int]:
    """Slots of one row at which a window can be drawn."""
    return sampler.mass.view(-1).nonzero().flatten().tolist()


def test_windows_that_are_not_whole_or_were_overwritten_are_never_drawn() -> None:
    """A ring of five, windows of three; slots by the steps that they hold."""
    replay = ring(5, 1)
    sampler = Prioritised(replay, 3, 1.0, floor=0.0)
    put(replay, 2, sampler)
    assert starts(sampler) == []
    put(replay, 1, sampler)  # 0 1 2
    assert starts(sampler) == [0]
    sampler.learnt(Sample(torch.tensor([0]), torch.tensor([0])), torch.tensor([8.0]))
    put(replay, 2, sampler)  # 0 1 2 3 4
    assert sampler.mass.view(-1)[:5].tolist() == [8.0, 8.0, 8.0, 0.0, 0.0]
    put(replay, 1, sampler)  # 5 1 2 3 4: windows from steps 1, 2 and 3
    assert starts(sampler) == [1, 2, 3]
    put(replay, 3, sampler)  # 5 6 7 8 4: from 4, 5 and 6
    assert starts(sampler) == [0, 1, 4]
    put(replay, 5, sampler)  # 10 11 12 13 9: from 9, 10 and 11
    assert starts(sampler) == [0, 1, 4]
    sample = sampler.draw(even(300), 300)
    windows = ids(replay, sample, 3) // 100
    assert set(map(tuple, windows.T.tolist())) == {(9, 10, 11), (10, 11, 12), (11, 12, 13)}


def test_blocks_meet_without_a_gap() -> None:
    """Forty places in blocks of sixteen. All are alike: the k-th share is place k, from its first number to its last."""
    replay = ring(20, 2)
    sampler = Prioritised(replay, 1, 1.0, floor=0.0)
    assert tuple(sampler.mass.shape) == (3, 16)
    put(replay, 20, sampler)
    for u in (0.0, 0.5, 1 - 2**-40):
        sample = sampler.draw(torch.full((40,), u, dtype=torch.float64), 40)
        assert (sample.slot * 2 + sample.row).tolist() == list(range(40))
    # all of the mass on both sides of a boundary, and at the end; what is between has none
    everything = torch.arange(40)
    masses = torch.zeros(40)
    masses[[15, 16, 31, 32, 39]] = torch.tensor([1.0, 2, 1, 2, 2])
    sampler.learnt(Sample(everything // 2, everything % 2), masses)
    for u in (0.0, 0.5, 1 - 2**-40):
        sample = sampler.draw(torch.full((8,), u, dtype=torch.float64), 8)
        assert (sample.slot * 2 + sample.row).tolist() == [15, 16, 16, 31, 32, 32, 39, 39]
    sampler.learnt(Sample(torch.tensor([7, 8]), torch.tensor([1, 0])), torch.tensor([4.0, 0]))  # places 15 and 16
    assert sampler.sums.tolist() == [4.0, 1.0, 4.0]


def test_sums_never_drift() -> None:
    """Thousands of writes between a millionth and a million; then all are small, and nothing is left of the large ones."""
    g, replay = torch.Generator().manual_seed(0), ring(41, 3)
    sampler = Prioritised(replay, 2, 1.0)  # 68 binary places apart: no float64 holds both
    put(replay, 41, sampler)
    for k in range(3000):
        sample = sampler.draw(torch.rand(4, dtype=torch.float64, generator=g), 4)
        place = sample.slot * 3 + sample.row
        each = 10 ** (12 * torch.rand(41 * 3, generator=g) - 6)
        sampler.learnt(sample, each[place])  # the same for the same
        if k % 7 == 0:
            put(replay, 1, sampler)
    torch.testing.assert_close(sampler.sums, sampler.mass.double().sum(-1), rtol=1e-14, atol=0)
    place = sampler.mass.view(-1).nonzero().flatten()
    assert len(place) == 40 * 3
    for part in place.split(4):
        sampler.learnt(Sample(part // 3, part % 3), torch.full((len(part),), 1e-6))
    each = float(sampler.mass.view(-1)[place[0]])
    assert float(sampler.sums.sum()) == pytest.approx(120 * each, rel=1e-12)
    sample = sampler.draw(even(1, 0.5).expand(120), 120)
    assert torch.equal(sample.slot * 3 + sample.row, place)


def test_small_masses_beside_a_large_one_are_still_drawn() -> None:
    """In float32 sums beyond 2^24 a one more is lost."""
    replay = ring(64, 1)
    sampler = Prioritised(replay, 1, 1.0, floor=0.0)
    put(replay, 64, sampler)
    sampler.learnt(Sample(torch.tensor([0, 17]), torch.tensor([0, 0])), torch.tensor([2.0**30, 2.0**30]))
    total = 2**31 + 62
    aims = torch.tensor([2**30 + 0.5, 2**30 + 3.5, 2**30 + 15.5, 2**31 + 15.5, 2**31 + 61.5], dtype=torch.float64)
    found = [int(sampler.draw(a[None] / total, 1).slot) for a in aims]
    assert found == [1, 4, 16, 17, 63]


def test_a_sampler_by_priority_says_what_it_needs_and_is_saved() -> None:
    replay, sampler = ranked()
    with pytest.raises(AssertionError, match="says what was learnt"):
        sampler.learnt(Sample(torch.tensor([0]), torch.tensor([0])), None)
    other = Prioritised(replay, 1, 0.5, floor=0.0)
    address = other.mass.data_ptr()
    other.load_state_dict(sampler.state_dict())
    assert other.mass.data_ptr() == address  # what is captured looks there
    noise = even(50)
    assert all(torch.equal(a, b) for a, b in zip(other.draw(noise, 50)[:3], sampler.draw(noise, 50)[:3], strict=True))  # type: ignore[arg-type]
    put(replay, 1)
    other.wrote(1)
    assert other.mass.view(-1)[6:8].tolist() == [4.0, 4.0]  # `top` as well
    saved = sampler.state_dict()
    sampler.wrote(1)
    assert float(saved["mass"].sum()) == 12  # a copy


# --- whole episodes ---


def playing(steps: int, rows: int, length: int, replace: bool = False) -> tuple[ReplayBuffer, Episodes]:
    transition = {**CLOCK, "over": torch.zeros(1, dtype=torch.bool)}
    replay = ReplayBuffer(transition, {"past": torch.zeros(1, dtype=torch.long)}, steps, rows)
    replay.allocate()
    return replay, Episodes(replay, length, lambda m: m["over"], replace)


def play(replay: ReplayBuffer, sampler: Episodes, *ends: str) -> None:
    """Steps of each row: x where an episode ends."""
    over = torch.tensor([[c == "x" for c in row] for row in ends]).T
    transition = clocks(int(replay.count), len(over), replay.rows)
    replay.put({**transition, "over": over}, {"past": -transition["id"]})
    sampler.wrote(len(over))


def episodes(replay: ReplayBuffer, sampler: Episodes, noise: Tensor, count: int) -> list[list[int]]:
    """What is filled of each window that is drawn."""
    sample = sampler.draw(noise, count)
    windows = ids(replay, sample, sampler.length)
    assert sample.filled is not None
    assert sample.filled.shape == windows.shape == (sampler.length, count)
    assert (sample.filled.long().diff(dim=0) <= 0).all()  # nothing after an episode's last step
    return [w[f].tolist() for w, f in zip(windows.T, sample.filled.T, strict=True)]


def among(sampler: Episodes, seed: int = 0) -> Tensor:
    return torch.rand(sampler.draws(0), dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


FIRST_EIGHT = [[0, 100, 200], [300], [400, 500, 600], [1, 101], [201, 301, 401, 501]]


def eight(replace: bool = False) -> tuple[ReplayBuffer, Episodes]:
    """A ring of eight steps of two rows, written in pieces that episodes run across."""
    replay, sampler = playing(8, 2, 4, replace)
    play(replay, sampler, "..x", ".x.")  # row 0: 0 to 2, 3, 4 to 6
    play(replay, sampler, "x", ".")  # row 1: 0 and 1, 2 to 5
    play(replay, sampler, "..x.", ".x..")
    return replay, sampler


def test_episodes_are_whole_and_none_comes_twice() -> None:
    replay, sampler = eight()
    assert sampler.draws(5) == 16  # a number for each place
    for seed in range(5):
        assert sorted(episodes(replay, sampler, among(sampler, seed), 5)) == sorted(FIRST_EIGHT)
    sample = sampler.draw(among(sampler), 5)
    _, past = replay.windows(sample.slot, sample.row, 4)
    assert sorted((-past["past"]).tolist()) == [0, 1, 201, 300, 400]  # what was before their first steps
    assert sampler.clock.tolist() == [1, 2]  # under way


def test_fewer_episodes_than_asked_for_leave_the_rest_empty() -> None:
    replay, sampler = eight()
    given = episodes(replay, sampler, among(sampler), 9)
    assert sorted(given) == sorted(FIRST_EIGHT + [[]] * 4)
    empty, fresh = playing(8, 2, 4)
    play(empty, fresh, "...", "...")
    assert episodes(empty, fresh, among(fresh), 3) == [[]] * 3
    fresh.replace = True
    assert episodes(empty, fresh, even(3), 3) == [[]] * 3


def test_more_episodes_asked_for_than_the_ring_has_places() -> None:
    replay, sampler = eight()
    assert sorted(episodes(replay, sampler, among(sampler), 20)) == sorted(FIRST_EIGHT + [[]] * 15)


def test_an_episode_that_lost_its_first_step_is_no_candidate() -> None:
    replay, sampler = eight()
    play(replay, sampler, ".x", "..")  # steps 8 and 9 in slots 0 and 1: those from steps 0 are gone; 7 to 9 runs across the end
    there = [[201, 301, 401, 501], [300], [400, 500, 600], [700, 800, 900]]
    assert sorted(episodes(replay, sampler, among(sampler), 4)) == sorted(there)
    play(replay, sampler, ".", "x")  # step 10 in slot 2: 2 to 5 has lost its first; 6 to 10 is longer than a window of four
    assert sorted(episodes(replay, sampler, among(sampler), 5)) == sorted([*there[1:], [601, 701, 801, 901], []])
    play(replay, sampler, "." * 8, "." * 8)  # and all are gone
    assert episodes(replay, sampler, among(sampler), 2) == [[], []]
    assert sampler.clock.tolist() == [9, 8]


def test_episodes_of_one_step_and_as_long_as_the_ring() -> None:
    replay, sampler = playing(4, 1, 4)
    play(replay, sampler, "xxxx")
    assert sorted(episodes(replay, sampler, among(sampler), 4)) == [[0], [100], [200], [300]]
    play(replay, sampler, "...")
    play(replay, sampler, "x")
    assert episodes(replay, sampler, among(sampler), 1) == [[400, 500, 600, 700]]
    play(replay, sampler, ".")
    assert episodes(replay, sampler, among(sampler), 1) == [[]]


def test_episodes_are_as_likely_as_each_other() -> None:
    """Short ones as often as long ones. 4,000 draws of one in five, chi-square with four degrees: 18.5 once in a thousand."""
    _, sampler = eight()
    noise = torch.rand(4000, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    counts = Counter(int(d.slot) * 2 + int(d.row) for d in (sampler.draw(u, 1) for u in noise))
    assert set(counts) == {0 * 2, 3 * 2, 4 * 2, 0 * 2 + 1, 2 * 2 + 1}
    assert sum((c - 800) ** 2 / 800 for c in counts.values()) < 18.5


def test_with_replacement_a_grid_gives_each_as_often() -> None:
    replay, sampler = eight(replace=True)
    assert sampler.draws(5) == 5
    counts = Counter(map(tuple, episodes(replay, sampler, even(50), 50)))
    assert counts == {tuple(e): 10 for e in FIRST_EIGHT}
    edges = torch.tensor([0.0, 0.0, LAST], dtype=torch.float64)
    ends = [[1, 101], [1, 101], [400, 500, 600]]  # by where they end: slot 1 of row 1 is first, slot 6 of row 0 last
    assert episodes(replay, sampler, edges, 3) == ends


def test_episodes_are_saved() -> None:
    replay, sampler = eight()
    other = Episodes(replay, 4, lambda m: m["over"])
    other.load_state_dict(sampler.state_dict())
    assert sorted(episodes(replay, other, among(other), 5)) == sorted(FIRST_EIGHT)
    play(replay, other, "x", "x")  # the clocks as well: 7 to 8, and 6 to 8
    assert [700, 800] in episodes(replay, other, among(other), 5)
    assert [601, 701, 801] in episodes(replay, other, among(other), 5)


# --- beside a slow model ---


class Slow:
    """Lists of all that ever was."""

    def __init__(self, steps: int, rows: int, length: int):
        self.steps, self.rows, self.length = steps, rows, length
        self.transitions: list[Any] = []  # [B, ...] of every step
        self.initial_memory: list[Any] = []
        self.mass: dict[tuple[int, int], float] = {}  # of windows by first step and row
        self.top = 1.0
        self.ends: list[tuple[int, int, int]] = []  # first step, last, row
        self.began = [0] * rows

    @property
    def oldest(self) -> int:
        return max(0, len(self.transitions) - self.steps)

    def put(self, transitions: Any, initial_memory: Any, over: Tensor) -> None:
        for t in range(len(over)):
            now = len(self.transitions)
            self.transitions.append(tree_map(lambda x, t=t: x[t], transitions))
            self.initial_memory.append(tree_map(lambda x, t=t: x[t], initial_memory))
            for b in range(self.rows):
                if now - self.length + 1 >= 0:
                    self.mass[now - self.length + 1, b] = self.top
                if over[t, b]:
                    self.ends.append((self.began[b], now, b))
                    self.began[b] = now + 1
        self.mass = {k: m for k, m in self.mass.items() if k[0] >= self.oldest}

    def window(self, first: int, row: int, length: int) -> Any:
        each = [tree_map(lambda x: x[row], self.transitions[t]) for t in range(first, first + length)]
        return tree_map(lambda *xs: torch.stack(xs), each[0], *each[1:])


@pytest.mark.parametrize("seed", range(8))
def test_everything_as_in_the_slow_model(seed: int) -> None:
    rng = random.Random(seed)
    steps, rows = [(5, 1), (6, 3), (9, 2), (17, 4), (40, 1), (13, 5), (7, 2), (33, 3)][seed]
    length = rng.randint(1, min(steps, 5))
    example = tree_map(lambda x: x[0], world(1, rows, 0))
    replay = ReplayBuffer(*example, steps, rows)
    replay.allocate()
    slow, uniform, ranks = Slow(steps, rows, length), Uniform(replay, length), Prioritised(replay, length, 1.0, floor=0.0)
    whole = Episodes(replay, steps, lambda m: m[-1])
    compared = Counter[str]()

    def step_of(slot: Tensor) -> list[int]:
        newest = len(slow.transitions) - 1
        return [newest - (newest - s) % steps for s in slot.tolist()]

    for k in range(40):
        transitions, initial_memory = world(rng.choice([1, 1, 2, 3, rng.randint(1, steps)]) if k else 1, rows, 1000 * seed + k)
        if len(transitions[-1]) > steps:
            continue
        replay.put(transitions, initial_memory)
        slow.put(transitions, initial_memory, transitions[-1])
        for sampler in (uniform, ranks, whole):
            sampler.wrote(len(transitions[-1]))
        assert int(replay.count) == len(slow.transitions)
        kept = slow.transitions[slow.oldest :]
        assert same(replay[:, :], tree_map(lambda *xs: torch.stack(xs), kept[0], *kept[1:]))

        last = len(slow.transitions) - length
        wanted = [(t, b) for t in range(slow.oldest, last + 1) for b in range(rows)]
        if wanted:
            sample = uniform.draw(even(len(wanted)), len(wanted))
            assert list(zip(step_of(sample.slot), sample.row.tolist(), strict=True)) == wanted
            out, past = replay.windows(sample.slot, sample.row, length)
            for j, (t, b) in enumerate(wanted):
                assert same(tree_map(lambda x, j=j: x[:, j], out), slow.window(t, b, length))
                assert same(tree_map(lambda x, j=j: x[j], past), tree_map(lambda x, b=b: x[b], slow.initial_memory[t]))
                compared["windows"] += 1

        place = torch.arange(steps * rows)
        mass = ranks.mass.view(-1)
        assert (mass[steps * rows :] == 0).all()
        known = zip(step_of(place // rows), (place % rows).tolist(), mass.tolist(), strict=False)
        assert {(t, b): m for t, b, m in known if m} == slow.mass
        assert math.fsum(slow.mass.values()) == float(ranks.sums.sum())
        if slow.mass:
            noise = torch.tensor([rng.random() for _ in range(6)], dtype=torch.float64)
            sample = ranks.draw(noise, 6)
            got = list(zip(step_of(sample.slot), sample.row.tolist(), strict=True))
            total = sum(slow.mass.values())
            weights = [total / len(slow.mass) / slow.mass[x] for x in got]
            assert sample.weight is not None
            assert sample.weight.tolist() == pytest.approx([w / max(weights) for w in weights])
            for x in got:
                slow.mass[x] = float(rng.randint(1, 50))
            slow.top = max(slow.top, *(slow.mass[x] for x in got))
            ranks.learnt(sample, torch.tensor([slow.mass[x] for x in got]))
            compared["draws"] += 1

        there = sorted((a, b, row) for a, b, row in slow.ends if a >= slow.oldest)
        noise = torch.rand(whole.draws(1), dtype=torch.float64, generator=torch.Generator().manual_seed(k))
        sample = whole.draw(noise, steps * rows)
        assert sample.filled is not None
        lasted, firsts_at = sample.filled.sum(0), step_of(sample.slot)
        got_whole = sorted(
            (t, t + n - 1, b) for t, n, b in zip(firsts_at, lasted.tolist(), sample.row.tolist(), strict=True) if n
        )
        assert got_whole == there
        compared["episodes"] += len(there)
    assert compared["windows"] > 50
    assert compared["draws"] > 20
    assert compared["episodes"] > 20
