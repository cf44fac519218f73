"""`python -m fedensemble` is the command line."""

from .cli.main import main

main()
