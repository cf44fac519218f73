r"""Tables in LaTeX, for `\input{table.tex}` in a document that uses the package booktabs."""

from __future__ import annotations

import re
from collections.abc import Collection

from ...text import printable
from .result_table import NONE, TextTable

_SPECIAL = {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    '"': r"\textquotedbl{}",
    "±": r"$\pm$",
    "→": r"$\rightarrow$",
    "×": r"$\times$",
    **{character: f"\\{character}" for character in "&%$#_{}"},
}


def latex(
    table: TextTable, name: str, best: Collection[tuple[int, int]] = (), note: str = ""
) -> str:
    r"""A table environment with the table's title as caption.

    Args:
        name: after "tab:" in the label; characters other than letters, digits and - are replaced.
        best: (row, column) of the cells in bold.
        note: a line of comment at the top, such as the command that made the table.

    >>> table = TextTable("Over 3 seeds", ("method", "ECE %"), (("a_b", "3.2 ± 0.1"),))
    >>> print(latex(table, "mine", {(0, 1)}))
    % needs \usepackage{booktabs}
    \begin{table}
      \centering
      \caption{Over 3 seeds}
      \label{tab:mine}
      \begin{tabular}{lr}
        \toprule
        method & ECE \% \\
        \midrule
        a\_b & \textbf{3.2 $\pm$ 0.1} \\
        \bottomrule
      \end{tabular}
    \end{table}
    <BLANKLINE>
    """
    columns = range(len(table.header))
    body = [
        [_cell(cell, bold=(at, column) in best) for column, cell in enumerate(row)]
        for at, row in enumerate(table.rows)
    ]
    comments = [r"% needs \usepackage{booktabs}", *([f"% {printable(note)}"] if note else [])]
    return "\n".join(
        [
            *comments,
            r"\begin{table}",
            r"  \centering",
            f"  \\caption{{{escape(table.title)}}}",
            f"  \\label{{tab:{re.sub(r'[^A-Za-z0-9-]+', '-', name)}}}",
            f"  \\begin{{tabular}}{{{''.join('r' if table.numeric(c) else 'l' for c in columns)}}}",
            r"    \toprule",
            f"    {' & '.join(map(escape, table.header))} \\\\",
            r"    \midrule",
            *(f"    {' & '.join(row)} \\\\" for row in body),
            r"    \bottomrule",
            r"  \end{tabular}",
            r"\end{table}",
            "",
        ]
    )


def escape(text: str) -> str:
    r"""The text with LaTeX's special characters escaped.

    >>> print(escape("50 % of $x_1 & {y}"))
    50 \% of \$x\_1 \& \{y\}
    """
    return "".join(_SPECIAL.get(character, character) for character in printable(text))


def _cell(text: str, *, bold: bool) -> str:
    """A cell of the body; a table for Markdown marks cells in bold by stars."""
    marked = len(text) > 4 and text.startswith("**") and text.endswith("**")
    plain = text[2:-2] if marked else text
    content = "--" if plain == NONE else re.sub(r"^-(?=[\d.])", "$-$", escape(plain))
    return f"\\textbf{{{content}}}" if bold or marked else content
