"""What every algorithm stands on: the one place that descends, and who is refused."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

from shoal.algos.base import Algorithm, Optimiser, Rollout, fits
from shoal.nets.layers import NetConfig
from shoal.spec import Batch, Box, Discrete, EnvSpec, Frame, Group, MultiDiscrete, Space, UserError, View
from shoal.tree import tree_map

torch.set_num_threads(1)


# --- descending ---


def small(seed: int = 0) -> nn.Module:
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in net.parameters():
            p.copy_(torch.randn(p.shape, generator=draw))
    return net


def data(k: int) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(100 + k)
    return torch.randn(6, 3, generator=draw), torch.randn(6, 2, generator=draw) * 3


def error(net: nn.Module, k: int) -> Tensor:
    """A sum over six samples, scaled so that some gradients are clipped and some are not."""
    x, y = data(k)
    return (net(x) - y).square().sum() * (0.01, 1.0, 0.1)[k % 3]


def weights(net: nn.Module) -> Tensor:
    return torch.cat([p.detach().reshape(-1) for p in net.parameters()]).clone()


def everything(net: nn.Module, optimiser: Optimiser) -> dict[str, Tensor]:
    return {"weights": weights(net), **{k: v.clone() for k, v in optimiser.state_dict().items()}}


def same(a: dict[str, Tensor], b: dict[str, Tensor], leave: tuple[str, ...] = ()) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a if k not in leave)


@pytest.mark.parametrize("decay", [0.0, 0.1])
@pytest.mark.parametrize("clip", [None, 0.5])
def test_descend_is_adamw(decay: float, clip: float | None) -> None:
    mine, theirs = small(), small()
    optimiser = Optimiser([mine], 0.03, decay, clip)
    adamw = torch.optim.AdamW(theirs.parameters(), lr=0.03, eps=1e-5, weight_decay=decay)
    clipped = 0
    for k in range(12):
        norm = optimiser.descend(error(mine, k), 6)
        adamw.zero_grad()
        (error(theirs, k) / 6).backward()
        expected = torch.nn.utils.clip_grad_norm_(theirs.parameters(), math.inf if clip is None else clip)
        clipped += clip is not None and expected.item() > clip
        adamw.step()
        torch.testing.assert_close(norm, expected, rtol=1e-5, atol=1e-7)
        torch.testing.assert_close(weights(mine), weights(theirs), rtol=1e-4, atol=2e-6)
    assert clip is None or 0 < clipped < 12  # both kinds were met
    assert optimiser.steps.item() == 12


def test_two_steps_by_hand() -> None:
    """One weight w = 1, slope 4 and then -2, rate 0.1, betas 0.9 and 0.999, no decay.

    Step 1: m / (1 - 0.9) = 4, v / (1 - 0.999) = 16: w = 1 - 0.1 * 4 / (4 + 1e-5) = 0.90000025.
    Step 2: m = 0.9 * 0.4 - 0.2 = 0.16, over 0.19 is 0.8421053; v = 0.999 * 0.016 + 0.004 = 0.019984, over 0.001999 is
    9.996998, root 3.161803: w = 0.90000025 - 0.1 * 0.8421053 / 3.161813 = 0.8733666.
    """
    net = nn.Linear(1, 1, bias=False)
    nn.init.ones_(net.weight)
    optimiser = Optimiser([net], 0.1)
    optimiser.descend(net.weight.sum() * 4, 1)
    assert net.weight.item() == pytest.approx(0.90000025, abs=2e-7)
    optimiser.descend(net.weight.sum() * -2, 1)
    assert net.weight.item() == pytest.approx(0.8733666, abs=1e-6)
    assert optimiser.first.item() == pytest.approx(0.16, rel=1e-5)
    assert optimiser.second.item() == pytest.approx(0.019984, rel=1e-5)


def test_decay_by_hand() -> None:
    """No slope: decoupled decay alone moves w by a factor 1 - 0.1 * 0.5."""
    net = nn.Linear(1, 1, bias=False)
    nn.init.ones_(net.weight)
    Optimiser([net], 0.1, decay=0.5).descend(net.weight.sum() * 0, 1)
    assert net.weight.item() == pytest.approx(0.95)


def test_clipping_by_hand() -> None:
    """The slopes 3 and 4 have norm 5, and are scaled to norm 1: 0.6 and 0.8, of which Adam's first moment holds a tenth."""
    net = nn.Linear(2, 1, bias=False)
    optimiser = Optimiser([net], 0.1, clip=1.0)
    norm = optimiser.descend((net.weight * torch.tensor([3.0, 4.0])).sum(), 1)
    assert norm.item() == 5.0
    assert optimiser.first.tolist() == pytest.approx([0.06, 0.08], rel=1e-5)
    net = nn.Linear(2, 1, bias=False)
    optimiser = Optimiser([net], 0.1, clip=10.0)
    assert optimiser.descend((net.weight * torch.tensor([3.0, 4.0])).sum(), 1).item() == 5.0
    assert optimiser.first.tolist() == pytest.approx([0.3, 0.4])


