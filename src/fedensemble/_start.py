"""Imports torch without looking for cycles meanwhile: what an import makes stays, and looking took an eighth of it."""

import gc

_looked = gc.isenabled()
gc.disable()
try:
    import torch  # noqa: F401
finally:
    if _looked:
        gc.enable()
