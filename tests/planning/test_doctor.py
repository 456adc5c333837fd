# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from pathlib import Path

import pytest
from packaging.requirements import Requirement

from whet.errors import pip_install
from whet.planning import doctor
from whet.planning.doctor import Finding, examine
from whet.plugins.inference.servers.environment import find_environment
from whet.threads import POLICY, SPINS, yield_soon


def by_name(found: list[Finding]) -> dict[str, Finding]:
    return {finding.what: finding for finding in found}


def test_every_section_and_what_is_installed_by_version(tmp_path: Path) -> None:
    import torch

    sections = examine(tmp_path / "run")
    assert list(sections) == ["python", "packages", "extras", "engines", "machine", "places"]
    assert by_name(sections["packages"])["torch"].found == torch.__version__
    engines = by_name(sections["engines"])
    assert engines["rollout.engine.name=hf"].status == engines["engine.name=single"].status == "ok"
    assert str(tmp_path / "run") in by_name(sections["places"])["runs"].found
    assert {"processors", "memory", "GPU", "instructions"} <= by_name(sections["machine"]).keys()


def test_a_package_that_is_absent_or_of_another_version_is_a_problem_and_an_extra_a_note() -> None:
    absent, old = Requirement("no-such-package>=1"), Requirement("torch>=999")
    assert doctor._package(absent) == Finding(
        "no-such-package", "not installed", "pip install 'no-such-package>=1'", is_problem=True
    )
    wrong = doctor._package(old)
    assert (wrong.status, wrong.advice) == ("problem", "whet needs torch>=999: install that")
    extra = doctor._extra("ray", [absent])
    assert (extra.status, extra.advice) == ("note", f"optional: {pip_install('ray')}")
    assert doctor._extra("x", [old]).status == "note"


def test_an_engine_says_why_it_cannot_run(monkeypatch: pytest.MonkeyPatch) -> None:
    found = by_name(list(doctor._engines({"hf": [Requirement("no-such-package>=1")]})))
    assert found["rollout.engine.name=hf"].found == "cannot run: no-such-package>=1 is not installed"
    monkeypatch.setattr(doctor, "compiler", lambda: None)
    native = by_name(list(doctor._engines({})))["rollout.engine.name=native"]
    assert native.status == "note" and "there is no C++ compiler" in native.found


def test_an_engine_that_could_not_start_says_so_as_a_run_would(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    python = tmp_path / "python"
    for name in ("vllm", "sglang"):
        monkeypatch.setenv(f"WHET_{name.upper()}_PYTHON", str(python))
    find_environment.cache_clear()
    found = by_name(list(doctor._engines({})))
    for name, make in (("vllm", "vLLM"), ("sglang", "SGLang")):
        finding = found[f"rollout.engine.name={name}"]
        assert finding.status == "note" and finding.found.startswith(f"cannot run: {python}: ")
        assert make in finding.advice and f"make {name}" in finding.advice
    assert found["rollout.engine.name=hf"].found == "can run"


def test_a_place_that_cannot_be_written_to_is_a_problem(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(doctor, "_writable", lambda folder: folder != tmp_path)
    runs = by_name(list(doctor._places(tmp_path / "run")))["runs"]
    assert (runs.status, runs.found) == ("problem", f"{tmp_path / 'run'} is not writable")
    assert runs.advice == "set trainer.run_dir to another folder"


def test_a_full_disk_is_a_problem(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(doctor, "free_disk", lambda path: 10 * 2**20)
    runs = by_name(list(doctor._places(tmp_path)))["runs"]
    assert (runs.status, runs.found) == ("problem", f"{tmp_path}, 10.0 MiB free")


def test_threads_that_hold_the_processor_while_they_wait_are_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (POLICY, *SPINS):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(POLICY, "ACTIVE")
    found = by_name(list(doctor._processor()))["threads"]
    assert found.status == "note" and found.advice.endswith("unset OMP_WAIT_POLICY")
    monkeypatch.delenv(POLICY)
    yield_soon()
    assert by_name(list(doctor._processor()))["threads"] == Finding(
        "threads", "waiting threads release the processor soon (GOMP_SPINCOUNT=10000, KMP_BLOCKTIME=1)"
    )
