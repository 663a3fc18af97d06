"""The architectures that models are tested with are saved and loaded here."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "models"))  # of `architectures`
