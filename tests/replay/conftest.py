"""Puts this folder on the path, because its tests share `replay_oracle`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
