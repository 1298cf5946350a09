"""Findings of `gpu_two.py` as evidence: records in the layouts' presets, link figures, and the cost model beside them.

    PYTHONPATH=. python scripts/gpu_two.py evidence FILE.jsonl [--into layouts] [--json docs/measurements/gpu-two.json]

`--into` is the shipped folder, or any other, which is then laid out as a user's own (presets in it, devices below
`hardware`). What an earlier call added to a file goes first. Speeds of a random drafter are no evidence: only what its
rounds take is kept, in the JSON file.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from layouts.cost import rates
from layouts.evidence import cpu_class, known_evidence
from layouts.fit import Load
from layouts.forecast import Forecaster
from layouts.host import Host, cpu_name
from layouts.library import SHIPPED, Library, load_library, read_file, shape_from_config
from layouts.plan import Question, plan_layout
from layouts.presets import Conditions, Evidence, Preset, Scope
from layouts.shapes import Hardware, ModelShape

MARK = (
    "# Measured on two GPUs by scripts/gpu_two.py; every line with spread: docs/measurements/gpu-two.json\n"
)
SOURCE = "docs/measurements/gpu-two.json"
Line = Mapping[str, Any]


@dataclass(frozen=True)
class Run:
    """The lines of one run, or of several of one machine."""

    lines: tuple[Line, ...]

    @classmethod
    def read(cls, path: Path) -> Run:
        return cls(tuple(json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line))

    def of(self, what: str, *kinds: str) -> list[Line]:
        return [line for line in self.lines if line["what"] == what and line["kind"] in kinds]

    @property
    def about(self) -> Line:
        return next(line for line in reversed(self.lines) if line["kind"] == "about")

    @property
    def gpu(self) -> str | None:
        """What the devices call themselves; None on a CPU."""
        names = self.about["gpus"]
        return str(names[0]) if names else None

    @property
    def interconnect(self) -> str:
        found = self.of("links", "topology")
        return str(found[-1]["interconnect"]) if found else ("NVLink" if self.gpu else "gloo")

    @property
    def cells(self) -> list[Line]:
        """The last figures of each cell that were repeated at all, those of trained drafters or of none."""
        kept: dict[tuple[Any, ...], Line] = {}
        names = ("model", "layout", "mode", "tree_budget", "concurrency")
        for line in self.of("speed", "cell"):
            if line["n"] > 1 and (line["drafter"] != "random" or line["mode"] == "off"):
                key = tuple(line[name] for name in names)
                if key not in kept or line["drafter"] != "random":
                    kept[key] = line
        return list(kept.values())


def records(run: Run, library: Library, hardware: Hardware) -> dict[str, list[Evidence]]:
    """Evidence by the name of the preset it belongs to."""
    found: dict[str, list[Evidence]] = {}

    def add(layout: str, model: str | None, **fields: Any) -> None:
        preset = library.preset(layout)
        versions = {"dtype": str(run.about["dtype"]), "torch": str(run.about["versions"]["torch"])}
        scope = Scope(
            hardware=hardware.class_name,
            devices=preset.degrees.ranks if run.gpu else 1,
            interconnect=run.interconnect,
            engine="native",
            versions=versions,
        )
        said = {"model": model, "layout": preset.degrees.label, **fields.pop("conditions", {})}
        commit = run.about.get("commit")
        source = f"{SOURCE}, commit {commit}" if commit else SOURCE
        record = Evidence(
            scope=scope,
            conditions=Conditions(**said),
            measured_at=run.about["measured_at"],
            source=source,
            **fields,
        )
        found.setdefault(layout, []).append(record)

    for cell in run.cells:
        real = cell["drafter"] == "trained"
        conditions = {
            "mode": cell["mode"], "tree_budget": cell["tree_budget"] if cell["mode"] == "tree" else None,
            "accept_length": None if cell["mode"] == "off" else cell["accept_length"],
            "concurrency": cell["concurrency"], "context": cell["context"], "graphs": cell["graphs"],
            "prompts": "bundled prompts" if real else "random weights of these dimensions and random tokens",
            "temperature": cell["temperature"],
        }  # fmt: skip
        unit = "tok/s" if cell["concurrency"] == 1 else "tok/s total"
        add(cell["layout"], cell["model"], unit=unit, value=cell["tok_s"], conditions=conditions)
    for layout, model, words in findings(run):
        add(layout, model, finding=words)
    return found


def findings(run: Run) -> Iterator[tuple[str, str | None, str]]:
    """(layout, model, words) of what has no figure to predict: parity, flips, killed ranks; the last of each."""
    where = "NCCL" if run.gpu else "gloo"
    outputs = {(line["model"], line["layout"]): line for line in run.of("parity", "outputs")}
    texts = {(line["model"], line["layout"]): line for line in run.of("parity", "tokens")}
    for line in texts.values():
        key = (line["model"], line["layout"])
        trees = ", ".join(map(str, line["budgets"]))
        words = (
            f"over {where}, {line['dtype']}: {line['identical']} of {line['texts']} texts of chain and trees of "
            f"{trees} as plain decoding in this layout, {line['near_ties']} near-ties "
            f"({line['near_ties_allowed']} allowed), {line['divergences']} other differences in {line['tokens']} tokens"
        )
        if key in outputs:
            words += f"; {_outputs_words(outputs[key])}"
        yield line["layout"], line["model"], words
    for line in {line["to"]: line for line in run.of("flip", "flip")}.values():
        if line["failure"] is None:
            words = f"flip to {line['to']} under a stream: {line['pause_s']:.2f} s without service"
            yield line["to"], None, words
    for line in {line["layout"]: line for line in run.of("kill", "kill")}.values():
        if "seen_s" in line:
            back = "memory back" if line["memory_back"] else "memory not back"
            words = (
                f"SIGKILL of rank {line['rank']} under a stream: seen after {line['seen_s']:.3f} s, "
                f"single served after {line['serving_s']:.1f} s, {back}"
            )
            yield line["layout"], None, words


def _outputs_words(line: Line) -> str:
    if line["exact"]:
        return "logits and taps bit for bit those of one process"
    if line["dtype"] == "float32":
        return f"logits and taps within {line['max_gap']:.1e} of one process"
    return (
        f"likeliest token another one at {line['differ']} of {line['positions']} positions, {line['near_ties']} of "
        f"them near-ties, {line['beyond']} beyond what the dtype rounds; median error against float32 "
        f"{line['error']:.2e}, one process {line['error_of_one_process']:.2e}"
    )


def preset_text(text: str, added: Sequence[Evidence]) -> str:
    """A preset's file with these records in the place of those an earlier call added."""
    kept = text.partition(MARK)[0].rstrip("\n")
    tables = "\n".join(_table(record) for record in added)
    return f"{kept}\n\n{MARK}{tables}"


