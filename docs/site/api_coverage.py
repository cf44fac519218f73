"""Fails the build if a public name has no description on a page of the API."""

from __future__ import annotations

from typing import Any

import api_pages
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.util import logging

_LOG = logging.getLogger(__name__)


def _check(app: Sphinx, env: BuildEnvironment) -> None:
    described = {name for name, *_ in env.domains.python_domain.get_objects()}
    for (module, name), home in api_pages.home_of_names().items():
        if home not in described:
            _LOG.warning("%s.%s is public, but no page describes it", module, name)


def setup(app: Sphinx) -> dict[str, Any]:
    app.connect("env-check-consistency", _check)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
