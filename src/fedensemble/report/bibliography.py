"""BibTeX entries of the paper, of this package and of algorithms.

The entries of the algorithms in this package are in references.bib. Their keys are made of the
algorithm's `reference`: "Li et al. 2020" has the key li2020.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import cache
from importlib.resources import files

from ..core.algorithm import Algorithm, algorithms
from ..version import VERSION
from .tables.latex import escape

PAPER = "shi2021"  # the paper that introduced Fed-ensemble
PACKAGE = f"""@misc{{fedensemble,
  author = {{{{The fedensemble authors}}}},
  title = {{fedensemble: Federated Ensembles in {{Python}}}},
  note = {{Software, version {VERSION}}},
}}
"""


def bibliography(names: Iterable[str] = ()) -> str:
    """The entries of the paper, of this package and of the algorithms with these names, as BibTeX.

    Algorithms without a reference have no entry.
    """
    cited = [_entry(algorithms[name], name) for name in dict.fromkeys(names)]
    entries = dict.fromkeys([_packaged()[PAPER], PACKAGE, *cited])  # each once
    return "\n".join(entry for entry in entries if entry)


def _entry(algorithm: type[Algorithm], name: str) -> str:
    """The entry of an algorithm; of another package's algorithm only what its `reference` says."""
    # The class that states the reference: a subclass may inherit it.
    owner = next(parent for parent in algorithm.__mro__ if "reference" in vars(parent))
    reference = algorithm.reference
    if not reference:
        return ""
    # Another package's "Wang et al. 2020" may be another paper than ours, so it is not looked up.
    if owner.__module__.startswith("fedensemble."):
        return _packaged()[reference_key(reference)]
    key = re.sub(r"[^A-Za-z0-9-]+", "-", name)
    fields = f"  title = {{{escape(name)}}},\n  note = {{{escape(reference)}}},\n"
    return f"@misc{{{key},\n{fields}}}\n"


def reference_key(reference: str) -> str:
    """The key of a reference: the first surname and the year.

    >>> reference_key("Pathak and Wainwright 2020")
    'pathak2020'
    """
    words = reference.split()
    return f"{words[0].lower()}{words[-1]}"


@cache
def _packaged() -> dict[str, str]:
    """The entries of references.bib by key."""
    text = files("fedensemble.report").joinpath("references.bib").read_text(encoding="utf-8")
    entries = re.split(r"\n(?=@)", text)
    return {
        entry[entry.index("{") + 1 : entry.index(",")]: entry.rstrip() + "\n" for entry in entries
    }
