"""Schedules by hand: from 8 to 2, over a run of 1,000 steps and 100 updates."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from shoal.ops.schedules import KL, Now, kl_adapted, kl_target, make
from shoal.spec import UserError

FLAG = "--algo.lr-schedule"
AT = (0, 250, 500, 1000)  # environment steps


def value(text: str, step: int, updates: int = 0, first: float = 8.0, last: float = 2.0) -> float:
    return make(text, first, last, FLAG)(Now(step, 1000, updates))


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ("constant", (8.0, 8.0, 8.0, 8.0)),
        ("linear", (8.0, 6.5, 5.0, 2.0)),
        ("cosine", (8.0, 5 + 3 * math.sqrt(0.5), 5.0, 2.0)),  # 2 + 6 (1 + cos(pi p)) / 2
        ("exponential", (8.0, 8 * 0.25**0.25, 4.0, 2.0)),  # 8 (1/4)^p: half-way is the geometric mean
        ("exponential:0.999/step", (8.0, 8 * 0.999**250, 8 * 0.999**500, 8 * 0.999**1000)),  # the last is 2.94
    ],
)
def test_shapes(shape: str, expected: tuple[float, ...]) -> None:
    for step, number in zip(AT, expected, strict=True):
        assert value(shape, step) == pytest.approx(number, rel=1e-12)
        assert value(shape, step, updates=step) == pytest.approx(number, rel=1e-12)  # updates are no matter to these


@pytest.mark.parametrize("shape", ["constant", "linear", "cosine", "exponential"])
def test_progress_is_held_within_the_run(shape: str) -> None:
    assert value(shape, -1000) == 8.0
    assert value(shape, 7000) == pytest.approx(8.0 if shape == "constant" else 2.0)


def test_upwards() -> None:
    assert value("linear", 250, first=0.0, last=1.0) == 0.25
    assert value("cosine", 500, first=0.0, last=1.0) == pytest.approx(0.5)
    assert value("exponential", 500, first=1.0, last=4.0) == pytest.approx(2.0)


def test_exponential_to_zero_ends_at_a_thousandth() -> None:
    assert value("exponential", 1000, first=1.0, last=0.0) == pytest.approx(1e-3)
    assert make("exponential", 1.0, 0.0, FLAG)(Now(1, 3, 0)) == pytest.approx(0.1)
    assert value("exponential", 500, first=0.0, last=0.0) == 0.0
    assert value("linear", 1000, first=1.0, last=0.0) == 0.0
    assert value("cosine", 1000, first=1.0, last=0.0) == pytest.approx(0.0, abs=1e-15)


def test_exponential_by_update_or_by_step_halves_at_each_and_stops_at_the_last() -> None:
    # 8, 4, 2, and no further than 2, whatever the other count says
    assert [value("exponential:0.5/update", 999, k) for k in range(5)] == [8.0, 4.0, 2.0, 2.0, 2.0]
    assert [value("exponential:0.5/step", k, 999) for k in range(5)] == [8.0, 4.0, 2.0, 2.0, 2.0]
    assert value("exponential:5e-1/update", 0, 3, last=0.0) == 1.0
    assert value("exponential:1/update", 0, 99) == 8.0


def test_pytorchs_schedulers_make_a_step_for_each_update() -> None:
    assert [value("StepLR:step_size=2,gamma=0.5", 999, k) for k in range(6)] == [8.0, 8.0, 4.0, 4.0, 2.0, 2.0]
    assert [value("MultiStepLR:milestones=[1,3],gamma=0.1", 0, k, last=0.0) for k in (0, 1, 2, 3)] == pytest.approx(
        [8, 0.8, 0.8, 0.08]
    )
    assert value("CosineAnnealingLR:T_max=4,eta_min=2", 0, 2) == pytest.approx(5.0)


def test_what_a_pytorch_scheduler_gives_follows_from_the_number_of_updates_alone() -> None:
    """Asked anew, or earlier again: as a resumed run does."""
    schedule = make("ExponentialLR:gamma=0.5", 8.0, 0.0, FLAG)
    assert [schedule(Now(0, 1, k)) for k in (3, 3, 4, 1, 0)] == [1.0, 1.0, 0.5, 4.0, 8.0]


def test_a_pytorch_scheduler_stays_where_it_ends_and_never_falls_below_the_last_value() -> None:
    ended = make("OneCycleLR:max_lr=10,total_steps=5", 1.0, 0.0, FLAG)
    assert ended(Now(0, 1, 4)) == ended(Now(0, 1, 5)) == ended(Now(0, 1, 99)) == pytest.approx(10 / 25 / 1e4)
    assert [value("StepLR:step_size=1,gamma=0.5", 0, k, last=3.0) for k in range(4)] == [8.0, 4.0, 3.0, 3.0]


def test_a_pytorch_scheduler_that_fails_later_says_when() -> None:
    with pytest.raises(UserError, match=r"gave no rate after 3 updates: TypeError"):
        make("MultiStepLR:milestones=[3],gamma=[1]", 8.0, 0.0, FLAG)(Now(0, 1, 5))


def test_a_scheduler_of_the_users_own_derives_from_pytorchs(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "from torch.optim.lr_scheduler import LRScheduler\n"
        "class Halves(LRScheduler):\n"
        "    def get_lr(self):\n"
        "        return [lr * 0.5**self.last_epoch for lr in self.base_lrs]\n"
    )
    schedule = make(f"{tmp_path}/mine.py:Halves", 8.0, 0.0, FLAG)
    assert [schedule(Now(0, 1, k)) for k in range(4)] == [8.0, 4.0, 2.0, 1.0]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("StepLR", "missing 1 required positional argument: 'step_size'"),
        ("StepLR:step=3", "StepLR takes no 'step' (did you mean 'step_size'?): it takes step_size, gamma."),
        ("StepLR:step_size=0", "ZeroDivisionError"),
        ("StepLR:3", "arguments are name=number"),
        ("StepLR:step_size=open(1)", "arguments are name=number"),
        ("StepLR:step_size=(", "arguments are name=number"),
        ("ReduceLROnPlateau:factor=0.5", "PyTorch has no 'ReduceLROnPlateau'"),
        ("SteppLR", "did you mean 'StepLR'"),
        ("LRScheduler", "it takes constant"),
        ("SequentialLR:schedulers=[]", "PyTorch has no 'SequentialLR'"),
        ("evil:x=1", "PyTorch has no 'evil'"),
        ("StepLR:step_size=1,**{'gamma':0.5}", "arguments are name=number"),
        ("StepLR:step_size=1,step_size=2", "it has 'step_size' twice"),
    ],
)
def test_a_scheduler_that_cannot_be_made_is_a_sentence(text: str, words: str) -> None:
    with pytest.raises(UserError) as e:
        make(text, 8.0, 2.0, FLAG)
    assert str(e.value).startswith(f"{FLAG} is ")
    assert words in str(e.value)


def test_a_class_of_the_users_own_is_made_of_first_and_last_and_called_with_now(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "class Stairs:\n"
        "    def __init__(self, first, last):\n"
        "        self.first, self.last = first, last\n"
        "    def __call__(self, now):\n"
        "        return self.first - now.updates if now.step < now.steps else self.last\n"
    )
    stairs = make(f"{tmp_path}/mine.py:Stairs", 8.0, 2.0, FLAG)
    assert [stairs(Now(0, 10, 0)), stairs(Now(5, 10, 3)), stairs(Now(10, 10, 4))] == [8.0, 5.0, 2.0]
    with pytest.raises(UserError, match=rf"{FLAG} .* has no 'Stair' \(did you mean 'Stairs'\?\)"):
        make(f"{tmp_path}/mine.py:Stair", 8.0, 2.0, FLAG)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("lineer", r"is 'lineer' \(did you mean 'linear'\?\): it takes constant, linear, cosine, exponential"),
        ("", "it takes constant, linear"),
        ("kl", "the learning rate of PPO's family alone"),  # nothing but a learning rate, which asks `kl_target` first
        ("kl:0.01", "the learning rate of PPO's family alone"),
        ("exponential:0.5", r"exponential:0.999/update \(or /step\)"),
        ("exponential:0.5/epoch", r"exponential:0.999/update \(or /step\)"),
        ("exponential:0/update", "more than 0 and at most 1"),
        ("exponential:1.5/step", "more than 0 and at most 1"),
        ("exponential:-1/step", "more than 0 and at most 1"),
        ("exponential:1.2.3/step", "has '1.2.3' where a number should be"),
        ("no_such_module:Class", "could not be loaded"),
        ("no_such_file.py:Class", "there is no file"),
    ],
)
def test_wrong_words_are_refused_in_a_sentence(text: str, sentence: str) -> None:
    with pytest.raises(UserError, match=sentence) as e:
        make(text, 8.0, 2.0, FLAG)
    assert str(e.value).endswith(".")


def test_kl_names_a_divergence_to_aim_at() -> None:
    assert kl_target("kl", FLAG) == KL == 0.008
    assert kl_target("kl:0.01", FLAG) == 0.01
    for other in ("constant", "exponential:0.5/step", "klein.py:Class", "my.kl:Class"):
        assert kl_target(other, FLAG) is None
    for wrong, sentence in (("kl:0", "more than 0"), ("kl:-1", "more than 0"), ("kl:nan", "more than 0"), ("kl:x", "'x'")):
        with pytest.raises(UserError, match=sentence):
            kl_target(wrong, FLAG)


# the target is 0.01. Above 0.02 a rate is divided by 1.5, below 0.005 it is multiplied, and it stays within 1e-6 and 1e-2
@pytest.mark.parametrize(
    ("rate", "kl", "expected"),
    [
        (3e-4, 0.021, 2e-4),
        (3e-4, 0.019, 3e-4),
        (3e-4, 0.01, 3e-4),
        (3e-4, 0.0051, 3e-4),
        (3e-4, 0.0049, 4.5e-4),
        (3e-4, 0.0, 4.5e-4),
        (9e-3, 0.0, 1e-2),  # 1.35e-2
        (1.2e-6, 1.0, 1e-6),  # 8e-7
        (0.5, 0.01, 1e-2),
    ],
)
def test_a_rate_is_adapted_to_the_divergence(rate: float, kl: float, expected: float) -> None:
    adapted = kl_adapted(torch.tensor(rate), torch.tensor(kl), 0.01)
    assert adapted.item() == pytest.approx(expected, rel=1e-6)


def test_an_adaptive_rate_moves_by_its_factor_between_its_bounds() -> None:
    rate = torch.tensor(0.1)
    moved = [kl_adapted(rate, torch.tensor(kl), 0.01, 2.0, 0.06, 0.15).item() for kl in (0.021, 0.01, 0.004)]
    assert moved == pytest.approx([0.06, 0.1, 0.15])  # 0.05 and 0.2, held
    assert kl_adapted(rate, torch.tensor(0.021), 0.01, 2.0, 0.01, 1.0).item() == pytest.approx(0.05)
