"""Puts the finished parts into one folder: `python -m training.assemble TARGET NEXTN DSPARK DATA OUT`.

OUT becomes a released checkpoint with the NextN layer among its shards, and OUT/dspark the drafter's. Reading them back is the
worker's business: the target's loader reads by name and passes over the NextN layer.
"""

import argparse
import shutil
from pathlib import Path

from training.export import read_tensors, write_target


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("target", "nextn", "dspark", "data", "out"):
        parser.add_argument(name, type=Path)
    options = parser.parse_args()
    write_target(options.out, read_tensors(options.target) | read_tensors(options.nextn), options.data)
    (options.out / "dspark").mkdir(exist_ok=True)
    for name in ("config.json", "model.safetensors"):
        shutil.copyfile(options.dspark / name, options.out / "dspark" / name)


if __name__ == "__main__":
    main()
