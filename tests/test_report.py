"""The numbers in the docs are those of the committed results."""

from __future__ import annotations

from bench import report


def test_the_docs_are_made_from_the_committed_results() -> None:
    for path, text in report.pages().items():
        assert path.read_text("utf-8") == text, f"{path.name} is out of date: python -m bench.report"


def test_every_result_names_its_machine_and_its_command() -> None:
    reports = report.latest()
    assert reports, "there are results"
    for one in reports:
        assert one["command"] and one["date"] and one["machine"]["cpu"] and one["machine"]["versions"]["mlx"]
