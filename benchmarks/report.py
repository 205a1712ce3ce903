# SPDX-License-Identifier: Apache-2.0
"""What run.py measured, as text and as a plot.

`numbers` is what run.py writes: by part and tree what its process found (rows, and an
error if it did not end well), and for engines by model a list of runs.
"""

import statistics
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

COPY_SHARE = 0.95  # of the pinned copy limit, at least
GLOO_FACTOR = 1.1  # times the Gloo transport alone, at most
BLOCKED = 1.0  # ms of host time that the GPU being busy may add
SLOWER = 0.02  # what is slower by more than that is listed

# Of the rows; what is left out is the machine's own, or says how it was measured.
COMPARED = {
    *("first_ms", "steady_ms", "copy_gbps", "copy_host_ms", "copy_host_busy_ms"),
    *("idle_ms", "busy_ms"),
}
SPEEDS = {"copy_gbps", "tokens/s"}  # the others are times

TREES = ("unpatched", "patched")
WHAT = {
    "sparse": "sparse MLA, 4 builds",
    "dense": "dense MLA, 4 builds",
    "plan": "SM90 plan",
}
# Colour-blind safe.
COLOURS = {
    "unpatched": "#d55e00",
    "patched, guard off": "#56b4e9",
    "patched": "#0072b2",
}


class Pair(NamedTuple):
    """One quantity, in two trees; `factor` is how many times slower the second is."""

    name: str
    before: float
    after: float
    factor: float


def rows(numbers: dict[str, Any], part: str, tree: str) -> list[dict[str, Any]]:
    return numbers.get(part, {}).get(tree, {}).get("rows", [])


def runs(numbers: dict[str, Any], model: str, form: str) -> list[dict[str, Any]]:
    """The runs of an engine that ended well."""
    return [
        run
        for run in numbers["engine"][model]
        if run["form"] == form and "error" not in run
    ]


def forms(numbers: dict[str, Any], model: str) -> list[str]:
    return list(dict.fromkeys(run["form"] for run in numbers["engine"][model]))


def engine(found: list[dict[str, Any]]) -> dict[str, float]:
    """Medians over runs."""
    return {
        "tokens/s": statistics.median(run["tokens_per_s"] for run in found),
        "ITL": statistics.median(run["itl_ms"]["median"] for run in found),
        "ITL p99": statistics.median(run["itl_ms"]["p99"] for run in found),
    }


def errors(numbers: dict[str, Any]) -> list[str]:
    """What did not end well, and how."""
    found = [
        (f"{part}, {tree}", result)
        for part in ("eplb", "mla")
        for tree, result in numbers.get(part, {}).items()
    ]
    for model, each in numbers.get("engine", {}).items():
        found += [(f"{model}, {run['form']}", run) for run in each]
    return [f"{name}: {result['error']}" for name, result in found if "error" in result]


def table(head: str, lines: Iterable[Iterable[object]]) -> str:
    """A table in markdown; numbers to the right."""
    cells = [[name.strip() for name in head.split("|")]]
    cells += [[str(cell) for cell in line] for line in lines]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    made = [
        " | ".join(c.rjust(w) for c, w in zip(line, widths, strict=True))
        for line in cells
    ]
    made.insert(1, " | ".join("-" * (width - 1) + ":" for width in widths))
    return "\n".join(f"| {line} |" for line in made)


def eplb_table(numbers: dict[str, Any]) -> str:
    found = [(r, tree) for tree in TREES for r in rows(numbers, "eplb", tree)]
    found.sort(key=lambda each: (each[0]["ranks"], each[0]["mib"]))
    return table(
        "ranks|MiB|tree|first|steady|Gloo alone|x Gloo|GB/s|limit|of it"
        "|host idle|host busy|waits",
        (
            (
                *(r["ranks"], r["mib"], tree),
                *(f"{r[key]:.1f}" for key in ("first_ms", "steady_ms", "transport_ms")),
                f"{r['steady_ms'] / r['transport_ms']:.2f}",
                *(f"{r['copy_gbps']:.1f}", f"{r['limit_gbps']:.1f}"),
                f"{r['copy_gbps'] / r['limit_gbps']:.0%}",
                *(f"{r['copy_host_ms']:.2f}", f"{r['copy_host_busy_ms']:.2f}"),
                "yes" if r["waited"] else "no",
            )
            for r, tree in found
        ),
    )


def mla_table(numbers: dict[str, Any]) -> str:
    found = [(r, tree) for tree in TREES for r in rows(numbers, "mla", tree)]
    found.sort(key=lambda each: (list(WHAT).index(each[0]["kind"]), each[0]["tokens"]))
    return table(
        "what|tokens|rows|tree|idle|busy|blocked|waits",
        (
            (
                *(WHAT[r["kind"]], r["tokens"], r["rows"], tree),
                *(f"{r['idle_ms']:.2f}", f"{r['busy_ms']:.2f}"),
                f"{r['busy_ms'] - r['idle_ms']:.2f}",
                "yes" if r["waited"] else "no",
            )
            for r, tree in found
        ),
    )


