"""`python -m longshore` is the command `longshore`."""

import sys

from longshore.main import main

sys.exit(main())
