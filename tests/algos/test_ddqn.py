"""Values learnt from a replay, DDQN, IQL, VDN and QMIX: every target, mask and option with the number worked out on paper.

The nets of `learner` are one layer, set by hand: what an agent sees is what its choices are worth, Q(o, a) = o[a]. The copy
says the same, unless `slow` is its matrix: Q'(o, a) = (slow o)[a]. gamma = 1/2, errors are squared and halved, and Adam's first
step is by the rate, 1/4, unless a test says otherwise. What the loss is given is written down by `told`.
"""

import math

import pytest
import torch
from bench import (
    CPU,
    GRU,
    HALF_WAY,
    JUNK,
    KERNELS,
    REPLAY,
    N,
    Switch,
    Y,
    act,
    agent_group,
    check_every_option_is_tested,
    collect,
    draw,
    feed,
    halves,
    make_batch,
    make_frame,
    make_learner,
    make_loop,
    moment,
    near,
    record_losses,
    same_state,
    set_layer,
    spec_of,
    spoil,
    take_turns,
    update,
)

from shoal.algos.ddqn import DDQN
from shoal.algos.iql import IQL
from shoal.algos.qmix import QMIX
from shoal.algos.samples import Samples
from shoal.algos.vdn import VDN
from shoal.ids import catalog
from shoal.ops.schedules import Now
from shoal.spec import Box, Discrete, EnvSpec, Frame, MultiDiscrete, UserError
from shoal.tree import tree_leaves, tree_map

SWAP = [[0.0, 1], [1, 0]]
LINE = Box((-1.0,), (1.0,))
PLAIN = {
    "gamma": 0.5,
    "lr": 0.25,
    "huber": None,
    "grad_clip": None,
    "normalise_obs": False,
    "prioritised": True,
    "epsilon_keep": 0.0,
    "normalise_reward": False,
    "n_step": 1,
    "epsilon": 1.0,
    "epsilon_last": 0.0,
    "epsilon_steps": 100,
    "target_every": 1000,
    "target_tau": 1.0,
}


def learner(spec=None, net=None, kernels=False, slow=None, cls=DDQN, **config):
    a = make_learner(cls, spec, net=net, kernels=kernels, **{**PLAIN, **config})
    if not a.recurrent and not a.config.noisy:
        for g in a.groups:
            layer, copied = (a._q_net(g, target).net.body for target in (False, True))
            set_layer(layer, torch.eye(layer.width_in))
            set_layer(copied, torch.eye(layer.width_in) if slow is None else slow)
    return a


@pytest.fixture
def told(monkeypatch):
    """What the loss was given: value, target, mask and the loss itself, weighted."""
    return record_losses(monkeypatch)


def weight(a, group="agents", target=False):
    return a._q_net(group, target).net.body.weights[0]


# --- options that change one number -----------------------------------------------------------------------------------


def target(a, told, metrics):
    return told[-1]["target"].flatten()


def first_weight(a, told, metrics):
    return weight(a)[0, 0]


def target_row(a, told, metrics):
    return weight(a, target=True)[0]


def epsilon(a, told, metrics):
    assert metrics["epsilon"] == a.epsilon
    return a.epsilon


# action 0, worth 1, is paid 3; next the choices are worth 4 and 6 and the copy has them swapped: Q' = 6 and 4. The second is
# chosen: y = 3 + 4/2 = 5, the error 4. The slope in the first weight and bias is -4, in the others 0
ONE = {"obs": [[1.0, 0]], "next_obs": [[4.0, 6]], "reward": 3.0}
SWITCHES = {
    "gamma": Switch(target, [5.0], 1.0, [7.0]),
    "double": Switch(target, [5.0], False, [6.0]),  # 3 + 6/2
    "reward_scale": Switch(target, [5.0], 2.0, [8.0]),
    "time_limit": Switch(target, [5.0], False, [3.0], None, {"over": Y}),
    "huber": Switch(lambda a, told, metrics: metrics["td_loss"], 8.0, 1.0, 3.5),  # 4^2 / 2; 1 (4 - 1/2)
    "lr": Switch(first_weight, 1.25, 0.5, 1.5),
    "lr_schedule": Switch(first_weight, 1.25, "linear", 1.125),  # half-way
    "lr_last": Switch(first_weight, 1.125, 0.5, 1.1875, {"lr_schedule": "linear"}),
    "weight_decay": Switch(first_weight, 1.25, 0.5, 1.25 - 0.25 * 0.5),  # rate times decay times 1
    "grad_clip": Switch(lambda a, *_: a.optimiser.first.norm(), 0.1 * 4 * 2**0.5, 0.5, 0.1 * 0.5),
    "target_every": Switch(target_row, [0.0, 1], 1, [1.25, 0]),
    "target_tau": Switch(target_row, [1.25, 0], 0.25, [0.25 * 1.25, 0.75], {"target_every": 1}),
    "epsilon": Switch(epsilon, 0.5, 0.5, 0.25),  # half-way to 0
    "epsilon_last": Switch(epsilon, 0.5, 0.25, 0.625),
    "epsilon_steps": Switch(epsilon, 0.5, 200, 0.75),
    "epsilon_schedule": Switch(epsilon, 0.5, "constant", 1.0),
    "rollout": Switch(feed("steps"), 4.0, 7, 7.0),
    "every": Switch(feed("every"), 16.0, 0.5, 0.5),
    "batch": Switch(feed("batch"), 256.0, 32, 32.0),
    "capacity": Switch(feed("capacity"), 500_000.0, 1000, 1000.0),
    "learning_starts": Switch(feed("start"), 5000.0, 0, 0.0),
    "prioritised": Switch(feed("alpha"), 0.6, False, 0.0),
    "priority": Switch(feed("alpha"), 0.6, 0.25, 0.25),
    "priority_weight": Switch(feed("beta"), 0.4, 0.7, 0.7),
}
ELSEWHERE = {  # option -> the test of it, here or in a file of its own
    "after_death": "tests/algos/test_after_death.py",
    "burn_in": "test_the_burn_in_brings_memory_up_to_date_and_is_not_learnt_from",
    "chunk": "test_how_long_sequences_are",
    "dueling": "test_dueling_values",
    "epsilon_keep": "test_a_random_action_goes_on_and_is_begun_less_often",
    "hyper_width": "test_the_mixer_is_as_wide_as_asked_for",
    "mixer_width": "test_the_mixer_is_as_wide_as_asked_for",
    "n_step": "test_so_many_rewards_and_fewer_where_time_ends",
    "noisy": "test_noise_in_the_weights",
    "normalise_obs": "test_observations_are_normalised_by_what_was_collected",
    "normalise_reward": "test_rewards_are_divided_by_the_root_mean_square_of_what_was_collected",
    "normaliser": "test_a_normaliser_of_the_users_own",
    "normalise_state": "tests/algos/test_observations.py",
    "state_normaliser": "tests/algos/test_observations.py",
    "shaper": "test_the_replay_holds_what_was_paid_at_the_time",
}


def test_every_option_has_a_number_of_its_own():
    check_every_option_is_tested((DDQN, IQL, VDN, QMIX), SWITCHES, ELSEWHERE, globals())


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("option", SWITCHES)
def test_switching_an_option_changes_the_number_expected_by_hand(option, kernels, told):
    s = SWITCHES[option]
    for config, expected in s.cases(option):
        a = learner(None, None, kernels, SWAP, **config)
        a.set_schedules(HALF_WAY)
        metrics = update(a, make_batch(**{**ONE, **(s.batch or {})}))
        near(s.measure(a, told, metrics), expected)


def test_names_and_defaults():
    assert catalog("algos")["dqn"].settings == {"double": False}
    assert DDQN.Config().double
    with pytest.raises(UserError, match=r"--net.trunk shared is for actors beside critics: DDQN has neither"):
        learner(net={"trunk": "shared"})


