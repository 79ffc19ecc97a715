"""What minibatches are made of: passes end to end, and the whole episodes of a rollout."""

import pytest
import torch

from shoal.buffers.minibatches import end_to_end, episode_steps


def test_passes_are_taken_end_to_end_in_minibatches_of_one_size():
    """Three passes over four things in minibatches of three: 0 1 2 | 3 4 5 | 6 7 8 | 9 10 11. Two begin in the first pass."""
    orders = torch.arange(12).reshape(3, 4)
    assert [(x.tolist(), n) for x, n in end_to_end(orders, 3)] == [([0, 1, 2, 3, 4, 5], 2), ([6, 7, 8], 1), ([9, 10, 11], 1)]


@pytest.mark.parametrize(
    ("passes", "things", "size", "counts"),
    [
        (4, 64, 10, [7, 6, 7, 5]),  # 256 things: 25 minibatches, and 6 things are left out
        (2, 4, 4, [1, 1]),
        (2, 4, 9, [1, 1]),  # at most all
        (4, 64, 60, [2, 1, 1]),  # the fifth would begin in the last pass, and end after it
        (1, 3, 2, [1]),
    ],
)
def test_what_is_left_at_the_end_is_left_out(passes, things, size, counts):
    parts = end_to_end(torch.arange(passes * things).reshape(passes, things), size)
    assert [n for _, n in parts] == counts
    assert torch.cat([x for x, _ in parts]).tolist() == list(range(sum(counts) * min(size, things)))


def test_the_steps_of_each_rows_first_episodes():
    """Six steps of two rows, two episodes of at most three steps each: of row 0 one of 2 steps and one of 3, of row 1 one of 1
    and one of 2. Row 1 goes on with more, which are not among them."""
    over = torch.tensor([[0, 1, 0, 0, 1, 0], [1, 0, 1, 0, 1, 1]]).T.bool()
    place, filled = episode_steps(over, 2)
    assert filled.T.tolist() == [[True, True, False], [True, False, False], [True, True, True], [True, True, False]]
    assert [
        [p // 2 for p, there in zip(*e, strict=True) if there] for e in zip(place.T.tolist(), filled.T.tolist(), strict=True)
    ] == [
        [0, 1],
        [0],
        [2, 3, 4],
        [1, 2],
    ]
    assert (place % 2).tolist() == [[0, 1, 0, 1]] * 3
    assert place.max() < 12
