"""Changed, added and missing files of an installed package: found exactly, put back exactly."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from installed_package import FILES, NAME, VERSION, build_wheel, contents, copy_environment
from installed_package import make_environment as environment_with
from installed_package import patch as patch_files

from snapshots import restore, rollback, saving
from snapshots.codec import patch_diff
from snapshots.content import PackageState, PatchedFile
from snapshots.git import StoreRefused
from snapshots.hashes import HashCache
from snapshots.journal import FileWrite, Journal, check_target
from snapshots.originals import Originals
from snapshots.patches import Examined, examine
from snapshots.restore import RestoreFailed, RestoreRefused
from snapshots.rollback import RollbackOptions
from snapshots.saving import SaveRequest
from snapshots.store import Store

KILL_POINTS = 200 if os.environ.get("DDTREE_LONG") else 30


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheels")
    build_wheel(folder)
    return folder


@pytest.fixture(scope="module")
def clean(tmp_path_factory: pytest.TempPathFactory, wheels: Path) -> Path:
    folder = tmp_path_factory.mktemp("clean") / "environment"
    environment_with(folder, next(wheels.glob("*.whl")))
    return folder


class Place:
    """One environment to be patched, with caches and a journal of its own."""

    def __init__(self, clean: Path, folder: Path) -> None:
        self.environment = folder / "environment"
        self.site = copy_environment(clean, self.environment)
        self.folder = folder
        self.journal = Journal(folder / "journal")
        self.hashes = HashCache(folder / "hashes.json")

    def originals(self, fetch: bool = False, earlier=None) -> Originals:
        return Originals(self.folder / "originals", earlier, fetch)

    def examine(self, **options) -> Examined:
        return examine(
            [NAME], site_packages=self.site, hashes=self.hashes, originals=self.originals(**options)
        )

    def plan(self, wanted: Examined, **options) -> restore.RestorePlan:
        return restore.plan(
            wanted.packages,
            wanted.patches,
            site_packages=self.site,
            hashes=self.hashes,
            originals=self.originals(**options),
        )

    def run(self, wanted: Examined, dry_run: bool = False, **options) -> restore.RestoreReport:
        return restore.run(self.plan(wanted, **options), dry_run, journal=self.journal)


@pytest.fixture
def place(clean: Path, tmp_path: Path) -> Place:
    return Place(clean, tmp_path)


@pytest.fixture
def reachable(wheels: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """pip finds the wheel in a folder."""
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))


def test_a_package_as_installed_is_vanilla_by_count(place: Place) -> None:
    found = place.examine()
    assert found.patches == ()
    assert found.packages == (
        PackageState(package=NAME, version=VERSION, install="wheel", files=len(FILES), vanilla=len(FILES)),
    )


def test_exactly_the_patched_files_are_listed_with_the_right_diff(place: Place, reachable: None) -> None:
    patch_files(place.site)
    found = place.examine(fetch=True)
    assert {(each.path, each.kind) for each in found.patches} == {
        ("steps/core.py", "changed"),
        ("steps/tree.py", "changed"),
        ("steps/data.bin", "changed"),
        ("steps/ops/extra.py", "added"),
        ("steps/ops/mask.py", "missing"),
    }
    assert found.packages[0].vanilla == len(FILES) - 4
    diffs = {each.path: patch_diff(each) for each in found.patches}
    assert diffs["steps/core.py"] == (
        "--- a/steps/core.py\n+++ b/steps/core.py\n@@ -1,5 +1,5 @@\n def width():\n-    return 8\n"
        "+    return 12\n \n \n def depth():\n"
    )
    assert "+FAST = True\n\\ No newline at end of file\n" in diffs["steps/tree.py"]
    assert diffs["steps/data.bin"] == "Binary files a/steps/data.bin and b/steps/data.bin differ\n"
    assert "--- /dev/null\n+++ b/steps/ops/extra.py\n" in diffs["steps/ops/extra.py"]
    assert "+++ /dev/null\n" in diffs["steps/ops/mask.py"]
    applied = place.folder / "applied"
    copy_environment_files(applied)
    for path in ("steps/core.py", "steps/tree.py", "steps/ops/extra.py", "steps/ops/mask.py"):
        done = subprocess.run(
            ["git", "apply", "--unsafe-paths", "-"], cwd=applied, input=diffs[path].encode(), check=False
        )
        assert done.returncode == 0, path
    expected = contents(place.site) | {"steps/data.bin": FILES["steps/data.bin"].encode()}
    assert contents(applied) == expected


def copy_environment_files(folder: Path) -> None:
    for path, text in FILES.items():
        file = folder / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(text.encode())


def test_without_the_wheel_originals_come_from_an_earlier_snapshot_or_are_unknown(place: Place) -> None:
    patch_files(place.site)
    found = place.examine()
    changed = next(each for each in found.patches if each.path == "steps/core.py")
    assert changed.original is None and patch_diff(changed) is None
    known = {changed.original_sha256: FILES["steps/core.py"].encode()}
    again = place.examine(earlier=known.get)
    assert "-    return 8" in (
        patch_diff(next(each for each in again.patches if each.path == changed.path)) or ""
    )
    lying = place.examine(earlier=lambda digest: b"something else")
    assert all(each.original is None for each in lying.patches)


def test_a_file_of_another_package_in_the_same_folder_is_not_added_by_this_one(place: Place) -> None:
    (place.site / "steps/plugin.py").write_text("x = 1\n")
    info = place.site / "steps_plugin-1.0.dist-info"
    info.mkdir()
    (info / "RECORD").write_text("steps/plugin.py,,\n")
    assert place.examine().patches == ()


def test_rolling_to_another_patch_state_and_back_is_exact(place: Place, reachable: None) -> None:
    vanilla, vanilla_files = place.examine(), contents(place.site)
    patch_files(place.site)
    patched, patched_files = place.examine(fetch=True), contents(place.site)
    (place.site / "steps/core.py").write_text("broken(\n")
    (place.site / "steps/ops/extra.py").chmod(0o755)

    planned = place.run(patched, dry_run=True)
    assert set(planned.written) == {"steps/core.py", "steps/ops/extra.py"} and planned.saved_in is None
    assert (place.site / "steps/core.py").read_text() == "broken(\n"
    report = place.run(patched)
    assert contents(place.site) == patched_files
    assert (place.site / "steps/ops/extra.py").stat().st_mode & 0o777 == 0o644
    assert not (place.site / "steps/__pycache__/core.cpython-311.pyc").exists()
    assert any(path.read_bytes() == b"broken(\n" for path in report.saved_in.iterdir())

    place.run(vanilla)
    assert contents(place.site) == vanilla_files
    assert place.examine().patches == ()
    place.run(patched)
    assert contents(place.site) == patched_files
    assert place.run(patched).written == ()


def test_another_version_is_refused_naming_both(place: Place) -> None:
    patch_files(place.site)
    found = place.examine()
    info = place.site / f"{NAME}-{VERSION}.dist-info"
    metadata = (info / "METADATA").read_text().replace(VERSION, "1.3.0")
    (info / "METADATA").write_text(metadata)
    info.rename(info.with_name(f"{NAME}-1.3.0.dist-info"))
    before = contents(place.site)
    plan = place.plan(found)
    assert plan.writes == ()
    with pytest.raises(RestoreRefused, match=r"taken with 1\.2\.0, 1\.3\.0 is installed"):
        restore.run(plan, journal=place.journal)
    assert contents(place.site) == before


def test_a_version_that_is_not_installed_or_an_original_out_of_reach_is_refused_with_the_remedy(
    place: Place,
) -> None:
    vanilla = place.examine()
    patch_files(place.site)
    with pytest.raises(RestoreRefused, match="pip install --force-reinstall --no-deps steps==1.2.0"):
        place.run(vanilla)
    patched = place.examine()
    shutil.rmtree(place.site / f"{NAME}-{VERSION}.dist-info")
    with pytest.raises(RestoreRefused, match="install steps==1.2.0 first"):
        place.run(patched)


@pytest.mark.parametrize(
    "path", ["../outside.py", "/etc/passwd", "other.pth", "steps/../../x.py", "os.py", "steps//core.py"]
)
def test_nothing_outside_the_package_is_written(place: Place, path: str) -> None:
    evil = PatchedFile(package=NAME, version=VERSION, path=path, kind="added", content=b"bad")
    state = PackageState(package=NAME, version=VERSION, install="wheel")
    with pytest.raises(RestoreRefused, match="is no file of this package"):
        place.run(Examined((state,), (evil,)))


def test_nothing_is_written_through_a_link(place: Place) -> None:
    patch_files(place.site)
    found = place.examine()
    outside = place.folder / "outside"
    (place.site / "steps/ops").rename(outside)
    (place.site / "steps/ops").symlink_to(outside)
    with pytest.raises(RestoreRefused, match="symbolic link"):
        place.run(found)
    with pytest.raises(RestoreRefused, match="symbolic link"):
        check_target(place.site, "steps/ops/extra.py")


def test_a_process_of_the_environment_stops_it_and_is_named(place: Place) -> None:
    patch_files(place.site)
    found = place.examine()
    (place.site / "steps/core.py").write_text("")
    python = place.environment / "bin/python"
    code = "import steps.tree, sys; print('up', flush=True); sys.stdin.read()"
    with subprocess.Popen(
        [str(python), "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as user:
        assert user.stdout is not None and user.stdout.readline() == "up\n"
        with pytest.raises(RestoreRefused, match=f"pid {user.pid} .*stop it"):
            place.run(found)
        user.communicate("")
    assert (place.site / "steps/core.py").read_text() == ""
    place.run(found)
    assert (place.site / "steps/core.py").read_text() != ""


def test_an_editable_install_is_described_by_its_repository(place: Place, tmp_path: Path) -> None:
    source = tmp_path / "source"
    copy_environment_files(source)
    git = ["git", "-C", str(source), "-c", "user.name=n", "-c", "user.email=e", "-c", "commit.gpgsign=false"]
    for arguments in (["init", "-q"], ["add", "."], ["commit", "-qm", "x"], ["tag", "v9"]):
        subprocess.run([*git, *arguments], check=True)
    (source / "steps/tree.py").write_text("BUDGET = 32\n")
    (source / "steps/fresh.py").write_text("")
    info = place.site / f"{NAME}-{VERSION}.dist-info"
    (info / "direct_url.json").write_text(f'{{"url": "{source.as_uri()}", "dir_info": {{"editable": true}}}}')
    state = place.examine().packages[0]
    assert (state.install, state.describe) == ("editable", "v9-dirty")
    assert "-BUDGET = 16\n+BUDGET = 32\n" in state.diff
    assert "untracked: steps/fresh.py" in state.diff
    plan = place.plan(Examined((state,)))
    assert not plan.writes and "use git in its folder" in plan.packages[0].note


def test_a_package_that_is_not_there_is_absent() -> None:
    found = examine(["no-such-distribution-xyz"], hashes=HashCache(Path(os.devnull)))
    assert found.packages[0].install == "absent" and found.patches == ()


# The journal

KILLED = """
import os, signal, sys
from pathlib import Path
from snapshots.journal import FileWrite, Journal

