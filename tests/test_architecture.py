# SPDX-License-Identifier: Apache-2.0
"""The shape of the package, held by tests: layers, sizes, names, and the imports allowed in each place."""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from pydantic.fields import FieldInfo

from docs.generate.layers import layers, limit
from tests.first import first
from tests.parsed import blocks, tree
from whet.config.commands import commands, schema_of
from whet.config.section import is_free, is_section

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "whet"

PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
LAYERS = layers(PAGE)
LAYER_OF = {part: number for number, parts in enumerate(LAYERS, start=1) for part in parts}

NO_CODE = {tokenize.ENCODING, tokenize.COMMENT, tokenize.NEWLINE, tokenize.NL, tokenize.INDENT, tokenize.DEDENT}
MAX_FILE_LINES = limit("lines of a file", PAGE)
MAX_FUNCTION_LINES = limit("lines of a function", PAGE)
MAX_ALGORITHM_LINES = limit("lines of code of a registered algorithm", PAGE)
MAX_CORE_LINES = limit("lines of Python in the core", PAGE)
MAX_CORE_CHARACTERS = limit("characters of code in the core", PAGE)
MAX_KERNEL_LINES = limit("lines of the kernels", PAGE)
MAX_KEYS = limit("keys of the config", PAGE)
FORBIDDEN_NAMES = {"utils", "util", "common", "helpers", "misc", "experimental", "third_party", "v1"}
TRACKERS = {"tensorboard", "wandb", "mlflow", "swanlab", "trackio"}
LAZY = {"ray", "vllm", "sglang", "deepspeed", "megatron", "lm_eval", "mcp", *TRACKERS}
INSIDE = ["whet_tester"]  # files that run beside others of their folder, outside of the package
HEAVY = {"torch", "transformers", "tensordict", "datasets", "matplotlib", "starlette", "uvicorn", *LAZY}
LICENCE_LINE = "# SPDX-License-Identifier: Apache-2.0"

PROTOCOLS = {"whet.engines.protocol", "whet.rollout.protocol", "whet.controller.worker_group"}

FILES = sorted(PACKAGE.rglob("*.py"))
PLUGINS = PACKAGE / "plugins"
CORE = [file for file in FILES if PLUGINS not in file.parents]


def test_every_part_of_the_package_has_a_layer() -> None:
    parts = {_part(file) for file in CORE}
    assert parts <= LAYER_OF.keys(), f"not in LAYERS: {sorted(parts - LAYER_OF.keys())}"


def test_the_page_has_every_folder_and_root_module_of_the_package() -> None:
    block = PAGE.partition("```text\nwhet/\n")[2].partition("\ndocs/generate/")[0]
    lines = re.findall(r"^  (\S+(?: \S+)*)  +(\S.*)$", block, re.MULTILINE)
    shown = {name: meaning for names, meaning in lines for name in names.split()}
    roots = [each for each in PACKAGE.iterdir() if each.is_dir() and list(each.rglob("*.py"))]
    assert sorted(shown) == sorted(
        [*(f"{each.name}/" for each in roots), *(file.name for file in PACKAGE.glob("*.py"))]
    )
    inner = {each for root in roots if root.name in {"engines", "rollout", "controller"} for each in root.iterdir()}
    missing = [
        _shown(each)
        for each in sorted(inner)
        if list(each.glob("*.py")) and not re.search(rf"\b{each.name}\b", shown[f"{each.parent.name}/"])
    ]
    assert not missing, f"docs/architecture.md does not name {missing}"


def test_the_core_imports_no_plugin_and_plugins_import_themselves_and_public_names_of_the_core() -> None:
    wrong = []
    for file in FILES:
        own = file.relative_to(PLUGINS).parts[0] if PLUGINS in file.parents else ""
        for line, module in _imports(file):
            parts = module.split(".")
            is_foreign = parts[:2] == ["whet", "plugins"] and parts[2:3] != [own]
            is_private = parts[0] == "whet" and own != "" and parts[2:3] != [own] and any(p[:1] == "_" for p in parts)
            wrong += [f"{_shown(file)}:{line} imports {module}"] if is_foreign or is_private else []
        for node in blocks(file) if own else ():
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("whet"):
                private = [each.name for each in node.names if each.name[:1] == "_" and each.name[:2] != "__"]
                is_own = (node.module or "").startswith(f"whet.plugins.{own}")
                wrong += [f"{_shown(file)}:{node.lineno} imports {name}" for name in private if not is_own]
    assert not wrong, "\n".join(wrong)


