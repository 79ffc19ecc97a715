"""The one place that descends, against AdamW and by hand; and copies that follow what an optimiser moves, in powers of two."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
import torch
from bench import make_learner, spec_of
from torch import Tensor, nn

from shoal.algos.base import LearnerConfig
from shoal.algos.coma import COMA
from shoal.algos.ddqn import DDQN
from shoal.algos.optimiser import Optimiser, StepRule
from shoal.algos.ppo import PPO
from shoal.algos.sac import SAC
from shoal.algos.target import Target
from shoal.spec import UserError

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


RULES: dict[str, tuple[StepRule, Any]] = {
    "adamw": (StepRule("adamw", 0.8, 0.99, 1e-3), partial(torch.optim.AdamW, betas=(0.8, 0.99), eps=1e-3)),
    "adam": (StepRule("adam"), partial(torch.optim.Adam, eps=1e-5)),
    "rmsprop": (StepRule("rmsprop", beta2=0.9, eps=1e-4), partial(torch.optim.RMSprop, alpha=0.9, eps=1e-4)),
    "rmsprop, momentum": (StepRule("rmsprop", beta2=0.99, momentum=0.7), partial(torch.optim.RMSprop, eps=1e-5, momentum=0.7)),
    "sgd": (StepRule("sgd"), torch.optim.SGD),
    "sgd, momentum": (StepRule("sgd", momentum=0.9), partial(torch.optim.SGD, momentum=0.9)),
}


@pytest.mark.parametrize("decay", [0.0, 0.1])
@pytest.mark.parametrize("name", RULES)
def test_every_rule_is_pytorchs(name: str, decay: float) -> None:
    """Step by step, and a step that is not kept changes nothing."""
    rule, theirs = RULES[name]
    mine, other = small(), small()
    optimiser = Optimiser([mine], 0.03, decay, rule=rule)
    reference = theirs(other.parameters(), lr=0.03, weight_decay=decay)
    for k in range(9):
        before = everything(mine, optimiser)
        optimiser.descend(error(mine, k + 1), 6, torch.tensor(False))
        assert same(before, everything(mine, optimiser))
        optimiser.descend(error(mine, k), 6, torch.tensor(True))
        reference.zero_grad()
        (error(other, k) / 6).backward()
        reference.step()
        torch.testing.assert_close(weights(mine), weights(other), rtol=1e-4, atol=2e-6)
    assert optimiser.steps.item() == 9


@pytest.mark.parametrize("name", RULES)
def test_a_gradient_that_is_not_finite_is_not_followed_whatever_the_rule(name: str) -> None:
    net = small()
    optimiser = Optimiser([net], 0.03, rule=RULES[name][0])
    optimiser.descend(error(net, 0), 6)
    before = everything(net, optimiser)
    optimiser.descend(error(net, 1) * math.inf, 6)
    assert optimiser.broken
    assert same(before, everything(net, optimiser), leave=("broken",))


@pytest.mark.parametrize(
    ("given", "rule"),
    [
        ({}, StepRule("adamw", 0.9, 0.999, 1e-5)),
        ({"optimiser": "adam", "beta1": 0.5, "beta2": 0.6, "eps": 1e-3}, StepRule("adam", 0.5, 0.6, 1e-3)),
        ({"optimiser": "rmsprop"}, StepRule("rmsprop", beta2=0.99)),
        ({"optimiser": "rmsprop", "beta2": 0.9, "momentum": 0.5}, StepRule("rmsprop", beta2=0.9, momentum=0.5)),
        ({"optimiser": "sgd", "momentum": 0.5}, StepRule("sgd", momentum=0.5)),
    ],
)
def test_settings_make_the_rule_of_every_optimiser_of_an_algorithm(given: dict[str, Any], rule: StepRule) -> None:
    assert LearnerConfig(**given).step_rule == rule
    for cls in (PPO, DDQN, SAC, COMA):
        found = [m.rule for m in make_learner(cls, spec_of(2, common=True), **given).modules() if isinstance(m, Optimiser)]
        assert found
        assert set(found) == {rule}


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"momentum": 0.9}, "--algo.momentum is not for adamw, which takes --algo.beta1 and --algo.beta2 and --algo.eps."),
        ({"optimiser": "sgd", "eps": 1e-3}, "--algo.eps is not for sgd, which takes --algo.momentum."),
        ({"optimiser": "rmsprop", "beta1": 0.5}, "--algo.beta1 is not for rmsprop"),
        ({"beta2": 1.0}, "--algo.beta2 is 1.0"),
    ],
)
def test_settings_of_another_optimiser_are_refused(given: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UserError) as e:
        LearnerConfig(**given)
    assert sentence in str(e.value)


def test_rmsprop_and_momentum_by_hand() -> None:
    """One weight w = 1, slopes 4 and then -2, rate 0.1. RMSprop, mean squares of which half stays, eps 0: v = 8, w = 1 - 0.4 /
    2.828427 = 0.8585786; v = 6, w + 0.2 / 2.4494897 = 0.9402283. SGD with momentum 0.5: b = 4, w = 0.6; b = 0, w = 0.6."""
    expected = {"rmsprop": (0.8585786, 0.9402283), "sgd": (0.6, 0.6)}
    for rule in (StepRule("rmsprop", beta2=0.5, eps=0.0), StepRule("sgd", momentum=0.5)):
        net = nn.Linear(1, 1, bias=False)
        nn.init.ones_(net.weight)
        optimiser = Optimiser([net], 0.1, rule=rule)
        for slope, then in zip((4, -2), expected[rule.name], strict=True):
            optimiser.descend(net.weight.sum() * slope, 1)
            assert net.weight.item() == pytest.approx(then, abs=1e-6)


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


def test_gradients_are_joined_with_those_of_other_machines_before_they_are_clipped() -> None:
    """The slopes 3 and 4 here and as much elsewhere: 6 and 8, of norm 10, are scaled to norm 1."""
    net, counts = nn.Linear(2, 1, bias=False), []
    optimiser = Optimiser([net], 0.1, clip=1.0)

    def join(grad: Tensor, count: Tensor | int) -> tuple[Tensor, Tensor | int]:
        counts.append(count)
        return grad * 2, count

    optimiser.join = join
    norm = optimiser.descend((net.weight * torch.tensor([3.0, 4.0])).sum() * 7, 7)
    assert norm.item() == pytest.approx(10.0)
    assert optimiser.first.tolist() == pytest.approx([0.06, 0.08], rel=1e-5)
    assert counts == [7]


@pytest.mark.parametrize("elsewhere", [0, 5])
def test_a_step_is_taken_where_anybody_is_active_on_any_machine(elsewhere: int) -> None:
    """Nobody here: Adam's moments would go on moving the weights, and other machines' gradients are to do so."""
    net = nn.Linear(2, 1, bias=False)
    optimiser = Optimiser([net], 0.1)
    slope = torch.tensor([3.0, 4.0])
    optimiser.descend((net.weight * slope).sum(), 1)
    optimiser.join = lambda grad, count: (grad + slope, count + elsewhere)
    before = weights(net)
    optimiser.descend((net.weight * slope).sum() * 0, torch.tensor(0))
    assert torch.equal(weights(net), before) == (elsewhere == 0)


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


# --- a copy that follows ---


class Two(nn.Module):
    """Two weights of two numbers each, and two buffers, one of which counts."""

    mean: Tensor
    count: Tensor

    def __init__(self, first: float, second: float) -> None:
        super().__init__()
        self.one = nn.Parameter(torch.full((2,), first))
        self.two = nn.Parameter(torch.full((1, 2), second))
        self.register_buffer("mean", torch.tensor([1.0, 2.0]))
        self.register_buffer("count", torch.tensor(3))


def pair(every: int, tau: float) -> tuple[Two, Optimiser, Target]:
    net = Two(8.0, -4.0)
    optimiser = Optimiser([net], 0.25)
    return net, optimiser, Target(net, optimiser, every, tau)


def move(net: Two, one: float, two: float) -> None:
    with torch.no_grad():
        net.one.fill_(one)
        net.two.fill_(two)


def held(target: Target) -> list[float]:
    module: Any = target.module
    return [*module.one.tolist(), *module.two.flatten().tolist()]


def test_a_copy_begins_equal_and_has_no_gradients() -> None:
    net, optimiser, target = pair(1, 1.0)
    assert held(target) == [8, 8, -4, -4]
    assert not any(p.requires_grad for p in target.parameters())
    assert not {p.data_ptr() for p in net.parameters()} & {p.data_ptr() for p in target.parameters()}
    move(net, 0.0, 0.0)
    assert held(target) == [8, 8, -4, -4]
    assert optimiser.vector.tolist() == [0, 0, 0, 0]


def test_a_hard_copy_is_made_once_in_so_many_updates() -> None:
    """Every 3: what the weights are at updates 3 and 6, and nothing of those between."""
    net, _, target = pair(3, 1.0)
    copied = []
    for k in range(1, 8):
        move(net, float(k), float(-k))
        target.follow()
        copied.append(held(target)[0])
        assert held(target)[2] == (-4 if k < 3 else -copied[-1])
    assert copied == [8, 8, 3, 3, 3, 6, 6]
    assert target.updates == 7


def test_a_soft_copy_follows_by_its_share_each_time() -> None:
    """A quarter of the way to 0 from 8: 6, 4.5; then to 16: 4.5 + 11.5 / 4."""
    net, _, target = pair(1, 0.25)
    move(net, 0.0, 12.0)
    target.follow()
    assert held(target) == [6, 6, 0, 0]  # -4 + 16 / 4
    target.follow()
    assert held(target) == [4.5, 4.5, 3, 3]
    move(net, 16.0, 3.0)
    target.follow()
    assert held(target) == [7.375, 7.375, 3, 3]


def test_share_and_interval_go_together() -> None:
    net, _, target = pair(2, 0.5)
    move(net, 0.0, -4.0)
    copied = []
    for _ in range(5):
        target.follow()
        copied.append(held(target)[0])
    assert copied == [8, 4, 4, 2, 2]


@pytest.mark.parametrize(("every", "expected"), [(1, [1, 1, 3, 4]), (2, [8, 8, 3, 3])])
def test_its_clock_stands_still_where_no_step_was_taken(every: int, expected: list[float]) -> None:
    net, _, target = pair(every, 1.0)
    copied = []
    for k, stepped in enumerate((True, False, True, True), 1):
        move(net, float(k), 0.0)
        target.follow(torch.tensor(stepped))
        copied.append(held(target)[0])
    assert copied == expected
    assert target.updates == 3


def test_it_follows_the_steps_of_an_optimiser() -> None:
    """Adam's first step is by the rate, 1/4: from 8 to 7.75, and the copy half of that."""
    net, optimiser, target = pair(1, 0.5)
    optimiser.descend(net.one.sum(), 1)
    target.follow()
    assert net.one.tolist() == pytest.approx([7.75] * 2)
    assert held(target) == pytest.approx([7.875, 7.875, -4, -4])


