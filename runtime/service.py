"""The systemd unit of `ddtree serve`: its text, and installing, removing and asking after it.

A unit is ours if it carries the mark in its first line; one that does not is never overwritten or removed.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from runtime.interface import RuntimeFault

Scope = Literal["user", "system"]
UNIT = "ddtree.service"
MARK = "# Written by ddtree service install; changes are lost when it is installed again."
WATCHDOG_S = 120
STOP_MARGIN_S = 30
"""Seconds beyond the drain time until a service that does not stop is killed."""
COMMAND_S = 600.0
"""A start waits until the model is loaded, a stop until requests are drained."""
SYSTEM_RUNTIME = "/run/ddtree"

Run = Callable[[Sequence[str]], "subprocess.CompletedProcess[str]"]


class ServiceRefused(RuntimeFault):
    """What is asked for cannot be done on this host, or would touch what is not ours."""

    exit_code = 3


class ServiceFailed(RuntimeFault):
    """systemd did not do what it was asked."""

    exit_code = 1


_SYSTEM_FOLDERS = (
    ("CacheDirectory", "ddtree"),
    ("StateDirectory", "ddtree"),
    ("RuntimeDirectory", "ddtree"),
    ("RuntimeDirectoryMode", "0700"),
    ("Environment", f"XDG_RUNTIME_DIR={SYSTEM_RUNTIME}"),
)


@dataclass(frozen=True)
class UnitPlan:
    """What the unit is made from."""

    scope: Scope
    serve_options: tuple[str, ...]
    drain_seconds: float
    cache: Path
    state: Path
    store: Path
    environment_file: Path
    user: str | None = None
    """Who a system service runs as."""


def unit_text(plan: UnitPlan) -> str:
    """The unit file."""
    command = [sys.executable, "-m", "console", "serve", *plan.serve_options]
    command += ["--drain-seconds", f"{plan.drain_seconds:g}"]
    system = plan.scope == "system"
    writable = list(dict.fromkeys(_path(each) for each in (plan.cache, plan.state, plan.store)))
    if not system:
        writable.append("-%t")  # where a running instance leaves word of itself
    sections: list[tuple[str, list[tuple[str, str]]]] = [
        (
            "Unit",
            [
                ("Description", "DDTree speculative-decoding server"),
                ("After", "network-online.target" if system else "default.target"),
                *([("Wants", "network-online.target")] if system else []),
                ("StartLimitIntervalSec", "600"),
                ("StartLimitBurst", "5"),
            ],
        ),
        (
            "Service",
            [
                ("Type", "notify"),
                ("NotifyAccess", "main"),
                *([("User", plan.user)] if system and plan.user else []),
                ("ExecStart", " ".join(map(_argument, command))),
                ("ExecReload", "/bin/kill -HUP $MAINPID"),
                ("EnvironmentFile", f"-{_whole(str(plan.environment_file))}"),
                ("Environment", _word(f"XDG_CACHE_HOME={plan.cache.parent}")),
                ("Environment", _word(f"XDG_STATE_HOME={plan.state.parent}")),
                ("Environment", _word(f"XDG_DATA_HOME={plan.store.parent}")),
                # Compilers of kernels keep their results in the home folder, which is read-only here.
                ("Environment", _word(f"TRITON_CACHE_DIR={plan.cache / 'triton'}")),
                ("Environment", _word(f"CUDA_CACHE_PATH={plan.cache / 'cuda'}")),
                *(_SYSTEM_FOLDERS if system else ()),
                ("Restart", "on-failure"),
                ("RestartSec", "5"),
                # A wrong configuration or a refusal is the same at the next try.
                ("RestartPreventExitStatus", "2 3"),
                ("TimeoutStartSec", "infinity"),
                ("TimeoutStopSec", f"{plan.drain_seconds + STOP_MARGIN_S:g}"),
                ("WatchdogSec", str(WATCHDOG_S)),
                ("KillMode", "mixed"),
                ("LimitMEMLOCK", "infinity"),
                ("LimitNOFILE", "65536"),
                ("UMask", "0077"),
                *_hardening(" ".join(writable), system),
            ],
        ),
        ("Install", [("WantedBy", "multi-user.target" if system else "default.target")]),
    ]
    blocks = (
        "\n".join([f"[{name}]", *(f"{key}={value}" for key, value in lines)]) for name, lines in sections
    )
    return MARK + "\n" + "\n\n".join(blocks) + "\n"


def _hardening(writable: str, system: bool) -> list[tuple[str, str]]:
    """What a server needs nothing of. GPUs stay reachable, and so does memory that compilers of kernels execute."""
    common = [
        ("NoNewPrivileges", "true"),
        ("ProtectSystem", "strict"),
        ("ProtectHome", "read-only"),
        ("ReadWritePaths", writable),
        ("PrivateTmp", "true"),
        ("LockPersonality", "true"),
        ("RestrictRealtime", "true"),
        ("RestrictSUIDSGID", "true"),
        ("RestrictAddressFamilies", "AF_UNIX AF_INET AF_INET6 AF_NETLINK"),
        ("SystemCallArchitectures", "native"),
    ]
    kernel = [
        ("ProtectControlGroups", "true"),
        ("ProtectKernelLogs", "true"),
        ("ProtectKernelModules", "true"),
        ("ProtectKernelTunables", "true"),
        ("ProtectClock", "true"),
        ("ProtectHostname", "true"),
        ("CapabilityBoundingSet", ""),
    ]
    return common + (kernel if system else [])


def unit_path(scope: Scope, env: Mapping[str, str] = os.environ) -> Path:
    """Where the unit of this scope lies."""
    if scope == "system":
        return Path("/etc/systemd/system") / UNIT
    home = Path(env.get("XDG_CONFIG_HOME", ""))
    return (home if home.is_absolute() else Path.home() / ".config") / "systemd" / "user" / UNIT


def default_plan(
    scope: Scope, serve_options: tuple[str, ...], drain_seconds: float, user: str | None
) -> UnitPlan:
    """Folders by scope: the operator's own for a user service, those under /var for a system service."""
    if scope == "system":
        folders = [Path("/var/cache/ddtree"), Path("/var/lib/ddtree"), Path("/var/lib/ddtree")]
        environment = Path("/etc/ddtree/environment")
    else:
        import platformdirs

        folders = [
            platformdirs.user_cache_path("ddtree"),
            platformdirs.user_state_path("ddtree"),
            platformdirs.user_data_path("ddtree"),
        ]
        environment = platformdirs.user_config_path("ddtree") / "environment"
    cache, state, store = folders
    return UnitPlan(scope, serve_options, drain_seconds, cache, state, store, environment, user)


