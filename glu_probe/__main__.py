"""`python -m glu_probe`: the command line."""

from .cli import main

main()