@pytest.mark.parametrize(
    ("option", "value"),
    [
        *((x, 0) for x in ("rollout", "every", "batch", "capacity", "chunk", "n_step", "epsilon_steps", "target_every")),
        *((x, 0.0) for x in ("lr", "huber", "grad_clip", "reward_scale")),
        *((x, 1.1) for x in ("gamma", "epsilon", "epsilon_last", "target_tau", "lr_last", "priority_weight")),
        *((x, -0.1) for x in ("gamma", "epsilon", "epsilon_last", "target_tau", "lr_last", "priority_weight")),
        *((x, -1) for x in ("weight_decay", "learning_starts", "burn_in", "priority")),
        *((x, 0) for x in ("mixer_width", "hyper_width")),
        *(("epsilon_keep", x) for x in (-0.1, 1.0)),
    ],
)
def test_what_is_out_of_bounds_is_refused_by_its_flag(option, value):
    with pytest.raises(UserError, match=f"--algo.{option.replace('_', '-')} is "):
        QMIX.Config(**{option: value})


# --- targets ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("double", "legal", "expected"),
    [
        # online 4, 6, 9; the copy 30, 20, 10
        (True, None, 3 + 10 / 2),
        (False, None, 3 + 30 / 2),
        (True, [Y, Y, N], 3 + 20 / 2),
        (False, [N, Y, Y], 3 + 20 / 2),
        (True, [Y, N, N], 3 + 30 / 2),
    ],
)
def test_the_net_chooses_among_what_is_legal_and_the_copy_scores(double, legal, expected, told):
    slow = torch.diag(torch.tensor([30 / 4, 20 / 6, 10 / 9]))
    a = learner(spec_of(action=Discrete(3), masked=legal is not None), slow=slow, double=double)
    now = None if legal is None else [N, N, Y]  # what was legal at the moment is another matter
    update(a, make_batch([[7.0, 1, 2]], [[4.0, 6, 9]], 3.0, 2, legal=now, next_legal=legal))
    near(told[0]["target"].flatten(), [expected])
    near(told[0]["value"].flatten(), [2.0])


# rows: nothing ends; terminated in step 0, 1, 2; cut off in step 0, 1, 2. Rewards are 1, 2, 4 and the next moments are worth
# 8, 16, 32: 1 + 8/2 = 5; 1 + 2/2 + 16/4 = 6; 1 + 2/2 + 4/4 + 32/8 = 7
ENDS = {
    1: [5.0, 1, 5, 5, 5, 5, 5],
    2: [6.0, 1, 2, 6, 5, 6, 6],
    3: [7.0, 1, 2, 3, 5, 6, 7],
}
AS_DEATHS = {1: [5.0, 1, 5, 5, 1, 5, 5], 2: [6.0, 1, 2, 6, 1, 2, 6], 3: [7.0, 1, 2, 3, 1, 2, 3]}


@pytest.mark.parametrize("limit", [True, False])
@pytest.mark.parametrize("n", [1, 2, 3])
@pytest.mark.parametrize("mortal", [False, True])
def test_so_many_rewards_and_fewer_where_time_ends(n, limit, mortal, told):
    """n_step. What lies after an end is another episode's: junk."""
    a = learner(spec_of(mortal=mortal), n_step=n, time_limit=limit)
    assert a.feed.length == n
    terminated, over = torch.zeros(3, 7, dtype=torch.bool), torch.zeros(3, 7, dtype=torch.bool)
    r, w = torch.tensor([1.0, 2, 4])[:, None].expand(3, 7).clone(), torch.tensor([8.0, 16, 32])[:, None].expand(3, 7).clone()
    for k in range(3):
        terminated[k, 1 + k] = over[k, 4 + k] = over[k, 1 + k] = True
        for row in (1 + k, 4 + k):
            r[k + 1 :, row] = w[k + 1 :, row] = JUNK
        w[k, 1 + k] = JUNK
    seen = torch.stack((w, w - 1), -1)
    metrics = update(a, make_batch(torch.ones(n, 7, 2), seen[:n], r[:n], 0, terminated[:n], over[:n]))
    near(told[0]["target"][0, :, 0], (ENDS if limit else AS_DEATHS)[n])
    assert told[0]["value"].shape == (1, 7, 1)  # of one moment each: the others were there for their rewards
    assert (told[0]["mask"] is None) == (not mortal)
    near(metrics["q"], 1.0)


def test_what_follows_a_sequence_gives_rewards_and_values_and_is_not_learnt(told):
    """chunk 2 and n_step 2 of three steps: y_0 = 1 + 2/2 + 16/4, y_1 = 2 + 4/2 + 32/4. In the last step anything may be
    done and seen."""
    a, b = (learner(chunk=2, n_step=2) for _ in range(2))
    w = torch.tensor([8.0, 16, 32])[:, None].expand(3, 2)
    batch = make_batch([[1.0, 0], [3, 0], [5, 0]], w, [1.0, 2, 4])
    spoilt = tree_map(torch.clone, batch)
    spoilt.frame["agents"].obs[2] = JUNK
    spoilt.actions["agents"][2] = 1
    for x, given in ((a, batch), (b, spoilt)):
        metrics = update(x, given)
        near(told[-1]["target"].flatten(), [6.0, 12])
        near(told[-1]["value"].flatten(), [1.0, 3])
        near(metrics["td_loss"], (25 + 81) / 4)
        near(metrics["td_error"], 7.0)
        near(metrics["q"], 2.0)
        near(metrics["priority"], [0.9 * 9 + 0.1 * 7])
    assert same_state(a, b)
    # slopes of (Q - y) / 2: (-5 * 1 - 9 * 3) / 2 in the weight, -14 / 2 in the bias
    near(moment(a.optimiser, weight(a)), [[-1.6, 0], [0, 0]])
    near(moment(a.optimiser, a._q_net("agents").net.body.biases[0]), [-0.7, 0])


def test_an_agent_that_is_gone_without_having_terminated_is_bootstrapped(told):
    """Of two agents that leave in step 0 the first terminated: y = 1, and 1 + 8/2. The rewards after that are nobody's. Where
    time_limit is false both ended."""
    for limit, expected in ((True, [1.0, 5]), (False, [1.0, 1])):
        a = learner(spec_of(2, mortal=True), n_step=2, time_limit=limit)
        batch = make_batch(
            torch.ones(2, 1, 2, 2),
            [[[[JUNK, 0], [8, 0]]], [[[JUNK, 0], [JUNK, 0]]]],
            [[[1.0, 1]], [[JUNK, JUNK]]],
            terminated=[[[Y, N]], [[N, N]]],
            alive=[Y, N],
            next_alive=N,
        )
        update(a, batch)
        near(told[-1]["target"].flatten(), expected)


@pytest.mark.parametrize("cls", [DDQN, IQL])
def test_everybody_is_paid_and_learns_for_itself(cls, told):
    """Two agents and two rows: y = r + max o' / 2 for each."""
    a = learner(spec_of(2), cls=cls)
    q = torch.tensor([[[[1.0, 2], [3, 4]], [[5, 6], [7, 8]]]])
    w = torch.tensor([[[[2.0, 1], [4, 1]], [[6, 1], [8, 1]]]])
    metrics = update(a, make_batch(q, w, [[[1.0, 2], [3, 4]]], [[[0, 1], [1, 0]]]))
    near(told[0]["value"][0], [[1.0, 4], [6, 7]])
    near(told[0]["target"][0], [[2.0, 4], [6, 8]])
    near(metrics["td_loss"], 0.25)  # errors 1, 0, 0, 1
    near(metrics["priority"], [0.5, 0.5])
    assert "priority" not in update(learner(spec_of(2), cls=cls, prioritised=False), make_batch(q, w))


# --- importance and priorities ---


def test_importance_weighs_the_loss_and_not_the_priority(told):
    """Errors of 4 and 2: 8 and 2, of which a half and the whole."""
    a = learner()
    batch = make_batch([[[1.0, 0], [2, 0]]], [[[0.0, 0], [0, 0]]], [[5.0, 4]])
    batch.weight = torch.tensor([0.5, 1.0])
    metrics = update(a, batch)
    near(told[0]["loss"].flatten(), [4.0, 2])
    near(metrics["td_loss"], 3.0)
    near(metrics["td_error"], 3.0)
    near(metrics["priority"], [4.0, 2])
    # (-4 * 1 * 0.5 - 2 * 2 * 1) / 2 in the weight, (-2 - 2) / 2 in the bias
    near(moment(a.optimiser, weight(a))[0], [-0.3, 0])
    near(moment(a.optimiser, a._q_net("agents").net.body.biases[0]), [-0.2, 0])
    near(metrics["grad_norm"], (9 + 4) ** 0.5)


