# SPDX-License-Identifier: Apache-2.0
import subprocess
import sys
from pathlib import Path

LOOK = """
import sys
from whet.processes.user_code import pin
sources = {}
pin(sources)
sys.path.insert(0, sys.argv[1])
import fractions, mine, whet.rewards.gsm8k
print(*sources, mine.AMOUNT)
"""


def test_the_users_files_are_pinned_and_those_of_whet_and_python_are_not(tmp_path: Path) -> None:
    """A process starts faster from compiled files, which are of the right version where nobody edits them."""
    (tmp_path / "mine.py").write_text("AMOUNT = 7\n")
    done = subprocess.run([sys.executable, "-c", LOOK, str(tmp_path)], capture_output=True, text=True, check=False)
    assert done.stdout.split() == [str(tmp_path / "mine.py"), "7"], done.stderr
    assert not (tmp_path / "__pycache__").exists()
