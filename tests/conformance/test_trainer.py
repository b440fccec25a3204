"""The trainer protocol, held against plain Hugging Face models and plain autograd on the same trajectories.

The actors are real processes over gloo, one or two of them. What they should have computed is computed here, one trajectory at
a time, without packing, sharding or chunking.
"""

from __future__ import annotations

import json
import os
import select
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

TEMPERATURE = 0.8
VOCAB = 37  # odd, so that shards are unequal
BETA1 = 0.9
ANSWER_S = 90.0

PlainTrajectory = dict[str, Any]
PlainMicroBatch = dict[str, Any]


class Actors:
    """The processes of one world. `run` sends a command to all and returns their answers by rank."""

    def __init__(self, world_size: int, folder: Path, script_name: str = "actor_process.py") -> None:
        script = Path(__file__).with_name(script_name)
        root = str(Path(__file__).parents[2])
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": root, "HF_HUB_OFFLINE": "1"}
        self.world_size = world_size
        self.processes = [
            subprocess.Popen(
                [sys.executable, str(script), str(rank), str(world_size), str(folder / f"store{world_size}")],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env=environment,
            )
            for rank in range(world_size)
        ]

    def run(self, *command: Any) -> list[Any]:
        answers = self.ask(*command)
        assert not any("error" in a for a in answers), answers
        return [a["result"] for a in answers]

    def ask(self, *command: Any) -> list[dict[str, Any]]:
        line = (json.dumps(command) + "\n").encode()
        for process in self.processes:
            assert process.stdin is not None
            process.stdin.write(line)
            process.stdin.flush()
        return [self._answer(rank, command[0]) for rank in range(self.world_size)]

    def _answer(self, rank: int, name: str) -> dict[str, Any]:
        stream = self.processes[rank].stdout
        assert stream is not None
        ready, _, _ = select.select([stream], [], [], ANSWER_S)
        assert ready, f"actor {rank} of {self.world_size} did not answer {name} within {ANSWER_S} s"
        line = stream.readline()
        assert line, f"actor {rank} of {self.world_size} died in {name}; its traceback is above"
        answer: dict[str, Any] = json.loads(line)
        return answer

    def close(self) -> None:
        for process in self.processes:
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.close()
        for process in self.processes:
            try:
                process.wait(timeout=20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            assert process.stdout is not None
            process.stdout.close()


@pytest.fixture(scope="module")
def worlds(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[int], Actors]]:
    started: dict[int, Actors] = {}
    folder = tmp_path_factory.mktemp("stores")

    def world(size: int) -> Actors:
        if size not in started:
            started[size] = Actors(size, folder)
        return started[size]

    yield world
    for actors in started.values():
        actors.close()


@pytest.fixture(params=[1, 2], ids=["1 actor", "2 actors"])
def actors(request: pytest.FixtureRequest, worlds: Callable[[int], Actors]) -> Actors:
    return worlds(request.param)


def make_model(folder: Path, kind: str, tied: bool) -> None:
    import transformers

    torch.manual_seed(3)
    sizes: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 24,
        "intermediate_size": 40,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 6,
        "initializer_range": 0.3,
        "tie_word_embeddings": tied,
    }
    config = getattr(transformers, f"{kind}Config")(**sizes)
    model = getattr(transformers, f"{kind}ForCausalLM")(config)
    # Biases and norms start as zeros and ones, which would hide one that is left out or swapped.
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.1 * torch.randn_like(parameter))
    transformers.utils.logging.disable_progress_bar()
    model.save_pretrained(folder)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    for name, kind, tied in (("tied", "Qwen2", True), ("untied", "Qwen3", False), ("llama", "Llama", False)):
        make_model(folder / name, kind, tied)
    (folder / "tied" / "tokenizer_config.json").write_text('{"model_max_length": 64}')
    return {path.name: path for path in folder.iterdir()}