def test_importance_of_sequences_and_priorities_of_those_who_are_there(told):
    """Two steps of two agents, one of whom is gone in step 1: errors 1, 3 and 5. 0.9 of 5 and 0.1 of (2 + 5) / 2."""
    a = learner(spec_of(2, mortal=True), chunk=2)
    r = [[[1.0, 3]], [[5, JUNK]]]
    batch = make_batch(torch.zeros(2, 1, 2, 2), torch.zeros(2, 1, 2, 2), r, terminated=[[[N, Y]], [[N, N]]])
    batch.frame["agents"].alive[1, 0, 1] = batch.frame["agents"].active[1, 0, 1] = False
    batch.weight = torch.tensor([0.5])
    metrics = update(a, batch)
    near(metrics["priority"], [0.9 * 5 + 0.1 * 3.5])
    near(metrics["td_loss"], 0.5 * (1 + 9 + 25) / 2 / 3)
    near(metrics["td_error"], 3.0)


def test_where_nobody_acts_nothing_moves():
    a = learner(spec_of(mortal=True), weight_decay=0.5)
    batch = make_batch([[1.0, 0]], [[4.0, 6]], JUNK, alive=N, next_alive=N)
    before = {k: x.clone() for k, x in a.state_dict().items() if "target.updates" not in k}
    metrics = update(a, batch)
    assert all(torch.equal(x, a.state_dict()[k]) for k, x in before.items())
    assert (metrics["td_loss"], metrics["priority"].item(), a.optimiser.steps) == (0, 0, 0)


# --- those who take turns ---


TURNS = {  # what holds after step 3 -> targets of agent 0's turns 0 and 2 and of agent 1's turns 1 and 3, and which are learnt
    # agent 0: 1 + 2 + 6/2, 4 + 8 + 10/2; agent 1: 32 + 64 + 4/2, and its next turn is not seen
    "goes on": ([6.0, 17, 98, None], {}),
    "terminated": ([6.0, 12, 98, 128], {"terminated": [N, N, N, Y], "over": [N, N, N, Y]}),
    "cut off": ([6.0, 17, 98, None], {"over": [N, N, N, Y]}),  # at agent 0's turn
    # agent 0's turn 0 is cut off after step 1, at its own turn, which is worth 20; agent 1's turn 1 when it would wait
    "cut off before": ([1 + 2 + 20 / 2, 17, None, None], {"over": [N, Y, N, N]}),
}


@pytest.mark.parametrize("case", TURNS)
@pytest.mark.parametrize("double", [True, False])
def test_who_waits_is_paid_until_its_next_turn_and_valued_there(case, double, told):
    """Agent 0 moves in steps 0 and 2, agent 1 in 1 and 3, then agent 0 again. What they see while they wait is junk. The
    present is valued as the next moments are: the net chooses, the copy scores. The copy has the choices swapped."""
    expected, ends = TURNS[case]
    a = learner(spec_of(2, mortal=True, turns=True), slow=SWAP, double=double)
    assert (a.feed.length, a.chunk) == (4, 4)  # two turns of each

    def worth(x):
        return [x, x + 1] if double else [x - 1, x]  # x is what comes out

    wait = [JUNK, -JUNK]
    q = [[[worth(1), wait]], [[wait, worth(1)]], [[worth(6), wait]], [[wait, worth(4)]]]
    w = [q[1], [[worth(20), wait]], q[3], [[worth(10), wait]]]
    batch = make_batch(q, w, [[[1.0, 16]], [[2, 32]], [[4, 64]], [[8, 128]]], **ends)
    turn = torch.tensor([[[Y, N]], [[N, Y]]]).repeat(2, 1, 1)
    metrics = update(a, take_turns(batch, turn))
    target, mask = told[0]["target"], told[0]["mask"]
    at = [(0, 0), (2, 0), (1, 1), (3, 1)]
    assert not mask[~turn].any()
    for (t, i), y in zip(at, expected, strict=True):
        assert bool(mask[t, 0, i]) == (y is not None)
        if y is not None:
            near(target[t, 0, i], y)
    assert metrics["td_error"] < 200


def test_turns_that_nobody_knows_the_end_of_are_learnt_where_a_cut_is_an_end(told):
    """time_limit false: agent 1's last turn, cut off while it waits, is worth its 128."""
    a = learner(spec_of(2, mortal=True, turns=True), time_limit=False)
    zeros = torch.zeros(4, 1, 2, 2)
    batch = make_batch(zeros, zeros, [[[1.0, 16]], [[2, 32]], [[4, 64]], [[8, 128]]], over=[N, N, N, Y])
    turn = torch.tensor([[[Y, N]], [[N, Y]]]).repeat(2, 1, 1)
    update(a, take_turns(batch, turn))
    assert torch.equal(told[0]["mask"], turn)
    near(told[0]["target"][turn], [3.0, 96, 12, 128])


def test_turns_take_no_returns_of_several_steps():
    with pytest.raises(UserError, match=r"--algo.n-step counts steps of the world"):
        learner(spec_of(2, mortal=True, turns=True), n_step=2)
    assert learner(spec_of(2, mortal=True, turns=True), chunk=9).feed.length == 9


# --- what values are made of ---


def test_several_dimensions_are_worth_their_mean(told):
    """Choices (1, 2) are worth (3 + 9) / 2. Next the net prefers 0 (5 of 5, 1) and 2 (8 of 6, 7, 8), of which the copy, ten
    times the values with those of the second dimension in reverse, says 50 and 60: 1 + 55/2."""
    slow = torch.zeros(5, 5)
    for k, of in enumerate((0, 1, 4, 3, 2)):
        slow[k, of] = 10.0
    for double, expected in ((True, 1 + 55 / 2), (False, 1 + (50 + 80) / 4)):
        a = learner(spec_of(action=MultiDiscrete((2, 3))), slow=slow, double=double)
        action = torch.tensor([1, 2]).reshape(1, 1, 1, 2)
        update(a, make_batch([[2.0, 3, 7, 8, 9]], [[5.0, 1, 6, 7, 8]], 1.0, action))
        near(told[-1]["value"].flatten(), [6.0])
        near(told[-1]["target"].flatten(), [expected])
        assert len(told[-1]["loss"].flatten()) == 1
        # the error 6 - y is one: each of both choices has half its slope
        near(
            moment(a.optimiser, a._q_net("agents").net.body.biases[0]), [0, *[x * 0.05 * (6 - expected) for x in (1, 0, 0, 1)]]
        )


def test_several_dimensions_and_their_masks(told):
    a = learner(spec_of(action=MultiDiscrete((2, 3)), masked=True))
    action = torch.tensor([0, 0]).reshape(1, 1, 1, 2)
    legal = [N, Y, Y, Y, N]  # 1 and 7 instead of 5 and 8
    update(a, make_batch([[2.0, 3, 7, 8, 9]], [[5.0, 1, 6, 7, 8]], 1.0, action, next_legal=legal))
    near(told[0]["target"].flatten(), [1 + 4 / 2])


def test_dueling_values(told):
    """dueling: advantages 1 and 5 about a value of 10: 8 and 12. Next 2 and 0 about 4: 5 and 3."""
    a = learner(spec_of(obs=(3,)), dueling=True)
    assert weight(a).shape == (3, 3)
    update(a, make_batch([[1.0, 5, 10]], [[2.0, 0, 4]], 3.0))
    near(told[0]["value"].flatten(), [8.0])
    near(told[0]["target"].flatten(), [3 + 5 / 2])
    # the slope 8 - 5.5 goes to the value, a half of it to the own advantage and less a half to the other
    near(moment(a.optimiser, a._q_net("agents").net.body.biases[0]), [0.125, -0.125, 0.25])


