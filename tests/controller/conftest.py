# SPDX-License-Identifier: Apache-2.0
"""Makes `controller_workers` importable here, and so in worker processes, which take over `sys.path`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
