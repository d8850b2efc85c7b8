"""Draw charts and self-contained HTML pages, for the data report and the run report.

`frame.html` beside this file holds the frame of a page, its style, and the markup of charts and
tables. This file computes what the markup shows: the places of lines and ticks, in permille of a
chart's width and height, so that a chart fits any width while its text keeps its size.
"""

import math
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from jinja2 import Environment, FileSystemLoader, StrictUndefined

COLOURS = 6  # of lines in `frame.html`; later ones begin again, dashed
MOST_POINTS = 300  # of a line: more cannot be seen
MOST_DOTS = 60  # of a line, with the value of each


@dataclass
class Line:
    """A line of a chart, or the edge of a histogram.

    name: its name in the legend; "" leaves it out.
    points: (x, y) in ascending x.
    colour: number of its colour; None: grey.
    look: `line`, `dots` (a line with a dot at each point), `faint` or `dashed`, whose last value
    the legend shows too; or `area` or `outline`, of a histogram.
    """

    name: str
    points: list[tuple[float, float]]
    colour: int | None = 0
    look: str = "line"


def draw_chart(
    title: str,
    unit: str,
    lines: list[Line],
    *,
    x_unit: str,
    x_ticks: list[tuple[float, str]] | None = None,
    from_zero: bool = False,
    percent: bool = False,
    top: float = math.inf,
) -> dict:
    """Compute a chart of at least one point, as the macro `chart` of `frame.html` draws it.

    x_ticks: (x, text) of each tick; None: choose them.
    percent: the values are fractions to show as percentages.
    top: cut off what is higher, such as a single spike.
    """
    lines = [Line(x.name, thin_out(x.points), x.colour, x.look) for x in lines if x.points]
    xs, ys = zip(*(point for line in lines for point in line.points), strict=True)
    left, right = min(xs), max(xs)
    if x_ticks is None:
        left = min(left, 0)
        x_ticks = [(x, format_short(x)) for x in find_ticks(left, right)]
    low, high = (0 if from_zero else min(ys)), min(max(ys), top)
    margin = 0.06 * (high - low) or 0.1 * abs(high) or 1
    low, high = low - margin * (not from_zero), high + margin

    def x_place(x: float) -> int:
        return round(1000 * (x - left) / ((right - left) or 1))

    def y_place(y: float) -> int:
        return round(1000 * (high - y) / (high - low))

    def say(value: float) -> str:
        return f"{100 * value:.1f} %" if percent else format_number(value)

    drawn = []
    for line in lines:
        places = [(x_place(x), y_place(y)) for x, y in line.points]
        texts = [f"{format_short(x)} {x_unit}: {say(y)}" for x, y in line.points]
        is_later = (line.colour or 0) >= COLOURS and line.look in ("line", "dots")
        # a line of one point would be invisible
        is_dotted = len(places) == 1 or line.look == "dots" and len(places) <= MOST_DOTS
        drawn.append(
            {
                "name": line.name,
                "last": "" if line.look in ("area", "outline") else say(line.points[-1][1]),
                "colour": "grey" if line.colour is None else f"c{line.colour % COLOURS}",
                "look": "dashed" if is_later else line.look,
                "path": "M" + "L".join(f"{x} {y}" for x, y in places),
                "dots": [(*p, t) for p, t in zip(places, texts, strict=True)] if is_dotted else [],
            }
        )
    return {
        "title": title,
        "unit": unit,
        "x_unit": x_unit,
        "lines": drawn,
        "x_ticks": [(x_place(x), text) for x, text in x_ticks],
        "y_ticks": [
            (y_place(y), f"{100 * y:.4g}%" if percent else format_short(y))
            for y in find_ticks(low, high)
        ],
    }


def thin_out(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Average neighbouring points until few enough are left; the last point stays as it is."""
    size = -(-len(points) // MOST_POINTS)
    if size <= 1:
        return points
    groups = [points[i : i + size] for i in range(0, len(points) - 1, size)]
    means = [(fmean(x for x, _ in group), fmean(y for _, y in group)) for group in groups]
    return [*means, points[-1]]


def find_ticks(low: float, high: float) -> list[float]:
    """Choose at most about five round numbers from low to high."""
    most = 5
    unit = 10 ** math.floor(math.log10((high - low or 1) / most))
    step = next(unit * k for k in (1, 2, 5, 10) if (high - low) / (unit * k) <= most)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [step * k for k in range(first, last + 1)]


def format_short(value: float) -> str:
    """Format a number for an axis: 1,200,000 as 1.2M."""
    for name, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(value) >= size:
            return f"{value / size:.4g}{name}"
    return f"{value:.4g}" if abs(value) > 1e-9 else "0"


def format_number(value: float) -> str:
    """Format a measured number: three decimals, or three digits where these say too much or
    little."""
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3f}" if abs(value) >= 0.1 else f"{value:.3g}"


def render_template(template: Path, **values: object) -> str:
    """Render a page from a template that extends `frame.html`; escapes all values but `Markup`."""
    environment = Environment(
        loader=FileSystemLoader([template.parent, Path(__file__).parent]),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template(template.name).render(values)
