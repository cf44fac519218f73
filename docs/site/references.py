"""Docstrings for autodoc, and links from names in docstrings and signatures to their pages."""

from __future__ import annotations

from typing import Any

from docstrings import as_rst
from docutils import nodes
from sphinx.addnodes import pending_xref
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.util.nodes import make_refnode

_properties: dict[str, list[str]] = {}


def _before_napoleon(
    app: Sphinx, what: str, name: str, value: Any, options: Any, lines: list[str]
) -> None:
    lines[:] = as_rst(lines)
    if what in ("property", "attribute", "data"):
        # Napoleon would take the text before a colon for a type.
        _properties[name] = lines[:]
        lines.clear()


def _after_napoleon(
    app: Sphinx, what: str, name: str, value: Any, options: Any, lines: list[str]
) -> None:
    lines[:] = _properties.pop(name, lines)


def _skip(app: Sphinx, what: str, name: str, value: Any, skip: bool, options: Any) -> bool | None:
    """Leaves out methods that another package adds to a class, with references of its own."""
    module = getattr(value, "__module__", None) or "fedensemble"
    return None if module.partition(".")[0] == "fedensemble" else True


def _resolve(
    app: Sphinx, env: BuildEnvironment, node: pending_xref, shown: nodes.Element
) -> nodes.Element | None:
    """Returns a link to the page of a name, or the name alone if there is no such page.

    A docstring names things as its readers write them: `Ensemble`, `Federation.save`, an argument,
    `FedAvg(lr=0.1)`. The types of other packages have no page either.
    """
    if node.get("refdomain") != "py":
        return None
    found = env.domains.python_domain.find_obj(env, None, None, node["reftarget"], None, 1)
    if len(found) != 1:
        return shown
    name, entry = found[0]
    if "." not in node["reftarget"] and entry.objtype in ("attribute", "method", "property"):
        return shown  # an argument or a field with the name of some class's attribute
    return make_refnode(app.builder, node["refdoc"], entry.docname, entry.node_id, shown, name)


def setup(app: Sphinx) -> dict[str, Any]:
    app.connect("autodoc-process-docstring", _before_napoleon, priority=400)
    app.connect("autodoc-process-docstring", _after_napoleon, priority=600)
    app.connect("autodoc-skip-member", _skip)
    app.connect("missing-reference", _resolve)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
