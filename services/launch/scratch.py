"""A command's temporary folder, and one way to end it by whatever signal."""

import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from k3mesh.errors import MeshError


@contextmanager
def scratch(command: str) -> Iterator[Path]:
    """A folder for as long as the block lasts. SIGTERM and SIGHUP leave the block by KeyboardInterrupt, through every finally.

    After a MeshError the folder stays if there are logs in it, and is named on standard error.
    """
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler)
    folder = Path(tempfile.mkdtemp(prefix=f"k3mesh-{command}-"))
    keep = False
    try:
        yield folder
    except MeshError:
        keep = any(folder.rglob("*.log"))
        raise
    finally:
        if keep:
            print(f"logs are in {folder}", file=sys.stderr, flush=True)
        else:
            shutil.rmtree(folder)
