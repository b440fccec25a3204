"""The model that emulated engines and trainers share: eight numbers, and log-probs that depend on every one of them.

Nothing is computed in an emulated job but this. The weights that a sync carries are real and tiny, so that a lost, stale or mangled
sync shows in the log-prob canary as it does with a real model.

Invariants (tests/unit/test_emulated_model.py):

1. `weights_of` depends on the version alone, on every machine.
2. Under the weights of another version some log-prob of a canary differs by more than any canary's tolerance.
3. A log-prob depends on its token, on the one before it and on its place, so that shifted or shortened ids show too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

#: The one parameter, and its length.
WEIGHT_NAME: Final = "emulated.weight"
WEIGHT_LENGTH: Final = 8

_SEED = 20_270_101
_MODULUS = 997
#: Spreads the log-probs so far that two versions are told apart by 32 tokens even with the tolerance for bfloat16.
_SCALE = 4.0


def weights_of(version: int) -> npt.NDArray[np.float32]:
    """The weights [8] that training has led to at `version`, each in [0, 1)."""
    return np.random.default_rng((_SEED, version)).random(WEIGHT_LENGTH).astype(np.float32)


def score(weight: npt.NDArray[np.float32], token_ids: Sequence[int] | npt.NDArray[np.int32]) -> npt.NDArray[np.float32]:
    """Log-probs [num_tokens - 1] of ids 1.. given those before, under `weight` [8]; each below -1.

    Raises `ValueError` for fewer than two tokens.
    """
    ids = np.asarray(token_ids, dtype=np.int64)
    if ids.size < 2:
        raise ValueError(f"a score wants at least 2 tokens: the first one has no log-prob; got {ids.size}")
    assert weight.shape == (WEIGHT_LENGTH,), weight.shape
    places = np.arange(1, ids.size)[:, None]  # [num_tokens - 1, 1]
    features = np.arange(1, WEIGHT_LENGTH + 1)  # [8]
    mixed = ids[1:, None] * (2 * features + 1) + ids[:-1, None] * (features + 17) + places * (31 * features)
    # [num_tokens - 1, 8], from integers: every machine computes the same
    activations = (mixed % _MODULUS) * (_SCALE / _MODULUS)
    log_probs: npt.NDArray[np.float32] = (-1.0 - activations @ weight.astype(np.float64)).astype(np.float32)
    return log_probs