def engine_table(numbers: dict[str, Any]) -> str:
    lines = []
    for model in numbers["engine"]:
        for form in forms(numbers, model):
            found = runs(numbers, model, form)
            if found:
                made = engine(found)
                each = " ".join(f"{run['tokens_per_s']:.0f}" for run in found)
                lines.append(
                    (
                        *(model, form, f"{made['tokens/s']:.0f}", each),
                        *(f"{made['ITL']:.3f}", f"{made['ITL p99']:.3f}"),
                    )
                )
    return table("model|tree|tokens/s|each run|ITL|ITL p99", lines)


def aims(numbers: dict[str, Any]) -> Iterator[tuple[str, bool, str]]:
    """Each aim, whether it is met patched, and where it is furthest from it."""
    if found := rows(numbers, "eplb", "patched"):
        at = "{ranks} ranks, {mib} MiB".format
        worst = min(found, key=lambda r: r["copy_gbps"] / r["limit_gbps"])
        share = worst["copy_gbps"] / worst["limit_gbps"]
        aim = f"EPLB's copy stage at {COPY_SHARE:.0%} of the pinned copy limit"
        yield aim, share >= COPY_SHARE, f"{share:.0%}: {at(**worst)}"
        waited = [at(**r) for r in found if r["waited"]]
        aim = "EPLB's copy stage does not wait for the GPU"
        yield aim, not waited, "; ".join(waited) or "nowhere"
        worst = max(found, key=lambda r: r["steady_ms"] / r["transport_ms"])
        factor = worst["steady_ms"] / worst["transport_ms"]
        aim = f"EPLB's exchange at most {GLOO_FACTOR} times Gloo alone"
        yield aim, factor <= GLOO_FACTOR, f"{factor:.2f}: {at(**worst)}"
    for kind, what in WHAT.items():
        found = [r for r in rows(numbers, "mla", "patched") if r["kind"] == kind]
        if found:
            worst = max(found, key=lambda r: r["busy_ms"] - r["idle_ms"])
            more = worst["busy_ms"] - worst["idle_ms"]
            aim = f"{what}: busy within {BLOCKED:.0f} ms of idle"
            yield aim, more <= BLOCKED, f"{more:+.2f} ms: {worst['tokens']} tokens"


def pair(name: str, value: str, before: float, after: float) -> Pair:
    factor = before / after if value in SPEEDS else after / before
    return Pair(name, before, after, factor)


def pairs(numbers: dict[str, Any]) -> Iterator[Pair]:
    """Everything that was measured in both trees."""
    identity = {"eplb": ("ranks", "mib"), "mla": ("kind", "tokens")}
    for part, keys in identity.items():
        before, after = (
            {tuple(row[k] for k in keys): row for row in rows(numbers, part, tree)}
            for tree in TREES
        )
        for key in before.keys() & after.keys():
            name = ", ".join(f"{k} {v}" for k, v in zip(keys, key, strict=True))
            for value in COMPARED & before[key].keys():
                one, two = before[key][value], after[key][value]
                yield pair(f"{part}, {name}, {value}", value, one, two)
    for model in numbers.get("engine", {}):
        base = runs(numbers, model, "unpatched")
        for form in forms(numbers, model):
            found = runs(numbers, model, form)
            if form == "unpatched" or not (base and found):
                continue
            one, two = engine(base), engine(found)
            for value in one:
                name = f"{model}, {form}, {value}"
                yield pair(name, value, one[value], two[value])


def slower(numbers: dict[str, Any]) -> list[Pair]:
    """What is slower patched, the worst first."""
    found = [each for each in pairs(numbers) if each.factor > 1 + SLOWER]
    return sorted(found, key=lambda each: (-each.factor, each.name))


def text(numbers: dict[str, Any]) -> str:
    """All that run.py prints."""
    machine = "FlashInfer {flashinfer}, torch {torch}, {gpu}, {cores} cores"
    made = [("vLLM {vllm}, " + machine).format(**numbers)]
    if "eplb" in numbers:
        made += ["EPLB exchange over Gloo, ms each:", eplb_table(numbers)]
    if "mla" in numbers:
        made += ["Host time of MLA metadata, ms each:", mla_table(numbers)]
    if "engine" in numbers:
        made += ["Engines, 32 requests; ITL in ms:", engine_table(numbers)]
    lines = [
        f"- {'met' if met else 'NOT MET'}: {aim} (worst {worst})"
        for aim, met, worst in aims(numbers)
    ]
    made += ["\n".join(["Aims, patched:", *lines])] if lines else []
    lines = [
        f"- {name}: {before:.4g} to {after:.4g} ({factor - 1:+.1%})"
        for name, before, after, factor in slower(numbers)
    ]
    head = f"Slower than unpatched, by more than {SLOWER:.0%}:"
    made.append("\n".join([head, *(lines or ["- nothing"])]))
    if failed := errors(numbers):
        made.append("\n".join(["Failed:", *(f"- {line}" for line in failed)]))
    return "\n\n".join(made)


