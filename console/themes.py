"""Colours: dark, light, high contrast and none. Whatever a colour says stands beside it in words too."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from textual.theme import BUILTIN_THEMES, Theme

DARK, LIGHT, HIGH_CONTRAST, NO_COLOUR = "dark", "light", "high-contrast", "no-colour"

THEMES: tuple[Theme, ...] = (
    dataclasses.replace(BUILTIN_THEMES["textual-dark"], name=DARK),
    dataclasses.replace(BUILTIN_THEMES["textual-light"], name=LIGHT),
    Theme(
        name=HIGH_CONTRAST,
        primary="#00ffff",
        secondary="#ffff00",
        accent="#ffff00",
        warning="#ffff00",
        error="#ff8080",
        success="#80ff80",
        foreground="#ffffff",
        background="#000000",
        surface="#000000",
        panel="#000000",
        luminosity_spread=0.0,
        text_alpha=1.0,
        variables={"text-muted": "#ffffff", "footer-key-foreground": "#ffff00", "border": "#ffffff"},
    ),
    Theme(
        name=NO_COLOUR,
        primary="#d0d0d0",
        foreground="#ffffff",
        background="#000000",
        surface="#000000",
        panel="#000000",
        text_alpha=1.0,
    ),
)

PALETTES: Mapping[str, Mapping[str, str]] = {
    DARK: {
        "good": "bold #4ebf71",
        "bad": "bold #f0616d",
        "fair": "bold #ffa62b",
        "share": "#4ebf71",
        "stage": "#57a5e2",
        "bonus": "underline #ffa62b",
    },
    LIGHT: {
        "good": "bold #1a7f37",
        "bad": "bold #b3122a",
        "fair": "bold #8a5300",
        "share": "#1a7f37",
        "stage": "#0550ae",
        "bonus": "underline #8a5300",
    },
    HIGH_CONTRAST: {
        "good": "bold #80ff80",
        "bad": "bold reverse #ff8080",
        "fair": "bold #ffff00",
        "share": "#ffffff",
        "stage": "#00ffff",
        "bonus": "underline #ffff00",
    },
    NO_COLOUR: {
        "good": "bold",
        "bad": "bold underline",
        "fair": "bold",
        "share": "none",
        "stage": "none",
        "bonus": "underline",
    },
}
"""Named styles of the screens by theme."""


def palette(theme: str, dark: bool) -> dict[str, str]:
    """The named styles for a theme, for those of others by their ground."""
    return dict(PALETTES.get(theme) or PALETTES[DARK if dark else LIGHT])


def following(theme: str) -> str:
    """The theme after `theme`."""
    names = [each.name for each in THEMES]
    return names[(names.index(theme) + 1) % len(names)] if theme in names else names[0]
