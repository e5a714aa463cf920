"""`python -m woodshed.cli`."""

from woodshed.cli import main

main()
