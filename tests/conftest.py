# SPDX-License-Identifier: Apache-2.0
"""Fixtures that tests of several folders need."""

from __future__ import annotations

import gc
import os
import re
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import pytest

if TYPE_CHECKING:
    import torch

    from whet.config import TrainConfig
    from whet.registry import Entry

SMALL_RUN: dict[str, Any] = {  # takes a second
    "model.dtype": "float32",
    "data.apply_chat_template": False,
    "data.train_batch_size": 4,
    "data.max_prompt_length": 16,
    "data.max_response_length": 6,
    "rollout.n": 4,
    "reward.num_workers": 0,
    "trainer.val_freq": -1,
    "trainer.save_freq": 0,
    "trainer.logger": ["jsonl"],
}
STAGES = f"{Path(__file__).parent / 'engines' / 'toy_stages.py'}:Stages"
ENGINES = ["single", "fsdp", pytest.param(STAGES, id="stages", marks=pytest.mark.slow)]
HERE = Path(__file__).resolve().parent
SHARED_DATA = HERE.parent / ".." / "shared" / "data"
Report = TypeVar("Report", pytest.TestReport, pytest.CollectReport)


def is_installed(entry: Entry) -> bool:
    """Tells whether a function can be loaded here: the engine on Megatron-Core only in an environment with it."""
    if ".megatron." not in entry.target:
        return True
    from whet.plugins.megatron import sizes

    return sizes.is_installed()


def pytest_addoption(parser: pytest.Parser) -> None:
    """The engines that tests/engines/test_conformance.py and tests/rollout/test_engines.py are run with."""
    parser.addoption(
        "--engine", action="append", help="training engine to hold to the suite: a name, or path/file.py:MyEngine"
    )
    parser.addoption("--engine-options", default="{}", help="its options, as JSON")
    parser.addoption(
        "--rollout-engine", action="append", help="the same for rollout engines; tests of whet's own are left out"
    )
    parser.addoption("--rollout-engine-options", default="{}", help="its options, as JSON")
    parser.addoption(
        "--on-device", action="store_true", help="shows tests this machine's accelerator, and runs the suites on it"
    )
    parser.addoption("--without", help="plugin that was deleted: tests that fail for the want of it are skipped")


def pytest_configure(config: pytest.Config) -> None:
    """Hides accelerators and bfloat16 instructions without --on-device, so that bits and dtypes are the same on every
    machine."""
    if not config.getoption("--on-device"):
        os.environ.update(dict.fromkeys(("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"), ""))
        os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is first imported, by whichever test
        os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Tests with an argument `engine_name` run with each engine."""
    if "engine_name" in metafunc.fixturenames:
        metafunc.parametrize("engine_name", metafunc.config.getoption("--engine") or ENGINES)


ALL_SLOW = re.compile(r"^pytestmark = (\[\s*)?pytest\.mark\.slow\b", re.MULTILINE)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leaves out files with only slow tests if no slow test runs: importing them takes a second in each process."""
    is_left_out = config.getoption("markexpr") == "not slow" and collection_path.suffix == ".py"
    return True if is_left_out and ALL_SLOW.search(collection_path.read_text(encoding="utf-8")) else None