point, root, journal = int(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3])
writes = tuple(FileWrite(f"pkg/f{i}.py", None if i == 4 else b"new %d" % i, 0o644) for i in range(5))
seen = 0

def watch(event, arguments):
    global seen
    if event.split(".")[0] in ("open", "os", "shutil"):
        seen += 1
        if seen == point:
            os.kill(os.getpid(), signal.SIGKILL)

sys.addaudithook(watch)
Journal(journal).replace(root, writes)
print(seen)
"""


def write_old(root: Path) -> None:
    (root / "pkg/__pycache__").mkdir(parents=True)
    for number in (0, 1, 3, 4):
        (root / f"pkg/f{number}.py").write_bytes(b"old %d" % number)
        (root / f"pkg/__pycache__/f{number}.cpython-311.pyc").write_bytes(b"stale")


def state_of(root: Path) -> str:
    files = {path.name: path.read_bytes() for path in (root / "pkg").iterdir() if path.is_file()}
    if files == {f"f{number}.py": b"old %d" % number for number in (0, 1, 3, 4)}:
        return "old"
    return "new" if files == {f"f{number}.py": b"new %d" % number for number in range(4)} else repr(files)


def restore_in_child(point: int, folder: Path) -> subprocess.CompletedProcess[str]:
    folder.mkdir()
    write_old(folder / "root")
    arguments = [str(point), str(folder / "root"), str(folder / "journal")]
    return subprocess.run(
        [sys.executable, "-c", KILLED, *arguments],
        cwd=Path(__file__).parent.parent,
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_killed_at_any_point_all_five_files_are_old_or_all_are_new(tmp_path: Path) -> None:
    whole = restore_in_child(0, tmp_path / "whole")
    assert whole.returncode == 0, whole.stderr
    assert state_of(tmp_path / "whole/root") == "new"
    steps = int(whole.stdout)
    points = sorted({1 + index * (steps - 1) // (KILL_POINTS - 1) for index in range(KILL_POINTS)})
    assert len(points) >= min(KILL_POINTS, steps)
    seen = set()
    for point in points:
        folder = tmp_path / str(point)
        assert restore_in_child(point, folder).returncode == -9
        half = state_of(folder / "root")
        restore.recover(Journal(folder / "journal"))
        after = state_of(folder / "root")
        assert after in ("old", "new"), (point, half, after)
        assert restore.recover(Journal(folder / "journal")) is None
        if after == "new":
            assert not list((folder / "root/pkg/__pycache__").glob("f[0-4].*"))
        seen.add(after if half == after else "half")
    assert seen == {"old", "half", "new"}


def test_a_file_that_cannot_be_written_leaves_all_as_they_were(tmp_path: Path) -> None:
    root, journal = tmp_path / "root", Journal(tmp_path / "journal")
    write_old(root)
    writes = tuple(FileWrite(f"pkg/f{number}.py", b"new") for number in (0, 1, 3))
    (root / "pkg/.f3.py.ddtree-restore").mkdir()  # in the way of the last one
    with pytest.raises(RestoreFailed, match="the files are as before: .*Is a directory"):
        journal.replace(root, writes)
    (root / "pkg/.f3.py.ddtree-restore").rmdir()
    assert state_of(root) == "old"
    assert restore.recover(journal) is None


def test_a_full_disk_is_one_clear_line_and_nothing_is_touched(tmp_path: Path) -> None:
    write_old(tmp_path / "root")
    code = (
        "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (5000, 5000))\n"
        "from pathlib import Path; from snapshots.journal import *\n"
        "try: Journal(Path('journal')).replace(Path('root'), (FileWrite('pkg/f0.py', b'x' * 9000),))\n"
        "except RestoreFailed as error: print(error)"
    )
    env = os.environ | {"PYTHONPATH": str(Path(__file__).parent.parent)}
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert "nothing was restored: File too large" in done.stdout and not done.stderr
    assert state_of(tmp_path / "root") == "old"
    assert not (tmp_path / "journal/active").exists() and not (tmp_path / "journal/draft").exists()


def test_the_next_start_of_ddtree_finishes_what_was_interrupted(tmp_path: Path) -> None:
    steps = int(restore_in_child(0, tmp_path / "whole").stdout)
    folder = tmp_path / "state" / "ddtree"
    folder.parent.mkdir()
    for point in range(steps * 2 // 3, steps):
        shutil.rmtree(folder, ignore_errors=True)
        assert restore_in_child(point, folder).returncode == -9
        if (folder / "journal/active").exists() and state_of(folder / "root") not in ("old", "new"):
            break
    (folder / "journal").rename(folder / "restore")
    env = os.environ | {"XDG_STATE_HOME": str(folder.parent), "PYTHONPATH": str(Path(__file__).parent.parent)}
    command = [sys.executable, "-m", "console", "--version"]
    first, second = (
        subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=60)
        for _ in range(2)
    )
    assert "an interrupted restore of 5 files" in first.stderr and first.returncode == 0
    assert state_of(folder / "root") == "new"
    assert second.stderr == ""


def test_packages_in_several_folders_are_restored_together(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where some packages are the system's and others the user's."""
    other = Path(shutil.copytree(place.site, tmp_path / "other"))
    for file in other.glob("steps*"):
        file.rename(file.with_name(file.name.replace("steps", "stairs", 1)))
    info = next(other.glob("stairs-*"))
    for name in ("METADATA", "RECORD"):
        (info / name).write_text((info / name).read_text().replace("steps", "stairs"))
    monkeypatch.syspath_prepend(str(place.site))
    monkeypatch.syspath_prepend(str(other))
    options = {"originals": place.originals(), "hashes": place.hashes}
    files = [place.site / "steps/tree.py", other / "stairs/tree.py"]
    for file in files:
        file.write_text("BUDGET = 32\n")
    wanted = examine(["steps", "stairs"], **options)
    assert [each.path for each in wanted.patches] == ["steps/tree.py", "stairs/tree.py"]
    for file in files:
        file.write_text("broken")
    plan = restore.plan(wanted.packages, wanted.patches, **options)
    report = restore.run(plan, journal=place.journal)
    assert report.written == ("steps/tree.py", "stairs/tree.py")
    assert [file.read_text() for file in files] == ["BUDGET = 32\n"] * 2


