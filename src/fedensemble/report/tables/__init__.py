"""Tables of results: as Markdown, CSV and LaTeX, and for the terminal."""
