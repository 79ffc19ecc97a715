"""Advantages with numbers worked out on paper. gamma = lambda = 1/2 unless said, so that every number is exact in binary.

A column is one agent's T steps; `column` makes it [T, 1, 1]. In every column r_t is the reward of the step from t to t + 1,
v_t the value of what is seen at t and w_t the value of the true next observation. JUNK stands where nothing may look.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from shoal.ops.returns import gae, n_step, td_lambda, turn_values
from shoal.ops.turns import unsettled_turns

torch.set_num_threads(1)
JUNK = 4096.0
Y, N = True, False


def column(
    r: list[float], v: list[float], w: list[float], terminated: Any = None, cut: Any = None, active: Any = None
) -> dict[str, Tensor]:
    nobody = [N] * len(r)
    parts = {"reward": r, "value_t": v, "value_tp1": w, "terminated": terminated or nobody, "cut": cut or nobody}
    if active is not None:
        parts["active"] = active
    return {k: torch.tensor(x)[:, None, None] for k, x in parts.items()}


def advantage(parts: dict[str, Tensor], gamma: float = 0.5, lam: float = 0.5) -> list[float]:
    return gae(**parts, gamma=gamma, lam=lam)[:, 0, 0].tolist()


# delta_0 = 1 + 8/2 - 4 = 1      delta_1 = 2 + 2/2 - 8 = -5      delta_2 = 3 + 6/2 - 2 = 4 (the rollout ends: w_2 = 6)
# A_2 = 4                        A_1 = -5 + 4/4 = -4             A_0 = 1 - 4/4 = 0
PLAIN = column([1.0, 2, 3], [4.0, 8, 2], [8.0, 2, 6]), [0.0, -4.0, 4.0]
# terminated at 1: delta_1 = 2 - 8 = -6 whatever w_1 is; A_1 = -6, and A_0 = 1 - 6/4 = -1/2; A_2 is a new episode's
TERMINATED = column([1.0, 2, 3], [4.0, 8, 2], [8.0, JUNK, 6], [N, Y, N], [N, Y, N]), [-0.5, -6.0, 4.0]
# truncated at 1, where the true last observation is worth 10 (and the one after the reset v_2 = 2):
# delta_1 = 2 + 10/2 - 8 = -1; the trace is cut, so A_1 = -1, and A_0 = 1 - 1/4 = 3/4
TRUNCATED = column([1.0, 2, 3], [4.0, 8, 2], [8.0, 10, 6], None, [N, Y, N]), [0.75, -1.0, 4.0]
# the rollout ends in a death: no bootstrap there, A_2 = 3 - 2 = 1; A_1 = -5 + 1/4 = -4.75; A_0 = 1 - 4.75/4 = -0.1875
DEATH_LAST = column([1.0, 2, 3], [4.0, 8, 2], [8.0, 2, JUNK], [N, N, Y], [N, N, Y]), [-0.1875, -4.75, 1.0]
# a cut at the rollout's end changes nothing: there is no trace beyond it, and the bootstrap stays
CUT_LAST = column([1.0, 2, 3], [4.0, 8, 2], [8.0, 2, 6], None, [N, N, Y]), [0.0, -4.0, 4.0]
CASES = {"plain": PLAIN, "terminated": TERMINATED, "truncated": TRUNCATED, "death last": DEATH_LAST, "cut last": CUT_LAST}


@pytest.mark.parametrize("name", CASES)
def test_ends(name: str) -> None:
    parts, expected = CASES[name]
    assert advantage(parts) == expected


def test_terminated_alone_ends_as_well_and_wins_over_truncation() -> None:
    parts, expected = TERMINATED
    assert advantage({**parts, "cut": torch.zeros_like(parts["cut"])}) == expected


def test_truncation_takes_the_true_last_observation() -> None:
    """One more on the true last value is worth gamma at the truncated step, and gamma^2 lambda before it."""
    parts, expected = TRUNCATED
    more = {**parts, "value_tp1": parts["value_tp1"] + torch.tensor([0.0, 1.0, 0.0])[:, None, None]}
    assert advantage(more) == [expected[0] + 0.125, expected[1] + 0.5, expected[2]]


def test_death_of_one_agent_while_the_episode_goes_on() -> None:
    """Agent 0 dies in step 1 (terminated, gone from the next frame), agent 1 leaves in step 1 without terminated, agent 2
    goes on. What is written for those who are gone (JUNK, step 2) reaches nothing that counts."""
    dead = column([1.0, 2, JUNK], [4.0, 8, JUNK], [8.0, JUNK, JUNK], [N, Y, N], [N, Y, Y])
    gone = column([1.0, 2, JUNK], [4.0, 8, JUNK], [8.0, 10, JUNK], None, [N, Y, Y])
    both = {k: torch.cat((dead[k], gone[k], PLAIN[0][k]), 2) for k in dead}
    out = gae(**both, gamma=0.5, lam=0.5)[:, 0]
    assert out[:2, 0].tolist() == [-0.5, -6.0]
    assert out[:2, 1].tolist() == [0.75, -1.0]
    assert out[:, 2].tolist() == [0.0, -4.0, 4.0]


def test_lambda_zero_is_the_one_step_error() -> None:
    assert advantage(PLAIN[0], lam=0.0) == [1.0, -5.0, 4.0]
    assert advantage(TRUNCATED[0], lam=0.0) == [1.0, -1.0, 4.0]


def test_lambda_one_is_the_return_less_the_value() -> None:
    # to the rollout's end: 1 + 2/2 + 3/4 + 6/8 = 3.5, less 4; 2 + 3/2 + 6/4 = 5, less 8; 3 + 6/2 = 6, less 2
    assert advantage(PLAIN[0], lam=1.0) == [-0.5, -3.0, 4.0]
    # terminated: 1 + 2/2 = 2, less 4; 2, less 8.   truncated: 1 + 2/2 + 10/4 = 4.5, less 4; 2 + 10/2 = 7, less 8
    assert advantage(TERMINATED[0], lam=1.0) == [-2.0, -6.0, 4.0]
    assert advantage(TRUNCATED[0], lam=1.0) == [0.5, -1.0, 4.0]


def test_gamma_one() -> None:
    # lambda 1: plain sums. 1 + 2 + 3 + 6 - 4 = 8; 2 + 3 + 6 - 8 = 3; 3 + 6 - 2 = 7
    assert advantage(PLAIN[0], gamma=1.0, lam=1.0) == [8.0, 3.0, 7.0]
    # lambda 1/2: deltas 1 + 8 - 4 = 5, 2 + 2 - 8 = -4, 3 + 6 - 2 = 7; A = 7, -4 + 3.5 = -0.5, 5 - 0.25 = 4.75
    assert advantage(PLAIN[0], gamma=1.0, lam=0.5) == [4.75, -0.5, 7.0]


# --- turns: moves at 0 and 3, waiting between. gamma counts the agent's own turns -------------------------------------

# turn 3: rewards 8 + 16 + 32 = 56 and, at the rollout's end, w_5 = 10: delta = 56 + 10/2 - 5 = 56 = A_3
# turn 0: rewards 1 + 2 + 4 = 7, next value v_3 = 5: delta = 7 + 5/2 - 3 = 6.5, A_0 = 6.5 + 56/4 = 20.5; waiting: 0
R, V = [1.0, 2, 4, 8, 16, 32], [3.0, JUNK, JUNK, 5, JUNK, JUNK]
ACTS = [Y, N, N, Y, N, N]
WAITS = column(R, V, [JUNK] * 5 + [10.0], None, None, ACTS), [20.5, 0.0, 0.0, 56.0, 0.0, 0.0]
# terminated at 4, while waiting; a new episode's first turn at 5: A_5 = 32 + 2/2 - 6 = 27
# turn 3: 8 + 16 - 5 = 19 and no bootstrap; turn 0: 6.5 + 19/4 = 11.25
ENDS = [N, N, N, N, Y, N]
W_END = [JUNK, JUNK, JUNK, JUNK, 12.0, 2.0]
V_END = [3.0, JUNK, JUNK, 5, JUNK, 6]
DIES_WAITING = column(R, V_END, W_END, ENDS, ENDS, [Y, N, N, Y, N, Y]), [11.25, 0, 0, 19.0, 0, 27.0]
# truncated at 4, while waiting: turn 3 is worth 8 + 16 + 12/2 - 5 = 25; turn 0: 6.5 + 25/4 = 12.75
CUT_WAITING = column(R, V_END, W_END, None, ENDS, [Y, N, N, Y, N, Y]), [12.75, 0, 0, 25.0, 0, 27.0]
# terminated at 2; the new episode begins with waiting at 3, whose 8 belongs to no turn; then a turn at 4
# turn 4: 16 + 32 + 10/2 - 5 = 48; turn 0: 1 + 2 + 4 - 3 = 4
LATE_TURN = (
    column(
        R, [3.0, JUNK, JUNK, JUNK, 5, JUNK], [JUNK] * 5 + [10.0], [N, N, Y, N, N, N], [N, N, Y, N, N, N], [Y, N, N, N, Y, N]
    ),
    [4.0, 0, 0, 0, 48.0, 0],
)
# dies on its own turn at 3 (and is gone at 4 and 5): 8 - 5 = 3; turn 0: 6.5 + 3/4 = 7.25
DIES_MOVING = (
    column([1.0, 2, 4, 8, JUNK, JUNK], V, [JUNK] * 6, [N, N, N, Y, N, N], [N, N, N, Y, Y, Y], ACTS),
    [7.25, 0, 0, 3.0, 0, 0],
)
# never on turn in this rollout
IDLE = column(R, [JUNK] * 6, [JUNK] * 6, None, None, [N] * 6), [0.0] * 6
TURNS = {
    "waits": WAITS,
    "dies waiting": DIES_WAITING,
    "cut waiting": CUT_WAITING,
    "late turn": LATE_TURN,
    "dies moving": DIES_MOVING,
    "idle": IDLE,
}


@pytest.mark.parametrize("name", TURNS)
def test_turns(name: str) -> None:
    parts, expected = TURNS[name]
    assert advantage(parts) == expected


def test_turns_with_lambda_one_and_gamma_one() -> None:
    # lambda 1, gamma 1/2: the return from turn 0 is 7 + (56 + 10/2)/2 = 37.5, less 3
    assert advantage(WAITS[0], lam=1.0) == [34.5, 0, 0, 56.0, 0, 0]
    # both 1: 63 + 10 - 3 and 56 + 10 - 5
    assert advantage(WAITS[0], gamma=1.0, lam=1.0) == [70.0, 0, 0, 61.0, 0, 0]


def test_everything_in_one_batch() -> None:
    """Rows and agents do not mix: all columns side by side give what each gives alone."""
    rows = {k: torch.stack([TURNS[n][0][k][:, 0, 0] for n in TURNS], 1) for k in WAITS[0]}
    expected = torch.tensor([TURNS[n][1] for n in TURNS]).T  # [T, 6]
    for shape in ((6, 1), (1, 6), (3, 2), (2, 3)):
        out = gae(**{k: x.reshape(6, *shape) for k, x in rows.items()}, gamma=0.5, lam=0.5)
        assert torch.equal(out, expected.reshape(6, *shape))
    plain = {k: torch.stack([CASES[n][0][k][:, 0, 0] for n in CASES], 1)[:, :, None] for k in PLAIN[0]}
    assert torch.equal(gae(**plain, gamma=0.5, lam=0.5)[..., 0], torch.tensor([CASES[n][1] for n in CASES]).T)


def brute(r: Any, v: Any, w: Any, terminated: Any, cut: Any, active: Any, gamma: float, lam: float) -> list[float]:
    """The definition, turn by turn, for one agent: sum the rewards of a turn, look for the next, add the errors up."""
    steps, out = len(r), [0.0] * len(r)
    turns = []  # (t, error, whether the trace goes on to the next turn)
    for t in (t for t in range(steps) if active[t]):
        learner_reward, at = r[t], t
        while not (terminated[at] or cut[at]) and at + 1 < steps and not active[at + 1]:
            at += 1
            learner_reward += r[at]
        ended = terminated[at] or cut[at]
        value = 0.0 if terminated[at] else v[at + 1] if not ended and at + 1 < steps else w[at]
        turns.append((t, learner_reward + gamma * value - v[t], not ended))
    later = 0.0
    for t, error, goes_on in reversed(turns):
        later = error + gamma * lam * later * goes_on
        out[t] = later
    return out


@pytest.mark.parametrize("turn_based", [False, True])
def test_against_the_definition_on_random_patterns(turn_based: bool) -> None:
    draw = torch.Generator().manual_seed(1)
    shape = (17, 12, 3)

    def normal() -> Tensor:
        return torch.randn(shape, generator=draw, dtype=torch.float64)

    def coin(p: float) -> Tensor:
        return torch.rand(shape, generator=draw) < p

    r, v, w, terminated, cut = normal(), normal(), normal(), coin(0.1), coin(0.15)
    active = coin(0.4) if turn_based else torch.ones(shape, dtype=torch.bool)
    ends = terminated | cut
    w[:-1] = torch.where(ends[:-1], w[:-1], v[1:])  # where nothing ends, the next observation is the next step's
    out = gae(r, v, w, terminated, cut, 0.9, 0.8, active if turn_based else None)
    compared = 0
    for b in range(shape[1]):
        for n in range(shape[2]):
            lines = [x[:, b, n].tolist() for x in (r, v, w, terminated, cut, active)]
            torch.testing.assert_close(out[:, b, n].tolist(), brute(*lines, 0.9, 0.8), rtol=0, atol=1e-6)
            compared += 1
    assert compared == 36


def test_everybody_on_turn_is_no_turns_at_all() -> None:
    for parts, expected in CASES.values():
        assert advantage({**parts, "active": torch.ones_like(parts["cut"])}) == expected


def test_shapes_are_asked_for_and_arguments_left_alone() -> None:
    parts, _ = WAITS
    before = {k: x.clone() for k, x in parts.items()}
    gae(**parts, gamma=0.5, lam=0.5)
    assert all(torch.equal(before[k], parts[k]) for k in parts)
    with pytest.raises(AssertionError, match=r"\[T, B, N\]"):
        gae(**{**PLAIN[0], "value_t": PLAIN[0]["value_t"][..., 0]}, gamma=0.5, lam=0.5)


def test_unsettled_turns() -> None:
    """One agent, seven steps; it moves in steps 0, 2, 3 and 6, waits in 1, 4 and 5."""
    active = torch.tensor([1, 0, 1, 1, 0, 0, 1]).bool().reshape(-1, 1, 1)
    nobody = torch.zeros(7, 1, 1, dtype=torch.bool)

    def unsettled(terminated_at: int | None = None, cut_at: int | None = None, turn_after: bool = False) -> list[int]:
        terminated, ends, turn = nobody.clone(), nobody.clone(), active.roll(-1, 0)
        turn[-1] = turn_after
        if terminated_at is not None:
            terminated[terminated_at] = ends[terminated_at] = True
        if cut_at is not None:
            ends[cut_at] = True
        return (unsettled_turns(terminated, ends, active, turn) & active).flatten().nonzero().flatten().tolist()

    assert unsettled() == [6]  # the rollout ends while it waits for its next turn
    assert unsettled(turn_after=True) == []  # its next turn is the frame after the rollout
    assert unsettled(terminated_at=6) == []
    assert unsettled(cut_at=4) == [3, 6]  # the episode is cut off in step 4, while it waits after its turn in step 3
    assert unsettled(terminated_at=4) == [6]


def test_termination_truncation_death_a_late_arrival_and_waiting_in_one_batch() -> None:
    """Two rows of three agents, eight steps, r_t = t + 1; whose turn it is, by row. gamma = lambda = 1/2.

    row 0:  0 1 0 2 0 2 | 1 2   then 0   agent 1 dies in step 1, agent 2 arrives in step 2, cut off in step 5, at 0's turn
    row 1:  0 1 2 | 1 0 2 1 0   then 1   terminated in step 2
    """
    steps = torch.arange(8)
    turn = torch.tensor([[0, 1, 0, 2, 0, 2, 1, 2], [0, 1, 2, 1, 0, 2, 1, 0]]).T  # [T, B]
    next_turn = torch.cat((turn[1:], torch.tensor([[0, 1]])))
    next_turn[5, 0] = 0  # in the true last frame, not in the one after the reset
    active, told = (x[..., None] == torch.arange(3) for x in (turn, next_turn))
    alive, next_alive = torch.ones(2, 8, 2, 3, dtype=torch.bool)
    alive[2:6, 0, 1] = alive[:2, 0, 2] = next_alive[1:6, 0, 1] = next_alive[0, 0, 2] = False
    terminated = torch.zeros(8, 2, 3, dtype=torch.bool)
    terminated[1, 0, 1] = terminated[2, 1] = True
    over = (steps[:, None] == torch.tensor([5, 2]))[..., None]
    reward = torch.where(alive, steps[:, None, None] + 1.0, JUNK)
    value, value_tp1 = torch.full((2, 8, 2, 3), JUNK)
    values = {(0, 0): {0: 2, 2: 4, 4: 6}, (0, 1): {1: 1, 6: 5}, (0, 2): {3: 2, 5: 4, 7: 5}}
    values |= {(1, 0): {0: 2, 4: 4, 7: 2}, (1, 1): {1: 1, 3: 2, 6: 4}, (1, 2): {2: 1, 5: 5}}
    for (b, n), at in values.items():
        for t, v in at.items():
            value[t, b, n] = v
    value_tp1[5, 0, 0], value_tp1[7, 1, 1] = 8, 2  # where a turn of one's own comes after the end: nobody else's is asked for
    cut = over | ~next_alive
    unsettled = unsettled_turns(terminated, terminated | cut, active, told | ~next_alive)
    out = gae(reward, value, value_tp1, terminated, cut, 0.5, 0.5, active, unsettled)
    expected = torch.zeros(8, 2, 3)
    # row 0, agent 0: A_4 = 5 + 6 + 8/2 - 6 = 9    A_2 = 3 + 4 + 6/2 - 4 + 9/4 = 8.25    A_0 = 1 + 2 + 4/2 - 2 + 8.25/4
    expected[[0, 2, 4], 0, 0] = torch.tensor([5.0625, 8.25, 9.0])
    expected[1, 0, 1] = 2 - 1  # its death; its turn in step 6 waits past the rollout's end, and nothing is known of it
    expected[3, 0, 2] = 4 + 5 + 4 / 2 - 2  # its turns in steps 5 and 7 end while it waits: nothing is known of them
    expected[[0, 4], 1, 0] = torch.tensor([1.0 + 2 + 3 - 2, 5 + 6 + 7 + 2 / 2 - 4])
    # row 1, agent 1: A_6 = 7 + 8 + 2/2 - 4 = 12    A_3 = 4 + 5 + 6 + 4/2 - 2 + 12/4 = 18    A_1 = 2 + 3 - 1
    expected[[1, 3, 6], 1, 1] = torch.tensor([4.0, 18.0, 12.0])
    expected[2, 1, 2] = 3 - 1
    assert torch.equal(out, expected)


# --- returns of n steps ---

# Two rows of two agents, four steps, gamma = 1/2, r = 1 2 4 8 in all of them. The agents' ends:
#   row 0: agent 0 never ends, w = 16 32 64 128                   agent 1 is terminated in step 1, w = 16 JUNK 64 128
#   row 1: agent 0 is cut off in step 2, w = 16 32 64 128         agent 1 is cut off in 0, terminated in 3, w = 16 32 64 JUNK
# JUNK may not be looked at where an agent is terminated.
FOUR = torch.tensor([1.0, 2, 4, 8])[:, None, None].expand(4, 2, 2)
W = torch.tensor([16.0, 32, 64, 128])[:, None, None].repeat(1, 2, 2)
W[1, 0, 1] = W[3, 1, 1] = JUNK
DIED, CUT = torch.zeros(2, 4, 2, 2, dtype=torch.bool)
DIED[1, 0, 1] = DIED[3, 1, 1] = CUT[2, 1, 0] = CUT[0, 1, 1] = True
ENDLESS, DIES, CUTS, BOTH = (0, 0), (0, 1), (1, 0), (1, 1)
N_STEP = {
    # one step: 1 + 16/2, 2 + 32/2, 4 + 64/2, 8 + 128/2; the terminated ones have their reward alone
    (1, ENDLESS): [9.0, 18, 36, 72],
    (1, DIES): [9.0, 2, 36, 72],
    (1, CUTS): [9.0, 18, 36, 72],
    (1, BOTH): [9.0, 18, 36, 8],
    # two: 1 + 18/2, 2 + 36/2, 4 + 72/2, and the window's last step, of which no more is known
    (2, ENDLESS): [10.0, 20, 40, 72],
    (2, DIES): [2.0, 2, 40, 72],  # 1 + 2/2
    (2, CUTS): [10.0, 20, 36, 72],  # step 2 takes the true last observation's 64, not the new episode's reward
    (2, BOTH): [9.0, 20, 8, 8],  # 4 + 8/2
    # three: 1 + 20/2, 2 + 40/2; then the window ends
    (3, ENDLESS): [11.0, 22, 40, 72],
    (3, DIES): [2.0, 2, 40, 72],
    (3, CUTS): [11.0, 20, 36, 72],  # 1 + (2 + (4 + 64/2)/2)/2
    (3, BOTH): [9.0, 6, 8, 8],  # 2 + (4 + 8/2)/2
    # four, and more than there are: 1 + 22/2
    (4, ENDLESS): [12.0, 22, 40, 72],
    (4, CUTS): [11.0, 20, 36, 72],
    (9, ENDLESS): [12.0, 22, 40, 72],
    (9, BOTH): [9.0, 6, 8, 8],
}


@pytest.mark.parametrize(("n", "who"), N_STEP)
def test_n_steps(n: int, who: tuple[int, int]) -> None:
    assert n_step(FOUR, W, DIED, CUT, 0.5, n)[:, who[0], who[1]].tolist() == N_STEP[n, who]


def test_n_steps_whether_an_end_is_also_called_a_cut_or_not() -> None:
    for n in (1, 2, 3):
        assert torch.equal(n_step(FOUR, W, DIED, CUT | DIED, 0.5, n), n_step(FOUR, W, DIED, CUT, 0.5, n))


def test_n_steps_of_one_step_and_of_rewards_in_another_dtype() -> None:
    assert n_step(FOUR[:1].long(), W[:1], DIED[:1], CUT[:1], 0.5, 3).tolist() == [[[9.0, 9.0], [9.0, 9.0]]]
    assert n_step(FOUR[:1].double(), W[:1], DIED[:1], CUT[:1], 0.5, 3).dtype == torch.float32


# --- TD(lambda) ---

# The same agents; gamma = lambda = 1/2, so that G_t = r_t + w_t/4 + G_{t+1}/4, and r_t + w_t/2 where the trace ends.
TD = {
    ENDLESS: [9.875, 19.5, 38.0, 72.0],  # 8 + 64; 4 + 16 + 72/4; 2 + 8 + 38/4; 1 + 4 + 19.5/4
    DIES: [5.5, 2.0, 38.0, 72.0],  # 1 + 4 + 2/4
    CUTS: [9.75, 19.0, 36.0, 72.0],  # 4 + 32; 2 + 8 + 36/4; 1 + 4 + 19/4
    BOTH: [9.0, 15.5, 22.0, 8.0],  # 8; 4 + 16 + 8/4; 2 + 8 + 22/4; 1 + 8
}


@pytest.mark.parametrize("who", TD)
def test_td_lambda(who: tuple[int, int]) -> None:
    assert td_lambda(FOUR, W, DIED, CUT, 0.5, 0.5)[:, who[0], who[1]].tolist() == TD[who]


def test_td_lambda_of_nothing_and_of_everything() -> None:
    """Lambda 0 is one step; lambda 1 goes on until the agent's end or the window's."""
    assert torch.equal(td_lambda(FOUR, W, DIED, CUT, 0.5, 0.0), n_step(FOUR, W, DIED, CUT, 0.5, 1))
    out = td_lambda(FOUR, W, DIED, CUT, 0.5, 1.0)
    assert out[:, 0, 0].tolist() == [12.0, 22, 40, 72]  # 1 + (2 + (4 + (8 + 64)/2)/2)/2
    assert out[:, 0, 1].tolist() == [2.0, 2, 40, 72]  # 1 + 2/2
    assert out[:, 1, 0].tolist() == [11.0, 20, 36, 72]
    assert out[:, 1, 1].tolist() == [9.0, 6, 8, 8]


def test_td_lambda_is_the_advantage_above_the_value() -> None:
    """Where the next value is that of the next step's observation, G_t = A_t + V_t."""
    for parts, expected in CASES.values():
        value = parts["value_t"]
        out = td_lambda(**{k: x for k, x in parts.items() if k != "value_t"}, gamma=0.5, lam=0.5)
        assert (out - value)[:, 0, 0].tolist() == expected


