"""A process of a node, as torchrun has started it: connects by itself, keeps its losses."""

import json
import os
import sys
from pathlib import Path

from tests.trainer.agreeing import ddp

if __name__ == "__main__":
    folder = Path(sys.argv[1])
    (folder / f"rank{os.environ['RANK']}.json").write_text(json.dumps({"ddp": ddp(folder)}))
