"""`worker.sync` between three processes over gloo: one sender, two receivers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.integration.sync_rank import made_up_weights
from tiderl.worker import sync

PROJECT = Path(__file__).parents[2]
BOUND_S = 120.0


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What the three ranks saw, by fault."""
    store = tmp_path_factory.mktemp("sync") / "store"
    command = [sys.executable, "-m", "tests.integration.sync_rank", str(store)]
    ranks = [
        subprocess.Popen(
            command,
            cwd=PROJECT,
            env={**os.environ, "RANK": str(rank), "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(3)
    ]
    try:
        printed = [rank.communicate(timeout=BOUND_S) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    for number, (rank, (_, errors)) in enumerate(zip(ranks, printed, strict=True)):
        assert rank.returncode == 0, f"rank {number}: {errors}"
    return [json.loads(output.strip().splitlines()[-1]) for output, _ in printed]


def test_weights_arrive_bit_for_bit_and_no_group_is_made(answers: list[dict[str, Any]]) -> None:
    """Invariants 1 and 3."""
    for answer in answers[1:]:
        assert answer["none"] == {"version": 5, "equal": True, "ranks_after": 3, "new_groups": 0}


def test_a_flipped_bit_is_found_and_named(answers: list[dict[str, Any]]) -> None:
    """Invariant 1: the fault lies in the last bucket, which holds `tail.weight`."""
    for answer in (a["flip"] for a in answers[1:]):
        assert "tail.weight" in answer["mismatch"]
        assert "checksum" in answer["mismatch"]
        assert answer["ranks_after"] == 3


def test_wrong_names_and_shapes_are_all_named_and_nobody_hangs(answers: list[dict[str, Any]]) -> None:
    """Invariant 2: rank 1 expects another model; rank 2 is not disturbed."""
    wrong, right = (a["names"] for a in answers[1:])
    for part in ("absent.weight is missing", "scale is not a parameter", "embed.weight has shape [33, 7]", "[7, 33]"):
        assert part in wrong["mismatch"]
    assert wrong["ranks_after"] == 3
    assert right["equal"] is True


@pytest.mark.parametrize("num_bytes", [16, 8192, 8192 * 3 + 48])
def test_checksum_sees_every_bit_and_the_order_of_rows(num_bytes: int) -> None:
    generator = torch.Generator().manual_seed(num_bytes)
    data = torch.randint(0, 256, (num_bytes,), dtype=torch.uint8, generator=generator)
    original = sync.checksum(data)
    for place in range(0, num_bytes, max(1, num_bytes // 64)):
        for bit in (0, 3, 7):
            data[place] ^= 1 << bit
            assert sync.checksum(data) != original, (place, bit)
            data[place] ^= 1 << bit
    assert sync.checksum(data) == original
    if num_bytes >= 2 * 8192:
        swapped = torch.cat([data[8192:16384], data[:8192], data[16384:]])
        assert sync.checksum(swapped) != original


def test_canary_ids_are_of_the_vocabulary_and_the_same_everywhere() -> None:
    ids = sync.canary_ids(50)
    assert len(ids) == sync.NUM_CANARY_TOKENS
    assert all(0 <= i < 50 for i in ids)
    assert ids == sync.canary_ids(50)


def test_the_made_up_weights_need_more_than_one_bucket() -> None:
    assert sum(tensor.nbytes for _, tensor in made_up_weights()) > 4 * 4096
