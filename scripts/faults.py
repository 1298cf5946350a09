"""Days under faults, many of them (`make faults`), or one day over and over (`make soak`); ends with 1 at a violation.

A seed is a plan: the same steps with the same faults at the same moments, as far as a machine keeps them.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--schedules", type=int, default=500, help="days to run")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--minutes", type=float, default=0.0, help="stop after so long")
    parser.add_argument("--soak", action="store_true", help="one server for all of --minutes, without faults")
    parser.add_argument("--no-layouts", action="store_true", help="engines of one process alone")
    parser.add_argument("--verbose", action="store_true", help="tell every day's story")
    asked = parser.parse_args()

    from fault_day import undisturbed
    from fault_nursery import nursery
    from fault_world import World, small_disk, write_models

    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    print(f"commit {commit.stdout.strip() or 'unknown'}: {' '.join(sys.argv)}", flush=True)
    with tempfile.TemporaryDirectory(prefix="ddtree-faults-") as scratch:
        root = Path(scratch)
        models, logs = write_models(root / "models"), root / "logs"
        logs.mkdir()
        with small_disk(root / "disk") as disk, nursery() as children:
            folder = disk or root
            if disk is None:
                print("no file system can be mounted here: full disks are left out")
            world = World(folder / "undisturbed", models, logs, children)
            try:
                texts = undisturbed(world)
            finally:
                world.close()
            place = (folder, models, logs, children, texts, disk is not None)
            return _soak(asked, *place) if asked.soak else _days(asked, *place)


def _days(asked: Any, folder: Path, models: Path, logs: Path, children: Any, texts: Any, small: bool) -> int:
    from fault_checks import run_day

    began, faults, failed = time.monotonic(), Counter[str](), []
    answered = kept = done = 0
    for seed in range(asked.first, asked.first + asked.schedules):
        if asked.minutes and time.monotonic() - began > 60 * asked.minutes:
            break
        place = folder / f"day-{seed}"
        report = run_day(
            seed, place, models, logs, children, texts, small=small, layouts=not asked.no_layouts
        )
        done += 1
        answered, kept = answered + report.answered, kept + report.kept
        faults.update(report.struck)
        if report.problems or asked.verbose:
            print(
                f"seed {seed}, {report.seconds:.1f} s",
                *report.story,
                *report.problems,
                sep="\n  ",
                flush=True,
            )
        if report.problems:
            failed.append(seed)
        shutil.rmtree(place, ignore_errors=True)
        for each in logs.iterdir():
            if not report.problems:
                each.unlink()
        if done % 25 == 0:
            print(f"{done} days, {sum(faults.values())} faults, failed: {failed}", flush=True)
    minutes = (time.monotonic() - began) / 60
    print(
        f"{done} days in {minutes:.1f} min, {answered} texts as alone, {kept} snapshots, failed seeds: {failed}"
    )
    for name, count in faults.most_common():
        print(f"  {count:5} {name}")
    return 1 if failed else 0


def _soak(asked: Any, folder: Path, models: Path, logs: Path, children: Any, texts: Any, small: bool) -> int:
    from fault_soak import soak
    from fault_world import World

    world = World(
        models.parent / "soak", models, logs, children
    )  # not on a disk that its snapshots would fill
    try:
        soaked = soak(
            world,
            texts,
            asked.first,
            60 * (asked.minutes or 120.0),
            tell=lambda line: print(line, flush=True),
        )
    finally:
        world.close()
    print(soaked, *soaked.problems, soaked.to_json(), sep="\n")
    return 1 if soaked.problems or not soaked.slopes[0].is_flat else 0


if __name__ == "__main__":
    sys.exit(main())
