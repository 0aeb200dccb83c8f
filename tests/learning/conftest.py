"""Makes the shared code of this folder importable as `checks`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
