"""The reference model, held against plain Hugging Face models: what it computes, and that it comes and goes as it says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch

from tests.conformance.actor_process import to_trajectory
from tests.conformance.trainer_actors import TEMPERATURE, make_trajectories, plain_log_probs, plain_model
from tiderl.config.schema import AgentConfig, Config, ModelConfig, RolesConfig, TrainerConfig
from tiderl.errors import ModelError, TrainerError
from tiderl.trainers import reference as reference_module
from tiderl.trainers.base import LogProbs, Reference
from tiderl.trainers.reference import ALIGNMENT_BYTES, HostedReference, available_bytes, swap_policy

CPU = torch.device("cpu")
MIB = 1024 * 1024
PLAIN = make_trajectories(11, (17, 3, 40, 3, 8))
TRAJECTORIES = [to_trajectory(plain) for plain in PLAIN]


def make(path: Path, dtype: Any = "float32", **trainer: Any) -> HostedReference:
    config = Config(
        model=ModelConfig(path=str(path), dtype=dtype),
        agent=AgentConfig(temperature=TEMPERATURE),
        trainer=TrainerConfig(**trainer),
        roles=RolesConfig(num_actors=3),
    )
    reference = HostedReference(config, CPU)
    reference.start()
    return reference


def as_tensors(log_probs: list[LogProbs]) -> list[torch.Tensor]:
    tensors = [own for own in log_probs if isinstance(own, torch.Tensor)]
    assert len(tensors) == len(log_probs)
    return tensors


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of 64 MiB: too large for an allocator to keep when it is freed."""
    import transformers

    folder = tmp_path_factory.mktemp("large")
    config = transformers.Qwen2Config(
        vocab_size=32,
        hidden_size=512,
        intermediate_size=2048,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        tie_word_embeddings=True,
    )
    transformers.utils.logging.disable_progress_bar()
    transformers.Qwen2ForCausalLM(config).save_pretrained(folder)
    return folder


# --- log-probs --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", ["tied", "untied", "llama"])
def test_a_packed_forward_equals_one_forward_a_trajectory(models: dict[str, Path], model: str) -> None:
    """A budget of 45 tokens makes three passes of these five trajectories."""
    reference = make(models[model], max_micro_batch_tokens=45)
    reference.swap_in()
    plain = plain_model(models[model])
    log_probs = as_tensors(reference.log_probs(TRAJECTORIES))
    for own, trajectory in zip(log_probs, PLAIN, strict=True):
        with torch.no_grad():
            wanted = plain_log_probs(plain, trajectory, TEMPERATURE).numpy()
        assert own.dtype is torch.float32
        assert not own.requires_grad
        np.testing.assert_allclose(own, np.where(trajectory["generated"], [0.0, *wanted], 0.0), atol=1e-5)
    passes = [own.untyped_storage().data_ptr() for own in log_probs]
    assert passes[0] == passes[1] != passes[2] != passes[4]
    assert passes[2] == passes[3]


def test_it_computes_in_the_models_type(models: dict[str, Path]) -> None:
    """bfloat16 has 8 bits: its log-probs are near those in float32, and not equal."""
    exact, low = make(models["untied"]), make(models["untied"], dtype="bfloat16")
    exact.swap_in()
    low.swap_in()
    pairs = zip(as_tensors(exact.log_probs(TRAJECTORIES)), as_tensors(low.log_probs(TRAJECTORIES)), strict=True)
    gap = max(float((a - b).abs().max()) for a, b in pairs)
    assert 1e-4 < gap < 0.5


def test_nothing_to_score_gives_nothing_or_zeros(models: dict[str, Path]) -> None:
    reference = make(models["tied"])
    reference.swap_in()
    assert reference.log_probs([]) == []
    (silent,) = make_trajectories(3, (9,))
    silent["generated"] = [False] * 9
    silent["log_probs"] = [0.0] * 9
    (zeros,) = as_tensors(reference.log_probs([to_trajectory(silent)]))
    assert zeros.tolist() == [0.0] * 9


