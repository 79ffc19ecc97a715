"""Each probe stepped by hand, with numbers worked out on paper."""

from __future__ import annotations

from itertools import permutations, product
from typing import Any

import pytest
import torch
from torch import Tensor

from shoal.envs.probe.base import Probe
from shoal.envs.probe.probe_constant import ProbeConstant
from shoal.envs.probe.probe_copy import ProbeCopy
from shoal.envs.probe.probe_deaths import ProbeDeaths
from shoal.envs.probe.probe_delay import ProbeDelay
from shoal.envs.probe.probe_illegal import ProbeIllegal
from shoal.envs.probe.probe_image import ProbeImage
from shoal.envs.probe.probe_matrix import ProbeMatrix
from shoal.envs.probe.probe_memory import ProbeMemory
from shoal.envs.probe.probe_observation import ProbeObservation
from shoal.envs.probe.probe_teams import ProbeTeams
from shoal.envs.probe.probe_terminated import ProbeTerminated
from shoal.envs.probe.probe_truncated import ProbeTruncated
from shoal.envs.probe.probe_turns import ProbeTurns
from shoal.spec import Box, Discrete, MultiDiscrete, UserError

torch.set_num_threads(1)


def make(cls: type[Probe], rows: int = 1, **settings: Any) -> Probe:
    return cls(cls.Config(**settings), rows, dtype=torch.float64)


def rand(world: Probe, *rows: list[float]) -> Tensor:
    return torch.tensor(rows, dtype=torch.float64).reshape(world.rows, world.noise)


def long(*x: Any) -> dict[str, Tensor]:
    return {"agents": torch.tensor(x)}


def test_constant() -> None:
    world = make(ProbeConstant, 2)
    frame = world.reset(rand(world, [], []))
    assert frame["agents"].obs.tolist() == [[[0.0]], [[0.0]]]
    out = world.step(long([0], [1]), rand(world, [], []))
    assert out.results["agents"].reward.tolist() == [[1.0], [1.0]]
    assert out.results["agents"].terminated.tolist() == [[True], [True]]
    assert out.over.tolist() == [True, True]
    assert out.next["agents"].start.tolist() == [[False], [False]]
    assert out.frame["agents"].start.tolist() == [[True], [True]]
    assert world.values(0.9)["agents"].tolist() == [[1.0]]


def test_observation() -> None:
    world = make(ProbeObservation, 2)
    frame = world.reset(rand(world, [0.2], [0.7]))
    assert frame["agents"].obs.tolist() == [[[-1.0]], [[1.0]]]
    out = world.step(long([0], [0]), rand(world, [0.9], [0.9]))
    assert out.results["agents"].reward.tolist() == [[-1.0], [1.0]]  # of what was seen, not of what comes next
    assert out.results["agents"].terminated.all()
    assert out.over.all()
    assert out.next["agents"].obs.tolist() == [[[-1.0]], [[1.0]]]
    assert out.frame["agents"].obs.tolist() == [[[1.0]], [[1.0]]]
    assert world.frames()["agents"].obs.tolist() == [[[-1.0]], [[1.0]]]
    assert world.values(0.9)["agents"].tolist() == [[-1.0], [1.0]]


def test_delay() -> None:
    world = make(ProbeDelay, 2)
    frame = world.reset(rand(world, [0.2], [0.7]))
    assert frame["agents"].obs.tolist() == [[[-1.0, 0.0]], [[1.0, 0.0]]]
    out = world.step(long([0], [0]), rand(world, [0.9], [0.9]))
    assert out.results["agents"].reward.tolist() == [[0.0], [0.0]]
    assert not out.results["agents"].terminated.any()
    assert not out.over.any()
    assert out.frame["agents"].obs.tolist() == [[[-1.0, 1.0]], [[1.0, 1.0]]]
    out = world.step(long([0], [0]), rand(world, [0.9], [0.1]))
    assert out.results["agents"].reward.tolist() == [[-1.0], [1.0]]
    assert out.results["agents"].terminated.all()
    assert out.over.all()
    assert out.frame["agents"].obs.tolist() == [[[1.0, 0.0]], [[-1.0, 0.0]]]
    assert world.frames()["agents"].obs[:, 0].tolist() == [[-1, 0], [1, 0], [-1, 1], [1, 1]]
    assert world.values(0.9)["agents"].tolist() == [[-0.9], [0.9], [-1.0], [1.0]]


