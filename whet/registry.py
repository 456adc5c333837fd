# SPDX-License-Identifier: Apache-2.0
"""Registries of functions, found by a registered name, `package.module:function` or `path/file.py:function`.

The signature of a function is its schema. Parameters before `*` are batch columns, parameters after it are options with
their defaults, types and ranges (`whet.options`). A signature without `*` has verl's form: parameters with a default
are options, the others are columns under verl's or whet's names, or values that the caller supplies by name (`config`,
`batch`, ...).

An installed package adds names by entry points: group `whet.environment`, name `sokoban`, value `package.module:Class`.
A command has the group `whet.command`; its function gets a list of words and returns an exit status.

Shipped functions are read from their source and imported only when called, so that listing them needs no torch.
"""

from __future__ import annotations

import ast
import builtins
import inspect
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

from whet.errors import ConfigError, RegistryError, describe, did_you_mean
from whet.manifests import absent, missing_plugin, targets
from whet.options import fits, read, words
from whet.targets import GAMES as GAMES, load_target as load_target

log = logging.getLogger(__name__)
F = TypeVar("F", bound=Callable[..., Any])
Options = Mapping[str, Any]  # of a function, or keyword arguments of its decorator, by name
PACKAGE = Path(__file__).parent
Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
REQUIRED = inspect.Parameter.empty  # the default of an option that has none

# Parameter names of verl's form that differ from whet's column names.
FOREIGN_COLUMNS = {
    "index": "uid",
    "old_log_prob": "old_log_probs",
    "log_prob": "log_probs",
    "ref_log_prob": "ref_log_probs",
    "rollout_log_prob": "rollout_log_probs",
}
# Parameters that are not columns: the caller supplies them by name, unless the user sets them as options.
SUPPLIED = frozenset({"config", "loss_agg_mode", "batch", "non_tensor_batch"})
# Former names of options: the new name, and the new value for each old value.
FORMER: Mapping[str, tuple[str, Mapping[bool, str]]] = {
    "keep_cache": ("on_new_weights", {False: "recompute", True: "keep"})
}
# Parameters that are fields of a row even if they have a default.
FIELDS = frozenset({"prompt_str", "extra_info"})


class Resolved(dict[str, Any]):
    """The options of a function, complete and checked."""


@cache
def warn_of(old: str, new: str, where: str) -> None:
    """Warns of an option's former name, once in a process."""
    log.warning("%s: %s is now called %s: the next version will not know the old name", where, old, new)


