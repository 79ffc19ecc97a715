"""The renderer and films: what is where in the picture, how many shots there are, and that watching changes nothing."""

import subprocess
import sys

import pytest
import torch
from PIL import Image

import shoal
from shoal.api import evaluate, make
from shoal.envs.drawing import Circle, Line, Sketch
from shoal.envs.probe.probe_terminated import ProbeTerminated
from shoal.ids import catalog
from shoal.spec import UserError
from shoal.tools import watch as tool
from shoal.tools.watch import ClipHook, film, paint, place, require_drawing, span, watch, widths, write_gif, write_mp4
from shoal.training.players import make_players
from shoal.training.settings import Settings

WORLDS = [name for name, entry in catalog("envs").items() if entry.family == "mpe"]
RED, BLUE = (0.8, 0.2, 0.2), (0.2, 0.2, 0.8)
QUIET = {"quiet": True, "log": {"tensorboard": False}}


def random_players(env, name):
    return make_players(Settings("random", name), env.spec, 0, env.device)


def texts(monkeypatch):
    """Every text that is painted from now on."""
    seen = []
    plain = tool.ImageDraw.ImageDraw.text
    monkeypatch.setattr(
        tool.ImageDraw.ImageDraw, "text", lambda self, xy, text, *a, **k: seen.append(text) or plain(self, xy, text, *a, **k)
    )
    return seen


# --- one picture ---


def test_colours_are_where_the_bodies_are():
    sketch = Sketch((Circle(-0.5, 0.5, 0.1, RED, "a_0"), Circle(0.6, -0.6, 0.05, BLUE, "b_0")))
    image = paint(sketch, size=480)  # no header: half-width 1.2, so 200 pixels a unit, the middle at 240
    assert image.size == (480, 480)
    assert image.getpixel((140, 140 - 9)) == (204, 51, 51)
    assert image.getpixel((360, 360)) == (51, 51, 204)
    assert image.getpixel((140 + 14, 140)) == (204, 51, 51)  # above the label and beside it, inside the radius of 20 pixels
    assert image.getpixel((140 + 26, 140)) == tool.PLANE  # and outside
    assert image.getpixel((146, 346)) == tool.PLANE  # its mirror image: y grows upwards


def test_segments_lie_beneath_circles_and_end_round():
    line = Line(-0.5, -0.5, 0.5, -0.5, 0.2, RED)  # 40 pixels wide where 200 are a unit
    image = paint(Sketch((Circle(0.5, -0.5, 0.05, BLUE, "b_0"),), segments=(line,)), size=480)
    assert image.getpixel((240, 340)) == image.getpixel((240, 340 - 17)) == image.getpixel((240, 340 + 17)) == (204, 51, 51)
    assert image.getpixel((240, 340 - 23)) == image.getpixel((220, 140)) == tool.PLANE
    assert image.getpixel((340, 340)) == (51, 51, 204)
    assert image.getpixel((140 - 16, 340)) == (204, 51, 51)  # the round end, and past its corner
    assert image.getpixel((140 - 18, 340 - 18)) == tool.PLANE
    broken = Sketch((), segments=(Line(float("nan"), 0.0, 1.0, 1.0, 0.1, RED),))
    assert paint(broken, size=240).tobytes() == paint(Sketch(()), size=240).tobytes()


def test_a_header_and_a_footer_make_room_and_do_not_cover_the_plane():
    circles = (Circle(0.0, 0.0, 0.05, RED, "a_0"),)
    bare = paint(Sketch(circles), size=480)
    full = paint(Sketch(circles, ("a_0 says B",)), (("title", "episode 1 of 5"), ("return so far", "3.00")), 480, done=0.5)
    above = full.height - 480 - tool._strip(1, 4.8)
    assert full.height > 480
    assert full.width == 480
    assert full.width % 2 == full.height % 2 == 0  # as video wants it
    assert full.crop((0, above, 480, above + 480)).tobytes() == bare.tobytes()
    assert full.getpixel((100, above - 1)) == tool.BAR  # half of the episode is over
    assert full.getpixel((300, above - 1)) == tool.PAPER