def _table(record: Evidence) -> str:
    values = record.model_dump(mode="json", exclude_none=True, exclude_defaults=True)
    return "[[evidence]]\n" + "".join(f"{name} = {_toml(value)}\n" for name, value in values.items())


def _toml(value: Any) -> str:
    """A value on one line; JSON's strings, numbers and truth values are TOML's too."""
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{name} = {_toml(each)}" for name, each in value.items()) + " }"
    return json.dumps(value)


def hardware_text(text: str, profile: Line, machine: str) -> str:
    """A device's file with measured link figures in the place of assumed ones."""
    fit = "all-reduce, latency of the smallest message (in a CUDA graph), bandwidth of the largest"
    source = f"measured on {machine}: {fit} ({SOURCE})"
    text = "".join(line for line in text.splitlines(keepends=True) if SOURCE not in line)
    text = text.replace("not measured: link latency, ", "not measured: ")
    for name in ("link_gb_s", "link_latency_us"):
        text = re.sub(rf"^{name} = .*$", f"{name} = {profile[name]}", text, flags=re.M)
    return re.sub(r"^\]", f"    {json.dumps(source)},\n]", text, count=1, flags=re.M)


def write(run: Run, into: Path) -> list[Path]:
    """Writes presets and hardware into `into`; the files."""
    shipped = into.resolve() == SHIPPED.resolve()
    library = load_library(Path("/nonexistent"))
    hardware = hardware_of(run, library)
    written: list[Path] = []

    def put(kind: str, name: str, text: str, model: type[Any]) -> None:
        folder = into / kind if shipped or kind != "presets" else into
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{name}.toml"
        path.write_text(text, encoding="utf-8")
        read_file(path, model)
        written.append(path)

    for name, added in records(run, library, hardware).items():
        text = library.origins["presets", name].path.read_text(encoding="utf-8")
        put("presets", name, preset_text(text, added), Preset)
    profiles = run.of("links", "profile")
    if profiles and run.gpu:
        text = library.origins["hardware", hardware.name].path.read_text(encoding="utf-8")
        words = f"2 x {hardware.class_name}, {run.interconnect}"
        put("hardware", hardware.name, hardware_text(text, profiles[-1], words), Hardware)
    return written