@dataclass(frozen=True)
class Entry:
    """The description of a registered function, without importing it. A mark is a keyword argument of the decorator."""

    kind: str
    name: str
    target: str  # "package.module:function" or "path/file.py:function"
    parameters: tuple[str, ...]  # positional parameters, under the function's own names
    options: Options  # defaults by name; REQUIRED for an option without one
    doc: str
    marks: Options = field(default_factory=dict)  # keyword arguments of its decorator, for callers
    alias_of: str | None = None
    accepts_any_option: bool = False
    takes: Options = field(default_factory=dict)  # annotation by option, Any if unknown
    function: Callable[..., Any] | None = field(default=None, compare=False)

    @property
    def columns(self) -> tuple[str, ...]:
        """The batch columns that the function reads, under whet's names."""
        return tuple(FOREIGN_COLUMNS.get(name, name) for name in self.parameters if name not in SUPPLIED)

    @property
    def summary(self) -> str:
        """The first line of the docstring."""
        return self.doc.strip().split("\n", 1)[0] if self.doc else ""

    def load(self) -> Callable[..., Any]:
        """Returns the function or class itself, and imports it if needed.  Raises: RegistryError."""
        return self.function if self.function is not None else load_target(self.target)

    def marked(self, mark: str) -> Any:
        """Returns the function or class that a mark has as value; if it is text, loads it.  Raises: RegistryError."""
        if mark not in self.marks:
            raise RegistryError(f"{self.kind} {self.name!r}", f"has no {mark}", "", f"register it with {mark}=...")
        return found if callable(found := self.marks[mark]) else load_target(found)

    def check_row(self, *row: Any) -> None:
        """Checks a row (ground truth, extra_info, data_source) with the function that the mark `rows_checked_by` names,
        if there is one.  Raises: the errors of this function."""
        if "rows_checked_by" in self.marks:
            self.marked("rows_checked_by")(*row)

    def make(self, supplied: Options, options: Options) -> Any:
        """Calls the function with `options`, and with the values of `supplied` for its parameters before `*`."""
        return self.load()(*(supplied[name] for name in self.parameters), **options)

    def resolve_options(self, given: Options, where: str) -> Resolved:
        """Completes `given` options with defaults, but not options in `SUPPLIED`, which the caller passes. `where` is
        the config key for errors.  Raises: ConfigError."""
        given = dict(given)
        for old in [name for name in given if name in FORMER and name not in self.options]:
            new, values = FORMER[old]
            if new in self.options and isinstance(given[old], bool):
                warn_of(old, new, where)
                given.setdefault(new, values[given.pop(old)])
        if "former" in self.marks:
            given = self.marked("former")(given, where)
        unknown = [] if self.accepts_any_option else [name for name in given if name not in self.options]
        if unknown:
            expected = f"an option of {self.kind} {self.name!r}: {', '.join(self.options) or 'it has none'}"
            change = did_you_mean(unknown[0], self.options, f"remove it (~{where}.{unknown[0]} if a recipe sets it)")
            raise ConfigError(f"{where}.{unknown[0]}", given[unknown[0]], expected, change)
        options = {name: value for name, value in self.options.items() if name not in SUPPLIED} | dict(given)
        missing = [name for name, value in options.items() if value is REQUIRED]
        if missing:
            expected = f"a value, which {self.kind} {self.name!r} requires"
            raise ConfigError.joined(ConfigError(f"{where}.{name}", None, expected, "set it") for name in missing)
        self.check(given, f"{where}.")
        return Resolved(options)

    def check(self, given: Options, prefix: str) -> None:
        """Checks the values of options against their annotations. Of the two options in the mark `ordered`, the first
        must be less than the second. `prefix` comes before the name in errors.  Raises: ConfigError."""
        for name, value in given.items():
            default, takes = self.options.get(name), self.takes.get(name, Any)
            if takes is Any and default is not None and default is not REQUIRED and value is not None:
                takes = type(default)
            if not fits(value, takes):
                instead = "" if default is REQUIRED else f", or leave it out for the default {default!r}"
                raise ConfigError(f"{prefix}{name}", value, words(takes), f"change it{instead}")
        if "ordered" in self.marks:
            low, high = self.marks["ordered"]
            values = {**self.options, **given}
            if not values[low] < values[high]:
                expected, change = f"less than {prefix}{high}={values[high]!r}", f"lower {low} or raise {high}"
                raise ConfigError(f"{prefix}{low}", values[low], expected, change)