def test_imports_go_down() -> None:
    upward = [
        f"{_shown(file)}:{line} (layer {LAYER_OF[_part(file)]}) imports {module} (layer {LAYER_OF[target]})"
        for file in CORE
        for line, module, target in _own_imports(file)
        if LAYER_OF[target] > LAYER_OF[_part(file)]
    ]
    assert not upward, "\n".join(upward)


def test_imports_within_a_layer_have_no_cycle() -> None:
    edges: dict[str, set[str]] = {}
    for file in CORE:
        same = {target for _, _, target in _own_imports(file) if LAYER_OF[target] == LAYER_OF[_part(file)]}
        edges.setdefault(_part(file), set()).update(same - {_part(file)})
    for layer in map(set, LAYERS):
        waiting = {part: edges.get(part, set()) & layer for part in layer}
        while free := {part for part, targets in waiting.items() if not targets}:
            waiting = {part: targets - free for part, targets in waiting.items() if part not in free}
        assert not waiting, f"these import each other in a circle: {waiting}"


def test_layer_four_meets_in_protocols() -> None:
    """Engines, rollout, weight sync and controller know each other's protocols only, so that each can be replaced."""
    met = [
        f"{_shown(file)}:{line} imports {module}"
        for file in CORE
        for line, module, target in _own_imports(file)
        if LAYER_OF[_part(file)] == LAYER_OF[target] == 4 and target != _part(file) and module not in PROTOCOLS
    ]
    assert not met, "\n".join(met)


@pytest.mark.parametrize(("part", "apart"), [("evaluation", "trainers"), ("rollout", "rewards")])
def test_parts_that_know_nothing_of_each_other(part: str, apart: str) -> None:
    """Evaluation stands beside the trainers; rollout knows rewards by a protocol."""
    files = [file for file in FILES if _part(file) == part]
    assert files and not [_shown(file) for file in files for _, _, target in _own_imports(file) if target == apart]


def test_concrete_engines_are_named_only_where_a_run_is_built() -> None:
    concrete = tuple(
        f"whet.{name}"
        for name in (
            "engines.single",
            "engines.fsdp",
            "rollout.hf",
            "rollout.native",
            "plugins",
        )
    )
    builders = {
        f"whet/{name}.py" for name in ("trainers/build", "roles/workers", "roles/rollout_worker")
    }  # a worker makes its engine in its own process
    named = [
        f"{_shown(file)}:{line} names {module}"
        for file in FILES
        for line, module, target in _own_imports(file)
        if module.startswith(concrete) and target != _part(file) and _shown(file) not in builders
    ]
    assert not named, "\n".join(named)


def test_a_class_has_a_name_of_its_own() -> None:
    """A reader who meets the name of a class finds one class."""
    found = Counter(node.name for file in FILES for node in tree(file).body if isinstance(node, ast.ClassDef))
    assert [name for name, times in found.items() if times > 1] == []


def test_trainers_are_the_loop_and_a_file_for_each() -> None:
    assert len([*(PACKAGE / "trainers").glob("*.py")]) <= 20


def test_layer_one_imports_no_torch_and_algorithms_no_distributed() -> None:
    wrong = [
        f"{_shown(file)}:{line} imports {module}"
        for file in FILES
        for line, module in _imports(file)
        if (LAYER_OF[_part(file)] == 1 and module.split(".")[0] in HEAVY)
        or (LAYER_OF[_part(file)] == 2 and module.startswith("torch.distributed"))
    ]
    assert not wrong, "\n".join(wrong)


def test_score_functions_import_no_torch() -> None:
    wrong = [
        _shown(file)
        for file in FILES
        if any(
            ast.unparse(use).startswith("register_reward(") for node in _functions(file) for use in node.decorator_list
        )
        and any(module.split(".")[0] in HEAVY for _, module in _imports(file))
    ]
    assert not wrong, f"a reward process starts in a blink only without torch: {wrong}"