class Service:
    """The unit of one scope on this host."""

    def __init__(self, scope: Scope, path: Path | None = None, run: Run | None = None) -> None:
        self.scope: Scope = scope
        self.path = path or unit_path(scope)
        self._run = run or _systemctl(scope)

    def install(self, plan: UnitPlan) -> list[str]:
        """Writes the unit, makes its folders and has systemd start it at boot; returns notes for the operator.

        Raises:
            ServiceRefused: there is no systemd, or a unit of that name that is not ours.
            ServiceFailed: systemd refused it.
        """
        self._check_ours("overwritten")
        self._do("daemon-reload")  # before anything is written: is there a systemd at all?
        if self.scope == "user":
            for folder in (plan.cache, plan.state, plan.store):
                folder.mkdir(parents=True, exist_ok=True)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        draft = self.path.with_name(f".{self.path.name}.draft")
        draft.write_text(unit_text(plan), encoding="utf-8")
        draft.replace(self.path)
        self._do("daemon-reload")
        self._do("enable", UNIT)
        notes = (
            []
            if plan.environment_file.exists()
            else [f"keys and DDTREE_* settings go into {plan.environment_file}"]
        )
        if self.scope == "system":
            notes.append(f"steer it with: XDG_RUNTIME_DIR={SYSTEM_RUNTIME} ddtree ctl status")
        return notes + self.linger_notes()

    def uninstall(self) -> None:
        """Stops the service, and removes its unit."""
        if not self.path.exists():
            raise ServiceRefused(f"{self.path} does not exist: no service is installed for this {self.scope}")
        self._check_ours("removed")
        self._do("disable", "--now", UNIT)
        self.path.unlink()
        self._do("daemon-reload")

    def act(self, verb: Literal["start", "stop", "restart"]) -> None:
        """Has systemd do it; returns once it is done."""
        self._check_installed()
        self._do(verb, UNIT)

    def status(self) -> dict[str, str | int | bool | None]:
        """What systemd says of the unit; None for what it does not tell."""
        names = ("ActiveState", "SubState", "StatusText", "MainPID", "NRestarts", "Result", "UnitFileState")
        done = self._run(["show", UNIT, "--property", ",".join(names)])
        _check(["show", UNIT], done)
        told = dict(line.split("=", 1) for line in done.stdout.splitlines() if "=" in line)
        pid = int(told.get("MainPID") or 0)
        return {
            "unit": UNIT,
            "path": str(self.path),
            "installed": self.path.exists(),
            "ours": self.path.exists() and self._ours(),
            "active": told.get("ActiveState") or None,
            "sub_state": told.get("SubState") or None,
            "status": told.get("StatusText") or None,
            "pid": pid or None,
            "restarts": int(told["NRestarts"]) if told.get("NRestarts", "").isdecimal() else None,
            "result": told.get("Result") or None,
            "at_boot": told.get("UnitFileState") or None,
        }

    def linger_notes(self) -> list[str]:
        """For a user service: the one command without which it ends with the operator's last session."""
        if self.scope != "user" or lingers():
            return []
        return [f"it ends when you log out; keep it with: loginctl enable-linger {_user_name()}"]

    def _ours(self) -> bool:
        return self.path.read_text(encoding="utf-8", errors="replace").startswith(MARK)

    def _check_ours(self, what: str) -> None:
        if self.path.exists() and not self._ours():
            raise ServiceRefused(
                f"{self.path} was not written by ddtree and is not {what}; move it away first"
            )

    def _check_installed(self) -> None:
        if not self.path.exists():
            raise ServiceRefused(
                f"{self.path} does not exist; install it with: ddtree service install --{self.scope}"
            )

    def _do(self, *arguments: str) -> None:
        _check(arguments, self._run(arguments))


