"""Keeps vLLM from touching what belongs to the host process: torch.distributed's world, random states, environment, torch itself.

vLLM wants to own its process. Built inside a rank of a torchrun world it would wait for the other ranks, and its shutdown would
destroy the host's default process group. Here the engine's own calls (those made on the calling thread) see a world of one.

Invariants (tests/integration/test_engine_in_world.py):

1. Inside `world_of_one` the calling thread sees rank 0 of 1 of the default group, and groups that it makes hold this rank alone and
   need no other rank. Other threads see the real world all the time.
2. Inside `world_of_one` the host's default process group cannot be destroyed from the calling thread.
3. `host_state_kept` gives back, also when the block raises: the global random states, the environment variables other than
   `VLLM_*`, and the attributes of torch that vLLM's CPU worker replaces.

Source: measured with torch 2.13 and vLLM 0.32 (facts-vllm.md); nothing in the paper asks for it.
"""

from __future__ import annotations

import contextlib
import os
import random
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

#: What `vllm.v1.worker.cpu.shm`, `cpu_worker` and `cpu_model_runner` (0.32) replace by no-ops and placeholders.
_REPLACED_BY_VLLM: tuple[tuple[Any, str], ...] = (
    (torch, "set_num_threads"),
    (torch, "Event"),
    (torch.cuda, "Event"),
    (torch.cuda, "Stream"),
    (torch.cuda, "set_stream"),
    (torch.cuda, "current_stream"),
    (torch.cuda, "stream"),
    (torch.accelerator, "synchronize"),
    (torch.accelerator, "empty_cache"),
    (torch.accelerator, "get_memory_info"),
    (torch.Tensor, "pin_memory"),
    (torch.Tensor, "record_stream"),
)
#: What vLLM put there; some of it only when it was first imported, so it must be put back for its next piece of work.
_replacements: dict[tuple[int, str], Any] = {}


def _by_thread(inside: Callable[..., Any], outside: Callable[..., Any]) -> Callable[..., Any]:
    """`inside` for the calling thread, `outside` for every other."""
    owner = threading.get_ident()

    def choose(*args: Any, **kwargs: Any) -> Any:
        return (inside if threading.get_ident() == owner else outside)(*args, **kwargs)

    return choose


@contextlib.contextmanager
def world_of_one() -> Iterator[None]:
    """Let the calling thread see a world of one. Does nothing where the host has no default group: then vLLM makes its own."""
    if not dist.is_initialized():
        yield
        return
    host_group = dist.group.WORLD
    real = {name: getattr(dist, name) for name in ("get_world_size", "get_rank", "new_group", "destroy_process_group")}
    my_rank = real["get_rank"]()

    def of_default(group: Any) -> bool:
        return group is None or group is host_group

    def get_world_size(group: Any = None) -> int:
        return 1 if of_default(group) else real["get_world_size"](group)

    def get_rank(group: Any = None) -> int:
        return 0 if of_default(group) else real["get_rank"](group)

    def new_group(ranks: list[int] | None = None, **kwargs: Any) -> Any:
        assert ranks is None or list(ranks) == [0], f"vLLM asked for a group of ranks {ranks} in a world of one"
        return real["new_group"]([my_rank], use_local_synchronization=True, **kwargs)

    def destroy_process_group(group: Any = None) -> None:
        if not of_default(group):
            real["destroy_process_group"](group)

    for function in (get_world_size, get_rank, new_group, destroy_process_group):
        setattr(dist, function.__name__, _by_thread(function, real[function.__name__]))
    try:
        yield
    finally:
        for name, function in real.items():
            setattr(dist, name, function)


@contextlib.contextmanager
def host_state_kept() -> Iterator[None]:
    """For the block, torch is as vLLM wants it; at its end the host's random states, environment and torch are back."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("VLLM_")}
    python_state, numpy_state, torch_state = random.getstate(), np.random.get_state(), RandomStream.capture()
    try:
        with _replacements_in_place():
            yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)
        torch_state.put_back()
        for name in [name for name in os.environ if not name.startswith("VLLM_") and name not in environment]:
            del os.environ[name]
        os.environ.update(environment)


@contextlib.contextmanager
def _replacements_in_place() -> Iterator[None]:
    of_host = [(owner, name, getattr(owner, name)) for owner, name in _REPLACED_BY_VLLM if hasattr(owner, name)]
    for owner, name, _ in of_host:
        if (id(owner), name) in _replacements:
            setattr(owner, name, _replacements[id(owner), name])
    try:
        yield
    finally:
        for owner, name, value in of_host:
            if (present := getattr(owner, name)) is not value:
                _replacements[id(owner), name] = present
                setattr(owner, name, value)


class RandomStream:
    """A state of torch's global generators to be swapped in and out, so that sampling and the host don't disturb each other."""

    def __init__(self, cpu: torch.Tensor, cuda: torch.Tensor | None) -> None:
        self._cpu = cpu
        self._cuda = cuda

    @classmethod
    def capture(cls) -> RandomStream:
        """The present state of the CPU's and (where CUDA is in use) the current GPU's generator."""
        return cls(torch.get_rng_state(), torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None)

    @classmethod
    def seeded(cls, seed: int) -> RandomStream:
        """The state that `torch.manual_seed(seed)` would leave; the global generators are not touched."""
        cuda = torch.Generator("cuda").manual_seed(seed).get_state() if torch.cuda.is_initialized() else None
        return cls(torch.Generator().manual_seed(seed).get_state(), cuda)

    def put_back(self) -> None:
        torch.set_rng_state(self._cpu)
        if self._cuda is not None:
            torch.cuda.set_rng_state(self._cuda)

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Draw from this stream inside the block, and remember where it got to."""
        host = RandomStream.capture()
        self.put_back()
        try:
            yield
        finally:
            now = RandomStream.capture()
            self._cpu, self._cuda = now._cpu, now._cuda
            host.put_back()