def settings(folder: Path, **sections: dict[str, Any]) -> dict[str, dict[str, Any]]:
    plain: dict[str, dict[str, Any]] = {
        "model": {"path": str(folder), "dtype": "float32"},
        "agent": {"temperature": TEMPERATURE},
        "optim": {"lr": 1e-2, "betas": [BETA1, 0.95], "max_grad_norm": 0.0},
    }
    for name, values in sections.items():
        plain[name] = {**plain.get(name, {}), **values}
    return plain


def make_trajectories(seed: int, lengths: tuple[int, ...]) -> list[PlainTrajectory]:
    rng = np.random.default_rng(seed)
    made = []
    for length in lengths:
        generated = rng.random(length) < 0.3
        generated[0] = False
        generated[-2] = True
        made.append(
            {
                "token_ids": rng.integers(0, VOCAB, length).tolist(),
                "generated": generated.tolist(),
                "log_probs": np.where(generated, rng.normal(-3.5, 0.5, length), 0.0).tolist(),
                "weight_versions": np.where(generated, rng.integers(0, 2, length), -1).tolist(),
            }
        )
    return made


def micro_batch(seed: int, *lengths: int) -> PlainMicroBatch:
    rng = np.random.default_rng(seed + 1000)
    return {"trajectories": make_trajectories(seed, lengths), "advantages": rng.normal(0, 1, len(lengths)).tolist()}


#: Four micro-batches of unequal trajectories, and how they may be spread over two ranks.
FOUR = [micro_batch(1, 9, 14), micro_batch(2, 30), micro_batch(3, 5, 5, 21), micro_batch(4, 12, 3)]
SPREADS = {"3+1": (3, 1), "4+0": (4, 0), "0+4": (0, 4), "2+2": (2, 2)}


def spread(
    micro_batches: list[PlainMicroBatch], world_size: int, counts: tuple[int, int]
) -> list[list[PlainMicroBatch]]:
    if world_size == 1:
        return [micro_batches]
    return [micro_batches[: counts[0]], micro_batches[counts[0] :]]


def plain_model(folder: Path) -> Any:
    import transformers

    transformers.utils.logging.disable_progress_bar()
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")


def plain_log_probs(model: Any, trajectory: PlainTrajectory, temperature: float) -> torch.Tensor:
    """Log-probs [num_tokens - 1] of tokens 1.., from one forward over the whole trajectory."""
    ids = torch.tensor(trajectory["token_ids"])
    logits = model(input_ids=ids[None], use_cache=False).logits[0, :-1] / temperature
    return torch.log_softmax(logits, dim=-1)[torch.arange(len(ids) - 1), ids[1:]]


def plain_gradients(
    folder: Path, micro_batches: list[PlainMicroBatch], kl_weight: float
) -> tuple[dict[str, npt.NDArray[np.float32]], float, int]:
    """Gradients by name of the mean token loss, the summed loss, and the number of tokens."""
    model, reference = plain_model(folder), plain_model(folder)
    total, num_tokens = torch.zeros(()), 0
    for batch in micro_batches:
        for trajectory, advantage in zip(batch["trajectories"], batch["advantages"], strict=True):
            mask = torch.tensor(trajectory["generated"])[1:]
            current = plain_log_probs(model, trajectory, TEMPERATURE)[mask]
            ratio = torch.exp(current - torch.tensor(trajectory["log_probs"])[1:][mask])
            total = total - torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).sum()
            if kl_weight:
                gap = current - plain_log_probs(reference, trajectory, TEMPERATURE).detach()[mask]
                total = total + kl_weight * (torch.exp(-gap) + gap - 1.0).sum()
            num_tokens += int(mask.sum())
    (total / num_tokens).backward()
    gradients = {name: p.grad.numpy() for name, p in model.named_parameters()}
    return gradients, float(total.detach()), num_tokens


