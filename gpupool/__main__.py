"""`python -m gpupool` is the program `gpupool`."""

import sys

from gpupool.cli import main

if __name__ == "__main__":
    sys.exit(main())
