"""`python -m woodshed`."""

from woodshed.cli import main

if __name__ == "__main__":
    main()