def assert_gradients(state_file: Path, wanted: dict[str, npt.NDArray[np.float32]]) -> None:
    """After one update from scratch, AdamW's first moment is (1 - beta1) times the gradient."""
    with np.load(state_file) as state:
        got = {name.removeprefix("exp_avg."): state[name] for name in state if name.startswith("exp_avg.")}
    assert got.keys() == wanted.keys()
    for name, gradient in wanted.items():
        error = np.linalg.norm(got[name] / (1 - BETA1) - gradient) / np.linalg.norm(gradient)
        assert error < 1e-5, (name, error)


@pytest.mark.parametrize("counts", SPREADS.values(), ids=SPREADS.keys())
def test_gradients_do_not_depend_on_the_spread(
    worlds: Callable[[int], Actors], models: dict[str, Path], tmp_path: Path, counts: tuple[int, int]
) -> None:
    actors = worlds(2)
    actors.run("start", settings(models["tied"]))
    answers = actors.run("step", spread(FOUR, 2, counts), [False, False])
    actors.run("state", str(tmp_path / "state.npz"))
    wanted, loss, num_tokens = plain_gradients(models["tied"], FOUR, 0.0)
    assert_gradients(tmp_path / "state.npz", wanted)
    norm = np.sqrt(sum(np.square(g, dtype=np.float64).sum() for g in wanted.values()))
    for answer in answers:
        assert answer["updated"]
        assert answer["version"] == 1
        assert answer["num_trained_tokens"] == num_tokens
        assert answer["grad_norm"] == pytest.approx(norm, rel=1e-5)
    assert sum(r["sums"]["loss"] for a in answers for r in a["results"]) == pytest.approx(loss, rel=1e-5)


@pytest.mark.parametrize("model", ["tied", "untied", "llama"])
@pytest.mark.parametrize("recompute", [False, True], ids=["keep", "recompute"])
def test_gradients_of_every_model(
    actors: Actors, models: dict[str, Path], tmp_path: Path, model: str, recompute: bool
) -> None:
    trainer = {"checkpoint_head": recompute, "checkpoint_layers": recompute}
    actors.run("start", settings(models[model], trainer=trainer))
    actors.run("step", spread(FOUR, actors.world_size, (3, 1)), [False] * 2)
    actors.run("state", str(tmp_path / "state.npz"))
    assert_gradients(tmp_path / "state.npz", plain_gradients(models[model], FOUR, 0.0)[0])


def test_gradients_with_a_kl_penalty_after_the_policy_has_moved(
    actors: Actors, models: dict[str, Path], tmp_path: Path
) -> None:
    """The second step's gradient holds the KL term; the first, at zero distance, has none by k3."""
    actors.run("start", settings(models["untied"], loss={"kl_weight": 0.7}))
    actors.run("step", spread(FOUR, actors.world_size, (1, 3)), [False] * 2)
    actors.run("state", str(tmp_path / "one.npz"))
    assert_gradients(tmp_path / "one.npz", plain_gradients(models["untied"], FOUR, 0.7)[0])

    actors.run("export", str(tmp_path / "moved"))
    answers = actors.run("step", spread(FOUR, actors.world_size, (1, 3)), [False] * 2)
    actors.run("state", str(tmp_path / "two.npz"))
    moved, start = plain_model(tmp_path / "moved"), plain_model(models["untied"])
    kl = 0.0
    for trajectory in (t for m in FOUR for t in m["trajectories"]):
        mask = torch.tensor(trajectory["generated"])[1:]
        with torch.no_grad():
            gap = plain_log_probs(moved, trajectory, TEMPERATURE) - plain_log_probs(start, trajectory, TEMPERATURE)
        kl += float((torch.exp(-gap) + gap - 1.0)[mask].sum())
    assert kl > 0.01
    assert sum(r["sums"]["kl"] for a in answers for r in a["results"]) == pytest.approx(kl, rel=1e-4)


