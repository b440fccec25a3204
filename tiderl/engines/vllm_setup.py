"""From a `Config` to what vLLM needs to know: environment, engine arguments, size of the KV cache, names and shapes of the weights.

Invariants (tests/conformance/test_engine.py):

1. `engine.kv_cache_tokens` is what requests can use: vLLM keeps one block for itself, which is added on top.
2. A cache that could not hold one context of `model.max_context_tokens` is refused here (vLLM would wait for ever).
3. `expected_weights` names every parameter of the Hugging Face model once; a tied output head is left out.
"""

from __future__ import annotations

import importlib
import json
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from tiderl.config.schema import Config
from tiderl.errors import ConfigError, ModelError

#: Largest KV cache on a CPU when `engine.kv_cache_tokens` leaves the choice to the engine.
_DEFAULT_CPU_CACHE_BYTES = 1 << 30

logger = logging.getLogger(__name__)


def prepare_environment(config: Config) -> None:
    """Set what vLLM reads from the environment while it is imported and built. Variables set by the user win, but for the
    first: with it, vLLM would start a process of its own. Call it inside `host_state_kept`, which takes the rest back."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    defaults = {
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        # vLLM's loggers then hand their records to the host's, which knows the rank's log file.
        "VLLM_CONFIGURE_LOGGING": "0",
    }
    if not config.engine.compile:
        # An eager engine would still compile a function of its sampler: seconds of C++ at the first log-prob. Dynamo must have
        # been imported before, or it would take this for the whole process, the trainer included.
        importlib.import_module("torch._dynamo")
        defaults["TORCHDYNAMO_DISABLE"] = "1"
    for name, value in defaults.items():
        os.environ.setdefault(name, value)


def check_model_folder(config: Config) -> None:
    """Raises `ModelError` where vLLM would fail with a message that doesn't name the setting."""
    folder = Path(config.model.path)
    if not config.model.path or not (folder / "config.json").is_file():
        raise ModelError(f"model.path: no config.json in {str(folder)!r}; it must be a Hugging Face model folder")
    try:
        json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ModelError(f"model.path: {folder / 'config.json'} is not JSON ({error})") from error
    if not any(folder.glob("*.safetensors")):
        raise ModelError(
            f"model.path: no *.safetensors file in {str(folder)!r}; convert the model with save_pretrained"
        )


def load_model_config(config: Config) -> Any:
    """The model's transformers config."""
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(config.model.path)


def expected_weights(model_config: Any) -> Mapping[str, tuple[int, ...]]:
    """Names and shapes of the model's parameters as transformers names them, in its order, each shared parameter once."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(model_config)
    return {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}


def cache_bytes_per_token(config: Config, model_config: Any) -> int:
    """Bytes of keys and values of one token over all layers."""
    head_dim = getattr(model_config, "head_dim", None) or model_config.hidden_size // model_config.num_attention_heads
    num_heads = getattr(model_config, "num_key_value_heads", None) or model_config.num_attention_heads
    item_bytes = getattr(torch, config.model.dtype).itemsize
    return int(2 * model_config.num_hidden_layers * num_heads * head_dim * item_bytes)


def usable_cache_blocks(config: Config, model_config: Any, *, on_cpu: bool) -> int | None:
    """Blocks that requests can use; None leaves the choice to the engine (on a GPU only). Raises `ConfigError`."""
    engine, max_context_tokens = config.engine, config.model.max_context_tokens
    num_tokens = engine.kv_cache_tokens
    if num_tokens == 0:
        if not on_cpu:
            return None
        most_tokens = _DEFAULT_CPU_CACHE_BYTES // cache_bytes_per_token(config, model_config)
        num_tokens = max(min(engine.max_running * max_context_tokens, most_tokens), max_context_tokens)
        logger.info(
            "engine.kv_cache_tokens is 0: taking %d tokens (max_running x max_context, 1 GiB at most)", num_tokens
        )
    if num_tokens < max_context_tokens:
        raise ConfigError(
            "engine.kv_cache_tokens",
            f"{num_tokens} cannot hold one context of model.max_context_tokens = {max_context_tokens}; raise it at least to that",
        )
    return -(-num_tokens // engine.block_size)


def engine_arguments(config: Config, num_blocks: int | None, cache_bytes: int | None) -> dict[str, Any]:
    """Keyword arguments of vLLM's `EngineArgs`. `num_blocks` and `cache_bytes` count vLLM's own block too."""
    from tiderl.engines.vllm_scheduler import MeteredScheduler

    model, engine = config.model, config.engine
    return {
        "model": model.path,
        "skip_tokenizer_init": True,
        "dtype": model.dtype,
        "max_model_len": model.max_context_tokens,
        "block_size": engine.block_size,
        "num_gpu_blocks_override": num_blocks,
        # Given in bytes too, since vLLM on a CPU would otherwise claim `gpu_memory_share` of the machine for every rank.
        "kv_cache_memory_bytes": cache_bytes,
        "gpu_memory_utilization": engine.gpu_memory_share,
        "max_num_seqs": engine.max_running,
        "max_num_batched_tokens": max(engine.max_batched_tokens, engine.max_running),
        "use_tqdm_on_load": False,
        "enforce_eager": not engine.compile,
        "enable_prefix_caching": True,
        "logprobs_mode": "processed_logprobs",
        "generation_config": "vllm",
        # A step in flight would blur which weights made a token, and on a CPU vLLM turns it off anyway.
        "async_scheduling": False,
        # `score` overtakes what is waiting.
        "scheduling_policy": "priority",
        "scheduler_cls": MeteredScheduler,
        "disable_log_stats": True,
        "seed": config.run.seed,
    }
