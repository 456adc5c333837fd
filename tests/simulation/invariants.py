# SPDX-License-Identifier: Apache-2.0
"""The 20 invariants of asynchronous rollouts, each a named function.

Those of the machines' state are checked after every event; those of a thing (a token, a trajectory, a batch) when it
comes to be, in the event that made it. Nothing is checked later than the event that could break it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

from tests.simulation.actors import (
    CONNECTIONS,
    END,
    LENGTHS,
    Load,
    Replica,
    Running,
    log_probs_of,
    mixed,
    position_of,
    token_at,
    version_of,
)
from tests.simulation.synchronous import synchronous_steps
from whet.keyed import key
from whet.rollout.fleet import Fleet
from whet.rollout.flow import HandOut
from whet.rollout.protocol import Request
from whet.types import Trajectory

if TYPE_CHECKING:
    from tests.simulation.world import Saved, World

ALL = frozenset(range(1, 21))
LATEST = 4000.0  # virtual seconds in which a run must end
CHECKS: dict[str, list[tuple[int, Callable[..., None]]]] = {}
Check = Callable[..., None]


class InvariantError(AssertionError):
    """An invariant that does not hold."""

    def __init__(self, number: int, message: str) -> None:
        super().__init__(f"invariant {number}: {message}")
        self.number = number


def holds(number: int, *moments: str) -> Callable[[Check], Check]:
    """Registers a check of an invariant at moments."""

    def register(check: Check) -> Check:
        for moment in moments:
            CHECKS.setdefault(moment, []).append((number, check))
        return check

    return register


def require(number: int, condition: object, message: str) -> None:
    """Raises: InvariantError unless the condition holds."""
    if not condition:
        raise InvariantError(number, message)


def _places(world: World) -> list[str]:
    """The uids of all prompts that are somewhere."""
    stream = world.flow
    handed_out = [stream.training] if stream.training and stream.training.step > world.version else []
    somewhere = [*stream.queue, *world.trained, *world.dropped]
    return somewhere + [group.prompt.uid for each in handed_out for group in (*each.kept, *each.dropped)]


@holds(1, "event", "end")
def every_admitted_prompt_is_outstanding_taken_or_trained(world: World) -> None:
    """Each prompt that this trainer took from its source is in the queue, handed out, trained on, or was dropped by
    the filter; and in one place alone."""
    there = _places(world)
    missing = {f"0:{number}" for number in range(world.restored_cursor, world.source.cursor)}.difference(there)
    require(1, not missing, f"prompts {sorted(missing)} are nowhere")
    require(1, len(there) == len(set(there)), f"a prompt is in two places: {sorted(there)}")


@holds(2, "restore", "event")
def so_it_is_after_a_restore(world: World, saved: Saved | None = None) -> None:
    """The same of the prompts that a trainer before the last kill took."""
    missing = {f"0:{number}" for number in range(world.restored_cursor)}.difference(_places(world))
    require(2, not missing, f"prompts {sorted(missing)} are nowhere behind a restore")


@holds(3, "restore")
def finished_untrained_groups_survive_a_restore(world: World, saved: Saved) -> None:
    """Each group that was complete when the checkpoint was written is complete again, with equal trajectories."""
    queue = world.flow.queue
    for uid, group in saved.complete.items():
        require(3, uid in queue and queue[uid].is_kept, f"group {uid} was complete, and is not behind a restore")
        found = queue[uid].group(queue[uid].scored)
        require(3, found.trajectories == group.trajectories, f"group {uid} changed in the checkpoint")


@holds(4, "trajectory")
def each_stamp_equals_the_weights_that_made_the_token(world: World, trajectory: Trajectory) -> None:
    """Checks stamps: the token itself names the version that made it, and contains a hash of the weights."""
    step = _step(world, trajectory)
    for index, turn in enumerate(trajectory.turns):
        stamps = [version for version, count in turn.versions for _ in range(count)]
        made = [version_of(token) for token in turn.token_ids]
        require(4, stamps == made, f"{trajectory.uid} turn {index} is stamped {stamps}, made by {made}")
        drawn = key(5, "rollout", step, trajectory.prompt.uid, trajectory.sample, index)
        expected = [
            token_at(drawn, position_of(t), version_of(t), world.weights[version_of(t)]) for t in turn.token_ids
        ]
        require(4, expected == list(turn.token_ids), f"{trajectory.uid} turn {index} has tokens of other weights")


def _step(world: World, trajectory: Trajectory) -> int:
    """The step that names the draws of a trajectory."""
    return world.flow.queue[trajectory.prompt.uid].step


@holds(5, "hand_out")
def no_token_is_older_than_the_staleness_allows(world: World, handed_out: HandOut) -> None:
    """Token by token; of a fractional bound at most that share of a batch is at the last version allowed."""
    k, sampled_by = world.plan.staleness, world.version
    lags = [
        max(
            (sampled_by - version_of(t) for each in group.trajectories for u in each.turns for t in u.token_ids),
            default=0,
        )
        for group in handed_out.kept
    ]
    require(5, max(lags, default=0) <= math.ceil(k), f"step {handed_out.step} trains on lags {lags}, {k} allowed")
    if k % 1:
        oldest = sum(lag > k for lag in lags)
        require(
            5, oldest <= world.plan.batch_size * (k % 1), f"step {handed_out.step}: {oldest} groups at the last lag"
        )


@holds(6, "trajectory")
def positions_are_those_from_0_on(world: World, trajectory: Trajectory) -> None:
    """Each turn has the tokens of the positions 0 to n - 1, each once, with their own log-probs."""
    for turn in trajectory.turns:
        positions = [position_of(token) for token in turn.token_ids]
        require(6, positions == list(range(len(positions))), f"{trajectory.uid} has positions {positions}")
        require(6, turn.log_probs == log_probs_of(turn.token_ids), f"{trajectory.uid} has log-probs of other tokens")


@holds(7, "trajectory")
def the_length_is_what_was_sampled_within_the_budget(world: World, trajectory: Trajectory) -> None:
    """A turn that stopped has the length that its key draws, whatever its attempts; all turns and the text between
    them are within the budget."""
    step, most = _step(world, trajectory), world.plan.max_new_tokens
    for index, turn in enumerate(trajectory.turns):
        drawn = LENGTHS[key(5, "rollout", step, trajectory.prompt.uid, trajectory.sample, index) % len(LENGTHS)]
        length, ended = len(turn.token_ids), turn.token_ids[-1] & 0xFFF == END
        right = length == drawn if turn.finish_reason == "stop" else length < drawn
        require(
            7, right and ended == (turn.finish_reason == "stop"), f"{trajectory.uid} has {length} of {drawn} tokens"
        )
        require(7, length <= most, f"{trajectory.uid} has {length} tokens in a turn, {most} allowed")


@holds(7, "refuse")
def nothing_is_sampled_behind_the_end(world: World, request: Request) -> None:
    """An attempt begins in front of the end of its response."""
    raise InvariantError(7, f"{request.uid} is over, and was to go on behind {len(request.sampled_ids)} tokens")


@holds(8, "sample")
def nothing_is_sampled_while_weights_are_replaced(world: World, replica: Replica, each: Running) -> None:
    """Checks that a replica decodes nothing while it loads: its requests wait, and the router gives it none."""
    require(8, not replica.is_loading, f"replica {replica.number} samples {each.request.uid} while it loads")


@holds(9, "load")
def a_replica_never_goes_back_a_version(world: World, replica: Replica, load: Load) -> None:
    """Within one trainer. A restored one begins with the version of its checkpoint."""
    is_same = replica.version is not None and replica.version_incarnation == load.generation // CONNECTIONS
    went_back = is_same and load.version < (replica.version or 0)
    require(9, not went_back, f"replica {replica.number} goes from version {replica.version} back to {load.version}")


@holds(9, "event")
def the_router_knows_the_version_of_each_replica(world: World) -> None:
    """A replica that gets requests has the version that the router believes, unless it is gone and not yet missed."""
    for number, each in world.router.ranks.items():
        replica = world.replicas[number]
        if replica.is_alive and replica.process == world.connected.get(number) and each.is_ready:
            found, believed = (replica.generation, replica.version), (each.generation, each.version)
            require(9, found == believed, f"replica {number} has {found}, not {believed}")


@holds(10, "event")
def permits_are_what_runs(world: World) -> None:
    """Checks shares by replica: the requests that count against its share are the unfinished ones that the router gave
    it; a request is at one replica or waits; no replica has more than its share."""
    router = world.router
    held = _permits(10, router)
    most = world.plan.most
    require(10, all(len(each) <= most for each in held.values()), f"more than {most}: {held}")
    sampling = {uid for uid in world.driver._sampling if uid not in router.flights}
    told = {event.uid for event in world.engine.events}
    require(10, sampling <= told, f"episodes wait for {sorted(sampling - told)}, which nobody samples")


@holds(11, "event")
def outstanding_groups_stay_within_the_bound(world: World) -> None:
    """B + floor(k B) groups, and `extra` ones: admitted, not dropped, and not part of the weights that sample."""
    ahead = math.floor(world.plan.staleness * world.plan.batch_size) + math.ceil(
        world.plan.extra * world.plan.batch_size
    )
    most = world.plan.batch_size + ahead
    stream = world.flow
    live = sum(each.is_kept is not False for each in stream.queue.values())
    found = live + (len(stream.training.kept) if stream.training else 0)
    require(11, found <= most, f"{found} groups are outstanding, {most} allowed")


@holds(12, "hand_out")
def whole_groups_are_handed_out(world: World, handed_out: HandOut) -> None:
    """Each has n trajectories, one of each sample, scored or failed; a step has all its groups, or the filter dropped
    some of the (1 + `max_refills`) B groups that it may take."""
    for group in (*handed_out.kept, *handed_out.dropped):
        samples = [each.sample for each in group.trajectories]
        require(12, samples == list(range(world.plan.n)), f"group {group.prompt.uid} has samples {samples}")
        is_scored = all(each.failure is not None or each.accuracy is not None for each in group.trajectories)
        require(12, is_scored, f"group {group.prompt.uid} is not scored")
        require(12, all(each.prompt.uid == group.prompt.uid for each in group.trajectories), "a group of two prompts")
    kept, size = len(handed_out.kept), world.plan.batch_size
    taken, group_filter = kept + len(handed_out.dropped), world.flow.group_filter
    most = (
        size if group_filter is None else (size + math.ceil(size * world.plan.extra)) * (1 + group_filter.max_refills)
    )
    require(12, taken <= most, f"step {handed_out.step} took {taken} groups, {most} allowed")
    is_exhausted = taken == most or (world.plan.staleness == 0 and group_filter is not None)
    require(12, kept == size or is_exhausted, f"{kept} groups in a step that took {taken} of {most}")


@holds(13, "hand_out")
def trained_order_is_the_order_of_admission(world: World, handed_out: HandOut) -> None:
    """No group overtakes another, and the filter alone drops some: by their own scores, never by their age."""
    order = [group.prompt.index for group in handed_out.kept]
    # A kill gives back the groups that were handed out and not trained on, without those that the filter dropped.
    before = [int(uid.partition(":")[2]) for uid in world.trained]
    require(13, order == sorted(order), f"step {handed_out.step} has the order {order}")
    is_behind = min(order, default=math.inf) > max(before, default=-1)
    require(13, is_behind, f"{order} is trained behind {before}")
    for group in handed_out.dropped:
        values = [each.accuracy or 0.0 for each in group.trajectories if each.failure is None]
        require(13, world.plan.filters and not mixed(values), f"group {group.prompt.uid} was dropped without a reason")
    older = [each for each in world.flow.queue.values() if each.prompt.index < max(order, default=-1)]
    require(13, not older, f"step {handed_out.step} overtakes {[each.prompt.uid for each in older]}")


@holds(14, "time")
def the_run_makes_progress(world: World) -> None:
    """A run ends within bounded virtual time, whatever fails on the way. whet's data has no end (epochs follow each
    other); a run ends behind its last step, for which see the next check."""
    require(14, world.now < LATEST, f"at virtual time {world.now:.0f} step {world.version} is done, {world.state}")


@holds(14, "end")
def the_last_step_ends_the_run(world: World) -> None:
    """No prompt was started for a step behind the last, and all steps were trained."""
    steps = [each.step for each in world.flow.queue.values()]
    require(14, max(steps, default=0) <= world.plan.steps, f"prompts are started for steps {steps}")
    require(14, sorted(world.batches) == list(range(1, world.plan.steps + 1)), f"trained {sorted(world.batches)}")


@holds(15, "end")
def the_same_seed_gives_the_same_log(world: World) -> None:
    """A second run of the schedule has an equal log. It is compared at the end, for one seed in ten."""
    if world.plan.seed % 10 == 0 and world.compares:
        again = type(world)(world.plan, frozenset())
        again.compares = False
        require(15, again.run() == world.log.hexdigest(), f"two runs of seed {world.plan.seed} differ")


@holds(16, "step")
def an_environment_steps_once_a_turn(world: World, uid: str, turn: int) -> None:
    """In the life of a trainer. An episode in its second turn or later begins again behind a restore, with a new
    environment, as the checkpoint has no state of environments."""
    require(16, world.steps[uid, turn] == 1, f"the environment of {uid} was stepped twice in turn {turn}")


@holds(16, "trajectory")
def turns_are_steps(world: World, trajectory: Trajectory) -> None:
    """As many steps as turns."""
    episode = f"rollout:{_step(world, trajectory)}:{trajectory.uid}"
    steps = sum(turn > 0 for uid, turn in world.steps if uid == episode)
    require(16, steps == len(trajectory.turns), f"{steps} steps in {len(trajectory.turns)} turns of {trajectory.uid}")


@holds(17, "sample")
def the_version_of_a_cached_prefix_is_that_of_the_request(world: World, replica: Replica, each: Running) -> None:
    """The cache is the engine's, and simulated here; the conformance suite holds real ones to it. The router's part is
    checked with it: it forgets where prefixes were read when weights change."""
    require(17, each.cache == replica.version, f"{each.request.uid} reads keys of version {each.cache}")


@holds(17, "event")
def no_home_is_remembered_from_older_weights(world: World) -> None:
    """The router sends nobody to a replica for a prefix that it read under older weights."""
    version, homes = world.homes
    now = {(each.generation, prefix) for each in world.router.ranks.values() for prefix in each.prefixes}
    require(17, world.router.version == version or not homes & now, "homes of older weights are remembered")
    world.homes = world.router.version, now


@holds(18, "hand_out")
def without_staleness_steps_are_those_of_the_synchronous_loop(world: World, handed_out: HandOut) -> None:
    """Equal groups, tokens and weights. With `extra` groups the order in which they end decides."""
    if world.plan.staleness == 0 and not world.plan.extra:
        kept, weights = synchronous_steps(world.plan)[handed_out.step - 1]
        found = handed_out.kept or handed_out.dropped[: handed_out.wanted]
        require(18, found == kept, f"step {handed_out.step} differs from the synchronous one")
        same = world.weights[world.version] == weights
        require(18, same, f"weights {world.version} differ from the synchronous ones")


@holds(19, "play")
def a_rank_plays_an_episode_from_its_reset_on(world: World, turn: int | None, method: str) -> None:
    """Whatever ranks were lost: it gets no turn of an episode that it did not begin, and begins none twice."""
    require(19, (turn is None) == (method == "start"), f"a rank gets {method} behind turn {turn}")


@holds(19, "event")
def open_episodes_are_on_ranks_that_are_not_missed(world: World) -> None:
    """Each with one, or waiting."""
    _permits(19, world.placed["environments"].fleet)
    open_ = {each.id for each in world.driver.episodes if not each.stage.is_silent}
    there = set(world.placed["environments"].fleet.flights)
    require(19, open_ == there, f"episodes {sorted(open_)} are open, and {sorted(there)} on ranks")


@holds(20, "scored")
def what_is_scored_is_told_once(world: World, uid: str) -> None:
    """Whatever ranks were lost, and however often they say it."""
    require(20, uid in world.scoring, f"the outcomes {uid} come twice")


@holds(20, "event")
def what_is_to_be_scored_is_somewhere(world: World) -> None:
    """With one rank, or waiting."""
    _permits(20, world.placed["rewards"].fleet)
    there = set(world.placed["rewards"].fleet.flights)
    require(20, there == set(world.scoring), f"{sorted(world.scoring)} are to be scored, and {sorted(there)} on ranks")


def _permits(number: int, fleet: Fleet) -> dict[int, set[str]]:
    """Requires that a task is with one rank or waits.  Returns the tasks by rank."""
    by_rank: dict[int | None, set[str]] = {rank: set() for rank in (None, *fleet.ranks)}
    for uid, flight in fleet.flights.items():
        by_rank.setdefault(flight.rank, set()).add(uid)
    require(number, by_rank.pop(None) == set(fleet.waiting), "what waits is not what no rank has")
    held = {rank: set(each.given) for rank, each in fleet.ranks.items()}
    require(number, held == by_rank, f"permits {held}, running {by_rank}")
    return held


def named(number: int) -> list[str]:
    """The names of the checks of an invariant."""
    return sorted({check.__name__ for checks in CHECKS.values() for each, check in checks if each == number})