# --- coming and going -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", ["tied", "untied"])
def test_after_a_swap_it_is_in_the_same_storages_and_equal_bit_for_bit(models: dict[str, Path], model: str) -> None:
    reference = make(models[model])
    reference.swap_in()
    parameters = list(reference._model.parameters())
    storages = [parameter.untyped_storage()._cdata for parameter in parameters]
    assert len(set(storages)) == 1
    wanted = as_tensors(reference.log_probs(TRAJECTORIES))
    for _ in range(3):
        with torch.no_grad():
            parameters[0].fill_(7.0)  # what becomes of the device's copy goes nowhere
        reference.swap_out()
        reference.swap_in()
        assert [parameter.untyped_storage()._cdata for parameter in reference._model.parameters()] == storages
        for own, before in zip(as_tensors(reference.log_probs(TRAJECTORIES)), wanted, strict=True):
            assert torch.equal(own, before)


def test_a_swap_takes_its_while_and_none_where_there_is_nothing_to_do(models: dict[str, Path]) -> None:
    reference: Reference = make(models["tied"])
    swaps = [reference.swap_out, reference.swap_in, reference.swap_in, reference.swap_out, reference.swap_out]
    seen = [(swap() > 0.0, reference.is_on_device) for swap in swaps]
    assert seen == [(False, False), (True, True), (False, True), (True, False), (False, False)]


def test_the_hosts_copy_is_the_folders_weights(models: dict[str, Path]) -> None:
    """Every parameter once (tied ones too), each at an aligned place, in the model's type."""
    reference = make(models["tied"])
    host = torch.cat(reference._host_chunks)
    wanted = dict(plain_model(models["tied"]).named_parameters())
    starts = [place.start for place in reference._places]
    assert len(starts) == len(wanted)
    assert all(start % ALIGNMENT_BYTES == 0 for start in starts)
    for start, parameter in zip(starts, wanted.values(), strict=True):
        stored = host[start : start + parameter.nbytes].view(torch.float32).view(parameter.shape)
        assert torch.equal(stored, parameter)


