# SPDX-License-Identifier: Apache-2.0
"""`whet serve MODEL --tinker`: loads a model, and serves it to clients of the tinker SDK."""

from __future__ import annotations

import logging
from contextlib import ExitStack
from functools import cache, partial
from pathlib import Path
from typing import Literal, cast

from whet import devices
from whet.checkpoints.export import find_model, model_folder
from whet.errors import ConfigError
from whet.models.load import load_tokenizer, torch_dtype
from whet.planning.dtypes import choose
from whet.plugins.serving.app import ServeSettings
from whet.plugins.serving.engine_thread import EngineThread
from whet.plugins.serving.server import HttpServer, bound_to, reader_of, sampling_of
from whet.plugins.serving.tinker.app import Served, TinkerApp
from whet.plugins.serving.tinker.models import Models
from whet.plugins.serving.tinker.samplers import Samplers, Shared
from whet.plugins.serving.tinker.store import Store
from whet.plugins.serving.tinker.training import Base, TrainingRanks
from whet.rollout.build import rollout_engine
from whet.rollout.protocol import RolloutEngine, SharesModule
from whet.tracking.console import long_phase

log = logging.getLogger(__name__)


def serve(settings: ServeSettings) -> None:
    """Serves until a signal.  Raises: WhetError if it cannot start or continue."""
    with ExitStack() as stack:
        bound = stack.enter_context(bound_to(settings.host, settings.port))
        with long_phase("loading the model"):
            source, trusted = find_model(settings.model), settings.trust_remote_code
            folder = stack.enter_context(model_folder(source, trust_remote_code=trusted))
            dtype = choose(settings.dtype, "--dtype")
            own = Path(settings.model).expanduser()
            reader = reader_of(settings, folder, own.resolve().name if own.exists() else settings.model)
            base, ranks = Base(folder, trusted), None
            if settings.ranks > 1:
                ranks = TrainingRanks(base, settings.ranks)
                stack.callback(ranks.close)
            store = Store(Path(settings.folder).expanduser().resolve())
            stack.enter_context(store.opened())
            given = dtype, store, reader.context, devices.here(), settings.train_engine, ranks
            models = Models(base, reader.name, *given)
            samplers = Samplers(_engine(settings, folder, dtype), models.module)
        thread = EngineThread(cast(RolloutEngine, samplers), on_death=lambda error: setattr(http, "should_exit", True))
        where = str(Path(folder).resolve()) if own.exists() else settings.model
        served = Served(frozenset({settings.model, where}), where, str(models.base.config.model_type), reader)
        app = TinkerApp(served, models, thread, samplers, settings)
        http = HttpServer(app.asgi, settings, thread)
        host, port = bound.getsockname()[:2]
        log.info("serving %s to the tinker SDK, as %r, on http://%s:%d", source, reader.name, host, port)
        log.info("checkpoints are in %s", store.folder)
        http.run_on(bound)


def _engine(settings: ServeSettings, folder: str, dtype: Literal["float32", "bfloat16"]) -> Shared:
    """Returns the engine that samples.  Raises: ConfigError if it cannot sample from a module of this process."""
    rollout, model = sampling_of(settings, folder, dtype)
    load = cache(partial(load_tokenizer, folder, trust_remote_code=settings.trust_remote_code))
    engine = rollout_engine(rollout, torch_dtype(dtype), load, devices.here(), model)
    if not isinstance(engine, SharesModule):
        raise ConfigError("--engine", settings.engine, "native or hf, which sample from modules of the process")
    return cast(Shared, engine)