@pytest.mark.parametrize("count", [4, 4.0, torch.tensor(4), torch.tensor(4.0)])
def test_count_divides(count: Any) -> None:
    one, two = small(), small()
    first, second = Optimiser([one], 0.03, clip=0.5), Optimiser([two], 0.03, clip=0.5)
    for k in range(3):
        first.descend(error(one, k), count)
        second.descend(error(two, k) / 4, 1)
    assert torch.equal(weights(one), weights(two))


def test_nobody_active_is_no_division_by_zero() -> None:
    net = small()
    optimiser = Optimiser([net], 0.03)
    before = weights(net)
    optimiser.descend(error(net, 0) * 0, torch.tensor(0))
    assert torch.equal(weights(net), before)
    assert not optimiser.broken


def test_gradients_do_not_pile_up() -> None:
    net = small()
    optimiser = Optimiser([net], 0.03)
    norms = [optimiser.descend(error(net, 0), 6, torch.tensor(False)).item() for _ in range(3)]
    assert norms[0] == norms[1] == norms[2] > 0


def test_without_keep_nothing_moves() -> None:
    """Skipped steps leave weights, moments and count as they were, to the bit; what follows is as if they had never been."""
    net, other = small(), small()
    optimiser, plain = Optimiser([net], 0.03, 0.1, 0.5), Optimiser([other], 0.03, 0.1, 0.5)
    no, yes = torch.tensor(False), torch.tensor(True)
    before = everything(net, optimiser)
    optimiser.descend(error(net, 7), 6, no)  # before the first step too
    assert same(before, everything(net, optimiser))
    for k in range(6):
        optimiser.descend(error(net, k), 6, yes)
        plain.descend(error(other, k), 6)
        before = everything(net, optimiser)
        for j in range(3):
            optimiser.descend(error(net, 20 + j) * 100, 6, no)
        assert same(before, everything(net, optimiser))
    assert same(everything(net, optimiser), everything(other, plain))
    assert optimiser.steps.item() == 6
    assert not optimiser.broken


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("clip", [None, 0.5])
def test_a_gradient_that_is_not_finite_stops_everything(bad: float, clip: float | None) -> None:
    net = small()
    optimiser = Optimiser([net], 0.03, 0.1, clip)
    for k in range(3):
        optimiser.descend(error(net, k), 6)
    assert optimiser.broken.item() is False
    before = everything(net, optimiser)
    optimiser.descend(error(net, 3) * bad, 6)
    assert optimiser.broken.item() is True
    assert same(before, everything(net, optimiser), leave=("broken",))
    for k in range(3):
        optimiser.descend(error(net, k), 6)  # finite again, but it has stopped
        optimiser.descend(error(net, k), 6, torch.tensor(True))
    assert same(before, everything(net, optimiser), leave=("broken",))
    assert weights(net).isfinite().all()