SIGMA = 0.5 / 2**0.5  # the first size of noise in a layer of two inputs
ONES = 0.8413447  # Phi(1): noise of 1; 0.5 is noise of 0


def noisy_learner(spec=None, **config):
    a = learner(spec, net={"memory_width": 2, "activation": "relu"}, noisy=True, **config)
    for is_target in (False, True):
        net = a._q_net("agents", is_target)
        set_layer(net.net.body, torch.eye(2))
        set_layer(net.out.mean, torch.eye(2))
    return a


@torch.no_grad()
def test_noise_in_the_weights(told):
    """noisy: q = o + e_out sigma (o . e_in + 1). The net, the net at the next moment and the copy have draws of their own, of
    two inputs and two outputs each."""
    a = noisy_learner()
    assert a.draws(1, 1) == 12
    assert a.noise == 1 + 2 + 4  # a coin, a choice of two, the weights'

    def learnt(*noise):
        with torch.enable_grad():
            b = noisy_learner()
            batch = make_batch([[1.0, 2]], [[4.0, 6]], 3.0)
            batch.noise = torch.tensor([x for part in noise for x in part])
            update(b, batch)
        return told[-1]["value"].item(), told[-1]["target"].item()

    none, all_of = [0.5] * 4, [ONES] * 4
    assert learnt(none, none, none) == pytest.approx((1.0, 3 + 6 / 2))
    assert learnt(all_of, none, none) == pytest.approx((1 + SIGMA * 4, 6.0), abs=1e-5)
    assert learnt([ONES, 0.5, ONES, 0.5], none, none) == pytest.approx((1 + SIGMA * 2, 6.0), abs=1e-5)
    # noise on the first output alone makes the net choose it, 4 + 11 sigma: worth 4 to the copy
    assert learnt(none, [ONES, ONES, ONES, 0.5], none) == pytest.approx((1.0, 3 + 4 / 2), abs=1e-5)
    assert learnt(none, none, [ONES, ONES, 0.5, ONES]) == pytest.approx((1.0, 3 + (6 + SIGMA * 11) / 2), abs=1e-5)


def test_the_present_is_scored_by_the_copys_noise_too(told):
    """Where agents wait for turns: choices worth 1 and 2, the second of which the copy's noise makes 2 + sigma (1 + 2 + 1)."""
    for part, more in ((0, 0.0), (1, 0.0), (2, 4 * SIGMA)):
        a = noisy_learner(spec_of(2, mortal=True, turns=True))
        noise = torch.full((3, 4), 0.5)
        noise[part, [0, 1, 3]] = ONES
        batch = make_batch(torch.tensor([1.0, 2]).expand(4, 1, 2, 2), torch.zeros(4, 1, 2, 2), 1.0)
        batch.noise = noise.flatten()
        turn = torch.tensor([[[Y, N]], [[N, Y]]]).repeat(2, 1, 1)
        update(a, take_turns(batch, turn))
        near(told[-1]["target"][0, 0, 0], 2 + (2 + more) / 2)


@torch.no_grad()
def test_noisy_weights_choose_and_without_noise_their_means_do():
    a = noisy_learner(epsilon=0.0)
    frame = make_frame([[[4.0, 6]], [[4.0, 6]]], start=Y)
    u = torch.full((2, 1, 7), 0.5)
    u[1, 0, 3:6] = ONES  # inputs, and the first output: 4 + 11 sigma = 7.9
    assert act(a, frame, u).actions["agents"].flatten().tolist() == [1, 0]  # each row its own
    assert act(a, frame).actions["agents"].flatten().tolist() == [1, 1]


def test_draws_of_groups_follow_each_other():
    spec = EnvSpec((agent_group(1, Discrete(2), "a"), agent_group(2, Discrete(3), "b")), common=True)
    a = learner(spec, net={"memory_width": 4}, cls=VDN, noisy=True)
    assert a.noisy_draws == {"a": 6, "b": 7}
    assert a.draws(5, 9) == 3 * 13
    batch = make_batch([[0.0, 0]], [[0.0, 0]])
    batch.noise = torch.arange(39.0)
    parts = a._noise(batch)
    assert [x[0].item() for x in parts["a"]] == [0, 6, 12]
    assert [(len(x), x[0].item()) for x in parts["b"]] == [(7, 18), (7, 25), (7, 32)]
    assert learner().draws(5, 9) == 0


# --- normalisers ---


def test_rewards_are_divided_by_the_root_mean_square_of_what_was_collected(told):
    """normalise_reward: 2 and 6 were collected, of mean square 20; what the dead are paid is not counted. What is drawn from
    the past is divided by the same."""
    for mortal in (False, True):
        a = learner(spec_of(mortal=mortal), normalise_reward=True, reward_scale=3.0)
        zeros = [[[0.0, 0], [0, 0]]]
        a.update_statistics(make_batch(zeros, zeros, [[2.0, 6]]))
        if mortal:
            a.update_statistics(make_batch(zeros, zeros, [[JUNK, JUNK]], alive=N))
        update(a, make_batch(zeros, zeros, [[10.0, 4]], terminated=Y))
        near(told[-1]["target"].flatten(), [30 / 20**0.5, 12 / 20**0.5])
        update(a, make_batch(zeros, zeros, [[10.0, 4]], terminated=Y))  # an update is no witness
        near(told[-1]["target"].flatten(), [30 / 20**0.5, 12 / 20**0.5])


def test_observations_are_normalised_by_what_was_collected(told):
    """normalise_obs: 1 and 3 have mean 2 and deviation 1: 5 is 3 then, and 4 is 2. Updates move nothing."""
    a = learner(normalise_obs=True)
    a.update_statistics(make_batch([[[1.0, 1], [3, 3]]], [[[JUNK, 0], [JUNK, 0]]]))
    update(a, make_batch([[5.0, 0]], [[4.0, 2]], 3.0))
    near(told[0]["value"].flatten(), [3.0])
    near(told[0]["target"].flatten(), [3 + 2 / 2])
    assert a.observations["agents"].norms["agents"].count == 2


def test_a_normaliser_of_the_users_own(tmp_path, told):
    """With this `normaliser` an observation of 4 is 2, and next 8 is 4."""
    a = learner(normaliser=halves(tmp_path), normalise_obs=True)
    update(a, make_batch([[4.0, 0]], [[8.0, 0]], 3.0))
    near(told[0]["value"].flatten(), [2.0])
    near(told[0]["target"].flatten(), [3 + 4 / 2])
    norm = a.observations["agents"].norms["agents"]
    assert norm.seen == 0
    a.update_statistics(make_batch([[4.0, 0]], [[8.0, 0]], 3.0))
    assert norm.seen == 2


# --- rates and epsilon ---


