"""Encoders: pixels as plain convolutions see them, entities and agents in any order, the dead as zeros or not at all."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from shoal.algos.samples import Samples
from shoal.nets.config import NetConfig
from shoal.nets.encoders import AgentAttention, Attention, Encoder, Entities, Image, JointEncoder, kinds_of, ties
from shoal.nets.heads import Critic
from shoal.nets.parts import VECTOR, parts_of
from shoal.spec import Discrete, Frame, Group, Shape, Slots, UserError
from shoal.training.loop import Loop
from shoal.training.settings import Settings, resolve

torch.set_num_threads(1)
NAMES = ("agent_0", "agent_1", "agent_2")
OWNERS = {"id": [0, 0, 0], "plain": [0, 0, 0], "none": [0, 1, 2], "agent_0=a,agent_1=b,agent_2=a": [0, 1, 0]}


def draw(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def normal(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=draw(seed))


def group_of(obs: Shape | dict[str, Shape], layout: tuple[Slots, ...] = (), name: str = "us") -> Group:
    return Group(name, name, NAMES, obs, Discrete(5), layout)


# --- images ---


def image_of(shape: Shape, share: str = "id", **more: Any) -> Image:
    image = Image(shape, NAMES, NetConfig(share=share, **more), draw())
    with torch.no_grad():  # biases begin at zero: give them something to get wrong
        for b in image.biases:
            b.copy_(normal(*b.shape, seed=3) / 4)
    return image


@pytest.mark.parametrize("share", OWNERS)
def test_bytes_are_scaled_and_numbers_are_not(share: str) -> None:
    image = image_of((3, 9, 9), share)
    pixels = torch.randint(256, (5, 3, 3, 9, 9), generator=draw(), dtype=torch.uint8)
    assert torch.equal(image(pixels), image(pixels.float() / 255))
    assert not torch.allclose(image(pixels), image(pixels.float()))


@pytest.mark.parametrize("share", OWNERS)
@pytest.mark.parametrize("lead", [(5,), (2, 5)])
def test_images_are_convolved_by_the_weights_of_their_agent(lead: tuple[int, ...], share: str) -> None:
    """By hand: 9 x 7 pixels, kernel 3, stride 2: 4 x 3; kernel 2, stride 1: 3 x 2; 8 channels: 48 numbers."""
    image, owners = image_of((3, 9, 7), share, convolutions="4x3/2, 8x2/1", activation="relu"), OWNERS[share]
    assert image.width == 48
    assert [tuple(w.shape) for w in image.weights] == [(4 * image.sets, 3, 3, 3), (8 * image.sets, 4, 2, 2)]
    x = normal(*lead, 3, 3, 9, 7)
    out = image(x)
    assert out.shape == (*lead, 3, 48)
    for i, owner in enumerate(owners):
        y = x[..., i, :, :, :].flatten(0, -4)
        for w, b, stride in zip(image.weights, image.biases, (2, 1), strict=True):
            mine = slice(owner * len(w) // image.sets, (owner + 1) * len(w) // image.sets)
            y = torch.relu(functional.conv2d(y, w[mine], b[mine], stride))
        torch.testing.assert_close(out[..., i, :], y.reshape(*lead, 48), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("agents", "theirs", "others"), [([0, 2], slice(2), slice(2, 4)), ([1], slice(2, 4), slice(2))])
def test_images_have_gradients_of_their_own_agents(agents: list[int], theirs: slice, others: slice) -> None:
    image = image_of((1, 5, 5), "agent_0=a,agent_1=b,agent_2=a", convolutions="2x3/1")
    image(normal(6, 3, 1, 5, 5))[:, agents].sum().backward()
    grad = image.weights[0].grad  # [2 sets of 2 channels, 1, 3, 3]
    assert grad is not None
    assert grad[theirs].abs().sum() > 0
    assert grad[others].abs().sum() == 0


@pytest.mark.parametrize(
    ("side", "width"),
    [
        (84, 64 * 7 * 7),  # 8/4: 20, 4/2: 9, 3/1: 7
        (36, 64 * 1 * 1),  # 8, 3, 1
        (35, 32 * 16 * 16),  # small: 3/1: 33, 3/2: 16
        (10, 32 * 3 * 3),  # 8, 3
        (5, 32 * 1 * 1),  # 3, 1
    ],
)
def test_layers_by_the_size_of_the_image(side: int, width: int) -> None:
    image = Image((1, side, side), NAMES, NetConfig(), draw())
    assert image.width == width
    assert image(torch.zeros(2, 3, 1, side, side)).shape == (2, 3, width)
    flat = image.weights[0].flatten(1)
    rows = min(flat.shape)
    scaled = flat @ flat.T if flat.shape[0] == rows else flat.T @ flat
    torch.testing.assert_close(scaled, 2 * torch.eye(rows), rtol=0, atol=1e-5)  # orthogonal, of gain root 2


def test_first_weights_of_images_follow_the_generator_alone() -> None:
    before = torch.random.get_rng_state()
    one, two, other = (Image((3, 9, 9), NAMES, NetConfig(share="none"), draw(s)) for s in (0, 0, 1))
    assert torch.equal(before, torch.random.get_rng_state())
    for a, b, c in zip(one.weights, two.weights, other.weights, strict=True):
        assert torch.equal(a, b)
        assert not torch.equal(a, c)
        assert not torch.equal(*a.chunk(3)[:2])  # nor is one agent's another's


@pytest.mark.parametrize("share", OWNERS)
def test_images_in_bfloat16_come_out_float32(share: str) -> None:
    full, half, x = image_of((3, 9, 9), share), image_of((3, 9, 9), share, precision="bf16"), normal(5, 3, 3, 9, 9) / 3
    out, gap = half(x), (half(x) - full(x)).abs().max().item()
    assert out.dtype == torch.float32
    assert 0 < gap < 2e-2
    out.sum().backward()
    assert all(p.dtype == torch.float32 and p.grad is not None and p.grad.dtype == torch.float32 for p in half.parameters())


@pytest.mark.parametrize("layer", ["32x8", "32/4", "ax3/1", "4x3/0", "0x3/1", "4x0/1", "-4x3/1", "4x3/1;8x3/1", ""])
def test_convolutions_that_will_not_do(layer: str) -> None:
    with pytest.raises(UserError) as e:
        Image((3, 9, 9), NAMES, NetConfig(convolutions=f"4x3/1,{layer}"), draw())
    assert str(e.value) == f"--net.convolutions has {layer!r}: a layer is channels x kernel / stride, such as 32x8/4."


@pytest.mark.parametrize(("shape", "text"), [((1, 9, 7), "4x8/4"), ((1, 9, 7), "4x3/1,4x6/1"), ((1, 4, 40), "16x3/1,32x3/2")])
def test_images_that_are_too_small(shape: Shape, text: str) -> None:
    with pytest.raises(UserError) as e:
        Image(shape, NAMES, NetConfig(convolutions="auto" if shape[2] == 40 else text), draw())
    assert str(e.value) == f"--net.convolutions is {text}: an image of {shape[1]} x {shape[2]} is too small for it."


# --- attention ---


@pytest.mark.parametrize("share", OWNERS)
@pytest.mark.parametrize("sets", [3, 1])
def test_attention_is_pytorchs(sets: int, share: str) -> None:
    """Of keys of each agent's own, or of the same for all."""
    attention = Attention(NAMES, NetConfig(attention_width=8, heads=2, share=share), draw())
    own, keys, values = normal(6, 3, 8), normal(6, sets, 5, 8, seed=2), normal(6, sets, 5, 8, seed=3)
    there = torch.rand(6, 1, 5, generator=draw(3)) < 0.6
    there[..., 0] |= ~there.any(-1)
    assert not there.all()
    everything, some = attention(own, keys, values), attention(own, keys, values, there)
    for i, owner in enumerate(OWNERS[share]):
        by_query, by_out = (m.weights[0].T if m.sets == 1 else m.weights[0][owner] for m in (attention.query, attention.out))
        at = i if sets == 3 else 0
        parts = own[:, i, None] @ by_query, keys[:, at], values[:, at]  # [6, 1, 8], [6, 5, 8] twice
        q, k, v = (x.unflatten(-1, (2, 4)).transpose(1, 2) for x in parts)  # [6, heads, 1 or 5, 4]
        for out, mask in ((everything, None), (some, there[:, None])):
            expected = functional.scaled_dot_product_attention(q, k, v, mask).flatten(1) @ by_out
            torch.testing.assert_close(out[:, i], expected, rtol=1e-5, atol=1e-6)