def test_state_is_saved_and_restored_in_place() -> None:
    net, other = small(), small(1)
    optimiser, copy = Optimiser([net], 0.03, 0.1, 0.5), Optimiser([other], 0.5, 0.1, 0.5)
    for k in range(4):
        optimiser.descend(error(net, k), 6)
    saved = {k: v.clone() for k, v in optimiser.state_dict().items()}
    assert set(saved) == {"first", "second", "steps", "rate", "broken"}
    assert saved["first"].abs().sum() > 0
    assert saved["second"].abs().sum() > 0
    assert saved["steps"].item() == 4
    copy.descend(error(other, 9), 6)
    addresses = {k: v.data_ptr() for k, v in copy.state_dict().items()}
    places = [p.data_ptr() for p in other.parameters()]
    other.load_state_dict(net.state_dict())
    copy.load_state_dict(saved)
    assert {k: v.data_ptr() for k, v in copy.state_dict().items()} == addresses
    assert [p.data_ptr() for p in other.parameters()] == places
    for k in range(4, 9):
        optimiser.descend(error(net, k), 6)
        copy.descend(error(other, k), 6)
    assert same(everything(net, optimiser), everything(other, copy))


def test_the_rate_is_a_tensor_that_may_be_set() -> None:
    net, other = small(), small()
    optimiser, half = Optimiser([net], 0.03), Optimiser([other], 1.0)
    half.rate.fill_(0.03)
    for k in range(3):
        optimiser.descend(error(net, k), 6)
        half.descend(error(other, k), 6)
    assert torch.equal(weights(net), weights(other))
    half.rate.fill_(0.0)
    before = weights(other)
    half.descend(error(other, 3), 6)
    assert torch.equal(weights(other), before)


def test_several_modules_step_together() -> None:
    one, two = nn.Linear(3, 2), nn.Linear(2, 1)
    optimiser = Optimiser([one, two], 0.1)
    before = weights(one), weights(two)
    optimiser.descend(two(one(torch.ones(1, 3))).sum(), 1)
    assert not torch.equal(before[0], weights(one))
    assert not torch.equal(before[1], weights(two))
    assert list(optimiser.parameters()) == []  # they are the modules', not its own to save again
    assert optimiser.first.numel() == 3 * 2 + 2 + 2 + 1


# --- who is refused ---


def group(name: str = "agents", n: int = 2, obs: tuple[int, ...] = (2,), action: Space | None = None, **more: Any) -> Group:
    return Group(name, more.pop("team", name), tuple(f"{name}_{i}" for i in range(n)), obs, action or Discrete(3), **more)


def refused(spec: EnvSpec, **attributes: Any) -> str:
    cls = type("Picky", (Fake,), attributes)
    with pytest.raises(UserError) as e:
        fits(cls, spec, [g.name for g in spec.groups])
    with pytest.raises(UserError, match="Picky"):
        cls(spec, tuple(g.name for g in spec.groups), cls.Config(), NetConfig(), torch.Generator())
    return str(e.value)


class Fake(Algorithm):
    """Chooses what its observation's first number says."""

    feed = Rollout(1)
    choose: ClassVar[Callable[[Tensor], Tensor]] = staticmethod(lambda obs: obs[..., 0].long())

    def act(self, frame: Frame, memory: Any, noise: Any, explore: bool) -> Any:
        assert noise is None
        assert not explore
        return {g: self.choose(frame[g].obs) for g in self.groups}, memory, {g: {} for g in self.groups}

    def update(self, batch: Batch) -> dict[str, Tensor]:
        return {}


def test_each_refusal() -> None:
    box = Box((-1.0,), (1.0,))
    assert (
        refused(EnvSpec((group(), group("b", action=box))), takes=("discrete", "multi-discrete"))
        == "Picky takes discrete and multi-discrete actions; those of 'b' are continuous."
    )
    assert refused(EnvSpec((group(),)), takes=("continuous",)) == (
        "Picky takes continuous actions; those of 'agents' are discrete."
    )
    assert refused(EnvSpec((group(mortal=True),)), mortal=False) == (
        "Picky cannot take agents that die or arrive late, as those of 'agents' do."
    )
    assert refused(EnvSpec((group(),), turns=True), turns=False) == "Picky cannot play turn-based worlds."
    assert refused(EnvSpec((group(),)), pay="common") == (
        "Picky needs agents that are paid alike: ask for --reward team-mean or --reward team-sum."
    )


