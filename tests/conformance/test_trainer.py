"""The trainer protocol, held against plain Hugging Face models and plain autograd on the same trajectories.

The actors are real processes over gloo, one or two of them. How their forwards and backwards may be interleaved:
`test_deferred_loss.py`.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.conformance.trainer_actors import (
    BETA1,
    FOUR,
    TEMPERATURE,
    Actors,
    PlainMicroBatch,
    assert_gradients,
    make_trajectories,
    micro_batch,
    plain_gradients,
    plain_log_probs,
    plain_model,
    settings,
    spread,
)

#: How four micro-batches may be spread over two ranks.
SPREADS = {"3+1": (3, 1), "4+0": (4, 0), "0+4": (0, 4), "2+2": (2, 2)}


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
    # float32 sums in another order: a few units in the last place of log-probs that go down to -9.
    np.testing.assert_allclose(scores, wanted, rtol=1e-6, atol=2e-6)
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
    assert "begin_step" in refused("forward", FOUR[0]["trajectories"], FOUR[0]["advantages"])
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
