"""A field is a flag: every type, every mistake one sentence."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import pytest

from shoal.flags import (
    arguments,
    build,
    describe,
    flags_of,
    helps_of,
    lists,
    parse_span,
    parse_value,
    refuse_unknown,
    split,
)
from shoal.spec import UserError


@dataclass(frozen=True)
class Base:
    gamma: float = 0.99  # discount
    both: int = 1  # of the base


@dataclass(frozen=True)
class Config(Base):
    both: int = 2  # of the class: it wins
    hidden_sizes: tuple[int, ...] = (64, 64)  # widths, with commas: a # in it
    kind: Literal["own", "team"] = "own"  # what is seen
    clip: float | None = 0.2  # none: never
    every: Literal["auto"] | int = "auto"  # steps, or auto
    on: bool = False  # whether
    name: str = "x"  # a word
    out: str | None = None
    tags: tuple[str, ...] = field(default_factory=tuple)  # words


def one_sentence(e: Any) -> str:
    text = str(e.value)
    assert text.endswith(".")
    assert "\n" not in text
    return text


@pytest.mark.parametrize(
    ("text", "kind", "value"),
    [
        ("5", int, 5),
        ("-3", int, -3),
        ("1_000", int, 1000),
        ("1e6", int, 1_000_000),
        ("2M", int, 2_000_000),
        ("1.5k", int, 1500),
        ("3g", int, 3_000_000_000),
        (" 7 ", int, 7),
        ("0.5", float, 0.5),
        ("-1e-3", float, -1e-3),
        ("7", float, 7.0),
        ("true", bool, True),
        ("Yes", bool, True),
        ("on", bool, True),
        ("1", bool, True),
        ("false", bool, False),
        ("no", bool, False),
        ("OFF", bool, False),
        ("0", bool, False),
        ("word", str, "word"),
        ("none", str, "none"),
        ("none", str | None, None),
        ("a/b", str | None, "a/b"),
        ("team", Literal["own", "team"], "team"),
        ("64,32", tuple[int, ...], (64, 32)),
        ("64", tuple[int, ...], (64,)),
        ("64,", tuple[int, ...], (64,)),
        ("", tuple[int, ...], ()),
        ("a, b", tuple[str, ...], ("a", " b")),
        ("none", float | None, None),
        ("None", float | None, None),
        ("0.5", float | None, 0.5),
        ("auto", Literal["auto"] | int, "auto"),
        ("2k", Literal["auto"] | int, 2000),
    ],
)
def test_every_type(text: str, kind: Any, value: Any) -> None:
    parsed = parse_value(text, kind, "--x")
    if kind == tuple[str, ...]:
        assert tuple(w.strip() for w in parsed) == tuple(w.strip() for w in value)
    else:
        assert parsed == value
        assert type(parsed) is type(value)


@pytest.mark.parametrize(
    ("text", "kind", "said"),
    [
        ("two", int, "--x is 'two': it takes a whole number"),
        ("1.5", int, "whole number"),
        ("1e-3", int, "whole number"),
        ("", int, "whole number"),
        ("nan", int, "whole number"),
        ("x", float, "--x is 'x': it takes a number."),
        ("maybe", bool, "--x is 'maybe': it takes true or false."),
        ("teem", Literal["own", "team"], "did you mean 'team'"),
        ("64,a", tuple[int, ...], "whole number"),
        ("x", float | None, "it takes a number"),
    ],
)
def test_every_mistake_is_one_sentence(text: str, kind: Any, said: str) -> None:
    with pytest.raises(UserError) as e:
        parse_value(text, kind, "--x")
    assert said in one_sentence(e)


@pytest.mark.parametrize("text", ["_", "+_", "1e999", "1e999999999", "__k"])
def test_odd_numbers_are_a_sentence_and_no_crash(text: str) -> None:
    with pytest.raises(UserError) as e:
        parse_value(text, int, "--steps")
    assert "--steps" in one_sentence(e)


def test_whole_numbers_are_exact() -> None:
    """A seed beyond 2^53 is the seed that was typed, and a decimal number of thousands is whole where it is."""
    assert parse_value("9007199254740993", int, "--seed") == 9007199254740993
    assert parse_value("9223372036854775807", int, "--seed") == 2**63 - 1
    assert parse_value("1.001k", int, "--steps") == 1001
    assert parse_value("4.003M", int, "--steps") == 4_003_000


def test_a_choice_or_a_number_names_both_in_its_error() -> None:
    with pytest.raises(UserError) as e:
        parse_value("atuo", Literal["auto"] | int, "--eval.every")
    assert "auto" in one_sentence(e).replace("'atuo'", "")


def test_flags_of() -> None:
    flags = flags_of(Config, "algo.")
    assert list(flags) == [
        "algo." + n for n in ("gamma", "both", "hidden-sizes", "kind", "clip", "every", "on", "name", "out", "tags")
    ]
    assert flags["algo.hidden-sizes"].default == (64, 64)
    assert flags["algo.tags"].default == ()
    assert flags["algo.hidden-sizes"].parse("3,4") == (3, 4)
    assert flags["algo.out"].help == ""
    with pytest.raises(UserError, match=r"^--algo.gamma is 'x': it takes a number\.$"):
        flags["algo.gamma"].parse("x")
    kinds = {n.removeprefix("algo."): f.kind for n, f in flags.items()}
    assert kinds["kind"] == "own|team"
    assert kinds["clip"] == "float|none"
    assert kinds["every"] == "auto|int"
    assert kinds["hidden-sizes"] == "int,..."
    assert (kinds["on"], kinds["name"], kinds["both"]) == ("bool", "str", "int")


def test_help_is_the_comment() -> None:
    helps = helps_of(Config)
    assert helps["gamma"] == "discount"
    assert helps["both"] == "of the class: it wins"
    assert helps["kind"] == "what is seen"
    assert helps["hidden_sizes"] == "widths, with commas: a # in it"
    assert helps["every"] == "steps, or auto"
    assert "out" not in helps


def test_every_field_of_every_config_has_help() -> None:
    from shoal.ids import catalog
    from shoal.training.settings import all_flags

    algos, envs = catalog("algos"), catalog("envs")
    seen = 0
    for algo in algos.values():
        for section, flags in all_flags(algo, envs["simple_spread"]).items():
            for name, flag in flags.items():
                assert flag.help, (algo.id, section, name)
                seen += 1
    for env in envs.values():
        for name, flag in all_flags(algos["random"], env)["env"].items():
            assert flag.help, (env.id, name)
            seen += 1
    assert seen > 50


def test_help_shows_the_nets_that_an_algorithm_has() -> None:
    from shoal.ids import find
    from shoal.training.settings import Settings, all_flags, group_config

    seen = []
    for algo in ("mappo", "maddpg", "coma"):
        flags = all_flags(find("algos", algo), find("envs", "simple_spread"))["net"]
        _, net = group_config(Settings(algo, "simple_spread"), find("algos", algo), "agents")
        assert {name: f.default for name, f in flags.items()} == {f"net.{k.replace('_', '-')}": v for k, v in vars(net).items()}
        seen.append((net.hidden, net.activation))
    assert seen == [((64, 64), "tanh"), ((128, 128), "relu"), ((128, 128), "relu")]


def test_split() -> None:
    words, flags = split(["train", "ppo", "--x", "1", "--y=2", "--z", "--a_b", "-3", "--last"])
    assert words == ["train", "ppo"]
    assert flags == {"x": "1", "y": "2", "z": None, "a-b": "-3", "last": None}
    on = flags_of(Config)["on"]
    takes = lambda name, word: name != "on" or on.takes(word)  # noqa: E731
    assert split(["--on", "run", "--e=a=b"], takes) == (["run"], {"on": None, "e": "a=b"})
    assert split(["--on", "false", "run"], takes) == (["run"], {"on": "false"})
    assert split(["--x", "1", "--x", "2"])[1] == {"x": "2"}
    assert split([]) == ([], {})
    assert split(["--x="]) == ([], {"x": ""})


@dataclass(frozen=True)
class Switches:
    on: bool = False  # whether
    mortal: Literal["auto"] | bool = "auto"  # or auto
    name: str = "x"  # a word
    clip: float | None = None  # a number


def test_switches_follow_from_the_types() -> None:
    flags = flags_of(Switches)
    assert {n for n, f in flags.items() if f.switch} == {"on", "mortal"}
    assert all(flags["on"].takes(w) for w in ("true", "No", "1"))
    assert not any(flags["on"].takes(w) for w in ("ddqn", "auto", "2", ""))
    assert [flags["mortal"].takes(w) for w in ("auto", "false", "ddqn")] == [True, True, False]
    assert flags["name"].takes("true")
    assert flags["on"].parse(None) is True
    for name in ("name", "clip"):
        with pytest.raises(UserError) as e:
            flags[name].parse(None)
        assert f"--{name} was given no value" in one_sentence(e)


@pytest.mark.parametrize("number", ["1e30", "9223372036854775808", "-1e19", "9" * 5000])
def test_whole_numbers_beyond_a_tensor_are_refused(number: str) -> None:
    with pytest.raises(UserError) as e:
        parse_value(number, int, "--envs")
    assert len(one_sentence(e)) < 200
    for key in ("both", "gamma"):
        with pytest.raises(UserError) as e:
            build(Config, {key: 10**400}, "algo")
        assert len(one_sentence(e)) < 200


def test_build() -> None:
    made = build(Config, {"gamma": 1, "hidden_sizes": [8, 8], "clip": None, "every": 5.0, "on": True, "kind": "team"}, "algo")
    assert made == Config(gamma=1.0, hidden_sizes=(8, 8), clip=None, every=5, on=True, kind="team")
    assert type(made.gamma) is float
    assert type(made.every) is int
    assert build(Config, {}, "algo") == Config()
    assert build(Config, {"both": "2k", "hidden_sizes": "3,4", "on": "yes"}, "").both == 2000


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"gama": 1}, "algo has no setting 'gama'"),
        ({"gama": 1}, "did you mean 'gamma'"),
        ({"zzzzz": 1}, "it has gamma, both, hidden_sizes, kind"),
        ({"method": 1}, "algo has no setting 'method'"),
        ({"gamma": "x"}, "algo.gamma is 'x': it takes a number."),
        ({"gamma": None}, "algo.gamma is None: it takes float."),
        ({"gamma": True}, "algo.gamma is True: it takes float."),
        ({"both": 1.5}, "algo.both is 1.5: it takes int."),
        ({"both": True}, "algo.both is True: it takes int."),
        ({"on": 1}, "algo.on is 1: it takes bool."),
        ({"hidden_sizes": 8}, "algo.hidden_sizes is 8: it takes int,...."),
        ({"hidden_sizes": [8, "x"]}, "algo.hidden_sizes is 'x': it takes a whole number"),
        ({"every": "never"}, "algo.every is 'never': it takes auto|int."),
        ({"every": [1]}, "algo.every is [1]: it takes auto|int."),
        ({"name": 5}, "algo.name is 5: it takes str."),
        ({"kind": 5}, "algo.kind is 5: it takes own|team."),
        ({"both": {}}, "algo.both is {}: it takes int."),
    ],
)
def test_build_refuses_in_a_sentence(values: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError) as e:
        build(Config, values, "algo")
    assert said in one_sentence(e)


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
def test_build_takes_no_endless_whole_number(value: float) -> None:
    """JSON's Infinity and NaN, or Python's, for a field of whole numbers: a sentence, not an OverflowError."""
    with pytest.raises(UserError) as e:
        build(Config, {"both": value}, "algo")
    assert "algo.both" in one_sentence(e)


def test_none_as_a_word() -> None:
    """`--algo.GROUP.clip none` reaches `build` as the word that was typed, and means what `--algo.clip none` means."""
    assert build(Config, {"clip": "none"}, "algo").clip is None
    assert build(Config, {"clip": "0.5"}, "algo").clip == 0.5


def test_describe() -> None:
    assert describe(int) == "int"
    assert describe(tuple[float, ...]) == "float,..."
    assert describe(Literal["a", "b"] | None) == "a|b|none"


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90", 90), ("90s", 90), ("5m", 300), ("2h", 7200), ("1.5h", 5400), ("1d", 86400), (30, 30), (None, None)],
)
def test_spans(text: Any, seconds: float | None) -> None:
    assert parse_span(text, "--time") == seconds


@pytest.mark.parametrize("bad", ["", "x", "-5", "0", "5y", "1.2.3", "h"])
def test_what_is_no_span(bad: str) -> None:
    with pytest.raises(UserError) as e:
        parse_span(bad, "--time")
    assert one_sentence(e) == f"--time is {bad!r}: it takes a length of time, such as 90s, 5m or 2h."


# --- flags that hold several things ---


def test_arguments() -> None:
    text = "n=3, shape=(2,3),mode=fast,on=true,off=False,x=0.5,none=none,name='a,b',pair={'a':1,'b':[2,3]}"
    assert arguments(text, "--env.args") == {
        "n": 3,
        "shape": (2, 3),
        "mode": "fast",
        "on": True,
        "off": False,
        "x": 0.5,
        "none": None,
        "name": "a,b",
        "pair": {"a": 1, "b": [2, 3]},
    }
    assert arguments("", "--env.args") == {}


@pytest.mark.parametrize("text", ["n", "=3", "n=1,m"])
def test_arguments_that_are_none(text: str) -> None:
    with pytest.raises(UserError, match=r"--env.args is '.*': it takes name=value"):
        arguments(text, "--env.args")


def test_lists() -> None:
    assert lists("a=x+y, b = z", "--env.groups") == {"a": ("x", "y"), "b": ("z",)}
    with pytest.raises(UserError, match="stands for nothing"):
        lists("a=", "--env.groups")
    with pytest.raises(UserError, match="'a' twice"):
        lists("a=x,a=y", "--env.groups")


def test_arguments_after_a_name_have_text_in_quotes() -> None:
    assert arguments("clip=5,mode='a,b'", "--x", "m:C:clip=5,mode='a,b'", "m:C:clip=5") == {"clip": 5, "mode": "a,b"}
    assert arguments("", "--x", "m:C:", "m:C:clip=5") == {}
    for text in ("mode=a", "5", "a=open(1)", "a=", "a=("):
        with pytest.raises(UserError, match=r"--x is 'm:C:.*': arguments are name=number, as in m:C:clip=5\."):
            arguments(text, "--x", f"m:C:{text}", "m:C:clip=5")


def test_arguments_that_a_function_does_not_take() -> None:
    def some(width: int, *rest: int, clip: float = 1.0) -> None: ...

    def any_at_all(**given: Any) -> None: ...

    refuse_unknown(["clip", "width"], some, "--x is 'y'")
    refuse_unknown(["anything"], any_at_all, "--x is 'y'")
    with pytest.raises(UserError) as e:
        refuse_unknown(["width", "clop"], some, "--x is 'y'")
    assert one_sentence(e) == "--x is 'y', and some takes no 'clop' (did you mean 'clip'?): it takes width, clip."