def test_saved_and_rolled_back_from_the_command_line(place: Place, wheels: Path) -> None:
    state = {f"XDG_{name}_HOME": str(place.folder / name) for name in ("DATA", "STATE", "CONFIG")}
    root = Path(__file__).parent.parent
    env = os.environ | state | {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(wheels)}
    env |= {"PYTHONPATH": f"{place.site}:{root}", "XDG_RUNTIME_DIR": str(place.folder)}

    def snapshot(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "console", "snapshot", *arguments]
        return subprocess.run(command, env=env, cwd=place.folder, capture_output=True, text=True, timeout=300)

    vanilla = contents(place.site)
    assert snapshot("save", "--label", "vanilla", "--package", NAME).returncode == 0
    patch_files(place.site)
    patched = contents(place.site)
    assert snapshot("save", "--label", "patched", "--package", NAME).returncode == 0
    store = Store.at(place.folder / "DATA/ddtree/snapshots")
    entry, saved = store.load("patched")
    found = saved.patches
    assert {each.path: each.kind for each in found}["steps/ops/mask.py"] == "missing" and len(found) == 5
    assert any(b"-    return 8\n+    return 12\n" in each for each in store.files(entry.commit).values())
    assert snapshot("rollback", "vanilla", "--yes", "--no-measure").returncode == 0
    assert contents(place.site) == vanilla
    done = snapshot("rollback", "patched", "--yes", "--no-measure")
    assert done.returncode == 0 and "which loads 5 of 5 restored files with the right hashes" in done.stdout
    assert contents(place.site) == patched