def slow_return(r: Any, w: Any, died: Any, cut: Any, gamma: float, n: int, t: int) -> float:
    """The sum that is in n_step's docstring, for one agent."""
    out, m = 0.0, 0
    while True:
        out += gamma**m * r[t + m]
        m += 1
        if died[t + m - 1]:
            return out
        if cut[t + m - 1] or m == n or t + m == len(r):
            return out + gamma**m * w[t + m - 1]


def test_returns_against_the_definition_on_random_patterns() -> None:
    """TD(lambda) is the mixture (1 - lambda) sum lambda^{n-1} G^n, all that is left going to the longest."""
    draw = torch.Generator().manual_seed(2)
    shape, gamma, lam = (11, 6, 3), 0.9, 0.7
    r, w = (torch.randn(shape, generator=draw, dtype=torch.float64) for _ in range(2))
    died, cut = (torch.rand(shape, generator=draw) < p for p in (0.1, 0.15))
    mixed, by_n = td_lambda(r, w, died, cut, gamma, lam), {n: n_step(r, w, died, cut, gamma, n) for n in (1, 2, 3, 5, 11)}
    compared = 0
    for b in range(6):
        for i in range(3):
            lines = [x[:, b, i].tolist() for x in (r, w, died, cut)]
            for t in range(11):
                for n, out in by_n.items():
                    assert out[t, b, i].item() == pytest.approx(slow_return(*lines, gamma, n, t))
                each = [slow_return(*lines, gamma, n, t) for n in range(1, 41)]
                mixture = sum((1 - lam) * lam**k * g for k, g in enumerate(each)) + lam**40 * each[-1]
                assert mixed[t, b, i].item() == pytest.approx(mixture)
                compared += 1
    assert compared == 198


