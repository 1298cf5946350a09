"""What a snapshot holds: one working configuration with its environment, figures, patched files and service units.

Frozen values of plain types. None means "not known" and is written "n/a"; it is never 0. `snapshots.codec` turns a
`Snapshot` into the files of a commit and back.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

UNKNOWN = "n/a"
EnvironmentName = Literal["", "sglang"]
"""Where a package is installed: beside ddtree, or in the virtual environment that SGLang has for itself."""
REDACTED = "<redacted by ddtree>"
"""Stands in a stored file where a secret stood; never written into a live file."""


class NoteRefused(ValueError):
    """A note or label that git cannot keep as it is."""

    exit_code = 2


class Frozen(BaseModel):
    """Base of everything a snapshot holds."""

    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_bytes="base64", val_json_bytes="base64")


def _known(text: Any) -> Any:
    return None if text == UNKNOWN else text


Known = Annotated[str | None, BeforeValidator(_known)]
"""Text, or None where it is not known; the word "n/a" is not known."""


class Gpu(Frozen):
    """One GPU in PCI order."""

    index: int
    name: Known = None
    uuid: Known = None
    bus_id: Known = None
    memory_bytes: int | None = None
    compute_capability: Known = None
    """As "9.0"."""
    pcie_generation_now: int | None = None
    pcie_generation_possible: int | None = None
    pcie_width_now: int | None = None
    """Lanes."""
    pcie_width_possible: int | None = None
    numa_node: int | None = None


class GpuLink(Frozen):
    """How two GPUs reach each other."""

    first: int
    second: int
    kind: str
    """As nvidia-smi names it: "NV18", "PIX", "PXB", "PHB", "NODE", "SYS"."""


class Hardware(Frozen):
    """The host's processors, memory and GPUs."""

    machine: Known = None
    """Instruction set, as "x86_64"."""
    cpu: Known = None
    cpu_count: int | None = None
    numa_nodes: int | None = None
    memory_bytes: int | None = None
    driver: Known = None
    driver_cuda: Known = None
    """Highest CUDA version the driver serves."""
    gpus: tuple[Gpu, ...] = ()
    gpu_note: Known = None
    """Why there is no GPU here, in words."""
    links: tuple[GpuLink, ...] = ()


class Toolkit(Frozen):
    """One CUDA toolkit on the host."""

    path: str
    nvcc: Known = None


class Toolkits(Frozen):
    """The CUDA toolkits found, and the one a build would use."""

    found: tuple[Toolkit, ...] = ()
    in_use: Known = None
    """Folder of the toolkit in use."""
    chosen_by: Known = None
    """"CUDA_HOME" or "PATH"."""


class Software(Frozen):
    """Versions of what runs."""

    python: Known = None
    kernel: Known = None
    os: Known = None
    container: Known = None
    packages: dict[str, Known] = Field(default_factory=dict)
    """Distribution to version; None = not installed."""


class ModelFile(Frozen):
    """One file of the target or the drafter."""

    role: Literal["target", "drafter"]
    path: str
    """Relative to the model's folder."""
    size: int
    """Bytes."""
    sha256: Known = None


class Environment(Frozen):
    """What the configuration ran on."""

    hardware: Hardware = Hardware()
    toolkits: Toolkits = Toolkits()
    software: Software = Software()
    sglang: Software | None = None
    """What SGLang's own virtual environment holds; None where there is none."""
    variables: dict[str, str] = Field(default_factory=dict)
    """Environment variables that matter; a secret's value is `REDACTED`."""
    files: tuple[ModelFile, ...] = ()


class Figure(Frozen):
    """One measured row with the conditions it holds under."""

    source: Literal["live", "bench", "baseline", "probe"]
    """Other clients' traffic, a controlled bench, the baseline of start-up, or the bench after a rollback."""
    mode: str
    tree_budget: int | None = None
    temperature: float | None = None
    concurrency: int | None = None
    requests: int | None = None
    output_tokens: int | None = None
    window_s: float | None = None
    """Time span the row covers, in seconds."""
    tok_s: float | None = None
    """Output tokens per second of one request, median over the requests."""
    total_tok_s: float | None = None
    """Output tokens per second over all requests together."""
    accept_length: float | None = None
    """Tokens per decode round, bonus token included."""
    ttft_s: float | None = None
    """Median time to first token, seconds."""
    tpot_s: float | None = None
    """Median time per output token after the first, seconds."""
    measured_at_s: float | None = None
    """Unix time."""
    conditions: str = ""

    @property
    def key(self) -> tuple[str, int | None, float | None, int | None]:
        """Rows of two snapshots with the same key may be compared."""
        return self.mode, self.tree_budget, self.temperature, self.concurrency