def test_with_everything_masked_attention_is_even() -> None:
    attention = Attention(NAMES, NetConfig(attention_width=8, heads=2), draw())
    own, keys, values = normal(6, 3, 8), normal(6, 3, 5, 8, seed=2), normal(6, 3, 5, 8, seed=3)
    out = attention(own, keys, values, torch.zeros(6, 1, 5, dtype=torch.bool))
    torch.testing.assert_close(out, attention.out(values.mean(2)), rtol=1e-5, atol=1e-6)


# --- entities ---

# as simple_spread has them: 4 numbers of one's own, 3 landmarks, and of 2 others what is seen and what is heard
SPREAD = (
    Slots("self", 0, 1, 2),
    Slots("self", 2, 1, 2),
    Slots("landmark", 4, 3, 2),
    Slots("agent", 10, 2, 2),
    Slots("agent", 14, 2, 2),
)
LANDMARKS = [[4, 5], [6, 7], [8, 9]]
OTHERS = [[10, 11, 14, 15], [12, 13, 16, 17]]  # the numbers of each, of both blocks


def swapped(x: Tensor, of: list[list[int]], order: list[int]) -> Tensor:
    """x [..., 18] with the entities `of` in another order."""
    y = x.clone()
    for to, k in zip(of, order, strict=True):
        y[..., to] = x[..., of[k]]
    return y


