"""What a run says at its end: a few lines for people, `summary.json`, and the same as one JSON object on the last line.

| key | meaning |
|---|---|
| `eval_success_first`, `eval_success_last` | success rate of the first and the last evaluation round (null without) |
| `reward_first`, `reward_last` | mean training reward of the first and the last step |
| `steps` | training steps made by this process |
| `goodput` | trained tokens per second of wall time |
| `wall_s` | from the coordinator's start to the end of the last rank |
| `ledger` | where every generated token ended; `engine_generated` is the engines' own count; `closes` says that all sums agree |
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tiderl.observe.console import Console
from tiderl.observe.metrics import MetricsWriter
from tiderl.scheduling.ledger import Account


def ledger_report(balances: Mapping[str, int], engine_generated: int, generated_before: int) -> dict[str, Any]:
    """The accounts, and whether they add up to what was generated, here and by the engines' own count.

    The accounts go back to the run's first start; `generated_before` of their tokens were generated before this one.
    """
    settled = sum(balances[account.value] for account in Account)
    closes = balances["generated"] == settled + balances["held"] == generated_before + engine_generated
    return {**balances, "engine_generated": engine_generated, "closes": closes}


def summarize(metrics: MetricsWriter, ledger: Mapping[str, Any], wall_s: float) -> dict[str, Any]:
    """The JSON object of the last line."""
    steps, evaluations = metrics.steps, metrics.evaluations
    return {
        "eval_success_first": evaluations[0].success if evaluations else None,
        "eval_success_last": evaluations[-1].success if evaluations else None,
        "reward_first": steps[0]["reward"] if steps else None,
        "reward_last": steps[-1]["reward"] if steps else None,
        "steps": len(steps),
        "goodput": sum(m["trained_tokens"] for m in steps) / wall_s,
        "wall_s": wall_s,
        "ledger": ledger,
    }


def write_summary(run_dir: Path, summary: Mapping[str, Any], reason: str, console: Console) -> None:
    """Print the summary and write `summary.json`."""
    ledger = summary["ledger"]
    console.say(f"\nthe job ended: {reason}")
    if summary["eval_success_first"] is not None:
        console.say(f"evaluation success {summary['eval_success_first']:.3f} -> {summary['eval_success_last']:.3f}")
    if summary["steps"]:
        console.say(
            f"training reward {summary['reward_first']:.3f} -> {summary['reward_last']:.3f} over {summary['steps']} steps"
        )
    console.say(f"goodput {summary['goodput']:.0f} trained tokens/s over {summary['wall_s']:.0f} s")
    accounts = " + ".join(f"{ledger[a.value]} {a.value}" for a in Account)
    verdict = "closes" if ledger["closes"] else "DOES NOT CLOSE"
    console.say(
        f"token ledger {verdict}: {ledger['generated']} generated = {accounts} + {ledger['held']} held "
        f"(engines count {ledger['engine_generated']})"
    )
    console.say(f"run folder: {run_dir}")
    line = json.dumps(summary)
    (run_dir / "summary.json").write_text(line + "\n")
    console.say(line)
