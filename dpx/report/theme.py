"""Colours of pages and figures, as CSS variables with a light and a dark value.

The five series colours differ in lightness as well as hue, so that they stay apart for readers with any colour blindness; figures
also give each series its own marker and dash.
"""

import html
import re

_LIGHT = {
    "paper": "#ffffff", "ink": "#1c1c1e", "soft": "#5c5f66", "rule": "#d9dbe0", "shade": "#f1f2f4", "good": "#0b6e4f", "bad": "#b3261e",
    "s1": "#0060a0", "s2": "#c44e00", "s3": "#00795a", "s4": "#9b3f7a", "s5": "#6f6400",
}  # fmt: skip
_DARK = {
    "paper": "#16181c", "ink": "#e6e7ea", "soft": "#a2a6ae", "rule": "#363a41", "shade": "#24272d", "good": "#4fd1a5", "bad": "#ff8a80",
    "s1": "#63b3ff", "s2": "#ffa257", "s3": "#45d0a5", "s4": "#ee9fd0", "s5": "#e0d24a",
}  # fmt: skip


def _declared(colours: dict[str, str]) -> str:
    return " ".join(f"--{name}: {value};" for name, value in colours.items())


CSS_COLOURS = (_declared(_LIGHT), _declared(_DARK))
SERIES = tuple(_LIGHT[f"s{number}"] for number in range(1, 6))
INK, SOFT, RULE = _LIGHT["ink"], _LIGHT["soft"], _LIGHT["rule"]
MARKERS = ("o", "s", "^", "D", "v")
DASHES = ("-", (0, (5, 1.5)), (0, (1.5, 1.2)), (0, (6, 1.5, 1.5, 1.5)), (0, (3, 1, 1, 1, 1, 1)))


def themed(svg: str, name: str, label: str) -> str:
    """Returns matplotlib's SVG for a page: colours as variables, unique ids, no prolog or metadata (nothing that names another host)."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.S)
    for variable in ("ink", "soft", "rule", "s1", "s2", "s3", "s4", "s5"):
        svg = svg.replace(_LIGHT[variable], f"var(--{variable})")
    svg = re.sub(r'\bid="', f'id="{name}-', svg)
    svg = svg.replace("url(#", f"url(#{name}-").replace('href="#', f'href="#{name}-')
    # As wide as drawn where there is room; the height follows from the view box.
    pixels = r' width="([\d.]+)pt" height="[^"]*"'
    svg = re.sub(pixels, lambda found: f' style="max-width: {float(found[1]) * 4 / 3:.0f}px"', svg, count=1)
    safe = html.escape(label, quote=False).replace('"', "&quot;")
    return svg.replace("<svg", f'<svg role="img" aria-label="{safe}"', 1)


def standalone(svg: str) -> str:
    """Returns a themed figure as a standalone file, with the variables inside."""
    light, dark = CSS_COLOURS
    style = f"<style>svg {{ {light} background: var(--paper); }} @media (prefers-color-scheme: dark) {{ svg {{ {dark} }} }}</style>"
    return '<?xml version="1.0" encoding="utf-8"?>\n' + re.sub(r"(<svg[^>]*>)", lambda match: match[0] + style, svg, count=1)
