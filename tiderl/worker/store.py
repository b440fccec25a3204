"""Torchrun's key-value store: what the processes of a job tell each other before, and beyond, their connection to the coordinator.

Keys stand under a prefix of this start of the job, since torchrun's store outlives a restart. Nothing in it is encrypted, and one
thing is secret: the job's description (`wire/job.py`).
"""

from __future__ import annotations

import os
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from tiderl.errors import WaitTimeout

#: The job's description, from rank 0.
JOB_KEY = "job"
#: Why the job has ended, from rank 0 (`epilogue.py`).
ENDED_KEY = "ended"


def join_store(bound_s: float) -> Store:
    """As torchrun's environment says; `bound_s` is the bound of joining, and of every wait in it."""
    restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = TCPStore(host, port, is_master=False, timeout=timedelta(seconds=bound_s))
    return PrefixStore(f"tiderl/{restart}", store)


def await_key(store: Store, key: str, *, waiter: str, waited_for: str, bound_s: float) -> str:
    """Block until somebody has set `key`. Raises `WaitTimeout` (`timeouts.start_s`)."""
    try:
        store.wait([key], timedelta(seconds=bound_s))
    except dist.DistStoreError as error:
        raise WaitTimeout(waiter, waited_for, bound_s, "timeouts.start_s") from error
    value: bytes = store.get(key)
    return value.decode()
