"""Fed-ensemble: federated training of K models at the communication cost of one."""

import sys as _sys
from typing import TYPE_CHECKING

from . import _import_interrupt as _import_interrupt
from ._lazy_package import LazyPackage as _LazyPackage
from .version import VERSION

__version__ = VERSION

# The public names are those of `public.py`. It imports torch, which takes a second, so that it is
# imported when the first of them is used: `fedensemble --help` needs none.
if TYPE_CHECKING:
    from .public import *  # noqa: F403
else:
    _sys.modules[__name__].__class__ = _LazyPackage