def test_a_packed_forward_equals_one_forward_a_trajectory(actors: Actors, models: dict[str, Path]) -> None:
    trajectories = make_trajectories(11, (17, 3, 40, 3, 8))
    # A budget of 45 tokens makes three passes of these five trajectories.
    actors.run("start", settings(models["untied"], loss={"kl_weight": 1.0}, trainer={"max_micro_batch_tokens": 45}))
    model = plain_model(models["untied"])
    for arrays in actors.run("reference", trajectories):
        for array, trajectory in zip(arrays, trajectories, strict=True):
            with torch.no_grad():
                wanted = plain_log_probs(model, trajectory, TEMPERATURE).numpy()
            wanted = np.where(trajectory["generated"], [0.0, *wanted], 0.0)
            np.testing.assert_allclose(array, wanted, atol=2e-6)


def test_scores_are_at_temperature_one_and_work_in_and_between_steps(actors: Actors, models: dict[str, Path]) -> None:
    (trajectory,) = make_trajectories(5, (20,))
    with torch.no_grad():
        wanted = plain_log_probs(plain_model(models["tied"]), trajectory, 1.0).numpy()
    actors.run("start", settings(models["tied"]))
    for scores in actors.run("score", trajectory["token_ids"]):
        np.testing.assert_allclose(scores, wanted, atol=2e-6)
    actors.run("begin")
    for scores in actors.run("score", trajectory["token_ids"]):
        np.testing.assert_allclose(scores, wanted, atol=2e-6)
    assert {a["error"] for a in actors.ask("score", [1])} == {"ValueError"}


def test_the_gap_is_over_tokens_of_the_present_version_only(actors: Actors, models: dict[str, Path]) -> None:
    """Token 3 (version 0, the present one) is off by 0.25; token 5, of another version, by 4."""
    (trajectory,) = make_trajectories(5, (8,))
    with torch.no_grad():
        exact = [0.0, *plain_log_probs(plain_model(models["tied"]), trajectory, TEMPERATURE).tolist()]
    trajectory["generated"] = [i in (2, 3, 5) for i in range(8)]
    trajectory["weight_versions"] = [-1, -1, 0, 0, -1, 9, -1, -1]
    trajectory["log_probs"] = [0, 0, exact[2], exact[3] - 0.25, 0, exact[5] + 4.0, 0, 0]
    actors.run("start", settings(models["tied"]))
    batches: list[list[PlainMicroBatch]] = [[{"trajectories": [trajectory], "advantages": [1.0]}], []]
    (result,) = actors.run("step", batches, [False] * 2)[0]["results"]
    assert result["max_same_version_gap"] == pytest.approx(0.25, abs=1e-5)
    assert result["sums"]["log_prob_gap"] == pytest.approx(4.25, abs=1e-5)
    assert result["sums"]["entropy"] == pytest.approx(-exact[2] - exact[3] - exact[5], abs=1e-5)
    assert (result["num_tokens"], result["num_trained_tokens"], result["num_padding_tokens"]) == (8, 3, 0)


def test_an_abandoned_step_leaves_no_trace(actors: Actors, models: dict[str, Path], tmp_path: Path) -> None:
    """The last rank alone abandons. The next step is that of a trainer that never made the abandoned one."""
    actors.run("start", settings(models["tied"]))
    before = actors.run("state", str(tmp_path / "before.npz"))
    for answer in actors.run("step", spread(FOUR, actors.world_size, (2, 2)), [actors.world_size == 1, True]):
        assert answer["abandoned"]
        assert not answer["updated"]
        assert answer["version"] == 0
    assert actors.run("state", str(tmp_path / "after.npz")) == before
    actors.run("step", spread(FOUR, actors.world_size, (2, 2)), [False] * 2)
    actors.run("state", str(tmp_path / "state.npz"))
    assert_gradients(tmp_path / "state.npz", plain_gradients(models["tied"], FOUR, 0.0)[0])


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_what_is_not_finite_never_reaches_the_weights(
    actors: Actors, models: dict[str, Path], tmp_path: Path, poison: float
) -> None:
    actors.run("start", settings(models["tied"], optim={"max_grad_norm": 1.0}))
    before = actors.run("state", str(tmp_path / "before.npz"))
    poisoned = [*FOUR[:3], {**FOUR[3], "advantages": [poison, 1.0]}]
    for answer in actors.run("step", spread(poisoned, actors.world_size, (3, 1)), [False] * 2):
        assert not answer["updated"]
        assert not answer["abandoned"]
        assert answer["version"] == 0
    assert actors.run("state", str(tmp_path / "after.npz")) == before
    assert all(a["updated"] for a in actors.run("step", spread(FOUR, actors.world_size, (3, 1)), [False] * 2))


