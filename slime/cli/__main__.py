"""`python -m slime.cli` is the console script `slime`."""

import sys

from slime.cli import main

if __name__ == "__main__":
    sys.exit(main())