def test_kinds_of_bodies_can_be_told_apart():
    agent = Circle(-0.5, 0.0, 0.15, RED, "a_0")
    wall = Circle(0.0, 0.0, 0.15, RED)
    mark = Circle(0.5, 0.0, 0.15, RED, solid=False)
    image = paint(Sketch((agent, wall, mark)), size=480)
    inside = [image.getpixel((x - 22, 240)) for x in (140, 240, 340)]  # beside the label, within the radius of 30
    assert inside[0] == (204, 51, 51)
    assert len(set(inside)) == 3
    assert (204, 51, 51) in [image.getpixel((x, 240)) for x in range(307, 314)]  # the ring round what cannot be touched
    assert sum(inside[2]) > sum(inside[1]) > sum(inside[0])  # a tint, a softer disc, a full disc


def test_edges_are_smooth_and_what_is_not_a_number_is_left_out():
    image = paint(Sketch((Circle(0.0, 0.0, 0.3, RED),)), size=240)
    assert len(image.getcolors(10_000)) > 8
    broken = Sketch((Circle(float("nan"), 0.0, 0.1, RED, "a_0"), Circle(0.0, float("inf"), 0.1, RED, "a_1")))
    assert paint(broken, size=240).tobytes() == paint(Sketch(()), size=240).tobytes()


def test_a_wide_text_is_made_to_fit():
    line = "agent_0 says " + " ".join(["0.12"] * 20)
    image = paint(Sketch((), (line,)), size=520)
    strip = image.crop((508, 521, 520, image.height))
    assert strip.getcolors() == [(strip.width * strip.height, tool.PAPER)]  # nothing runs over the edge


def test_place():
    assert place(0.0, 0.0, 100, 2.0) == (50, 50)
    assert place(-2.0, 2.0, 100, 2.0) == (0, 0)
    assert place(1.0, -1.0, 100, 2.0) == (75, 75)


# --- what is in view ---


def test_span_is_fixed_until_something_leaves():
    assert span(Sketch((Circle(0.95, 0.0, 0.15, RED),))) == span(Sketch(())) == pytest.approx(1.2)
    assert span(Sketch((), extent=3.0)) == pytest.approx(3.6)
    assert span(Sketch((Circle(0.0, -2.0, 0.5, RED),))) == pytest.approx(2.6)
    assert span(Sketch((), segments=(Line(0.0, 0.0, 0.0, -2.0, 1.0, RED),))) == pytest.approx(2.6)


def test_views_widen_in_good_time_and_never_narrow():
    assert widths([1.0, 1.0, 1.0, 4.0, 1.0], most=2.0) == [1.0, 1.0, 2.0, 4.0, 4.0]
    assert widths([1.0, 1.0], most=2.0) == [1.0, 1.0]
    assert widths([9.0, 1.0], most=2.0) == [9.0, 9.0]


# --- films ---


@pytest.mark.parametrize("name", WORLDS)
def test_every_particle_world_can_be_watched(name, monkeypatch):
    env = make(name, rows=2, max_cycles=5)
    seen = texts(monkeypatch)
    shots, episodes = film(env, random_players(env, name), 0, name)
    assert len(shots) == 10
    image = shots[4].paint(300)
    assert image.width == 300
    assert image.height > 300
    for g in env.spec.groups:
        assert set(g.agents) <= set(seen)  # names
    assert name in seen
    assert "episode 1 of 2   step 4 of 5" in seen
    for talker in env.talkers:
        assert any(t.startswith(f"{env.bodies[talker].name} says ") for t in seen)
    assert episodes.lengths.tolist() == [5, 5]


def test_there_are_twelve():
    assert len(WORLDS) == 12


