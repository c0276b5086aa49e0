"""`python -m scripts.benchmark`."""

import sys

from scripts.benchmark.main import main

sys.exit(main())
