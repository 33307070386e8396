"""`python -m millstream` is the command `millstream`."""

import sys

from millstream.cli._main import main

sys.exit(main())
