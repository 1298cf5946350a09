"""Checks of the host itself: packages, shared memory, port, logout, private files. And what a finding is.

Each check is one function from the facts of this host to one finding: what was found, what an engine needs, and what
to do.
"""

from __future__ import annotations

from typing import Literal

from runtime.host_probe import Probe
from runtime.interface import Frozen

Severity = Literal["ok", "info", "warning", "error"]
Fix = Literal["linger", "private-files"]
SHM_NEEDED = 1 << 30
MIB = 1 << 20


class Finding(Frozen):
    """The answer of one check."""

    id: str
    found: str
    expected: str
    severity: Severity
    remedy: str = ""
    """What to do; empty where nothing needs doing."""
    source: str
    """Where the fact was read, and who says what is expected."""
    fix: Fix | None = None
    """What `--fix` can do about it; None: nothing."""

    @classmethod
    def judged(
        cls,
        bad: object,
        *,
        id: str,
        found: str,
        expected: str,
        remedy: str,
        source: str,
        severity: Severity = "warning",
        fix: Fix | None = None,
    ) -> Finding:
        """`severity`, `remedy` and `fix` are for where something is `bad`; else all is ok."""
        if not bad:
            severity, remedy, fix = "ok", "", None
        return cls(
            id=id, found=found, expected=expected, severity=severity, remedy=remedy, source=source, fix=fix
        )


def grammar_backend(probe: Probe) -> Finding:
    """The xgrammar that the installed sglang was made for."""
    have, wanted = probe.packages.versions.get("xgrammar"), probe.packages.xgrammar_wanted
    bad = wanted is not None and (have is None or not _satisfies(have, wanted))
    if wanted is None:
        found = "no sglang here that asks for xgrammar"
    else:
        found = (
            f"xgrammar {have or 'is missing'}; sglang {probe.packages.versions['sglang']} asks for {wanted}"
        )
    return Finding.judged(
        bad,
        id="grammar-backend",
        found=found,
        expected="the xgrammar version that sglang asks for",
        remedy=f"pip install 'xgrammar{wanted}', or start SGLang with --grammar-backend none",
        source="package metadata",
    )


def nvml_package(probe: Probe) -> Finding:
    """The deprecated package that shadows the NVML binding."""
    shadow = probe.packages.versions.get("pynvml")
    return Finding.judged(
        shadow,
        id="nvml-package",
        found=f"the deprecated package pynvml {shadow} is installed"
        if shadow
        else f"nvidia-ml-py {probe.packages.versions.get('nvidia-ml-py', 'is not installed')}",
        expected="nvidia-ml-py alone: pynvml shadows it and warns at import",
        remedy="pip uninstall pynvml && pip install --force-reinstall nvidia-ml-py",
        source="package metadata",
    )


def altered_packages(probe: Probe) -> Finding:
    """Installed files that differ from what their package brought."""
    altered = probe.packages.altered
    by_package: dict[str, list[str]] = {}
    for each in altered:
        by_package.setdefault(f"{each.package} {each.version}", []).append(
            each.path + (" (missing)" if each.missing else "")
        )
    listed = "; ".join(
        f"{package}: {', '.join(paths[:3])}" + (f" and {len(paths) - 3} more" if len(paths) > 3 else "")
        for package, paths in by_package.items()
    )
    rest = (
        f" ({probe.packages.unchecked} files not looked at for lack of time)"
        if probe.packages.unchecked
        else ""
    )
    return Finding.judged(
        altered,
        id="packages-altered",
        found=(listed or "watched packages are as they were installed") + rest,
        expected="no file that differs from its RECORD, or a snapshot that keeps the patch",
        remedy="keep them: ddtree snapshot save; drop them: pip install --force-reinstall --no-deps PACKAGE==VERSION",
        source="SHA-256 of Python files against RECORD of " + ", ".join(sorted(probe.packages.versions)),
    )


def shared_memory_folder(probe: Probe) -> Finding:
    """Room in /dev/shm, through which ranks of one host exchange data."""
    size = probe.shm_bytes
    small = size is not None and size < SHM_NEEDED
    several = len(probe.driver.gpus) > 1
    return Finding(
        id="dev-shm",
        found="n/a: /dev/shm cannot be read" if size is None else f"/dev/shm holds {size // MIB} MiB",
        expected=f"at least {SHM_NEEDED // MIB} MiB where several ranks run on one host",
        severity=("error" if several else "warning") if small else "info" if size is None else "ok",
        remedy="container: --shm-size=16g or --ipc=host; host: sudo mount -o remount,size=16G /dev/shm"
        if small
        else "",
        source="statvfs of /dev/shm; NCCL user guide, shared memory",
    )


def port(probe: Probe) -> Finding:
    """The port a server would take."""
    use = probe.port
    taken = use.busy and not use.ours
    address = f"{use.host}:{use.port}"
    found = f"{address} is free"
    if use.ours:
        found = f"{address} is held by your running ddtree"
    elif taken:
        found = f"{address} is held by another program"
    return Finding.judged(
        taken,
        id="port",
        found=found,
        expected="a free port, or a ddtree of yours on it",
        remedy=f"who holds it: ss -ltnp 'sport = :{use.port}'; or: ddtree serve --port N",
        source="bind",
    )


def logout(probe: Probe) -> Finding:
    """Whether a logout ends what a user runs."""
    login = probe.login
    expected = "services and detached consoles that outlive the session"

    def finding(severity: Severity, found: str, remedy: str = "", fix: Fix | None = None) -> Finding:
        return Finding(
            id="logout",
            found=found,
            expected=expected,
            severity=severity,
            remedy=remedy,
            fix=fix,
            source="/var/lib/systemd/linger, logind.conf KillUserProcesses, installed unit",
        )

    if not login.systemd:
        return finding("ok", "systemd does not run this host: a logout ends no service")
    linger = f"loginctl enable-linger {login.user}"
    if login.user_service and not login.lingers:
        return finding(
            "warning", f"the user service of {login.user} ends at logout: no linger", linger, "linger"
        )
    if login.kills_user_processes and not login.lingers:
        return finding(
            "warning",
            f"KillUserProcesses is on: tmux and a detached console of {login.user} end at logout",
            f"{linger}, and start it with: systemd-run --scope --user tmux",
            "linger",
        )
    held = "lingers" if login.lingers else "does not linger, has no user service"
    return finding(
        "ok", f"{login.user} {held}; KillUserProcesses {'on' if login.kills_user_processes else 'off'}"
    )


def private_files(probe: Probe) -> Finding:
    """Key and instance files that others may read."""
    loose = probe.loose_files
    return Finding.judged(
        loose,
        id="private-files",
        found=f"others may read {', '.join(loose)}"
        if loose
        else "keys and instance files are readable by you only",
        expected="mode 0600",
        remedy=f"chmod 600 {' '.join(loose)}; where others use this host, delete the key and restart",
        severity="error",
        source="file modes in the runtime folder",
        fix="private-files",
    )


def _satisfies(version: str, wanted: str) -> bool:
    from packaging.specifiers import InvalidSpecifier, SpecifierSet

    try:
        return SpecifierSet(wanted).contains(version, prereleases=True)
    except InvalidSpecifier:
        return True
