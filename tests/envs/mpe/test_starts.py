"""How episodes begin: thousands of our starts against thousands of mpe2's, drawn by its own generator."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import stats

from .reference import AGENTS, Array, Reference, make

torch.set_num_threads(1)
STARTS = 4000
CHANCE = 1e-4  # of a difference this large between equals, for each of the 300 or so figures compared


def ours(name: str) -> dict[str, Array]:
    world = make(name, STARTS)
    world.reset(torch.rand(STARTS, world.noise, generator=torch.Generator().manual_seed(1)))
    return {k: v.double().numpy() for k, v in world.get_state().items()}


def theirs(name: str) -> dict[str, Array]:
    ref = Reference(name)
    ref.env.reset(seed=2)
    rows = []
    for _ in range(STARTS):
        ref.env.reset()
        rows.append({k: np.array(v, dtype=float) for k, v in ref.read().items()})
    return {k: np.stack([row[k] for row in rows]) for k in rows[0]}


@pytest.mark.parametrize("name", AGENTS)
def test_starts_are_distributed_as_mpe2s(name: str) -> None:
    a, b = ours(name), theirs(name)
    assert set(a) - {"stage"} == set(b)
    for k in set(b) - {"pos", "goal", "kind"}:  # at rest, silent, empty-handed, at time zero
        np.testing.assert_array_equal(a[k], b[k])

    x, y = a["pos"].reshape(STARTS, -1), b["pos"].reshape(STARTS, -1)
    for i in range(x.shape[1]):
        assert stats.ks_2samp(x[:, i], y[:, i]).pvalue > CHANCE, f"coordinate {i} of {x.shape[1]}"
    for k in {"goal", "kind"} & set(b):
        x, y = np.concatenate((x, a[k]), 1), np.concatenate((y, b[k]), 1)
        for i in range(a[k].shape[1]):
            values = np.unique(b[k][:, i])
            table = [[(z[k][:, i] == v).sum() for v in values] for z in (a, b)]
            assert np.sum(table[0]) == STARTS
            assert stats.chi2_contingency(table).pvalue > CHANCE, f"{k} {i}: {table}"
    # what depends on what: correlations of all with all, and of squares, which tell a circle from a square
    for f in (lambda z: z, np.square):
        gap = np.abs(np.corrcoef(f(x).T) - np.corrcoef(f(y).T))[np.triu_indices(x.shape[1], 1)]
        assert gap.max() < 5 * np.sqrt(2 / STARTS), f"correlations differ by {gap.max()}"


def test_the_line_is_turned_until_it_lies_inside() -> None:
    pos = ours("simple_line")["pos"]
    near, far = pos[:, -2], pos[:, -1]
    assert np.allclose(np.linalg.norm(far - near, axis=1), 1.25, atol=1e-6)
    assert (np.abs(near) <= 0.25).all()
    assert (np.abs(far) < 1).all()


def test_treasures_come_back_anywhere() -> None:
    """All are gone; in the next step all are back."""
    world = make("collect_treasure", STARTS, num_collectors=2, num_deposits=3, num_treasures=2)
    gen = torch.Generator().manual_seed(3)
    world.reset(torch.rand(STARTS, world.noise, generator=gen))
    state = world.get_state()
    state["here"][:], state["kind"][:] = False, 0
    state["pos"][:, -2:] = -999.0
    world.set_state(state)
    still = {g.name: torch.zeros(STARTS, g.n, dtype=torch.long) for g in world.spec.groups}
    world.step(still, torch.rand(STARTS, world.noise, generator=gen))
    assert world.state["here"].all()
    for place in world.state["pos"][:, -2:].reshape(STARTS, -1).double().numpy().T:
        assert stats.kstest(place, stats.uniform(-0.95, 1.9).cdf).pvalue > CHANCE
    for kind in world.state["kind"].T:
        assert stats.chisquare(torch.bincount(kind, minlength=3)).pvalue > CHANCE
