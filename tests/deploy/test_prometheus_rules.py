"""The rules, by promtool and by what the processes export."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.monitored import HISTOGRAMS, check_exported

ROOT = Path(__file__).parents[2]
RULES = ROOT / "deploy" / "charts" / "prometheus" / "rules.yml"
PROMTOOL = shutil.which("promtool")
needs_promtool = pytest.mark.skipif(PROMTOOL is None, reason="needs promtool, of Prometheus")


def rules() -> list[dict[str, Any]]:
    return [
        rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]
    ]


def promtool(*arguments: object) -> None:
    assert PROMTOOL is not None
    done = subprocess.run([PROMTOOL, *map(str, arguments)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@needs_promtool
def test_prometheus_takes_the_rules_and_the_examples_configuration():
    promtool("check", "rules", RULES)
    promtool("check", "config", ROOT / "examples" / "prometheus.yml")


@needs_promtool
@pytest.mark.parametrize("name", ["rules_test.yml", "objective_test.yml"])
def test_alerts_fire_when_they_should(name: str):
    promtool("test", "rules", Path(__file__).parent / "prometheus" / name)


def test_every_alert_is_tested():
    tests = [path.read_text() for path in (Path(__file__).parent / "prometheus").iterdir()]
    for rule in rules():
        if "alert" in rule:
            fires = rf"alertname: {rule['alert']}\n\s+eval_time: \w+\n\s+exp_alerts:"
            assert re.search(fires, "".join(tests)), rule["alert"]


def test_every_alert_has_a_severity_and_a_part_of_the_runbook():
    headings = re.findall(r"^## (.*)$", (ROOT / "docs" / "runbook.md").read_text(), re.MULTILINE)
    anchors = {heading.lower().replace(" ", "-") for heading in headings}
    alerts = [rule for rule in rules() if "alert" in rule]
    for rule in alerts:
        assert rule["labels"]["severity"] in {"page", "ticket"}
        page, _, anchor = rule["annotations"]["runbook_url"].partition("#")
        assert (ROOT / page).is_file()
        assert anchor in anchors, rule["alert"]
    assert {rule["annotations"]["runbook_url"].partition("#")[2] for rule in alerts} == anchors


def test_rules_name_what_is_exported_or_recorded():
    recorded = {rule["record"] for rule in rules() if "record" in rule}
    for rule in rules():
        named = set(re.findall(r"\w+:\w+:?\w*", rule["expr"]))
        assert named <= recorded, rule
        check_exported(re.sub(r"\w+:\w+:?\w*", "", rule["expr"]))


def test_the_objective_is_a_bound_of_the_histogram():
    [bound] = set(re.findall(r'le="([\d.]+)"', RULES.read_text()))
    assert float(bound) in HISTOGRAMS["kvrelay_ttft_seconds"]
