"""`python -m fedensemble` is the command line."""

from .cli import main

main()
