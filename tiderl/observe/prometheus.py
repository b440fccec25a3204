"""The coordinator's metrics in Prometheus' text format, on a port of its own.

| family | type | from |
|---|---|---|
| `tiderl_step_<key>` | gauges | the newest training step; keys of `scheduling.metrics` |
| `tiderl_engine_<key>` | gauges | the ranks' newest gauges, summed (not counters: the sum falls when a rank is lost) |
| `tiderl_evaluation_*` | gauges | the newest evaluation round |
| `tiderl_rank_seconds_total{activity}` | counter | what the ranks did with their time, by `ledger.Activity` |
| `tiderl_generated_tokens_total` | counter | tokens that the engines generated |
| `tiderl_tokens_total{account}` | counter | those of them whose fate is known, by `ledger.Account` |
| `tiderl_held_tokens` | gauge | those whose fate is open: the rest |
| `tiderl_coordinator_*` | gauges | the coordinator's own load, in real seconds |

Every sample has the label `run`. A key that ends in `_s` becomes a name that ends in `_seconds`. Seconds are the job's
(`tiderl.clock`) but for the coordinator's load. Nothing is shown before it is first known.

Invariants (tests/unit/test_prometheus.py):

1. A scrape shows the newest values; a scrape during an update shows either all of the old or all of the new values of a family.
2. Exporters share nothing: two of one process, or of one test after the other, never see each other's metrics.
3. A port that cannot be had is the user's to mend: a `ConfigError` with the setting's path.
"""

from __future__ import annotations

import errno
import socket
import threading
from collections.abc import Iterable, Mapping

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from tiderl.errors import ConfigError

#: How long a scrape that is being answered may hold up the end of the job.
_CLOSE_S = 2.0
#: Keys of the token ledger that are no account.
_GENERATED, _HELD = "generated", "held"


class _Families(Collector):
    """The newest metric families by who set them. Families are replaced, never changed: scrapes come from other threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._by_source: dict[str, tuple[Metric, ...]] = {}

    def put(self, source: str, families: Iterable[Metric]) -> None:
        built = tuple(families)
        with self._lock:
            self._by_source[source] = built

    def collect(self) -> Iterable[Metric]:
        with self._lock:
            sources = list(self._by_source.values())
        return [family for families in sources for family in families]


class PrometheusExporter:
    """Serves until `close`. Update methods may be called from one thread, at any time."""

    def __init__(self, host: str, port: int, run: str) -> None:
        """`port` 0: any free one, see `port`. Raises `ConfigError` where host and port cannot be had."""
        self._run = run
        self._families = _Families()
        registry = CollectorRegistry()
        registry.register(self._families)
        try:
            self._server, self._thread = start_http_server(port, host, registry)
        except OSError as error:
            reason = error.strerror or str(error)
            if isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL:
                raise ConfigError("run.prometheus_host", f"{host} is no address of this machine: {reason}") from error
            problem = f"cannot serve metrics on {host}:{port}: {reason}; choose a free port, or 0 to serve none"
            raise ConfigError("run.prometheus_port", problem) from error
        self.port: int = self._server.server_port

    def step(self, metrics: Mapping[str, float]) -> None:
        """A training step is over; keys of `scheduling.metrics`."""
        text = "Of the newest training step; see tiderl/scheduling/metrics.py for"
        self._families.put("step", [self._gauge(f"step_{k}", f"{text} {k}.", v) for k, v in metrics.items()])

    def engine(self, gauges: Mapping[str, float]) -> None:
        """The newest gauges of all ranks, added up."""
        text = "Sum over the ranks, as of their last heartbeats, of"
        self._families.put("engine", [self._gauge(f"engine_{k}", f"{text} {k}.", v) for k, v in gauges.items()])

    def evaluation(self, version: int, success: float, reward: float, turns: float) -> None:
        """An evaluation round is over; the three are means over its tasks."""
        of = "of the newest evaluation round."
        self._families.put(
            "evaluation",
            [
                self._gauge("evaluation_weight_version", f"Version of the weights {of}", version),
                self._gauge("evaluation_success_ratio", f"Share of tasks that succeeded, {of}", success),
                self._gauge("evaluation_reward", f"Mean reward {of}", reward),
                self._gauge("evaluation_turns", f"Mean number of turns {of}", turns),
            ],
        )

    def ledger(self, rank_seconds: Mapping[str, float], tokens: Mapping[str, float]) -> None:
        """Sums since the start of the run: rank-seconds by activity; tokens by account, with `generated` and `held` beside them."""
        accounts = {name: value for name, value in tokens.items() if name not in (_GENERATED, _HELD)}
        families = [
            self._counter("rank_seconds", "What the ranks did with their time, by activity.", "activity", rank_seconds),
            self._counter("tokens", "Generated tokens whose fate is known, by account.", "account", accounts),
        ]
        if _GENERATED in tokens:
            generated = CounterMetricFamily(
                "tiderl_generated_tokens", "Tokens that the engines generated.", labels=["run"]
            )
            generated.add_metric([self._run], tokens[_GENERATED])
            families.append(generated)
        if _HELD in tokens:
            families.append(self._gauge("held_tokens", "Generated tokens whose fate is open.", tokens[_HELD]))
        self._families.put("ledger", families)

    def load(self, cpu_s_per_1000_events: float, lag_p50_s: float, lag_p99_s: float) -> None:
        """The coordinator's own load, in real seconds."""
        cpu = "CPU seconds of the coordinator's process for 1,000 events."
        lag = "By how many real seconds the coordinator's event loop was late,"
        self._families.put(
            "load",
            [
                self._gauge("coordinator_cpu_seconds_per_1000_events", cpu, cpu_s_per_1000_events),
                self._gauge("coordinator_loop_lag_p50_s", f"{lag} median.", lag_p50_s),
                self._gauge("coordinator_loop_lag_p99_s", f"{lag} 99th percentile.", lag_p99_s),
            ],
        )

    def close(self) -> None:
        """Stop serving and free the port."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(timeout=_CLOSE_S)

    def _gauge(self, key: str, text: str, value: float) -> Metric:
        name = key[: -len("_s")] + "_seconds" if key.endswith("_s") else key
        family = GaugeMetricFamily(f"tiderl_{name}", text, labels=["run"])
        family.add_metric([self._run], value)
        return family

    def _counter(self, name: str, text: str, label: str, values: Mapping[str, float]) -> Metric:
        """A counter that is set, not incremented: the ledger has added up already. Its samples end in `_total`."""
        family = CounterMetricFamily(f"tiderl_{name}", text, labels=["run", label])
        for key, value in values.items():
            family.add_metric([self._run, key], value)
        return family
