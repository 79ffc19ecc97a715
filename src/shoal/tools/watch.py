"""Watching: greedy episodes as a picture that moves, drawn without a screen.

    film    plays one episode a row and keeps what `env.draw` gave before every step: shots
    paint   makes a picture of one shot: the one renderer
    watch   both, from a run's folder into a GIF (Pillow) or an MP4 (imageio and ffmpeg, `pip install shoal[video]`)
    ClipHook  leaves a clip in the run's media/ at every evaluation: `shoal train --render`

A world is watched by the seeds that `shoal eval` measures it by, so the returns shown are among those it reports. The
half-width in view is the sketch's own and a margin; when something leaves it the view widens, a little a shot and in
good time, and stays wide until the episode ends. The last shot of an episode is the last state that was acted in; it is
held for a second and shows the episode's whole return. An episode of more than 250 steps is shown in fewer shots.
"""

from __future__ import annotations

import math
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from itertools import product
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from shoal import files
from shoal.envs.base import Environment
from shoal.envs.drawing import Circle, Line, Sketch
from shoal.ids import slug
from shoal.spec import EnvSpec, UserError
from shoal.training.collect import Players
from shoal.training.evaluate import LONGEST, Episodes, evaluate
from shoal.training.hooks import Hook
from shoal.training.loop import Loop
from shoal.training.players import frozen_players, trusted
from shoal.training.run import Run

Color = tuple[int, int, int]
Take = tuple[int, Sketch, list[float]]  # the step, what it looked like, returns so far

SIZE, SIZE_MP4 = 520, 720  # pixels across
FINE = 3  # shapes and grid are drawn so many times larger, then averaged down
MARGIN = 1.2  # of the extent that is in view: room for bodies whose middles are on its edge
WIDEN = 1.08  # the most the view widens from one shot to the next
MOST = 250  # shots of an episode
MOST_EPISODES = 1000
PACE, HOLD = 0.1, 1.0  # seconds a shot, and the last of an episode
PAPER, PLANE, GRID, AXIS, INK, PALE, BAR = (
    (244, 245, 248),
    (255, 255, 255),
    (222, 226, 233),
    (186, 192, 204),
    (38, 43, 56),
    (118, 126, 143),
    (96, 125, 255),
)


@dataclass(frozen=True)
class Shot:
    """One picture of a film: what to draw, and what to write over it."""

    sketch: Sketch
    header: tuple[tuple[str, str], ...]  # lines of text, a left and a right part each
    view: float  # the half-width in view
    done: float | None  # how much of the episode is over, 0 to 1; none where it has no horizon
    seconds: float = PACE

    def paint(self, size: int = SIZE) -> Image.Image:
        return paint(self.sketch, self.header, size, self.view, self.done)


# --- one picture -----------------------------------------------------------------------------------------------------


def paint(
    sketch: Sketch,
    header: Sequence[tuple[str, str]] = (),
    size: int = SIZE,
    view: float | None = None,
    done: float | None = None,
) -> Image.Image:
    """A sketch as a picture `size` pixels across: a header, a square of the plane, and a line for each message."""
    view = span(sketch) if view is None else view
    unit = size / 100
    above, below = _strip(len(header), unit), _strip(len(sketch.lines), unit)
    plane = _plane(sketch, size, view) if sketch.picture is None else _fitted(sketch.picture, size)
    image = Image.new("RGB", (size, plane.height + above + below), PAPER)
    image.paste(plane, (0, above))
    pen = ImageDraw.Draw(image)
    _labels(pen, sketch, size, view, above)
    left, right = round(2.6 * unit), size - round(2.6 * unit)
    for i, (text, aside) in enumerate(header):
        y, font = _line(i, unit), _font(2.7 * unit if i == 0 else 2.4 * unit, i == 0)
        pen.text((left, y), text, INK if i == 0 else PALE, font, "lm")
        pen.text((right, y), aside, INK, _fitting(aside, right - left - font.getlength(text + "  "), 2.4 * unit), "rm")
    for i, text in enumerate(sketch.lines):
        pen.text((left, above + plane.height + _line(i, unit)), text, INK, _fitting(text, right - left, 2.4 * unit), "lm")
    if above and done is not None:
        pen.rectangle((0, above - max(round(unit / 2), 1), max(round(size * min(done, 1.0)) - 1, 0), above - 1), BAR)
    return image