@pytest.mark.parametrize(
    ("schedule", "at"),
    [
        ("linear", {0: 0.8, 25: 0.65, 50: 0.5, 100: 0.2, 101: 0.2, 999: 0.2}),
        ("exponential", {0: 0.8, 50: 0.4, 100: 0.2, 500: 0.2}),
        ("cosine", {0: 0.8, 50: 0.5, 100: 0.2, 500: 0.2}),
        ("constant", {0: 0.8, 50: 0.8, 500: 0.8}),
        ("exponential:0.5/update", {0: 0.8, 10: 0.4, 20: 0.2, 30: 0.2}),  # an update in ten steps
        ("exponential:0.99/step", {0: 0.8, 50: 0.8 * 0.99**50, 500: 0.2}),
    ],
)
def test_epsilon_goes_by_environment_steps_and_then_stays(schedule, at):
    """From 0.8 to 0.2 in 100 of the run's 1000 steps."""
    a = learner(epsilon=0.8, epsilon_last=0.2, epsilon_steps=100, epsilon_schedule=schedule)
    for step, expected in at.items():
        a.set_schedules(Now(step, 1000, step // 10))
        near(a.epsilon, expected, 1e-6)
        assert a.optimiser.rate == 0.25
    assert "epsilon" in a.state_dict()


@pytest.mark.parametrize(
    ("schedule", "share"),
    [
        ("constant", 1.0),
        ("linear", 0.1 + 0.9 / 2),
        ("cosine", 0.1 + 0.9 / 2),
        ("exponential", 0.1**0.5),
        ("exponential:0.8/update", 0.8**5),
        ("exponential:0.99/step", 0.99**50),
    ],
)
def test_rates_go_by_the_run(schedule, share):
    """However short epsilon's time is."""
    a = learner(lr=1e-3, lr_last=0.1, lr_schedule=schedule, epsilon_steps=1)
    a.set_schedules(HALF_WAY)
    near(a.optimiser.rate, 1e-3 * share, 1e-9)
    metrics = update(a, make_batch(**ONE))
    near(metrics["learning_rate"], 1e-3 * share, 1e-9)


@torch.no_grad()
def test_coins_are_tossed_for_each_row_and_agent_and_land_on_what_is_legal():
    """epsilon 1/2: a coin below is any legal choice, by the largest of its numbers; else the best legal one."""
    a = learner(spec_of(2, Discrete(3), masked=True), epsilon=0.5)
    seen = [[[1.0, 9, 2], [1, 9, 2]], [[3.0, 9, 2], [1, 9, 2]]]
    frame = make_frame(seen, start=Y, legal=[[[Y, Y, Y], [Y, Y, Y]], [[Y, N, Y], [Y, N, Y]]])
    #                  wild: 2                 tame: best 1                tame: best legal 0       wild: 0, for 1 is illegal
    u = torch.tensor([[[0.49, 0.1, 0.2, 0.9], [0.5, 0.1, 0.2, 0.9]], [[0.99, 0.1, 0.2, 0.9], [0.0, 0.4, 0.9, 0.1]]])
    actions, memory, extras = act(a, frame, u)
    assert actions["agents"].tolist() == [[2, 1], [0, 0]]
    assert (memory, extras) == ({"agents": {}}, {"agents": {}})
    assert act(a, frame).actions["agents"].tolist() == [[1, 1], [0, 2]]
    a.set_schedules(Now(100, 1000, 0))
    assert act(a, frame, u).actions["agents"].tolist() == [[1, 1], [0, 2]]


@torch.no_grad()
def test_a_random_action_goes_on_and_is_begun_less_often():
    """epsilon and epsilon_keep 1/2: one is begun with 1/2 1/2 / (1 - 1/4) = 1/3, and goes on with 1/2 where it is legal still.
    The best is 0. Rows: it goes on, coin or not; it ends; a new one; none; the one that would go on is illegal."""
    a = learner(spec_of(action=Discrete(4), masked=True), epsilon=0.5, epsilon_keep=0.5)
    assert a.noise == 2 + 4
    legal = torch.ones(5, 1, 4, dtype=torch.bool)
    legal[4, 0, 2] = False
    frame = make_frame(torch.tensor([9.0, 1, 2, 3]).expand(5, 1, 4), legal=legal)
    before = torch.tensor([[1, 2], [1, 2], [0, 2], [0, 2], [1, 2]])[:, None]
    third = [0.1, 0.2, 0.3, 0.9]  # what would be drawn anew
    tosses = [[0.99, 0.49], [0.99, 0.51], [0.33, 0.0], [0.34, 0.0], [0.99, 0.0]]  # a coin, and whether to go on
    u = torch.tensor([[*x, *third] for x in tosses])[:, None]
    memory = {"agents": {"random": before}}
    actions, after, _ = act(a, frame, u, memory)
    assert actions["agents"].flatten().tolist() == [2, 0, 3, 0, 0]
    assert after["agents"]["random"][:, 0, 0].tolist() == [1, 0, 1, 0, 0]
    assert after["agents"]["random"][[0, 2], 0, 1].tolist() == [2, 3]
    greedy, held, _ = act(a, frame, None, memory)
    assert greedy["agents"].flatten().tolist() == [0] * 5
    assert torch.equal(held["agents"]["random"], before)
    assert a.memory(3, CPU)["agents"]["random"].tolist() == [[[0, 0]]] * 3
    assert learner().memory(3, CPU) == {"agents": {}}


@torch.no_grad()
def test_wild_choices_are_even_over_what_is_legal():
    a = learner(spec_of(action=Discrete(4), masked=True), epsilon=0.8)
    rows = 8000
    frame = make_frame(torch.tensor([0.0, 1, 9, 2]).expand(rows, 1, 4), start=Y, legal=[Y, Y, N, Y])
    actions = act(a, frame, draw(a, rows)).actions["agents"]
    near(torch.bincount(actions.flatten(), minlength=4) / rows, [0.8 / 3, 0.8 / 3, 0, 0.2 + 0.8 / 3], 0.02)


# --- memory -----------------------------------------------------------------------------------------------------------

RECALL = {"memory": "gru", "memory_width": 2, "activation": "relu"}
BRIGHT = 50.0  # what is seen is 0 or this, whose tanh is 0 or 1


def remembering(slow=None, **config):
    """h' = (tanh o + h) / 2 in each of two numbers, and Q = h'. `slow`: the copy sees slow o instead."""
    a = learner(net=RECALL, **config)
    for is_target in (False, True):
        net = a._q_net("agents", is_target).net
        set_layer(net.body, torch.eye(2) if slow is None or not is_target else slow)
        set_layer(net.memory.inward, torch.cat((torch.zeros(4, 2), torch.eye(2))))
        set_layer(net.memory.inner, torch.zeros(6, 2))
        set_layer(net.out, torch.eye(2))
    return a


def lights(*pairs):
    return [[x * BRIGHT for x in pair] for pair in pairs]


# memory before: 1, 0. Then 1/2, 1/2 and 3/4, 1/4 in the burn-in; 3/8, 1/8 and 3/16, 9/16; at last 19/32, 25/32
SEEN, NEXT = lights((0, 1), (1, 0), (0, 0), (0, 1)), lights((1, 0), (0, 0), (0, 1), (1, 1))
HELD = {"agents": {"hidden": torch.tensor([[[1.0, 0]]])}}


def remembered(r=(JUNK, JUNK, 1.0, 2.0), memory=None, **more):
    batch = make_batch(SEEN, NEXT, list(r), **more)
    batch.memory = HELD if memory is None else memory
    return batch


def test_the_burn_in_brings_memory_up_to_date_and_is_not_learnt_from(told):
    """burn_in 2 and chunk 2: Q = 3/8, 3/16 of the first choice; the next moments are worth 9/16, 25/32 of the second."""
    a = remembering(burn_in=2, chunk=2)
    assert a.feed.length == 4
    metrics = update(a, remembered())
    near(told[0]["value"].flatten(), [3 / 8, 3 / 16], 1e-7)
    near(told[0]["target"].flatten(), [1 + 9 / 32, 2 + 25 / 64], 1e-7)
    near(metrics["td_error"], (1 + 9 / 32 - 3 / 8 + 2 + 25 / 64 - 3 / 16) / 2)


def test_the_copy_remembers_the_same_steps_by_itself(told):
    """It sees the lights swapped: 1, 0 and 1/2, 1/2 in the burn-in; 1/4, 1/4 and 5/8, 1/8; at last 13/16, 9/16. The net chooses
    the second each time; the copy's own maximum is the first."""
    for double, expected in ((True, (1 / 8, 9 / 16)), (False, (5 / 8, 13 / 16))):
        a = remembering(SWAP, burn_in=2, chunk=2, double=double)
        update(a, remembered())
        near(told[-1]["target"].flatten(), [1 + expected[0] / 2, 2 + expected[1] / 2], 1e-7)
        near(told[-1]["value"].flatten(), [3 / 8, 3 / 16], 1e-7)


@pytest.mark.parametrize(
    ("at", "values", "targets"),
    [
        # in step 0: 0, 1/2; 1/2, 1/4; 1/4, 1/8; 1/8, 9/16; 9/16, 25/32
        (0, [1 / 4, 1 / 8], [9 / 16, 25 / 32]),
        (1, [1 / 4, 0 + 1 / 8], [1 / 2, 3 / 4]),  # 1/2, 0; 1/4, 0; 1/8, 1/2; 9/16, 3/4
        (2, [0.0, 0.0], [1 / 2, 3 / 4]),  # 0, 0; 0, 1/2; 1/2, 3/4
        # in step 3: the true next moment of step 2 still remembers; then 0, 1/2 and 1/2, 3/4
        (3, [3 / 8, 0.0], [9 / 16, 3 / 4]),
    ],
)
def test_memory_is_empty_where_an_episode_starts(at, values, targets, told):
    a = remembering(burn_in=2, chunk=2)
    start = [t == at for t in range(4)]
    update(a, remembered(start=start, over=[t == at - 1 for t in range(4)]))
    near(told[0]["value"].flatten(), values, 1e-7)
    near(told[0]["target"].flatten(), [1 + targets[0] / 2, 2 + targets[1] / 2], 1e-7)


def test_who_arrives_next_has_nothing_to_remember(told):
    """An agent's first frame may be the next one: 0, 1/2 whatever was before."""
    a = learner(spec_of(mortal=True), net=RECALL, burn_in=2, chunk=2)
    b = remembering(burn_in=2, chunk=2)
    a.load_state_dict(b.state_dict())
    batch = remembered()
    batch.next["agents"].start[2] = True
    update(a, batch)
    near(told[0]["target"].flatten(), [1 + 1 / 4, 2 + 25 / 64], 1e-7)


def test_who_is_gone_without_having_terminated_remembers_its_last_observation(told):
    """Cut off alone in the last step, where both lights are on: 19/32, 25/32 as if it were there still. Who died is worth 0."""
    for ended, worth in ((N, 25 / 32), (Y, 0.0)):
        a = learner(spec_of(mortal=True), net=RECALL, burn_in=2, chunk=2)
        a.load_state_dict(remembering(burn_in=2, chunk=2).state_dict())
        update(a, remembered(next_alive=[Y, Y, Y, N], terminated=[N, N, N, ended]))
        near(told[-1]["target"].flatten(), [1 + 9 / 32, 2 + worth / 2], 1e-7)


def test_the_gradient_ends_at_the_burn_in():
    """Lights are seen in step 0 alone, dim ones, and the chunk sees none: what moves the weights that see comes from step 0."""
    for burn_in, chunk, active in ((1, 1, False), (0, 2, True)):
        a = remembering(burn_in=burn_in, chunk=chunk)
        batch = make_batch([[0.5, 0.5], [0.0, 0.0]], [[0.0, 0.0]] * 2, [0.0, 5.0], terminated=Y)
        batch.memory = HELD
        update(a, batch)
        net = a._q_net("agents").net
        assert (moment(a.optimiser, net.body.weights[0]).abs().max() > 1e-4) == active
        assert (
            moment(a.optimiser, net.memory.inner.weights[0]).abs().max() > 1e-4
        )  # of the chunk's own step, by what it remembers


def test_how_long_sequences_are():
    """chunk and burn_in, none and given; n_step adds what is there for its rewards."""
    assert learner().feed.length == 1
    assert learner(burn_in=5).feed.length == 1  # there is nothing to bring up to date
    assert learner(chunk=3).feed.length == 3
    assert learner(net=RECALL).feed.length == 4 + 16
    assert learner(net=RECALL, chunk=3, burn_in=0, n_step=3).feed.length == 5
    assert learner(net=RECALL, chunk=3, burn_in=2).feed.length == 5


def test_what_follows_a_sequence_with_memory(told):
    """burn_in 1, chunk 2, n_step 2: the steps as above, 1/2, 1/2; 3/4, 1/4 and 3/8, 1/8; then one for its rewards, 3/16, 9/16
    and 19/32, 25/32. y = 1 + 2/2 + 9/16 / 4, 2 + 4/2 + 25/32 / 4."""
    a = remembering(burn_in=1, chunk=2, n_step=2)
    assert a.feed.length == 4
    update(a, remembered((JUNK, 1.0, 2.0, 4.0)))
    near(told[0]["value"].flatten(), [3 / 4, 3 / 8], 1e-7)
    near(told[0]["target"].flatten(), [2 + 9 / 64, 4 + 25 / 128], 1e-7)


# --- teams: VDN -------------------------------------------------------------------------------------------------------


def test_a_teams_values_add_up_and_share_one_error(told):
    """Q = 1 + 4, y = 2 + (3 + 6) / 2 = 6.5, the error 1.5. Both agents' slopes are -1.5."""
    a = learner(spec_of(2, common=True), cls=VDN)
    metrics = update(a, make_batch([[[[1.0, 2], [3, 4]]]], [[[[3.0, 0], [0, 6]]]], 2.0, [[[0, 1]]]))
    near(told[0]["value"], [[[5.0]]])
    near(told[0]["target"], [[[6.5]]])
    near(metrics["td_loss"], 1.5**2 / 2)
    near(metrics["priority"], [1.5])
    near(metrics["q"], 5.0)
    near(moment(a.optimiser, a._q_net("agents").net.body.biases[0]), [-0.15, -0.15])
    near(moment(a.optimiser, a._q_net("agents").net.body.ids), [[-0.15, 0], [0, -0.15]])


# row: agents alive now; alive next; terminated; over -> Q, y. Values are 1 and 3 now and 8 and 4 next, pay is 2
LIVES = {
    "both go on": ([Y, Y], [Y, Y], [N, N], N, 4.0, 8.0),
    "one dies": ([Y, Y], [Y, N], [N, Y], N, 4.0, 6.0),
    "one was dead": ([Y, N], [Y, N], [N, N], N, 1.0, 6.0),
    "both die": ([Y, Y], [N, N], [Y, Y], Y, 4.0, 2.0),
    "the last one dies": ([Y, N], [N, N], [Y, N], Y, 1.0, 2.0),
    "one arrives": ([Y, N], [Y, Y], [N, N], N, 1.0, 8.0),
    "cut off": ([Y, Y], [Y, Y], [N, N], Y, 4.0, 8.0),
    "cut off and gone": ([Y, Y], [N, N], [N, N], Y, 4.0, 8.0),
    "nobody is there": ([N, N], [N, N], [N, N], N, None, None),
    "one dies, one arrives": ([Y, N], [N, Y], [Y, N], N, 1.0, 4.0),
    "one is cut off alone": ([Y, Y], [Y, N], [N, N], N, 4.0, 8.0),
}


@pytest.mark.parametrize("limit", [True, False])
def test_a_team_ends_when_nobody_goes_on(limit, told):
    alive, next_alive, terminated, over, q, y = zip(*LIVES.values(), strict=True)
    rows = len(LIVES)
    a = learner(spec_of(2, mortal=True, common=True), cls=VDN, time_limit=limit)
    now, then = (torch.tensor([x]).expand(1, rows, 2, 2).clone() for x in ([[1.0, 0], [3, 0]], [[8.0, 0], [4, 0]]))
    gone = ~torch.tensor([alive])
    now[gone] = JUNK
    learner_reward = torch.full((1, rows, 2), 2.0)
    learner_reward[gone] = JUNK
    batch = make_batch(now, then, learner_reward, 0, [terminated], [over], [alive], [next_alive])
    metrics = update(a, batch)
    counts = [x is not None for x in q]
    assert told[0]["mask"].flatten().tolist() == counts
    there = told[0]["mask"]
    expected = [x if limit or not cut else 2.0 for x, cut in zip(y, over, strict=True) if x is not None]
    near(told[0]["value"][there], [x for x in q if x is not None])
    near(told[0]["target"][there], expected)
    errors = [y - q for y, q in zip(expected, [x for x in q if x is not None], strict=True)]
    near(metrics["td_loss"], sum(e**2 / 2 for e in errors) / (rows - 1))


def test_an_agent_that_died_in_the_window_ends_nothing(told):
    """n_step 2. Agent 1 dies in step 0: 2 + 6/2 + 8/4, and what it is paid afterwards is junk."""
    a = learner(spec_of(2, mortal=True, common=True), cls=VDN, n_step=2)
    w = [[[[JUNK, 0], [JUNK, 0]]], [[[8.0, 0], [JUNK, 0]]]]
    r = [[[2.0, 2]], [[6.0, JUNK]]]
    batch = make_batch([[[[1.0, 0], [3, 0]]], [[[JUNK, 0], [JUNK, 0]]]], w, r, 0, [[[N, Y]], [[N, N]]])
    for frame, t in ((batch.frame, 1), (batch.next, 0), (batch.next, 1)):
        frame["agents"].alive[t, 0, 1] = frame["agents"].active[t, 0, 1] = False
    update(a, batch)
    near(told[0]["target"].flatten(), [2 + 6 / 2 + 8 / 4])
    near(told[0]["value"].flatten(), [4.0])


def unlike(cls=VDN, **config):
    """One of two choices and two of three, in one instance."""
    spec = EnvSpec((agent_group(1, Discrete(2), "a"), agent_group(2, Discrete(3), "b")), common=True)
    return learner(spec, cls=cls, **config)


def parties():
    return make_batch(
        {"a": [[[[1.0, 2]]]], "b": [[[[4.0, 8, 16], [32, 64, 128]]]]},
        {"a": [[[[3.0, 5]]]], "b": [[[[7.0, 9, 6], [2, 1, 0]]]]},
        2.0,
        {"b": [[[1, 2]]], "a": 1},
    )


def test_unlike_groups_are_one_team(told):
    """Q = 2 + 8 + 128; next 5 + 9 + 2, and the copy of b says twice as much: 5 + 18 + 4."""
    a = unlike()
    with torch.no_grad():
        weight(a, "b", target=True).mul_(2)
    update(a, parties())
    near(told[0]["value"], [[[138.0]]])
    near(told[0]["target"], [[[2 + 27 / 2]]])
    frame, a = tree_map(lambda x: x[0], parties().next), unlike()
    actions = act(a, frame).actions
    assert {g: x.tolist() for g, x in actions.items()} == {"a": [[1]], "b": [[1, 0]]}
    near(a.values(parties().frame), [[[2.0 + 16 + 128] * 3]])


def test_speaker_and_listener_add_up(told):
    loop = loop_of("vdn", "simple_speaker_listener", algo={"normalise_obs": False})
    (a,) = loop.learners
    assert a.groups == ("speaker", "listener")
    batch = collect(loop, 1)
    with torch.no_grad():
        parts = [a._q_net(g)(batch.frame[g].obs)[0].gather(-1, batch.actions[g][..., None])[..., 0] for g in a.groups]
        best = [a._q_net(g)(batch.next[g].obs)[0].amax(-1) for g in a.groups]
    update(a, batch)
    torch.testing.assert_close(told[0]["value"], sum(parts))
    reward = batch.results["speaker"].reward
    assert torch.equal(reward, batch.results["listener"].reward)
    torch.testing.assert_close(told[0]["target"], reward + 0.5 * sum(best), rtol=1e-4, atol=1e-5)
    assert parts[0].shape == (1, 8, 1)
    loop.iterate()
    loop.iterate()
    assert loop.replay.count == 16


@pytest.mark.parametrize("cls", [VDN, QMIX])
def test_teams_that_are_refused(cls):
    name = cls.__name__
    with pytest.raises(
        UserError, match=rf"{name} needs agents that are paid alike: ask for --reward team-mean or --reward team"
    ):
        learner(spec_of(2), cls=cls)
    with pytest.raises(UserError, match=f"{name} takes discrete and multi-discrete actions; those of 'agents' are continuous"):
        make_learner(cls, spec_of(2, LINE, common=True))
    with pytest.raises(UserError, match=f"{name} cannot play turn-based worlds"):
        learner(spec_of(2, mortal=True, turns=True, common=True), cls=cls)


@pytest.mark.parametrize("cls", [DDQN, IQL])
def test_groups_that_learn_for_themselves_have_equal_spaces(cls):
    with pytest.raises(UserError, match="cannot play 'a' and 'b': their spaces differ"):
        unlike(cls)
    with pytest.raises(UserError, match="actions; those of 'agents' are continuous"):
        make_learner(cls, spec_of(1, LINE))


# --- teams: QMIX ------------------------------------------------------------------------------------------------------


def mixing(spec=None, **config):
    """Q_team = elu(2 q_0 + 3 q_1) + relu(s), and the copy's = elu(2 q_0 + 3 q_1) + 10 relu(s)."""
    a = learner(spec or spec_of(2, common=True, state=1), cls=QMIX, mixer_width=1, hyper_width=1, **config)
    for mixer, times in ((a.mixer, 1.0), (a.target.module["mixer"], 10.0)):
        with torch.no_grad():
            for p in mixer.parameters():
                p.zero_()
            mixer.inner[1].copy_(torch.tensor([-2.0, 3]))  # their absolute values count
            mixer.outer[1].fill_(-1.0)
            mixer.look[0][2, 0] = 1.0  # rows for the weights in, those out, the state's own value, the shift
            mixer.value[0].fill_(times)
    return a


def stated(state, next_state, *args, **more):
    return make_batch(*args, state=state, next_state=next_state, **more)


def test_the_mixer_sees_the_state_of_the_moment_and_of_the_next(told):
    """Q = 2 * 1 + 3 * 4 + 5 = 19; next 2 * 3 + 3 * 6 + 10 * 7 = 94: y = 2 + 47."""
    a = mixing()
    q, w = [[[[1.0, 2], [3, 4]]]], [[[[3.0, 0], [0, 6]]]]
    update(a, stated([5.0], [7.0], q, w, 2.0, [[[0, 1]]]))
    near(told[0]["value"], [[[19.0]]])
    near(told[0]["target"], [[[49.0]]])
    # the slope -30 goes on to the agents by what they weigh, and to the mixer by what they say
    near(moment(a.optimiser, a._q_net("agents").net.body.biases[0]), [-6.0, -9.0])
    near(moment(a.optimiser, a.mixer.inner[1]), [3.0, -12])  # of absolute values: the first is negative
    assert moment(a.optimiser, a.mixer.value[0]).item() == pytest.approx(-3 * 5)


def test_the_mixer_takes_all_observations_for_a_state_that_is_not_given(told):
    """Four numbers, the first of which is read, over the root of 4: Q = 2 + 12 + 1/2, and next 6 + 18 + 10 * 3/2."""
    a = mixing(spec_of(2, common=True))
    update(a, make_batch([[[[1.0, 2], [3, 4]]]], [[[[3.0, 0], [0, 6]]]], 2.0, [[[0, 1]]]))
    near(told[0]["value"], [[[14.5]]])
    near(told[0]["target"], [[[2 + 39 / 2]]])


def test_the_dead_count_as_nothing_in_the_mixer(told):
    """Rows: agent 1 was dead; agent 1 dies; both die. Q = 2 + 5, 2 + 12 + 5 twice; y = 2 + (6 + 70) / 2 twice, and 2."""
    a = mixing(spec_of(2, common=True, state=1, mortal=True))
    q, w = ([[x] * 3] for x in ([[1.0, 2], [JUNK, 4]], [[3.0, 0], [0, JUNK]]))
    batch = stated([5.0] * 3, [7.0] * 3, q, w, [[[2.0, JUNK], [2, 2], [2, 2]]], [[[0, 0], [0, 1], [0, 1]]])
    view, after = batch.frame["agents"], batch.next["agents"]
    view.alive[0, 0, 1] = view.active[0, 0, 1] = False
    after.alive[0, :, 1] = after.active[0, :, 1] = False
    batch.results["agents"].terminated[0, 1:, 1] = batch.results["agents"].terminated[0, 2] = True
    update(a, batch)
    near(told[0]["value"].flatten(), [7.0, 19, 19])
    near(told[0]["target"].flatten(), [40.0, 40, 2])


def test_the_mixer_takes_the_best_legal_choices(told):
    a = mixing(spec_of(2, common=True, state=1, masked=True))
    legal = [[[[Y, N], [Y, Y]]]]
    batch = stated([0.0], [0.0], [[[[1.0, 2], [3, 4]]]], [[[[3.0, 9], [0, 6]]]], 2.0, next_legal=legal)
    update(a, batch)
    near(told[0]["target"].flatten(), [2 + (6 + 18) / 2])


def test_the_mixer_is_normalised_as_its_state_is(told):
    """States of 1 and 3 were collected: 5 is 3, and 4 is 2."""
    a = mixing(normalise_obs=True)
    zeros = torch.zeros(1, 2, 2, 2)
    a.update_statistics(stated([1.0, 3], [JUNK, JUNK], zeros, zeros))
    update(a, stated([5.0], [4.0], zeros[:, :1], zeros[:, :1], 2.0))
    near(told[0]["value"].flatten(), [3.0])
    near(told[0]["target"].flatten(), [2 + 10 * 2 / 2])


def test_the_mixer_is_as_wide_as_asked_for():
    """mixer_width and hyper_width."""
    a = learner(spec_of(3, common=True, state=4), cls=QMIX, mixer_width=5, hyper_width=7)
    assert [tuple(x[0].shape) for x in (a.mixer.look, a.mixer.inner, a.mixer.outer, a.mixer.value)] == [
        (7 + 7 + 5 + 5, 4),
        (3 * 5, 7),
        (5, 7),
        (1, 5),
    ]
    assert a.optimiser.vector.numel() == sum(p.numel() for m in (a.online, a.mixer) for p in m.parameters())
    assert set(a.nets) == {"values", "target_values", "mixer", "target_mixer"}
    assert set(learner().nets) == {"values", "target_values"}


@torch.no_grad()
def test_what_is_better_for_one_is_never_worse_for_the_team():
    a = learner(spec_of(3, common=True, state=4), cls=QMIX)
    g = torch.Generator().manual_seed(0)
    q, state = torch.randn(1, 500, 3, generator=g) * 3, torch.randn(1, 500, 4, generator=g) * 3
    frame = Frame({}, state)
    before = a.joint(q, None, frame, False)
    for i in range(3):
        more = q.clone()
        more[..., i] += torch.rand(1, 500, generator=g)
        assert (a.joint(more, None, frame, False) >= before - 1e-5).all()
    assert before.std() > 0.01


def test_the_copy_of_a_mixer_follows_with_its_agents():
    a = mixing(target_every=1)
    batch = stated([5.0], [7.0], [[[[1.0, 2], [3, 4]]]], [[[[3.0, 0], [0, 6]]]], 2.0)
    assert update(a, batch)["target_lag"] == 0
    assert a.target.module["mixer"].value[0].item() == a.mixer.value[0].item() == pytest.approx(1.25)


def test_pictures_without_a_state_are_refused():
    spec = EnvSpec((agent_group(2, obs=(3, 32, 32)),), common=True)
    with pytest.raises(UserError, match="this world has pictures and no state of its own: take vdn"):
        learner(spec, cls=QMIX, net={"hidden": (8,)})


# --- whole worlds -----------------------------------------------------------------------------------------------------


def loop_of(name, env, rows=8, /, algo=None, **sections):
    common = catalog("algos")[name].load().reward == "common" and env != "simple_speaker_listener"
    run = {"reward": "team-mean"} if common else {}
    return make_loop(name, env, rows, run=run, algo={**REPLAY, "gamma": 0.5, **(algo or {})}, **sections)


BLIND = [  # algorithm, world, its settings, its nets'
    ("ddqn", "probe_deaths", {"n_step": 3, "chunk": 4}, {}),
    ("ddqn", "probe_deaths", {"chunk": 8, "normalise_reward": True}, {}),
    ("iql", "probe_deaths", {"n_step": 2, "chunk": 4, "epsilon_keep": 0.5}, GRU),
    ("iql", "probe_deaths", {"noisy": True, "dueling": True, "chunk": 8}, {}),
    ("vdn", "probe_deaths", {"n_step": 3, "chunk": 6}, {}),
    ("vdn", "probe_deaths", {"n_step": 2, "chunk": 4, "normalise_reward": True}, GRU),
    ("qmix", "probe_deaths", {"n_step": 2, "chunk": 8}, {}),
    ("qmix", "probe_deaths", {"n_step": 2, "chunk": 4}, GRU),
    ("ddqn", "probe_turns", {"normalise_reward": True, "epsilon_keep": 0.5}, {}),
    ("iql", "probe_turns", {"chunk": 8}, GRU),
]


@pytest.mark.parametrize(("algo", "env", "config", "net"), BLIND)
def test_who_does_not_act_is_in_no_loss_and_no_statistic(algo, env, config, net):
    """Whatever the dead see, remember, do and are paid, and whatever those who wait do, the weights come out the same."""
    loop, twin = (loop_of(algo, env, 4, algo=config, net={"hidden": (8,), **net}) for _ in range(2))
    a, b = loop.learners[0], twin.learners[0]
    loop.collector.collect(5)
    batch = collect(loop, a.feed.length)
    view = batch.frame["agents"]
    gone, waits = ~view.alive, ~view.active
    assert waits.any()
    assert gone.any() == (env == "probe_deaths")
    spoilt = spoil(batch, waits, gone)
    for x in tree_leaves(spoilt.memory):
        x[gone[0]] = 9  # who is not there at first arrives with an empty memory
    for x, given in ((a, batch), (b, spoilt)):
        x.update_statistics(given)
        update(x, given)
    assert same_state(a, b)
    assert a.optimiser.steps == 1
    assert (a.optimiser.first != 0).any()


def test_what_is_seen_while_waiting_is_not_remembered():
    loop, twin = (loop_of("iql", "probe_turns", algo={"normalise_obs": False}, net=GRU) for _ in range(2))
    batch = collect(loop, loop.learners[0].feed.length)
    spoilt = tree_map(torch.clone, batch)
    for frame in (spoilt.frame, spoilt.next):
        frame["agents"].obs[~frame["agents"].active] = 7.0
    for x, given in ((loop, batch), (twin, spoilt)):
        update(x.learners[0], given)
    assert same_state(loop.learners[0], twin.learners[0])


@pytest.mark.parametrize("env", ["probe_deaths", "probe_turns", "simple_spread"])
def test_what_is_remembered_in_an_update_is_what_was_remembered_when_acting(env):
    loop = loop_of("iql", env, net=GRU)
    a = loop.learners[0]
    loop.collector.collect(3)
    batch = collect(loop, 7)
    with torch.no_grad():
        samples = Samples(a, batch)
        _, after = a._q_net("agents")(samples.actor_input, samples.memory, samples.start, samples.remembers)
    assert after["hidden"][-1].abs().max() > 1e-3
    torch.testing.assert_close(loop.collector.memory["agents"]["hidden"], after["hidden"][-1], rtol=0, atol=1e-6)


def test_the_replay_holds_what_was_paid_at_the_time(tmp_path, told):
    """A shaper that pays 7 where the world pays 1; then one that pays 9 for the same past would pay 7 still."""
    (tmp_path / "mine.py").write_text("def paid(reward, obs, step, steps):\n    return reward * 0 + 7 + (step > 0) * 2\n")
    loop = loop_of("ddqn", "probe_constant", 4, algo={"shaper": f"{tmp_path}/mine.py:paid", "chunk": 2})
    for _ in range(2):
        loop.iterate()
    kept = loop.replay[:, :][3]["agents"]
    assert kept[:8].unique().tolist() == [7]
    assert kept[8:].unique().tolist() == [9]


def test_a_run_learns_draws_and_says_so():
    loop = loop_of("qmix", "simple_spread", 4, algo={"prioritised": True, "n_step": 2, "target_every": 2}, net=GRU)
    a = loop.learners[0]
    for _ in range(8):
        loop.iterate()
    assert loop.replay.count == 64
    updates = (256 - 21 * 4) // 32  # of sequences of 4 + 16 + 1 steps
    assert (a.optimiser.steps, a.target.updates) == (updates, updates)
    assert loop.trainers[0].sampler.top != 1
    told = loop.means.take()
    names = ("td_loss", "td_error", "q", "epsilon", "learning_rate", "target_lag", "grad_norm")
    assert {k.split("/")[-1] for k in told} == set(names)
    assert all(math.isfinite(x) for x in told.values())
