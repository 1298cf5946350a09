"""What was changed in installed packages: every file compared with its wheel's RECORD.

A package from a wheel is described by its changed, added and missing files; an editable or source install by its
repository's state. Nothing of a package is imported.
"""

from __future__ import annotations

import os
import stat
import subprocess
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from snapshots import installed
from snapshots.content import PackageState, PatchedFile, digest
from snapshots.hashes import HashCache
from snapshots.installed import Elsewhere, Installed
from snapshots.originals import Originals

DEFAULT_PACKAGES = ("sglang", "sglang-kernel", "sgl-kernel", "flashinfer-python", "transformers")
MAX_CONTENT_BYTES = 16 << 20
"""A larger file is listed with its hash and not kept."""
MAX_DIFF_CHARS = 1 << 20
GIT_SECONDS = 20.0


@dataclass(frozen=True)
class Examined:
    """What was found: one state a package, and the files that are not as their wheels have them."""

    packages: tuple[PackageState, ...] = ()
    patches: tuple[PatchedFile, ...] = ()


def capture(
    packages: Iterable[str] = DEFAULT_PACKAGES,
    *,
    site_packages: Path | None = None,
    originals: Originals | None = None,
    hashes: HashCache | None = None,
) -> tuple[PatchedFile, ...]:
    """The patched files of `examine`."""
    return examine(packages, site_packages=site_packages, originals=originals, hashes=hashes).patches


def examine(
    packages: Iterable[str] = DEFAULT_PACKAGES,
    *,
    site_packages: Path | None = None,
    originals: Originals | None = None,
    hashes: HashCache | None = None,
) -> Examined:
    """Compares installed packages with what was installed.

    Args:
        packages: names of distributions; one that is not installed is "absent".
        site_packages: of another environment than this interpreter's.
        originals: where the wheels' own contents come from; by default downloads the wheel where files were changed.
    """
    cache, source = hashes or HashCache(), originals or Originals()
    states: list[PackageState] = []
    patches: list[PatchedFile] = []
    for name in dict.fromkeys(packages):
        package = installed.find(name, site_packages)
        if package is None:
            states.append(PackageState(package=name, install="absent"))
            continue
        found = _compared(package, cache) if package.install != "editable" else ()
        states.append(_state(package, found))
        patches += _with_originals(package, found, source)
    cache.save()
    return Examined(tuple(states), tuple(patches))


def examine_all(
    packages: Iterable[str],
    sglang: Elsewhere | None,
    *,
    originals: Originals | None = None,
    hashes: HashCache | None = None,
) -> Examined:
    """`examine` for the packages beside ddtree, and again for those in SGLang's own environment where there is one."""
    names = tuple(packages)
    own = examine(names, originals=originals, hashes=hashes)
    if sglang is None:
        return own
    there = examine(names, site_packages=sglang.site_packages, originals=originals, hashes=hashes)
    mark = {"environment": "sglang"}
    return Examined(
        (*own.packages, *(each.model_copy(update=mark) for each in there.packages)),
        (*own.patches, *(each.model_copy(update=mark) for each in there.patches)),
    )


def _compared(package: Installed, cache: HashCache) -> tuple[PatchedFile, ...]:
    """Files that differ from RECORD, in order of their paths, without their originals."""
    found: list[PatchedFile] = []
    site = str(package.site_packages.absolute())
    for path, recorded in package.compared.items():
        file = f"{site}/{path}"
        if not os.path.lexists(file):
            found.append(_patch(package, path, "missing", original_sha256=recorded))
        elif os.path.islink(file) or _hash(file, cache) != recorded:
            found.append(_patch(package, path, "changed", original_sha256=recorded))
    if package.recorded:
        found += [_patch(package, path, "added") for path in _added(package)]
    return tuple(sorted(found, key=lambda each: each.path))


def _added(package: Installed) -> set[str]:
    """Files in the package's folders that no installed distribution has in its RECORD."""
    there = {path for top in package.folders for path in installed.walk(package.site_packages, top)}
    extra = {path for path in there - package.recorded if path.isprintable()}
    return extra - installed.paths_of_others(package, extra) if extra else extra


def _hash(file: str, cache: HashCache) -> str | None:
    try:
        return cache.sha256(file)
    except OSError:
        return None


def _patch(package: Installed, path: str, kind: str, original_sha256: str | None = None) -> PatchedFile:
    """A patched file with its content, unless it is too large, unreadable, or no plain file."""
    content, mode = None, 0o644
    if kind != "missing":
        content, mode = _content(package.site_packages / path)
    return PatchedFile.model_validate(
        {
            "package": package.name,
            "version": package.version,
            "path": path,
            "kind": kind,
            "content": content,
            "sha256": digest(content) if content is not None else None,
            "original_sha256": original_sha256,
            "mode": mode,
        }
    )


def _content(file: Path) -> tuple[bytes | None, int]:
    try:
        state = file.lstat()
        if not stat.S_ISREG(state.st_mode) or state.st_size > MAX_CONTENT_BYTES:
            return None, 0o644
        return file.read_bytes(), stat.S_IMODE(state.st_mode)
    except OSError:
        return None, 0o644


def _with_originals(
    package: Installed, patches: tuple[PatchedFile, ...], source: Originals
) -> Iterator[PatchedFile]:
    wanted = {each.original_sha256 for each in patches if each.original_sha256 is not None}
    found = source.find(package.name, package.version, wanted) if wanted else {}
    for patch in patches:
        yield patch.model_copy(update={"original": found.get(patch.original_sha256 or "")})


def _state(package: Installed, patches: tuple[PatchedFile, ...]) -> PackageState:
    compared = len(package.compared) if package.install != "editable" else 0
    describe, changes = _repository(package.source) if package.source is not None else (None, "")
    return PackageState(
        package=package.name,
        version=package.version,
        install=package.install,
        files=compared,
        vanilla=compared - sum(each.kind != "added" for each in patches),
        describe=describe or package.commit,
        diff=changes,
    )


def _repository(folder: Path) -> tuple[str | None, str]:
    """`git describe` of a source folder, and what differs from its commit; new files are named at the end."""
    describe = _git(folder, "describe", "--always", "--tags", "--dirty")
    if describe is None:
        return None, ""
    changes = _git(folder, "diff", "HEAD", "--no-ext-diff", "--no-textconv", "--no-color", "--", ".") or ""
    fresh = _git(folder, "ls-files", "--others", "--exclude-standard", "--", ".") or ""
    if len(changes) > MAX_DIFF_CHARS:
        changes = changes[:MAX_DIFF_CHARS] + "\n(cut here: the diff is longer)\n"
    return describe.strip() or None, changes + "".join(f"untracked: {each}\n" for each in fresh.splitlines())


def _git(folder: Path, *arguments: str) -> str | None:
    """What git says in a folder that is not ours: no inherited repository, no hooks, no writing."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    env |= {"GIT_OPTIONAL_LOCKS": "0", "LC_ALL": "C"}
    command = ["git", "-c", "core.fsmonitor=false", "-C", str(folder), *arguments]
    try:
        done = subprocess.run(
            command, env=env, stdin=subprocess.DEVNULL, capture_output=True, timeout=GIT_SECONDS
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.decode("utf-8", "replace") if done.returncode == 0 else None
