"""Feeds every reader with spoilt input for minutes: `make fuzz MINUTES=10`; ends with 1 where one did harm."""

from __future__ import annotations

import argparse
import logging
import resource
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

MORE_ADDRESS_SPACE = 6 << 30
"""What a reader may map beyond what is mapped at first; more is a MemoryError."""


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """The address of a server of tiny models."""
    import tiny_models
    from api_server import CONTEXT, ApiServer

    from runtime.listener import ServerSettings

    target = tiny_models.write_target(folder / "target")
    pair = target, tiny_models.write_drafter(folder / "drafter", target)
    logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)  # a line for every head that is none
    config = tiny_models.tiny_config(*pair, max_seq_len=CONTEXT, max_queue=64)
    with ApiServer(config, ServerSettings(keep_alive_s=0.2, max_body_bytes=200_000)) as server:
        yield server.url


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=1.0, help="a target")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--target", action="append", default=[], help="only these; may be repeated")
    parser.add_argument("--keep", type=Path, help="a folder for the inputs that did harm")
    asked = parser.parse_args()

    import httpx
    import torch
    from fuzz_targets import OFFLINE, fresh, http_bodies, http_heads
    from fuzzing import Outcome, run

    torch.set_num_threads(1)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MORE_ADDRESS_SPACE, resource.RLIM_INFINITY))
    outcomes: list[Outcome] = []
    with tempfile.TemporaryDirectory() as scratch:
        made = {each.__name__: each for each in OFFLINE}
        for name in [name for name in made if not asked.target or name in asked.target]:
            target = made[name](fresh(Path(scratch) / name))
            outcomes.append(run(target, asked.seed, asked.minutes * 60))
            print(outcomes[-1], flush=True)
        if not asked.target or "http" in asked.target:
            with (
                served(fresh(Path(scratch) / "http")) as url,
                httpx.Client(base_url=url, timeout=60) as client,
            ):
                for target in (http_bodies(client, "operator-key"), http_heads(url)):
                    outcomes.append(run(target, asked.seed, asked.minutes * 60))
                    print(outcomes[-1], flush=True)
    findings = [finding for outcome in outcomes for finding in outcome.findings]
    for number, finding in enumerate(findings):
        print(finding)
        if asked.keep is not None:
            asked.keep.mkdir(parents=True, exist_ok=True)
            (asked.keep / f"{number}-{finding.target.replace(' ', '-')}").write_bytes(finding.content)
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