def test_buffers_are_copied_when_it_moves_and_not_before() -> None:
    """Statistics are no weights: they are taken whole, whatever the share."""
    net, _, target = pair(2, 0.5)
    net.mean.copy_(torch.tensor([5.0, 7.0]))
    net.count.fill_(9)
    module: Any = target.module
    target.follow()
    assert (module.mean.tolist(), module.count.item()) == ([1, 2], 3)
    target.follow()
    assert (module.mean.tolist(), module.count.item()) == ([5, 7], 9)
    assert module.count.dtype == torch.long


def test_how_far_it_lags_behind() -> None:
    """Weights 3, 3, 4, 4 and a copy of 0, 0, 8, 8: differences 3, 3, -4, -4, as long as the weights themselves."""
    net, _, target = pair(1, 1.0)
    assert target.lag() == 0
    move(net, 0.0, 8.0)
    target.follow()
    move(net, 3.0, 4.0)
    assert target.lag().item() == pytest.approx(1.0)
    move(net, 0.0, 2.0)  # the copy is three times its length ahead: 6, 6 over 2, 2
    assert target.lag().item() == pytest.approx(3.0)
    move(net, 0.0, 0.0)
    assert target.lag().isfinite()
    target.follow()
    assert target.lag() == 0


def test_it_is_saved_and_comes_back_into_the_same_tensors() -> None:
    net, _, target = pair(3, 1.0)
    for k in (1.0, 2.0):
        move(net, k, k)
        target.follow()
    state = {k: x.clone() for k, x in target.state_dict().items()}
    assert set(state) == {"updates", "module.one", "module.two", "module.mean", "module.count"}
    other, _, again = pair(3, 1.0)
    again.load_state_dict(state)
    move(other, 5.0, 5.0)
    again.follow()  # the third
    assert held(again) == [5, 5, 5, 5]
    again.follow()
    move(other, 6.0, 6.0)
    assert held(again) == [5, 5, 5, 5]


