"""`ddtree doctor`: runs every check over the facts of this host, and does what is safe and can be undone."""

from __future__ import annotations

import subprocess
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

from runtime import doctor_checks, doctor_gpu_checks
from runtime.doctor_checks import Finding
from runtime.host_probe import Probe
from runtime.interface import RuntimeFault

CHECKS: tuple[Callable[[Probe], Finding], ...] = (
    doctor_gpu_checks.gpu_driver,
    doctor_gpu_checks.gpu_mig,
    doctor_gpu_checks.flashinfer_toolkit,
    doctor_gpu_checks.torch_build,
    doctor_gpu_checks.attention_sm120,
    doctor_gpu_checks.shared_memory_sm120,
    doctor_gpu_checks.pcie_link,
    doctor_gpu_checks.peer_to_peer,
    doctor_gpu_checks.numa_split,
    doctor_gpu_checks.throttling,
    doctor_checks.grammar_backend,
    doctor_checks.nvml_package,
    doctor_checks.altered_packages,
    doctor_checks.shared_memory_folder,
    doctor_checks.port,
    doctor_checks.logout,
    doctor_checks.private_files,
)
ORDER = ("error", "warning", "info", "ok")
FIX_S = 10.0
"""Longest time one repair may take."""


class FixFailed(RuntimeFault):
    """A repair that did not work; the finding stands."""

    exit_code = 1


def examine(probe: Probe) -> tuple[Finding, ...]:
    """All findings, the worst first."""
    findings = [check(probe) for check in CHECKS]
    return tuple(sorted(findings, key=lambda each: ORDER.index(each.severity)))


def exit_code(findings: tuple[Finding, ...]) -> int:
    return 1 if any(each.severity == "error" for each in findings) else 0


def to_json(findings: tuple[Finding, ...], fixed: tuple[str, ...] = ()) -> dict[str, Any]:
    counts = {severity: sum(each.severity == severity for each in findings) for severity in ORDER}
    return {
        "checks": [each.model_dump(mode="json") for each in findings],
        "counts": counts,
        "fixed": list(fixed),
    }


def lines(findings: tuple[Finding, ...], width: int = 100) -> list[str]:
    """The findings for people: one paragraph each, with what to do below."""
    text = []
    for each in findings:
        head = f"{each.severity:<8}{each.id:<20}"
        text += textwrap.wrap(each.found, max(width, 60), initial_indent=head, subsequent_indent=" " * 28)
        if each.severity in ("error", "warning"):
            text += _indented(f"expected: {each.expected}", width)
        if each.remedy:
            text += _indented(f"do: {each.remedy}", width)
    troubles = sum(each.severity in ("error", "warning") for each in findings)
    text.append(f"{len(findings)} checks, {troubles or 'none'} to look at")
    return text


def _indented(sentence: str, width: int) -> list[str]:
    return textwrap.wrap(
        sentence, max(width, 60), initial_indent=" " * 28, subsequent_indent=" " * 30, break_long_words=False
    )


def fix(probe: Probe, findings: tuple[Finding, ...]) -> tuple[str, ...]:
    """Does what the findings name as safe; returns a line for each act, with how to undo it. Raises FixFailed."""
    wanted = {each.fix for each in findings if each.fix is not None}
    done = []
    if "private-files" in wanted:
        for name in probe.loose_files:
            mode = Path(name).stat().st_mode & 0o7777
            Path(name).chmod(0o600)
            done.append(f"{name} is readable by you only (undo: chmod {mode:o} {name})")
    if "linger" in wanted:
        _command("loginctl", "enable-linger", probe.login.user)
        done.append(f"{probe.login.user} lingers (undo: loginctl disable-linger {probe.login.user})")
    return tuple(done)


def _command(*words: str) -> None:
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=FIX_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise FixFailed(f"{' '.join(words)}: {error}") from None
    if done.returncode:
        said = next((line for line in done.stderr.splitlines() if line.strip()), f"exit {done.returncode}")
        raise FixFailed(f"{' '.join(words)}: {said.strip()}")
