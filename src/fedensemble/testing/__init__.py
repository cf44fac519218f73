"""Contracts of algorithms, averages, schedules and engines, as checks to run on a plug-in.

>>> from fedensemble import FedAvg, Stratified
>>> passed = check_algorithm(FedAvg(lr=0.2), engine="loop")  # raises if a check fails
>>> passed[0], "bytes, engine 'loop'" in passed
('arithmetic', True)
>>> check_schedule(Stratified)
"""

from .algorithm import check_algorithm
from .average import check_average
from .engine import check_engine
from .schedule import check_schedule

__all__ = ["check_algorithm", "check_average", "check_engine", "check_schedule"]