def test_what_fits_is_not_refused() -> None:
    spec = EnvSpec((group(mortal=True), group("b", action=Box((-1.0,), (1.0,)))), turns=True, common=True)
    fits(type("Any", (Fake,), {"pay": "common"}), spec, ["agents", "b"])
    # only the groups that it is bound to matter
    fits(type("Some", (Fake,), {"takes": ("discrete",)}), spec, ["agents"])
    fits(type("Some", (Fake,), {"mortal": False}), spec, ["b"])


# --- peers ---


def batch_of(next_frame: Frame, lead: tuple[int, int]) -> Batch:
    nothing: dict[str, Any] = {}
    now = tree_map(torch.zeros_like, next_frame)  # what was seen before: not what target actions are asked for
    return Batch(now, next_frame, nothing, nothing, torch.zeros(lead, dtype=torch.bool), nothing, nothing)


def fake(spec: EnvSpec, groups: tuple[str, ...] = ("agents",), **attributes: Any) -> Fake:
    return type("Fake", (Fake,), attributes)(spec, groups, None, NetConfig(), torch.Generator())


def observed(obs: Tensor) -> Frame:
    yes = torch.ones(obs.shape[:3], dtype=torch.bool)
    return Frame({"agents": View(obs, yes, yes, yes)})


def test_target_actions_are_one_hot() -> None:
    obs = torch.tensor([[[[2.0], [0.0]]], [[[1.0], [1.0]]]])  # [T 2, B 1, N 2, O 1]
    out = fake(EnvSpec((group(obs=(1,)),))).target_actions(batch_of(observed(obs), (2, 1)), "agents")
    assert out.tolist() == [[[[0.0, 0, 1], [1.0, 0, 0]]], [[[0.0, 1, 0], [0.0, 1, 0]]]]


def test_target_actions_of_several_choices_end_to_end() -> None:
    obs = torch.tensor([[[[2.0, 0.0], [0.0, 1.0]]]])
    algorithm = fake(EnvSpec((group(action=MultiDiscrete((3, 2))),)), choose=staticmethod(lambda x: x.long()))
    out = algorithm.target_actions(batch_of(observed(obs), (1, 1)), "agents")
    assert out.tolist() == [[[[0.0, 0, 1, 1, 0], [1.0, 0, 0, 0, 1]]]]


def test_target_actions_continuous_and_without_gradient() -> None:
    obs = torch.tensor([[[[0.25, -0.5], [1.0, 2.0]]]], requires_grad=True)
    algorithm = fake(EnvSpec((group(action=Box((-1.0, -1.0), (1.0, 1.0))),)), choose=staticmethod(lambda x: x * 2))
    out = algorithm.target_actions(batch_of(observed(obs), (1, 1)), "agents")
    assert out.tolist() == [[[[0.5, -1.0], [1.0, 1.0]]]]  # as the world takes them: clipped
    assert not out.requires_grad


def test_joined_parted_and_mask() -> None:
    spec = EnvSpec((group("a", 2), group("b", 3)))
    algorithm = fake(spec, ("a", "b"))
    parts = {"a": torch.zeros(4, 5, 2, 7), "b": torch.ones(4, 5, 3, 7)}
    whole = algorithm.cat_groups(parts.__getitem__, 2)
    assert whole.shape == (4, 5, 5, 7)
    back = algorithm.split_groups(whole, 2)
    assert all(torch.equal(back[g], parts[g]) for g in "ab")
    assert algorithm.cat_groups(lambda g: None, 2) is None
    assert algorithm.n == 5
    assert algorithm.mask(batch_of(Frame({}), (1, 1))) is None  # everybody acts all the time
    mortal = fake(EnvSpec((group("a", 2, mortal=True), group("b", 1))), ("a", "b"))
    no, yes = torch.zeros(3, 1, 2, dtype=torch.bool), torch.ones(3, 1, 1, dtype=torch.bool)
    f = Frame({"a": View(no, ~no, no, no), "b": View(yes, yes, yes, yes)})
    mask = mortal.mask(replace(batch_of(f, (3, 1)), frame=f))
    assert mask is not None
    assert mask[0, 0].tolist() == [False, False, True]
    assert fake(EnvSpec((group(),), turns=True)).has_inactive
    assert not fake(EnvSpec((group(),))).has_inactive
