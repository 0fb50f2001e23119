"""`python -m evenstep` is the command `evenstep`."""

import sys

from evenstep.cli import main

sys.exit(main())