def test_a_step_without_any_trained_token_updates_nothing(actors: Actors, models: dict[str, Path]) -> None:
    actors.run("start", settings(models["tied"]))
    silent = micro_batch(1, 9)
    silent["trajectories"][0]["generated"] = [False] * 9
    for answer in actors.run("step", [[silent], []], [False] * 2):
        assert (answer["updated"], answer["num_trained_tokens"], answer["version"]) == (False, 0, 0)


def test_an_update_is_clipped_adamw_with_decay_on_matrices_only(
    actors: Actors, models: dict[str, Path], tmp_path: Path
) -> None:
    """Two updates against torch's plain AdamW on the plain gradients, with a warm-up of two steps."""
    optim = {"lr": 0.02, "weight_decay": 0.3, "max_grad_norm": 0.05, "warmup_steps": 2, "eps": 1e-3}
    actors.run("start", settings(models["untied"], optim=optim))
    model = plain_model(models["untied"])
    matrices = [p for p in model.parameters() if p.ndim == 2]
    vectors = [p for p in model.parameters() if p.ndim == 1]
    groups = [{"params": matrices, "weight_decay": 0.3}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, betas=(BETA1, 0.95), eps=1e-3)
    for lr in (0.01, 0.02):
        (answer, *_) = actors.run("step", spread(FOUR, actors.world_size, (3, 1)), [False] * 2)
        assert answer["lr"] == pytest.approx(lr)
        model.save_pretrained(tmp_path / f"at{lr}")
        gradients = plain_gradients(tmp_path / f"at{lr}", FOUR, 0.0)[0]
        for name, parameter in model.named_parameters():
            parameter.grad = torch.from_numpy(gradients[name])
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        assert norm.item() > 0.05, "the test must clip"
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.step()
    actors.run("weights", str(tmp_path / "weights.npz"))
    with np.load(tmp_path / "weights.npz") as weights:
        for name, parameter in model.named_parameters():
            np.testing.assert_allclose(weights[name], parameter.detach().numpy(), atol=2e-5, err_msg=name)


@pytest.mark.parametrize("model", ["tied", "untied"])
def test_full_weights_are_the_models_own(actors: Actors, models: dict[str, Path], tmp_path: Path, model: str) -> None:
    actors.run("start", settings(models[model]))
    names = actors.run("weights", str(tmp_path / "weights.npz"))
    wanted = dict(plain_model(models[model]).named_parameters())
    assert all(n == list(wanted) for n in names)
    assert ("lm_head.weight" in wanted) == (model == "untied")
    with np.load(tmp_path / "weights.npz") as weights:
        for name, parameter in wanted.items():
            np.testing.assert_array_equal(weights[name], parameter.detach().numpy())


def test_bfloat16_keeps_fp32_masters(actors: Actors, models: dict[str, Path], tmp_path: Path) -> None:
    """Updates of 1e-5 vanish in bfloat16 weights near 0.3, but add up in the masters."""
    actors.run("start", settings(models["tied"], model={"dtype": "bfloat16"}, optim={"lr": 1e-5}))
    actors.run("state", str(tmp_path / "before.npz"))
    for _ in range(2):
        assert all(a["updated"] for a in actors.run("step", spread(FOUR, actors.world_size, (3, 1)), [False] * 2))
    actors.run("state", str(tmp_path / "after.npz"))
    actors.run("weights", str(tmp_path / "weights.npz"))
    name = "model.layers.0.mlp.up_proj.weight"
    with np.load(tmp_path / "before.npz") as before, np.load(tmp_path / "after.npz") as after:
        moved = np.abs(after[f"weights.{name}"] - before[f"weights.{name}"])
        assert 1e-6 < np.median(moved) < 3e-5
        low = torch.from_numpy(after[f"weights.{name}"]).bfloat16().float().numpy()
    with np.load(tmp_path / "weights.npz") as weights:
        np.testing.assert_array_equal(weights[name], low)