def hardware_of(run: Run, library: Library) -> Hardware:
    """The class of the devices the run was made on."""
    from layouts.host import match

    if run.gpu is None:
        title = cpu_class(cpu_name() or "CPU", 1)
        return library.device("cpu").model_copy(update={"class_name": title})
    found = match(library, run.gpu)
    if found is None:
        raise SystemExit(f"gpu_two: no file of layouts/hardware describes {run.gpu!r}; write one first")
    return found


def shape_of(library: Library, model: str) -> ModelShape:
    if model in library.models:
        return library.models[model]
    from gpu_random import DIMENSIONS

    size = DIMENSIONS[model]
    return shape_from_config(model, size.config(), size.drafter_config())


def predictions(run: Run, into: Path) -> Iterator[dict[str, Any]]:
    """Each speed beside what the cost model says of it: from the device's figures alone, and corrected by the other
    records of the same scope."""
    shipped = into.resolve() == SHIPPED.resolve()
    library = load_library(Path("/nonexistent") if shipped else into, strict=True)
    hardware = hardware_of(run, library)
    known = known_evidence(library, Path("/nonexistent"))
    for model in dict.fromkeys(cell["model"] for cell in run.cells):
        shape = shape_of(library, model)
        for layout in dict.fromkeys(cell["layout"] for cell in run.cells if cell["model"] == model):
            preset = library.preset(layout)
            at = rates(hardware, preset.degrees)
            modes = dict.fromkeys(cell["mode"] for cell in run.cells if cell["layout"] == layout)
            seen: set[str] = set()
            for mode in modes:
                question = Question(model=shape, mode=mode, dtype=run.about["dtype"])
                host = Host(hardware=hardware, devices=2)
                plan = plan_layout(library, host, question, known, preset)
                maker = Forecaster(shape, preset, hardware, Load(dtype=run.about["dtype"]), None)
                for each in plan.compared:
                    key = each.record.model_dump_json()
                    if each.predicted is None or key in seen or SOURCE not in each.record.source:
                        continue
                    seen.add(key)
                    case = maker.case(each.record)
                    first = None
                    if case is not None and not isinstance(at, str):
                        made = case.predict(at)
                        first = made.total_tok_s if each.record.unit == "tok/s total" else made.tok_s
                    said = each.record.conditions
                    yield {
                        "what": "predicted", "model": model, "layout": layout, "mode": said.mode,
                        "tree_budget": said.tree_budget, "concurrency": said.concurrency, "graphs": said.graphs,
                        "measured": each.record.value, "by_figures_alone": _rounded(first),
                        "by_the_other_records": _rounded(each.predicted), "error": _rounded(each.error, 3),
                        "unit": each.record.unit, "calibration": plan.calibration,
                    }  # fmt: skip


def _rounded(value: float | None, digits: int = 1) -> float | None:
    return None if value is None else round(value, digits)


def json_text(lines: Iterable[Line]) -> str:
    """A list, one entry a line."""
    return "[\n" + ",\n".join(json.dumps(line) for line in lines) + "\n]\n"


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="gpu_two.py evidence", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", type=Path, nargs="+")
    parser.add_argument("--into", type=Path, default=SHIPPED)
    parser.add_argument("--json", type=Path, default=Path(SOURCE))
    args = parser.parse_args(argv)
    run = Run(tuple(line for path in args.files for line in Run.read(path).lines))
    for path in write(run, args.into):
        print(path)
    predicted = list(predictions(run, args.into))
    for each in predicted:
        budget = f" {each['tree_budget']}" if each["tree_budget"] else ""
        print(
            f"{each['model']} {each['layout']} {each['mode']}{budget} x{each['concurrency']}: measured "
            f"{each['measured']} {each['unit']}, predicted {each['by_figures_alone']} by the device's figures, "
            f"{each['by_the_other_records']} by the other records (error {each['error']:+.0%})"
        )
    kept = [line for line in run.lines if line["kind"] not in ("took", "loaded")]
    args.json.write_text(json_text([*kept, *predicted]), encoding="utf-8")
    print(args.json)


if __name__ == "__main__":
    main()
