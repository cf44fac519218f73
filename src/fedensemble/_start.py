"""Imports torch, unless a program did before, without looking for cycles in what stays anyway.

Looking meanwhile took an eighth of the import, and looking through torch's hundred thousands of objects again, the last
time when Python ends, half a second of every program. What was garbage before is collected first: `gc.freeze` sets
aside all there is; `gc.unfreeze()` takes it back.
"""

import gc
import sys

if "torch" not in sys.modules:
    _looked = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        import torch  # noqa: F401

        gc.freeze()
    finally:
        if _looked:
            gc.enable()
