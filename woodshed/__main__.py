"""`python -m woodshed`."""

import os
import sys

# Python puts the working folder first; no file in it may hide an installed package, pathlib included.
if sys.path[0] == os.getcwd():  # noqa: PTH109
    sys.path.append(sys.path.pop(0))

from woodshed.cli import main

if __name__ == "__main__":
    main()
