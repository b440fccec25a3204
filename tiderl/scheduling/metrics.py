"""What a finished training step says of itself: the keys of `metrics.jsonl` that the core knows.

| key | unit | meaning |
|---|---|---|
| `reward`, `success` | | mean over the step's trajectories |
| `turns`, `context_tokens` | | mean over the step's trajectories |
| `num_trajectories` | | of the step |
| `num_failures` | | failed attempts of tasks since the start of the run |
| `num_pauses`, `num_resumes` | | of tasks, since the start of the run |
| `num_paused` | | tasks that are paused at the step's end |
| `prefill_first`, `prefill_repeated` | tokens | computed by the engines for the first time, and again, since the start of the run |
| `prefix_hit_rate` | | share of the prompts' tokens that the engines had not to compute, since the start of the run |
| `zero_variance_share` | | share of groups whose rewards are all equal (no policy gradient) |
| `trained_tokens` | tokens | generated tokens that this update consumed |
| `goodput` | token/s | those, per second since the last step's end |
| `step_s` | s | from the last step's end to this one's |
| `train_s` | s | from the step's opening to its end |
| `twt_s` | s | all actors were idle and waited for data: before the step opened, and in it |
| `rwt_s` | rank-s | rollout ranks without any task, since the start of the run |
| `ras`, `tprm_s`, `head_of_line_s` | groups, s, s | readiness signals (`readiness.py`) |
| `staleness_mean`, `staleness_max` | versions | at the step's opening |
| `reference_s`, `swap_s`, `forward_s`, `backward_s`, `optimizer_s` | s | mean over the actors |
| `ref_wait_s`, `num_swaps` | s, | mean over the actors: idle for the reference's log-probs; how often it came to the device |
| `decoupled`, `colocated`, `alternating` | | 1.0 for the way in which the step computed the reference |
| `predicted_decoupled_s`, … | s | what each way was predicted to take, from the step's opening to the last backward |
| `actual_s` | s | what the chosen one took |
| `grad_norm`, `lr` | | of the update |
| `padding_share` | | tokens computed for nothing, of all computed by the trainer |
| `log_prob_gap_max` | nats | largest difference trainer - engine on tokens of the trainer's own version |
| everything in the trainer's `sums` | | mean over the trained tokens |

Source: paper §2.1.
"""

from __future__ import annotations

from tiderl.scheduling.ledger import TokenLedger
from tiderl.scheduling.rollout import RolloutSide
from tiderl.scheduling.step import OpenedStep
from tiderl.types import Pipelining

_TIMES = ("reference_s", "swap_s", "forward_s", "backward_s", "optimizer_s")


def step_metrics(step: OpenedStep, rollout: RolloutSide, now_s: float, since_s: float) -> dict[str, float]:
    """One flat mapping; `since_s` is when the previous step ended. Call before the step's groups are retired."""
    tasks = [task for group in step.groups for task in group.finished]
    results = list(step.results.values())
    num_tokens = sum(t.generated_tokens for t in tasks)
    staleness = [results[0].version - 1 - group.start_version for group in step.groups]
    flat = sum(len({t.reward for t in group.finished}) == 1 for group in step.groups)
    metrics = {
        "reward": sum(t.reward for t in tasks) / len(tasks),
        "success": sum(t.success for t in tasks) / len(tasks),
        "turns": sum(t.num_turns for t in tasks) / len(tasks),
        "context_tokens": sum(t.context_tokens for t in tasks) / len(tasks),
        "zero_variance_share": flat / len(step.groups),
        "num_trajectories": float(len(tasks)),
        "goodput": num_tokens / max(now_s - since_s, 1e-9),
        "step_s": now_s - since_s,
        "train_s": now_s - step.opened_s,
        "twt_s": step.waited_s,
        "rwt_s": rollout.idle_rollout_wait_s(now_s),
        "ras": float(step.signals.ready_at_start),
        "head_of_line_s": step.signals.head_of_line_s,
        "staleness_mean": sum(staleness) / len(staleness),
        "staleness_max": float(max(staleness)),
        "grad_norm": results[0].grad_norm,
        "lr": results[0].lr,
        "log_prob_gap_max": max(r.max_same_version_gap for r in results),
        "num_failures": float(rollout.num_failures),
        "num_pauses": float(rollout.num_pauses),
        "num_resumes": float(rollout.num_resumes),
        "num_paused": float(rollout.num_paused),
        "ref_wait_s": sum(r.waited_s for r in results) / len(results),
        "num_swaps": sum(r.num_swaps for r in results) / len(results),
        **_pipelining(step),
        **_prefill(rollout.book.ledger),
    }
    # Taken now: most groups become ready while the step is open.
    time_per_ready_s = rollout.book.ready.signals(now_s).time_per_ready_s
    if time_per_ready_s is not None:
        metrics["tprm_s"] = time_per_ready_s
    for name in _TIMES:
        metrics[name] = sum(getattr(r, name) for r in results) / len(results)
    padding = sum(r.num_padding_tokens for r in results)
    metrics["padding_share"] = padding / (padding + sum(t.context_tokens for t in tasks))
    num_trained = max(1, sum(r.num_trained_tokens for r in results))
    for name in sorted({key for r in results for key in r.sums}):
        metrics[name] = sum(r.sums.get(name, 0.0) for r in results) / num_trained
    return metrics


def _pipelining(step: OpenedStep) -> dict[str, float]:
    """The way chosen, what it was predicted to take, and what it took."""
    found = {f"predicted_{way.value}_s": seconds for way, seconds in step.choice.predicted_s.items()}
    if step.choice.pipelining is not Pipelining.NONE:
        found[step.choice.pipelining.value] = 1.0
    return {**found, "actual_s": step.last_trained_s - step.opened_s}


def _prefill(ledger: TokenLedger) -> dict[str, float]:
    return {
        "prefill_first": float(ledger.prefill_first),
        "prefill_repeated": float(ledger.prefill_repeated),
        "prefix_hit_rate": ledger.hit_rate,
    }