def test_shots_go_episode_by_episode_and_show_the_return_so_far():
    env = make("simple_spread", rows=3, max_cycles=4)
    shots, episodes = film(env, random_players(env, "simple_spread"), 7, "x")
    assert [s.header[0][1] for s in shots] == [f"episode {e} of 3   step {t} of 4" for e in (1, 2, 3) for t in range(4)]
    assert [s.seconds for s in shots] == [0.1, 0.1, 0.1, 1.0] * 3
    assert [s.done for s in shots[:4]] == [0.25, 0.5, 0.75, 1.0]
    for e in range(3):
        first, *_, last = shots[4 * e : 4 * e + 4]
        assert first.header[1] == ("return so far", "0.00")
        text = f"{episodes.returns['agents'][e].mean():.2f}".replace("-", "\N{MINUS SIGN}")
        assert last.header[1] == ("return", text)
    # the landmarks stay for an episode and are others in the next
    marks = [tuple((c.x, c.y) for c in s.sketch.circles if not c.label) for s in shots]
    assert [len(set(marks[4 * e : 4 * e + 4])) for e in range(3)] == [1, 1, 1]
    assert len(set(marks)) == 3


class DrawnProbe(ProbeTerminated):
    """Rows begin at a random step and end at the fifth; the step is drawn."""

    def draw(self, row=0):
        return Sketch((Circle(self.state["step"][row].item() / 10, 0.0, 0.1, RED, "a_0"),))


def test_episodes_that_end_early_do_not_bleed():
    env = DrawnProbe(DrawnProbe.Config(stagger=True), rows=6)
    shots, episodes = film(env, random_players(env, "probe_terminated"), 3)
    lengths = episodes.lengths.long().tolist()
    assert len(set(lengths)) > 1
    assert len(shots) == sum(lengths) < 30
    steps = [round(s.sketch.circles[0].x * 10) for s in shots]
    assert steps == [t for n in lengths for t in range(5 - n, 5)]
    assert [s.header[0][1].partition(" of")[0] for s in shots] == [
        f"episode {e + 1}" for e, n in enumerate(lengths) for _ in range(n)
    ]


def test_a_world_without_pictures_is_refused():
    env = make("probe_constant")
    with pytest.raises(UserError, match=r"^probe_constant cannot be watched"):
        film(env, random_players(env, "probe_constant"), 0, "probe_constant · random")
    with pytest.raises(UserError, match="cannot be watched"):
        require_drawing(env)
    require_drawing(make("simple"))


# --- files ---


def some_shots(rows=2, cycles=6, name="simple_tag"):
    env = make(name, rows=rows, max_cycles=cycles)
    return film(env, random_players(env, name), 0, name)[0]


def test_a_gif_has_every_shot_for_its_time_in_its_colours(tmp_path):
    shots = some_shots()
    write_gif(shots, tmp_path / "new" / "x.gif", 300)
    with Image.open(tmp_path / "new" / "x.gif") as gif:
        assert gif.n_frames == 12
        assert gif.info["loop"] == 0  # for ever
        for i, shot in enumerate(shots):
            gif.seek(i)
            assert gif.info["duration"] == (1000 if i in (5, 11) else 100)
            shown, painted = gif.convert("RGB"), shot.paint(300)
            assert shown.size == painted.size
            above = painted.height - 300
            for c in shot.sketch.circles:
                if c.label and max(abs(c.x), abs(c.y)) < 1:
                    x, y = (round(v) for v in place(c.x, c.y, 300, shot.view))
                    assert shown.getpixel((x, y + above)) == pytest.approx(painted.getpixel((x, y + above)), abs=4)
    assert [p.name for p in (tmp_path / "new").iterdir()] == ["x.gif"]  # nothing left aside


def test_a_gif_has_the_colours_of_segments(tmp_path):
    line = Line(-0.5, 0.0, 0.5, 0.0, 0.2, (0.3, 0.7, 0.4))
    write_gif([tool.Shot(Sketch((), segments=(line,)), (), 1.2, None)], tmp_path / "x.gif", 240)
    with Image.open(tmp_path / "x.gif") as gif:
        assert gif.convert("RGB").getpixel((120, 120)) == (76, 178, 102)


def test_a_gif_is_small(tmp_path):
    write_gif(some_shots(5, 25), tmp_path / "x.gif")
    assert (tmp_path / "x.gif").stat().st_size < 450_000


