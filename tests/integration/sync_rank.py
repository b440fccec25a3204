"""One rank of `test_sync.py`: rank 0 sends made-up weights, the others receive them, once for each kind of fault.

Prints one JSON object: what this rank saw, by fault.
"""

from __future__ import annotations

import json
import os
import sys
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist

from tiderl.errors import WeightMismatch
from tiderl.types import WeightVersion
from tiderl.worker import sync

CPU = torch.device("cpu")
BUCKET_BYTES = 4096


def made_up_weights() -> list[tuple[str, torch.Tensor]]:
    """Odd sizes, two dtypes, an empty tensor, a scalar, and one tensor larger than a bucket."""
    generator = torch.Generator().manual_seed(7)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    return [
        ("embed.weight", random(33, 7)),
        ("big.weight", random(64, 65)),
        ("half.weight", random(5, 3).to(torch.bfloat16)),
        ("empty.bias", torch.zeros(0)),
        ("scale", torch.tensor(3.5)),
        ("tail.weight", random(1001)),
    ]


def main() -> None:
    rank = int(os.environ["RANK"])
    store = dist.FileStore(sys.argv[1], 3)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=3, timeout=timedelta(seconds=60))
    group = dist.new_group([0, 1, 2], timeout=timedelta(seconds=60))
    print(json.dumps({fault: one_sync(rank, group, fault) for fault in ("none", "names", "flip")}))
    # Threads of the group that outlive the interpreter abort the process.
    dist.destroy_process_group()


def one_sync(rank: int, group: dist.ProcessGroup, fault: str) -> dict[str, object]:
    num_groups = len(dist.distributed_c10d._world.pg_map)
    canary = np.linspace(-3.0, 0.0, sync.NUM_CANARY_TOKENS - 1, dtype=np.float32)
    answer: dict[str, object] = {}
    if rank == 0:
        if fault == "flip":
            _flip_a_bit_after_the_checksum()
        sync.WeightSender(group, 0, BUCKET_BYTES, CPU).send(iter(made_up_weights()), WeightVersion(5), canary)
    else:
        expected = {name: tuple(tensor.shape) for name, tensor in made_up_weights()}
        if fault == "names" and rank == 1:
            del expected["scale"]
            expected["absent.weight"] = (2,)
            expected["embed.weight"] = (7, 33)
        try:
            received = sync.WeightReceiver(group, 0, CPU).receive(expected)
            answer["version"] = received.version
            answer["equal"] = _same(received.weights) and bool((received.canary == canary).all())
        except WeightMismatch as error:
            answer["mismatch"] = str(error)
    # Whatever went wrong, nobody was left alone in a collective: the group still works.
    total = torch.ones(1)
    dist.all_reduce(total, group=group)
    answer["ranks_after"] = int(total.item())
    answer["new_groups"] = len(dist.distributed_c10d._world.pg_map) - num_groups
    return answer


def _same(weights: list[tuple[str, torch.Tensor]]) -> bool:
    sent = made_up_weights()
    names = [name for name, _ in weights] == [name for name, _ in sent]
    return names and all(a.dtype == b.dtype and torch.equal(a, b) for (_, a), (_, b) in zip(weights, sent, strict=True))


def _flip_a_bit_after_the_checksum() -> None:
    """What a broken link would do: the bytes of the last bucket change after the leader has summed them."""
    true_checksum = sync.checksum

    def checksum(data: torch.Tensor) -> int:
        value = true_checksum(data)
        if data.numel() < BUCKET_BYTES + 100:
            data[-20] ^= 1
        return value

    sync.checksum = checksum


if __name__ == "__main__":
    main()