def test_an_optional_engine_or_tracker_is_imported_in_one_place_of_its_name() -> None:
    for package in LAZY:
        places = {file for file in FILES for _, module in _imports(file) if module.split(".")[0] == package}
        wrong = [_shown(file) for file in places if package not in file.relative_to(PACKAGE).with_suffix("").parts]
        assert not wrong, f"{package} is imported outside a file or folder of that name: {wrong}"


def test_the_web_framework_is_imported_in_serving_alone() -> None:
    places = {
        _part(file)
        for file in FILES
        for _, module in _imports(file)
        if re.match("google|starlette|uvicorn|prometheus_client", module)
    }
    assert places <= {"serving", "plugins"}


def test_one_client_speaks_http() -> None:
    """Deadlines, retries and limits of replies are in one file, which loads httpx with the first request."""
    clients = "httpx|httpx2|http.client|urllib.request|requests|aiohttp"
    places = {_shown(file) for file in FILES for _, module in _imports(file) if re.fullmatch(clients, module)}
    assert places == {"whet/http.py"}
    body = tree(PACKAGE / "http.py").body
    assert not [node for node in body if isinstance(node, ast.Import) and node.names[0].name == "httpx"]


def test_files_functions_and_package_stay_small() -> None:
    too_long = [f"{_shown(file)}: {_lines(file)} lines" for file in FILES if _lines(file) > MAX_FILE_LINES]
    too_long += [
        f"{_shown(file)}:{node.lineno} {node.name}: {size} lines"
        for file in FILES
        for node in _functions(file)
        if (size := (node.end_lineno or node.lineno) - node.lineno + 1) > MAX_FUNCTION_LINES
    ]
    assert not too_long, "\n".join(too_long)
    kernels = [file for file in (PACKAGE / "kernels").iterdir() if file.suffix in (".py", ".cpp", ".h")]
    assert sum(_lines(file) for file in kernels) <= MAX_KERNEL_LINES
    core = [file for file in CORE if file not in kernels]
    assert sum(map(_lines, core)) <= MAX_CORE_LINES
    assert sum(map(_characters, core)) <= MAX_CORE_CHARACTERS


def _characters(file: Path) -> int:
    """The characters of a file's code: its tokens without comments, docstrings and white space."""
    documented = ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef
    nodes = [each for each in blocks(file) if isinstance(each, documented) and ast.get_docstring(each)]
    docstrings = {node.body[0].lineno for node in nodes}
    with file.open("rb") as code:
        tokens = [each for each in tokenize.tokenize(code.readline) if each.type not in NO_CODE]
    own = (each for each in tokens if each.type != tokenize.STRING or each.start[0] not in docstrings)
    return sum(len(each.string) for each in own)


def test_the_config_stays_small_and_every_key_says_what_it_is() -> None:
    """Keys of all commands; a section that stands in several places, or that others build on, is counted once. Keys in
    a trainer's own file of configs are options of that trainer."""
    keys: dict[tuple[str, str], FieldInfo] = {}
    for schema in map(schema_of, commands()):
        own = schema.__module__ if schema.__module__ != "whet.config.schema" else None
        for _, section in schema().sections():
            for name, field in type(section).model_fields.items():
                owner = [each for each in type(section).__mro__ if name in vars(each).get("__annotations__", {})][-1]
                if owner.__module__ != own:
                    keys[owner.__name__, name] = field
    leaves = {key: field for key, field in keys.items() if not is_section(field.annotation)}
    assert not [key for key, field in leaves.items() if not field.description]
    assert sum(not is_free(field) for field in leaves.values()) <= MAX_KEYS


def test_no_algorithm_is_longer_than_a_page_of_a_book() -> None:
    """Lines of code of every registered function of the mathematics, without signature, docstring and comments."""
    long = {}
    for file in sorted((PACKAGE / "algorithms").glob("*.py")):
        source = file.read_text(encoding="utf-8")
        for node in tree(file).body:
            if isinstance(node, ast.FunctionDef) and any(
                "register_" in ast.unparse(use) for use in node.decorator_list
            ):
                body = source.splitlines()[(node.body[0].end_lineno or 0) : node.end_lineno]
                lines = [line for line in body if line.strip() and not line.strip().startswith("#")]
                long |= {node.name: len(lines)} if len(lines) > MAX_ALGORITHM_LINES else {}
    assert not long