def _check(arguments: Sequence[str], done: subprocess.CompletedProcess[str]) -> None:
    if done.returncode == 0:
        return
    said = _first_line(done.stderr) or "failed"
    if any(sign in done.stderr for sign in ("not been booted with systemd", "connect to bus")):
        raise ServiceRefused(
            f"no systemd answers here ({said}): run 'ddtree serve' under the supervisor there is"
        )
    raise ServiceFailed(f"systemctl {' '.join(arguments)}: {said}")


def lingers(name: str | None = None) -> bool:
    """Whether a user's services go on without a session."""
    return (Path("/var/lib/systemd/linger") / (name or _user_name())).exists()


def _systemctl(scope: Scope) -> Run:
    program = shutil.which("systemctl")
    if program is None:
        raise ServiceRefused("systemctl is not on this host: run 'ddtree serve' under the supervisor it has")

    def run(arguments: Sequence[str]) -> subprocess.CompletedProcess[str]:
        flags = ["--user"] if scope == "user" else []
        try:
            return subprocess.run(
                [program, *flags, "--no-pager", *arguments], capture_output=True, text=True, timeout=COMMAND_S
            )
        except subprocess.TimeoutExpired:
            raise ServiceFailed(
                f"systemctl {' '.join(arguments)}: no answer within {COMMAND_S:g} s"
            ) from None

    return run


def _user_name() -> str:
    import pwd

    return pwd.getpwuid(os.geteuid()).pw_name


def _first_line(text: str) -> str:
    return next((line.strip() for line in text.splitlines() if line.strip()), "")


def _argument(text: str) -> str:
    """One word of a command line in a unit, where $ would name a variable."""
    return _word(text.replace("$", "$$"))


def _path(path: Path) -> str:
    return _word(str(path))


def _word(text: str) -> str:
    """One word of a list in a unit: quoted where need be, % standing for itself."""
    escaped = _whole(text.replace("\\", "\\\\").replace('"', '\\"'))
    return escaped if re.fullmatch(r"[A-Za-z0-9_@%+=:,./-]+", text) else f'"{escaped}"'


def _whole(text: str) -> str:
    """A value that is no list and has no quotes, % standing for itself."""
    return text.replace("%", "%%")
