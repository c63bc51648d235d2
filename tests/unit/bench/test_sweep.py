from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from pinnate.bench.chart import draw, require_matplotlib
from pinnate.bench.client import Outcome
from pinnate.bench.load import LoadResult
from pinnate.bench.sweep import Point, as_table, parse_concurrency, requests_at
from pinnate.core.errors import ConfigError
from tests.unit.bench.helpers import outcome, summary


def point(concurrency: int, gap: float) -> Point:
    load = LoadResult([outcome(0.0, 0.1, [gap] * 9) for _ in range(concurrency)], 1.0)
    return Point(concurrency, summary(load))


def test_concurrency_is_sorted_and_checked() -> None:
    assert parse_concurrency("4,1,16") == [1, 4, 16]
    for wrong in ("", "0,1", "1,1", "1,x", "1,,2", "-1", "1.5"):
        with pytest.raises(ConfigError, match="--concurrency"):
            parse_concurrency(wrong)


def test_requests_of_a_point() -> None:
    assert [requests_at(n, None) for n in (1, 2, 64)] == [8, 8, 256]
    assert requests_at(64, 10) == 10


def test_the_table_has_a_line_for_each_point() -> None:
    failed = Point(4, summary(LoadResult([Outcome(1, error="no")] * 2, 1.0)))
    _, first, last = as_table([point(2, 0.02), failed], 99.0).splitlines()
    assert first.split() == ["2", "0", "20.0", "100.0", "100.0", "20.0", "20.0", "280.0"]
    assert last.split() == ["4", "2", "0.0", "-", "-", "-", "-", "-"]


def test_without_matplotlib_the_error_names_the_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(ConfigError, match=r"pip install 'pinnate\[chart\]'"):
        require_matplotlib()


@pytest.mark.parametrize("points", [[point(1, 0.01), point(2, 0.02), point(8, 0.05)], [point(4, 0.01)]])
def test_the_chart_is_a_png_with_both_lines(points: list[Point], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from matplotlib.image import imread

    path = tmp_path / "c.png"
    draw(points, 99.0, "a title", path)
    pixels = imread(path)[..., :3]
    assert pixels.shape == (1080, 960, 3)
    for red, green, blue in ((0x1F, 0x5F, 0xA8), (0xD1, 0x70, 0x0F)):
        same = abs(pixels * 255 - (red, green, blue)).max(axis=2) < 3
        assert same.sum() > 100


def test_a_point_where_all_failed_is_a_gap_in_the_chart(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    failed = Point(2, summary(LoadResult([Outcome(1, error="no")], 1.0)))
    draw([failed], 99.0, "nothing", tmp_path / "c.png")
    assert (tmp_path / "c.png").read_bytes().startswith(b"\x89PNG")


def test_a_chart_that_cannot_be_written(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    with pytest.raises(ConfigError, match=r"--chart .*No such file"):
        draw([point(1, 0.1)], 99.0, "t", tmp_path / "no" / "c.png")
