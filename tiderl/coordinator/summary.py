"""What a run says at its end: a few lines for people, `summary.json`, and the same as one JSON object on the last line.

| key | meaning |
|---|---|
| `eval_success_first`, `eval_success_last` | success rate of the first and the last evaluation round (null: none) |
| `reward_first`, `reward_last` | mean training reward of the first and the last step |
| `steps` | training steps made by this process |
| `goodput` | trained tokens per second, from the first weights on all ranks to the end of the last step |
| `wall_s` | real seconds from the coordinator's start to the end of the last rank |
| `ledger` | where every generated token ended; `engine_generated`: the engines' count; `closes`: all sums agree |
| `seconds` | of all ranks, by activity; `total`: time x ranks, `error`: the sum's difference (a share), `closes`: at most 0.1 % |
| `coordinator` | `num_events`, `cpu_s_per_1000_events`; `lag_p50_s`, `lag_p99_s`: how late its event loop was in real time |
| `emulated` | null, or `time_scale`, `hardware`, `model`, `late_share` (of the engines' busy time), `trusted`, `doubt` |

Seconds but for those called real are the job's clock's (`tiderl.clock`).

`LoadReport` and the verdict on an emulated run are in `load.py`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tiderl.config.schema import Config
from tiderl.coordinator.load import LoadReport, doubt
from tiderl.observe.console import Console
from tiderl.observe.metrics import MetricsWriter
from tiderl.scheduling.ledger import Account, SecondsBalance

#: The largest share of the rank-seconds that may be missing or counted twice in a ledger that closes.
MAX_SECONDS_ERROR = 0.001
#: Activities that took less of the ranks' time are left out of the line for people.
_MIN_SHARE_SHOWN = 0.005


def ledger_report(balances: Mapping[str, int], engine_generated: int, generated_before: int) -> dict[str, Any]:
    """The accounts, and whether they add up to what was generated, here and by the engines' own count.

    The accounts go back to the run's first start; `generated_before` of their tokens were generated before this one.
    """
    settled = sum(balances[account.value] for account in Account)
    closes = balances["generated"] == settled + balances["held"] == generated_before + engine_generated
    return {**balances, "engine_generated": engine_generated, "closes": closes}


def seconds_report(balance: SecondsBalance) -> dict[str, Any]:
    """All rank-seconds, and whether they add up to the job's time x ranks."""
    return {
        **balance.seconds,
        "total": balance.elapsed_s,
        "error": balance.error,
        "closes": balance.error <= MAX_SECONDS_ERROR,
    }


def emulation_report(config: Config, load: LoadReport, gauges: Mapping[str, float]) -> dict[str, Any] | None:
    """What the figures of an emulated run are worth; None for a real one."""
    if config.engine.kind != "emulated":
        return None
    busy_s = gauges.get("prefill_s", 0.0) + gauges.get("decode_s", 0.0)
    late_share = gauges.get("late_s", 0.0) / busy_s if busy_s else 0.0
    reason = doubt(load.lag_p99_s, late_share)
    emulate = config.emulate
    return {
        "time_scale": emulate.time_scale,
        "hardware": Path(emulate.hardware).stem,
        "model": Path(emulate.model).stem,
        "late_share": late_share,
        "trusted": not reason,
        "doubt": reason,
    }


def summarize(
    metrics: MetricsWriter,
    *,
    tokens: Mapping[str, Any],
    seconds: Mapping[str, Any],
    load: LoadReport,
    emulated: Mapping[str, Any] | None,
    wall_s: float,
) -> dict[str, Any]:
    """The JSON object of the last line."""
    steps, evaluations = metrics.steps, metrics.evaluations
    trained_s = metrics.last_step_s - metrics.ready_s if steps and metrics.ready_s is not None else 0.0
    return {
        "eval_success_first": evaluations[0].success if evaluations else None,
        "eval_success_last": evaluations[-1].success if evaluations else None,
        "reward_first": steps[0]["reward"] if steps else None,
        "reward_last": steps[-1]["reward"] if steps else None,
        "steps": len(steps),
        "goodput": sum(m["trained_tokens"] for m in steps) / trained_s if trained_s else 0.0,
        "wall_s": wall_s,
        "ledger": tokens,
        "seconds": seconds,
        "coordinator": {
            "num_events": load.num_events,
            "cpu_s_per_1000_events": load.cpu_s_per_1000_events,
            "lag_p50_s": load.lag_p50_s,
            "lag_p99_s": load.lag_p99_s,
        },
        "emulated": emulated,
    }


def write_summary(run_dir: Path, summary: Mapping[str, Any], reason: str, console: Console) -> None:
    """Print the summary and write `summary.json`."""
    console.say(f"\nthe job ended: {reason}")
    if summary["eval_success_first"] is not None:
        console.say(f"evaluation success {summary['eval_success_first']:.3f} -> {summary['eval_success_last']:.3f}")
    if summary["steps"]:
        console.say(
            f"training reward {summary['reward_first']:.3f} -> {summary['reward_last']:.3f} over {summary['steps']} steps"
        )
    unit = "emulated s" if summary["emulated"] else "s"
    console.say(
        f"goodput {summary['goodput']:.0f} trained tokens/{unit}; {summary['wall_s']:.0f} s of real time in all"
    )
    console.say(_tokens_line(summary["ledger"]))
    console.say(_seconds_line(summary["seconds"], unit))
    load = summary["coordinator"]
    console.say(
        f"coordinator: {load['num_events']} events, {load['cpu_s_per_1000_events']:.2f} CPU s per 1,000; its event loop was "
        f"{1000 * load['lag_p50_s']:.1f} ms late (p50), {1000 * load['lag_p99_s']:.1f} ms (p99)"
    )
    if summary["emulated"]:
        console.say(_emulation_line(summary["emulated"]))
    console.say(f"run folder: {run_dir}")
    line = json.dumps(summary)
    (run_dir / "summary.json").write_text(line + "\n")
    console.say(line)


def _tokens_line(ledger: Mapping[str, Any]) -> str:
    accounts = " + ".join(f"{ledger[a.value]} {a.value}" for a in Account)
    verdict = "closes" if ledger["closes"] else "DOES NOT CLOSE"
    return (
        f"token ledger {verdict}: {ledger['generated']} generated = {accounts} + {ledger['held']} held "
        f"(engines count {ledger['engine_generated']})"
    )


def _seconds_line(report: Mapping[str, Any], unit: str) -> str:
    total = report["total"]
    shares = {name: value / total for name, value in report.items() if name not in ("total", "error", "closes")}
    shown = sorted(((share, name) for name, share in shares.items() if share >= _MIN_SHARE_SHOWN), reverse=True)
    parts = ", ".join(f"{name} {share:.1%}" for share, name in shown)
    verdict = "closes" if report["closes"] else "DOES NOT CLOSE"
    return f"time ledger {verdict} (but for {report['error']:.3%}): {total:.0f} rank-seconds ({unit}) = {parts}"


def _emulation_line(emulated: Mapping[str, Any]) -> str:
    verdict = (
        f"its figures are NOT to be trusted: {emulated['doubt']}"
        if emulated["doubt"]
        else "the machine kept up with it"
    )
    what = f"{emulated['model']} on {emulated['hardware']}, {emulated['time_scale']:g} emulated s in a real one"
    return f"emulated: {what}; {verdict}"
