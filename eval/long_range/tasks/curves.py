"""Draw Pathfinder's images: dashed curves, of which two points are marked (Linsley et al., 2018).

Two target curves of as many dashes start near each other and grow in turn; short curves distract.
Both marked points are tips of the targets: the first tip of one, and the last tip of the same one
(class 1) or of the other (class 0). All is drawn in continuous coordinates (y, x), in pixels.
Dashes that follow each other are twice a margin apart; all others are farther from each other.
So whoever dilates all dashes by the margin finds each curve whole, and none joined to another.
"""

from __future__ import annotations

import math
import random
from typing import NamedTuple

import numpy as np

_TRIES = 20_000  # pairs of targets before an image counts as impossible
_DISTRACTOR_TRIES = 5
_SEED_TRIES = 32  # places for a distractor's first dash
_FINER = 4  # points along a pixel's side that say how much of it is covered
# Pixels by which dashes that are not neighbours are farther apart than neighbours.
CLEARANCE = 0.5


class Style(NamedTuple):
    """How curves look; the names are those of the published generator.

    Attributes:
        size: pixels of a side.
        margins: half the gap between dashes; one is drawn for each image.
        length, thickness: of a dash.
        marker: radius of a marked point's disc.
        seed_distance: between the first tips of the targets; these are twice that far from the
            border.
        continuity: how fast a turn grows unlikely: by the cosine, squared, of the angle times this.
        brightness, distractor_brightness: of dashes; discs have 1.
        dashes, distractors, distractor_dashes: of each target; curves that distract; their dashes.
        padding: border that stays free.
    """

    size: int
    margins: tuple[float, ...]
    length: float
    thickness: float
    marker: float
    seed_distance: float
    continuity: float
    brightness: float
    distractor_brightness: float
    dashes: int = 14
    distractors: int = 5
    distractor_dashes: int = 4
    padding: float = 1.0


class Dash(NamedTuple):
    """A straight line from (y0, x0) to (y1, x1)."""

    y0: float
    x0: float
    y1: float
    x1: float


class Drawing(NamedTuple):
    """An image before it is pixels.

    Attributes:
        dashes: of all curves, the targets' first.
        targets: how many dashes are the targets'.
        margin: half the gap between dashes.
        marks: the marked points (y, x).
        label: 1 if one curve joins them.
    """

    dashes: list[Dash]
    targets: int
    margin: float
    marks: tuple[tuple[float, float], tuple[float, float]]
    label: int


def draw(style: Style, rng: random.Random) -> Drawing:
    """Draw one image's curves.

    Raises:
        RuntimeError: no two targets fit, however often they were tried.
    """
    margin = style.margins[_below(rng, len(style.margins))]
    for _ in range(_TRIES):
        canvas = _Canvas(style, margin)
        if (curves := _targets(canvas, rng)) is not None:
            break
    else:
        raise RuntimeError(f"{style}: no two targets fit")
    targets = len(canvas.dashes)
    for _ in range(style.distractors):
        _distract(canvas, rng)
    label, first = _below(rng, 2), _below(rng, 2)
    last = first if label else 1 - first
    marks = (curves[first].first, curves[last].last)
    return Drawing(canvas.dashes, targets, margin, marks, label)


def _below(rng: random.Random, count: int) -> int:
    return int(rng.random() * count)


class _Canvas:
    """The dashes that were drawn, and what may be drawn beside them."""

    def __init__(self, style: Style, margin: float) -> None:
        self.style, self.margin = style, margin
        self.dashes: list[Dash] = []

    def allows(self, dash: Dash, previous: Dash | None) -> bool:
        """Tell whether a dash stays inside, and clear of all others but the previous one."""
        low, high = self.style.padding, self.style.size - self.style.padding
        if not all(low <= value <= high for value in dash):
            return False
        least = 2 * self.margin + CLEARANCE
        near = (least + self.style.length) ** 2
        y, x = (dash.y0 + dash.y1) / 2, (dash.x0 + dash.x1) / 2
        for other in self.dashes:
            away_y, away_x = y - (other.y0 + other.y1) / 2, x - (other.x0 + other.x1) / 2
            if away_y * away_y + away_x * away_x >= near or other is previous:
                continue
            if distance(dash, other) < least:
                return False
        return True


def _targets(canvas: _Canvas, rng: random.Random) -> tuple[_Curve, _Curve] | None:
    """Draw both targets in turn; None where one finds no room."""
    style = canvas.style
    border = min(2 * style.seed_distance, style.size / 2 - 1)
    y, x = (border + rng.random() * (style.size - 2 * border) for _ in range(2))
    away = rng.random() * math.tau
    there = (y + style.seed_distance * math.sin(away), x + style.seed_distance * math.cos(away))
    curves = (_Curve.begin(canvas, (y, x), rng), _Curve.begin(canvas, there, rng))
    if curves[0] is None or curves[1] is None:
        return None
    for _ in range(style.dashes - 1):
        if not all(curve.grow(rng) for curve in curves):
            return None
    return curves


def _distract(canvas: _Canvas, rng: random.Random) -> None:
    """Draw a short curve where one fits; if none does after some tries, there is one fewer."""
    style = canvas.style
    for _ in range(_DISTRACTOR_TRIES):
        before = len(canvas.dashes)
        for _ in range(_SEED_TRIES):
            place = (rng.random() * style.size, rng.random() * style.size)
            if (curve := _Curve.begin(canvas, place, rng)) is not None:
                break
        else:
            continue
        if all(curve.grow(rng) for _ in range(style.distractor_dashes - 1)):
            return
        del canvas.dashes[before:]


