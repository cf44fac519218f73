"""The contracts that algorithms, schedules and engines keep, as functions anyone can run on their
own plug-in.

>>> from fedensemble import FedAvg, Stratified
>>> held = check_algorithm(FedAvg(lr=0.2), engine="loop")  # raises where something does not
>>> held[:2]
['arithmetic', "bytes, engine 'loop'"]
>>> check_schedule(Stratified)
"""

from .algorithm import check_algorithm
from .engine import check_engine
from .schedule import check_schedule

__all__ = ["check_algorithm", "check_engine", "check_schedule"]