def test_blocks_of_one_name_are_of_the_same_entities() -> None:
    group = group_of((18,), SPREAD)
    assert kinds_of(group) == {"self": [0, 1, 2, 3], "agent": [*OTHERS[0], *OTHERS[1]], "landmark": [4, 5, 6, 7, 8, 9]}
    assert sorted(ties(group)) == [[4, 6, 8], [5, 7, 9], [10, 12], [11, 13], [14, 16], [15, 17]]
    loose = replace(group, layout=(Slots("landmark", 1, 2, 1),))  # what is in no block is the agent's own
    assert kinds_of(replace(loose, obs=(5,))) == {"self": [0, 3, 4], "landmark": [1, 2]}
    with pytest.raises(UserError, match=r"^the layout of 'us' has unequal numbers of 'agent'\.$"):
        kinds_of(replace(group, layout=(*SPREAD[:-1], Slots("agent", 14, 1, 4))))


@pytest.mark.parametrize("share", OWNERS)
def test_the_order_of_entities_is_no_matter_but_all_of_their_numbers_are(share: str) -> None:
    entities = Entities(group_of((18,), SPREAD), NAMES, NetConfig(share=share, attention_width=16), draw())
    assert entities.width == 32
    x = normal(7, 3, 18)
    out = entities(x)
    assert out.shape == (7, 3, 32)
    for of, order in ((LANDMARKS, [1, 2, 0]), (LANDMARKS, [2, 1, 0]), (OTHERS, [1, 0])):
        moved = swapped(x, of, order)
        assert not torch.equal(moved, x)
        torch.testing.assert_close(entities(moved), out, rtol=0, atol=1e-6)
    half = x.clone()  # what is heard changes places, what is seen does not: they are other entities
    half[..., [14, 15, 16, 17]] = x[..., [16, 17, 14, 15]]
    assert (entities(half) - out).abs().amax((0, 2)).min() > 1e-3
    for number in range(18):
        other = x.clone()
        other[..., number] += 0.5
        changed = (entities(other) - out).abs().amax((0, 2))  # [N]
        assert changed.min() > 1e-3, number
    for a, b in ((4, 10), (6, 12)):  # a landmark where an agent was is something else
        kinds = x.clone()
        kinds[..., [a, a + 1, b, b + 1]] = x[..., [b, b + 1, a, a + 1]]
        assert (entities(kinds) - out).abs().amax((0, 2)).min() > 1e-3


def test_an_observation_of_nothing_but_entities() -> None:
    entities = Entities(group_of((6,), (Slots("landmark", 0, 3, 2),)), NAMES, NetConfig(attention_width=16), draw())
    x = normal(7, 3, 6)
    assert entities(x).shape == (7, 3, 32)
    torch.testing.assert_close(entities(x[..., [2, 3, 4, 5, 0, 1]]), entities(x), rtol=0, atol=1e-6)
    assert not torch.allclose(entities(x), entities(x + 1))


@pytest.mark.parametrize("layout", [(), (Slots("self", 0, 1, 4),)])
def test_without_entities_there_is_nothing_to_attend_to(layout: tuple[Slots, ...]) -> None:
    with pytest.raises(UserError) as e:
        Encoder(group_of((4,), layout), NAMES, NetConfig(), draw(), attend=True)
    assert str(e.value) == "the observations of 'us' have no layout of entities to attend to: take --net.attention none."
    for other in ({"a": (2,), "b": (2,)}, (3, 9, 9)):
        with pytest.raises(UserError, match=r"^--net.attention takes flat observations, and those of 'us' are pictures or"):
            Encoder(group_of(other, layout), NAMES, NetConfig(), draw(), attend=True)


