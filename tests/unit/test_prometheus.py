"""The exporter, scraped over HTTP and read by Prometheus' own parser."""

from __future__ import annotations

import math
import socket
import threading
import urllib.request
from collections.abc import Iterator

import prometheus_client
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tiderl.errors import ConfigError
from tiderl.observe.prometheus import PrometheusExporter

#: (sample name, its labels without `run`) -> value
Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


@pytest.fixture
def exporter() -> Iterator[PrometheusExporter]:
    made = PrometheusExporter("127.0.0.1", 0, "run-7")
    yield made
    made.close()


def scrape_text(port: int) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        return str(answer.read().decode())


def scrape(port: int, run: str = "run-7") -> tuple[Samples, dict[str, str]]:
    """All samples, and each family's type by its name. Every sample must carry the run."""
    samples: Samples = {}
    types: dict[str, str] = {}
    for family in text_string_to_metric_families(scrape_text(port)):
        types[family.name] = family.type
        assert family.documentation.endswith(".")
        for sample in family.samples:
            labels = dict(sample.labels)
            assert labels.pop("run") == run
            key = (sample.name, tuple(sorted(labels.items())))
            assert key not in samples, f"{key} twice"
            samples[key] = sample.value
    return samples, types


def plain(**values: float) -> Samples:
    return {(name, ()): value for name, value in values.items()}


def test_nothing_is_shown_before_it_is_known(exporter: PrometheusExporter) -> None:
    assert scrape(exporter.port) == ({}, {})


def test_a_step_replaces_the_step_before(exporter: PrometheusExporter) -> None:
    exporter.step({"reward": 0.25, "tprm_s": 1.5})
    exporter.step({"reward": 0.5, "twt_s": 2.0, "lr": 1e-6})
    samples, types = scrape(exporter.port)
    assert samples == plain(tiderl_step_reward=0.5, tiderl_step_twt_seconds=2.0, tiderl_step_lr=1e-6)
    assert set(types.values()) == {"gauge"}


def test_engine_gauges(exporter: PrometheusExporter) -> None:
    exporter.engine({"num_running": 12.0, "prefill_s": 3.25})
    samples, _ = scrape(exporter.port)
    assert samples == plain(tiderl_engine_num_running=12.0, tiderl_engine_prefill_seconds=3.25)


def test_evaluation_gauges(exporter: PrometheusExporter) -> None:
    exporter.evaluation(4, 0.75, 0.7, 6.5)
    samples, _ = scrape(exporter.port)
    assert samples == plain(
        tiderl_evaluation_weight_version=4.0,
        tiderl_evaluation_success_ratio=0.75,
        tiderl_evaluation_reward=0.7,
        tiderl_evaluation_turns=6.5,
    )


def test_the_ledger_is_counters_but_for_what_may_shrink(exporter: PrometheusExporter) -> None:
    exporter.ledger({"prefill": 1.0}, {"generated": 10.0, "held": 10.0, "trained": 0.0})
    exporter.ledger({"prefill": 1.5, "decode": 20.0}, {"generated": 100.0, "held": 4.0, "trained": 90.0, "stale": 6.0})
    samples, types = scrape(exporter.port)
    assert samples == {
        ("tiderl_rank_seconds_total", (("activity", "prefill"),)): 1.5,
        ("tiderl_rank_seconds_total", (("activity", "decode"),)): 20.0,
        ("tiderl_tokens_total", (("account", "trained"),)): 90.0,
        ("tiderl_tokens_total", (("account", "stale"),)): 6.0,
        ("tiderl_generated_tokens_total", ()): 100.0,
        ("tiderl_held_tokens", ()): 4.0,
    }
    assert types.pop("tiderl_held_tokens") == "gauge"
    assert set(types.values()) == {"counter"}


def test_the_coordinators_load_is_in_seconds(exporter: PrometheusExporter) -> None:
    exporter.load(0.25, 0.0005, 0.0125)
    samples, _ = scrape(exporter.port)
    assert samples == plain(
        tiderl_coordinator_cpu_seconds_per_1000_events=0.25,
        tiderl_coordinator_loop_lag_p50_seconds=0.0005,
        tiderl_coordinator_loop_lag_p99_seconds=0.0125,
    )


def test_updates_of_one_kind_leave_the_others(exporter: PrometheusExporter) -> None:
    exporter.step({"reward": 0.5})
    exporter.load(0.25, 0.0, 0.0)
    exporter.step({"reward": 0.75})
    samples, _ = scrape(exporter.port)
    assert samples[("tiderl_step_reward", ())] == 0.75
    assert samples[("tiderl_coordinator_cpu_seconds_per_1000_events", ())] == 0.25


def test_values_that_are_not_finite_and_odd_run_names_are_told() -> None:
    run = 'a "run"\\with\nedges'
    exporter = PrometheusExporter("127.0.0.1", 0, run)
    try:
        exporter.step({"grad_norm": float("nan"), "loss": float("-inf")})
        samples, _ = scrape(exporter.port, run)
        assert math.isnan(samples[("tiderl_step_grad_norm", ())])
        assert samples[("tiderl_step_loss", ())] == float("-inf")
    finally:
        exporter.close()


def test_a_scrape_sees_one_update_whole(exporter: PrometheusExporter) -> None:
    """Both values of an update are equal; scrapes beside a writer must never see two updates mixed."""
    stop = threading.Event()

    def write() -> None:
        count = 0.0
        while not stop.is_set():
            count += 1.0
            exporter.step({"reward": count, "success": count})

    exporter.step({"reward": 0.0, "success": 0.0})
    writer = threading.Thread(target=write)
    writer.start()
    try:
        for _ in range(20):
            samples, _ = scrape(exporter.port)
            assert samples[("tiderl_step_reward", ())] == samples[("tiderl_step_success", ())]
    finally:
        stop.set()
        writer.join(timeout=10)


def test_exporters_share_nothing(exporter: PrometheusExporter) -> None:
    other = PrometheusExporter("127.0.0.1", 0, "run-7")
    try:
        exporter.step({"reward": 0.5})
        other.step({"success": 1.0})
        assert scrape(exporter.port)[0] == plain(tiderl_step_reward=0.5)
        assert scrape(other.port)[0] == plain(tiderl_step_success=1.0)
        assert b"tiderl" not in prometheus_client.generate_latest()
    finally:
        other.close()


def test_a_port_in_use_is_the_users_to_mend(exporter: PrometheusExporter) -> None:
    with pytest.raises(ConfigError, match=r"^run\.prometheus_port: cannot serve metrics on 127\.0\.0\.1:\d+: .*in use"):
        PrometheusExporter("127.0.0.1", exporter.port, "another")


@pytest.mark.parametrize("host", ["192.0.2.1", "not a host"])
def test_a_host_that_is_not_this_machine_is_the_users_to_mend(host: str) -> None:
    with pytest.raises(ConfigError, match=r"^run\.prometheus_host: .* is no address of this machine"):
        PrometheusExporter(host, 0, "run-7")


def test_closing_frees_the_port() -> None:
    first = PrometheusExporter("127.0.0.1", 0, "run-7")
    first.step({"reward": 0.5})
    first.close()
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", first.port)) != 0
    second = PrometheusExporter("127.0.0.1", first.port, "run-7")
    try:
        assert scrape(second.port) == ({}, {})
    finally:
        second.close()