def pytest_sessionstart(session: pytest.Session) -> None:
    """Switches the garbage collector off while tests are collected, as imports leave no garbage. Processes that
    together run all tests share the rewriting."""
    gc.disable()
    if "PYTEST_XDIST_WORKER" in os.environ and [Path(each).name for each in session.config.args] == ["tests"]:
        from tests.rewritten import rewrite_share

        found = sorted(HERE.rglob("test_*.py"))
        rewrite_share(session.config, [file for file in found if not pytest_ignore_collect(file, session.config)])


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skips tests of the repository as it ships (pages, parts, tables of names) where a plugin was deleted."""
    if plugin := config.getoption("--without"):
        for item in items:
            if item.get_closest_marker("shipped"):
                item.add_marker(pytest.mark.skip(f"without {plugin}"))


def pytest_collection_finish() -> None:
    """Caches objects that libraries create at each call, and hides imported objects from the garbage collector."""
    from tests.kept import keep

    keep()
    gc.freeze()
    gc.enable()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Escapes half a surrogate pair in the log of a test: pytest-xdist sends reports as UTF-8."""
    report = yield
    report.sections = [(name, text.encode(errors="backslashreplace").decode()) for name, text in report.sections]
    return without_plugin(report, item)


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Leaves out files of tests that import a deleted plugin."""
    return without_plugin((yield), collector)


def without_plugin(report: Report, node: pytest.Item | pytest.Collector) -> Report:
    """Counts a failure as skipped if its error names the plugin of --without as the missing one."""
    plugin = node.config.getoption("--without")
    if plugin and report.failed:
        said = " ".join([report.longreprtext, *(text for _, text in report.sections)])
        if re.search(rf"No module named 'whet\.plugins\.{plugin}\b|whet/plugins/{plugin}\s+back", said):
            file, line, _ = getattr(report, "location", (report.nodeid, 0, ""))
            report.outcome, report.longrepr = "skipped", (file, line or 0, f"Skipped: without {plugin}")
    return report


@pytest.fixture
def no_manifests(monkeypatch: pytest.MonkeyPatch) -> None:
    """Takes the manifests of all plugins away. What the registries have read of them stays, so that nothing read
    without them is kept for later tests."""
    from whet import registry

    for each in vars(registry).values():
        assert not isinstance(each, registry.Registry) or each.shipped is not None
    monkeypatch.setattr("whet.manifests.manifests", dict)


@pytest.fixture(scope="module", autouse=True)
def frozen_objects() -> Iterator[None]:
    """Hides objects that are older than a file of tests from the garbage collector: a collection, before the loop of a
    run or behind the file, searches the objects of the file, and not torch and transformers. Runs hide nothing."""
    freeze, unfreeze = gc.freeze, gc.unfreeze
    gc.freeze()
    gc.freeze = gc.unfreeze = lambda: None
    yield
    gc.freeze, gc.unfreeze = freeze, unfreeze
    gc.collect()


@pytest.fixture(scope="session")
def device(request: pytest.FixtureRequest) -> torch.device:
    """The device on which conformance suites run; the host unless --on-device is given."""
    from whet import devices

    return devices.here() if request.config.getoption("--on-device") else devices.HOST


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of public data sets that lies beside the repository, where there is one."""
    if not SHARED_DATA.is_dir():
        pytest.skip("the folder shared/data beside the repository is not there: public data sets as published")
    return SHARED_DATA.resolve()


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Qwen3 model of two layers that reads and writes characters."""
    from whet.plugins.lessons.init_model import init_model

    folder = tmp_path_factory.mktemp("models") / "qwen3"
    return init_model(
        folder,
        "qwen3",
        "nano",
        alphabet="0123456789+-*/=() abcdefghijklmnopqrstuvwxyz<>",
        num_layers=2,
        max_position_embeddings=512,
    )


@pytest.fixture(scope="session")
def qwen25_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Qwen2.5 model (biases, untied kv heads) with a byte-level tokenizer."""
    from whet.plugins.lessons.init_model import init_model

    return init_model(
        tmp_path_factory.mktemp("models") / "qwen25", "qwen2.5", "nano", num_layers=2, max_position_embeddings=512
    )


@pytest.fixture
def train_config(model_folder: Path, tmp_path: Path) -> Callable[..., TrainConfig]:
    """A config of a run in `tmp_path` that takes a second, with overrides; reward and data are given as objects."""
    from whet.config import TrainConfig, load_config
    from whet.planning.dtypes import with_dtypes

    def make(overrides: dict[str, Any] | None = None) -> TrainConfig:
        small: dict[str, Any] = {
            **SMALL_RUN,
            "model.path": str(model_folder),
            "actor.optim.lr": 1e-3,
            "trainer.total_steps": 2,
            "trainer.run_dir": str(tmp_path / "run"),
        }
        return with_dtypes(load_config(TrainConfig, None, small | (overrides or {}), given={"reward", "data"}).config)

    return make


@pytest.fixture(scope="session")
def additions() -> list[dict[str, str]]:
    """Rows of a data set, in plain form."""
    return [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(5) for b in range(4)]
