"""The method: what a mode, a plan, a visit and a round are. Knows no dataset, no file and no
particular engine.
"""