@pytest.mark.parametrize(("savers", "loaders"), [(2, 1), (2, 2), (1, 2)])
def test_a_checkpoint_loads_on_another_number_of_actors(
    worlds: Callable[[int], Actors], models: dict[str, Path], tmp_path: Path, savers: int, loaders: int
) -> None:
    """Saved after one update, while the trainer goes on; whoever loads it makes the same next update."""
    old, new = worlds(savers), worlds(loaders)
    chosen = settings(models["tied"], optim={"warmup_steps": 5})
    old.run("start", chosen)
    old.run("step", spread(FOUR, savers, (3, 1)), [False] * 2)
    saved = old.run("state", str(tmp_path / "saved.npz"))
    old.run("save", str(tmp_path / "checkpoint"), False)
    second = old.run("step", spread(FOUR[:2], savers, (1, 1)), [False] * 2)[0]
    old.run("state", str(tmp_path / "next_old.npz"))
    old.run("wait_saved")

    new.run("start", chosen)
    assert set(new.run("load", str(tmp_path / "checkpoint"))) == {1}
    assert set(new.run("state", str(tmp_path / "loaded.npz"))) == set(saved)
    again = new.run("step", spread(FOUR[:2], loaders, (0, 2)), [False] * 2)[0]
    new.run("state", str(tmp_path / "next_new.npz"))
    assert (again["version"], again["lr"]) == (second["version"], second["lr"]) == (2, pytest.approx(4e-3))
    with np.load(tmp_path / "next_old.npz") as a, np.load(tmp_path / "next_new.npz") as b:
        assert a.files == b.files
        for name in a.files:
            np.testing.assert_allclose(a[name], b[name], rtol=1e-4, atol=1e-5, err_msg=name)


def test_the_reference_of_a_resumed_run_is_the_start_model(
    actors: Actors, models: dict[str, Path], tmp_path: Path
) -> None:
    chosen = settings(models["tied"], loss={"kl_weight": 0.1})
    trajectories = make_trajectories(8, (12, 20))
    actors.run("start", chosen)
    wanted = actors.run("reference", trajectories)
    actors.run("step", spread(FOUR, actors.world_size, (3, 1)), [False] * 2)
    actors.run("save", str(tmp_path / "checkpoint"), True)
    actors.run("start", chosen)
    actors.run("load", str(tmp_path / "checkpoint"))
    assert actors.run("reference", trajectories) == wanted


def test_checkpoints_that_are_not_whole_or_of_another_model_are_refused(
    actors: Actors, models: dict[str, Path], tmp_path: Path
) -> None:
    actors.run("start", settings(models["tied"]))
    actors.run("save", str(tmp_path / "good"), True)
    assert not (tmp_path / "good.partial").exists()

    def refused(folder: Path) -> str:
        answers = actors.ask("load", str(folder))
        assert {a.get("error") for a in answers} == {"TrainerError"}, answers
        return str(answers[0]["message"])

    assert "not a whole checkpoint" in refused(tmp_path / "missing")
    shutil.copytree(tmp_path / "good", tmp_path / "unmarked")
    (tmp_path / "unmarked" / "checkpoint.json").unlink()
    assert "checkpoint.json is missing" in refused(tmp_path / "unmarked")
    shutil.copytree(tmp_path / "good", tmp_path / "garbled")
    (tmp_path / "garbled" / "checkpoint.json").write_text("{")
    assert "is broken" in refused(tmp_path / "garbled")
    shutil.copytree(tmp_path / "good", tmp_path / "emptied")
    for shard in (tmp_path / "emptied").glob("*.safetensors"):
        shard.unlink()
    assert "does not load" in refused(tmp_path / "emptied")
    assert all(
        "exists" in a["message"] or "another actor" in a["message"]
        for a in actors.ask("save", str(tmp_path / "good"), True)
    )

    actors.run("start", settings(models["untied"]))
    assert "another model" in refused(tmp_path / "good")