def test_a_failed_write_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "x.gif"
    path.write_text("old")

    def fail(self, p, *_, **__):
        p.write(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Image.Image, "save", fail)
    with pytest.raises(UserError, match="cannot be written: No space left"):
        write_gif(some_shots(1, 2), path, 100)
    assert [p.name for p in tmp_path.iterdir()] == ["x.gif"]
    assert path.read_text() == "old"
    with pytest.raises(UserError, match="cannot be written"):
        write_gif(some_shots(1, 2), path / "under_a_file.gif", 100)


def test_an_mp4_has_every_shot_and_holds_the_last(tmp_path):
    imageio = pytest.importorskip("imageio.v2")
    pytest.importorskip("imageio_ffmpeg")
    write_mp4(some_shots(1, 3), tmp_path / "x.mp4", 200)
    with imageio.get_reader(tmp_path / "x.mp4") as video:
        frames = [frame for frame in video]  # noqa: C416  list() asks for the length first, which is not known
    assert len(frames) == 2 + 10
    assert frames[0].shape == (some_shots(1, 3)[0].paint(200).height, 200, 3)


def test_without_imageio_an_mp4_is_refused(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "imageio_ffmpeg", None)
    with pytest.raises(UserError, match=r"pip install shoal\[video\]"):
        write_mp4(some_shots(1, 2), tmp_path / "x.mp4")
    assert not list(tmp_path.iterdir())


# --- from a run ---


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    out = tmp_path_factory.mktemp("run") / "r"
    return shoal.train(
        "mappo", "simple_spread", steps=400, envs=8, env={"max_cycles": 5}, out=out, eval={"episodes": 4}, **QUIET
    )


def test_watch_plays_what_eval_measures(run, tmp_path):
    played = watch(run.path, gif=tmp_path / "x.gif", episodes=3)
    assert torch.equal(played.returns["agents"], evaluate(run, 3).returns["agents"])
    assert torch.equal(watch(run, tmp_path / "y.gif", episodes=3, seed=5).lengths, torch.full((3,), 5.0))
    with Image.open(tmp_path / "x.gif") as gif:
        assert gif.n_frames == 15
    others = watch(run.path, gif=tmp_path / "z.gif", episodes=3, team={"agents": "random"})
    assert not torch.equal(others.returns["agents"], played.returns["agents"])


def test_watch_refuses_what_cannot_be(run, tmp_path):
    with pytest.raises(UserError, match="--episodes is 0"):
        watch(run.path, gif=tmp_path / "x.gif", episodes=0)
    with pytest.raises(UserError, match="--gif FILE or --mp4 FILE"):
        watch(run.path)
    with pytest.raises(UserError, match="has no checkpoint"):
        watch(run.path, gif=tmp_path / "x.gif", checkpoint="77")


def test_clips_leave_training_as_it_is(run, tmp_path):
    modes = []

    class Looking(ClipHook):
        def on_evaluation(self, loop, episodes):
            before = [a.training for a in loop.players.algorithms]
            super().on_evaluation(loop, episodes)
            modes.append(before == [a.training for a in loop.players.algorithms])

    settings = {"steps": 400, "envs": 8, "env": {"max_cycles": 5}, "eval": {"episodes": 4}}
    clipped = shoal.train("mappo", "simple_spread", out=tmp_path / "r", hook=Looking(200), **settings, **QUIET)
    timeless = [[{k: v for k, v in line.items() if k != "time"} for line in r.metrics] for r in (run, clipped)]
    assert timeless[0] == timeless[1]
    assert len(timeless[0]) > 3
    clips = sorted((clipped.path / "media").glob("step-*.gif"))
    assert [int(c.stem.partition("-")[2]) for c in clips] == [line["step"] for line in clipped.evaluations()]
    assert modes
    assert all(modes)
    with Image.open(clips[-1]) as gif:
        assert gif.n_frames == 5


def test_nothing_of_a_screen_is_loaded():
    code = "import sys, shoal.tools.watch, shoal.tools.plot; print('matplotlib.pyplot' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