def test_chunks_are_cut_anywhere(models: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    whole = make(models["untied"])
    monkeypatch.setattr(reference_module, "PINNED_CHUNK_BYTES", 1000)
    cut = make(models["untied"])
    assert len(cut._host_chunks) > 10
    for reference in (whole, cut):
        reference.swap_in()
    pairs = zip(as_tensors(whole.log_probs(TRAJECTORIES)), as_tensors(cut.log_probs(TRAJECTORIES)), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


def resident_bytes() -> int:
    """Of this process's memory, what is really there."""
    return int(psutil.Process().memory_info().rss)


def test_memory_goes_and_comes(large: Path) -> None:
    reference = make(large)
    num_bytes = sum(place.num_bytes for place in reference._places)
    assert num_bytes > 64 * MIB
    out_bytes = resident_bytes()
    for _ in range(3):
        reference.swap_in()
        in_bytes = resident_bytes()
        assert in_bytes - out_bytes > 0.9 * num_bytes
        assert {p.untyped_storage().nbytes() for p in reference._model.parameters()} == {reference._num_bytes}
        reference.swap_out()
        out_bytes = resident_bytes()
        assert in_bytes - out_bytes > 0.9 * num_bytes
        assert {p.untyped_storage().nbytes() for p in reference._model.parameters()} == {0}


def test_starting_keeps_one_copy_only(large: Path) -> None:
    before_bytes = resident_bytes()
    reference = make(large)
    num_bytes = sum(place.num_bytes for place in reference._places)
    assert resident_bytes() - before_bytes < 1.5 * num_bytes


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_on_a_gpu_it_comes_out_of_pinned_memory_and_leaves_nothing(large: Path) -> None:
    device = torch.device("cuda", 0)
    reference = HostedReference(Config(model=ModelConfig(path=str(large), dtype="bfloat16")), device)
    reference.start()
    assert all(chunk.is_pinned() for chunk in reference._host_chunks)
    empty_bytes = torch.cuda.memory_allocated(device)
    played = [to_trajectory(plain) for plain in make_trajectories(3, (30, 20), vocab_size=32)]
    scored = []
    for _ in range(2):
        reference.swap_in()
        assert torch.cuda.memory_allocated(device) - empty_bytes >= reference._num_bytes
        scored.append([own.cpu() for own in as_tensors(reference.log_probs(played))])
        reference.swap_out()
        assert torch.cuda.memory_allocated(device) - empty_bytes < MIB
    assert all(torch.equal(a, b) for a, b in zip(*scored, strict=True))


# --- where it stays ---------------------------------------------------------------------------------------------------


def test_auto_keeps_it_where_twice_all_copies_would_fit(
    models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three actors: six times its size, in the kB that Linux counts in."""
    reference = make(models["tied"])
    monkeypatch.setattr(reference_module, "MEMINFO", tmp_path / "meminfo")
    needed_kb = -(-6 * reference._num_bytes // 1024)
    for available_kb, policy in ((needed_kb, "resident"), (needed_kb - 1, "offload")):
        (tmp_path / "meminfo").write_text(f"MemTotal:  99999999 kB\nMemAvailable: {available_kb} kB\n")
        assert swap_policy(reference._config, reference) == policy
    reference.swap_in()
    with pytest.raises(TrainerError, match="call swap_out first"):
        swap_policy(reference._config, reference)


@pytest.mark.parametrize(("peak_bytes", "policy"), [(540, "resident"), (541, "offload")])
def test_on_a_gpu_auto_keeps_it_where_the_peak_leaves_room(
    monkeypatch: pytest.MonkeyPatch, peak_bytes: int, policy: str
) -> None:
    """Of 1000 bytes, others have 160; 300 are free, 540 this process's. 50 stay free: 250 fit over a peak of 540."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (300, 1000))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 540)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: peak_bytes)
    reference = HostedReference(Config(), torch.device("cuda"))
    reference._num_bytes = 250
    assert swap_policy(Config(), reference) == policy


@pytest.mark.parametrize("swap", ["offload", "resident"])
def test_what_is_set_is_not_asked(swap: Any) -> None:
    """Of a reference that isn't even loaded."""
    config = Config(trainer=TrainerConfig(swap=swap))
    assert swap_policy(config, HostedReference(config, CPU)) == swap


@pytest.mark.parametrize("content", [None, "MemFree: 1 kB\n"])
def test_a_machine_that_does_not_tell_its_memory_offloads(
    tmp_path: Path, content: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    if content is not None:
        (tmp_path / "meminfo").write_text(content)
    assert available_bytes(tmp_path / "meminfo") == 0
    assert "does not say how much memory is available" in caplog.text


def test_this_machine_tells_its_memory() -> None:
    assert 0 < available_bytes(reference_module.MEMINFO) < 2**50


# --- what is refused --------------------------------------------------------------------------------------------------


def test_calls_out_of_order_are_refused(models: dict[str, Path]) -> None:
    config = Config(model=ModelConfig(path=str(models["tied"])))
    reference = HostedReference(config, CPU)
    with pytest.raises(TrainerError, match="call start first"):
        reference.swap_in()
    reference.start()
    with pytest.raises(TrainerError, match="call swap_in first"):
        reference.log_probs(TRAJECTORIES)
    reference.swap_in()
    reference.swap_out()
    with pytest.raises(TrainerError, match="call swap_in first"):
        reference.log_probs(TRAJECTORIES)


def test_a_broken_model_folder_is_a_model_error(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="nowhere is not a folder"):
        make(tmp_path / "nowhere")