def _fitted(picture: np.ndarray, wide: int) -> Image.Image:
    """A picture so many pixels wide, as high as it then is; even, for films."""
    height, width = picture.shape[:2]
    return Image.fromarray(picture).resize((wide, round(height * wide / width / 2) * 2), Image.Resampling.LANCZOS)


def place(x: float, y: float, size: int, view: float) -> tuple[float, float]:
    """Where a point of the plane is in its square of pixels; y grows upwards."""
    return (x / view + 1) / 2 * size, (1 - y / view) / 2 * size


def mix(a: Color, b: Color, share: float) -> Color:
    """`share` of `a`, the rest `b`."""
    r, g, b_ = (round(x * share + y * (1 - share)) for x, y in zip(a, b, strict=True))
    return r, g, b_


def tone(shape: Circle | Line) -> Color:
    r, g, b = (round(255 * min(max(x, 0.0), 1.0)) for x in shape.color)
    return r, g, b


def tones(circle: Circle) -> tuple[Color, Color]:
    """What a circle is filled and rimmed with. Agents (they have labels) are full discs with a darker rim, landmarks
    that can be bumped into softer discs without one, and what cannot be touched is a tinted ring."""
    color = tone(circle)
    if circle.label:
        return (color if circle.solid else mix(color, PLANE, 0.25)), mix(color, INK, 0.55)
    return (mix(color, PLANE, 0.45),) * 2 if circle.solid else (mix(color, PLANE, 0.2), color)


def _plane(sketch: Sketch, size: int, view: float) -> Image.Image:
    """Grid, segments, landmarks and agents: drawn large and averaged down, so that edges are smooth."""
    fine, hair = size * FINE, size * FINE / 700
    image = _grid(size, view, sketch.extent).resize((fine, fine), Image.Resampling.NEAREST)
    pen = ImageDraw.Draw(image)
    for s in _finite_segments(sketch):
        ends, wide = (place(s.x0, s.y0, fine, view), place(s.x1, s.y1, fine, view)), max(s.width / view / 2 * fine, 2 * hair)
        pen.line(ends, tone(s), round(wide))
        for x, y in ends:
            pen.ellipse((x - wide / 2, y - wide / 2, x + wide / 2, y + wide / 2), tone(s))
    for c in _finite(sketch):
        x, y = place(c.x, c.y, fine, view)
        radius, (fill, rim) = max(c.radius / view / 2 * fine, 3 * hair), tones(c)
        if c.label:  # a pale edge, so that agents that overlap can be told apart
            edge = radius + 1.5 * hair
            pen.ellipse((x - edge, y - edge, x + edge, y + edge), PLANE)
        pen.ellipse((x - radius, y - radius, x + radius, y + radius), fill, rim, round(2 * hair))
    return image.reduce(FINE)


