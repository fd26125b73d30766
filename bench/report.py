"""python -m bench.report [--check]: writes docs/benchmarks.md and the README's table from bench/results.

Numbers in the docs come from here and from nowhere else. --check writes nothing and exits 1 when a page is out of date.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
BEGIN, END = "<!-- results -->", "<!-- end of results -->"

Report = dict[str, Any]


def main(arguments: list[str]) -> int:
    wanted = pages()
    stale = [path for path, text in wanted.items() if path.read_text("utf-8") != text]
    if "--check" in arguments:
        for path in stale:
            print(f"{path.relative_to(ROOT)} is out of date: python -m bench.report", file=sys.stderr)
        return 1 if stale else 0
    for path in stale:
        path.write_text(wanted[path], "utf-8")
    return 0


def pages() -> dict[Path, str]:
    """Each page with what stands between its marks made anew."""
    reports = latest()
    return {
        ROOT / "README.md": _between(ROOT / "README.md", short(reports)),
        ROOT / "docs" / "benchmarks.md": _between(ROOT / "docs" / "benchmarks.md", full(reports)),
    }


def latest() -> list[Report]:
    """The newest report of each bench, model and machine."""
    newest: dict[tuple[str, ...], Report] = {}
    for file in sorted((ROOT / "bench" / "results").glob("*.jsonl")):
        for line in file.read_text("utf-8").splitlines():
            report = json.loads(line)
            newest[file.stem, report["bench"], report.get("model", "")] = report
    return list(newest.values())


def _between(path: Path, lines: Iterator[str]) -> str:
    text = path.read_text("utf-8")
    before, rest = text.split(BEGIN)
    after = rest.split(END)[1]
    return f"{before}{BEGIN}\n" + "".join(f"{line}\n" for line in lines) + f"{END}{after}"


def _ratio(value: float, interval: list[float]) -> str:
    return f"{value:.2f} ({interval[0]:.2f} to {interval[1]:.2f})"


def _where(report: Report) -> str:
    machine = report["machine"]
    return f"{machine['cpu']}, {machine['cores']} cores, {machine['system']}"


def short(reports: list[Report]) -> Iterator[str]:
    yield "| model | machine | against | speed ratio (95 % interval) |"
    yield "|---|---|---|---|"
    for report in reports:
        if report["bench"] == "plain":
            for name, r in report["ratio"].items():
                yield f"| {report['model']} | {_where(report)} | {name} | {_ratio(r['value'], [r['low'], r['high']])} |"
        elif report["bench"] == "drafters":
            for name, value in report["ratio"].items():
                ratio = _ratio(value, report["interval"][name])
                yield f"| {report['model']} | {_where(report)} | {name} to plain | {ratio} |"


def full(reports: list[Report]) -> Iterator[str]:
    for report in reports:
        yield ""
        yield f"## {report['bench']}: {report.get('model', 'no model')}"
        yield ""
        versions = ", ".join(f"{name} {version}" for name, version in report["machine"]["versions"].items())
        yield f"{_where(report)}; {report['date']}, commit {report['commit']}, {versions}."
        yield f"`{report['command']}`"
        yield ""
        yield from SECTIONS[report["bench"]](report)
    yield ""


def _plain(report: Report) -> Iterator[str]:
    yield "| arm | tokens/s |"
    yield "|---|---|"
    for name, speed in report["tok_s"].items():
        yield f"| {name} | {speed:.1f} |"
    yield ""
    yield "| ratio | value (95 % interval) |"
    yield "|---|---|"
    for name, r in report["ratio"].items():
        yield f"| {name} | {_ratio(r['value'], [r['low'], r['high']])} |"


def _blas(report: Report) -> Iterator[str]:
    yield "| BLAS | tokens/s |"
    yield "|---|---|"
    for name, speed in report["tok_s"].items():
        yield f"| {name} | {speed:.1f} |"


def _host(report: Report) -> Iterator[str]:
    yield f"A round of {report['rows']} rows, vocabulary {report['vocab']}, from propose to emit, without a model: "
    yield f"{report['round_ms']:.2f} ms. MLX's argmax of those rows, a part of the target's forward: "
    yield f"{report['argmax_ms']:.2f} ms. Building the graph of SmolLM2's forward: "
    yield ", ".join(f"{ms:.2f} ms for {rows} rows" for rows, ms in report["graph_ms"].items()) + "."


def _drafters(report: Report) -> Iterator[str]:
    yield "| drafter | tokens/s | to plain (95 % interval) | accepted length | draft / verify / host ms | TTFT ms |"
    yield "|---|---|---|---|---|---|"
    for name, arm in report["arms"].items():
        interval = report["interval"].get(name)
        ratio = _ratio(report["ratio"][name], interval) if interval else ""
        parts = f"{arm['draft_ms']:.1f} / {arm['verify_ms']:.1f} / {arm['host_ms']:.1f}"
        yield f"| {name} | {arm['tok_s']:.1f} | {ratio} | {arm['accepted']:.2f} | {parts} | {arm['ttft_ms']:.0f} |"
    yield ""
    yield "| kind | " + " | ".join(report["ratio"]) + " |"
    yield "|---|" + "---|" * len(report["ratio"])
    for kind, values in report["kinds"].items():
        cells = [_ratio(value, values["interval"][name]) for name, value in values["ratio"].items()]
        yield f"| {kind} | " + " | ".join(cells) + " |"


def _serve(report: Report) -> Iterator[str]:
    yield "| server | clients | first token s | gap ms | tokens/s together | memory GB |"
    yield "|---|---|---|---|---|---|"
    for arm, by_clients in report["load"].items():
        for clients, row in by_clients.items():
            numbers = f"{row['first']:.2f} | {1000 * row['gap']:.0f} | {row['tokens_per_second']:.1f}"
            yield f"| {arm} | {clients} | {numbers} | {row['memory'] / 1e9:.2f} |"
    yield ""
    yield "Lisa takes turns between its clients; mlx-lm's server batches them into one forward."


def _prefix(report: Report) -> Iterator[str]:
    yield f"An agent's conversation of {report['turns']} turns with tool calls, two requests a turn."
    yield ""
    yield "| server | repeated tokens read again | first token ms, median | in the last two turns |"
    yield "|---|---|---|---|"
    for arm, row in report["arms"].items():
        share = f"{100 * row['read_again']:.0f} %"
        yield f"| {arm} | {share} | {row['ttft_median_ms']:.0f} | {row['ttft_last_ms']:.0f} |"


SECTIONS = {
    "plain": _plain,
    "blas": _blas,
    "host": _host,
    "drafters": _drafters,
    "serve": _serve,
    "prefix": _prefix,
}

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
