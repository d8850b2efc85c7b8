"""The charts of both reports: points where they belong, round ticks, and texts that are escaped."""

import re
from pathlib import Path

import numpy as np
import pytest
from html_page import Page
from hypothesis import given, settings
from hypothesis import strategies as st

from data_pipeline.common.pages import (
    MOST_POINTS,
    Line,
    draw_chart,
    find_ticks,
    format_number,
    format_short,
    render_template,
    thin_out,
)


def places(line: dict) -> list[tuple[int, int]]:
    return [(int(x), int(y)) for x, y in re.findall(r"(-?\d+) (-?\d+)", line["path"])]


def test_points_and_ticks_lie_where_their_values_are() -> None:
    points = [(100.0, 2.0), (300.0, 8.0), (1000.0, 5.0)]
    lines = [Line("a", points, 0, "dots"), Line("b", [(0, 4.0), (1000, 4.0)], None, "dashed")]
    chart = draw_chart("title", "unit", lines, x_unit="tokens")
    found = places(chart["lines"][0])
    assert [x for x, _ in found] == [100, 300, 1000]  # permille of the width, from 0 tokens

    def value(place: int) -> float:  # a straight line through the ticks of the y axis
        ticks = [(y, float(text)) for y, text in chart["y_ticks"]]
        slope, start = np.polyfit(*np.array(ticks).T, 1)
        return slope * place + start

    assert [value(y) for _, y in found] == pytest.approx([2, 8, 5], abs=0.02)
    assert [value(y) for _, y in places(chart["lines"][1])] == pytest.approx([4, 4], abs=0.02)
    assert [line["last"] for line in chart["lines"]] == ["5.000", "4.000"]
    assert [text for _, _, text in chart["lines"][0]["dots"]] == [
        "100 tokens: 2.000",
        "300 tokens: 8.000",
        "1k tokens: 5.000",
    ]


@settings(max_examples=200, derandomize=True)
@given(st.floats(-1e6, 1e6), st.floats(0.01, 1e9))
def test_ticks_are_few_round_and_evenly_spaced(low: float, span: float) -> None:
    high = low + span
    ticks = find_ticks(low, high)
    assert 1 <= len(ticks) <= 6
    if len(ticks) > 1:
        steps = np.diff(ticks)
        assert steps == pytest.approx(steps[0], rel=1e-3)
        assert f"{steps[0]:.1e}"[:3] in ("1.0", "2.0", "5.0")
    assert low - 1e-6 * span <= ticks[0] and ticks[-1] <= high + 1e-6 * span


@pytest.mark.parametrize("points", [[(0.0, 3.0)], [(5.0, 0.0), (6.0, 0.0)], [(0.0, -2.0)] * 3])
def test_a_single_point_or_a_level_line_is_a_chart(points) -> None:
    chart = draw_chart("", "", [Line("a", points)], x_unit="")
    assert all(0 <= place <= 1000 for xy in places(chart["lines"][0]) for place in xy)
    assert len(chart["lines"][0]["dots"]) == (len(points) == 1)  # a line of one point has no length


def test_a_seventh_line_has_the_colour_of_the_first_and_dashes() -> None:
    points = [(0.0, 1.0), (1.0, 2.0)]
    lines = [Line(str(i), points, i, look) for i in range(8) for look in ("line", "dots", "faint")]
    drawn = draw_chart("title", "unit", lines, x_unit="tokens")["lines"]
    looks = {(line["colour"], line["look"]) for line in drawn}
    assert looks == {(f"c{i}", look) for i in range(6) for look in ("line", "dots", "faint")} | {
        ("c0", "dashed"),
        ("c1", "dashed"),
    }


def test_a_long_line_is_thinned_to_means_and_keeps_its_end() -> None:
    points = [(float(i), float(i % 7)) for i in range(12_345)]
    thin = thin_out(points)
    assert len(thin) <= MOST_POINTS + 1 and thin[-1] == points[-1]
    assert np.mean([y for _, y in thin[:-1]]) == pytest.approx(3, abs=0.05)
    assert thin_out(points[:MOST_POINTS]) == points[:MOST_POINTS]


def test_numbers_are_short_on_axes_and_exact_in_legends() -> None:
    shown = [format_short(x) for x in (0, 1e-12, 0.002, 12.5, 1200, 1_250_000, 3e9)]
    assert shown == ["0", "0", "0.002", "12.5", "1.2k", "1.25M", "3G"]
    assert [format_number(x) for x in (0.00012, 0.5, 4.6271, 23542.8)] == [
        "0.00012",
        "0.500",
        "4.627",
        "23,543",
    ]


def test_a_template_escapes_titles_names_and_cells(tmp_path: Path) -> None:
    template = tmp_path / "page.html"
    template.write_text(
        '{% extends "frame.html" %}{% from "frame.html" import chart, table, tiles %}'
        "{% block title %}{{ text }}{% endblock %}"
        "{% block body %}{{ chart(drawn) }}{{ table([text], [[text]]) }}"
        "{{ tiles([(text, text, text)]) }}{% endblock %}"
    )
    text = "</title><script>\"'&"
    drawn = draw_chart(text, text, [Line(text, [(0, 1), (1, 2)], 0, "dots")], x_unit=text)
    page = Page(render_template(template, text=text, drawn=drawn))
    page.assert_whole()
    assert page.text.count(text) >= 9