class _Curve:
    """A curve that grows at its last tip.

    Attributes:
        first, last: its tips (y, x).
    """

    def __init__(self, canvas: _Canvas, dash: Dash, angle: float) -> None:
        self._canvas, self._dash, self._angle = canvas, dash, angle
        self.first, self.last = (dash.y0, dash.x0), (dash.y1, dash.x1)
        canvas.dashes.append(dash)

    @classmethod
    def begin(
        cls, canvas: _Canvas, place: tuple[float, float], rng: random.Random
    ) -> _Curve | None:
        """Draw a first dash in a random direction; None where it does not fit."""
        angle = rng.random() * math.tau
        dash = _ray(place, angle, 0, canvas.style.length)
        return cls(canvas, dash, angle) if canvas.allows(dash, None) else None

    def grow(self, rng: random.Random) -> bool:
        """Add a dash beyond a gap; False where none fits.

        Directions are a pixel of arc apart; those that do not fit are drawn again.
        """
        canvas, style = self._canvas, self._canvas.style
        pivot = _ray(self.last, self._angle, 0, canvas.margin)[2:]
        limit, step = math.pi / 2 / style.continuity, 1 / (style.length + canvas.margin)
        turns = [step * (rng.random() + i) - limit for i in range(int(2 * limit / step))]
        weights = [math.cos(style.continuity * turn) ** 2 for turn in turns]
        while (total := sum(weights)) > 1e-4:
            chosen = _chosen(weights, rng.random() * total)
            angle = self._angle + turns[chosen]
            dash = _ray(pivot, angle, canvas.margin, style.length)
            if canvas.allows(dash, self._dash):
                canvas.dashes.append(dash)
                self._dash, self._angle, self.last = dash, angle, (dash.y1, dash.x1)
                return True
            weights[chosen] = 0.0
        return False


def _chosen(weights: list[float], drawn: float) -> int:
    """Give the first place at which the weights up to it sum to more than what was drawn."""
    for place, weight in enumerate(weights):
        drawn -= weight
        if drawn < 0:
            return place
    return max(range(len(weights)), key=weights.__getitem__)  # rounding, at the very end


def _ray(place: tuple[float, float], angle: float, before: float, length: float) -> Dash:
    """Give the line of a length in a direction, that begins so far from a place."""
    sine, cosine = math.sin(angle), math.cos(angle)
    y, x = place[0] + before * sine, place[1] + before * cosine
    return Dash(y, x, y + length * sine, x + length * cosine)


def distance(one: Dash, other: Dash) -> float:
    """Give the least distance of dashes that do not cross: it is at a tip of either.

    (Two that cross have tips nearer to each other than the clearance of any style.)
    """
    return min(
        _to_dash(one.y0, one.x0, other),
        _to_dash(one.y1, one.x1, other),
        _to_dash(other.y0, other.x0, one),
        _to_dash(other.y1, other.x1, one),
    )


def _to_dash(y: float, x: float, dash: Dash) -> float:
    """Give the distance of a point to a dash."""
    line_y, line_x = dash.y1 - dash.y0, dash.x1 - dash.x0
    share = ((y - dash.y0) * line_y + (x - dash.x0) * line_x) / (line_y**2 + line_x**2)
    share = min(max(share, 0.0), 1.0)
    return math.hypot(y - dash.y0 - share * line_y, x - dash.x0 - share * line_x)


def render(drawing: Drawing, style: Style) -> np.ndarray:
    """Give the image [size, size] uint8: each pixel by how much of it is covered."""
    image = np.zeros((style.size, style.size), dtype=np.float32)
    dashes = np.array(drawing.dashes, dtype=np.float32)
    brightness = np.full(len(dashes), style.distractor_brightness, dtype=np.float32)
    brightness[: drawing.targets] = style.brightness
    _paint(image, dashes, style.thickness / 2, style.length / 2 + style.thickness, brightness)
    marks = np.array([[*mark, *mark] for mark in drawing.marks], dtype=np.float32)
    _paint(image, marks, style.marker, style.marker, np.ones(2, dtype=np.float32))
    return np.rint(image * (255 / image.max())).astype(np.uint8)


def _paint(
    image: np.ndarray, lines: np.ndarray, half: float, radius: float, brightness: np.ndarray
) -> None:
    """Paint what is within `half` of lines [n, 4]; nothing of one is beyond `radius` of its middle.

    Points of a finer grid around each line say how much of a pixel is covered.
    """
    y0, x0, y1, x1 = (lines[:, i, None, None] for i in range(4))
    reach = math.ceil(radius)
    top, left = (np.floor(middle) - reach for middle in ((y0 + y1) / 2, (x0 + x1) / 2))
    side = 2 * reach + 1
    fine = (np.arange(side * _FINER, dtype=np.float32) + np.float32(0.5)) / _FINER
    y, x = top + fine[None, :, None] - y0, left + fine[None, None, :] - x0
    line_y, line_x = y1 - y0, x1 - x0
    square = np.maximum(line_y**2 + line_x**2, np.float32(1e-9))
    share = np.clip((y * line_y + x * line_x) / square, 0, 1)
    covered = (y - share * line_y) ** 2 + (x - share * line_x) ** 2 <= half**2
    shares = covered.reshape(-1, side, _FINER, side, _FINER).mean(axis=(2, 4), dtype=np.float32)
    values = shares * brightness[:, None, None]
    rows = np.broadcast_to(top.astype(int) + np.arange(side)[None, :, None], values.shape)
    columns = np.broadcast_to(left.astype(int) + np.arange(side)[None, None, :], values.shape)
    size = len(image)
    inside = (rows >= 0) & (rows < size) & (columns >= 0) & (columns < size) & (values > 0)
    np.maximum.at(image, (rows[inside], columns[inside]), values[inside])