def test_truncated() -> None:
    world = make(ProbeTruncated)
    world.reset(rand(world, []))
    for t in range(10):
        out = world.step(long([1]), rand(world, []))
        assert out.results["agents"].reward.item() == 1.0
        assert not out.results["agents"].terminated.any()
        assert out.over.item() == (t % 5 == 4)
        assert out.next["agents"].obs.item() == 0.0
        assert out.next["agents"].alive.item() is True
        assert out.next["agents"].start.item() is False
        assert out.frame["agents"].start.item() == (t % 5 == 4)
    assert world.values(0.9)["agents"].item() == pytest.approx(10.0)


@pytest.mark.parametrize("cls", [ProbeTruncated, ProbeTerminated])
def test_staggered_rows_end_apart(cls: type[Probe]) -> None:
    world = make(cls, 3, stagger=True)
    world.reset(rand(world, [0.0], [0.5], [0.99]))  # begin at steps 0, 2 and 4
    overs, dead = [], []
    for _ in range(5):
        out = world.step(long([0], [0], [0]), rand(world, [0.0], [0.0], [0.0]))
        overs.append(out.over.tolist())
        dead.append(out.results["agents"].terminated[:, 0].tolist())
    assert overs == [[False, False, True], [False] * 3, [False, True, False], [False] * 3, [True, False, False]]
    assert dead == (overs if cls is ProbeTerminated else [[False] * 3] * 5)


def test_terminated() -> None:
    world = make(ProbeTerminated)
    frame = world.reset(rand(world, []))
    for t in range(5):
        assert frame["agents"].obs[0, 0].tolist() == [float(i == t) for i in range(5)]
        out = world.step(long([0]), rand(world, []))
        assert out.results["agents"].reward.item() == 1.0
        assert out.results["agents"].terminated.item() == out.over.item() == (t == 4)
        frame = out.frame
    assert out.next["agents"].obs[0, 0].tolist() == [0.0] * 5
    assert frame["agents"].obs[0, 0].tolist() == [1.0, 0.0, 0.0, 0.0, 0.0]
    expected = torch.tensor([[1.9375], [1.875], [1.75], [1.5], [1.0]], dtype=torch.float64)
    torch.testing.assert_close(world.values(0.5)["agents"], expected)
    assert world.values(1.0)["agents"][:, 0].tolist() == [5, 4, 3, 2, 1]


CLIMBING = [[11, -30, 0], [-30, 7, 6], [0, 0, 5]]
PENALTY = [[-100, 0, 10], [0, 2, 0], [10, 0, -100]]


@pytest.mark.parametrize(("payoff", "table"), [("climbing", CLIMBING), ("penalty", PENALTY)])
def test_matrix(payoff: str, table: list[list[int]]) -> None:
    world = make(ProbeMatrix, 9, payoff=payoff)
    assert world.spec.common
    frame = world.reset(torch.zeros(9, 0))
    assert frame["agents"].obs.tolist() == [[[1.0], [1.0]]] * 9
    pairs = list(product(range(3), repeat=2))
    out = world.step(long(*pairs), torch.zeros(9, 0))
    assert out.results["agents"].reward.tolist() == [[table[i][j]] * 2 for i, j in pairs]
    assert out.results["agents"].terminated.all()
    assert out.over.all()
    assert world.answer.floor == {"agents": 5.0 if payoff == "climbing" else 2.0}


def monotone_fit(table: Tensor) -> Tensor:
    """The least-squares fit that rises along rows and columns: max over upper sets, min over lower sets, of the mean."""
    cells = set(product(range(3), repeat=2))
    cuts = [c for c in product(range(4), repeat=3) if c[0] >= c[1] >= c[2]]
    uppers = [{(i, j) for i, j in cells if j >= c[i]} for c in cuts]
    fit = torch.zeros(3, 3)
    for x in cells:
        tops = []
        for up in (u for u in uppers if x in u):
            means = [torch.stack([table[c] for c in up - u]).mean() for u in uppers if x not in u]
            tops.append(torch.stack(means).min())
        fit[x] = torch.stack(tops).max()
    return fit


@pytest.mark.parametrize(("payoff", "table"), [("climbing", CLIMBING), ("penalty", PENALTY)])
def test_matrix_floors_of_factored_values(payoff: str, table: list[list[int]]) -> None:
    t = torch.tensor(table, dtype=torch.float32)
    floor = ProbeMatrix.expected[payoff]
    assert t[t.mean(1).argmax(), t.mean(0).argmax()] == floor["sum"]  # the best sum fits row and column means
    best = (float("inf"), 0.0)
    for p, q in product(permutations(range(3)), repeat=2):
        m = t[list(p)][:, list(q)]
        best = min(best, (float((monotone_fit(m) - m).square().sum()), float(m[2, 2])))
    assert best[1] == floor["monotone"]
    assert best[0] > 100  # and it is no fit


