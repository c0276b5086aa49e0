"""`python -m scripts.cluster` is `scripts/cluster-test`."""

from __future__ import annotations

import sys

from scripts.cluster.main import main

sys.exit(main())
