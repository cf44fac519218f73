"""Contracts of algorithms, schedules and engines, as checks that you can run on a plug-in.

>>> from fedensemble import FedAvg, Stratified
>>> passed = check_algorithm(FedAvg(lr=0.2), engine="loop")  # raises if a check fails
>>> passed[:2]
['arithmetic', "bytes, engine 'loop'"]
>>> check_schedule(Stratified)
"""

from .algorithm import check_algorithm
from .engine import check_engine
from .schedule import check_schedule

__all__ = ["check_algorithm", "check_engine", "check_schedule"]