def test_copy_discrete() -> None:
    world = make(ProbeCopy)
    frame = world.reset(rand(world, [0.1, 0.9, 0.5, 0.5]))  # symbols 0 and 2
    assert frame["agents"].obs.tolist() == [[[1.0, 0.0, 0.0], [0.0, 0.0, 1.0]]]
    for t in range(8):
        seen = world.state["symbol"][0, :, 0].tolist()
        out = world.step(long([seen[0], (seen[1] + 1) % 3]), rand(world, [0.99, 0.0, 0.5, 0.1]))
        assert out.results["agents"].reward.tolist() == [[1.0, 0.0]]
        assert not out.results["agents"].terminated.any()
        assert out.over.item() == (t == 7)
        assert out.next["agents"].obs.tolist() == [[[0.0, 1.0, 0.0], [1.0, 0.0, 0.0]]]
    assert out.frame["agents"].obs.tolist() == [[[0.0, 0.0, 1.0], [1.0, 0.0, 0.0]]]


def test_copy_multi() -> None:
    world = make(ProbeCopy, actions="multi")
    assert world.spec["agents"].action == MultiDiscrete((3, 2))
    frame = world.reset(rand(world, [0.4, 0.6, 0.9, 0.1, 0, 0, 0, 0]))  # symbols (1, 1) and (2, 0)
    assert frame["agents"].obs.tolist() == [[[0, 1, 0, 0, 1], [0, 0, 1, 1, 0]]]
    out = world.step(long([[1, 0], [2, 0]]), rand(world, [0.0] * 8))
    assert out.results["agents"].reward.tolist() == [[0.5, 1.0]]


def test_copy_continuous() -> None:
    world = make(ProbeCopy, n=1, actions="continuous")
    assert world.spec["agents"].action == Box((-2.0, 0.0), (1.0, 2.0))
    frame = world.reset(rand(world, [0.5, 0.25, 0.0, 0.0]))
    assert frame["agents"].obs.tolist() == [[[-0.5, 0.5]]]
    out = world.step({"agents": torch.tensor([[[0.5, 0.0]]])}, rand(world, [0.0, 0.0, 0.0, 0.75]))
    assert out.results["agents"].reward.tolist() == [[-(1.0 + 0.25) / 2]]
    assert out.next["agents"].obs.tolist() == [[[-2.0, 1.5]]]


def test_deaths() -> None:
    world = make(ProbeDeaths)
    frame = world.reset(rand(world, [0.9, 0.9, 0.1, 0, 0, 0]))  # symbols 1, 1, 0
    lives = [[t < 3, 2 <= t < 8, t < 5] for t in range(9)]
    assert frame["agents"].start.tolist() == [[True, False, True]]
    assert frame["agents"].obs[0].tolist() == [[0, 1, 1, *[0] * 7], [0] * 10, [1, 0, 1, *[0] * 7]]
    for t in range(8):
        view = frame["agents"]
        assert view.alive.tolist() == view.active.tolist() == [lives[t]]
        assert view.start.tolist() == [[t == 0, t == 2, t == 0]]
        assert (view.obs.abs().sum(-1) > 0).tolist() == [lives[t]]
        out = world.step(long([1, 1, 1]), rand(world, [0.9, 0.9, 0.1, 0.9, 0.9, 0.1]))
        pay = out.results["agents"]
        assert pay.reward.tolist() == [[float(lives[t][0]), float(lives[t][1]), 0.0]]  # agent_2 copies wrongly
        assert pay.shaping is not None
        assert pay.shaping.tolist() == [[0.0 if x else 10.0 for x in lives[t]]]
        assert pay.terminated.tolist() == [[t == 2, t == 7, t == 4]]
        assert out.next["agents"].alive.tolist() == [lives[t + 1]]
        assert out.over.item() == (t == 7)
        frame = out.frame
    assert not out.next["agents"].alive.any()
    assert frame["agents"].alive.tolist() == [lives[0]]
    assert frame["agents"].start.tolist() == [[True, False, True]]