class Registry:
    """The functions of one kind. `register` is the decorator; lookup finds shipped and registered names, and paths."""

    also: Registry | None = None  # another kind: lookup finds its functions too, `names` does not list them

    def __init__(
        self,
        kind: str,
        folder: str | None,
        decorator: str,
        supplied: Sequence[str] | None = None,
        *,
        has_foreign_form: bool = True,
    ) -> None:
        """Stores the settings. `folder` has the core's functions of this kind (None: only plugins have functions).
        `supplied` are the only parameters allowed before `*`; None allows any, such as columns of a batch."""
        self.kind, self.folder, self.decorator, self.supplied = kind, folder, decorator, supplied
        self.has_foreign_form = has_foreign_form
        self._live: dict[str, Entry] = {}

    def register(
        self, name: str, *, aliases: Mapping[str, Options] | Sequence[str] = (), **marks: Any
    ) -> Callable[[F], F]:
        """Registers a function under a name (a decorator). `aliases` are more names; as a mapping, it gives each alias
        its own option defaults. `marks` are facts about the function for its callers (`aggregation=...`).
        Raises: RegistryError if another function has the name."""

        def decorate(function: F) -> F:
            entry = self.entry_of(function, name, marks)
            for each in (entry, *_alias_entries(entry, aliases)):
                taken = self._live.get(each.name) or self.shipped.get(each.name)
                if taken is not None and taken.target != each.target:
                    found = f"already registered as {taken.target}"
                    change = f"register {each.target} under another name"
                    raise RegistryError(f"{self.kind} {each.name!r}", found, change=change)
                self._live[each.name] = each
            return function

        return decorate

    def names(self) -> list[str]:
        """Returns the known names, aliases included, sorted."""
        return sorted({**self._installed, **self.shipped, **self._live})

    def __iter__(self) -> Iterator[Entry]:
        """Yields the entries. An entry point that cannot be loaded has the error as its `doc`."""
        for name in self.names():
            try:
                yield self[name]
            except RegistryError as error:
                yield Entry(self.kind, name, self._installed[name], (), {}, str(error))

    def __contains__(self, name: str) -> bool:
        return name in self._live or name in self.shipped or name in self._installed

    def __getitem__(self, reference: str | Callable[..., Any]) -> Entry:
        """Returns the entry of a name, a path, or a function object.  Raises: RegistryError."""
        if callable(reference):
            return self.registered(reference) or self.entry_of(reference, reference.__name__, {})
        found = self._live.get(reference) or self.shipped.get(reference)
        if found is not None:
            return found
        if reference in self._installed:
            with loading(reference, self._installed[reference]):
                return replace(self[self._installed[reference]], name=reference)
        if self.also is not None and reference in self.also:
            return self.also[reference]
        if ":" in reference:
            function = load_target(reference)
            return self.registered(function) or replace(self.entry_of(function, reference, {}), target=reference)
        group = self.decorator.removeprefix("register_")
        more = f" (others come with {GAMES})" if self.kind == "environment" and not self._installed else ""
        if plugin := missing_plugin(group, reference):
            raise absent(f"{self.kind} {reference}", plugin)
        expected = f"one of {', '.join(self.names())}, package.module:function or path/file.py:function"
        hint = did_you_mean(reference, self.names(), "correct the name")
        raise RegistryError(self.kind, reference or "''", expected, f"{hint}{more}")

    def registered(self, function: Callable[..., Any]) -> Entry | None:
        """Returns the entry of a function object under its registered name; None if it is not registered."""
        live = [*self._live.values(), *(() if self.also is None else self.also._live.values())]
        return next((entry for entry in live if entry.function is function and entry.alias_of is None), None)

    @cached_property
    def shipped(self) -> Mapping[str, Entry]:
        """The functions that ship with whet by name, in the order of files and lines."""
        return _read_shipped(self)

    @cached_property
    def _installed(self) -> Mapping[str, str]:
        """Targets by name, from the entry points of installed packages: group `whet.environment`, `whet.reward`, ..."""
        return entry_points().get(f"whet.{self.decorator.removeprefix('register_')}", {})

    def entry_of(self, function: Callable[..., Any], name: str, marks: Options) -> Entry:
        """Builds the entry of a function object from its signature. The mark `shares` is the target of a class whose
        options are added (its module is fast to import).  Raises: RegistryError for an unknown parameter."""
        if self.supplied is None:
            return entry_of(function, self.kind, name, marks, has_foreign_form=self.has_foreign_form)
        entry = entry_of(function, self.kind, name, marks, has_foreign_form=False)
        if unknown := [each for each in entry.parameters if each not in self.supplied]:
            raise RegistryError(
                f"{self.kind} {name!r}",
                f"a parameter {unknown[0]!r} before `*`",
                f"parameters named {', '.join(self.supplied)}",
                "put an option after `*`",
            )
        if "shares" not in marks:
            return entry
        more = entry_of(load_target(marks["shares"]), self.kind, name, {}, has_foreign_form=False)
        options, takes = {**entry.options, **more.options}, {**entry.takes, **more.takes}
        doc = "\n\n".join([entry.doc, more.doc.partition("\n\n")[2]])
        return replace(entry, options=options, takes=takes, doc=doc, accepts_any_option=False)


