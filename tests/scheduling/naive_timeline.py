"""A second, deliberately naive implementation of `ra2p_costs.pipeline_s`: whole units of time, one after the other.

Every rank is a list of the passes that it has before it, each a countdown. Costs, lengths and arrivals are whole numbers, so
that the two must agree exactly. Only `dispatch.spread`, which has tests of its own, serves both.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tiderl.scheduling.dispatch import spread
from tiderl.scheduling.ra2p_costs import Arrival, PassCosts, Ranks
from tiderl.types import Pipelining, TaskId

#: Longer than anything that the tests make up.
FOREVER = 100_000


def naive_pipeline_s(way: Pipelining, arrivals: Sequence[Arrival], costs: PassCosts, ranks: Ranks) -> int:
    actors: list[dict[str, Any]] = [_rank() for _ in range(ranks.num_actors)]
    refs: list[dict[str, Any]] = [_rank() for _ in range(ranks.num_ref)] if way is Pipelining.DECOUPLED else []
    arrived = [False] * len(arrivals)
    pending: list[int] = []
    num_left = last_time = 0
    for time in range(FOREVER):
        something_happens = True
        while something_happens:
            something_happens = False
            for rank in refs + actors:
                if rank["passes"] and rank["passes"][0][0] == 0:
                    something_happens = True
                    _, done, batch = rank["passes"].pop(0)
                    batch[done] = True
                    if done == "trained":
                        last_time = time
                        num_left -= 1
            for i, arrival in enumerate(arrivals):
                if not arrived[i] and arrival.ready_s <= time:
                    arrived[i] = True
                    pending += arrival.lengths
            if _should_deal(actors, pending, all(arrived), ranks):
                num_left += _deal(pending, actors, refs, ranks)
                pending = []
            for rank in refs:
                if not rank["passes"]:
                    something_happens |= _score(rank, costs)
            for rank in actors:
                if not rank["passes"]:
                    decide = _overlap if way is Pipelining.DECOUPLED else _wake
                    something_happens |= decide(rank, way, costs, ranks)
        if all(arrived) and not num_left:
            return last_time
        for rank in refs + actors:
            if rank["passes"]:
                rank["passes"][0][0] -= 1
    raise AssertionError("the timeline never ends")


def _rank() -> dict[str, Any]:
    return {"passes": [], "given": []}


def _should_deal(actors: list[dict[str, Any]], pending: list[int], is_complete: bool, ranks: Ranks) -> bool:
    if not pending:
        return False
    someone_has_nothing = any(all(b["trained"] for b in actor["given"]) for actor in actors)
    return is_complete or someone_has_nothing or sum(pending) >= ranks.num_actors * ranks.max_micro_batch_tokens


def _deal(pending: list[int], actors: list[dict[str, Any]], refs: list[dict[str, Any]], ranks: Ranks) -> int:
    """Returns the number of micro-batches."""
    lengths = [(length, TaskId(i)) for i, length in enumerate(pending)]
    loads = [sum(b["tokens"] for b in actor["given"]) for actor in actors]
    shares = spread(lengths, loads, ranks.max_micro_batch_tokens, smallest_last=bool(refs))
    for share in shares:
        batch = {"tokens": share.num_tokens, "scored": False, "forwarded": False, "trained": False, "taken": False}
        actors[share.dp_index]["given"].append(batch)
        if refs:
            ref_loads = [sum(b["tokens"] for b in ref["given"]) for ref in refs]
            refs[ref_loads.index(min(ref_loads))]["given"].append(batch)
    return len(shares)


def _score(ref: dict[str, Any], costs: PassCosts) -> bool:
    unscored = [b for b in ref["given"] if not b["scored"]]
    if unscored:
        ref["passes"] = [[unscored[0]["tokens"] * costs.decoupled_reference_s, "scored", unscored[0]]]
    return bool(unscored)


def _overlap(actor: dict[str, Any], way: Pipelining, costs: PassCosts, ranks: Ranks) -> bool:
    held = [b for b in actor["given"] if b["forwarded"] and not b["trained"]]
    fresh = [b for b in actor["given"] if not b["forwarded"]]
    if held and held[0]["scored"]:
        actor["passes"] = [[held[0]["tokens"] * costs.backward_s, "trained", held[0]]]
    elif fresh and (not held or sum(b["tokens"] for b in [*held, fresh[0]]) <= ranks.window_tokens):
        actor["passes"] = [[fresh[0]["tokens"] * costs.forward_s, "forwarded", fresh[0]]]
    return bool(actor["passes"])


def _wake(actor: dict[str, Any], way: Pipelining, costs: PassCosts, ranks: Ranks) -> bool:
    there = [b for b in actor["given"] if not b["trained"]]
    if not there:
        return False
    num = 1
    if way is not Pipelining.ALTERNATING:
        while num < len(there) and sum(b["tokens"] for b in there[: num + 1]) <= ranks.max_wake_tokens:
            num += 1
    if way is not Pipelining.NONE:
        actor["passes"] = [[costs.swap_s, "taken", there[0]]]
        actor["passes"] += [[b["tokens"] * costs.colocated_reference_s, "scored", b] for b in there[:num]]
    for b in there[:num]:
        actor["passes"] += [
            [b["tokens"] * costs.forward_s, "forwarded", b],
            [b["tokens"] * costs.backward_s, "trained", b],
        ]
    return True