def test_deaths_values() -> None:
    values = make(ProbeDeaths).values(0.5)["agents"].reshape(8, 8, 3)
    assert (values == values[:, :1]).all()  # whatever the symbols
    assert values[:, 0, 0].tolist() == [1.75, 1.5, 1.0, 0, 0, 0, 0, 0]
    assert values[:, 0, 1].tolist() == [0, 0, 1.96875, 1.9375, 1.875, 1.75, 1.5, 1.0]
    assert values[:, 0, 2].tolist() == [1.9375, 1.875, 1.75, 1.5, 1.0, 0, 0, 0]


def test_illegal_discrete() -> None:
    world = make(ProbeIllegal, n=1)
    blank = [0.0] * 6
    frame = world.reset(rand(world, [0.5, 0.9, 0.1, 0.9, 0.9, 0.1, *blank]))  # best 2; coins allow 1 and 4
    assert frame["agents"].obs.tolist() == [[[0, 0, 1, 0, 0]]]
    for action, reward, illegal in [(2, 1.0, 0.0), (1, 0.0, 0.0), (0, -10.0, 1.0), (3, -10.0, 1.0)]:
        frame = world.reset(rand(world, [0.5, 0.9, 0.1, 0.9, 0.9, 0.1, *blank]))
        assert frame["agents"].legal is not None
        assert frame["agents"].legal.tolist() == [[[False, True, True, False, True]]]
        out = world.step(long([action]), rand(world, [*blank, 0.99, 0.9, 0.9, 0.9, 0.9, 0.9]))
        assert out.results["agents"].reward.tolist() == [[reward]]
        assert out.stats["illegal"].tolist() == [illegal]
        assert out.next["agents"].legal is not None
        assert out.next["agents"].legal.tolist() == [[[False, False, False, False, True]]]


def test_illegal_multi() -> None:
    world = make(ProbeIllegal, n=1, actions="multi")
    start = rand(
        world, [0.0, 0.9, 0.9, 0.1, 0.9, 0.1, 0.9, *[0.0] * 7]
    )  # best (0, 1); coins allow 1 of the first, 0 of the second
    for action, reward, illegal in [([0, 1], 1.0, 0.0), ([1, 1], 0.5, 0.0), ([1, 0], 0.0, 0.0), ([2, 1], -10.0, 1.0)]:
        frame = world.reset(start)
        assert frame["agents"].legal is not None
        assert frame["agents"].legal.tolist() == [[[True, True, False, True, True]]]
        assert frame["agents"].obs.tolist() == [[[1, 0, 0, 0, 1]]]
        out = world.step(long([action]), start)
        assert out.results["agents"].reward.tolist() == [[reward]]
        assert out.stats["illegal"].tolist() == [illegal]
    for t in range(7):
        out = world.step(long([[0, 1]]), start)
        assert out.over.item() == (t == 6)
        assert not out.results["agents"].terminated.any()


def test_illegal_random_by_hand() -> None:
    assert make(ProbeIllegal).answer.random == {"agents": pytest.approx(3.1)}
    assert make(ProbeIllegal, actions="multi").answer.random == {"agents": pytest.approx(16 / 3)}


DIM = [[(8 * row + column) * 37 % 64 for column in range(8)] for row in range(8)]


def picture(left: int, top: int) -> list[list[int]]:
    """Dim noise, and a spot of 2 x 2 pixels."""
    return [[255 if r in (top, top + 1) and c in (left, left + 1) else DIM[r][c] for c in range(8)] for r in range(8)]


def test_image() -> None:
    assert DIM[0] == [0, 37, 10, 47, 20, 57, 30, 3]
    world = make(ProbeImage, 2)
    assert (world.spec["agents"].obs, world.spec["agents"].action) == ((1, 8, 8), Discrete(4))
    assert world.noise == 8
    # corner 1 (top right), one across and two down in it; corner 2 (bottom left), at its own top left
    frame = world.reset(rand(world, [0.3, 0.4, 0.9, 0.2, 0, 0, 0, 0], [0.5, 0.0, 0.0, 0.9, 0, 0, 0, 0]))
    assert frame["agents"].obs.dtype == torch.uint8
    assert frame["agents"].obs[:, 0, 0].tolist() == [picture(5, 2), picture(0, 4)]
    # the next is of the step's own numbers: corner 3, as far right and down as a spot can be; corner 0
    noise = rand(world, [0.3, 0.4, 0.9, 0.2, 0.99, 0.99, 0.99, 0], [0.5, 0, 0, 0, 0.2, 0.5, 0.1, 0])
    rewards = []
    for t in range(8):
        corners = [1, 2] if t == 0 else [3, 0]
        says = [[corners[0]], [corners[1] if t != 3 else 3 - corners[1]]]  # the second errs once
        out = world.step(long(*says), noise)
        rewards.append(out.results["agents"].reward[:, 0].tolist())
        assert not out.results["agents"].terminated.any()
        assert out.over.tolist() == [t == 7] * 2
        assert out.next["agents"].obs[:, 0, 0].tolist() == [picture(6, 6), picture(1, 0)]
    assert rewards == [[1.0, 1.0]] * 3 + [[1.0, 0.0]] + [[1.0, 1.0]] * 4
    assert out.frame["agents"].obs[:, 0, 0].tolist() == [picture(5, 2), picture(0, 4)]  # a new episode's own
    assert out.frame["agents"].start.all()