def plot(numbers: dict[str, Any], path: Path) -> None:
    """A panel for each part that was measured, side by side."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    panels = {"eplb": plot_eplb, "mla": plot_mla, "engine": plot_engines}
    drawn = [draw for part, draw in panels.items() if part in numbers]
    figure, axes = plt.subplots(
        1, len(drawn), figsize=(4.4 * len(drawn), 4.4), squeeze=False
    )
    for draw, each in zip(drawn, axes[0], strict=True):
        draw(each, numbers)
    figure.suptitle("vLLM {vllm}, {gpu}".format(**numbers))
    figure.tight_layout()
    figure.savefig(path, dpi=125)
    plt.close(figure)


def plot_eplb(axes: Any, numbers: dict[str, Any]) -> None:
    """Copy stage by size; two ranks solid, four dashed."""
    for tree in TREES:
        for ranks, line in ((2, "-"), (4, "--")):
            found = [r for r in rows(numbers, "eplb", tree) if r["ranks"] == ranks]
            sizes = [r["mib"] for r in found]
            speeds = [r["copy_gbps"] for r in found]
            label = f"{tree}, {ranks} ranks"
            axes.plot(sizes, speeds, f"o{line}", color=COLOURS[tree], label=label)
    limits = [r for r in rows(numbers, "eplb", "patched") if r["ranks"] == 2]
    sizes, speeds = [r["mib"] for r in limits], [r["limit_gbps"] for r in limits]
    axes.plot(sizes, speeds, ":", color="black", label="pinned copy limit")
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes, [str(size) for size in sizes])
    axes.set_ylim(bottom=0)
    axes.set(
        title="EPLB over Gloo: the copy stage",
        xlabel="MiB each way a rank",
        ylabel="GB/s to the GPU",
    )
    axes.legend(fontsize="small")


def plot_mla(axes: Any, numbers: dict[str, Any]) -> None:
    """Host time of the SM90 plan, or where there is none, of dense MLA's builds."""
    kinds = {r["kind"] for tree in TREES for r in rows(numbers, "mla", tree)}
    kind = "plan" if "plan" in kinds else "dense"
    ticks: list[int] = []
    for tree in TREES:
        found = [r for r in rows(numbers, "mla", tree) if r["kind"] == kind]
        ticks = ticks or [r["tokens"] for r in found]
        for load, line in (("idle", "--"), ("busy", "-")):
            axes.plot(
                [r["tokens"] for r in found],
                [r[f"{load}_ms"] for r in found],
                f"o{line}",
                color=COLOURS[tree],
                label=f"{tree}, GPU {load}",
            )
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, [f"{tick // 1024}k" for tick in ticks])
    axes.set_ylim(bottom=0)
    axes.set(
        title=f"{WHAT[kind]}: host time",
        xlabel="max_num_batched_tokens",
        ylabel="ms",
    )
    axes.legend(fontsize="small")


def plot_engines(axes: Any, numbers: dict[str, Any]) -> None:
    """Throughput relative to unpatched: a bar of the median, a dot a run."""
    places: list[float] = []
    labels: list[str] = []
    for gap, model in enumerate(numbers.get("engine", {})):
        base = runs(numbers, model, "unpatched")
        for form in forms(numbers, model):
            if base and (found := runs(numbers, model, form)):
                made, unit = engine(found), engine(base)["tokens/s"] / 100
                height, place = made["tokens/s"] / unit, len(places) + gap / 2
                axes.bar(place, height, color=COLOURS[form], alpha=0.7)
                each = [run["tokens_per_s"] / unit for run in found]
                axes.plot([place] * len(each), each, ".", color="black")
                speed, *latency = made.values()
                note = "{:.0f}/s\nITL {:.2f}\np99 {:.2f}".format(speed, *latency)
                axes.text(place, height / 2, note, ha="center", fontsize="small")
                labels.append(form.replace(", ", ",\n"))
                places.append(place)
    axes.set_xticks(places, labels, fontsize="small")
    axes.set(
        title="Engines: tokens a second, ITL in ms",
        xlabel=" | ".join(numbers.get("engine", {})),
        ylabel="% of unpatched",
    )