@lru_cache(4)
def _grid(size: int, view: float, extent: float) -> Image.Image:
    """A small cross every half extent, and corners round the extent itself; on whole pixels. Whole lines would move all
    over the picture when the view widens, which a GIF pays for."""
    image = Image.new("RGB", (size, size), PLANE)
    pen = ImageDraw.Draw(image)
    every, arm = extent / 2, max(size // 200, 1)
    while view / every > 8:
        every *= 2
    n = int(view / every)
    for i, j in product(range(-n, n + 1), repeat=2):
        x, y = (round(v) for v in place(i * every, j * every, size, view))
        pen.line((x - arm, y, x + arm, y), GRID)
        pen.line((x, y - arm, x, y + arm), GRID)
    for i, j in product((-1, 1), repeat=2):
        x, y = (round(v) for v in place(i * extent, j * extent, size, view))
        pen.line((x - 5 * arm * i, y, x, y), AXIS)
        pen.line((x, y, x, y + 5 * arm * j), AXIS)
    return image


def _labels(pen: ImageDraw.ImageDraw, sketch: Sketch, size: int, view: float, above: int) -> None:
    """Agents' names: on the agent where there is room, else beneath it with a pale edge, so that they can be read."""
    font = _font(2.1 * size / 100)
    for c in _finite(sketch):
        if not c.label:
            continue
        x, y = place(c.x, c.y, size, view)
        radius, wide = c.radius / view / 2 * size, font.getlength(c.label)
        if wide < 1.75 * radius and c.solid:
            dark = sum(w * v for w, v in zip((0.299, 0.587, 0.114), tones(c)[0], strict=True)) < 150
            pen.text((x, y + above), c.label, (255, 255, 255) if dark else INK, font, "mm")
        else:
            x = min(max(x, wide / 2 + 4), size - wide / 2 - 4)
            y = min(y + radius + 0.5 * size / 100, size - 2.2 * size / 100)
            pen.text((x, y + above), c.label, mix(INK, PLANE, 0.85), font, "ma", stroke_width=2, stroke_fill=PLANE)


def _finite(sketch: Sketch) -> Iterator[Circle]:
    return (c for c in sketch.circles if math.isfinite(c.x) and math.isfinite(c.y))


def _finite_segments(sketch: Sketch) -> Iterator[Line]:
    return (s for s in sketch.segments if all(map(math.isfinite, (s.x0, s.y0, s.x1, s.y1))))


def _line(i: int, unit: float) -> float:
    """The middle of a header's or footer's line."""
    return 3.4 * unit + i * 3.8 * unit


def _strip(lines: int, unit: float) -> int:
    """How high a header or footer is: even, as video wants it."""
    return 2 * round((_line(lines - 1, unit) + 3.4 * unit) / 2) if lines else 0


@cache
def _font(height: float, bold: bool = False) -> ImageFont.FreeTypeFont:
    import matplotlib  # for the font it brings along

    name = "DejaVuSans-Bold.ttf" if bold else "DejaVuSans.ttf"
    return ImageFont.truetype(Path(matplotlib.get_data_path()) / "fonts" / "ttf" / name, round(height))


def _fitting(text: str, width: float, height: float) -> ImageFont.FreeTypeFont:
    """The font of this height, or smaller where the text would be too wide."""
    wide = _font(height).getlength(text)
    return _font(height if wide <= width else max(math.floor(height * width / wide), 6))


# --- what is in view -------------------------------------------------------------------------------------------------


def span(sketch: Sketch) -> float:
    """The half-width that shows all of a sketch, and never less than its extent and the margin."""
    reach = [max(abs(c.x), abs(c.y)) + c.radius for c in _finite(sketch)]
    reach += [max(map(abs, (s.x0, s.y0, s.x1, s.y1))) + s.width / 2 for s in _finite_segments(sketch)]
    return max((sketch.extent * MARGIN, *(r * 1.04 for r in reach)))


def widths(spans: Sequence[float], most: float = WIDEN) -> list[float]:
    """Half-widths in view through an episode: never below what a shot needs, never narrower than before, and at most
    `most` times wider than before, which is known early enough because the whole episode is known."""
    ahead: list[float] = []
    for s in reversed(spans):
        ahead.append(max(s, ahead[-1] / most) if ahead else s)
    wide: list[float] = []
    for s in reversed(ahead):
        wide.append(max(s, wide[-1]) if wide else s)
    return wide


# --- a film ----------------------------------------------------------------------------------------------------------


@torch.no_grad()
def film(
    env: Environment,
    players: Players,
    seed: int,
    title: str = "",
    longest: int = LONGEST,
    abandon: Callable[[], bool] = lambda: False,
) -> tuple[list[Shot], Episodes]:
    """One greedy episode in every row of `env`, as shots, episode after episode; and what the episodes added up to."""
    taken: list[list[Take]] = [[] for _ in range(env.rows)]
    env.drawn, step, every = True, 0, 1

    def take(env: Environment, totals: Tensor) -> None:
        nonlocal step, every
        if step % every == 0:
            for row, so_far in enumerate(totals.tolist()):
                taken[row].append((step, _sketch(env, row, title), so_far))
        step += 1
        if len(taken[0]) > MOST:  # a long episode is shown in fewer shots
            taken[:] = [row[::2] for row in taken]
            every *= 2

    try:
        episodes = evaluate(env, players, 1, seed, watch=take, longest=longest, abandon=abandon)
    finally:
        env.close()
    shots: list[Shot] = []
    for row, length in enumerate(episodes.lengths.long().tolist()):
        # a row that is over begins again while others play on: what it did then belongs to no episode
        shots += _episode([t for t in taken[row] if t[0] < length], episodes, row, env.spec, title)
    return shots, episodes


def require_drawing(env: Environment, title: str = "") -> None:
    """Refuse a world that cannot be watched, before anything is started for it. It is reset."""
    env.drawn = True
    env.reset(torch.full((env.rows, env.noise), 0.5, device=env.device))
    _sketch(env, 0, title)
    env.close()


def _sketch(env: Environment, row: int, title: str) -> Sketch:
    sketch = env.draw(row)
    if sketch is None:
        raise UserError(
            f"{title.partition(' · ')[0] or 'this world'} cannot be watched: it does not say what it looks like (`draw`)."
        )
    if sketch.picture is not None and sketch.picture.shape[1] > SIZE_MP4:  # a film is many
        sketch = replace(sketch, picture=np.asarray(_fitted(sketch.picture, SIZE_MP4)))
    return sketch


def _episode(taken: list[Take], episodes: Episodes, row: int, spec: EnvSpec, title: str) -> Iterator[Shot]:
    count, last = len(episodes.lengths), len(taken) - 1
    final = [x for r in episodes.returns.values() for x in r[row].tolist()]
    views = widths([span(sketch) for _, sketch, _ in taken])
    for k, ((t, sketch, so_far), view) in enumerate(zip(taken, views, strict=True)):
        when = f"episode {row + 1} of {count}   step {t}" + (f" of {spec.horizon}" if spec.horizon else "")
        returns = ("return", _returns(final, spec)) if k == last else ("return so far", _returns(so_far, spec))
        done = None if spec.horizon is None else (t + 1) / spec.horizon
        yield Shot(sketch, ((title, when), returns), view, done, HOLD if k == last else PACE)


def _returns(totals: list[float], spec: EnvSpec) -> str:
    """The mean over each group's agents; named where there are several groups."""
    parts, at = [], 0
    for g in spec.groups:
        mean = sum(totals[at : at + g.n]) / g.n
        text = f"{mean:.2f}".replace("-", "\N{MINUS SIGN}")
        parts.append(text if len(spec.groups) == 1 else f"{g.name} {text}")
        at += g.n
    return "   ".join(parts)


# --- files -----------------------------------------------------------------------------------------------------------


def write_gif(shots: Sequence[Shot], path: Path, size: int = SIZE) -> None:
    """Every shot, in one palette for all, so that colours do not flicker."""
    palette = _palette(shots)
    frames = (shot.paint(size).quantize(palette=palette, dither=Image.Dither.NONE) for shot in shots)
    first = next(frames)
    lasting = [round(1000 * s.seconds) for s in shots]
    with _writing(path) as f:
        first.save(f, "GIF", save_all=True, append_images=frames, duration=lasting, loop=0, optimize=True, disposal=1)


def write_mp4(shots: Iterable[Shot], path: Path, size: int = SIZE_MP4) -> None:
    """Every shot, those that are held as often as it takes."""
    try:
        import imageio.v2 as imageio
        import imageio_ffmpeg  # noqa: F401  what imageio writes videos with
    except ImportError:
        raise UserError("an mp4 needs imageio and ffmpeg: `pip install shoal[video]`, or take --gif.") from None

    with _writing(path) as f, tempfile.TemporaryDirectory() as folder:
        film = Path(folder) / "film.mp4"  # ffmpeg takes names alone
        writer: Any = imageio.get_writer(film, format="FFMPEG", fps=round(1 / PACE), codec="libx264", macro_block_size=2)
        with writer:
            for shot in shots:
                picture = np.asarray(shot.paint(size))
                for _ in range(round(shot.seconds / PACE)):
                    writer.append_data(picture)
        with film.open("rb") as made:
            shutil.copyfileobj(made, f)


def _palette(shots: Sequence[Shot]) -> Image.Image:
    """The flat colours of the film as they are, and for smooth edges what lies between them and the ground; of a film of
    pictures those that some of them have."""
    if any(s.sketch.picture is not None for s in shots):
        some = [np.asarray(s.paint(SIZE // 2)) for s in shots[:: max(len(shots) // 8, 1)]]
        return Image.fromarray(np.concatenate([x[: min(map(len, some))] for x in some], 1)).quantize(255)
    circles = (t for s in shots for c in s.sketch.circles for t in tones(c))
    segments = (tone(x) for s in shots for x in s.sketch.segments)
    flat = list(dict.fromkeys((*circles, *segments)))
    between = [mix(c, PLANE, share) for c in (*flat, INK) for share in (1 / 3, 2 / 3)]
    text = [mix(INK, PAPER, k / 5) for k in range(1, 5)] + [mix(PALE, PAPER, k / 3) for k in range(1, 3)]
    colors = [PAPER, PLANE, GRID, AXIS, INK, PALE, BAR, *text, *flat, *between][:255]  # one is left, for "as before"
    image = Image.new("P", (1, 1))
    image.putpalette([x for color in colors for x in color])
    return image


@contextmanager
def _writing(path: Path) -> Iterator[IO[bytes]]:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with files.writing(path) as f:
            yield f
    except OSError as e:
        raise UserError(f"{path} cannot be written: {e.strerror or e}.") from None


# --- from a run ------------------------------------------------------------------------------------------------------


def watch(
    run: str | Path | Run,
    gif: str | Path | None = None,
    mp4: str | Path | None = None,
    episodes: int = 5,
    checkpoint: str = "auto",
    team: dict[str, str] | None = None,
    seed: int | None = None,
    trust: bool = False,
    regroup: str | None = None,
) -> Episodes:
    """Play a run's policies greedily and leave the film as a GIF, an MP4 or both. Returns what was played: the very
    episodes that `shoal eval` with as many episodes and the same seed measures."""
    if not 1 <= episodes <= MOST_EPISODES:
        raise UserError(f"--episodes is {episodes}: a film takes from 1 to {MOST_EPISODES:,}.")
    if gif is None and mp4 is None:
        raise UserError("say where the film should go: --gif FILE or --mp4 FILE.")
    run = run if isinstance(run, Run) else Run(run)
    if trust:
        trusted([run.path], team)
    resolved = run.resolve()
    torch.set_num_threads(resolved.run.threads or 1)
    env = resolved.make_env(episodes, torch.device("cpu"), regroup)
    players = frozen_players(run, env.spec, env.device, checkpoint, team or {})
    seed = (resolved.run.seed if seed is None else seed) + 1_000_003
    title = f"{slug(run.settings.env)} · {slug(run.settings.algo)}"
    shots, played = film(env, players, seed, title, resolved.eval.longest)
    for place in (gif, mp4):
        if place is not None and run.path.absolute() in Path(place).absolute().parents:
            run.refuse_links()
    if gif is not None:
        write_gif(shots, Path(gif))
    if mp4 is not None:
        write_mp4(shots, Path(mp4))
    return played


class ClipHook(Hook):
    """At every evaluation, a greedy episode as media/step-<step>.gif. It has a world and seeds of its own, so training
    is the same with it and without."""

    def __init__(self, size: int = SIZE):
        self.size = size

    def on_evaluation(self, loop: Loop, episodes: Episodes) -> None:
        settings, algorithms = loop.resolved.settings, loop.players.algorithms
        modes = [a.training for a in algorithms]
        for a in algorithms:
            a.eval()
        try:
            title = f"{slug(settings.env)} · {slug(settings.algo)} · step {loop.step:,}"
            env, longest = loop.resolved.make_env(1), loop.resolved.eval.longest
            shots, _ = film(env, loop.players, loop.config.seed, title, longest, loop.leaving)
        finally:
            for a, mode in zip(algorithms, modes, strict=True):
                a.train(mode)
        loop.folder.refuse_links()
        write_gif(shots, loop.folder.path / "media" / f"step-{loop.step:012d}.gif", self.size)
