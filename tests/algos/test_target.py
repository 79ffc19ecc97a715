"""Copies that follow what an optimiser moves, and settings that are out of bounds. The numbers are powers of two: exact."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

from shoal.algos.base import Optimiser, Target, bounded
from shoal.spec import UserError
from shoal.training.loop import Loop
from shoal.training.settings import Settings, resolve


class Two(nn.Module):
    """Two weights of two numbers each, and two buffers, one of which counts."""

    seen: torch.Tensor
    count: torch.Tensor

    def __init__(self, first: float, second: float) -> None:
        super().__init__()
        self.one = nn.Parameter(torch.full((2,), first))
        self.two = nn.Parameter(torch.full((1, 2), second))
        self.register_buffer("seen", torch.tensor([1.0, 2.0]))
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


def test_a_copy_begins_equal_and_is_nobodys_to_learn() -> None:
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
    seen = []
    for k in range(1, 8):
        move(net, float(k), float(-k))
        target.follow()
        seen.append(held(target)[0])
        assert held(target)[2] == (-4 if k < 3 else -seen[-1])
    assert seen == [8, 8, 3, 3, 3, 6, 6]
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
    seen = []
    for _ in range(5):
        target.follow()
        seen.append(held(target)[0])
    assert seen == [8, 4, 4, 2, 2]


@pytest.mark.parametrize(("every", "expected"), [(1, [1, 1, 3, 4]), (2, [8, 8, 3, 3])])
def test_its_clock_stands_still_where_no_step_was_taken(every: int, expected: list[float]) -> None:
    net, _, target = pair(every, 1.0)
    seen = []
    for k, stepped in enumerate((True, False, True, True), 1):
        move(net, float(k), 0.0)
        target.follow(torch.tensor(stepped))
        seen.append(held(target)[0])
    assert seen == expected
    assert target.updates == 3


def test_it_follows_what_an_optimiser_does_without_being_told() -> None:
    """Adam's first step is by the rate, 1/4: from 8 to 7.75, and the copy half of that."""
    net, optimiser, target = pair(1, 0.5)
    optimiser.descend(net.one.sum(), 1)
    target.follow()
    assert net.one.tolist() == pytest.approx([7.75] * 2)
    assert held(target) == pytest.approx([7.875, 7.875, -4, -4])


def test_buffers_are_copied_when_it_moves_and_not_before() -> None:
    """Statistics are no weights: they are taken whole, whatever the share."""
    net, _, target = pair(2, 0.5)
    net.seen.copy_(torch.tensor([5.0, 7.0]))
    net.count.fill_(9)
    module: Any = target.module
    target.follow()
    assert (module.seen.tolist(), module.count.item()) == ([1, 2], 3)
    target.follow()
    assert (module.seen.tolist(), module.count.item()) == ([5, 7], 9)
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
    assert set(state) == {"updates", "module.one", "module.two", "module.seen", "module.count"}
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


# --- settings out of bounds ---


@dataclass(frozen=True)
class Config:
    share: float | None = 0.5
    weight: float = 1.0
    n_step: int | None = 3


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        (Config(share=1.5), "--algo.share is 1.5: it must be between 0 and 1."),
        (Config(share=-0.1), "--algo.share is -0.1: it must be between 0 and 1."),
        (Config(weight=-1.0), "--algo.weight is -1.0: it must be at least 0."),
        (Config(n_step=0), "--algo.n-step is 0: it must be more than zero."),
        (Config(n_step=-2), "--algo.n-step is -2: it must be more than zero."),
        (Config(weight=float("nan")), "--algo.weight is nan: it must be at least 0."),
        (Config(share=float("nan")), "--algo.share is nan: it must be between 0 and 1."),
    ],
)
def test_what_is_out_of_bounds_is_one_sentence(config: Config, sentence: str) -> None:
    with pytest.raises(UserError) as e:
        bounded(config, {"share": (0, 1), "weight": (0, 1e30)}, ("n_step",))
    assert str(e.value) == sentence


@pytest.mark.parametrize("config", [Config(), Config(0.0, 0.0, 1), Config(1.0, 1e20, 10**9), Config(share=None, n_step=None)])
def test_bounds_are_within_and_what_is_none_or_not_there_is_let_be(config: Config) -> None:
    bounded(config, {"share": (0, 1), "weight": (0, 1e30), "elsewhere": (5, 6)}, ("n_step", "nowhere"))


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


def test_a_copy_judges_as_one_acts_and_never_trains() -> None:
    module = Half()
    owner = nn.ModuleDict({"net": module, "target": Target(module, Optimiser([module], 0.1), 1, 1.0)})
    owner.train()
    assert module.drop.training
    assert not any(m.training for m in owner["target"].modules())


@pytest.mark.parametrize("algo", ["ddqn", "iql", "coma"])
def test_who_does_not_learn_any_more_explores_no_more(algo: str) -> None:
    """Whatever epsilon its checkpoint has: a partner of another run is what it learnt, not a random one."""
    net = {"hidden": (), "gain_actor": 100.0}  # so sure that a draw is the choice itself
    run = {"envs": 64, "quiet": True, "reward": "team-mean"}
    loop = Loop(resolve(Settings(algo, "simple_spread", run, {"net": net, "algo": {"rollout": 2}})))
    (player,) = loop.players.algorithms
    player.epsilon.fill_(1.0)  # type: ignore[operator, union-attr]
    frame, memory = loop.collector.frame, loop.collector.memory
    noise = loop.players.noise(torch.Generator().manual_seed(0), 64)
    greedy = player.act(frame, memory, None, False)[0]["agents"]
    learning = player.act(frame, memory, noise, True)[0]["agents"]
    player.learns = False  # type: ignore[misc]
    frozen = player.act(frame, memory, noise, True)[0]["agents"]
    assert (learning == greedy).float().mean() < 0.4
    assert (frozen == greedy).float().mean() > 0.98