def test_image_beside_numbers() -> None:
    """The second number asks for the opposite corner; what was drawn for it is below a half."""
    world = make(ProbeImage, n=2, vector=True)
    assert world.spec["agents"].obs == {"picture": (1, 8, 8), "asks": (2,)}
    start = rand(world, [0.3, 0.4, 0.9, 0.2, 0.3, 0.4, 0.9, 0.5, *[0.0] * 8])  # corner 1 for both; only agent_0 is to oppose
    frame = world.reset(start)
    assert frame["agents"].obs["asks"].tolist() == [[[0.0, 1.0], [1.0, 0.0]]]
    assert frame["agents"].obs["picture"][0, :, 0].tolist() == [picture(5, 2)] * 2
    assert (frame["agents"].obs["picture"].dtype, frame["agents"].obs["asks"].dtype) == (torch.uint8, torch.float64)
    assert world.step(long([2, 1]), start).results["agents"].reward.tolist() == [[1.0, 1.0]]
    world.reset(start)
    assert world.step(long([1, 2]), start).results["agents"].reward.tolist() == [[0.0, 0.0]]


def test_memory() -> None:
    world = make(ProbeMemory, 2)
    frame = world.reset(rand(world, [0.1], [0.9]))
    seen = []
    for t in range(4):
        seen.append(frame["agents"].obs[:, 0].tolist())
        out = world.step(long([1], [1]), rand(world, [0.9], [0.1]))
        assert out.results["agents"].reward.tolist() == ([[-1.0], [1.0]] if t == 3 else [[0.0], [0.0]])
        assert out.results["agents"].terminated.tolist() == [[t == 3]] * 2
        assert out.over.tolist() == [t == 3] * 2
        frame = out.frame
    assert seen == [[[-1, 0], [1, 0]], [[0, 0], [0, 0]], [[0, 0], [0, 0]], [[0, 1], [0, 1]]]
    assert frame["agents"].obs[:, 0].tolist() == [[1, 0], [-1, 0]]


def test_turns() -> None:
    world = make(ProbeTurns, 2)
    assert world.spec.turns
    frame = world.reset(rand(world, [0.1, 0.9, 0.0], [0.9, 0.9, 0.0]))  # agent_0 begins, agent_1 begins; symbol 1
    rewards = []
    for t in range(6):
        view = frame["agents"]
        mover = t % 2
        assert view.active.tolist() == [[mover == 0, mover == 1], [mover == 1, mover == 0]]
        assert view.alive.all()
        assert view.start.all() == (t == 0) == view.start.any()
        assert view.obs[0, mover].tolist() == [0, 1, *[float(i == t) for i in range(6)]]
        assert view.obs[0, 1 - mover].tolist() == [0, 0, *[float(i == t) for i in range(6)]]
        wrong = t == 2  # the one who begins errs once; the one who waits says what is wrong, and it does not count
        says = [1 - int(wrong), 0] if mover == 0 else [0, 1]
        out = world.step(long(says, says[::-1]), rand(world, [0.1, 0.9, 0.9], [0.9, 0.9, 0.9]))
        rewards.append(out.results["agents"].reward[0].tolist())
        assert torch.equal(out.results["agents"].reward[0], out.results["agents"].reward[1].flip(0))
        assert out.results["agents"].terminated.tolist() == [[t == 5] * 2] * 2
        assert out.over.tolist() == [t == 5] * 2
        frame = out.frame
    assert rewards == [[0, 0], [1, 0], [0, 1], [0, 0], [0, 1], [1, 0]]
    out = world.step(long([0, 0], [0, 0]), rand(world, [0, 0, 0], [0, 0, 0]))
    assert out.results["agents"].reward.tolist() == [[0, 0], [0, 0]]  # the last move of the last episode is paid no more


