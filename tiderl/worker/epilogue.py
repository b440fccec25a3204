"""Waits for the job's end in the place of a Ref rank that has died: `python -m tiderl.worker.epilogue WHAT_HAPPENED`.

Torchrun ends the whole job when one of its processes fails, and lets a node go whose processes have all ended. So the dead rank's
parent (`tiderl.launch`, which loads no torch) starts this in the worker's stead, and exits 0 when it ends. How long the job goes on
is not known; the wait ends with the job's word in torchrun's store, with the store, or with the signal by which torchrun ends
its processes, whichever comes first.

Invariants (tests/integration/test_epilogue.py):

1. It ends, with 0, once the job has ended or the store is gone.
2. It says what happened on standard error, in one line, unless the job had ended already.
"""

from __future__ import annotations

import os
import sys
import time

import torch.distributed as dist

from tiderl.worker.store import ENDED_KEY, join_store

#: Between two looks into the store.
POLL_S = 1.0
#: Torchrun's store answers at once, or is gone.
STORE_BOUND_S = 30.0


def main() -> None:
    try:
        store = join_store(STORE_BOUND_S)
        if store.check([ENDED_KEY]):
            return
        what = f"Ref rank {os.environ['RANK']} has died ({sys.argv[1]}); the job goes on without it"
        print(f"tiderl: {what}", file=sys.stderr, flush=True)
        while not store.check([ENDED_KEY]):
            time.sleep(POLL_S)
    except dist.DistError as error:
        print(f"tiderl: torchrun's store is gone, and so is the job: {error}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
