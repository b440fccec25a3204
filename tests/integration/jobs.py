"""What the tests of whole jobs share: a random tiny model, an environment server, a job under torchrun, and its run folder."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

PROJECT = Path(__file__).parents[2]
ENVIRONMENT = "tests.integration.counting_env:Counting"
#: A job of these tests takes about half a minute on a quiet machine with two cores.
BOUND_S = 400.0

CONFIG = f"""
[run]
folder = "{{folder}}"
[model]
path = "{{model}}"
dtype = "float32"
max_context_tokens = 256
[roles]
num_actors = 2
[env]
name = "{ENVIRONMENT}"
urls = ["{{url}}"]
[agent]
max_turns = 4
max_new_tokens = 3
[engine]
kv_cache_tokens = 8192
max_running = 32
[train]
steps = 3
groups_per_step = 4
group_size = 4
[trainer]
max_micro_batch_tokens = 1024
[loss]
kl_weight = 0.01
[optim]
lr = 1e-3
[eval]
every = 2
num_tasks = 16
[checkpoint]
every = 2
"""


def write_model(folder: Path) -> None:
    """A random Qwen2 whose tokenizer knows single characters."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

    specials = ["<|end|>", "<|system|>", "<|user|>", "<|assistant|>", "<unk>"]
    words = specials + [chr(code) for code in range(32, 127)]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|end|>", unk_token="<unk>", additional_special_tokens=specials[1:4]
    )
    wrapped.chat_template = (
        "{% for m in messages %}{{ '<|' + m['role'] + '|>' + m['content'] + '<|end|>' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
    )
    wrapped.save_pretrained(folder)
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=len(words),
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=0,
        pad_token_id=0,
    )
    Qwen2ForCausalLM(config).float().save_pretrained(folder)


@contextmanager
def environment_server(*flags: str, env: str = ENVIRONMENT) -> Iterator[str]:
    """The URL of an environment server in a process of its own."""
    command = [sys.executable, "-m", "tiderl.cli", "env", "serve", env, "--port", "0", "--workers", "1", *flags]
    server = subprocess.Popen(command, cwd=PROJECT, env=_environ(), stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        ready = server.stdout.readline()
        assert " on http://" in ready, ready
        yield ready.partition(" on ")[2].partition(",")[0].strip()
    finally:
        server.terminate()
        server.wait(timeout=30)
        server.stdout.close()


def start_job(config: Path, *flags: str) -> subprocess.Popen[str]:
    """A job on four ranks; its console goes to a pipe."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"]
    command = [*torchrun, "-m", "tiderl.launch", "--config", str(config), *flags]
    return subprocess.Popen(
        command,
        cwd=PROJECT,
        env=_environ(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def run_job(config: Path, *flags: str) -> tuple[int, str]:
    """Exit code and console of a whole job."""
    job = start_job(config, *flags)
    try:
        output, _ = job.communicate(timeout=BOUND_S)
    finally:
        job.kill()
        job.wait()
    return job.returncode, output


def lines_of(run_dir: Path, kind: str) -> list[dict[str, Any]]:
    """The lines of one kind of `metrics.jsonl`."""
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line["kind"] == kind]


def processes_of(text: str) -> list[str]:
    """Command lines of running processes that contain `text` in their arguments or environment."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            haystack = (entry / "environ").read_bytes() + (entry / "cmdline").read_bytes()
            if text.encode() in haystack:
                found.append((entry / "cmdline").read_bytes().replace(b"\0", b" ").decode())
        except OSError:
            continue  # it ended, or is not ours to read
    return found


def _environ() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(PROJECT)}