def test_no_file_has_a_name_that_says_nothing() -> None:
    tests = (ROOT / "tests").rglob("*.py")
    named = [
        _shown(file) for file in (*FILES, *tests) if FORBIDDEN_NAMES & set(file.relative_to(ROOT).with_suffix("").parts)
    ]
    assert not named


def test_every_file_starts_with_its_licence() -> None:
    folders = [ROOT / name for name in ("whet", "tests", "benchmarks", "examples", "docs")]
    files = [file for folder in folders for file in folder.rglob("*.py")]
    assert not [_shown(file) for file in files if not file.read_text().startswith(LICENCE_LINE + "\n")]


@pytest.mark.parametrize(
    "code",
    first(
        2,
        [
            "import whet",
            "from whet.cli.app import main; main(['--help'])",
            "from whet.cli.app import main; main(['config', 'train', 'gsm8k'])",
            "from whet.cli.app import main; main(['algorithms'])",
        ],
        others=pytest.mark.slow,
    ),
)
def test_what_answers_at_once_loads_nothing_heavy(code: str) -> None:
    report = (
        f"import atexit, sys\natexit.register(lambda: sys.stderr.write(' '.join(['LOADED', *sys.modules])))\n{code}"
    )
    run = subprocess.run([sys.executable, "-c", report], capture_output=True, text=True, timeout=60, check=False)
    assert run.returncode == 0, run.stderr
    loaded = set(run.stderr.rpartition("LOADED ")[2].split())
    assert "whet.registry" in loaded
    assert not HEAVY & loaded


@pytest.mark.slow
@pytest.mark.parametrize(
    "folder",
    [
        "engines/fsdp",
        "controller/ray",
        "rollout/native",
        *(f"plugins/{each.parent.name}" for each in sorted(PLUGINS.glob("*/plugin.toml"))),
    ],
)
def test_an_optional_capability_is_a_folder_that_can_be_deleted(folder: str, tmp_path: Path) -> None:
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(PACKAGE, tmp_path / "whet", ignore=ignored)
    shutil.rmtree(tmp_path / "whet" / folder)
    left_out = [*LAZY, *INSIDE, "__main__"]
    imports_all = f"""
import importlib, pkgutil, whet
assert whet.__file__.startswith({str(tmp_path)!r}), whet.__file__
for module in pkgutil.walk_packages(whet.__path__, "whet."):
    name = module.name.rpartition(".")[2]
    is_left_out = name in {left_out!r} or name.endswith("_triton")
    if ".megatron." not in module.name and not is_left_out:
        importlib.import_module(module.name)
"""
    run = subprocess.run(
        [sys.executable, "-c", imports_all], cwd=tmp_path, capture_output=True, text=True, timeout=240, check=False
    )
    assert run.returncode == 0, run.stderr


def _part(file: Path) -> str:
    """The first name below whet/: `config` of whet/config/load.py, `errors` of whet/errors.py."""
    return Path(file.relative_to(PACKAGE).parts[0]).stem


def _own_imports(file: Path) -> Iterator[tuple[int, str, str]]:
    """Line, module and part of every import of whet itself."""
    for line, module in _imports(file):
        if module == "whet":
            yield line, module, "__init__"
        elif module.startswith("whet."):
            yield line, module, module.split(".")[1]


@cache
def _imports(file: Path) -> list[tuple[int, str]]:
    """Line and module of every import in a file, including imports inside functions."""
    found = []
    package = ["whet", *file.relative_to(PACKAGE).parts[:-1]]
    for node in blocks(file):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = [*package[: len(package) - node.level + 1], node.module or ""] if node.level else [node.module or ""]
            module = ".".join(base).rstrip(".")
            names = [f"{module}.{alias.name}" for alias in node.names]
            found += [(node.lineno, name if _is_module(name) else module) for name in names]
    return found


@cache
def _is_module(name: str) -> bool:
    path = ROOT.joinpath(*name.split("."))
    return name.startswith("whet.") and (path.is_dir() or path.with_suffix(".py").is_file())


def _functions(file: Path) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    return [node for node in blocks(file) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]


def _lines(file: Path) -> int:
    return file.read_text().count("\n")


def _shown(file: Path) -> str:
    return str(file.relative_to(ROOT))