class Measurements(Frozen):
    """Figures and, where there are none, why."""

    state: str = "not running, not measured"
    results: tuple[Figure, ...] = ()


class PatchedFile(Frozen):
    """A file of an installed package that differs from its wheel's RECORD."""

    package: str
    version: str
    path: str
    """Relative to site-packages, "/" between folders."""
    kind: Literal["changed", "added", "missing"]
    content: bytes | None = None
    """The file as it is; None where it is missing."""
    original: bytes | None = None
    """The file as the wheel has it; None where it was added or the wheel is out of reach."""
    sha256: Known = None
    """Of `content`, hexadecimal."""
    original_sha256: Known = None
    """By RECORD, hexadecimal; None where it was added."""
    mode: int = 0o644
    environment: EnvironmentName = ""


class PackageState(Frozen):
    """What was found when an installed package was compared with its RECORD."""

    package: str
    version: Known = None
    install: Literal["wheel", "editable", "source", "absent"]
    files: int = 0
    """Files compared."""
    vanilla: int = 0
    """Files as the wheel has them."""
    describe: Known = None
    """`git describe` of an editable or source install."""
    diff: str = ""
    """Uncommitted changes of an editable or source install, as a unified diff."""
    environment: EnvironmentName = ""


class UnitFile(Frozen):
    """A service unit as it stands on the host."""

    name: str
    path: str
    """Absolute."""
    content: str
    """Secrets are replaced by `REDACTED`."""


class HostIdentity(Frozen):
    """Which host it was taken on, and what class of hardware that is."""

    name: str = UNKNOWN
    hardware: str = UNKNOWN
    """As "8 x NVIDIA H200"; figures hold for this class."""


def _plain(value: Any) -> Any:
    """`value` as TOML can hold it; None is "auto", as everywhere in a configuration."""
    if value is None:
        return "auto"
    if isinstance(value, Mapping):
        return {str(key): _plain(value[key]) for key in sorted(value, key=str)}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return value


def _note(text: str) -> str:
    if "\0" in text:
        raise NoteRefused(f"note: a NUL character at place {text.index(chr(0)) + 1}; remove it")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise NoteRefused(f"note: not valid UTF-8 at place {error.start + 1}; save it as UTF-8") from None
    return text


def _label(text: str) -> str:
    if text != text.strip() or any(ord(char) < 32 or ord(char) == 127 for char in text):
        raise NoteRefused(f"label {text!r}: must be one line without spaces at its ends")
    if len(text) > 120:
        raise NoteRefused(
            f"label {text[:20]!r}...: has {len(text)} characters; at most 120, the rest is for the note"
        )
    return _note(text)


class Snapshot(Frozen):
    """One working configuration."""

    config: Annotated[dict[str, Any], AfterValidator(_plain)]
    """Every setting, plain values; "auto" where it is chosen at start-up."""
    environment: Environment = Environment()
    measurements: Measurements = Measurements()
    packages: tuple[PackageState, ...] = ()
    patches: tuple[PatchedFile, ...] = ()
    services: tuple[UnitFile, ...] = ()
    note: str = ""
    """The operator's words, kept byte for byte; see `checked_note`."""
    label: str = ""
    host: HostIdentity = HostIdentity()
    taken_at_s: float = 0.0
    """Unix time."""


def checked_note(text: str) -> str:
    """`text` as a note; raises NoteRefused for what git cannot keep (NUL, invalid UTF-8). Nothing is normalised."""
    return _note(text)


def checked_label(text: str) -> str:
    """`text` as a label: one line, at most 120 characters; raises NoteRefused."""
    return _label(text)


def digest(content: bytes) -> str:
    """SHA-256 in hexadecimal."""
    return hashlib.sha256(content).hexdigest()


def hardware_class(hardware: Hardware) -> str:
    """The class of hardware that figures hold for: GPUs by name and count, else the CPU and its cores."""
    if hardware.gpus:
        names = [gpu.name or UNKNOWN for gpu in hardware.gpus]
        return " + ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names))
    if hardware.cpu is None and hardware.cpu_count is None:
        return UNKNOWN
    cores = f", {hardware.cpu_count} cores" if hardware.cpu_count else ""
    return f"{hardware.cpu or hardware.machine or UNKNOWN}{cores}"
