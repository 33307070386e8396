"""`python -m millstream` is the command `millstream`."""

import sys

from millstream.cli.main import main

sys.exit(main())