def test_it_follows_all_that_its_optimiser_moves_or_is_refused() -> None:
    net, rest = Two(8.0, -4.0), nn.Linear(1, 1)
    with pytest.raises(AssertionError, match="follows all that its optimiser moves"):
        Target(net, Optimiser([net, rest], 0.25), 1, 1.0)


def test_a_module_of_several_nets_keeps_each_in_its_place() -> None:
    nets = nn.ModuleDict({"b": nn.Linear(2, 1), "a": nn.Linear(1, 3)})
    optimiser = Optimiser([nets], 0.25)
    target = Target(nets, optimiser, 1, 1.0)
    with torch.no_grad():
        for k, p in enumerate(nets.parameters()):
            p.fill_(float(k))
    target.follow()
    assert all(torch.equal(p, nets.state_dict()[k]) for k, p in target.module.state_dict().items())


class Half(nn.Module):
    """The second layer learns, the first does not."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.drop, self.second = nn.Linear(2, 3).requires_grad_(False), nn.Dropout(), nn.Linear(3, 1)


def test_what_does_not_learn_stays_as_it_is_in_the_copy() -> None:
    module = Half()
    optimiser = Optimiser([module], 0.1)
    target = Target(module, optimiser, 1, 1.0)
    before = module.first.weight.clone()
    with torch.no_grad():
        optimiser.vector.add_(1)
    target.follow()
    copied: Any = target.module
    assert torch.equal(copied.first.weight, before)
    assert torch.equal(copied.second.weight, module.second.weight)
    assert not any(p.requires_grad for p in copied.parameters())


def test_a_copy_gives_values_in_the_mode_in_which_it_acts_and_never_trains() -> None:
    module = Half()
    owner = nn.ModuleDict({"net": module, "target": Target(module, Optimiser([module], 0.1), 1, 1.0)})
    owner.train()
    assert module.drop.training
    assert not any(m.training for m in owner["target"].modules())
