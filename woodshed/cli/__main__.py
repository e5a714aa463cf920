"""`python -m woodshed.cli`."""

from woodshed.cli import main

if __name__ == "__main__":
    main()
