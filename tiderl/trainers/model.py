"""The causal language model as the trainer sees it: packed token ids in, log-probs of the targets out.

`PackedCausalLM` wraps a Hugging Face model. It runs the transformer once over all segments and the output head only on the
rows that predict a generated token. Everything happens inside one `forward`, so that FSDP2 can shard the wrapper as a root.

Source: paper §3.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from tiderl.errors import ModelError
from tiderl.rl.loss import token_log_probs
from tiderl.trainers.attention import PACKED_ATTENTION, register_packed_attention
from tiderl.trainers.model_folder import check_model_folder

#: The types of `model.dtype`.
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
#: Where the wrapper keeps the Hugging Face model; stripped from parameter names.
PREFIX = "causal_lm."


class PackedCausalLM(nn.Module):
    """See the module docstring. Shapes are those of `rl.packing.PackedBatch`."""

    def __init__(self, causal_lm: Any, *, checkpoint_head: bool, checkpoint_layers: bool) -> None:
        super().__init__()
        self.causal_lm = causal_lm
        self.checkpoint_head = checkpoint_head
        if checkpoint_layers:
            # transformers recomputes layers in training mode only. Nothing else hangs on it: packed attention has no dropout.
            causal_lm.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
            causal_lm.train()

    @property
    def layers(self) -> Sequence[nn.Module]:
        """The transformer layers, which FSDP2 shards one by one."""
        return list(self.causal_lm.model.layers)

    def forward(
        self,
        token_ids: Tensor,  # [num_inputs]
        position_ids: Tensor,  # [num_inputs]
        lengths: tuple[int, ...],
        rows: Tensor,  # [num_targets]
        targets: Tensor,  # [num_targets]
        temperature: float,
    ) -> Tensor:
        """Log-probs [num_targets] (fp32) of `targets`, each from the output at its row."""
        hidden = self.causal_lm.model(
            input_ids=token_ids[None],
            position_ids=position_ids[None],
            use_cache=False,
            lengths=tuple(n for n in lengths if n),
        ).last_hidden_state[0]  # [num_inputs, hidden_size]
        return token_log_probs(
            hidden.index_select(0, rows),
            self.causal_lm.lm_head.weight,
            targets,
            temperature=temperature,
            recompute=self.checkpoint_head,
        )

    def hf_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Parameters under their Hugging Face names, in the model's order, tied duplicates left out."""
        for name, parameter in self.named_parameters():
            yield name.removeprefix(PREFIX), parameter


def load_causal_lm(path: str, dtype: torch.dtype | None) -> Any:
    """The Hugging Face model of a folder, on the CPU, with packed attention. `dtype` None: as stored. Raises `ModelError`."""
    check_model_folder(path)
    register_packed_attention()
    from transformers import AutoModelForCausalLM

    try:
        causal_lm, report = AutoModelForCausalLM.from_pretrained(
            path,
            dtype="auto" if dtype is None else dtype,
            attn_implementation=PACKED_ATTENTION,
            local_files_only=True,
            output_loading_info=True,
        )
    except (OSError, ValueError, RuntimeError, KeyError) as error:
        raise ModelError(
            f"model.path: {path} does not load in transformers ({error}); check config.json and the weights"
        ) from error
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        # transformers only warns, and fills missing weights with random numbers.
        if report[kind]:
            names = ", ".join(sorted(str(name) for name in report[kind])[:5])
            raise ModelError(
                f"model.path: the weights in {path} do not fit its config.json: {kind} {names}; copy the model again"
            )
    return causal_lm.eval()