def entry_of(
    function: Callable[..., Any], kind: str, name: str, marks: Options, *, has_foreign_form: bool = True
) -> Entry:
    """Builds the entry of a function object from its signature. `has_foreign_form` accepts verl's form."""
    signature = list(inspect.signature(function).parameters.values())
    keyword_only = [p for p in signature if p.kind is p.KEYWORD_ONLY]
    positional = [p for p in signature if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    is_foreign = has_foreign_form and not keyword_only
    foreign = [p for p in positional if p.default is not REQUIRED and is_foreign and p.name not in FIELDS]
    return Entry(
        kind=kind,
        name=name,
        target=f"{function.__module__}:{function.__qualname__}",
        parameters=tuple(p.name for p in positional if p not in foreign),
        options={p.name: p.default for p in (*keyword_only, *foreign)},
        doc=inspect.getdoc(function) or "",
        marks=dict(marks),
        accepts_any_option=any(p.kind is p.VAR_KEYWORD for p in signature),
        takes={
            p.name: read(p.annotation, vars(inspect.getmodule(function) or builtins))
            for p in (*keyword_only, *foreign)
            if p.annotation is not p.empty
        },
        function=function,
    )


def trainer_of(command: str) -> Entry:
    """Returns the trainer of a command. The name of a trainer that does not ship with whet is its command: the name of
    an entry point, or a target with an absolute file path.  Raises: RegistryError."""
    entry = TRAINERS[command]
    location, colon, name = command.rpartition(":")
    whole = str(Path(location).expanduser().resolve()) if location.endswith(".py") else location
    return entry if entry.name in TRAINERS.shipped else replace(entry, name=f"{whole}{colon}{name}")


def _alias_entries(entry: Entry, aliases: Mapping[str, Options] | Sequence[str]) -> list[Entry]:
    presets = aliases if isinstance(aliases, Mapping) else {alias: {} for alias in aliases}
    return [
        replace(entry, name=alias, alias_of=entry.name, options={**entry.options, **preset})
        for alias, preset in presets.items()
    ]


@contextmanager
def loading(name: str, target: str) -> Iterator[None]:
    """Converts errors of the block, which imports the target of an entry point, to RegistryError."""
    try:
        yield
    except RegistryError as error:
        raise error.at(f"entry point {name}") from error
    except Exception as error:  # code of an installed package
        change = "correct the package, or uninstall it"
        raise RegistryError(f"entry point {name}", f"{target}: {describe(error)}", change=change) from error


@cache
def entry_points() -> dict[str, dict[str, str]]:
    """Returns targets by group and name: entry points of installed packages in groups that begin with `whet.`."""
    from importlib import metadata  # searching the installed packages takes longer than the rest of `import whet`

    found: dict[str, dict[str, str]] = {}
    for each in (point for package in metadata.distributions() for point in package.entry_points):
        if each.group.startswith("whet."):
            found.setdefault(each.group, {})[each.name] = each.value
    return found


def _read_shipped(registry: Registry) -> dict[str, Entry]:
    """Reads the entries of the functions with the registry's decorator from the source files of its folder."""
    found: dict[str, Entry] = {}
    offered = [_module_file(target) for target in targets(registry.decorator.removeprefix("register_"))]
    for module, node, use, decorator in [
        *([] if registry.folder is None else _decorated(registry.folder)),
        *chain(*map(_decorated_in, dict.fromkeys(offered))),
    ]:
        if decorator == registry.decorator:
            marks = {keyword.arg: ast.literal_eval(keyword.value) for keyword in use.keywords if keyword.arg}
            aliases = marks.pop("aliases", ())
            own = registry.entry_of(_without_body(node), ast.literal_eval(use.args[0]), marks)
            entry = replace(own, target=f"{module}:{node.name}", function=None)
            found |= {each.name: each for each in (entry, *_alias_entries(entry, aliases))}
    return found


@cache
def _decorated(folder: str) -> list[tuple[str, Definition, ast.Call, str]]:
    """Lists all decorated definitions in a folder of whet: module, definition, decorator call and decorator name."""
    return [each for path in sorted((PACKAGE / folder).rglob("*.py")) for each in _decorated_in(path)]


@cache
def _decorated_in(path: Path) -> list[tuple[str, Definition, ast.Call, str]]:
    source = path.read_text(encoding="utf-8")
    if "@register_" not in source:  # parsing the file would take far longer
        return []
    module = ".".join(("whet", *path.relative_to(PACKAGE).with_suffix("").parts))
    nodes = [node for node in ast.parse(source).body if isinstance(node, Definition)]
    uses = [(node, use) for node in nodes for use in node.decorator_list if isinstance(use, ast.Call)]
    return [(module, node, use, ast.unparse(use.func).rsplit(".", 1)[-1]) for node, use in uses]


def _module_file(target: str) -> Path:
    """Returns the source file of a target in whet."""
    return PACKAGE.parent.joinpath(*target.partition(":")[0].split(".")).with_suffix(".py")


def _without_body(node: Definition) -> Callable[..., Any]:
    """Builds a function or class from a definition's signature and docstring, without importing its file."""

    def strip(each: Definition) -> ast.stmt:
        made = [strip(inner) for inner in each.body if isinstance(inner, ast.FunctionDef) and inner.name == "__init__"]
        each.body, each.decorator_list = [ast.Expr(ast.Constant(ast.get_docstring(each))), *made], []
        if isinstance(each, ast.ClassDef):
            each.bases = []
        elif each.args.kwonlyargs or each.name == "__init__":  # parameters before `*` are not options
            each.args.defaults = [ast.Constant(None) for _ in each.args.defaults]
        return each

    names: dict[str, Any] = {"__name__": fits.__module__}  # annotations of options use the names of whet.options
    exec(compile(ast.fix_missing_locations(ast.Module([strip(node)], [])), node.name, "exec"), names)
    found: Callable[..., Any] = names[node.name]
    return found


# In the order in which `whet algorithms` lists the kinds.
ADV_ESTIMATORS = Registry("advantage estimator", "algorithms", "register_adv_est")
WRAPPERS = Registry("CPO wrapper", "algorithms", "register_wrapper")
POLICY_LOSSES = Registry("policy loss", "algorithms", "register_policy_loss")
VALUE_LOSSES = Registry("value loss", "algorithms", "register_value_loss")
PREFERENCE_LOSSES = Registry("preference loss", "algorithms", "register_preference_loss", has_foreign_form=False)
POLICY_LOSSES.also = PREFERENCE_LOSSES  # applied to groups of responses
DIVERGENCES = Registry("divergence", "algorithms", "register_divergence", ("student", "teacher"))
AGGREGATIONS = Registry("aggregation", "algorithms", "register_aggregation")
KL_FORMS = Registry("KL form", "algorithms", "register_kl")
WEIGHTS = Registry("token weight", "algorithms", "register_weight")
REJECTIONS = Registry("rejection", "algorithms", "register_rejection")
FILTERS = Registry("filter", "algorithms", "register_filter")
REWARDS = Registry("reward", "rewards", "register_reward")
ENVIRONMENTS = Registry("environment", "environments", "register_environment")
TOOLS = Registry("tool", None, "register_tool", has_foreign_form=False)
TOOL_PARSERS = Registry("tool parser", None, "register_tool_parser", ("text", "schemas"))
SAMPLERS = Registry("sampler", "data", "register_sampler", ("prompts", "epoch", "seed", "total_draws"))
ENGINES = Registry("training engine", "engines", "register_engine", ("role", "process_group", "device"))
ROLLOUT_ENGINES = Registry(  # marks: compiles, and those of `requirement` in whet/rollout/requirements.py
    "rollout engine",
    "rollout",
    "register_rollout",
    ("dtype", "max_batch_size", "load_tokenizer", "device", "num_devices", "model", "cache_room", "span"),
)
KINDS = tuple(each for each in list(globals().values()) if isinstance(each, Registry))
# `whet algorithms` does not list these.
HINTS = Registry("hint source", "trainers", "register_hint", ("groups", "sources", "chat"))
ENCODERS = Registry("encoder", "models", "register_encoder", has_foreign_form=False)  # names: MODEL_TYPE/KIND
TRAINERS = Registry("trainer", "trainers", "register_trainer", ("config",))  # marks: config, setup, frozen_models, ...
PROVIDERS = Registry("provider of a column", "trainers", "register_provider", ("batch", "sources"))  # names: columns
TRACKERS = Registry("tracker", "tracking", "register_tracker", ("run",))  # marks: package
SANDBOXES = Registry("sandbox", None, "register_sandbox", ("address",))
COMMANDS = Registry("command", None, "register_command")  # marks: panel, settings, exits
# Functions of plugins that the core calls by name; `plugin_names.csv` has the names.
PARTS = Registry("part", None, "register_part", has_foreign_form=False)

register_adv_est = ADV_ESTIMATORS.register
register_policy_loss = POLICY_LOSSES.register
register_value_loss = VALUE_LOSSES.register
register_preference_loss = PREFERENCE_LOSSES.register
register_divergence = DIVERGENCES.register
register_aggregation = AGGREGATIONS.register
register_kl = KL_FORMS.register
register_filter = FILTERS.register
register_weight = WEIGHTS.register
register_rejection = REJECTIONS.register
register_wrapper = WRAPPERS.register
register_hint = HINTS.register
register_reward = REWARDS.register
register_environment = ENVIRONMENTS.register
register_tool = TOOLS.register
register_tool_parser = TOOL_PARSERS.register
register_sampler = SAMPLERS.register
register_engine = ENGINES.register
register_rollout = ROLLOUT_ENGINES.register
register_encoder = ENCODERS.register
register_trainer = TRAINERS.register
register_tracker = TRACKERS.register
register_sandbox = SANDBOXES.register
register_command = COMMANDS.register
register_part = PARTS.register
