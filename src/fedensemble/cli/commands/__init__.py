"""One module per command; `cli/main.py` declares their arguments and help texts."""
