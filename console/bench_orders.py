"""What the Bench screen orders and the app carries out: dialogs, files, jobs. A part of ConsoleApp."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from console.formats import clean_line
from console.taste import Taste

if TYPE_CHECKING:
    from console.bench_load import Load
    from console.bench_results import Bench, Kept
    from console.bench_screen import BenchScreen


class BenchOrders(Taste):
    """Handlers of the Bench screen's orders."""

    def furnish_bench(self, screen: BenchScreen) -> None:
        """Gives the screen the load of the last start."""
        usual = dataclasses.asdict(screen.load)
        kept = {name: self.preference(f"bench.{name}", value) for name, value in usual.items()}
        screen.load = dataclasses.replace(screen.load, **kept)

    @property
    def bench(self) -> BenchScreen:
        return self._screens["Bench"]

    def on_bench_screen_ordered(self, event: BenchScreen.Ordered) -> None:
        from console.bench_load import LoadDialog

        what, _, text = event.what.partition(" ")
        if what == "tell":
            self._notice(text, bad=True)
        elif what == "start":
            self._start_bench()
        elif what == "load":
            self.push_screen(LoadDialog(self.bench.load), self._use_load)
        elif what == "cancel":
            self._ask_to_cancel()
        elif what == "open":
            self._choose_kept("Open which results?", self.bench.present)
        elif what == "compare":
            self._choose_kept("Compare with which results?", self.bench.compare)
        elif event.bench is not None:
            self._keep(event.bench, as_csv=what == "export")

    def _start_bench(self) -> None:
        from console.bench_load import WrongLoad

        try:
            parameters = self.bench.load.parameters()
        except WrongLoad as wrong:
            self._notice(str(wrong), bad=True)
        else:
            self.start_job("bench", parameters)

    def _use_load(self, load: Load | None) -> None:
        if load is not None:
            self.bench.use(load)
            self.remember(**{f"bench.{name}": value for name, value in dataclasses.asdict(load).items()})

    def _ask_to_cancel(self) -> None:
        from console.dialogs import ConfirmDialog

        job = next((each for each in self.view.jobs if not each.over), None)
        if job is None:
            self._notice("nothing to cancel: no job runs")
            return
        whose = "this console" if job.holder == self.bridge.author else clean_line(job.holder, 60)
        effect = f"It was started by {whose}; what it has measured so far is lost."
        dialog = ConfirmDialog(f"Cancel {job.id}?", effect, yes="Cancel the job", no="Let it run")
        self.push_screen(dialog, lambda yes: self.cancel_job(job.id) if yes else None)

    def _keep(self, bench: Bench, as_csv: bool) -> None:
        from console.bench_results import bench_folder, keep
        from console.choose_dialog import TextDialog

        folder = bench_folder()
        text, suffix = (bench.csv_text(), ".csv") if as_csv else (bench.json_text(), ".json")
        label = time.strftime("bench-%Y%m%d-%H%M%S") if bench.label.startswith("bench-") else bench.label

        async def write(name: str) -> None:
            try:
                path = await asyncio.to_thread(keep, folder, name, text, suffix)
            except OSError as error:
                self._notice(f"not kept: {folder}: {error.strerror or error}", bad=True)
            else:
                self._notice(f"kept in {path}")

        def named(name: str | None) -> None:
            if name is not None:
                self.run_worker(write(name), name="keep", group="files", exit_on_error=False)

        what = "a CSV file" if as_csv else "a JSON file"
        self.push_screen(TextDialog(f"Keep as {what}", label, f"in {folder}; nothing is overwritten"), named)

    def _choose_kept(self, title: str, use: Callable[[Bench], None]) -> None:
        from console.bench_results import bench_folder, kept
        from console.choose_dialog import ChooseDialog

        async def ask() -> None:
            folder = bench_folder()
            found = await asyncio.to_thread(kept, folder)
            if not found:
                self._notice(f"no results are kept in {folder} yet; w keeps those on the screen")
                return
            lines = [_kept_line(each) for each in found]
            self.push_screen(ChooseDialog(title, lines), lambda number: self._read(found, number, use))

        self.run_worker(ask(), name="kept", group="files", exit_on_error=False)

    def _read(self, found: tuple[Kept, ...], number: int | None, use: Callable[[Bench], None]) -> None:
        if number is None:
            return

        from console.bench_results import NotABench, read

        async def reading(path: Path) -> None:
            try:
                use(await asyncio.to_thread(read, path))
            except NotABench as wrong:
                self._notice(str(wrong), bad=True)

        self.run_worker(reading(found[number].path), name="read", group="files", exit_on_error=False)


def _kept_line(each: Kept) -> str:
    when = time.strftime("%Y-%m-%d %H:%M", time.localtime(each.kept_at_s))
    return f"{when}  {clean_line(each.label, 80)}"