@pytest.fixture(scope="module")
def attentive() -> Loop:
    """Learners whose weights and statistics have moved."""
    run = {"envs": 8, "quiet": True, "steps": 10_000}
    loop = Loop(resolve(Settings("mappo", "simple_spread", run, {"net": {"attention": "both"}})))
    learner = loop.learners[0]
    for _ in range(4):
        batch = loop.collector.collect(loop.rollout)
        loop.shaping(batch)
        batch.noise = torch.rand(learner.draws(*batch.over.shape), generator=draw())
        learner.update(Samples(learner, batch))
    return loop


def frame_with(loop: Loop, obs: Tensor) -> Frame:
    (name,) = loop.collector.frame.views
    return Frame({name: replace(loop.collector.frame[name], obs=obs)}, loop.collector.frame.state)


@torch.no_grad()
def test_an_actor_that_attends_does_not_mind_the_order_of_what_it_sees(attentive: Loop) -> None:
    learner: Any = attentive.learners[0]
    (view,) = attentive.collector.frame.views.values()
    assert view.obs.shape == (8, 3, 18)

    def logits(obs: Any) -> Tensor:
        return learner.actor(learner.observations.actor_input(frame_with(attentive, obs))).logits[0]

    (norm,) = learner.observations.norms.values()
    assert norm.count.item() > 0
    assert (norm.mean[:10].abs() > 1e-3).all()  # they have moved
    before = logits(view.obs)
    assert before.std() > 1e-3
    for of, order in ((LANDMARKS, [1, 2, 0]), (LANDMARKS, [0, 2, 1]), (OTHERS, [1, 0])):
        torch.testing.assert_close(logits(swapped(view.obs, of, order)), before, rtol=0, atol=1e-6)
    assert (logits(view.obs + 0.1 * torch.eye(18)[4]) - before).abs().max() > 1e-5


@torch.no_grad()
def test_a_critic_that_attends_does_not_mind_the_order_of_the_others(attentive: Loop) -> None:
    learner: Any = attentive.learners[0]
    (view,) = attentive.collector.frame.views.values()

    def values(obs: Any) -> Tensor:
        return learner.critic(learner.observations.critic_input(frame_with(attentive, obs)))

    before = values(view.obs)
    assert before.shape == (8, 3)
    torch.testing.assert_close(values(view.obs[:, [0, 2, 1]])[:, 0], before[:, 0], rtol=0, atol=1e-6)
    assert (values(view.obs[:, [1, 0, 2]])[:, 0] - before[:, 0]).abs().max() > 1e-3


# --- one group's observation ---


def test_images_and_numbers_come_out_side_by_side() -> None:
    group = group_of({"near": (1, 5, 5), "speed": (), "far": (3, 9, 7), "place": (2,)})
    encoder = Encoder(group, NAMES, NetConfig(convolutions="4x3/1"), draw())
    near, far = encoder.images["near"], encoder.images["far"]
    assert encoder.width == 3 + 4 * 3 * 3 + 4 * 7 * 5
    assert not encoder.plain
    obs = {
        "near": torch.randint(256, (6, 3, 1, 5, 5), generator=draw(), dtype=torch.uint8),
        "speed": normal(6, 3),
        "far": normal(6, 3, 3, 9, 7),
        "place": normal(6, 3, 2, seed=2),
    }
    vector, images = parts_of(obs, group)
    assert vector is not None
    assert torch.equal(vector, torch.cat((obs["speed"][..., None], obs["place"]), -1))
    out = encoder({VECTOR: vector, **images})
    assert torch.equal(out, torch.cat((vector, near(obs["near"]), far(obs["far"])), -1))


def test_an_image_alone_and_numbers_alone() -> None:
    picture = group_of((1, 5, 5))
    vector, images = parts_of(torch.ones(6, 3, 1, 5, 5), picture)
    assert vector is None
    encoder = Encoder(picture, NAMES, NetConfig(convolutions="4x3/1"), draw())
    assert encoder(images).shape == (6, 3, encoder.width) == (6, 3, 36)
    numbers = Encoder(group_of((4,)), NAMES, NetConfig(), draw())
    x = normal(6, 3, 4)
    assert numbers.plain
    assert numbers.width == 4
    assert numbers(x) is x
    assert not Encoder(group_of((18,), SPREAD), NAMES, NetConfig(), draw(), attend=True).plain


