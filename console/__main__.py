"""`python -m console` is the command `ddtree`."""

import sys

from console.cli import main

sys.exit(main())