def test_a_save_that_was_cut_off_is_cleared_away(actors: Actors, models: dict[str, Path], tmp_path: Path) -> None:
    (tmp_path / "checkpoint.partial").mkdir()
    (tmp_path / "checkpoint.partial" / "shard-00001-model-00001-of-00001.safetensors").write_bytes(b"half")
    actors.run("start", settings(models["tied"]))
    actors.run("save", str(tmp_path / "checkpoint"), True)
    assert set(actors.run("load", str(tmp_path / "checkpoint"))) == {0}


@pytest.mark.parametrize("model", ["tied", "untied"])
def test_an_exported_folder_loads_in_transformers(
    actors: Actors, models: dict[str, Path], tmp_path: Path, model: str
) -> None:
    actors.run("start", settings(models[model]))
    actors.run("step", spread(FOUR, actors.world_size, (3, 1)), [False] * 2)
    actors.run("export", str(tmp_path / "hf"))
    (trajectory,) = make_trajectories(6, (25,))
    scores = actors.run("score", trajectory["token_ids"])[0]
    with torch.no_grad():
        wanted = plain_log_probs(plain_model(tmp_path / "hf"), trajectory, 1.0).numpy()
    np.testing.assert_allclose(scores, wanted, atol=2e-6)
    assert (tmp_path / "hf" / "tokenizer_config.json").exists() == (model == "tied")
    assert not (tmp_path / "hf.partial").exists()
    assert {a["error"] for a in actors.ask("export", str(tmp_path / "hf"))} == {"TrainerError"}


def test_an_export_may_follow_a_save_that_is_still_being_written(
    worlds: Callable[[int], Actors], models: dict[str, Path], tmp_path: Path
) -> None:
    """Both have collectives; the export's must not slip between those of the thread that writes the checkpoint."""
    two = worlds(2)
    two.run("start", settings(models["untied"]))
    two.run("write_late", 4.0)
    two.run("save", str(tmp_path / "saved"), False)
    two.run("export", str(tmp_path / "hf"))
    two.run("wait_saved")
    assert (tmp_path / "saved" / "checkpoint.json").exists()
    assert (tmp_path / "hf" / "config.json").exists()


def test_calls_out_of_order_are_refused(actors: Actors, models: dict[str, Path], tmp_path: Path) -> None:
    def refused(*command: Any) -> str:
        answers = actors.ask(*command)
        assert {a.get("error") for a in answers} == {"TrainerError"}, answers
        return str(answers[0]["message"])

    actors.run("start", settings(models["tied"]))
    assert "begin_step" in refused("train", FOUR[0]["trajectories"], FOUR[0]["advantages"])
    assert "kl_weight is 0" in refused("reference", FOUR[0]["trajectories"])
    actors.run("begin")
    for command in (["begin"], ["weights", str(tmp_path / "w.npz")], ["save", str(tmp_path / "c"), True]):
        assert "end_step first" in refused(*command)


def test_a_broken_model_folder_is_a_model_error(actors: Actors, models: dict[str, Path], tmp_path: Path) -> None:
    answers = actors.ask("start", settings(tmp_path / "nowhere"))
    assert {a["error"] for a in answers} == {"ModelError"}
    # A weight that config.json asks for is not there: transformers would make it up.
    shutil.copytree(models["tied"], tmp_path / "deeper")
    config = json.loads((tmp_path / "deeper" / "config.json").read_text())
    config["num_hidden_layers"] = 3
    config.pop("layer_types", None)
    (tmp_path / "deeper" / "config.json").write_text(json.dumps(config))
    answers = actors.ask("start", settings(tmp_path / "deeper"))
    assert {a["error"] for a in answers} == {"ModelError"}
    assert "missing_keys" in answers[0]["message"]
