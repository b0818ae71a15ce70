"""`python -m kvjax` is the command `kvjax`."""

import sys

from kvjax.cli import main

if __name__ == "__main__":
    sys.exit(main())
