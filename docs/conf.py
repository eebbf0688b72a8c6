"""Sphinx configuration: Markdown pages, nothing generated from imports."""

project = "SilverSpoon-KD"
author = "The SilverSpoon-KD authors"
extensions = ["myst_parser"]
myst_heading_anchors = 3
html_theme = "furo"
html_title = project