# --- all agents' observations ---


def test_observations_end_to_end_in_numbers() -> None:
    """Two groups end to end, each agent after agent; the dead are zeros."""
    cats, dogs = Group("cats", "cats", ("a", "b"), (2,), Discrete(2)), Group("dogs", "dogs", ("c",), (3,), Discrete(2))
    joint = JointEncoder((cats, dogs), NetConfig(), draw())
    assert joint.width == 2 * 2 + 3
    meow, woof = torch.tensor([[[1.0, 2], [3, 4]], [[5, 6], [7, 8]]]), torch.tensor([[[9.0, 10, 11]], [[12, 13, 14]]])
    alive = torch.tensor([[True, True], [False, True]])
    out = joint({"cats": (meow, alive), "dogs": (woof, None)})
    assert out.tolist() == [[1, 2, 3, 4, 9, 10, 11], [0, 0, 7, 8, 12, 13, 14]]
    assert joint({"cats": (meow * torch.nan, ~alive & alive), "dogs": (woof, None)})[0].tolist() == [0, 0, 0, 0, 9, 10, 11]


def test_images_of_all_agents_go_through_one_net() -> None:
    picture = group_of((1, 5, 5))
    joint = JointEncoder((picture,), NetConfig(convolutions="4x3/1", share="none"), draw())
    assert joint.width == 3 * 36
    x = normal(6, 1, 1, 5, 5).expand(6, 3, 1, 5, 5)
    alive = torch.tensor([True, False, True]).expand(6, 3)
    first, second, third = joint({"us": ({"image": x}, alive)}).split(36, -1)
    torch.testing.assert_close(first, third)
    assert first.abs().sum() > 0
    assert second.abs().sum() == 0


def attentive_critic(share: str, groups: tuple[Group, ...]) -> Critic:
    net = NetConfig((8,), share=share, attention_width=16)
    return Critic(AgentAttention(groups, ("us",), net, draw()), NAMES, net, draw())


@pytest.mark.parametrize("share", OWNERS)
def test_the_order_of_the_other_agents_is_no_matter(share: str) -> None:
    us, them = group_of((4,)), group_of((5,), name="them")
    critic = attentive_critic(share, (us, them))
    ours, theirs = normal(6, 3, 4), normal(6, 3, 5, seed=2)

    def values(ours: Tensor, theirs: Tensor) -> Tensor:
        return critic({"us": (ours, None), "them": (theirs, None)})

    before = values(ours, theirs)
    assert before.shape == (6, 3)
    for i in range(3):
        order = [0, 1, 2]
        a, b = (k for k in range(3) if k != i)
        order[a], order[b] = b, a
        torch.testing.assert_close(values(ours[:, order], theirs)[:, i], before[:, i], rtol=0, atol=1e-6)
        assert (values(ours[:, order], theirs)[:, a] - before[:, a]).abs().min() > 1e-4  # who is somebody else
    torch.testing.assert_close(values(ours, theirs[:, [2, 0, 1]]), before, rtol=0, atol=1e-6)
    for who in range(3):  # but everybody attends to what they see
        other, another = ours.clone(), theirs.clone()
        other[:, who] += 1
        another[:, who] += 1
        assert (values(other, theirs) - before).abs().amax(0).min() > 1e-4
        assert (values(ours, another) - before).abs().amax(0).min() > 1e-4


@pytest.mark.parametrize("share", OWNERS)
def test_the_dead_are_not_attended_to(share: str) -> None:
    us, them = replace(group_of((4,)), mortal=True), group_of((5,), name="them")
    critic = attentive_critic(share, (us, them))
    ours, theirs = normal(6, 3, 4), normal(6, 3, 5, seed=2)
    alive = torch.tensor([True, False, True]).expand(6, 3)
    other = ours.clone()
    other[:, 1] += 7
    before, after = (critic({"us": (x, alive), "them": (theirs, None)})[:, [0, 2]] for x in (ours, other))
    assert torch.equal(before, after)
    everybody = critic({"us": (ours, None), "them": (theirs, None)})
    assert torch.equal(everybody, critic({"us": (ours, alive | True), "them": (theirs, None)}))
    assert (everybody[:, [0, 2]] - before).abs().min() > 1e-4
    alone = attentive_critic(share, (us,))  # nobody is left, and nobody else is there
    assert alone({"us": (ours, alive & False)}).isfinite().all()