async def test_patches_of_sglangs_own_environment_are_kept_apart_and_go_back_there(
    place: Place, reachable: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("CACHE", "STATE"):
        monkeypatch.setenv(f"XDG_{name}_HOME", str(place.folder / name))
    python = str(place.environment / "bin/python")
    store, config = Store.at(place.folder / "store"), {"mode": "tree", "sglang_python": python}
    patch_files(place.site)
    patched = contents(place.site)
    asked = SaveRequest(label="patched", packages=(NAME,), running_units=False, fetch_originals=True)
    await saving.save_resolved(store, config, asked)
    entry, saved = store.load("patched")
    assert [(each.install, each.environment) for each in saved.packages] == [
        ("absent", ""),
        ("wheel", "sglang"),
    ]
    assert len(saved.patches) == 5 and {each.environment for each in saved.patches} == {"sglang"}
    there = saved.environment.sglang
    assert there is not None and python in str(there.python) and there.packages["torch"] is None
    page = store.files(entry.commit)["README.md"].decode()
    assert "SGLang's own environment: Python 3." in page and f"(for {NAME} in sglang's environment" in page
    (place.site / "steps/core.py").write_text("spoilt")
    quietly = RollbackOptions(measure=False)
    plan = await rollback.preview(store, "patched", options=quietly, config=config)
    done = await rollback.perform(store, plan)
    assert contents(place.site) == patched and done.files == ("steps/core.py",)
    assert "which loads 1 of 1 restored files with the right hashes" in done.verdict
    (place.site / "steps/core.py").write_text("spoilt")
    (place.environment / "bin/python").unlink()
    plan = await rollback.preview(store, "patched", options=quietly, config=config)
    with pytest.raises(StoreRefused, match="patched in SGLang's own environment.*set sglang_python"):
        await rollback.perform(store, plan)