def test_turns_values() -> None:
    values = make(ProbeTurns).values(0.5)["agents"].reshape(6, 2, 2, 2)  # step, first, symbol, agent
    assert values[:, 0, 0].tolist() == [[1.75, 0], [0, 1.5], [1.5, 0], [0, 1], [1, 0], [0, 0]]
    assert torch.equal(values[:, 0], values[:, 1].flip(-1))


def test_teams() -> None:
    world = make(ProbeTeams, pay="opposed", shaped=True)
    assert [(g.name, g.team, g.n, g.action) for g in world.spec.groups] == [
        ("pair", "pair", 2, Discrete(3)),
        ("lone", "lone", 1, Discrete(2)),
    ]
    frame = world.reset(rand(world, [0.1, 0.5, 0.9, 0, 0, 0]))
    assert frame["pair"].obs.tolist() == [[[1, 0, 0], [0, 1, 0]]]
    assert frame["lone"].obs.tolist() == [[[0, 1]]]
    for t in range(8):
        act = {"pair": torch.tensor([[1, 1]]), "lone": torch.tensor([[1]])}
        out = world.step(act, rand(world, [0.1, 0.5, 0.9, 0.1, 0.5, 0.9]))
        assert out.results["pair"].reward.tolist() == [[-1.0, 0.0]]
        assert out.results["pair"].shaping is not None
        assert out.results["pair"].shaping.tolist() == [[0.0, -2.0]]
        assert out.results["lone"].reward.tolist() == [[0.5]]
        assert out.results["lone"].shaping is None
        assert (out.stats["score_pair"].item(), out.stats["score_lone"].item()) == (0.5, 1.0)
        assert out.over.item() == (t == 7)
        assert not out.results["pair"].terminated.any()
    out = world.step({"pair": torch.tensor([[0, 2]]), "lone": torch.tensor([[0]])}, rand(world, [0.0] * 6))
    assert out.results["pair"].reward.tolist() == [[1.0, 0.0]]
    assert out.results["pair"].shaping is not None
    assert out.results["pair"].shaping.tolist() == [[0.0, 0.0]]  # pair_0 hits and gets no shaping, pair_1 misses
    assert out.results["lone"].reward.tolist() == [[-0.5]]
    own = make(ProbeTeams)
    own.reset(rand(own, [0.1, 0.5, 0.9, 0, 0, 0]))
    out = own.step({"pair": torch.tensor([[1, 1]]), "lone": torch.tensor([[1]])}, rand(own, [0.0] * 6))
    assert out.results["pair"].reward.tolist() == [[0.0, 1.0]]
    assert out.results["lone"].reward.tolist() == [[1.0]]
    assert out.results["pair"].shaping is None


def test_teams_answers() -> None:
    a = make(ProbeTeams, pair="continuous", lone="multi", shaped=True).answer
    assert a.best == pytest.approx({"pair": -91 / 6, "lone": 8.0})
    assert a.random == pytest.approx({"pair": -26 / 3, "lone": 3.0})
    b = make(ProbeTeams, lone="continuous").answer
    assert (b.best, b.floor) == ({"pair": 8.0, "lone": 0.0}, {"pair": 7.5, "lone": -0.5})
    assert b.random == pytest.approx({"pair": 8 / 3, "lone": -3.0})


@pytest.mark.parametrize(
    ("cls", "settings"),
    [
        (ProbeConstant, {"n": 0}),
        (ProbeConstant, {"actions": "discreet"}),
        (ProbeCopy, {"n": 9}),
        (ProbeIllegal, {"actions": "continuous"}),
        (ProbeImage, {"n": 0}),
        (ProbeMatrix, {"payoff": "prisoners"}),
        (ProbeMatrix, {"k": 1.0}),
        (ProbeMemory, {"blank": 0}),
        (ProbeMemory, {"n": 0}),
        (ProbeTeams, {"lone": "none"}),
        (ProbeTeams, {"pay": "both"}),
        (ProbeTerminated, {"length": 0}),
        (ProbeTruncated, {"length": 0}),
    ],
)
def test_wrong_settings_say_so(cls: type[Probe], settings: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=f"--env.{next(iter(settings))} is "):
        cls.Config(**settings)
