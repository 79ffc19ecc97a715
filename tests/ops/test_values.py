"""Values of choices, with numbers worked out on paper."""

from __future__ import annotations

import pytest
import torch

from shoal.ops.values import as_vector, best, counterfactual, double_q, dueling, expected, one_hot, taken, td_priority
from shoal.spec import Box, Discrete, MultiDiscrete

torch.set_num_threads(1)
FOUR, THREE_TWO = Discrete(4), MultiDiscrete((3, 2))
CHOOSER = torch.tensor([[1.0, 9, 3, 4], [5.0, 2, 8, 1]])  # [B, A]: prefers 1 and 2
SCORER = torch.tensor([[100.0, 10, 30, 40], [50.0, 20, 15, 99]])
Y, N = True, False


def test_the_chooser_selects_and_the_scorer_scores() -> None:
    assert double_q(CHOOSER, SCORER, FOUR).tolist() == [10.0, 15.0]  # neither the scorer's maximum nor the chooser's value
    assert double_q(SCORER, CHOOSER, FOUR).tolist() == [1.0, 1.0]
    assert double_q(SCORER, SCORER, FOUR).tolist() == [100.0, 99.0]  # both one: the maximum


def test_only_what_is_legal_is_chosen() -> None:
    legal = torch.tensor([[Y, N, Y, Y], [Y, Y, N, N]])  # the preferred ones are not: then 3 (4 of 1, 3, 4) and 0 (5 of 5, 2)
    assert best(CHOOSER, FOUR, legal).tolist() == [3, 0]
    assert double_q(CHOOSER, SCORER, FOUR, legal).tolist() == [40.0, 50.0]
    assert double_q(SCORER, SCORER, FOUR, legal).tolist() == [100.0, 50.0]
    assert best(-1e9 - CHOOSER, FOUR, torch.tensor([N, N, N, Y])).tolist() == [3, 3]  # however little it is worth


def test_several_dimensions_choose_apart_and_are_worth_their_mean() -> None:
    chooser = torch.tensor([1.0, 5, 2, 7, 6])  # sizes 3 and 2: 1 and 0
    scorer = torch.tensor([8.0, 4, 6, 10, 20])
    assert best(chooser, THREE_TWO).tolist() == [1, 0]
    assert double_q(chooser, scorer, THREE_TWO).item() == 7.0  # (4 + 10) / 2
    assert double_q(scorer, scorer, THREE_TWO).item() == 14.0  # (8 + 20) / 2
    legal = torch.tensor([Y, N, Y, N, Y])
    assert double_q(chooser, scorer, THREE_TWO, legal).item() == 13.0  # 2 and 1: (6 + 20) / 2


def test_the_best_action_of_several_dimensions_is_the_best_of_all() -> None:
    q = torch.randn(50, 5, generator=torch.Generator().manual_seed(0))
    every = torch.cartesian_prod(torch.arange(3), torch.arange(2))  # [6, 2]
    worth = taken(q[:, None].expand(-1, 6, -1), every.expand(50, -1, -1), THREE_TWO)
    torch.testing.assert_close(double_q(q, q, THREE_TWO), worth.amax(1))


def test_taken_and_shapes() -> None:
    q = torch.arange(2 * 3 * 4.0).reshape(2, 3, 4)
    assert taken(q, torch.tensor([[0, 1, 2], [3, 0, 1]]), FOUR).tolist() == [[0.0, 5, 10], [15.0, 16, 21]]
    assert best(q, FOUR).shape == (2, 3)
    one = MultiDiscrete((4,))  # one dimension of several is still a dimension
    assert best(q, one).shape == (2, 3, 1)
    assert taken(q, best(q, one), one).tolist() == [[3.0, 7, 11], [15.0, 19, 23]]


def test_one_hot() -> None:
    assert one_hot(torch.tensor([2, 0]), Discrete(3)).tolist() == [[0, 0, 1], [1, 0, 0]]
    assert one_hot(torch.tensor([[2, 0], [1, 1]]), THREE_TWO).tolist() == [[0, 0, 1, 1, 0], [0, 1, 0, 0, 1]]
    assert one_hot(torch.tensor([1]), Discrete(2)).dtype == torch.float32


def test_dueling() -> None:
    advantage, value = torch.tensor([1.0, 2, 6, 10, 20]), torch.tensor([100.0, 200])
    # the first dimension's mean is 3, the second's 15
    assert dueling(advantage, value, THREE_TWO).tolist() == [98.0, 99, 103, 195, 205]
    assert dueling(advantage[:3], value[:1], Discrete(3)).tolist() == [98.0, 99, 103]


def test_expected_and_counterfactual() -> None:
    q, pi = torch.tensor([4.0, 8, 12]), torch.tensor([0.5, 0.25, 0.25])
    assert expected(q, pi, Discrete(3)).item() == 7.0  # 2 + 2 + 3
    assert counterfactual(q, pi, torch.tensor([0.0, 0, 1]), Discrete(3)).item() == 5.0  # 12 - 7
    q, pi = torch.tensor([4.0, 8, 12, 2, 6]), torch.tensor([0.5, 0.25, 0.25, 0.75, 0.25])
    assert expected(q, pi, THREE_TWO).item() == 5.0  # (7 + 3) / 2
    played = one_hot(torch.tensor([1, 1]), THREE_TWO)
    assert counterfactual(q, pi, played, THREE_TWO).item() == 2.0  # (8 + 6) / 2 - 5


def test_priority_of_a_sequence() -> None:
    error = torch.tensor([[[1.0, -3], [0, 0]], [[-4.0, 8], [2, -2]]])  # [T, B, N]; means 2 and 6, 0 and 2
    # 3/4 of the largest and 1/4 of the mean over time: 4.5 + 1, 1.5 + 0.25
    assert td_priority(error, None, 0.75).tolist() == [5.5, 1.75]
    assert td_priority(error[:1], None, 0.75).tolist() == [2.0, 0.0]  # of a single step: its error
    assert td_priority(error[:1], None).tolist() == pytest.approx([2.0, 0.0])


def test_priority_of_those_that_count() -> None:
    error = torch.tensor([[[1.0, -3], [torch.nan, 9]], [[-4.0, 8], [2, -2]], [[9.0, 9], [9, 9]]])
    mask = torch.tensor([[[Y, Y], [N, N]], [[N, Y], [Y, Y]], [[N, N], [N, N]]])
    # row 0: 2 and 8 in two steps, 6 + 1.25; row 1: 2 in one step alone
    assert td_priority(error, mask, 0.75).tolist() == [7.25, 2.0]
    assert td_priority(error, torch.zeros_like(mask), 0.75).tolist() == [0.0, 0.0]


def test_actions_as_critics_take_them() -> None:
    assert as_vector(torch.tensor([[2, 0]]), Discrete(3)).tolist() == [[[0.0, 0, 1], [1, 0, 0]]]
    assert as_vector(torch.tensor([[2, 0], [1, 1]]), THREE_TWO).tolist() == [[0.0, 0, 1, 1, 0], [0, 1, 0, 0, 1]]
    numbers = torch.tensor([[0.25, -1.0], [0.5, 1.0]], requires_grad=True)
    told = as_vector(numbers * 2, Box((-3.0, 0.0), (3.0, 9.0)))
    assert told.tolist() == [[0.5, -1.0], [1.0, 1.0]]  # in the policy's units, clipped as on the way to the world
    assert told.requires_grad
