"""`python -m cluster` is the command `longshore`, for places where only `python` is on the path."""

import sys

from longshore.main import main

sys.exit(main())