# --- values where agents move in turn ---


def turns(parts: dict[str, Tensor]) -> list[float]:
    """Of the steps in which the agent acts."""
    return turn_values(**parts, gamma=0.5)[parts["active"]].tolist()


def test_turn_values() -> None:
    assert turns(WAITS[0]) == [9.5, 61.0]  # 1 + 2 + 4 + v_3/2 = 7 + 2.5; 8 + 16 + 32 + 10/2
    assert turns(DIES_WAITING[0]) == [9.5, 24.0, 33.0]  # 8 + 16 and no bootstrap; 32 + 2/2
    assert turns(CUT_WAITING[0]) == [9.5, 30.0, 33.0]  # 8 + 16 + 12/2, of the true last observation
    assert turns(LATE_TURN[0]) == [7.0, 53.0]  # the 8 in which it waits for its first turn is nobody's; 16 + 32 + 10/2
    assert turns(DIES_MOVING[0]) == [9.5, 8.0]


def test_turn_values_where_everybody_acts_are_one_step() -> None:
    parts = {k: x.clone() for k, x in TRUNCATED[0].items()}
    assert turns({**parts, "active": torch.ones_like(parts["cut"])}) == [5.0, 7.0, 6.0]  # 1 + 8/2; 2 + 10/2; 3 + 6/2


def test_turn_values_of_rows_and_agents_do_not_mix_and_leave_their_arguments_alone() -> None:
    names = [n for n in TURNS if n != "idle"]
    rows = {k: torch.stack([TURNS[n][0][k][:, 0, 0] for n in names], 1)[:, :, None] for k in WAITS[0]}
    before = {k: x.clone() for k, x in rows.items()}
    out = turn_values(**rows, gamma=0.5)
    assert [out[:, b][rows["active"][:, b]].tolist() for b in range(5)] == [turns(TURNS[n][0]) for n in names]
    assert all(torch.equal(before[k], rows[k]) for k in rows)
