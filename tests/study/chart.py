"""A line chart as SVG, by hand: some lines of text, where a plotting library would be a dependency of nothing else here."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Final
from xml.sax.saxutils import escape

_WIDTH, _HEIGHT = 720, 400
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 170, 34, 48
_COLOURS: Final = ("#888888", "#d62728", "#1f77b4", "#2ca02c")
_DASHES: Final = ("6 4", "2 3", "", "")


def chart(title: str, x_name: str, y_name: str, xs: Sequence[float], lines: Mapping[str, Sequence[float]]) -> str:
    """Draw lines over logarithmic axes."""
    ys = [y for line in lines.values() for y in line]
    x_low, x_high = math.log(xs[0]), math.log(xs[-1])
    y_low, y_high = math.log(min(ys) * 0.9), math.log(max(ys) * 1.1)

    def place(x: float, y: float) -> tuple[float, float]:
        across = (math.log(x) - x_low) / (x_high - x_low)
        up = (math.log(y) - y_low) / (y_high - y_low)
        return _LEFT + across * (_WIDTH - _LEFT - _RIGHT), _HEIGHT - _BOTTOM - up * (_HEIGHT - _TOP - _BOTTOM)

    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" font-family="sans-serif" font-size="12">',
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="white"/>',
        f'<text x="{_LEFT}" y="20" font-size="14">{escape(title)}</text>',
        f'<text x="{(_LEFT + _WIDTH - _RIGHT) / 2:.0f}" y="{_HEIGHT - 10}" text-anchor="middle">{escape(x_name)}</text>',
        f'<text transform="translate(16 {_HEIGHT / 2:.0f}) rotate(-90)" text-anchor="middle">{escape(y_name)}</text>',
    ]
    ticks = [n * 10**e for e in range(-1, 5) for n in (1, 2, 5)]
    for y in (t for t in ticks if math.exp(y_low) <= t <= math.exp(y_high)):
        left, at = place(xs[0], y)
        out.append(f'<line x1="{left}" x2="{_WIDTH - _RIGHT}" y1="{at:.1f}" y2="{at:.1f}" stroke="#dddddd"/>')
        out.append(f'<text x="{left - 6}" y="{at + 4:.1f}" text-anchor="end">{y:g}</text>')
    for x in xs:
        at, _ = place(x, math.exp(y_low))
        out.append(f'<text x="{at:.1f}" y="{_HEIGHT - _BOTTOM + 16}" text-anchor="middle">{x:g}</text>')
    for number, (name, line) in enumerate(lines.items()):
        points = " ".join("{:.1f},{:.1f}".format(*place(x, y)) for x, y in zip(xs, line, strict=True))
        style = f'stroke="{_COLOURS[number]}" stroke-width="2" stroke-dasharray="{_DASHES[number]}"'
        out.append(f'<polyline points="{points}" fill="none" {style}/>')
        at = _TOP + 20 + 20 * number
        out.append(f'<line x1="{_WIDTH - _RIGHT + 12}" x2="{_WIDTH - _RIGHT + 36}" y1="{at}" y2="{at}" {style}/>')
        out.append(f'<text x="{_WIDTH - _RIGHT + 42}" y="{at + 4}">{escape(name)}</text>')
    return "\n".join([*out, "</svg>", ""])
