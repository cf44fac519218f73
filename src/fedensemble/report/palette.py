"""The colors of all figures: of the report page on light and dark paper, and of the PNGs."""

from __future__ import annotations

# Any two colors of a scheme differ by more than 35 in CIELAB. The PNGs are on light paper.
LIGHT = ("#2f66b0", "#cf3348", "#1f7d30", "#a39000", "#f28e1c", "#9040b0", "#6b6b6b")
DARK = ("#5b9ee8", "#ff6478", "#5cc46f", "#ece27a", "#f5982e", "#cf86f5", "#a8a8a8")
